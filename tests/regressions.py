"""A linear-Gaussian federation whose posterior is known, for methods that claim to find it."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyrofl.data.loaders.conjugate import linear_regression
from pyrofl.models import priors
from pyrofl.tensors import Tensors

TASK = linear_regression(5, 3, [24, 9, 16, 12, 15], noise=0.7, between=0.4)
EVEN = linear_regression(4, 3, 15, noise=0.7, between=0.4)
MEAN, SD = 0.5, 0.8
PRIOR = priors.fixed(dist.Normal, MEAN, SD)


class Two(torch.nn.Module):
    """A linear network in two parts: two weights that clients share, and one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.common = torch.nn.Parameter(torch.zeros(2))
        self.own = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ torch.cat([self.common, self.own]))[:, None]


def posterior(task: object = TASK) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the weights that all clients share."""
    found: tuple[Tensor, Tensor] = task.pooled(torch.full((3,), MEAN), torch.eye(3) / SD**2)  # type: ignore[attr-defined]
    return found


def q_of(server: Tensors, name: str = "w") -> tuple[Tensor, Tensor]:
    """Return mean and covariance of a server's normal, as `guides.full_covariance` reads it."""
    root = torch.eye(3, dtype=torch.float64)
    root[*torch.tril_indices(3, 3, -1)] = server["spread/below"]
    root = server["spread/log_sd"].exp()[:, None] * root
    return server[f"w/{name}"].flatten(), root @ root.T


def normal(server: Tensors) -> Tensors:
    """Return the natural parameters of the server's posterior, [d] each."""
    mean = torch.cat([v.flatten() for n, v in server.items() if n.startswith("w/")])
    sd = torch.cat([softplus(v.flatten()) for n, v in server.items() if n.startswith("spread/")])
    return {"shift": mean / sd**2, "precision": sd**-2}


def assert_mean_field(found: list[Tensors], mean: Tensor, precision: Tensor) -> None:
    """Compare averages of rounds with the optimum, within four standard errors of ten blocks.

    Precisions may differ by another 2%, the bias of the curvature's update.
    """
    widths = torch.stack([q["precision"] for q in found])
    means = torch.stack([q["shift"] for q in found]) / widths
    far = ((means - mean) * precision.sqrt()).view(10, -1, 3).mean(1)
    ratio = (widths / precision).view(10, -1, 3).mean(1)
    assert bool((far.mean(0).abs() < 4 * far.std(0) / 10**0.5).all()), far.mean(0)
    away = (ratio.mean(0) - 1).abs()
    assert bool((away < 0.02 + 4 * ratio.std(0) / 10**0.5).all()), ratio.mean(0)
    assert float(ratio.std(0).max()) < 0.2  # so that the bound excludes a wrong factor
