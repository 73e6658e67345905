"""What a worker does: it holds some clients' rows and what they keep, and makes their rounds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrofl.data import Federation, Who
from pyrofl.inference.halves.wire import sealed
from pyrofl.inference.loop.carrier import Order, Turn
from pyrofl.inference.loop.client_half import Reply
from pyrofl.inference.loop.state import Round, to_data
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed
from pyrofl.tensors import Tensors


def dealt(sizes: Tensor, workers: int) -> list[Tensor]:
    """Deal clients to workers, the largest first, so that all have about as many rows.

    >>> dealt(torch.tensor([1, 9, 3, 8]), 2)
    [tensor([1, 2]), tensor([0, 3])]
    """
    ids = sizes.argsort(descending=True, stable=True)
    return [ids[w::workers].sort().values for w in range(workers)]


@dataclass(frozen=True, repr=False)
class Held(Round):
    """A round whose private state is of some clients alone."""

    mine: Tensor | None = None  # their ids, sorted

    def kept(self, ids: Tensor) -> Tensors:
        """Return the private state of clients that were seen, [C, ...]."""
        assert self.mine is not None
        return super().kept(torch.searchsorted(self.mine, ids))


class Worker:
    """Some clients, with their rows and what they keep."""

    def __init__(self, data: Federation, mine: Tensor, device: str | torch.device) -> None:
        """Begin; `mine` are their ids, sorted."""
        self.data, self.mine = data.to(device), mine
        self.private: Tensors = {}
        self.turn: Turn | None = None
        self.left: deque[Tensor] = deque()  # ids of clients that are to train side by side

    def load(self, private: Tensors) -> None:
        """Take up what the clients keep, [C, ...]."""
        self.private = to_data(private, self.data)

    def learn(self, method: Method) -> None:
        """Take up the method of the rounds that follow."""
        self.method = method

    def begin(
        self,
        sheet: tuple[Round, Tensor, Tensor, Seed, int | None, int | None],
    ) -> tuple[Reply, int]:
        """Begin a round, and go on as `more` does."""
        before, ids, asked, seed, chunk, memory = sheet
        known = {
            **vars(before),
            "private": self.private,
            "server": to_data(before.server, self.data),
        }
        order = Order(
            self.method,
            Held(**known, mine=self.mine),
            ids[torch.isin(ids, self.mine)],
            asked,
            seed,
            chunk,
            None if memory is None else memory * len(self.mine) // self.data.clients,
        )
        self.turn = Turn(self.data, order, self.mine)
        self.left = deque(self.turn.groups())
        return self.more()

    def more(self) -> tuple[Reply, int]:
        """Let further clients train; return their reply, and how many there are still to come."""
        assert self.turn is not None
        reply = self.turn.train(self.left.popleft())
        sender = Who(*(v.cpu() for v in reply.sender))
        message, told = sealed(reply.message), sealed(reply.told)
        return replace(reply, sender=sender, message=message, told=told), len(self.left)

    def close(self, back: Tensor) -> None:
        """End the round; those of the clients that are among `back` go back."""
        if self.turn is not None:
            self.private = self.turn.close(back[torch.isin(back, self.mine)])
            self.turn = None

    def undo(self) -> None:
        """Take the round back, if one is on its way."""
        if self.turn is not None:
            self.turn.__exit__(InterruptedError)
        self.turn = None

    def kept(self) -> Tensors:
        """Return what the clients keep, [C, ...]."""
        return sealed(dict(self.private.items()))
