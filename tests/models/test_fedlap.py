"""FedLap: exact in one round on quadratics; its fixed point is the optimum, and it learns."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from regressions import MEAN, PRIOR, SD, TASK, posterior, q_of
from torch.nn.functional import softplus

import pyrofl
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.models import fedlap, likelihoods, priors
from pyrofl.nets import build

PROMISES = {
    "fedlap": Promises(
        together="*",
        random=True,
        message=(2 * toys.ALL, 2 * toys.ALL + 1),
        any_number="change/shift change/precision",
    )
}


def exactly(**options: object) -> Method:
    """Let clients find their optimum to the last bits."""
    usual = {"likelihood": likelihoods.normal(), "prior": PRIOR, "covariance": "full"}
    usual |= {"epochs": 400, "batch": None, "lr": 0.1, "momentum": 0.9, "clip": None}
    return fedlap.build(build("linear", (3,), 1), **(usual | options))  # type: ignore[arg-type]


def test_the_newton_variant_is_exact_after_one_round_of_minibatches():
    method = exactly(newton=True, damping=1.0, epochs=2, batch=5)
    mean, covariance = q_of(toys.last(method, TASK.federation, 1).server)
    exact = posterior()
    close(mean, exact[0], 1e-9)
    close(covariance, exact[1], 1e-9)


def test_with_optimal_clients_one_round_is_exact_too():
    mean, covariance = q_of(toys.last(exactly(damping=1.0), TASK.federation, 1).server)
    exact = posterior()
    close(mean, exact[0], 1e-8)
    close(covariance, exact[1], 1e-8)


@pytest.mark.parametrize("newton", [False, True])
def test_partial_participation_and_damping_end_at_the_exact_posterior(newton):
    half = pyrofl.participation.fraction(0.5)
    method = exactly(newton=newton, damping=0.5)
    *_, state = federate(method, TASK.federation, 80, participation=half, chunk_size=2)
    mean, covariance = q_of(state.server)
    exact = posterior()
    close(mean, exact[0], 1e-6)
    close(covariance, exact[1], 1e-6)


@pytest.mark.parametrize("covariance", ["none", "diagonal"])
def test_smaller_covariances_find_the_exact_mean(covariance):
    tight = priors.fixed(dist.Normal, MEAN, 0.15)  # FedLap's steps are as long as it is strong
    method = exactly(covariance=covariance, damping=0.2, prior=tight)
    *_, state = federate(method, TASK.federation, 150)
    exact, _ = TASK.pooled(torch.full((3,), MEAN), torch.eye(3) / 0.15**2)
    close(state.server["w/w"].flatten(), exact, 1e-6)
    if covariance == "diagonal":  # the precisions of coordinates given all others
        precision = TASK.precision.sum(0).diagonal() + 1 / 0.15**2
        close(softplus(state.server["spread/w"].flatten()).pow(-2), precision, 1e-6)
    else:
        assert not any(n.startswith("spread") for n in state.server)


def test_rounds_are_those_of_the_released_code():
    """A loop over clients with the updates of the authors' code, which solves each client exactly.

    v_k <- v_k + rho (S_k w_k - S_g w_g), S_k = H_k - V_k + S_g; V_k <- V_k + rho (H_k - V_k).
    """
    rho, rounds, number = 0.3, 4, len(TASK.precision)
    method = exactly(covariance="diagonal", damping=rho, epochs=1500)
    prior = torch.full((3,), SD, dtype=torch.float64).pow(-2)
    mean, precision = first(method, TASK.federation, 0).server["w/w"].flatten().double(), prior
    duals = [prior * (mean - MEAN) / number] * number
    curves = [torch.zeros(3, dtype=torch.float64)] * number
    for _ in range(rounds):
        for k, (gram, optimum) in enumerate(zip(TASK.precision, TASK.mean, strict=True)):
            cavity = precision - curves[k]
            goal = gram @ optimum - duals[k] + precision * mean
            w = torch.linalg.solve(gram + cavity.diag(), goal)
            hessian = gram.diagonal()
            own = hessian - curves[k] + precision
            duals[k] = duals[k] + rho * (own * w - precision * mean)
            curves[k] = (1 - rho) * curves[k] + rho * hessian
        precision = prior + sum(curves)
        mean = (prior * MEAN + sum(duals)) / precision
    found = toys.last(method, TASK.federation, rounds, chunk_size=2).server
    close(found["w/w"].flatten(), mean, 1e-7)
    close(softplus(found["spread/w"].flatten()).pow(-2), precision, 1e-6)


def test_of_one_client_both_find_the_posterior_mode():
    """Of one client FedLap is the proximal point algorithm, and FedLap-Cov is at the mode."""
    settings = {"damping": 1.0, "batch": None, "lr": 0.1, "epochs": 400}
    point, normal = (
        toys.last(fedlap.build(toys.net(), covariance=c, **settings), toys.blobs((30,)), 20).server
        for c in ("none", "diagonal")
    )
    for name in toys.net().shapes:
        close(point[f"w/{name}"], normal[f"w/{name}"], 1e-3)


@pytest.mark.parametrize("covariance", ["none", "diagonal", "full"])
def test_it_learns(covariance):
    data = toys.blobs()
    begun, *_, done = federate(fedlap.build(toys.net(), covariance=covariance), data, 6)
    assert done.loss["w/*"].mean() < begun.loss["w/*"].mean()


def test_newton_needs_a_covariance():
    with pytest.raises(ValueError, match="newton needs the covariance"):
        fedlap.build(toys.net(), covariance="none", newton=True)
