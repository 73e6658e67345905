"""Who takes part in a round; draws are of places in the federation, not of names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

Draw = Callable[[Generator, int], Tensor]
"""(generator, clients) -> ids of those drawn, int64."""


def everyone(_: Generator, clients: int) -> Tensor:
    """Draw all clients."""
    return torch.arange(clients)


def fixed(count: int) -> Draw:
    """Draw this many clients, uniformly without replacement.

    Raises:
        ValueError: if count is less than 1, or (when drawing) more than there are clients.
    """
    if count < 1:
        raise ValueError(f"count of participants is {count}; expected at least 1")

    def draw(generator: Generator, clients: int) -> Tensor:
        if count > clients:
            raise ValueError(f"count of participants is {count}; expected at most {clients}")
        return torch.randperm(clients, generator=generator)[:count]

    return draw


def fraction(share: float) -> Draw:
    """Draw this share of the clients, rounded, at least one, uniformly without replacement.

    Raises:
        ValueError: if share is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share of participants is {share}; expected 0 < share <= 1")

    def draw(generator: Generator, clients: int) -> Tensor:
        return fixed(max(1, round(share * clients)))(generator, clients)

    return draw


def bernoulli(probability: float, least: int = 2) -> Draw:
    """Draw each client independently; anew until there are at least `least` (pFedVEM).

    Raises:
        ValueError: if probability is not in (0, 1], or (when drawing) there are fewer than `least`
            clients, or a thousand draws found too few.
    """
    if not 0 < probability <= 1:
        raise ValueError(f"probability of reporting is {probability}; expected 0 < p <= 1")

    def draw(generator: Generator, clients: int) -> Tensor:
        for _ in range(1000):
            ids = (torch.rand(clients, generator=generator) < probability).nonzero().flatten()
            if len(ids) >= least:
                return ids
        raise ValueError(
            f"probability of reporting is {probability}; a thousand draws from {clients} clients "
            f"gave fewer than {least} each"
        )

    return draw


def drawn(ids: Tensor, clients: int) -> Tensor:
    """Sort ids; refuse an empty draw, repeated ids and clients that do not exist."""
    ids = ids.sort().values
    if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= clients or len(ids.unique()) < len(ids):
        raise ValueError(f"drawn clients are {ids.tolist()}; expected distinct ids below {clients}")
    return ids
