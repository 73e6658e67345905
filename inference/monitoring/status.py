"""Convergence status of a run: converged, not converged, stuck or diverged.

A run has converged if over its last 5 aggregations, and at least 3,

- no site's mean or standard deviation changed by more than 0.01 standard deviations from one
  aggregation to the next, and no tensor without a distribution by more than 0.1% of its norm; see
  `movement`;
- and no steadily shrinking change adds up to more than five times these limits if extrapolated, as
  with strong damping; and no steadily growing change would exceed them within the same number of
  further aggregations.

Where every round applies all clients' updates in full, as with likelihood factors, it suffices that
the last of two aggregations, and the rest of a geometric series with their ratio, are within five
times these limits. Moments that are computed from draws, as there, also change by their Monte Carlo
error: the limit of each of the last 5 changes is then two standard errors of a difference, at most
0.05 standard deviations, while that of the extrapolation stays. A run with draws from the exact
posterior has converged. No run has converged while a required monitored number, as of clients that
have not reported or R-hat of the server's chains, is above its limit; where R-hat is in two
successive rounds without changes, or in four with changes, training stops. Nor has one whose last
correction by `to_arviz` has a Pareto k above 0.7, which is known after it alone.

Constant learning rates on minibatches keep parameters fluctuating, which is not convergence. At the
end of `fit`, for methods with an optimal normal of the shared sites, such as PVI, the gradient of
the ELBO is tested too: a run with decayed learning rates has not converged if a natural-gradient
step would move a site by more than 0.1 standard deviations and 4 standard errors; see `optimum`.

A run is stuck if no compared tensor, or no entry of a trained tensor, has changed at all since
before round one: its gradient is zero, or the upload or the aggregation leaves it out. Network
parameters that no output depends on are left out.

A run has diverged if

- no message was aggregated in its last 3 rounds with a rejected client and more than one training
  client, or in any round, unless all clients dropped out; non-finite messages are rejected; or
- the mean of a site moved by more than 1,000 standard deviations in most of the last 5
  aggregations; or
- the loss of a gradient step has risen, in its last 2 rounds:

      level - begin > 2 size + (begin - lowest) + 2 noise

  begin is the loss of a client's first step, level the mean of its last round, lowest the minimum
  of both so far, each a mean over clients, so that participation does not matter. size is |begin|,
  or that of the method's first step if it is larger; noise is the median decrease of the level per
  round, except for decreases from a risen level. So a loss must lose all its gain and rise by more
  than twice its size: a slowly rising loss has not diverged. Losses that rise by design, see
  `INCOMPARABLE`, are excluded; or
- the loss has fallen below -100 size, and below -100, and in the second half of all rounds, at
  least 6, by 90% or more of its fall in the first half. No density behaves so: its sign is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, ClassVar, Literal

import torch

from pyrofl.data import Federation
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.engine.messages import SERVER_FAILED_PREFIX
from pyrofl.inference.monitoring.losses import Divergence, Losses
from pyrofl.inference.monitoring.parameter_changes import Moved
from pyrofl.tensors import matches

MAX_AGGREGATIONS, MIN_AGGREGATIONS = 5, 3  # aggregations, maximum and minimum
CONVERGED_CHANGES = {"mean": 0.01, "sd": 0.01, "norm": 0.001}
DIVERGED_CHANGE = 1000  # change of a diverged mean, in standard deviations
MAX_REMAINING_CHANGE = 5  # largest remaining change of a converged run, relative to SMALL
# So many unreliable rounds end training, by whether nothing moves any more.
MAX_UNRELIABLE_ROUNDS = {True: 2, False: 4}
IDLE = "nothing is trained: all learning rates or epochs are 0"

Kind = Literal["converged", "not converged", "stuck", "diverged"]
Left = Any  # a `RoundRecord`, which imports this module


@dataclass(frozen=True)
class ConvergenceStatus:
    """Convergence status of a run, with a reason, that is printed as a sentence.

    Attributes:
        kind: "converged", "not converged", "stuck" or "diverged".
        why: the rest of the sentence.
        merged: number of rounds with an aggregation.
        site: site with the largest change relative to its limit; "" if unknown.
        part: changed part of the site: mean, sd or norm.
        moved: its change in the last round.
        since: first round of a divergence.
        ended: whether the run has not converged, and further rounds do not help; the reason states
            the remedy.
        small: part -> limit of its change in a converged run.
    """

    kind: Kind
    why: str
    merged: int
    site: str = ""
    part: str = ""
    moved: float | None = None
    since: int | None = None
    ended: bool = False
    small: ClassVar[dict[str, float]] = CONVERGED_CHANGES

    def tested(
        self,
        off: str = "",
        note: str = "",
        blind: str = "",
        weights: str = "",
        corrected: str = "",
    ) -> ConvergenceStatus:
        """Return the convergence status, corrected by a test whether the objective is optimal.

        Of the last correction by `to_arviz`, `weights` states why they are unreliable, and
        `corrected` is the outcome: "yes", or "no" and the reason.
        """
        if self.kind != "converged" or not (off or note or blind or weights):
            return self
        if blind:
            why = f"nothing changes, and {blind}; lower the learning rates"
            return replace(self, kind="stuck", why=why)
        if off:
            why = f"{self.why}, but the gradient of the ELBO still moves {off}; run more rounds"
            return replace(self, kind="not converged", why=f"{why} with slower rate decay")
        if weights:
            return replace(self, kind="not converged", why=weights, ended=True)
        if not corrected:
            note = f"{note}; to_arviz corrects its draws where their weights are reliable"
        elif corrected == "yes":
            note = f"{note}; the draws of to_arviz are corrected"
        else:
            note = f"{note}, and its draws are not corrected"
        return replace(self, why=f"{self.why}; {note}")

    def __str__(self) -> str:
        return f"{self.kind}{f' since round {self.since}' if self.since else ''}: {self.why}"


class ConvergenceMonitor:
    """Monitor that updates the convergence status of a run with each round record."""

    def __init__(
        self,
        records: Sequence[Left] = (),
        trained: str | None = None,
        unused: Callable[[], set[str]] = set,
    ) -> None:
        """Create a convergence monitor from round records and patterns of trained tensors.

        `unused` returns the names of network parameters that cannot change, see `unused_by`.
        """
        self.trained, self.unused = trained, unused
        self.records: list[Left] = []
        self.losses = Losses()
        for record in records:
            self.add(record)

    def add(self, record: Left) -> None:
        """Add the record of a completed round to the monitored rounds."""
        self.records.append(record)
        self.losses.add(record.number, record.first_loss, record.loss)

    @property
    def over(self) -> bool:
        """Whether training should stop: the run has converged, diverged or is stuck."""
        status = self.status()
        kind = status.kind
        if kind == "converged" or status.ended:
            return True
        return len(self.records) >= MIN_AGGREGATIONS and kind != "not converged"

    @property
    def failure(self) -> str:
        """Why further rounds of this method do not help, without remedies; "" if they may.

        A lasting monitored number, such as R-hat of the server's chains, is above its limit in two
        successive rounds or above twice its limit in one, the server cannot aggregate, or the run
        has diverged.
        """
        last, status = self.records[-1], self.status()
        lasting = all(record.unreliable for record in self.records[-2:]) and len(self.records) > 1
        why = last.failed or (last.unreliable if lasting else "")
        if not why and status.kind == "diverged":
            why = status.why
        return why.removeprefix(SERVER_FAILED_PREFIX).partition(";")[0]

    def status(self) -> ConvergenceStatus:
        """Return the run's convergence status, given the round records added so far."""
        moved = [record.moved for record in self.records if record.moved is not None]
        divergences = (
            _rejection_divergence(self.records),
            _lost(self.records),
            *self.losses.risen(),
        )
        divergences += tuple(self.losses.fallen())
        if both := [one for one in divergences if one]:
            first = min(both)
            return ConvergenceStatus("diverged", first.why, len(moved), since=first.since)
        if not moved:
            silent = "no message was aggregated in any round, as no client reported"
            return ConvergenceStatus("not converged", silent if self.records else "no round yet", 0)
        whole = self.records[0].number == 1  # later rounds may begin at the optimum
        if (
            whole
            and self.trained is not None
            and (why := _unchanged(moved, self.trained, self.unused))
        ):
            return ConvergenceStatus("stuck", why, len(moved))
        judged = _early_status(self.records) or _status_of_changes(moved, self.records[-1].noise)
        if why := self.records[-1].unreliable:
            still = judged.kind == "converged"
            last = self.records[-MAX_UNRELIABLE_ROUNDS[still] :]
            lasts = len(last) == MAX_UNRELIABLE_ROUNDS[still] and all(
                one.unreliable for one in last
            )
            if still or lasts:
                return replace(judged, kind="not converged", why=why, ended=lasts)
        idle = self.trained is None and judged.kind == "converged"
        return replace(judged, why=f"{judged.why}, as {IDLE}") if idle else judged


