"""Guide of likelihood factors: one of the server's draws, and a client's own noise given it."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

from pyrofl.data import Batch
from pyrofl.models.guides.correlated import standard_noise
from pyrofl.models.likelihood_factors.structure import Structure
from pyrofl.tensors import Tensors

PLACE, OWN = "_place", "_own"  # auxiliary sites: which draw of the server, and a client's noise


def select_draw(structure: Structure, local: Tensors, batch: Batch) -> None:
    """Select one of the listed draws, and draw the client's own noise given it."""
    if "draws" in local:
        of_draws = ("draws", "log_density", "own_mean", "own_root")
        u, log_density, mean, root = (local[n] for n in of_draws)
    else:  # while clients train: the middle of the cavity, and the prior of the effects
        u = local["mean"][..., None, :]  # [..., 1, d]
        root = torch.eye(structure.client_sites.size).to(u).expand(*u.shape[:-1], -1, -1)
        log_density, mean = torch.zeros_like(u[..., 0]), root.new_zeros(root.shape[:-1])
    count = u.shape[-2]
    with batch.clients():
        listed: Any = {"is_auxiliary": True, "listed": count}
        standard = dist.Normal(u.new_zeros(len(batch), 1), 1.0)
        place = pyro.sample(PLACE, standard.mask(False), infer=listed)
        noise = standard_noise(OWN, mean[..., 0, :])
        at = (torch.special.ndtr(place) * count).long().clamp(0, count - 1)
        client = torch.arange(len(batch), device=u.device)[:, None].expand_as(at)
        middle = (place == 0)[..., None]  # as of the mean of the guide
        shared_sites = torch.where(middle, u.mean(-2), u[client, 0, at])  # [..., C, 1, d]
        own = torch.where(middle, mean.mean(-2), mean[client, 0, at])
        scale = root[client, 0, at]
        log_q = torch.where(place == 0, 0.0, log_density[client, 0, at])
        log_own = -scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        values = structure.shared_sites.sample(shared_sites, log_q, 1.0)
        eta = own + (scale @ noise[..., None])[..., 0]  # [..., C, 1, m]
        # Of rows that nobody has trained on there is nothing but the model.
        rows = batch.mask.shape[1] if batch.at is None else 0
        values |= structure.client_sites.sample(eta, log_own, 1.0, rows)
    if not rows and (names := structure.client_sites.of_rows):
        stated = poutine.condition(structure, data=values)
        with poutine.block(hide_fn=lambda msg: msg["name"] not in names):
            stated({}, {}, batch)
