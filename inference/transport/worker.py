"""A worker process: it holds the rows and the private state of some clients, and trains them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.inference.engine.client_states import ClientStates, none
from pyrofl.inference.engine.local_round import LocalRound, Reply, RoundRequest
from pyrofl.inference.engine.state import to_data
from pyrofl.inference.method import Method
from pyrofl.inference.transport.wire import sealed
from pyrofl.tensors import Tensors, cut


def assign_clients(sizes: Tensor, workers: int) -> list[Tensor]:
    """Assign clients to workers, the largest first, so that all have about as many rows.

    >>> assign_clients(torch.tensor([1, 9, 3, 8]), 2)
    [tensor([1, 2]), tensor([0, 3])]
    """
    ids = sizes.argsort(descending=True, stable=True)
    return [ids[w::workers].sort().values for w in range(workers)]


class Worker:
    """Some clients, with their rows and what they keep."""

    def __init__(self, data: Federation, mine: Tensor, device: str | torch.device) -> None:
        """Begin; `mine` are their ids, sorted."""
        self.data, self.mine = data.to(device), mine
        self.states: dict[int, ClientStates] = {}
        self.round: LocalRound | None = None
        self.left: deque[Tensor] = deque()  # ids of clients that are to train side by side

    def load(self, number: int, seen: Tensor, private: Tensors) -> None:
        """Take up what the clients keep, [C, ...], under a number; `seen` [C] keep something."""
        states = none(self.data.clients, len(self.mine))
        kept = to_data(cut(private, seen), self.data)
        self.states[number] = states.updated(states.write(self.mine[seen], kept))

    def learn(self, method: Method) -> None:
        """Take up the method of the rounds that follow."""
        self.method = method

    def begin(self, number: int, held: set[int], request: dict[str, Any]) -> tuple[Reply, int]:
        """Begin a round, and go on as `more` does.

        Args:
            number: of the states that the round begins with.
            held: numbers of states that somebody holds; others are dropped.
            request: fields of the `RoundRequest`, but for the method.
        """
        self.states = {n: states for n, states in self.states.items() if n in held}
        ids, memory, before = (request[n] for n in ("ids", "memory", "state"))
        own = {
            "state": replace(
                before, server=to_data(before.server, self.data), client_states=self.states[number]
            ),
            "ids": ids[torch.isin(ids, self.mine)],
            "memory": None if memory is None else memory * len(self.mine) // self.data.clients,
        }
        self.round = LocalRound(self.data, RoundRequest(self.method, **{**request, **own}))
        self.left = deque(self.round.chunks())
        return self.more()

    def more(self) -> tuple[Reply, int]:
        """Train further clients; return their reply, and how many groups are still to come."""
        assert self.round is not None
        reply = self.round.train(self.left.popleft())
        sender = Cohort(*(v.cpu() for v in reply.sender))
        message, report = sealed(reply.message), sealed(reply.report)
        return replace(reply, sender=sender, message=message, report=report), len(self.left)

    def close(self, before: int, number: int, back: Tensor) -> None:
        """Number what the clients keep after a round; those among `back` keep what they had."""
        self.states[number] = self.round.close(back) if self.round else self.states[before]
        self.round = None

    def undo(self) -> None:
        """Forget the round on its way."""
        self.round = None

    def kept(self, number: int) -> Tensors:
        """Return what the clients keep by the number of the states, [C, ...]."""
        return sealed(self.states[number].select(self.mine))
