"""Two sides timed in turn, in one process: what disturbs one disturbs the other."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

from pyrofl.arguments import Count, checked

Side = Callable[[], object]
"""Does the work once."""


class Measured(NamedTuple):
    """How long two sides took; a row of bench.csv."""

    case: str
    ours_s: float  # median
    other_s: float  # median
    ratio: float  # median of the other's time over ours in the same turn
    low: float  # smallest of these ratios
    high: float  # largest


@checked
def alternate(case: str, ours: Side, other: Side, turns: Count) -> Measured:
    """Run both sides in turn, after one turn that does not count.

    Raises:
        ValueError: if there is no turn that counts.
    """
    pairs = [(_seconds(ours), _seconds(other)) for _ in range(turns + 1)][1:]
    return summed_up(case, pairs)


def summed_up(case: str, pairs: list[tuple[float, float]]) -> Measured:
    """Summarise seconds (ours, other) of every turn.

    >>> summed_up("a", [(1.0, 2.0), (1.0, 4.0), (2.0, 6.0)])
    Measured(case='a', ours_s=1.0, other_s=4.0, ratio=3.0, low=2.0, high=4.0)
    """
    ratios = [other / ours for ours, other in pairs]
    ours_s, other_s = (median(side) for side in zip(*pairs, strict=True))
    return Measured(case, ours_s, other_s, median(ratios), min(ratios), max(ratios))


def _seconds(side: Side) -> float:
    start = perf_counter()
    side()
    return perf_counter() - start
