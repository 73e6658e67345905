"""Schedules of learning rates and of local epochs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyrofl.arguments import Count, Share, checked
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.recipes import rebuildable


@checked
def decayed(lr: float, elapsed: Share | None) -> float:
    """Return a learning rate that is divided by 10 at 30% and again at 60% of the rounds.

    >>> [decayed(1.0, done) for done in (None, 0.29, 0.3, 0.6)]
    [1.0, 1.0, 0.1, 0.01]
    """
    return lr / 10.0 ** sum(elapsed is not None and elapsed >= share for share in (0.3, 0.6))


@rebuildable
@checked
def uneven(most: Count, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Return a function that draws each client's number of local epochs, uniform on 1 ... most.

    Args:
        most: largest number of epochs.
        seed: of the draw; use another seed in each round for new draws.

    Returns:
        ids [C] -> epochs [C], for `epochs` of a method; they go with a client's place in the
        federation, and who else takes part does not matter.
    """

    def epochs(ids: Tensor) -> Tensor:
        rngs = (stream(seed, Stream.WORK, i) for i in ids.tolist())
        return torch.stack([torch.randint(1, most + 1, (), generator=rng) for rng in rngs])

    return epochs
