"""What became of a run: has it converged, is it still moving, or did it diverge?

Movement is that of what clients receive (not of names under "server/", the server's own accounts),
or of what they keep where the server holds nothing: from one merge to the next, in standard
deviations where `Centre` says what they are, otherwise as a share of the tensor's norm. A run has
converged if over its last 5 merges, and at least 3, nothing moved by more than 0.01 standard
deviations or 0.1% of its norm. Steps of constant length on minibatches hover, and so go on moving.

A run has diverged if

- nobody was merged in its last 3 rounds in which somebody was rejected and more than one client
  trained, or in any round, and that is not for silence alone; what is not finite is rejected; or
- the loss of a gradient step has risen, in its last 2 rounds:

      level - begin > 2 size + (begin - lowest) + 2 noise

  begin is the loss of the first step that a client ever made, level the mean of its last round,
  lowest the least of both so far: means over clients, each beside itself, so that it does not
  matter who takes part. size is |begin|, or that of the method's first step if it is larger, noise
  the median fall of the level from one round to the next, but for falls from where it should not
  be. So a loss must have lost all that it gained, and rise by twice its own size and more: one that
  creeps up is moving. A loss that rises as it should, see `INCOMPARABLE`, does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyrofl.inference.facts import INCOMPARABLE, Centre, Facts, marked, of_kind
from pyrofl.inference.loop.state import OneCopy, Round
from pyrofl.tensors import Tensors, cut, matches

LAST, LEAST, RISEN = 5, 3, 2  # merges that are looked at; rounds in which a loss has risen
HUGE = torch.finfo(torch.float64).max  # what is not finite has moved so far
SMALL = {"sd": 0.01, "norm": 0.001}
SIZES, NOISE = 2, 2  # of the loss, its own sizes and falls from round to round that are no rise

Kind = Literal["converged", "moving", "diverged"]
Unit = Literal["sd", "norm"]


Left = Any
"""What a round leaves, a `RoundRecord`: that knows this module."""


@dataclass(frozen=True)
class Verdict:
    """What became of a run; printed, it is a sentence.

    Attributes:
        kind: converged, moving or diverged.
        why: the rest of the sentence.
        merged: rounds in which the server merged something.
        tensor: that moves most, measured by what counts as small; "" if it is not known.
        moved: by how much in a round, the mean of the last ones.
        unit: of that, the tensor's standard deviation or its norm.
        since: round from which on it has diverged.
    """

    kind: Kind
    why: str
    merged: int
    tensor: str = ""
    moved: float | None = None
    unit: Unit | None = None
    since: int | None = None

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"{self.kind}{f' since round {self.since}' if self.since else ''}: {self.why}"


def verdict(records: Sequence[Left], facts: Facts) -> Verdict:
    """Judge a run by what its rounds left; facts are the method's."""
    moved = [record.moved for record in records if record.moved is not None]
    losses = Losses()
    for record in records:
        losses.add(record.number, record.begun, record.loss)
    if both := [found for found in (_stuck(records), *losses.risen()) if found]:
        found = min(both)
        return Verdict("diverged", found.why, len(moved), since=found.since)
    if not moved:
        why = "nobody was merged in any round, as nobody reported" if records else "no round yet"
        return Verdict("moving", why, 0)
    last, patterns = moved[-LAST:], " ".join(of_kind(facts, Centre))
    units: dict[str, Unit] = {n: "sd" if matches(n, patterns) else "norm" for n in last[-1]}
    if not units:
        return Verdict("moving", "how far is not known, nothing that is compared", len(moved))
    small = all(one.get(n, 1.0) <= SMALL[unit] for one in last for n, unit in units.items())
    mean = {n: sum(one.get(n, 1.0) / len(last) for one in last) for n in units}
    most = max(units, key=lambda n: mean[n] / SMALL[units[n]])
    facts_of = (len(moved), most, mean[most], units[most])
    if small and len(last) >= LEAST:
        least = f"{SMALL['sd']} sd or {SMALL['norm']:.1%}"
        why = f"in the last {len(last)} merges nothing moved by more than {least}"
        return Verdict("converged", why, *facts_of)
    return Verdict("moving", f"{most} by {_far(mean[most], units[most])} per round", *facts_of)


def _far(value: float, unit: Unit) -> str:
    shown, name = (value, "sd") if unit == "sd" else (100 * value, "%")
    return f"{shown:.0f} {name}" if 10 <= shown < 1e6 else f"{shown:.2g} {name}"


class Divergence(NamedTuple):
    """Since which round, and why."""

    since: int
    why: str

    def __str__(self) -> str:
        """Say it, after "diverged"."""
        return f"since round {self.since}: {self.why}"


def _stuck(records: Sequence[Left]) -> Divergence | None:
    """Find the rounds at the end in which all that came was bad."""
    bad = [r for r in records if r.rejected or r.moved is not None]  # not those of silence
    some = next((i for i, r in enumerate(reversed(bad)) if r.moved is not None), len(bad))
    last = bad[len(bad) - some :]
    whole = bool(last) and some == len(bad)
    several = len({i for r in last for i in r.trained}) > 1
    if not whole and not (some >= LEAST and several):
        return None
    when = "in any round" if whole else f"in the last {some} rounds"
    return Divergence(last[0].number, f"nobody was merged {when}; {last[-1].rejected[0]}")


