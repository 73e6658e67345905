"""Training of several copies of a federation at once, each with its own simulated responses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.method import GradientStep, Method, Phase, View
from pyrofl.inference.engine.messages import validated_state
from pyrofl.inference.engine.state import RoundState
from pyrofl.returned import ClientError
from pyrofl.tensors import Tensors, cut, join_up, under


def compact(data: Federation) -> Federation:
    """Return a copy of a federation with only the training clients and their training rows."""
    rows = torch.cat(data.train[: data.clients])
    parts = torch.arange(len(rows)).split(data.sizes[: data.clients].tolist())
    rows = rows.to(data.x.device)
    none, names = tuple(part[:0] for part in parts), data.names[: data.clients]
    weights = None if data.weights is None else data.weights[rows.cpu()]
    return Federation(data.x[rows], data.y[rows], parts, none, names, data.classes, weights=weights)


def with_responses(data: Federation, y: Tensor) -> Federation:
    """Return a federation of R copies of all clients, with simulated responses [R, N, ...]."""
    copies, rows = range(len(y)), len(data.y)
    x, answers = torch.cat([data.x] * len(y)), y.flatten(0, 1).to(data.y.dtype)
    train = tuple(part + r * rows for r in copies for part in data.train)
    names = tuple(f"{r}/{name}" for r in copies for name in data.names)
    weights = None if data.weights is None else torch.cat([data.weights] * len(y))
    return Federation(
        x, answers, train, tuple(data.test) * len(y), names, data.classes, weights=weights
    )


def side_by_side(method: Method, clients: int, refused: dict[int, str] | None = None) -> Method:
    """Return a method that trains several copies of a federation, each with its own server.

    Client j of copy r has the id r J + j; the server state of copy r is under "server/r/".
    `refused` collects copies with a rejected aggregation, and the reason.
    """
    refused = {} if refused is None else refused

    def parts(cohort: Cohort) -> Iterator[tuple[int, Tensor, Cohort]]:
        """For each copy of the federation, yield its index, and its clients' positions and ids."""
        copy = cohort.ids // clients
        for r in copy.unique().tolist():
            at = (copy == r).nonzero().flatten()
            yield r, at, Cohort(cohort.ids[at] % clients, cohort.size[at])

    def joined(cohort: Cohort, make: Callable[[int, Tensor, Cohort], Tensors]) -> Tensors:
        """Apply a function to each federation copy; join the results in the order of clients."""
        parts_by_position = [(at, make(r, at, members)) for r, at, members in parts(cohort)]
        order = torch.cat([at for at, _ in parts_by_position]).argsort()
        return cut(join_up(part for _, part in parts_by_position), order)

    def download(
        of: Callable[[Tensors, Cohort], Tensors], server: Tensors, cohort: Cohort
    ) -> Tensors:
        each = _parted(server)
        return joined(cohort, lambda r, at, members: of(each[r], members))

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        def one(r: int, at: Tensor, members: Cohort) -> Tensors:
            equal = Generator().set_state(generator.get_state())
            return method.init_client(cut(received, at), members, equal)

        return joined(cohort, one)

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        each = _parted(server)
        for r, at, members in parts(cohort):
            try:
                server_state = {n: v.clone() for n, v in each[r].items()}
                aggregated = method.aggregate(server_state, cut(message, at), members, generator)
                each[r], failure = validated_state(each[r], aggregated, len(members.ids))
            except AggregationError as error:
                failure = f"the server: {error}"
            if failure:
                refused[r] = failure
        return _whole(each)

    def counted(phase: Phase) -> Phase:
        if not callable(of := phase.epochs):
            return phase
        return replace(phase, epochs=lambda ids: of(ids % clients))

    def viewed(view: Any) -> View:
        view_download = getattr(view, "download", None)
        return View(view, view_download and partial(download, view_download))

    home = with_modified_batches(method, lambda batch: replace(batch, ids=batch.ids % clients))
    return replace(
        home,
        phases=tuple(map(counted, home.phases)),
        download=partial(download, method.download),
        init_client=init_client,
        aggregate=aggregate,
        views={n: viewed(view) for n, view in method.views.items()},
    )


def first_of(server: Tensors, copies: int, clients: int) -> RoundState:
    """Return the initial state of all federation copies, with the same server state in each."""
    seen = torch.zeros(copies * clients, dtype=torch.bool)
    return RoundState(0, _whole(dict.fromkeys(range(copies), server)), {}, seen)


def rounds_of(state: RoundState, clients: int) -> list[RoundState]:
    """Split the joint state of all federation copies into one round state for each copy."""
    each, states = _parted(state.server), []
    for r in range(len(state.seen) // clients):
        clients_of_copy = slice(r * clients, (r + 1) * clients)
        states.append(
            RoundState(
                state.number,
                each[r],
                cut(state.client_states, clients_of_copy),
                state.seen[clients_of_copy],
            )
        )
    return states


def _parted(server: Tensors) -> dict[int, Tensors]:
    """Split the joint server state of all federation copies into one server state per copy."""
    servers: dict[int, Tensors] = defaultdict(dict)
    for name, value in server.items():
        _, copy, tensor_name = name.split("/", 2)
        servers[int(copy)][tensor_name] = value
    return servers


def _whole(servers: Mapping[int, Tensors]) -> Tensors:
    """Join the server states of all federation copies into one, with tensors "server/r/NAME"."""
    return {n: v for r, server in servers.items() for n, v in under(f"server/{r}", server).items()}


def with_modified_batches(method: Method, change: Callable[[Batch], Batch]) -> Method:
    """Copy a method so that its model, guide, losses and updates receive modified batches."""

    def changed(function: Any) -> Any:
        """Wrap a function so that its last argument, the batch, is modified before each call."""

        def with_changed_batch(*args: Any) -> Any:
            """Call the function with the modified batch; an error has the ids of the batch."""
            *before, batch = args
            try:
                return function(*before, change(batch))
            except ClientError as error:
                error.clients = tuple(batch.ids[list(error.positions)].tolist())
                raise

        return with_changed_batch

    def moved(phase: Phase) -> Phase:
        moves = [
            replace(move, loss=changed(move.loss))
            if isinstance(move, GradientStep)
            else changed(move)
            for move in phase.updates
        ]
        return replace(phase, updates=tuple(moves))

    what: dict[str, Any] = {n: changed(getattr(method, n)) for n in ("model", "guide")}
    what |= {n: tuple(map(moved, getattr(method, n))) for n in ("phases", "adapt")}
    # Functions that read a program of the method receive the changed batches themselves.
    reads = {n: what[n] for n in method.metadata.reads}
    return replace(method, metadata=method.metadata.extend(reads=reads), **what)
