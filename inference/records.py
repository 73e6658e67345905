"""What is written down of a run: a record of every round, and every score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from pyrofl.data import Federation
from pyrofl.inference.loop.state import Round
from pyrofl.tensors import Tensors


class Row(TypedDict):
    """One line of metrics.csv."""

    round: int
    model: str
    adapted: str
    population: str
    metric: str
    value: float


@dataclass(frozen=True)
class RoundRecord:
    """What a round leaves.

    Attributes:
        number: of the round.
        seconds: that it took, without testing.
        down, up: bytes sent to and by all clients.
        rejected: the clients whose message or state was bad, and why.
        trained: ids of the clients that trained.
        steps: gradient steps that each of these made.
        reported: ids of those whose message was merged.
        silent: ids of those that were to report and failed to.
        loss: mean loss of every step by its names, [J]; NaN where a client did not train.
    """

    number: int
    seconds: float
    down: int
    up: int
    rejected: tuple[str, ...]
    trained: list[int]
    steps: list[int]
    reported: list[int]
    silent: list[int]
    loss: Tensors

    @classmethod
    def of(cls, state: Round, data: Federation, seconds: float) -> RoundRecord:
        """Write a round down."""
        none = torch.full((data.clients,), torch.nan, dtype=data.dtype)
        return cls(
            number=state.number,
            seconds=seconds,
            down=int(state.down.sum()),
            up=int(state.up.sum()),
            rejected=state.rejected,
            trained=state.trained.tolist(),
            steps=state.steps.tolist(),
            reported=state.who.ids.tolist(),
            silent=state.silent.tolist(),
            loss={n: none.scatter(0, state.trained, v.to(none)) for n, v in state.loss.items()},
        )

    def told(self, names: Sequence[str]) -> dict[str, Any]:
        """Return a line of `Run.rounds`; names are the clients'."""
        return {
            "round": self.number,
            "seconds": self.seconds,
            "bytes_down": self.down,
            "bytes_up": self.up,
            "trained": len(self.trained),
            "steps": sum(self.steps),
            "reported": len(self.reported),
            "silent": len(self.silent),
            "silent_clients": [names[i] for i in self.silent],
            "rejected": len(self.rejected),
            "rejected_reasons": list(self.rejected),
            **{f"loss {name}": float(value.nanmean()) for name, value in self.loss.items()},
        }
