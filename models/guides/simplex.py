"""Guides and transforms of weights on the probability simplex: softmax, Dirichlet, projection."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor

from pyrofl.arguments import Positive, checked
from pyrofl.inference.definition.programs import Guide, as_event
from pyrofl.models.guides.basic import Shapes, sitewise


def softmax(
    shapes: Shapes, *, init_scale: float = 0.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Return a point guide on the simplex: the softmax of its logits over the last axis."""
    return sitewise(
        shapes,
        (spread,),
        lambda axes, logits: dist.Delta(logits.softmax(-1), event_dim=axes),
        lambda logits: (logits.softmax(-1), torch.zeros_like(logits)),
        lambda center: (center.log(),),
        random=False,
        is_simplex=True,
    )


@checked
def dirichlet(
    shapes: Shapes, *, init_scale: Positive = 0.2, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Return a Dirichlet guide over the last axis, with concentrations exp(spread).

    Args:
        shapes: see `guides.Family`, as for the others.
        init_scale: the concentrations of a simplex sum to scale^-2 at the start, so that a weight
            of mean m has standard deviation sqrt(m (1 - m) / (scale^-2 + 1)).
        loc: ignored.
        spread: role of the log concentrations.
    """

    def moments(c: Tensor) -> tuple[Tensor, Tensor]:
        mean = c.softmax(-1)  # finite where a concentration overflows
        return mean, mean * (1 - mean) / (c.exp().sum(-1, keepdim=True) + 1)

    return sitewise(
        shapes,
        (spread,),
        lambda axes, c: as_event(dist.Dirichlet(c.exp()), axes - 1),
        moments,
        lambda center: ((center / init_scale**2).log(),),
        is_simplex=True,
    )


def project(value: Tensor) -> Tensor:
    """Return the Euclidean projection of vectors [..., B] onto the probability simplex.

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


def drop_small_weights(alpha: Tensor, drop: float) -> Tensor:
    """Set weights [..., B] below `drop` to zero, and rescale the others to sum to one."""
    sparse_alpha = alpha * (alpha >= drop)
    return sparse_alpha / sparse_alpha.sum(-1, keepdim=True)
