"""Who brings a round's order to the clients and their replies back: the carrier.

A carrier is a function: order -> turn. That of one process is `Turn` with the data; other engines
bring orders to several processes, in each of which a `Turn` of some of the clients does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.loop.client_half import Reply, work
from pyrofl.inference.loop.client_states import ClientStates, Row
from pyrofl.inference.loop.state import Round, at_hand, chunks, sent_down
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed


@dataclass(frozen=True)
class Order:
    """What clients are told in a round.

    Attributes:
        method: of the round.
        state: the round before; what its clients keep is at hand where they train.
        ids: of clients that train.
        asked: sorted ids of clients whose message may go up.
        seed: of the run.
        chunk: clients trained side by side; None goes by the size of their state.
        memory: bytes of all clients' state that may be in memory; None sets no bound.
    """

    method: Method
    state: Round
    ids: Tensor
    asked: Tensor
    seed: Seed
    chunk: int | None
    memory: int | None


class Running(AbstractContextManager["Running", None], Protocol):
    """A round on its way; left by an error, clients go back to what they kept before."""

    def replies(self) -> Iterator[Reply]:
        """Let the clients train, and yield what they tell, always in the same order."""
        ...

    def close(self, back: Tensor) -> Mapping[str, Tensor]:
        """Let clients `back` go back to what they kept before; return what all keep, [J, ...]."""
        ...


Carrier = Callable[[Order], Running]


class Turn(Running):
    """A round of clients whose rows and state are here."""

    def __init__(self, data: Federation, order: Order) -> None:
        """Begin."""
        self.data, self.order = data, order
        last = order.state
        self.states = ClientStates.of(last.private, last.seen, order.memory)
        self.written: dict[int, Row] = {}

    def __exit__(self, *_: object) -> None:
        """End; if the round failed on its way, the rows that it has written become free."""
        self.written = {}

    def groups(self) -> list[Tensor]:
        """Return ids of the clients that train side by side."""
        one = self.order
        return list(chunks(one.method, self.data, one.state, one.ids, one.chunk, one.seed))

    def replies(self) -> Iterator[Reply]:
        """Let the clients train, and yield what they tell."""
        return map(self.train, self.groups())

    def close(self, back: Tensor) -> ClientStates:
        """Let some go back to what they kept; return what all keep."""
        gone = set(back.tolist())
        return self.states.updated({i: r for i, r in self.written.items() if i not in gone})

    def train(self, ids: Tensor) -> Reply:
        """Let clients train side by side, write down what they keep, and return their reply."""
        who = self.data.who(ids)
        method, state, seed = self.order.method, self.order.state, self.order.seed
        received = sent_down(method, state.server, who)
        private = at_hand(method, self.data, state, received, who, seed)
        reply, good, mine = work(
            method,
            self.data,
            who,
            received,
            private,
            self.order.asked,
            seed=seed,
            number=state.number,
        )
        self.written |= self.states.write(good, mine)
        return reply
