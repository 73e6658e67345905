"""A federated round, from the sampling of clients to the next state, on one page.

    sample clients -> each client: download, train by phases, upload -> reject invalid messages
    -> aggregate -> keep the states of accepted clients -> next round state

A `Backend` carries the request to clients elsewhere; by default they are in this process, see
`LocalClients`. With `record=False` and `chunk_size=1`, local training runs as it is written, by
`training.phases`, and a breakpoint in a model stops with the tensors of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import pyro
import torch
from torch import Tensor

from pyrofl.data import Federation, Roster
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.engine.client_states import ClientStates, StateRow
from pyrofl.inference.engine.messages import (
    SERVER_FAILED_PREFIX,
    BadMessage,
    form_of,
    inbox,
    join_reasons,
    privatize,
    validate_messages,
    validated_state,
)
from pyrofl.inference.engine.participation import Draw, Stragglers, sample_clients
from pyrofl.inference.engine.requests import (
    Backend,
    Reply,
    RoundRequest,
    RunningRound,
    reject_other_forms,
)
from pyrofl.inference.engine.state import (
    RoundState,
    chunks,
    current_states,
    downloaded,
    to_data,
    uploaded,
)
from pyrofl.inference.engine.surroundings import refuse_surroundings
from pyrofl.inference.training.phases import train
from pyrofl.returned import ClientError, as_tensors, calling
from pyrofl.tensors import Tensors, cut, refuse_inplace_writes, role, under
from pyrofl.turns import synchronized


def run_rounds(
    method_of: Callable[[int], Method],
    data: Federation,
    state: RoundState,
    rounds: int,
    participation: Draw,
    training_clients: Draw | None,
    stragglers: Stragglers,
    on_bad_message: str,
    seed: Seed,
    **settings: Any,
) -> Generator[RoundState, None, None]:
    """Run rounds until number `rounds`, and yield the state after each; see `run_round`."""
    for number in range(state.number, rounds):
        method = method_of(number)
        sampled, ids = sample_clients(
            method, data.clients, seed, number, participation, training_clients
        )
        reporters = stragglers.reported(sampled, data.names, seed, number)
        silent = sampled[~torch.isin(sampled, reporters)]
        method = stragglers.working(method, data.names, seed, number)
        settings["rounds"] = (rounds - number) * len(ids) / data.clients
        state = run_round(method, data, state, ids, reporters, silent, seed=seed, **settings)
        if on_bad_message == "raise" and state.rejected:
            raise BadMessage(join_reasons(state.rejected))
        yield state


@synchronized
def run_round(
    method: Method,
    data: Federation | Roster,
    state: RoundState,
    ids: Tensor,
    reporters: Tensor,
    silent: Tensor | None = None,
    *,
    seed: Seed = 0,
    chunk_size: int | None = None,
    keep_messages: bool = True,
    record: bool | None = None,
    rounds: float | None = None,
    backend: Backend | None = None,
) -> RoundState:
    """Run one round: clients `ids` train, `reporters` send messages, the server aggregates.

    A client keeps its previous state if its message is not aggregated: if it is `silent`, if its
    message, client state or loss is invalid, see `validate_messages` and `reject_other_forms`, or
    if the aggregation fails. Clients that were not selected to report keep their new state. If no
    client reports, or the aggregation is not finite, the server keeps its state.

    Raises:
        ValueError: if a function of the method modifies its arguments, or does not return a dict
            of tensors of the expected shapes.
    """
    refuse_surroundings()
    reporters = reporters[torch.isin(reporters, ids)].sort().values
    silent = reporters[:0] if silent is None else silent
    box = inbox(method, aggregation_input(method, state), reporters, keep_messages)
    request = RoundRequest(method, state, ids, reporters, seed, chunk_size, record, rounds)
    replies: list[Reply] = []
    if backend is None:
        assert isinstance(data, Federation)
        backend = partial(LocalClients, data)
    with backend(request) as running:
        for reply in running.replies():
            box.take(reply.form, reply.sender, reply.message)
            reply.message = {}  # the inbox has them: a chunk of messages is in memory only once
            replies.append(reply)
        form, report, reasons = reject_other_forms(replies, state, data.names)
        senders = report["good"] & torch.isin(report["ids"], reporters)
        cohort = data.cohort(report["ids"][senders])
        message = box.stored_messages(form, cohort)
        server, failure = state.server, ""
        try:
            if len(cohort.ids):
                source = stream(seed, Stream.MERGE, state.number)
                with (
                    torch.no_grad(),
                    pyro.validation_enabled(False),
                    calling("aggregate"),
                    refuse_inplace_writes("aggregate", message, state.server),
                ):
                    aggregated = as_tensors(
                        "what aggregate returns",
                        box.aggregate_messages(form, message, cohort, source),
                    )
                aggregated = to_data(aggregated, data)
                server, failure = validated_state(server, aggregated, len(cohort.ids))
        except AggregationError as error:
            failure = f"{SERVER_FAILED_PREFIX}{error}"
        lost = torch.cat([silent, cohort.ids.cpu()]) if failure else silent
        accepted = report["good"] & ~torch.isin(report["ids"], lost)
        client_states = running.close(report["ids"][~accepted])
    return RoundState(
        number=state.number + 1,
        server=server,
        client_states=client_states,
        seen=state.seen.index_fill(0, report["ids"][accepted], True),
        reporters=cohort,
        message=message,
        trained=report["ids"],
        rejected=tuple(filter(None, [*reasons, failure])),
        loss=role("loss", report),
        first_loss=role("begun", report),
        steps=report["steps"],
        silent=silent,
        bytes_down=report["down"],
        bytes_up=report["up"][senders],
        names=state.names,
        rows=state.rows,
        constants=state.constants,
    )


def aggregation_input(method: Method, state: RoundState) -> Tensors:
    """Return the server's tensors for the aggregation; a user's may write, so it gets a copy."""
    is_users = bool(users_code(method.aggregate)[0])
    return {n: v.clone() if is_users else v for n, v in state.server.items()}


class LocalClients(RunningRound):
    """Clients that are simulated in this process, in vectorized batches (chunks)."""

    def __init__(self, data: Federation, request: RoundRequest) -> None:
        self.data, self.request, last = data, request, request.state
        self.states = ClientStates.of(last.client_states, last.seen)
        self.written: dict[int, StateRow] = {}  # new client states, used when the round is closed

    def __exit__(self, *_: object) -> None:
        self.written = {}  # a round that failed leaves no new state

    def chunks(self) -> list[Tensor]:
        """Split the training clients into vectorized batches; return the client ids of each."""
        one = self.request
        return list(chunks(one.method, self.data, one.state, one.ids, one.chunk_size, one.seed))

    def replies(self) -> Iterator[Reply]:
        """Train the clients chunk by chunk, and yield the reply of each."""
        return map(self.train, self.chunks())

    def close(self, rejected: Tensor) -> ClientStates:
        """End the round and return all clients' states; `rejected` ids keep their old one."""
        excluded = set(rejected.tolist())
        return self.states.updated({i: r for i, r in self.written.items() if i not in excluded})

    def train(self, ids: Tensor) -> Reply:
        """Train the given clients together, store their states, and return their reply."""
        data, request, cohort = self.data, self.request, self.data.cohort(ids)
        method, state, seed = request.method, request.state, request.seed
        received = downloaded(method, state.server, cohort)
        private = current_states(method, data, state, received, cohort, seed)
        local = private | received
        with ClientError.named(data.names):
            local, loss, steps, first = train(
                method,
                received,
                local,
                data,
                cohort,
                seed,
                state.number,
                record=request.record,
                rounds=request.expected_rounds,
            )
        client_state = {n: local[n] for n in private}
        with torch.no_grad():
            message = uploaded(method, received, local)
        watched = client_state | {f"its loss of {n}": v for n, v in loss.items()}
        reasons = validate_messages(message, watched, cohort, data.names, method.rules)
        ids, good = cohort.ids.cpu(), torch.tensor([not r for r in reasons])
        sends, sent = good & torch.isin(ids, request.reporters), {}
        if bool(good.any()):
            sent = privatize(method, data, seed, state.number, received, message, cohort, sends)
        up = torch.zeros(len(ids), dtype=torch.long)
        up[sends] = method.message_bytes(sent) if sent else 0
        down = method.message_bytes(received) if received else torch.zeros_like(up)
        report = {"ids": ids, "steps": steps, "down": down, "up": up}
        report |= under("loss", loss) | under("begun", first)
        accepted = cut(client_state, good.nonzero().flatten().to(data.device))
        self.written |= self.states.write(ids[good], accepted)
        return Reply(data.cohort(ids[sends]), sent, form_of(message), reasons, report)