def convergence_status(
    records: Sequence[Left], trained: str | None = None, unused: Callable[[], set[str]] = set
) -> ConvergenceStatus:
    """Return the convergence status of a run, given the records of its rounds."""
    return ConvergenceMonitor(records, trained, unused).status()


def monitor_of(
    method: Method, data: Federation, records: Sequence[Left] = ()
) -> ConvergenceMonitor:
    """Return the convergence monitor of a run, given the records of its rounds."""
    return ConvergenceMonitor(records, trained_by(method), partial(unused_by, method, data))


def unused_by(method: Method, data: Federation) -> set[str]:
    """Return the names of parameters on which no output of the method's networks depends."""
    unused = set[str]()
    for net in users_code((method.model, method.phases))[1]:
        x = torch.zeros(1, *data.x.shape[1:], dtype=data.x.dtype)
        module = copy.deepcopy(net.module).cpu().to(x.dtype if x.is_floating_point() else None)
        parameters = {n: p for n, p in module.named_parameters() if n in net.shapes}
        with torch.enable_grad(), suppress(Exception):  # what a user's network may raise
            slopes = torch.autograd.grad(module(x).sum(), [*parameters.values()], allow_unused=True)
            unused |= {n for n, slope in zip(parameters, slopes, strict=True) if slope is None}
    return unused


