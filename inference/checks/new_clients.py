"""Posteriors of a held-out client, given increasing numbers of its training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch

from pyrofl.data import Federation
from pyrofl.inference.checks.replicas import with_modified_batches
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import ModelOptions
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.tensors import Tensors


def new_client_posterior(
    method: Method,
    data: Federation,
    state: RoundState,
    client: str,
    sizes: Sequence[int] = (0, 1, 2, 5, 10, 20),
    draws: int = 1000,
    **asked: Unpack[ModelOptions],
) -> dict[int, Tensors]:
    """Draw from the posterior of a held-out client, for increasing numbers of its rows.

    The server state stays unchanged. With n rows the client receives the download, initializes its
    state and adapts to the first n of its training rows. Without rows the same steps approach its
    prior given the server.

    Args:
        method: as trained.
        data: the federation.
        state: a round.
        client: name of a held-out client.
        sizes: numbers of rows.
        draws: number S of draws.
        asked: further arguments of `pyrofl.posterior`; adaptation is "train" unless given.

    Returns:
        n -> site -> draws [S, *p].

    Raises:
        ValueError: if the client is not held out, or has fewer rows than requested.
    """
    sites_by_size = {}
    for n in sizes:
        alone, shortened, i = restrict_new_client(method, data, client, n)
        how: ModelOptions = {"adaptation": "train", **asked}
        sites = posterior(alone, shortened, state, draws, ids=torch.tensor([i]), **how)
        sites_by_size[n] = {name: v[:, 0] for name, v in sites.items()}
    return sites_by_size


def restrict_new_client(
    method: Method, data: Federation, client: str, size: int
) -> tuple[Method, Federation, int]:
    """Restrict a held-out client to its first `size` rows; return method, data and client id."""
    held_out = data.names[data.clients :]
    if client not in held_out:
        raise ValueError(
            f"client is {client!r}; expected the name of a held-out client: {list(held_out)}"
        )
    i = data.names.index(client)
    if not 0 <= size <= len(data.train[i]):
        raise ValueError(
            f"size is {size}; expected 0 to {len(data.train[i])}, the number of {client}'s rows"
        )
    rows = [r[: max(size, 1)] if j == i else r for j, r in enumerate(data.train)]
    if not size:  # a client needs at least one row: it is masked
        method = with_modified_batches(
            method, lambda batch: replace(batch, mask=torch.zeros_like(batch.mask))
        )
    return method, replace(data, train=tuple(rows)), i
