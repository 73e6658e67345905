"""The information of minibatches adds up to that of all rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import toys
from checks import close
from promises import others_slow
from regressions import PRIOR, SD

from pyrofl.data.loaders.conjugate import linear_regression
from pyrofl.inference.definition.method import Method
from pyrofl.models import fald, fedep, fisher, fola, guides, likelihoods
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import build
from pyrofl.tensors import Tensors

SIZES = 31, 4, 17, 9, 58
TASK = linear_regression(len(SIZES), 3, SIZES, noise=0.7, between=0.4)
NORMALS = Normals(3, full=True)

USUAL = {"likelihood": likelihoods.normal(), "prior": PRIOR}
FULL = USUAL | {"guide": guides.full_covariance, "epochs": 1}


def of_guide(server: Tensors) -> torch.Tensor:
    """Return the standard deviations of the normal that the guide reads."""
    root = torch.eye(3, dtype=torch.float64)
    root[*torch.tril_indices(3, 3, -1)] = server["spread/below"]
    return (server["spread/log_sd"].exp()[:, None] * root).square().sum(1).sqrt()


def of_factors(server: Tensors) -> torch.Tensor:
    """Return the standard deviations of a product of factors."""
    return NORMALS.moments(server)[1].square().sum(1).sqrt()


def of_surrogates(server: Tensors) -> torch.Tensor:
    """Return the standard deviations of the prior times all surrogates."""
    precision = NORMALS.matrix(server["total/precision"][None])[0]
    return torch.linalg.inv(precision + torch.eye(3).double() / SD**2).diagonal().sqrt()


Case = tuple[Callable[..., Method], dict[str, object], Callable[[Tensors], torch.Tensor]]
CASES: dict[str, Case] = {
    "fisher": (fisher.build, FULL, of_guide),
    "fola": (fola.build, FULL | {"multiply": True}, of_guide),
    "fedep": (fedep.build, FULL | {"damping": 1.0}, of_factors),
    "fald": (fald.build, USUAL | {"surrogates": "full", "lr": 1e-4}, of_surrogates),
}
WAYS = list(product([None, 30, 10, 5], [False, True]))


@pytest.mark.parametrize(("batch", "weighted"), others_slow(WAYS, [(None, False), (10, True)]))
@pytest.mark.parametrize("name", CASES)
def test_standard_deviations_do_not_depend_on_the_batch_size(name, batch, weighted):
    # In a linear model with normal noise the curvature does not depend on where SGD stops, so one
    # epoch gives exact standard deviations.
    build_method, options, sd = CASES[name]
    data, precision = TASK.federation, TASK.precision
    if weighted:
        weights = torch.linspace(0.5, 1.5, len(data.y), dtype=torch.float64)
        data = type(data)(data.x, data.y, data.train, data.test, weights=weights)
        rows = [(data.x[r], weights[r]) for r in data.train]
        precision = torch.stack([x.T @ (w[:, None] * x) for x, w in rows])
    exact = torch.linalg.inv(precision.sum(0) + torch.eye(3).double() / SD**2).diagonal().sqrt()
    method = build_method(build("linear", (3,), 1), batch=batch, **options)
    close(sd(toys.last(method, data, 1).server) / exact, torch.ones(3), 1e-6)
