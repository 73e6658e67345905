"""Likelihood factors whose server has no rows: structure, draws, and clients that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import programs
import pyro
import pyro.distributions as dist
import pytest
import torch
from sites import some
from torch import Tensor

import pyrofl
from pyrofl.data import Federation
from pyrofl.data.outlines import outline
from pyrofl.inference import hmc as sampler
from pyrofl.inference.definition.description import clients_part
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.transport import Client, Server
from pyrofl.inference.transport.message_checks import InvalidRequestError
from pyrofl.models import likelihood_factors, pvi
from pyrofl.models.likelihood_factors import finding
from pyrofl.models.likelihood_factors.structure import OtherStructure
from pyrofl.tensors import generator

SIZES = (3, 1, 9, 4, 2)
NAMES = tuple("abcde")
LEVELS = 3


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the server's chains."""
    for name, value in {
        "NUM_METRIC_UPDATES": 1,
        "ITERATIONS_PER_UPDATE": 10,
        "DRAWS_PER_CHAIN": 10,
        "THINNING": 1,
    }.items():
        monkeypatch.setattr(sampler, name, value)


def rows(columns: int = 3, dtype: torch.dtype = torch.float64) -> Federation:
    """Return clients of 1 to 9 rows of positive numbers and levels 0 to 2, with 0 or 1 as y."""
    source, count = generator("without rows"), sum(SIZES)
    x = torch.rand(count, columns, generator=source) + 1
    x[:, 1] = torch.arange(count) % LEVELS
    y = (torch.rand(count, generator=source) < 0.6).to(dtype)
    train = torch.arange(count).split(SIZES)
    return Federation(x.to(dtype), y, train, [r[:0] for r in train], NAMES)


def bare(data: Federation, sizes: Any = None) -> Federation:
    """Return a federation of the same shapes without its rows."""
    shapes = data.x.shape[1:], data.y.shape[1:]
    return outline(data.names, sizes or data.sizes.tolist(), *shapes, data.classes, data.dtype)


def logistic(received, local, batch):
    """Have an intercept of each client, and the effect of a covariate; x: three columns."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        b = pyro.sample("b", dist.Normal(beta[..., 0], tau))
        with batch.rows():
            logits = b + beta[..., 1] * (batch.x[..., 0] - 1.5)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def of_levels(received, local, batch):
    """Have an effect of each level at each client; the second column is an index."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0).expand([LEVELS]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([LEVELS]).to_event(1))
        value = mu + tau[..., None] * z
        level = batch.x[..., 1].long()
        at = level.expand(*value.shape[:-2], -1)
        with batch.rows():
            logits = value.squeeze(-2).gather(-1, at)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def fractions(received, local, batch):
    """Have responses between 0 and 1, whose sum of parameters depends on a covariate."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        b = pyro.sample("b", dist.Normal(mu, tau))
        with batch.rows():
            mean, size = b.sigmoid(), 1 + batch.x[..., 0]
            y = batch.y.clamp(0.1, 0.9)
            pyro.sample("y", dist.Beta(mean * size, (1 - mean) * size), obs=y)


def of_rows(received, local, batch):
    """Have an effect of each row."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        with batch.rows():
            a = pyro.sample("a", dist.Normal(mu, tau))
            pyro.sample("y", dist.Poisson(a.exp()), obs=batch.y)


def correlated(received, local, batch):
    """Have intercepts and slopes with a correlation, and normal responses."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        w = beta + ((sd[..., None] * root) @ z[..., None])[..., 0]
        with batch.rows():
            mean = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, sigma), obs=batch.y)


def measured(received, local, batch):
    """Have a covariate with known measurement errors, the second column."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with batch.rows():
            true = pyro.sample("true", dist.Normal(mu, batch.x[..., 1]))
            pyro.sample("y", dist.Normal(true, sigma), obs=batch.y)


@pytest.mark.parametrize("sizes", [None, [1] * len(SIZES)])
def test_an_own_prior_may_have_a_scale_in_the_rows(sizes):
    """Without rows the scale is 0, or of the wrong sign, which says nothing of the clients'."""
    for build in (pyrofl.hierarchical, pvi.hierarchical):
        assert build(measured, bare(rows(), sizes), shared="mu sigma").name == "pvi"


@pytest.mark.parametrize("sizes", [None, [1] * len(SIZES)])
@pytest.mark.parametrize(
    ("program", "shared"),
    [
        (logistic, "beta tau"),
        (of_levels, "mu tau"),
        (fractions, "mu tau"),
        (of_rows, "mu tau"),
        (correlated, "beta sd root sigma"),
        (programs.eight_schools, "mu tau"),
        (programs.radon, "gamma sd sigma"),
        (programs.frailty, "b0 beta shape tau"),
        (programs.hospitals, "mu tau"),
    ],
)
def test_simulated_rows_show_the_structure_of_the_rows(program, shared, sizes):
    """Server and clients compare these descriptions, with all tensors of the structure."""
    if program is of_rows and sizes:
        pytest.skip("the layout of effects of rows depends on their largest number")
    data = rows()
    method = pyrofl.hierarchical(program, data, shared=shared)
    made = pyrofl.hierarchical(program, bare(data, sizes), shared=shared)
    assert made.name == "likelihood_factors"
    assert str(made) == str(method)
    assert clients_part(made) == clients_part(method)


HOLDERS = {"one": ("a",), "two": ("d", "b"), "three": ("c", "e")}


