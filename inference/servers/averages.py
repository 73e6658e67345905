"""Weighted means over clients."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrofl.inference.loop.messages import CannotMerge
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


def blend(old: Tensors, new: Tensors, keep: float) -> Tensors:
    """Move only part of the way: keep * old + (1 - keep) * new, for the names of `new`."""
    return {n: keep * old[n] + (1 - keep) * v for n, v in new.items()} if keep else new
