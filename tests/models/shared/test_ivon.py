"""IVON: the numbers of the authors' optimizer, and the optimum of a normal model."""

from __future__ import annotations

import pytest
import torch
from checks import close

from pyrofl.data import Batch
from pyrofl.models import guides, likelihoods
from pyrofl.models.fisher import STANDARD
from pyrofl.models.shared import ivon
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.nets import build

X = torch.tensor(
    [[1.0, 0.5], [0.3, -1.2], [-0.7, 0.8], [1.5, 1.1], [-0.4, 0.2]], dtype=torch.float64
)
Y = torch.tensor([1.0, -0.5, 0.2, 1.9, -0.3], dtype=torch.float64)
NOISE = torch.tensor(
    [[0.3, -1.1], [0.8, 0.4], [-1.6, 0.2], [0.5, 1.3], [-0.2, -0.7]], dtype=torch.float64
)
MEAN, PRECISION = (
    torch.tensor([0.2, -0.1], dtype=torch.float64),
    torch.tensor([2.0, 3.0], dtype=torch.float64),
)
DUAL = (
    torch.tensor([0.4, -0.3], dtype=torch.float64),
    torch.tensor([0.25, -0.5], dtype=torch.float64),
)
RHO, TEMPERATURE = 0.5, 0.8


@pytest.mark.parametrize("clients", [1, 3])
def test_five_steps_are_those_of_the_authors_code(clients, monkeypatch):
    # IVON of bayes-admm (ivonwithprior.py) with this noise: ess = n / (temperature rho), the prior
    # with mean and precision of q, -temperature DUAL / n as dual variables, beta2 = 0.8, lr = 0.1.
    core = LaplaceCore(build("linear", (2,), 1), likelihoods.normal(), STANDARD, guides.mean_field)
    optimizer = ivon.Ivon(core, 0.1, 0.9, 0.8, TEMPERATURE * RHO)
    noise = iter(NOISE)
    monkeypatch.setattr(
        ivon, "standard_noise", lambda _, shape: next(noise).expand(clients, 1, 2).clone()
    )
    data = batch(clients)
    q = {"shift": PRECISION * MEAN, "precision": PRECISION}
    goal = {
        n: (v - own / RHO).expand(clients, 2) for (n, v), own in zip(q.items(), DUAL, strict=True)
    }
    base = PRECISION.expand(clients, 2)
    local = optimizer.start(MEAN.expand(clients, 2), base, base, goal, data)
    for _ in range(5):
        local |= optimizer.draw({}, local, data)
        at = local["slope"].requires_grad_()
        (slope,) = torch.autograd.grad(
            optimizer.loss(core.model, core.point_guide, {}, local, data).sum(), at
        )
        local |= optimizer.move({}, local | {"slope": -slope}, data)
    mean = torch.tensor([0.7044406273536106, 0.30908066075745777], dtype=torch.float64)
    precision = torch.tensor([11.640618112225464, 9.467283939825542], dtype=torch.float64)
    close(local["mean"], mean.expand(clients, 2), 1e-12)
    close(optimizer.precision(local, data), precision.expand(clients, 2), 1e-12)


def batch(clients: int) -> Batch:
    """Return the same five rows for every client."""
    sizes = torch.full((clients,), 5.0, dtype=torch.float64)
    return Batch(
        X.expand(clients, 5, 2),
        Y.expand(clients, 5),
        torch.ones(clients, 5, dtype=torch.bool),
        sizes,
        torch.arange(clients),
    )