class Losses:
    """What the losses of all rounds say, in each of R copies of a federation of J clients."""

    def __init__(self, copies: int = 1) -> None:
        """Begin."""
        self.copies = copies
        self.steps: dict[str, _Step] = {}

    def add(self, number: int, begun: Tensors, loss: Tensors) -> None:
        """Take the losses of a round, first and mean, [R J]: NaN where a client did not train."""
        for name, first in begun.items():
            step = self.steps.setdefault(name, _Step(self.copies, len(first)))
            step.add(number, *(v.double().reshape(self.copies, -1) for v in (first, loss[name])))

    def risen(self) -> list[Divergence | None]:
        """Return since when which loss has risen, the first of several."""
        found: list[list[Divergence]] = [[] for _ in range(self.copies)]
        for name, step in self.steps.items():
            # What later phases begin with may be next to nothing, or large already.
            size = next(iter(self.steps.values())).begins[-1].abs()
            for c, (rounds, begin, level) in enumerate(step.risen(size)):
                if rounds >= min(RISEN, len(step.numbers)):
                    why = f"the loss of {name} rose from {begin:.4g} to {level:.4g}"
                    found[c].append(Divergence(step.numbers[-rounds], why))
        return [min(some, default=None) for some in found]


class _Step:
    """The loss of one gradient step, carried from round to round: see the top of this module."""

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
        known = self.start.isfinite() & finite.isfinite()
        begin, level, low = (_mean(v, known) for v in (self.start, self.latest, self.lowest))
        self.numbers.append(number)
        self.begins.append(begin)
        self.levels.append(level)
        self.gains.append(begin - low)
        fall = _mean(before - self.latest, known & before.isfinite())
        # What falls from where it should not be is no noise.
        self.falls.append(torch.where((fall > 0) & ~self.high, fall, torch.nan))
        self.high = level - begin > SIZES * begin.abs() + begin - low

    def risen(self, size: Tensor) -> list[tuple[int, float, float]]:
        """Return for each copy the rounds at the end in which it has risen, begin and level."""
        noise = torch.stack(self.falls).nanmedian(0).values.nan_to_num(0.0)
        rise = torch.stack(self.levels) - torch.stack(self.begins)
        size = size.fmax(self.begins[-1].abs())
        above = rise > SIZES * size + torch.stack(self.gains) + NOISE * noise
        rounds = above.flip(0).long().cumprod(0).sum(0)
        ends = (v.tolist() for v in (rounds, self.begins[-1], self.levels[-1]))
        return list(zip(*ends, strict=True))


def _mean(value: Tensor, known: Tensor) -> Tensor:
    """Average over clients that are known: [R, J] -> [R], NaN if there are none."""
    return torch.where(known, value, 0.0).sum(-1) / known.sum(-1)


def comparable(facts: Facts, begun: Tensors) -> Tensors:
    """Return the losses of steps that are to be compared with those of other rounds."""
    return {n: v for n, v in begun.items() if not matches(n, marked(facts, INCOMPARABLE))}


def movement(facts: Facts, old: Round, new: Round) -> dict[str, float] | None:
    """Return how far a round moved each tensor, see above; None if the server merged nothing."""
    if new.server is old.server:
        return None
    before, now = _received(old.server), _received(new.server)
    rows = not now
    if rows:  # all that is learned stays at home
        if isinstance(new.private, OneCopy):  # the old one is gone
            return {}
        before, now = (cut(_real(v.private), new.trained) for v in (old, new))
    known = {p: fact.of for p, fact in of_kind(facts, Centre).items()}
    far = {}
    for name, value in now.items():
        of = next((of for patterns, of in known.items() if matches(name, patterns)), None)
        if name not in before or before[name].shape != value.shape:
            far[name] = value.new_ones(())
        elif of:
            (was, _), (mean, sd) = of(name, before), of(name, now)
            far[name] = ((mean - was).abs() / sd).amax()
        else:
            far[name] = _relative(before[name], value, rows)
    values = [v.double() for v in far.values()] or [torch.zeros(())]
    found = torch.stack(values).nan_to_num(HUGE).tolist()  # one wait for an accelerator
    return dict(zip(far, found, strict=False))


def _relative(old: Tensor, new: Tensor, rows: bool) -> Tensor:
    """Return the change as a share of the norm, the largest share of any client for `rows`."""
    shape = (len(new), -1) if rows else (1, -1)
    was, now = old.reshape(shape), new.reshape(shape)
    norm = torch.linalg.vector_norm
    scale = torch.maximum(norm(was, dim=1), norm(now, dim=1))
    return torch.where(scale > 0, norm(now - was, dim=1) / scale, 0.0).amax()


def _received(server: Tensors) -> Tensors:
    return {n: v for n, v in _real(server).items() if not n.startswith("server/")}


def _real(tensors: Mapping[str, Any]) -> Tensors:
    return {n: v for n, v in tensors.items() if v.is_floating_point() and v.numel()}