@pytest.mark.parametrize("program", [programs.eight_schools, logistic])
def test_server_and_clients_have_the_draws_of_one_process(program, short):
    """Each machine builds the method from its own rows, and the server from none."""
    data = rows()
    shared = "mu tau" if program is programs.eight_schools else "beta tau"
    method = pyrofl.hierarchical(program, data, shared=shared)
    draw = fixed(3)
    made = pyrofl.hierarchical(program, bare(data), shared=shared)
    server = Server(made, NAMES, SIZES, data.dtype, 3, participation=draw)
    clients = {}
    for holder, names in HOLDERS.items():
        own = some(data, names)
        clients[holder] = Client(pyrofl.hierarchical(program, own, shared=shared), own, 3)
    for state in federate(method, data, 3, seed=3, participation=draw, chunk_size=2):
        orders = server.configure_train(HOLDERS)
        server.aggregate_train({h: clients[h].train(order) for h, order in orders.items()})
        for name, value in state.server.items():
            torch.testing.assert_close(server.state.server[name], value, rtol=1e-8, atol=1e-8)
    here = pyrofl.Run(method, data, state, 3)
    there = pyrofl.Run(made, data, server.state, 3)
    for name, value in here.posterior(50).items():
        torch.testing.assert_close(there.posterior(50)[name], value, rtol=1e-8, atol=1e-8)


def shifted(limit: float, effect: Any) -> Any:
    """Return a program that differs from `logistic` at rows with x above a limit."""

    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            b = pyro.sample("b", dist.Normal(mu, tau))
            with batch.rows():
                far = (batch.x[..., 0] > limit).to(batch.x)
                effect(mu, tau, b, far, batch)

    return program


def scale_in_mean(mu: Tensor, tau: Tensor, b: Tensor, far: Tensor, batch: Any) -> None:
    logits = b + tau * far
    pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def curved(mu: Tensor, tau: Tensor, b: Tensor, far: Tensor, batch: Any) -> None:
    pyro.sample("y", dist.Normal(b + b**2 * far, 1.0), obs=batch.y)


def other_variance(mu: Tensor, tau: Tensor, b: Tensor, far: Tensor, batch: Any) -> None:
    pyro.sample("y", dist.Normal(b, 1.0 + tau * far), obs=batch.y)


@pytest.mark.parametrize(
    ("effect", "told"),
    [
        (scale_in_mean, "depends on tau in another way than by the scale of b"),
        (curved, "the response of a client is not linear"),
        (other_variance, "its variance depends on other variables"),
    ],
)
def test_a_client_whose_rows_contradict_the_structure_is_refused(effect, told, short):
    """No row of x exceeds the limit in simulated rows or at the first client, 1.9."""
    data = rows()
    limit = 2.5
    data.x[data.train[3], 0] = 3.0
    program = shifted(limit, effect)
    for built in (bare(data), some(data, ["a"])):
        method = pyrofl.hierarchical(program, built, shared="mu tau")
        assert method.name == "likelihood_factors"
        with pytest.warns(UserWarning, match=f"fitted by pvi, .* d: .*{told}"):
            run = pyrofl.fit(method, data, 1, progress=False, callback=lambda run: True)
        assert run.method.name == "pvi"
        method = pyrofl.hierarchical(program, built, shared="mu tau", method="likelihood_factors")
        with pytest.raises(OtherStructure, match=told) as error:
            pyrofl.fit(method, data, 1, progress=False)
        assert str(error.value).startswith("d: ")
        assert str(error.value).endswith("use pvi.hierarchical for this program")
    own = some(data, ["d"])
    real = pyrofl.hierarchical(program, own, shared="mu tau")
    order = Server(method, ["d"], [4], data.dtype).configure_train()["d"]
    with pytest.raises(InvalidRequestError, match="at the server; use the same at both"):
        Client(real, own).train(order)


@pytest.mark.parametrize("effect", [scale_in_mean, curved, other_variance])
def test_a_structure_is_that_of_all_clients_whose_rows_are_here(effect, monkeypatch):
    monkeypatch.setattr(finding, "NUM_CHECKED_CLIENTS", 2)
    data = rows()
    data.x[data.train[3], 0] = 3.0
    method = pyrofl.hierarchical(shifted(2.5, effect), data, shared="mu tau")
    run = pyrofl.fit(method, data, 1, progress=False)
    assert run.method.name == "likelihood_factors"


def missing(received, local, batch):
    """Have a likelihood at one value of a covariate alone."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.rows():
            rate = torch.where(batch.x[..., 0] == 17.0, mu.exp(), float("nan"))
            pyro.sample("y", dist.Poisson(rate), obs=batch.y)


def of_numpy(received, local, batch):
    """Have a likelihood without derivatives."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.rows():
            mean = torch.from_numpy(np.tanh(mu.numpy()))
            pyro.sample("y", dist.Normal(mean, 1.0), obs=batch.y)


@pytest.mark.parametrize(
    ("program", "told"),
    [(missing, "its likelihood is not finite"), (of_numpy, "Can't call numpy()")],
)
def test_a_program_that_fails_at_simulated_rows_is_fitted_by_pvi(program, told):
    with pytest.raises(OtherStructure, match="the program fails at simulated rows") as error:
        likelihood_factors.hierarchical(program, bare(rows()), shared="mu")
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    if program is missing:
        method = pyrofl.hierarchical(program, bare(rows()), shared="mu")
        assert method.name == "pvi"
        assert "the program fails at simulated rows" in str(method)
