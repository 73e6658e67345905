"""Conjugate models: after one exchange the posterior is that of textbooks, to the last digits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyrofl
from pyrofl.data import Federation
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.models import conjugate

SIZES = (1, 6, 3, 1, 9, 2)
TIGHT = {"rtol": 1e-10, "atol": 1e-10}


@cache
def counts() -> Federation:
    """Return clients with 1 to 9 rows of a positive number and one of three kinds, and a count."""
    rng, parts = np.random.default_rng(0), {}
    for j, size in enumerate(SIZES):
        x = np.stack([rng.integers(4, 30, size), rng.integers(0, 3, size)], 1)
        y = rng.binomial(4, 0.3 + 0.05 * j, size).astype(float)
        parts[f"client {j}"] = (torch.tensor(x).double(), torch.tensor(y))
    return Federation.from_arrays(parts).to("cpu", torch.float64)


def binomial(received, local, batch):
    with batch.clients():
        p = pyro.sample("p", dist.Beta(0.5, 2.0))
        with batch.rows():
            pyro.sample("y", dist.Binomial(batch.x[..., 0], p), obs=batch.y)


def masked(received, local, batch):
    with batch.clients():
        p = pyro.sample("p", dist.Beta(0.5, 2.0))
        with batch.rows():
            known = batch.x[..., 1] > 0
            pyro.sample("y", dist.Bernoulli(p).mask(known), obs=1.0 * (batch.y > 1))


def poisson(received, local, batch):
    with batch.clients():
        rate = pyro.sample("rate", dist.Gamma(2.0, 0.5))
        with batch.rows():
            pyro.sample("y", dist.Poisson(rate * batch.x[..., 0]), obs=batch.y)


def precision(received, local, batch):
    with batch.clients():
        precision = pyro.sample("precision", dist.Gamma(3.0, 2.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(1.0, precision.rsqrt()), obs=batch.y)


def kinds(received, local, batch):
    with batch.clients():
        p = pyro.sample("p", dist.Dirichlet(torch.tensor([1.0, 0.5, 2.0])))
        with batch.rows():
            pyro.sample("kind", dist.Categorical(probs=p), obs=batch.y % 3)


def several(received, local, batch):
    """Have a rate of each kind, and the probabilities of kinds, in one program."""
    with batch.clients():
        p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
        with batch.rows():
            kind = batch.x[..., 1].long() % 3
            pyro.sample("kind", dist.Categorical(probs=p), obs=kind)
            mine = (torch.nn.functional.one_hot(kind, 3) * rate).sum(-1)
            pyro.sample("y", dist.Poisson(mine), obs=batch.y)


@dataclass(frozen=True)
class Case:
    """A program, and the parameters of its posterior given responses y and columns n and k."""

    program: Any
    exact: Any


def of_kinds(k: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(k.long(), 3).double()


CASES = {
    "binomial": Case(binomial, lambda y, n, k: {"p": [0.5 + y.sum(), 2 + (n - y).sum()]}),
    "masked": Case(
        masked,
        lambda y, n, k: {
            "p": [0.5 + ((y > 1) & (k > 0)).sum(), 2 + ((y <= 1) & (k > 0)).sum()],
        },
    ),
    "poisson": Case(poisson, lambda y, n, k: {"rate": [2 + y.sum(), 0.5 + n.sum()]}),
    "precision": Case(
        precision,
        lambda y, n, k: {"precision": [3 + len(y) / 2, 2 + (y - 1).square().sum() / 2]},
    ),
    "kinds": Case(kinds, lambda y, n, k: {"p": torch.tensor([1, 0.5, 2]) + of_kinds(y % 3).sum(0)}),
    "several": Case(
        several,
        lambda y, n, k: {
            "p": 1 + of_kinds(k).sum(0),
            "rate": torch.stack([2 + (of_kinds(k) * y[:, None]).sum(0), 1 + of_kinds(k).sum(0)], 1),
        },
    ),
}


def exact(case: Case, clients: list[int]) -> dict[str, Tensor]:
    rows = torch.cat([counts().train[j] for j in clients])
    found = case.exact(counts().y[rows], *counts().x[rows].T)
    return {n: torch.as_tensor(np.asarray(v, dtype=float)) for n, v in found.items()}


@pytest.mark.parametrize("chunk_size", [2, 6])
@pytest.mark.parametrize("name", CASES)
def test_one_round_is_the_exact_posterior(name, chunk_size):
    method = conjugate.method(CASES[name].program, counts())
    (state,) = federate(method, counts(), 1, chunk_size=chunk_size)
    for site, expected in exact(CASES[name], list(range(6))).items():
        torch.testing.assert_close(state.server[f"{site}/parameters"], expected, **TIGHT)
    assert float(state.server["server/missing"]) == 0


@pytest.mark.parametrize("name", CASES)
def test_rounds_of_some_clients_add_up_and_count_nothing_twice(name):
    method = conjugate.method(CASES[name].program, counts())
    parts = iter([[1, 3], [0, 1, 4], [2, 3, 5], [0, 1, 2]])
    asked = federate(method, counts(), 4, participation=lambda *_: torch.tensor(next(parts)))
    for state, known in zip(asked, ([1, 3], [0, 1, 3, 4], range(6), range(6)), strict=True):
        for site, expected in exact(CASES[name], list(known)).items():
            torch.testing.assert_close(state.server[f"{site}/parameters"], expected, **TIGHT)
        assert float(state.server["server/missing"]) == 6 - len(list(known))


def test_weights_of_rows_multiply_their_statistics():
    weights = torch.linspace(0.5, 2.0, len(counts().y), dtype=torch.float64)
    data = replace(counts(), weights=weights)
    (state,) = federate(conjugate.method(poisson, data), data, 1)
    expected = torch.stack([2 + (weights * data.y).sum(), 0.5 + (weights * data.x[:, 0]).sum()])
    torch.testing.assert_close(state.server["rate/parameters"], expected, **TIGHT)


def test_draws_are_those_of_the_posterior_and_need_no_correction():
    run = pyrofl.fit(conjugate.method(several, counts()), counts(), 1, progress=False)
    drawn = run.to_arviz(4000, progress=False)
    assert drawn.attrs["corrected"] == "no: the draws are of the exact posterior"
    known = exact(CASES["several"], list(range(6)))
    q = dist.Gamma(*known["rate"].T), dist.Dirichlet(known["p"])
    for name, fn in zip(("rate", "p"), q, strict=True):
        values = torch.tensor(drawn["posterior"][name].values[0])
        assert "client" not in drawn["posterior"][name].dims
        off = (values.mean(0) - fn.mean) / (fn.variance / 4000).sqrt()
        assert off.abs().max() < 4
        # The kurtosis of these is below 9, so that a variance has a relative error of (8 / S)^1/2.
        assert (values.var(0) / fn.variance).log().abs().max() < 4 * (8 / 4000) ** 0.5


def test_absent_clients_are_reported():
    method = conjugate.method(poisson, counts())
    run = pyrofl.fit(method, counts(), 1, participation=fixed(4), progress=False)
    assert any("2" in line and "have not reported" in line for line in run.warnings)


def hierarchical(received, local, batch):
    with batch.clients():
        shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
        rate = pyro.sample("rate", dist.Gamma(shape, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Poisson(rate), obs=batch.y)


def of_data(received, local, batch):
    with batch.clients():
        rate = pyro.sample("rate", dist.Gamma(batch.x[..., :1, 0], 1.0))
        with batch.rows():
            pyro.sample("y", dist.Poisson(rate), obs=batch.y)


def log_link(received, local, batch):
    with batch.clients():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Poisson(rate.exp()), obs=batch.y)


def product(received, local, batch):
    """Have two sites that are conjugate each given the other, but not together."""
    with batch.clients():
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Poisson(p * rate), obs=batch.y)


def normal(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu, 1.0), obs=batch.y)


def of_rows(received, local, batch):
    with batch.clients(), batch.rows():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Poisson(rate), obs=batch.y)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (hierarchical, "the parameters of site 'rate' depend on other sites"),
        (of_data, "the parameters of site 'rate' depend on other sites or on a client's data"),
        (log_link, "the likelihood is not conjugate to the prior of rate"),
        (product, "the likelihood is not conjugate to the prior of p, rate"),
        (normal, "site 'mu' is a Normal; expected a Beta, Gamma or Dirichlet"),
        (of_rows, "site 'rate' is inside batch.rows"),
    ],
)
def test_other_programs_are_refused_in_a_line(program, text):
    with pytest.raises(ValueError, match=text) as error:
        conjugate.method(program, counts())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["server", "client"])
def test_privacy_is_refused(where):
    privacy = pyrofl.Privacy(clip=10.0, noise_multiplier=1.0, delta=1e-3, where=where)
    told = (
        "p/parameters is a sum of exact statistics, which clipping and noise would break; use pvi"
    )
    with pytest.raises(ValueError, match=told):
        pyrofl.fit(conjugate.method(binomial, counts()), counts(), 1, privacy=privacy)
