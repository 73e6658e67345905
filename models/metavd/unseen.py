"""Clients that a hypernetwork has never seen: embeddings of their own, fitted in hindsight."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyrofl.data import Federation
from pyrofl.inference.loop.local import train
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed
from pyrofl.models.metavd.hypernetwork import TABLE
from pyrofl.tensors import role


def embed(
    method: Method,
    data: Federation,
    state: Round,
    *,
    steps: int = 5,
    lr: float = 0.9,
    seed: Seed = 0,
) -> Round:
    """Fit embeddings of held-out clients, instead of giving them the mean.

    Everything else stays. In each step a client trains from what it would receive, and its
    embedding moves as in a round: e <- e - lr J_e^T (s_received - s_local).

    Args:
        method: with a hypernetwork.
        data: the federation; held-out clients use their training rows.
        state: a round; it is not changed.
        steps: of each embedding.
        lr: learning rate.
        seed: of the clients' draws.

    Returns:
        The round, with rows for held-out clients in the table of embeddings; to be evaluated, not
        to be trained further.

    Raises:
        ValueError: if the server's table has no embeddings of just the clients that trained.
    """
    table = state.server.get(TABLE)
    if table is None or len(table) != data.clients:
        raise ValueError(
            f"the server holds {0 if table is None else len(table)} embeddings; expected "
            f"{data.clients}, those of the clients that trained"
        )
    who = data.who(torch.arange(data.clients, len(data.train)))
    table = torch.cat([table, table.mean(0).expand(len(who.ids), -1)])
    for step in range(steps):
        leaf = table.detach().requires_grad_()
        with torch.enable_grad():
            spreads = role("spread", method.download(state.server | {TABLE: leaf}, who))
        received = method.download(state.server | {TABLE: table}, who)
        found, *_ = train(
            method, received, received, data, who, seed=seed, number=state.number + step
        )
        gap = [v.detach() - found[f"spread/{n}"] for n, v in spreads.items()]
        (slope,) = torch.autograd.grad(list(spreads.values()), leaf, gap)
        table = table - lr * slope
    return replace(state, server=state.server | {TABLE: table})
