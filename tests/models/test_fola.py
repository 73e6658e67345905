"""FOLA: the exact posterior where all is linear and normal, after one round or one of each."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from regressions import EVEN, MEAN, PRIOR, TASK, posterior, q_of

from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fola, guides, likelihoods, priors
from pyrofl.nets import build

PROMISES = {
    "fola": Promises(
        together="*",
        random=True,
        message=(2 * toys.ALL, 2 * toys.ALL + 1),
        any_number="shift precision",
    )
}


def exactly(**options: object) -> Method:
    """Let clients find their optimum to the last bits."""
    usual = {"likelihood": likelihoods.normal(), "prior": PRIOR, "guide": guides.full_covariance}
    usual |= {"epochs": 400, "batch": None, "lr": 0.1, "momentum": 0.9}
    return fola.build(build("linear", (3,), 1), **(usual | options))  # type: ignore[arg-type]


def test_together_one_round_is_the_exact_posterior():
    mean, covariance = q_of(toys.last(exactly(multiply=True), TASK.federation, 1).server)
    exact = posterior()
    close(mean, exact[0], 1e-9)
    close(covariance, exact[1], 1e-9)


def test_a_round_for_each_client_is_the_exact_posterior_and_more_are_too_many():
    exact = posterior(EVEN)
    *_, there, beyond = federate(exactly(), EVEN.federation, 5)
    mean, covariance = q_of(there.server)
    close(mean, exact[0], 1e-9)
    close(covariance, exact[1], 1e-9)
    precision = torch.linalg.inv(exact[1]) + EVEN.precision.mean(0)
    close(q_of(beyond.server)[1], torch.linalg.inv(precision), 1e-9)


def test_no_precision_is_too_high():
    prior = priors.fixed(dist.Normal, MEAN, 1e-3)
    mean, covariance = q_of(
        toys.last(exactly(multiply=True, prior=prior), TASK.federation, 1).server
    )
    exact = TASK.pooled(torch.full((3,), MEAN), torch.eye(3) * 1e6)
    close(mean, exact[0], 1e-9)
    close(covariance, exact[1], 1e-12)


def test_the_prior_holds_clients_back():
    far, near = (
        toys.last(exactly(strength=s, guide=guides.mean_field), EVEN.federation, 1).server
        for s in (0.0, 100.0)
    )
    prior = torch.full((1, 3), 0.5, dtype=torch.float64)
    assert (near["w/w"] - prior).norm() < (far["w/w"] - prior).norm()


@pytest.mark.parametrize("multiply", [False, True])
def test_defaults_learn(multiply):
    data = toys.blobs()
    begun, *_, done = federate(fola.build(toys.net(), multiply=multiply), data, 6)
    assert done.loss["w/*"].mean() < begun.loss["w/*"].mean()
