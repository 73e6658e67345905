"""Server side of a round: client sampling, aggregation of messages, and the next state.

Of the data, the server's part only needs the clients' names and numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pyro
import torch
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor

from pyrofl.data import Federation, Roster
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.description import constants_hash
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.local_round import Backend, LocalRound, Reply, RoundRequest
from pyrofl.inference.engine.messages import agreed, form_of, inbox, merged, unlike
from pyrofl.inference.engine.origin import match_server, rows_of
from pyrofl.inference.engine.participation import Draw, validate_ids
from pyrofl.inference.engine.state import RoundState, to_data
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, cut, join_up, pick, role, unwritten
from pyrofl.turns import synchronized

AROUND = {  # public names of Pyro's handlers
    "ScaleMessenger": "poutine.scale",
    "MaskMessenger": "poutine.mask",
    "plate": "a plate",
}


@synchronized  # as layers draw by torch's own generator, which is the process's
def first(
    method: Method,
    data: Federation | Roster,
    seed: Seed,
    server: Tensors | RoundState | None = None,
) -> RoundState:
    """Return the initial state of a federated run, before round one."""
    if server is None:
        with calling("init"):
            made = method.init(stream(seed, Stream.START), data.clients)
        server = as_tensors("what init returns", made)
        place = torch.tensor(sorted(range(data.clients), key=data.names.__getitem__)).argsort()
        server = server | {n: v[place] for n, v in pick(server, method.per_client).items()}
    else:
        server = match_server(method, data, server)
    server = to_data(server, data)
    seen, names = torch.zeros(data.clients, dtype=torch.bool), data.names[: data.clients]
    rows = rows_of(data) if isinstance(data, Federation) else None
    constants = constants_hash(method)
    return RoundState(0, server, {}, seen, names=names, rows=rows, constants=constants)


def sample_clients(
    method: Method,
    clients: int,
    seed: Seed,
    number: int,
    participation: Draw,
    training_clients: Draw | None,
) -> tuple[Tensor, Tensor]:
    """Sample the reporting and the training clients of a round; return their sorted ids."""
    source = stream(seed, Stream.WHO, number)
    with calling("a draw of clients"):
        reporters = validate_ids(participation(source, clients), clients)
        if training_clients is not None:
            return reporters, validate_ids(training_clients(source, clients), clients)
    return reporters, torch.arange(clients) if method.metadata.train_all_clients else reporters


@synchronized
def advance(
    method: Method,
    data: Federation | Roster,
    state: RoundState,
    ids: Tensor,
    reporters: Tensor,
    silent: Tensor | None = None,
    *,
    seed: Seed = 0,
    chunk_size: int | None = None,
    memory: int | None = None,
    keep_messages: bool = True,
    record: bool | None = None,
    backend: Backend | None = None,
) -> RoundState:
    """Run one round: clients `ids` train, `reporters` send messages, the server aggregates.

    A client keeps its previous state if its message is not aggregated: if it is `silent`, if its
    message, client state or loss is invalid, see `inspect` and `agreed`, or if the aggregation
    fails. Clients that were not selected to report keep their new state. If no client reports, or
    the aggregation is not finite, the server keeps its state. The aggregation may modify the
    server's state, as it receives a copy. The `backend` sends the request to the clients; by
    default they are in this process, and data has their rows.

    Raises:
        ValueError: if a function of the method modifies its arguments, or does not return a dict
            of tensors of the expected shapes.
    """
    refuse_surroundings()
    reporters = reporters[torch.isin(reporters, ids)].sort().values
    collector = MessageCollector(method, data, state, reporters, keep_messages)
    request = RoundRequest(method, state, ids, reporters, seed, chunk_size, memory, record)
    if backend is None:
        assert isinstance(data, Federation)
        backend = partial(LocalRound, data)
    with backend(request) as running:
        for reply in running.replies():
            collector.take(reply)
        after, kept = collector.close(seed, reporters[:0] if silent is None else silent)
        private = running.close(after.trained[~torch.isin(after.trained, kept)])
    seen = state.seen.clone()
    seen[kept] = True
    return replace(after, client_states=private, seen=seen)


class MessageCollector:
    """Server-side collector of clients' replies in one round, which computes the next state."""

    def __init__(
        self,
        method: Method,
        data: Federation | Roster,
        state: RoundState,
        reporters: Tensor,
        keep_messages: bool = True,
    ) -> None:
        """Create a collector for the messages of the reporting clients (sorted ids)."""
        self.method, self.data, self.state, self.reporters = method, data, state, reporters
        own = {n: v.clone() for n, v in state.server.items()}
        self.inbox = inbox(method, own, reporters, keep_messages)
        self.replies: list[Reply] = []

    def take(self, reply: Reply) -> None:
        """Store one reply of some clients, and move its messages to the inbox."""
        self.inbox.take(reply.form, reply.sender, reply.message)
        reply.message = {}
        self.replies.append(reply)

    def close(self, seed: Seed, silent: Tensor) -> tuple[RoundState, Tensor]:
        """Aggregate the messages; return the next state (no client states) and accepted ids.

        Accepted are training clients without a missing, invalid or unaggregated message.
        """
        form = self._rejecting()
        reasons = [reason for reply in self.replies for reason in reply.reasons]
        report = join_up(reply.report for reply in self.replies)
        report |= {"good": torch.tensor([not reason for reason in reasons], dtype=torch.bool)}
        report = cut(report, report["ids"].argsort())
        sent = report["good"] & torch.isin(report["ids"], self.reporters)
        cohort, server, bad = self.data.cohort(report["ids"][sent]), self.state.server, list[str]()
        message = self.inbox.left(form, cohort)
        try:
            if len(cohort.ids):
                source = stream(seed, Stream.MERGE, self.state.number)
                with (
                    torch.no_grad(),
                    pyro.validation_enabled(False),
                    calling("aggregate"),
                    unwritten("aggregate", message),
                ):
                    new = self.inbox.merged(form, message, cohort, source)
                new = to_data(as_tensors("what aggregate returns", new), self.data)
                server, bad = merged(server, new, len(cohort.ids))
        except AggregationError as error:
            bad = [f"the server: {error}"]
        lost = torch.cat([silent, cohort.ids.cpu()]) if bad else silent
        kept = report["ids"][report["good"] & ~torch.isin(report["ids"], lost)]
        after = RoundState(
            number=self.state.number + 1,
            server=server,
            client_states={},
            seen=self.state.seen,
            reporters=cohort,
            message=message,
            trained=report["ids"],
            rejected=(*filter(None, reasons), *bad),
            loss=role("loss", report),
            first_loss=role("begun", report),
            steps=report["steps"],
            silent=silent,
            bytes_down=report["down"],
            bytes_up=report["up"][sent],
            names=self.state.names,
            rows=self.state.rows,
            constants=self.state.constants,
        )
        return after, kept

    def _rejecting(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """Reject messages with unexpected shapes or types; return expected shapes and types."""
        votes = [(reply.form, reply.reasons.count("")) for reply in self.replies]
        form = agreed(votes, form_of(self.state.message), self.state.server)
        for reply in self.replies:
            if odd := unlike(reply.form, form):
                reply.reasons = [
                    reason or f"{self.data.names[i]}: {odd}"
                    for reason, i in zip(reply.reasons, reply.report["ids"].tolist(), strict=True)
                ]
        return form


def by_round(method: Method | Callable[[int], Method]) -> Callable[[int], Method]:
    """Return a function that maps a round number (from 0) to the method used in that round."""
    if isinstance(method, Method):
        return lambda _: method

    def at(number: int) -> Method:
        """Return the method used in a round; raise ValueError if it is not a Method."""
        with calling(f"method({number})"):
            made = method(number)
        if not isinstance(made, Method):
            raise ValueError(
                f"method({number}) is a {type(made).__name__}; expected a Method for each round"
            )
        return made

    return at


@synchronized  # another thread may be inside a handler of its own
def refuse_surroundings() -> None:
    """Raise ValueError if called inside Pyro handlers, autocast or inference mode."""
    if _PYRO_STACK:
        kind = type(_PYRO_STACK[-1]).__name__
        raise ValueError(
            f"fit runs inside {AROUND.get(kind, kind)}, which would change the programs; call fit "
            "outside of it, and use handlers of Pyro inside the programs"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ValueError(
            "fit runs inside autocast, which would round the results of programs; call fit outside "
            "of it"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "torch.inference_mode() is on, which disables gradients; call fit outside of it"
        )
