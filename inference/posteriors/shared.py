"""Posterior draws of shared sites, computed from the server state without clients' data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pyrofl.data.outlines import outline
from pyrofl.inference.posteriors.arviz import Fitted
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.posteriors.export import Fact, inference_data
from pyrofl.inference.seeds import separate
from pyrofl.tensors import Tensors, matches

WHY = "no: the rows that importance weights need are at the clients"


def shared_posterior(run: Fitted, draws: int = 1000) -> Tensors:
    """Draw the shared sites from the server's posterior; return site name -> draws [S, *p].

    They are drawn as by a new client, from its download alone.

    Args:
        run: a fitted run; it needs no rows.
        draws: number S of draws.
    """
    data, method = run.data, run.method
    view = method.posterior_view
    is_servers = bool(getattr(method.views[view], "posterior", None))
    if not method.shared and not is_servers:
        return {}
    shapes = data.x.shape[1:], data.y.shape[1:]
    bare = outline(data.names, data.sizes, *shapes, data.classes, data.dtype)
    new = replace(run.state, client_states={}, seen=torch.zeros_like(run.state.seen))
    found = posterior(method, bare, new, draws, ids=torch.zeros(1).long(), seed=run.seed)
    return {n: v[:, 0] for n, v in found.items() if is_servers or matches(n, method.shared)}


def shared_to_arviz(run: Fitted, draws: int = 1000) -> Any:
    """Return posterior draws of the shared sites as ArviZ data, or None without shared sites.

    They are draws of the guide, as importance weights need the rows of the clients. The attribute
    "corrected" states this.
    """
    found = shared_posterior(run, draws)
    if not found:
        return None
    axes = {
        name: ("chain", "draw", *(f"{name}_dim_{i}" for i in range(value.dim() - 1)))
        for name, value in found.items()
    }
    attrs: dict[str, Fact] = {
        "method": run.method.name or run.method.programs,
        "rounds": run.state.number,
        "seed": separate(run.seed).noise,
        "status": str(run.status),
        "corrected": WHY,
    }
    return inference_data(
        {"posterior": {n: v[None] for n, v in found.items()}}, axes, {}, None, attrs
    )
