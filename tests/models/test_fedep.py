"""FedEP: the exact posterior where all is linear and normal, as PVI, by moments of every kind."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from regressions import EVEN, PRIOR, SD, TASK, posterior
from torch import Tensor

from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedep, guides, likelihoods, pvi
from pyrofl.models.shared.gaussians import Normals
from pyrofl.nets import build

PROMISES = {"fedep": Promises(together="*", random=True, message=(2 * toys.ALL, 2 * toys.ALL))}

NET, NORMAL = build("linear", (3,), 1), likelihoods.normal()


def exactly(moments: str = "laplace", **options: object) -> Method:
    """Let clients find their moments to the last bits."""
    usual = {"likelihood": NORMAL, "prior": PRIOR, "guide": guides.full_covariance}
    usual |= {"damping": 1.0, "batch": None, "moments": moments, "init_scale": SD}
    own = {"epochs": 2, "lr": 1.0, "num_particles": 8} if moments == "natural" else {}
    if moments == "laplace":
        own = {"epochs": 500, "lr": 0.1, "momentum": 0.9}
    return fedep.build(NET, **(usual | own | options))  # type: ignore[arg-type]


def q_of(state: RoundState, full: bool = True) -> tuple[Tensor, Tensor]:
    """Return mean and covariance, or variances, of the server's posterior."""
    mean, root = Normals(3, full).moments(state.server)
    return mean, root @ root.T if full else root.square()


@pytest.mark.parametrize("stateless", [False, True])
@pytest.mark.parametrize("moments", ["laplace", "natural"])
def test_one_round_is_the_exact_posterior(moments, stateless):
    state = toys.last(exactly(moments, stateless=stateless), TASK.federation, 1)
    for found, exact in zip(q_of(state), posterior(), strict=True):
        close(found, exact, 1e-9)


def test_natural_gradients_are_pvi():
    usual = {"likelihood": NORMAL, "prior": PRIOR, "damping": 0.5, "epochs": 2, "lr": 1.0}
    other = pvi.build(NET, covariance="full", num_particles=8, init_scale=SD, **usual)
    for a, b in zip(
        federate(exactly("natural", damping=0.5), TASK.federation, 2),
        federate(other, TASK.federation, 2),
        strict=True,
    ):
        toys.assert_same_round(a, b)


@pytest.mark.parametrize("stateless", [False, True])
def test_diagonal_factors_have_the_mean_and_conditional_variances(stateless):
    own = {"guide": guides.mean_field, "damping": 0.5, "stateless": stateless, "epochs": 4}
    mean, variance = q_of(toys.last(exactly("natural", **own), TASK.federation, 60), False)
    exact, covariance = posterior()
    # Where all factors are taken for the mean one, the diagonal leaves a bias.
    close(mean, exact, 0.3 * covariance.diagonal().max() ** 0.5 if stateless else 1e-4)
    close(variance, 1 / torch.linalg.inv(covariance).diagonal(), 1e-6)


def test_damped_factors_go_part_of_the_way():
    exact = torch.linalg.inv(posterior()[1])
    for stateless in (False, True):
        method = exactly(damping=0.5, stateless=stateless)
        states = list(federate(method, TASK.federation, 2))
        one, two = (torch.linalg.inv(q_of(state)[1]) for state in states)
        close(two - one, (exact - one) / 2, 1e-8)


@pytest.mark.slow
def test_draws_of_a_chain_have_nearly_the_moments_of_the_tilted_distribution():
    # Clients' draws: of a precision P, steps of g make variances 1 / (P - g P^2 / 2).
    method = exactly("langevin", lr=0.02, burn_in=200, epochs=10_000)
    mean, covariance = q_of(toys.last(method, EVEN.federation, 1))
    exact = posterior(EVEN)
    away = mean - exact[0]
    assert away @ torch.linalg.solve(exact[1], away) < 0.3
    assert bool(((covariance.diagonal() / exact[1].diagonal()).log().abs() < 0.3).all())


@pytest.mark.slow
def test_nuts_draws_from_the_tilted_distribution():
    draws = 400
    mean, covariance = q_of(toys.last(exactly("nuts", num_particles=draws), TASK.federation, 1))
    exact = posterior()
    away = mean - exact[0]
    assert away @ torch.linalg.solve(exact[1], away) < 0.3
    assert bool(((covariance.diagonal() / exact[1].diagonal()).log().abs() < 0.3).all())


def test_nuts_draws_the_same_for_a_client_among_others_and_alone():
    data = EVEN.federation
    method = exactly("nuts", num_particles=3)
    one, all_of_them = (next(federate(method, data, 1, chunk_size=chunk)) for chunk in (1, None))
    toys.assert_same_round(one, all_of_them, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("moments", ["laplace", "langevin", "natural"])
@pytest.mark.parametrize("stateless", [False, True])
def test_predictions_of_a_network_get_better(moments, stateless):
    lr = 0.3 if moments == "natural" else 0.01
    method = fedep.build(toys.net(), moments=moments, stateless=stateless, lr=lr)
    data = toys.blobs()
    begun, done = first(method, data, 0), toys.last(method, data, 5)
    before, after = (evaluate(method, data, s).mean("nll") for s in (begun, done))
    assert after < before
