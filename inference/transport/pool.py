"""Pool of worker processes, each of which trains some clients and stores their states.

`ray.Actors` calls functions of workers, each worker's one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.data.shard import shard
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.client_states import StateTables
from pyrofl.inference.engine.requests import Reply, RoundRequest, RunningRound
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.transport.message_checks import to_own_storage
from pyrofl.inference.transport.worker import assign_clients
from pyrofl.tensors import Tensors, cut

if TYPE_CHECKING:
    from pyrofl.inference.transport.ray import Actors

CHUNKS_AHEAD = 1  # chunks that a worker may train before the last reply is received


class RemoteStates(StateTables):
    """Client states [J, ...] that are stored in worker processes and fetched when first read."""

    def __init__(self, pool: Pool, number: int) -> None:
        """Store the worker pool, and the number that identifies these states in the workers."""
        self.pool, self.number = pool, number

    @cached_property
    def tables(self) -> Tensors:
        """Client states by name, [J, ...], fetched from the workers at first access."""
        return self.pool.fetch_states(self.number)

    def __getitem__(self, name: str) -> Tensor:
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)


class Pool:
    """Training backend that distributes clients over worker processes.

    Client states stay at the workers as long as their `RoundState` exists. They are fetched when
    they are read; those of the last `RoundState` are fetched in the end.
    """

    def __init__(self, data: Federation, post: Actors) -> None:
        """Assign clients to workers; the workers are started when the `with` block is entered."""
        self.data, self.post = data, post
        self.ids_by_worker = assign_clients(data.sizes[: data.clients], post.workers)
        self.method: Method | None = None
        self.last: RemoteStates | None = None
        self.numbers = count()
        self.held: WeakValueDictionary[int, RemoteStates] = WeakValueDictionary()

    def __enter__(self) -> Pool:
        try:
            self.post.hire([(shard(self.data, ids), ids) for ids in self.ids_by_worker])
        except BaseException:
            self.post.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Fetch the client states after the last round, and stop the workers.

        If a worker has died its states are lost, and reading them raises ChildProcessError.
        """
        try:
            if self.last is not None:
                with suppress(ChildProcessError):
                    len(self.last)
        finally:
            self.post.close()

    def __call__(self, request: RoundRequest) -> RunningRound:
        """Start a round of training in the worker processes, and return the running round."""
        before = private = request.state.client_states
        if not isinstance(before, RemoteStates) or before.pool is not self:
            before = self.new_states()
            for worker, ids in enumerate(self.ids_by_worker):
                seen, tables = request.state.seen[ids], cut(private, ids)
                self.post.send(worker, "load", before.number, seen, to_own_storage(tables))
        if request.method is not self.method:
            for worker in range(len(self.ids_by_worker)):
                self.post.send(worker, "learn", request.method)
            self.method = request.method
        return PoolRound(self, request, before)

    def new_states(self) -> RemoteStates:
        """Create a numbered reference to client states that the worker processes store."""
        remote_states = RemoteStates(self, next(self.numbers))
        self.held[remote_states.number] = remote_states
        return remote_states

    def fetch_states(self, number: int) -> Tensors:
        """Fetch all clients' states, [J, ...], from the workers; zeros for untrained clients."""
        tickets = [
            self.post.send(worker, "kept", number) for worker in range(len(self.ids_by_worker))
        ]
        whole: Tensors = {}
        for ids, ticket in zip(self.ids_by_worker, tickets, strict=True):
            for name, value in self.post.result(ticket).items():
                if name not in whole:
                    shape = (self.data.clients, *value.shape[1:])
                    whole[name] = value.new_zeros(shape, device=self.data.device)
                whole[name][ids] = value.to(self.data.device)
        return whole


@dataclass
class PoolRound(RunningRound):
    """Round of training that is in progress in the worker processes."""

    pool: Pool
    request: RoundRequest
    before: RemoteStates  # client states after the last round

    def __post_init__(self) -> None:
        ids = self.request.ids
        self.busy = [
            w
            for w, worker_ids in enumerate(self.pool.ids_by_worker)
            if bool(torch.isin(worker_ids, ids).any())
        ]
        self.waiting: deque[tuple[int, Any]] = deque()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        self.pool.post.forget([ticket for _, ticket in self.waiting])
        with suppress(ChildProcessError):
            for worker in self.busy:
                self.pool.post.send(worker, "undo")

    def replies(self) -> Iterator[Reply]:
        """Train the requested clients, and yield the workers' replies in a fixed order."""
        post, request = self.pool.post, self.request
        last = request.state
        state = RoundState(last.number, to_own_storage(last.server), {}, last.seen)
        fields = {n: v for n, v in vars(request).items() if n != "method"} | {"state": state}
        sheet = self.before.number, {*self.pool.held}, post.share(fields)
        self.waiting.extend((w, post.send(w, "begin", *sheet)) for w in self.busy)
        while self.waiting:
            worker, ticket = self.waiting[0]
            reply, left = post.result(ticket)
            self.waiting.popleft()
            ahead = [w for w, _ in self.waiting].count(worker)
            for _ in range(ahead, min(left, 1 + CHUNKS_AHEAD)):
                self.waiting.append((worker, post.send(worker, "more")))
            yield on_device(reply, self.pool.data.device)

    def close(self, rejected: Tensor) -> Mapping[str, Tensor]:
        """End the round and return all clients' states; `rejected` ids keep their old one."""
        states = self.pool.last = self.pool.new_states()
        for worker in range(len(self.pool.ids_by_worker)):
            self.pool.post.send(worker, "close", self.before.number, states.number, rejected)
        return states


def on_device(reply: Reply, device: torch.device) -> Reply:
    """Return a training reply with its message and client ids moved to a device."""
    sender = Cohort(*(v.to(device) for v in reply.sender))
    return replace(
        reply, sender=sender, message={n: v.to(device) for n, v in reply.message.items()}
    )
