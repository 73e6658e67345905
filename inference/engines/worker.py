"""What a worker does: it holds some clients' rows and what they keep, and makes their rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from pyrofl.data import Federation, Who
from pyrofl.inference.halves.wire import sealed
from pyrofl.inference.loop.carrier import Order, Turn
from pyrofl.inference.loop.client_half import Reply
from pyrofl.inference.loop.client_states import ClientStates, RowStore
from pyrofl.inference.loop.state import Round, to_data
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed
from pyrofl.tensors import Tensors, cut


def dealt(sizes: Tensor, workers: int) -> list[Tensor]:
    """Deal clients to workers, the largest first, so that all have about as many rows.

    >>> dealt(torch.tensor([1, 9, 3, 8]), 2)
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
        self.turn: Turn | None = None
        self.left: deque[Tensor] = deque()  # ids of clients that are to train side by side

    def load(self, number: int, seen: Tensor, private: Tensors) -> None:
        """Take up what the clients keep, [C, ...], under a number; `seen` [C] keep something."""
        states = ClientStates(self.data.clients, RowStore(len(self.mine)), {}, {})
        kept = to_data(cut(private, seen), self.data)
        self.states[number] = states.updated(states.write(self.mine[seen], kept))

    def learn(self, method: Method) -> None:
        """Take up the method of the rounds that follow."""
        self.method = method

    def begin(
        self,
        sheet: tuple[Round, tuple[int, set[int]], Tensor, Tensor, Seed, int | None, int | None],
    ) -> tuple[Reply, int]:
        """Begin a round, and go on as `more` does; drop states that nobody holds any more."""
        before, (number, held), ids, asked, seed, chunk, memory = sheet
        self.states = {n: states for n, states in self.states.items() if n in held}
        server, private = to_data(before.server, self.data), self.states[number]
        order = Order(
            self.method,
            replace(before, server=server, private=private),
            ids[torch.isin(ids, self.mine)],
            asked,
            seed,
            chunk,
            None if memory is None else memory * len(self.mine) // self.data.clients,
        )
        self.turn = Turn(self.data, order)
        self.left = deque(self.turn.groups())
        return self.more()

    def more(self) -> tuple[Reply, int]:
        """Let further clients train; return their reply, and how many there are still to come."""
        assert self.turn is not None
        reply = self.turn.train(self.left.popleft())
        sender = Who(*(v.cpu() for v in reply.sender))
        message, told = sealed(reply.message), sealed(reply.told)
        return replace(reply, sender=sender, message=message, told=told), len(self.left)

    def close(self, before: int, number: int, back: Tensor) -> None:
        """Number what the clients keep after a round; those among `back` keep what they had."""
        self.states[number] = self.turn.close(back) if self.turn else self.states[before]
        self.turn = None

    def undo(self) -> None:
        """Forget the round on its way."""
        self.turn = None

    def kept(self, number: int) -> Tensors:
        """Return what the clients keep by the number of the states, [C, ...]."""
        return sealed(self.states[number].select(self.mine))
