"""What figures show of many rows, panels, curves and dots, and how they state the rest.

Rows, such as clients, have names if they are at most `MAX_NAMED_ROWS`. Otherwise they are sorted,
those at both ends have names, and those between are drawn small; a label states their number.
Panels that do not fit on a page are left out, and the title states how many are shown. Curves
without a color of their own are pale, and the legend states their number, and that of missing
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pyrofl.figures.style import MAX_HEIGHT, plain, pt, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")

MAX_NAMED_ROWS = 60  # most rows that all have names
MAX_LARGE_DOTS = 150  # dots that are drawn large


def refuse_lengths(**values: Any) -> None:
    """Raise ValueError if the lengths of the values differ or are 0; None is no value."""
    sizes = {name: len(value) for name, value in values.items() if value is not None}
    if len({*sizes.values()}) > 1 or not all(sizes.values()):
        sizes_text = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"{sizes_text}; expected the same length, at least 1")


def refuse_outside(name: str, values: Any, low: float, high: float = np.inf) -> None:
    """Raise ValueError if a value is outside an interval; NaN is not."""
    array = np.asarray(values, dtype=float)
    if bool((wrong := (array < low) | (array > high)).any()):
        expected = f"at least {low:g}" if high == np.inf else f"between {low:g} and {high:.4g}"
        raise ValueError(f"{name} has {array[wrong][0]:.4g}; expected numbers {expected}")


def refuse_swapped(name: str, low: Any, high: Any) -> None:
    """Raise ValueError if the lower end of an interval is above its upper end."""
    if bool((np.asarray(low, dtype=float) > np.asarray(high, dtype=float)).any()):
        raise ValueError(f"{name} has a lower end above the upper end; expected mean, low, high")


def named() -> int:
    """Return the most rows that all have names: fewer with larger type, as on slides."""
    return int(MAX_NAMED_ROWS / pt(1) ** 2)


@dataclass(frozen=True)
class FigureRows:
    """Places of rows in a figure, from top to bottom.

    Attributes:
        order: [N], the row at each place.
        at: [N], heights of the places.
        step: [N], distances between the places.
        ends: number of rows with names at each end; 0 if all rows have names.
    """

    order: Any
    at: Any
    step: Any
    ends: int = 0

    def parts(self) -> Iterator[tuple[Any, float]]:
        """Yield places of rows that are drawn alike, and the factor of their size."""
        every = np.arange(len(self.order))
        if self.ends:
            yield every[self.ends : -self.ends], 0.35
            every = np.concatenate([every[: self.ends], every[-self.ends :]])
        yield every, 1.0  # the last, so that it is on top and in the legend

    def label(self, axes: Axes, names: Sequence[str], by: str, what: str = " clients") -> None:
        """Write the names of the rows, and how many rows have none.

        Args:
            axes: of the rows.
            names: of the rows, in their own order.
            by: what the rows are sorted by, if there are many.
            what: what a row is, in the plural, after a space.
        """
        axes.set_ylim(self.at[-1] + 0.6, -0.6)
        spread = self.at[-1] + 1
        size = pt(9) if spread <= 40 else 7 * pt(1) ** 0.5
        *_, (shown, _) = self.parts()
        at = list(self.at[shown])
        labels = [plain(short(names[int(self.order[i])], 40)) for i in shown]
        if self.ends:
            low, high = self.at[self.ends] - 0.5, self.at[-self.ends] - 0.5
            axes.axhspan(low, high, color="#f4f4f4", linewidth=0, zorder=0)
            count = len(self.order) - 2 * self.ends
            at.insert(self.ends, (low + high) / 2)
            labels.insert(self.ends, f"{count:,} more{what},\nsorted by {by},\nnot named")
        axes.set_yticks(at, labels, fontsize=size)
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)


def rows(key: Any, most: int | None = None) -> FigureRows:
    """Return the places of rows: in their own order, or, if there are many, sorted.

    Args:
        key: [N], what many rows are sorted by, the largest first; NaN are in the middle.
        most: rows that all have names; None is `named()`.
    """
    key = np.asarray(key, dtype=float)
    most = named() if most is None else max(8, most)
    if len(key) <= most:
        every = np.arange(len(key))
        return FigureRows(every, every.astype(float), np.ones(len(key)))
    ends, middle = most // 4, most // 3
    order = np.argsort(-key, kind="stable")
    finite, unknown = order[np.isfinite(key[order])], order[~np.isfinite(key[order])]
    half = max(len(finite) // 2, len(finite) - ends)
    order = np.concatenate([finite[:half], unknown, finite[half:]])
    step = np.ones(len(key))
    step[ends:-ends] = middle / (len(key) - 2 * ends)
    return FigureRows(order, np.cumsum(step) - 0.5 * (step + 1), step, ends)


def height(count: float, lanes: float = 1.0) -> float:
    """Return the height in inches of a figure with rows of one or several lanes."""
    if count > named():
        count = 5 / 6 * named()  # see `rows`
    count *= max(1.0, lanes)
    return float(min(MAX_HEIGHT, 1.3 + max(0.14 if count > 40 else 0.23, 1.5 / count) * count))


def some(values: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the values, evenly spaced, with the first and the last.

    >>> some(range(10), 4)
    [0, 3, 6, 9]
    """
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return [values[i] for i in places]


def fitting(
    every: Iterable[T], columns: int, tall: float, what: str = "panels"
) -> tuple[list[T], str]:
    """Return panels that fit on a page, evenly spaced, and text on how many these are.

    Args:
        every: the panels.
        columns: of panels on the page.
        tall: inches of a panel.
        what: what a panel shows, in the plural.
    """
    values = list(every)
    shown = some(values, columns * max(1, int(MAX_HEIGHT / tall)))
    return shown, part(shown, values, what)


def worst(
    every: Sequence[T], key: Any, columns: int, tall: float, what: str = "panels"
) -> tuple[list[T], str]:
    """Return the panels with the largest keys, as `fitting`, in their own order."""
    most = columns * max(1, int(MAX_HEIGHT / tall))
    first = np.sort(np.argsort(-np.nan_to_num(np.asarray(key, dtype=float)), kind="stable")[:most])
    shown = [every[int(i)] for i in first]
    return shown, part(shown, every, f"{what}, those that deviate most")


def part(shown: Sequence[Any], every: Sequence[Any], what: str) -> str:
    """Return text that states how many are shown, or "" if all are.

    >>> part([1, 2], [1, 2, 3], "clients")
    ' (2 of 3 clients)'
    """
    return f" ({len(shown):,} of {len(every):,} {what})" if len(shown) < len(every) else ""


def missing(*values: Any) -> str:
    """Return text that states how many places have a missing value, or "" if none has.

    >>> missing([1.0, float("nan")], [float("nan")] * 2)
    '2 missing values (NaN) not shown'
    """
    every = np.array([np.asarray(v, dtype=float) for v in values])
    count = int((~np.isfinite(every)).any(0).sum())
    kinds = "NaN or infinite" if np.isinf(every).any() else "NaN"
    return f"{count:,} missing value{'s' * (count > 1)} ({kinds}) not shown" if count else ""


def notes(*texts: str) -> str:
    """Join those texts that are not empty."""
    return "; ".join(text for text in texts if text)


def dots(count: int) -> dict[str, Any]:
    """Return the size and the opacity of dots: small and pale where there are many."""
    return {"s": 24, "alpha": 0.8} if count <= MAX_LARGE_DOTS else {"s": 7, "alpha": 0.4}
