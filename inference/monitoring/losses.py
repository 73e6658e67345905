"""Loss history of a run, to detect divergence; `status` has the rules."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyrofl.inference.definition.metadata import INCOMPARABLE, MetadataByPattern, marked_names
from pyrofl.tensors import Tensors, matches

MIN_RISEN_ROUNDS = 2  # rounds of a risen loss
# Tolerated rise of a loss, in its sizes and in its decreases per round.
MAX_RISE_IN_SIZES, MAX_RISE_IN_GAINS = 2, 2
# Of an unbounded decrease: sizes, fraction, minimum rounds.
UNBOUNDED_SIZES, UNBOUNDED_FRACTION, MIN_UNBOUNDED_ROUNDS = 100, 0.9, 6


class Divergence(NamedTuple):
    """Divergence of a run: its first round and its reason."""

    since: int
    why: str

    def __str__(self) -> str:
        return f"since round {self.since}: {self.why}"


class Losses:
    """Loss history of all gradient steps, rounds and clients, to detect divergence."""

    def __init__(self, copies: int = 1) -> None:
        self.copies = copies
        self.steps: dict[str, _Step] = {}

    def add(self, number: int, begun: Tensors, loss: Tensors) -> None:
        """Add the clients' first and mean losses of a round, with NaN for untrained clients."""
        for name, first in begun.items():
            step = self.steps.setdefault(name, _Step(self.copies, len(first)))
            # [R, J], copies of the federation and their clients.
            step.add(number, *(v.double().reshape(self.copies, -1) for v in (first, loss[name])))

    def risen(self) -> list[Divergence | None]:
        """For each federation copy, return its first divergence by a rising loss, or None."""
        divergences: list[list[Divergence]] = [[] for _ in range(self.copies)]
        for name, step in self.steps.items():
            # Later phases may begin with a loss near zero, or with a large one.
            size = next(iter(self.steps.values())).begins[-1].abs()
            for c, (rounds, begin, level) in enumerate(step.risen(size)):
                if rounds >= min(MIN_RISEN_ROUNDS, len(step.numbers)):
                    why = f"the loss of {name} rose from {begin:.4g} to {level:.4g}"
                    divergences[c].append(Divergence(step.numbers[-rounds], why))
        return [min(some, default=None) for some in divergences]

    def fallen(self) -> list[Divergence | None]:
        """For each federation copy, return its first divergence by an unbounded loss, or None."""
        divergences: list[list[Divergence]] = [[] for _ in range(self.copies)]
        for name, step in self.steps.items():
            for c, (since, begin, level) in enumerate(step.fallen()):
                if since is not None:
                    why = f"the loss of {name} fell from {begin:.4g} to {level:.4g} without bound"
                    divergences[c].append(Divergence(since, f"{why}; check its sign"))
        return [min(some, default=None) for some in divergences]


class _Step:
    """Loss history of one gradient step in all rounds, to detect divergence."""

    def __init__(self, copies: int, clients: int) -> None:
        none = torch.full((copies, clients // copies), torch.nan, dtype=torch.float64)
        self.start = self.lowest = self.latest = none
        self.high = torch.zeros(copies, dtype=torch.bool)
        self.numbers: list[int] = []
        self.begins: list[Tensor] = []  # [R] each
        self.levels: list[Tensor] = []
        self.gains: list[Tensor] = []
        self.falls: list[Tensor] = []

    def add(self, number: int, first: Tensor, mean: Tensor) -> None:
        before, trained = self.latest, ~mean.isnan()
        self.start = torch.where(trained & self.start.isnan(), first, self.start)
        self.latest = torch.where(trained, mean, self.latest)
        finite = torch.where(self.latest.isfinite(), self.latest, torch.nan)
        self.lowest = self.lowest.fmin(self.start).fmin(finite)
        is_finite = self.start.isfinite() & finite.isfinite()
        begin, level, low = (_mean(v, is_finite) for v in (self.start, self.latest, self.lowest))
        self.numbers.append(number)
        self.begins.append(begin)
        self.levels.append(level)
        self.gains.append(begin - low)
        fall = _mean(before - self.latest, is_finite & before.isfinite())
        # A decrease from a risen level is not noise.
        self.falls.append(torch.where((fall > 0) & ~self.high, fall, torch.nan))
        self.high = level - begin > MAX_RISE_IN_SIZES * begin.abs() + begin - low

    def risen(self, size: Tensor) -> list[tuple[int, float, float]]:
        """For each federation copy, count the latest consecutive rounds with too high a loss.

        The first and the last level of the loss are returned too.
        """
        noise = torch.stack(self.falls).nanmedian(0).values.nan_to_num(0.0)  # [R]
        rise = torch.stack(self.levels) - torch.stack(self.begins)
        size = size.fmax(self.begins[-1].abs())
        above = (
            rise > MAX_RISE_IN_SIZES * size + torch.stack(self.gains) + MAX_RISE_IN_GAINS * noise
        )
        rounds = above.flip(0).long().cumprod(0).sum(0)  # [R]
        ends = (v.tolist() for v in (rounds, self.begins[-1], self.levels[-1]))
        return list(zip(*ends, strict=True))

    def fallen(self) -> list[tuple[int | None, float, float]]:
        """For each federation copy, return the round since which its loss falls without bound.

        The first and the last level of the loss are returned too.
        """
        levels, begin = torch.stack(self.levels), self.begins[-1]
        half, deep = len(levels) // 2, -UNBOUNDED_SIZES * begin.abs().clamp(min=1)
        earlier, later = levels[0] - levels[half], levels[half] - levels[-1]
        endless = (levels[-1] < deep) & (later >= UNBOUNDED_FRACTION * earlier) & (earlier > 0)
        first = (levels < deep).long().argmax(0).tolist()
        enough = len(levels) >= MIN_UNBOUNDED_ROUNDS
        return [
            (self.numbers[at] if falls and enough else None, a, b)
            for at, falls, a, b in zip(
                first, endless.tolist(), begin.tolist(), levels[-1].tolist(), strict=True
            )
        ]


def _mean(value: Tensor, is_known: Tensor) -> Tensor:
    """Return the mean over clients with known values, [R, J] -> [R]; NaN if there are none."""
    return torch.where(is_known, value, 0.0).sum(-1) / is_known.sum(-1)


def comparable(metadata: MetadataByPattern, begun: Tensors) -> Tensors:
    """Drop losses that cannot be compared between rounds, such as those of Markov chains."""
    marks = marked_names(metadata, INCOMPARABLE)
    return {n: v for n, v in begun.items() if not all(matches(p, marks) for p in n.split())}
