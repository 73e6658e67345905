"""Many copies of a federation side by side: other responses, and a server for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation, Who
from pyrofl.inference.loop.messages import merged
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method, Move, Phase, Step, View
from pyrofl.inference.servers.averages import CannotMerge
from pyrofl.tensors import Tensors, cut, join_up, under


def compact(data: Federation) -> Federation:
    """Return the clients that train with their training rows, one behind the other, and no more."""
    rows = torch.cat(data.train[: data.clients])
    parts = torch.arange(len(rows)).split(data.sizes[: data.clients].tolist())
    rows = rows.to(data.x.device)
    return Federation(
        data.x[rows],
        data.y[rows],
        parts,
        tuple(part[:0] for part in parts),
        data.names[: data.clients],
        data.classes,
    )


def with_responses(data: Federation, y: Tensor) -> Federation:
    """Put copies of a `compact` federation of J clients, that answer y [R, N, ...], side by side.

    Client j of copy r is number r J + j, by the name of "0/client 0".
    """
    rows = len(data.y)
    return Federation(
        data.x.repeat(len(y), *(1 for _ in data.x.shape[1:])),
        y.flatten(0, 1).to(data.y.dtype),
        tuple(part + r * rows for r in range(len(y)) for part in data.train),
        tuple(part for _ in y for part in data.test),
        tuple(f"{r}/{name}" for r in range(len(y)) for name in data.names),
        data.classes,
    )


def side_by_side(method: Method, clients: int, refused: dict[int, str] | None = None) -> Method:
    """Return the method for copies of a federation, whose clients train side by side.

    A copy has so many `clients`. What the server holds for copy r is under "r/"; nothing of one
    copy reaches another. `refused` is told which copies' servers keep their state, and why.
    """
    refused = {} if refused is None else refused

    def of_copies(
        who: Who, make: Callable[[int, Tensor, Who], Tensors]
    ) -> dict[int, tuple[Tensor, Tensors]]:
        """Call with every copy, the places of its clients, and who they are in it."""
        copy, found = who.ids // clients, {}
        for r in copy.unique().tolist():
            at = (copy == r).nonzero().flatten()
            found[r] = (at, make(r, at, Who(who.ids[at] % clients, who.size[at])))
        return found

    def joined(found: dict[int, tuple[Tensor, Tensors]]) -> Tensors:
        order = torch.cat([at for at, _ in found.values()]).argsort()
        return cut(join_up(part for _, part in found.values()), order)

    def download(
        server: Tensors, who: Who, one: Callable[[Tensors, Who], Tensors] = method.download
    ) -> Tensors:
        each = _parted(server)
        return joined(of_copies(who, lambda r, at, mine: one(each[r], mine)))

    def of_view(view: Any) -> Callable[[Tensors, Who], Tensors] | None:
        own = getattr(view, "download", None)
        return None if own is None else lambda server, who: download(server, who, own)

    def join(received: Tensors, who: Who, generator: Generator) -> Tensors:
        def one(r: int, at: Tensor, mine: Who) -> Tensors:
            equal = Generator().set_state(generator.get_state())
            return method.join(cut(received, at), mine, equal)

        return joined(of_copies(who, one))

    def merge(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        each = _parted(server)

        def one(r: int, at: Tensor, mine: Who) -> Tensors:
            try:
                made = method.merge(each[r], cut(message, at), mine, generator)
                state, bad = merged(each[r], made)
            except CannotMerge as error:
                state, bad = each[r], [f"the server: {error}"]
            refused.update((r, reason) for reason in bad)
            return state

        found = of_copies(who, one)
        return _whole(each | {r: state for r, (_, state) in found.items()})

    def counted(phase: Phase) -> Phase:
        epochs = phase.epochs
        if not callable(epochs):
            return phase
        return replace(phase, epochs=lambda ids: epochs(ids % clients))

    home = seeing(method, lambda batch: replace(batch, ids=batch.ids % clients))
    return replace(
        home,
        phases=tuple(map(counted, home.phases)),
        download=download,
        join=join,
        merge=merge,
        views={n: View(view, of_view(view)) for n, view in method.views.items()},
    )


def first_of(server: Tensors, copies: int, clients: int) -> Round:
    """Return the round before the first, in which every copy's server holds the same."""
    seen = torch.zeros(copies * clients, dtype=torch.bool)
    return Round(0, _whole(dict.fromkeys(range(copies), server)), {}, seen)


def rounds_of(state: Round, clients: int) -> list[Round]:
    """Return what each copy knows, as a round of its J clients."""
    each, found = _parted(state.server), []
    for r in range(len(state.seen) // clients):
        mine = slice(r * clients, (r + 1) * clients)
        found.append(Round(state.number, each[r], cut(state.private, mine), state.seen[mine]))
    return found


def _parted(server: Tensors) -> dict[int, Tensors]:
    """Return the server of every copy."""
    found: dict[int, Tensors] = defaultdict(dict)
    for name, value in server.items():
        copy, _, own = name.partition("/")
        found[int(copy)][own] = value
    return found


def _whole(servers: Mapping[int, Tensors]) -> Tensors:
    """Undo `_parted`."""
    return {n: v for r, server in servers.items() for n, v in under(str(r), server).items()}


def seeing(method: Method, change: Callable[[Batch], Batch]) -> Method:
    """Return the method with programs, losses and closed forms that see changed batches."""

    def changed(function: Any) -> Any:
        """Change the last argument, the batch."""
        return lambda *args: function(*args[:-1], change(args[-1]))

    def moved(move: Step | Move) -> Step | Move:
        return replace(move, loss=changed(move.loss)) if isinstance(move, Step) else changed(move)

    def phases(of: tuple[Phase, ...]) -> tuple[Phase, ...]:
        return tuple(replace(phase, moves=tuple(map(moved, phase.moves))) for phase in of)

    return replace(
        method,
        model=changed(method.model),
        guide=changed(method.guide),
        phases=phases(method.phases),
        adapt=phases(method.adapt),
    )
