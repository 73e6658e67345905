"""Worker process that stores the rows and states of some clients, and trains them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.client_states import ClientStates, none
from pyrofl.inference.engine.requests import Reply, RoundRequest
from pyrofl.inference.engine.round import LocalClients
from pyrofl.inference.engine.state import to_data
from pyrofl.inference.transport.message_checks import to_own_storage
from pyrofl.tensors import Tensors, cut


def assign_clients(sizes: Tensor, workers: int) -> list[Tensor]:
    """Return client ids for each worker, so that workers have similar numbers of rows.

    The largest clients are assigned first.

    >>> assign_clients(torch.tensor([1, 9, 3, 8]), 2)
    [tensor([1, 2]), tensor([0, 3])]
    """
    ids = sizes.argsort(descending=True, stable=True)
    return [ids[w::workers].sort().values for w in range(workers)]


class Worker:
    """Trainer of some clients in a worker process, with their rows and states."""

    def __init__(self, data: Federation, ids: Tensor, device: str | torch.device) -> None:
        """Store the data, and the sorted ids of the clients of this worker."""
        self.data, self.ids = data.to(device), ids
        self.states: dict[int, ClientStates] = {}
        self.round: LocalClients | None = None
        self.left: deque[Tensor] = deque()  # ids of clients per remaining vectorized batch

    def load(self, number: int, seen: Tensor, private: Tensors) -> None:
        """Store client states [C, ...] under `number`, for clients that have one (`seen` [C])."""
        states = none(self.data.clients, len(self.ids))
        states_seen = to_data(cut(private, seen), self.data)
        self.states[number] = states.updated(states.write(self.ids[seen], states_seen))

    def learn(self, method: Method) -> None:
        """Store the federated method that is used in the following rounds."""
        self.method = method

    def begin(self, number: int, held: set[int], request: dict[str, Any]) -> tuple[Reply, int]:
        """Start a round and train its first batch of clients; return reply and batches left.

        The returned number is that of the remaining batches, as from `more`.

        Args:
            number: number of the states before the round.
            held: numbers of states in use; others are dropped.
            request: fields of the `RoundRequest`, except the method.
        """
        self.states = {n: states for n, states in self.states.items() if n in held}
        ids, before = request["ids"], request["state"]
        fields = {
            "state": replace(
                before, server=to_data(before.server, self.data), client_states=self.states[number]
            ),
            "ids": ids[torch.isin(ids, self.ids)],
        }
        self.round = LocalClients(self.data, RoundRequest(self.method, **{**request, **fields}))
        self.left = deque(self.round.chunks())
        return self.more()

    def more(self) -> tuple[Reply, int]:
        """Train the next batch of clients; return its reply and the number of batches left."""
        assert self.round is not None
        reply = self.round.train(self.left.popleft())
        sender = Cohort(*(v.cpu() for v in reply.sender))
        message, report = to_own_storage(reply.message), to_own_storage(reply.report)
        return replace(reply, sender=sender, message=message, report=report), len(self.left)

    def close(self, before: int, number: int, rejected: Tensor) -> None:
        """Store the round's client states under `number`; `rejected` ids keep their old one."""
        self.states[number] = self.round.close(rejected) if self.round else self.states[before]
        self.round = None

    def undo(self) -> None:
        """Discard the round in progress and its results."""
        self.round = None

    def kept(self, number: int) -> Tensors:
        """Return the client states stored under `number`, [C, ...]."""
        return to_own_storage(self.states[number].select(self.ids))
