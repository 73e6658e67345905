"""Servers that step along pseudo-gradients instead of going to a mean."""

from __future__ import annotations

import torch

from pyrofl.inference.optim import Optim
from pyrofl.tensors import Tensors


def descend(make: Optim, server: Tensors, gradient: Tensors, role: str = "server/optim") -> Tensors:
    """Take one optimiser step on the server along pseudo-gradients.

    Args:
        make: the optimiser, such as `sgd(1.0, momentum=0.9)`; the server counts as one client, so
            that `clip` is the norm over all tensors of the gradient.
        server: holds the values [*p], and what the optimiser remembers of earlier rounds.
        gradient: [*p] by the names of the values.
        role: of the optimiser's memory; names under "server/" never travel.

    Returns:
        New values and memory, to be put into the server's state.
    """
    params = {n: server[n].detach()[None].clone().requires_grad_() for n in gradient}
    optimiser = make(list(params.values()))
    for group in optimiser.param_groups:
        # A fused one needs equal strides everywhere, and memory of all tensors or of none.
        group["fused"] = None
    for n, p in params.items():
        p.grad = gradient[n].detach()[None].clone()
        optimiser.state[p] = {
            key.removeprefix(f"{role}/{n}:"): value.clone()
            for key, value in server.items()
            if key.startswith(f"{role}/{n}:")
        }
    optimiser.step()
    memory = {
        f"{role}/{n}:{key}": value
        for n, p in params.items()
        for key, value in optimiser.state[p].items()
        if torch.is_tensor(value)
    }
    return {n: p.detach()[0] for n, p in params.items()} | memory
