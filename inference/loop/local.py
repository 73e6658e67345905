"""Local training: the phases of a method, for several clients side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import pyro
import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation, Who
from pyrofl.data.federation import share
from pyrofl.inference.fast import rewritten
from pyrofl.inference.loop.plans import Axes, Plan, buckets, joined, narrowed, plan
from pyrofl.inference.loop.steps import Feed, PhaseRun
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.tensors import Tensors, cut, join_up


def train(
    method: Method,
    received: Tensors,
    local: Tensors,
    data: Federation,
    who: Who,
    *,
    seed: Seed,
    number: int,
    phases: Sequence[Phase] | None = None,
) -> tuple[Tensors, Tensors, Tensor, Tensors]:
    """Run the method's phases, or others, from local [C, ...] for C clients side by side.

    Returns:
        local after training, [C, ...], the mean loss of each gradient step by its names, [C], how
        many gradient steps were made, [C] int64, and the loss of the first of each, [C].
    """
    known, sizes = local.keys(), data.sizes[who.ids.cpu()]
    noise = cache(partial(stream, seed, Stream.NOISE, number))  # goes on from phase to phase
    order = partial(stream, seed, Stream.ORDER, number)
    losses: Tensors = {}
    first: Tensors = {}
    made, axes = torch.zeros(len(sizes), dtype=torch.long), Axes()
    # Of all who train, and of these if they have joined later and hold more: clients that train
    # take the same way whoever is beside them.
    longest = max(data.longest, int(sizes.max()))
    asked = method.phases if phases is None else phases
    fastest = [fast for phase in asked for fast in rewritten(method, phase, local, data, longest)]
    with pyro.validation_enabled(False), torch.enable_grad():
        for full, group in groupby(fastest, lambda phase: phase.batch is None):
            turn = [(phase, _epochs(phase, who)) for phase in group]
            # Full batches are padded to the longest of a group; nothing depends on who is in it.
            parts = buckets(sizes) if full else [torch.arange(len(sizes))]
            widths = [int(sizes[some].max()) for some in parts]
            each = zip(parts, widths, strict=True)
            begin = [narrowed(cut(local, some), axes, width) for some, width in each]
            done = [
                _in_turn(
                    method,
                    [(phase, epochs[some]) for phase, epochs in turn],
                    cut(received, some),
                    mine,
                    data,
                    Who(who.ids[some], who.size[some]),
                    noise,
                    order,
                )
                for some, mine in zip(parts, begin, strict=True)
            ]
            back = torch.cat(parts).argsort()
            changed, found = joined([part[0] for part in done], begin, widths)
            axes = {n: at for n, at in axes.items() if n not in changed} | found
            local = local | cut(changed, back)
            losses |= cut(join_up(part[1] for part in done), back)
            made += torch.cat([part[2] for part in done])[back]
            first |= cut(join_up(part[3] for part in done), back) | first
    kept = {n: v for n, v in local.items() if n in known or not n.startswith("rows/")}
    return kept, losses, made, first


def _in_turn(
    method: Method,
    phases: Sequence[tuple[Phase, Tensor]],
    received: Tensors,
    local: Tensors,
    data: Federation,
    who: Who,
    noise: Callable[[str], Generator],
    order: Callable[[str], Generator],
) -> tuple[Tensors, Tensors, Tensor, Tensors]:
    """Run phases, all on full batches or none, epochs [C] times; of local return what changes."""
    ids, old = who.ids.tolist(), local
    rows, names = [data.train[i] for i in ids], [data.names[i] for i in ids]
    whole = data.batch(who.ids) if phases[0][0].batch is None else None
    losses: Tensors = {}
    first: Tensors = {}
    made = torch.zeros(len(ids), dtype=torch.long)
    for phase, steps in phases:
        if phase.batch:
            schedule = plan(rows, steps.tolist(), phase.batch, [order(name) for name in names])
            steps = schedule.steps
        # Clients that finish early must be the last: stepping then means a shorter prefix.
        rank = steps.argsort(descending=True, stable=True)
        back, ranked = rank.argsort(), Who(who.ids[rank], who.size[rank])
        feed = _again(whole.some(rank)) if whole else _minibatches(data, ranked, schedule.of(rank))
        own = Streams(noise, [names[c] for c in rank.tolist()])
        run = PhaseRun(method, phase, cut(received, rank), cut(local, rank), ranked, own)
        run.go(steps[rank], feed)
        local = local | cut({n: v for n, v in run.local.items() if n in run.owned}, back)
        losses |= cut(run.losses(steps[rank]), back)
        first |= cut(run.first, back) | first
        made += steps * sum(m.repeat for m in phase.moves if isinstance(m, Step))
    return {n: v for n, v in local.items() if v is not old.get(n)}, losses, made, first


class Streams(Sequence[Generator]):
    """Streams of the clients of these names, each made when it is first needed."""

    def __init__(self, make: Callable[[str], Generator], names: Sequence[str]) -> None:
        """Make none yet; `make` gives always the same one for a name."""
        self.make, self.names = make, names

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.names)

    def __getitem__(self, at: Any) -> Any:
        """Return a client's stream, or the streams of several clients."""
        if isinstance(at, slice):
            return Streams(self.make, self.names[at])
        return self.make(self.names[at])


def _again(whole: Batch) -> Feed:
    shorter = cache(lambda active: whole.some(slice(active)))
    return lambda _, active: shorter(active)


def _minibatches(data: Federation, who: Who, schedule: Plan) -> Feed:
    rows, mask, at = (v.to(data.x.device) for v in (schedule.rows, schedule.mask, schedule.at))
    part = share(who.size, mask)

    def feed(t: int, active: int) -> Batch:
        first = Who(who.ids[:active], who.size[:active])
        return data.gather(first, *(v[t, :active] for v in (rows, mask, at, part)))

    return feed


def _epochs(phase: Phase, who: Who) -> Tensor:
    if not callable(phase.epochs):
        return torch.full((len(who.ids),), phase.epochs)
    epochs = phase.epochs(who.ids).cpu()
    if len(epochs) != len(who.ids) or int(epochs.min()) < 0:
        raise ValueError(f"epochs are {epochs.tolist()}; expected one number >= 0 for each client")
    return epochs.long()
