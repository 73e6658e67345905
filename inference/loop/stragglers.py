"""Clients that do part of their work, and clients that work and are not heard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrofl.inference.method import Method, Phase
from pyrofl.inference.seeds import Seed, Stream, stream


@dataclass(frozen=True)
class Stragglers:
    """What goes wrong at clients, drawn anew in every round, whoever else takes part.

    Attributes:
        fail: probability that a client that would report is not heard. It has trained, and keeps
            its private state; the server merges what the others sent.
        least: smallest share of its epochs that a client does, in (0, 1]; each draws a share
            uniformly from it to 1, and does at least one epoch of every phase that has any.
    """

    fail: float = 0.0
    least: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: if one is out of its range.
        """
        if not 0 <= self.fail <= 1 or not 0 < self.least <= 1:
            raise ValueError(
                f"fail is {self.fail}, least {self.least}; expected a probability and a share "
                "above 0"
            )

    def heard(self, ids: Tensor, names: Sequence[str], seed: Seed, number: int) -> Tensor:
        """Return those of the clients `ids` whose messages arrive in a round; names are by id."""
        return ids[_uniform(ids, names, seed, number)[:, 0] >= self.fail] if self.fail else ids

    def working(self, method: Method, names: Sequence[str], seed: Seed, number: int) -> Method:
        """Return the method with fewer epochs for some clients in a round; names are by id."""
        if self.least == 1:
            return method

        def share(ids: Tensor) -> Tensor:
            return self.least + (1 - self.least) * _uniform(ids, names, seed, number)[:, 1]

        return replace(method, phases=tuple(_shortened(p, share) for p in method.phases))


def _uniform(ids: Tensor, names: Sequence[str], seed: Seed, number: int) -> Tensor:
    """Draw two numbers from 0 to 1 for every client of a round: [C, 2]."""
    rngs = [stream(seed, Stream.WORK, number, names[i]) for i in ids.tolist()]
    drawn = [torch.rand(2, generator=g, dtype=torch.float64) for g in rngs]
    return torch.stack(drawn) if drawn else torch.zeros(0, 2, dtype=torch.float64)


def _shortened(phase: Phase, share: Callable[[Tensor], Tensor]) -> Phase:
    """Return a phase of which clients make a share of the epochs, rounded up."""
    whole = phase.epochs

    def epochs(ids: Tensor) -> Tensor:
        most = whole(ids) if callable(whole) else torch.full((len(ids),), whole)
        return torch.ceil(share(ids.cpu()) * most.cpu()).long()

    return replace(phase, epochs=epochs) if callable(whole) or whole > 1 else phase