def trained_by(method: Method) -> str | None:
    """Return the name patterns of tensors that gradient steps train; None if nothing is trained.

    Nothing is trained where all learning rates or epochs are 0.
    """
    moves = [move for phase in method.phases if phase.epochs != 0 for move in phase.updates]
    steps = [move for move in moves if isinstance(move, GradientStep)]
    able = [move for move in steps if move.optim([torch.zeros(1, 1)]).defaults.get("lr", 1)]
    if not able and len(steps) == len(moves):
        return None
    return " ".join(move.names for move in able)


def _unchanged(moved: Sequence[Moved], trained: str, unused: Callable[[], set[str]]) -> str:
    """Return a message about trained tensors that changed in no round; "" if all have changed."""
    names = {name for one in moved for name in one}
    still = sorted(n for n in names if not any(v for one in moved for v in one.get(n, {}).values()))
    compared = set.intersection(*(set(one) for one in moved))  # client states are not always
    idle = [n for n in still if n in compared and matches(n, trained)]
    if len(still) == len(names) > 0:
        what = "no learned tensor has changed in any round"
        return f"{what}; check the upload, the aggregation, the names of updates and the gradients"
    if idle and (names := unused()):
        idle = [n for n in idle if n not in names and n.partition("/")[2] not in names]
    if idle:
        shown = ", ".join(idle[:3]) + f" and {len(idle) - 3} more" * (len(idle) > 3)
        what = f"{shown} {'is' if len(idle) == 1 else 'are'} trained, but unchanged in every round"
        return f"{what}; check the upload and the aggregation for it, and the guide for .detach()"
    return ""


def _early_status(records: Sequence[Left]) -> ConvergenceStatus | None:
    """Return the status of a run that its last two aggregations decide; None if they do not."""
    merged = [record for record in records if record.moved is not None]
    last, count = merged[-1], len(merged)
    if last.unfinished:
        return ConvergenceStatus("not converged", last.unfinished, count)
    if last.exact:
        return ConvergenceStatus("converged", "the draws are of the exact posterior", count)
    if not last.undamped or count < 2:
        return None
    before = merged[-2].moved
    for site, parts in last.moved.items():
        for part, now in parts.items():
            limit, ratio = (
                MAX_REMAINING_CHANGE * CONVERGED_CHANGES[part],
                now / max(_of(before, site, part), 1e-300),
            )
            steady = ratio < 1 and now * ratio / (1 - ratio) <= limit
            if now > limit or not (steady or now <= CONVERGED_CHANGES[part] / 2):
                return None
    largest = MAX_REMAINING_CHANGE * CONVERGED_CHANGES["mean"]
    why = f"the last round changed no mean or sd of a site by more than {largest} sd"
    return ConvergenceStatus("converged", why, count)


