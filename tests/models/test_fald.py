"""FALD: the law of its chain where all is linear and normal, with and without surrogates."""

from __future__ import annotations

import arviz
import numpy as np
import pytest
import torch
import toys
from checks import close
from promises import Promises
from regressions import EVEN, PRIOR, TASK, posterior
from torch import Tensor

import pyrofl
from pyrofl.data.loaders.conjugate import gaussian_means
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fald, likelihoods
from pyrofl.nets import build
from pyrofl.tensors import role

PROMISES = {
    "fald": Promises(
        together="*",
        message=(toys.ALL, toys.ALL + 1),
        settings={"lr": 1e-4},
        rises=frozenset({"w/*"}),
    )
}


def chain(lr: float, steps: int = 1, **options: object) -> Method:
    """Build a chain of the regression, all rows in one batch."""
    usual = {"likelihood": likelihoods.normal(), "prior": PRIOR, "batch": None, "keep": 10_000}
    return fald.build(build("linear", (3,), 1), lr=lr, epochs=steps, **(usual | options))  # type: ignore[arg-type]


def law(lr: float, steps: int) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the stationary law without surrogates, by hand."""
    precision, mean = TASK.precision, TASK.mean
    jacobian, noise, pull, clients = torch.zeros(3, 3), torch.zeros(3, 3), torch.zeros(3), 5
    for p, m in zip(precision, mean, strict=True):
        whole = clients * p + torch.eye(3) / 0.8**2  # of U_j
        peak = torch.linalg.solve(whole, clients * p @ m + torch.full((3,), 0.5).double() / 0.8**2)
        a = torch.eye(3).double() - lr * whole
        power = torch.linalg.matrix_power(a, steps)
        jacobian = jacobian + power / clients
        pull = pull + (torch.eye(3) - power) @ peak / clients
        spread = sum(torch.linalg.matrix_power(a, 2 * k) for k in range(steps))
        noise = noise + 2 * lr * clients * spread / clients**2
    center = torch.linalg.solve(torch.eye(3) - jacobian, pull)
    kron = torch.kron(jacobian, jacobian)
    covariance = torch.linalg.solve(torch.eye(9) - kron, noise.flatten()).view(3, 3)
    return center, covariance


def test_one_local_step_has_nearly_the_posterior_as_its_law():
    mean, covariance = law(1e-5, 1)
    exact = posterior()
    close(mean, exact[0], 1e-9)
    close(covariance, exact[1], 1e-5)


def moments(method: Method, rounds: int, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of a chain, its second moments about a mean, and the errors of both."""
    start = first(method, TASK.federation, 0).server | {"w/w": mean}
    *_, state = federate(method, TASK.federation, rounds, server_state=start, check=False)
    drawn = role("server/draw", state.server)["w"].flatten(1)
    away = drawn - mean
    pairs = (away[:, :, None] * away[:, None]).flatten(1)
    each = torch.cat([away, pairs], 1)
    ess = [arviz.ess(np.ascontiguousarray(v.numpy()[None])) for v in each.T]
    error = each.std(0) / torch.tensor([float(v) for v in ess]).sqrt()
    return away.mean(0), pairs.mean(0).view(3, 3), error


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_the_chain_has_the_law_of_its_affine_map(steps):
    lr = 0.0015
    mean, covariance = law(lr, steps)
    away, second, error = moments(chain(lr, steps), 400, mean)
    assert bool((away.abs() < 4 * error[:3]).all())
    assert bool(((second - covariance).flatten().abs() < 4 * error[3:]).all())


@pytest.mark.slow
def test_with_surrogates_local_steps_cost_nothing():
    lr, steps = 0.0015, 3
    exact, covariance = posterior()
    values, axes = torch.linalg.eigh(torch.linalg.inv(covariance))
    stationary = axes @ torch.diag(1 / (values * (1 - lr * values / 2))) @ axes.T
    drift = law(lr, steps)[0] - exact
    assert drift.norm() > 0.2 * covariance.trace().sqrt()  # without surrogates
    away, second, error = moments(chain(lr, steps, surrogates="full"), 400, exact)
    assert bool((away.abs() < 4 * error[:3] + 1e-3).all())
    assert bool(((second - stationary).flatten().abs() < 4 * error[3:]).all())


def test_without_noise_surrogates_find_the_mode():
    method = chain(0.002, 5, temperature=0.0, surrogates="full")
    state = toys.last(method, TASK.federation, 80)
    close(state.server["w/w"].flatten(), posterior()[0], 1e-9)
    total = state.server["total/precision"]
    row, column = torch.tril_indices(3, 3)
    close(total, TASK.precision.sum(0)[row, column], 1e-9)


def test_the_noise_of_the_mean_is_that_of_one_chain():
    # 200 equal clients of one step: their draws differ by noise alone, of variance 2 lr J.
    data = gaussian_means(torch.ones(200, 1), torch.ones(200)).federation
    method = fald.build(
        build("linear", (1,), 1), likelihood=likelihoods.normal(), lr=1e-3, epochs=1, batch=None
    )
    sent = toys.last(method, data, 1).message["w/w"].flatten()
    assert abs(float(sent.var()) / (2e-3 * 200) - 1) < 4 * (2 / 199) ** 0.5


def test_chains_reach_arviz_in_their_order():
    runs = pyrofl.fit(chain(0.002), EVEN.federation, 60, seeds=2, progress=False)
    found = runs.to_arviz(30)["posterior"]["w"]
    assert found.dims[:2] == ("chain", "draw")
    assert found.shape[:2] == (2, 30)
    kept = runs.runs[0].state.server["server/draw/w"][30:]
    close(torch.from_numpy(found.values[0]), kept)
    repeated = runs.to_arviz(300)["posterior"]["w"]
    few, many = (float(arviz.ess(v.isel(w_dim_0=0).values)) for v in (found, repeated))
    assert many < 3 * few  # what is repeated is worth no more


@pytest.mark.slow
def test_the_ensemble_is_the_mean_over_draws():
    data = toys.blobs()
    method = fald.build(toys.net(), lr=1e-4, ensemble=3)
    run = pyrofl.fit(method, data, 12, progress=False)
    one, several = (run.evaluate(model=m).mean("nll") for m in ("global", "ensemble"))
    assert one != several


@pytest.mark.parametrize("surrogates", ["none", "diagonal"])
def test_it_learns(surrogates):
    data = toys.blobs()
    method = fald.build(toys.net(), lr=1e-4, surrogates=surrogates)
    begun, done = first(method, data, 0), toys.last(method, data, 10)
    before, after = (evaluate(method, data, s).mean("nll") for s in (begun, done))
    assert after < before
