"""Closed-form server updates that methods share."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrofl.data import Who
from pyrofl.inference.loop.messages import CannotMerge
from pyrofl.inference.method import Optim
from pyrofl.tensors import Tensors


def weighted_mean(value: Tensor, weight: Tensor) -> Tensor:
    """Average over clients: sum_c weight_c value_c / sum_c weight_c.

    Args:
        value: [C, *p].
        weight: [C], non-negative and not all zero; sizes, confidences or responsibilities.

    Raises:
        ValueError: if the weights do not fit.
        CannotMerge: if one is negative or their sum is not finite, or all are zero.

    >>> weighted_mean(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0]))
    tensor([2.])
    """
    if weight.shape != value.shape[:1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected one per client of "
            f"{tuple(value.shape)}"
        )
    total = weight.sum()
    if not bool((weight >= 0).all()) or not 0 < float(total) < float("inf"):
        raise CannotMerge(
            f"weights are {weight.tolist()}; expected finite, so their sum, not all zero, none < 0"
        )
    share = (weight / total).to(value)
    mean: Tensor = torch.tensordot(share, value, 1)
    return mean


def average(message: Tensors, weight: Tensor) -> Tensors:
    """Average every tensor [C, *p] of a message with the same weights [C]."""
    return {n: weighted_mean(v, weight) for n, v in message.items()}


def by_size(message: Tensors, who: Who) -> tuple[Tensors, Who]:
    """Fold messages that are averaged by size: their average stands for them."""
    return standing_for(who, average(message, who.size))


def by_number(message: Tensors, who: Who) -> tuple[Tensors, Who]:
    """Fold messages that are averaged evenly: their average stands for them."""
    return standing_for(who, average(message, who.each))


def standing_for(who: Who, tensors: Tensors) -> tuple[Tensors, Who]:
    """Make tensors [*p] the message of one client that stands for all and has their rows."""
    sender = Who(who.ids[:1], who.size.sum()[None], who.each.sum()[None])
    return {n: v[None] for n, v in tensors.items()}, sender


def blend(old: Tensors, new: Tensors, keep: float) -> Tensors:
    """Move only part of the way: keep * old + (1 - keep) * new, for the names of `new`."""
    return {n: keep * old[n] + (1 - keep) * v for n, v in new.items()} if keep else new


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
