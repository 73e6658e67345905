"""A linear-Gaussian federation whose posterior is known, for methods that claim to find it."""

from __future__ import annotations

import pyro.distributions as dist
import torch
from torch import Tensor

from pyrofl.data.loaders.conjugate import linear_regression
from pyrofl.models import priors
from pyrofl.tensors import Tensors

TASK = linear_regression(5, 3, [24, 9, 16, 12, 15], noise=0.7, between=0.4)
EVEN = linear_regression(4, 3, 15, noise=0.7, between=0.4)
MEAN, SD = 0.5, 0.8
PRIOR = priors.fixed(dist.Normal, MEAN, SD)


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