def _status_of_changes(moved: Sequence[Moved], noise: float = 0.0) -> ConvergenceStatus:
    """Return the status of a run, given its parameter changes; the reason may be the last one.

    `noise` is the change of moments that their Monte Carlo error explains.
    """
    merges, last = len(moved), moved[-MAX_AGGREGATIONS:]
    noise = min(noise, MAX_REMAINING_CHANGE * CONVERGED_CHANGES["mean"])
    within = {p: v if p == "norm" else max(v, noise) for p, v in CONVERGED_CHANGES.items()}
    series = {(n, p): [_of(one, n, p) for one in last] for n in last[-1] for p in last[-1][n]}
    if not series:
        return ConvergenceStatus("not converged", "unknown, as no tensor can be compared", merges)
    now = {key: each[-1] for key, each in series.items()}
    left = {key: _left(each, CONVERGED_CHANGES[key[1]]) for key, each in series.items()}
    quiet = merges >= MIN_AGGREGATIONS and all(
        v <= within[p] for (_, p), each in series.items() for v in each
    )
    far = quiet and any(
        left[key] > MAX_REMAINING_CHANGE * CONVERGED_CHANGES[key[1]] for key in series
    )
    most = left if far else now
    site, part = max(series, key=lambda key: most[key] / CONVERGED_CHANGES[key[1]])
    largest = (merges, site, part, now[site, part])
    error = ", their Monte Carlo error," if noise > CONVERGED_CHANGES["mean"] else ""
    least = f"{within['mean']:.2g} sd{error} or {CONVERGED_CHANGES['norm']:.1%}"
    if not quiet and all(value <= within[p] for (_, p), value in now.items()):
        why = f"nothing changed by more than {least} in the last round; it takes several of these"
        return ConvergenceStatus("not converged", why, *largest)
    if quiet and not far:
        why = f"in the last {len(last)} aggregations nothing changed by more than {least}"
        return ConvergenceStatus("converged", why, *largest)
    what = site if part == "norm" else f"the {part} of {site}"
    why = f"{what} changed by {_far(now[site, part], part)} in the last round"
    if far and left[site, part] == inf:
        why += ", at a growing rate"
    elif far:
        why += f", with an estimated {_far(left[site, part], part)} to go"
    return ConvergenceStatus("not converged", why, *largest)


def _lost(records: Sequence[Left]) -> Divergence | None:
    """Detect divergence by large changes of a site's mean; return its start and reason, or None."""
    last = [record for record in records if record.moved is not None][-MAX_AGGREGATIONS:]
    for site in last[-1].moved if len(last) == MAX_AGGREGATIONS else ():
        far = median(record.moved.get(site, {}).get("mean", 0.0) for record in last)
        if far > DIVERGED_CHANGE:
            why = f"the mean of {site} changes by {_far(far, 'mean')} per round"
            return Divergence(last[0].number, why)
    return None


def _of(moved: Moved, site: str, part: str) -> float:
    return moved.get(site, {}).get(part, 0.0)


def _left(moved: Sequence[float], small: float) -> float:
    """Extrapolate how much a parameter will still change in total; 0 without a steady trend."""
    first, last = moved[0], moved[-1]
    rises, falls = (all(sign * (b - a) > 0 for a, b in pairwise(moved)) for sign in (1, -1))
    if len(moved) < MIN_AGGREGATIONS or not (rises or falls) or not last:
        return 0.0
    ratio = (last / first) ** (1 / (len(moved) - 1)) if first else inf
    if rises:  # this may be noise
        return inf if last * ratio ** len(moved) > small else 0.0
    return last * ratio / (1 - ratio)


def _far(value: float, part: str) -> str:
    shown, name = (100 * value, "%") if part == "norm" else (value, "sd")
    return f"{shown:.0f} {name}" if 10 <= shown < 1e6 else f"{shown:.2g} {name}"


def _rejection_divergence(records: Sequence[Left]) -> Divergence | None:
    """Detect divergence by rejection of all recent messages; return start and reason, or None."""
    bad = [r for r in records if r.rejected or r.moved is not None]  # a client reported
    some = next((i for i, r in enumerate(reversed(bad)) if r.moved is not None), len(bad))
    last = bad[len(bad) - some :]
    whole = bool(last) and some == len(bad)
    several = len({i for r in last for i in r.trained}) > 1
    if not whole and not (some >= MIN_AGGREGATIONS and several):
        return None
    when = "in any round" if whole else f"in the last {some} rounds"
    return Divergence(last[0].number, f"no message was aggregated {when}; {last[-1].rejected[0]}")
