"""Client side of a round: requests, local training, messages and replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.client_states import ClientStates, Row
from pyrofl.inference.engine.messages import Form, form_of, inspect, unlike
from pyrofl.inference.engine.state import RoundState, chunks, current_states, downloaded, uploaded
from pyrofl.inference.training.executor import recorded_as
from pyrofl.inference.training.local import Streams, train
from pyrofl.returned import ClientError, as_tensors
from pyrofl.tensors import Tensors, cut, join_up, under


@dataclass(frozen=True)
class RoundRequest:
    """Server's request to clients to train in one round, with method and server state.

    Attributes:
        method: method of the round.
        state: the previous round; its client states are only valid where the clients train.
        ids: ids of training clients.
        reporters: sorted ids of clients that send a message.
        seed: seed of the run.
        chunk_size: clients per vectorized batch; None chooses it by the size of their state.
        memory: limit of all client states in memory, in bytes; None sets no limit.
        record: whether updates may run by recorded operations.
    """

    method: Method
    state: RoundState
    ids: Tensor
    reporters: Tensor
    seed: Seed
    chunk_size: int | None = None
    memory: int | None = None
    record: bool | None = None


@dataclass
class Reply:
    """Reply of clients that trained in one vectorized batch: messages, losses and errors.

    Attributes:
        sender: clients of the messages: reporters with valid messages and states.
        message: their messages, [M, ...].
        form: form of the messages of all training clients.
        reasons: reason for rejecting each training client, or "".
        report: tensors [C] of all training clients: ids, steps, bytes down and up, losses.
    """

    sender: Cohort
    message: Tensors
    form: Form
    reasons: list[str]
    report: Tensors


def as_one(replies: Sequence[Reply], ids: Tensor) -> Reply:
    """Join the replies of all vectorized client batches into one reply, ordered by client `ids`."""
    if odd := next(filter(None, (unlike(reply.form, replies[0].form) for reply in replies)), ""):
        raise ValueError(
            f"messages of clients in different chunks differ: {odd}; upload must not depend on the "
            "chunk"
        )
    report, reasons = join_up(r.report for r in replies), [x for r in replies for x in r.reasons]
    place = (ids[:, None] == report["ids"]).int().argmax(1)
    sent = torch.cat([reply.sender.ids for reply in replies])
    size = torch.cat([reply.sender.size for reply in replies])
    senders = ids[torch.isin(ids, sent.cpu())].to(sent.device)
    row = (sent == senders[:, None]).nonzero()[:, 1]
    message = cut(join_up(r.message for r in replies if r.message), row)
    reasons = [reasons[c] for c in place.tolist()]
    return Reply(Cohort(senders, size[row]), message, replies[0].form, reasons, cut(report, place))


class RunningRound(AbstractContextManager["RunningRound", None], Protocol):
    """Interface of a training round in progress; if it fails, clients keep their old states."""

    def replies(self) -> Iterator[Reply]:
        """Train the clients, and yield their replies in a fixed order."""
        ...

    def close(self, back: Tensor) -> Mapping[str, Tensor]:
        """End the round and return all clients' states; clients in `back` keep their old state."""
        ...


Backend = Callable[[RoundRequest], RunningRound]
"""Sends a request to the clients: `LocalRound` with their data in one process, or a transport."""


class LocalRound(RunningRound):
    """Training round of clients that are simulated in this process."""

    def __init__(self, data: Federation, request: RoundRequest) -> None:
        self.data, self.request = data, request
        last = request.state
        self.states = ClientStates.of(last.client_states, last.seen, request.memory)
        self.written: dict[int, Row] = {}  # client states, used when the round is closed

    def __exit__(self, *_: object) -> None:
        """End the round; discard the new client states if the round has failed."""
        self.written = {}

    def chunks(self) -> list[Tensor]:
        """Split the training clients into vectorized batches; return the client ids of each."""
        one = self.request
        return list(chunks(one.method, self.data, one.state, one.ids, one.chunk_size, one.seed))

    def replies(self) -> Iterator[Reply]:
        """Train the clients batch by batch, and yield the reply of each batch."""
        return map(self.train, self.chunks())

    def close(self, back: Tensor) -> ClientStates:
        """End the round and return all clients' states; clients in `back` keep their old state."""
        gone = set(back.tolist())
        return self.states.updated({i: r for i, r in self.written.items() if i not in gone})

    def train(self, ids: Tensor) -> Reply:
        """Train the given clients together, store their states, and return their reply."""
        data, (method, state, seed) = self.data, self._about
        cohort = data.cohort(ids)
        received = downloaded(method, state.server, cohort)
        private = current_states(method, data, state, received, cohort, seed)
        with recorded_as(self.request.record), ClientError.named(data.names):
            local, loss, steps, first = train(
                method, received, private | received, data, cohort, seed=seed, number=state.number
            )
        mine = {n: local[n] for n in private}
        with torch.no_grad():
            message = uploaded(method, received, local)
        watched = mine | {f"its loss of {n}": v for n, v in loss.items()}
        reasons = inspect(message, watched, cohort, data.names, method.rules)
        ids, good = cohort.ids.cpu(), torch.tensor([not r for r in reasons])
        sends = good & torch.isin(ids, self.request.reporters)
        sent = self._privatized(received, message, ids, sends) if bool(good.any()) else {}
        up = torch.zeros(len(ids), dtype=torch.long)
        up[sends] = method.message_bytes(sent) if sent else 0
        down = method.message_bytes(received) if received else torch.zeros_like(up)
        report = {"ids": ids, "steps": steps, "down": down, "up": up}
        report |= under("loss", loss) | under("begun", first)
        kept = cut(mine, good.nonzero().flatten().to(data.device))
        self.written |= self.states.write(ids[good], kept)
        return Reply(data.cohort(ids[sends]), sent, form_of(message), reasons, report)

    @property
    def _about(self) -> tuple[Method, RoundState, Seed]:
        return self.request.method, self.request.state, self.request.seed

    def _privatized(
        self, received: Tensors, message: Tensors, ids: Tensor, sends: Tensor
    ) -> Tensors:
        """Return the reporting clients' messages, with privacy noise if clients must add it."""
        method, state, seed = self._about
        at = sends.nonzero().flatten()
        own = partial(stream, seed, Stream.PRIVACY, state.number)
        sources = Streams(own, [self.data.names[i] for i in ids[at].tolist()])
        at = at.to(self.data.device)
        message, promise = cut(message, at), method.metadata.privacy
        if promise is None or promise.privatize is None:
            return message
        noisy = promise.privatize(cut(received, at), message, sources)
        return as_tensors("what privatize returns", noisy)
