"""Local training: the phases of a method, for several clients side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import pyro
import torch
from torch import Generator, Tensor

from pyrofl.batches import share
from pyrofl.data import Batch, Federation, Who
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.inference.steps import Feed, PhaseRun
from pyrofl.plans import Plan, buckets, plan
from pyrofl.tensors import Tensors, cut


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
) -> tuple[Tensors, Tensors, Tensor]:
    """Run the phases on some clients side by side.

    Args:
        method: gives model, guide and, unless `phases` are given, the phases.
        received: what came down, [C, ...].
        local: private state and received, [C, ...]; not changed.
        data: the federation.
        who: the C clients.
        seed: of the run.
        number: of the round; with the seed and the client's name it fixes all random numbers.
        phases: to run instead of the method's.

    Returns:
        local after training, the mean loss of each gradient step by its names, [C], and how many
        gradient steps were made, [C] int64.
    """
    # Full batches are padded to the longest of their group; what is drawn does not depend on it.
    noise = [stream(seed, Stream.NOISE, number, data.names[i]) for i in who.ids.tolist()]
    order = partial(stream, seed, Stream.ORDER, number)
    losses: Tensors = {}
    made = torch.zeros(len(noise), dtype=torch.long)
    everyone, alike = [torch.arange(len(noise))], buckets(data.sizes[who.ids.cpu()])
    with pyro.validation_enabled(False):
        for full, group in groupby(method.phases if phases is None else phases, _is_full):
            turn, parts = tuple(group), alike if full else everyone
            done = [
                _in_turn(
                    method,
                    turn,
                    cut(received, some),
                    cut(local, some),
                    data,
                    Who(who.ids[some], who.size[some]),
                    [noise[c] for c in some.tolist()],
                    order,
                )
                for some in parts
            ]
            back = torch.cat(parts).argsort()
            changed, lost, steps = (cut(_joined(same), back) for same in zip(*done, strict=True))
            local, losses, made = local | changed, losses | lost, made + steps["made"]
    return local, losses, made


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """Concatenate what groups of clients have; what they know of rows is padded as rows are."""
    if len(parts) == 1:
        return parts[0]
    names = list(dict.fromkeys(n for part in parts for n in part))
    joined = {}
    for name in names:
        if any(name not in part for part in parts):
            raise ValueError(f"a client that makes no step in this phase would lack {name!r}")
        values = [part[name] for part in parts]
        widths = {v.shape[1] for v in values if v.dim() > 1}
        if len(widths) > 1:
            values = [_widened(v, max(widths)) for v in values]
        joined[name] = torch.cat(values)
    return joined


def _widened(value: Tensor, width: int) -> Tensor:
    wide = value.new_zeros(len(value), width, *value.shape[2:])
    wide[:, : value.shape[1]] = value
    return wide


def _is_full(phase: Phase) -> bool:
    return phase.batch is None


def _in_turn(
    method: Method,
    phases: Sequence[Phase],
    received: Tensors,
    local: Tensors,
    data: Federation,
    who: Who,
    noise: list[Generator],
    order: Callable[[str], Generator],
) -> tuple[Tensors, Tensors, Tensors]:
    """Run phases, all on full batches or none; return what they change, losses and steps made."""
    ids, old = who.ids.tolist(), local
    rows, names = [data.train[i] for i in ids], [data.names[i] for i in ids]
    whole = data.batch(who.ids) if _is_full(phases[0]) else None
    losses: Tensors = {}
    made = torch.zeros(len(ids), dtype=torch.long)
    for phase in phases:
        steps = torch.tensor(_epochs(phase, who))
        if phase.batch:
            schedule = plan(rows, steps.tolist(), phase.batch, [order(name) for name in names])
            steps = schedule.steps
        # Clients that finish early must be the last: stepping then means a shorter prefix.
        rank = steps.argsort(descending=True, stable=True)
        back, ranked = rank.argsort(), Who(who.ids[rank], who.size[rank])
        feed = _again(whole.some(rank)) if whole else _minibatches(data, ranked, schedule.of(rank))
        own = [noise[c] for c in rank.tolist()]
        run = PhaseRun(method, phase, cut(received, rank), cut(local, rank), ranked, own)
        run.go(steps[rank], feed)
        local = local | cut({n: v for n, v in run.local.items() if n in run.owned}, back)
        losses |= cut(run.losses(steps[rank]), back)
        made += steps * sum(m.repeat for m in phase.moves if isinstance(m, Step))
    return {n: v for n, v in local.items() if v is not old.get(n)}, losses, {"made": made}


def _again(whole: Batch) -> Feed:
    def feed(_: int, active: int) -> Batch:
        nonlocal whole
        if active < len(whole):
            whole = whole.some(slice(active))
        return whole

    return feed


def _minibatches(data: Federation, who: Who, schedule: Plan) -> Feed:
    rows, mask, at = (v.to(data.x.device) for v in (schedule.rows, schedule.mask, schedule.at))
    part = share(who.size, mask)

    def feed(t: int, active: int) -> Batch:
        first = Who(who.ids[:active], who.size[:active])
        return data.gather(first, *(v[t, :active] for v in (rows, mask, at, part)))

    return feed


def _epochs(phase: Phase, who: Who) -> list[int]:
    if not callable(phase.epochs):
        return [phase.epochs] * len(who.ids)
    epochs = phase.epochs(who.ids).tolist()
    if len(epochs) != len(who.ids) or min(epochs) < 0:
        raise ValueError(f"epochs are {epochs}; expected one number >= 0 for each client")
    return [int(e) for e in epochs]
