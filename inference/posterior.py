"""Draws from the posterior of every client."""

from __future__ import annotations

import pyro
import torch
from torch import Tensor

from pyrofl.data import Federation, stack
from pyrofl.inference.elbo import latent, traces
from pyrofl.inference.method import Method
from pyrofl.inference.noise import ClientNoise
from pyrofl.inference.prepare import ready
from pyrofl.inference.state import Round
from pyrofl.tensors import Tensors, join_up


def posterior(
    method: Method,
    data: Federation,
    state: Round,
    draws: int,
    *,
    model: str | None = None,
    adapted: str = "none",
    ids: Tensor | None = None,
    seed: int = 0,
    chunk: int | None = None,
) -> Tensors:
    """Draw from the posterior of every client: site -> [S, C, *p], clients in the order of ids.

    Args:
        method: as trained.
        data: the federation.
        state: the round.
        draws: how many, S.
        model: one of the method's views, not an ensemble.
        adapted: as in `evaluate`.
        ids: of clients; default all that train.
        seed: of the run.
        chunk: clients drawn side by side.

    Raises:
        ValueError: if draws is less than 1, or the view is an ensemble.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; expected at least 1")
    ids = torch.arange(data.clients) if ids is None else ids
    found: list[tuple[Tensor, Tensors]] = []
    for some, received, local, noise in ready(
        method, data, state, ids, model=model, adapted=adapted, seed=seed, chunk=chunk
    ):
        if isinstance(local, list):
            raise ValueError(f"{model!r} is an ensemble; draw from its members")
        batch = stack(data, [data.train[i][:1] for i in some.tolist()], data.who(some))
        with pyro.validation_enabled(False), torch.no_grad(), ClientNoise(noise):
            q, _ = traces(method.model, method.guide, received, local, batch, draws)
        sites = {n: s["value"] for n, s in latent(q) if not s["infer"].get("is_auxiliary")}
        # From [S, C, 1, *p] to [C, S, *p]: clients first, to join chunks.
        found.append((some, {n: v.squeeze(2).transpose(0, 1) for n, v in sites.items()}))
    known, by_id = torch.cat([some for some, _ in found]).sort()
    back = by_id[torch.searchsorted(known, ids)]
    return {n: v[back].transpose(0, 1) for n, v in join_up(part for _, part in found).items()}
