"""Guides for weights on the simplex: a point in two parametrisations, and a Dirichlet."""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import pyro.distributions as dist
import torch
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.programs import Guide
from pyrofl.tensors import Tensors, under


def softmax(
    shapes: Mapping[str, Size], *, scale: float = 0.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Put all mass on one point: the softmax of a over the last axis.

    Args:
        shapes: of the sites, by name.
        scale: ignored, as is `loc`; there so that guides can be exchanged.
        loc: ignored.
        spread: role of the logits a, [C, *p].
    """

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for n, shape in shapes.items():
                point = local[f"{spread}/{n}"].softmax(-1)
                pyro.sample(n, dist.Delta(point, event_dim=len(shape)))

    def start(centre: Tensors) -> Tensors:
        return under(spread, {n: centre[n].log() for n in shapes})

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{spread}/{n}"].softmax(-1) for n in shapes}
        return mean, {n: torch.zeros_like(v) for n, v in mean.items()}

    return Guide(program, start, moments, f"{spread}/*", random=False)


def dirichlet(
    shapes: Mapping[str, Size], *, scale: float = 0.2, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Let weights be Dirichlet over the last axis, with concentrations exp(c).

    Args:
        shapes: of the sites, by name.
        scale: the concentrations of a simplex sum to scale^-2 at the start, so that a weight of
            mean m has standard deviation sqrt(m (1 - m) / (scale^-2 + 1)).
        loc: ignored; there so that guides can be exchanged.
        spread: role of the log concentrations c, [C, *p].

    Raises:
        ValueError: if scale is not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale of the guide is {scale}; expected a positive number")

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for n, shape in shapes.items():
                weights = dist.Dirichlet(local[f"{spread}/{n}"].exp())
                pyro.sample(n, weights.to_event(len(shape) - 1))

    def start(centre: Tensors) -> Tensors:
        return under(spread, {n: (centre[n] / scale**2).log() for n in shapes})

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        # The softmax keeps the mean finite where a concentration overflows.
        mean = {n: local[f"{spread}/{n}"].softmax(-1) for n in shapes}
        total = {n: local[f"{spread}/{n}"].exp().sum(-1, keepdim=True) for n in shapes}
        return mean, {n: m * (1 - m) / (total[n] + 1) for n, m in mean.items()}

    return Guide(program, start, moments, f"{spread}/*")


def project(value: Tensor) -> Tensor:
    """Return the nearest points of the simplex, [..., B] -> [..., B].

    Held, Wolfe and Crowder, "Validation of subgradient optimization", 1974.

    >>> project(torch.tensor([0.75, 0.75, -1.0]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    falling = value.sort(-1, descending=True).values
    rank = torch.arange(1, value.shape[-1] + 1, device=value.device)
    offset = (falling.cumsum(-1) - 1) / rank
    # The weights that stay positive are the largest; their offset is the last one below its weight.
    last = (falling > offset).sum(-1, keepdim=True).clamp(min=1) - 1
    inside = (value - offset.gather(-1, last)).clamp(min=0)
    return inside / inside.sum(-1, keepdim=True)


def trimmed(alpha: Tensor, drop: float) -> Tensor:
    """Set weights [..., B] below `drop` to zero and scale up the others to sum to one."""
    kept = alpha * (alpha >= drop)
    return kept / kept.sum(-1, keepdim=True)
