"""Posterior probabilities of statements, against closed forms and NumPy."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr

import pyrofl
from pyrofl import Federation
from pyrofl.inference.posteriors.hypotheses import hypotheses

DRAWS = 4000


@pytest.fixture(scope="module")
def run() -> pyrofl.Run:
    """Three ragged clients with normal responses of known noise: the posterior of b is normal."""
    rng = np.random.default_rng(0)
    sites = {}
    for j, n in enumerate((3, 9, 5)):
        x = rng.normal(size=(n, 2))
        sites[f"c{j}"] = (x, x @ [0.3, -0.1] + rng.normal(size=n))

    def model(received, local, batch):
        with batch.clients():
            b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with batch.rows():
                pyro.sample("y", dist.Normal((b * batch.x).sum(-1), 1.0), obs=batch.y)

    data = Federation.from_arrays(sites)
    method = pyrofl.hierarchical(model, data, shared="b")
    return pyrofl.fit(method, data, rounds=1, progress=False)


def test_probabilities_are_those_of_the_normal_posterior(run):
    x, y = (v[torch.cat(list(run.data.train))].double() for v in (run.data.x, run.data.y))
    precision = x.T @ x + torch.eye(2)
    mean, covariance = torch.linalg.solve(precision, x.T @ y), precision.inverse()
    weights = {
        "b[0] > 0": [1.0, 0.0],
        "b[0] < b[1]": [-1.0, 1.0],
        "2 * b[0] - b[1] / 4 > 0.5": [2.0, -0.25],
        "-(b[0] + b[1]) > -0.5": [-1.0, -1.0],
    }
    table = run.hypothesis(list(weights), draws=DRAWS)
    for statement, weight in weights.items():
        w = torch.tensor(weight).double()
        center, sd = float(w @ mean), float((w @ covariance @ w).sqrt())
        bound = {"2 * b[0] - b[1] / 4 > 0.5": 0.5, "-(b[0] + b[1]) > -0.5": -0.5}.get(statement, 0)
        exact = float(torch.special.ndtr(torch.tensor((center - bound) / sd).double()))
        row = table.loc[statement]
        assert abs(row["probability"] - exact) < 4 * (exact * (1 - exact) / DRAWS) ** 0.5, statement
        assert row["mcse"] >= 0.9 * (exact * (1 - exact) / DRAWS) ** 0.5
        assert row["evidence_ratio"] == pytest.approx(row["probability"] / (1 - row["probability"]))
        if "<" not in statement:
            assert abs(row["mean"] - (center - bound)) < 4 * sd / DRAWS**0.5
            assert row["sd"] == pytest.approx(sd, rel=0.06)
            assert row["97.5%"] == pytest.approx(center - bound + 1.96 * sd, abs=0.15 * sd)


def made(**values: np.ndarray) -> xr.DataTree:
    """Return draws of a posterior with two chains."""
    data = {
        name: xr.DataArray(v, dims=["chain", "draw", *(f"{name}_dim" for _ in v.shape[2:])])
        for name, v in values.items()
    }
    return {"posterior": xr.Dataset(data)}


def test_functions_and_names_that_contain_others():
    rng = np.random.default_rng(1)
    b, b_b, sd = rng.normal(size=(2, 50, 3)), rng.normal(size=(2, 50)), rng.gamma(2, size=(2, 50))
    draws = made(b=b, b_b=b_b, sd=sd)
    values = {
        "exp(b[1]) > 1.1": np.exp(b[..., 1]) > 1.1,
        "b_b**2 <= log(sd) + 1": b_b**2 <= np.log(sd) + 1,
        "abs(b[0] - b_b) < sqrt(sd)": np.abs(b[..., 0] - b_b) < np.sqrt(sd),
        "expit(b_b) >= .3": 1 / (1 + np.exp(-b_b)) >= 0.3,
    }
    table = hypotheses(draws, list(values))
    for statement, holds in values.items():
        assert table.loc[statement, "probability"] == pytest.approx(holds.mean())
    assert np.isinf(hypotheses(draws, "sd > 0").loc["sd > 0", "evidence_ratio"])
    assert isinstance(hypotheses(draws, "sd > 0"), pd.DataFrame)
    assert hypotheses(draws, "slope[1] > 0", names={"b": "slope"})["probability"].iloc[
        0
    ] == pytest.approx((b[..., 1] > 0).mean())


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("b[2]", "is not a comparison"),
        ("0 < sd < 1", "is not a comparison"),
        ("sd = 0", "cannot be read"),
        ("sd == 0", "is an equality, which has probability 0"),
        ("sdd > 0", "unknown parameter 'sdd'; did you mean sd"),
        ("b[7] > 0", r"unknown parameter 'b\[7\]'"),
        ("b > 0", "unknown parameter 'b'"),
        ("sin(sd) > 0", "unknown function 'sin'"),
        ("log(b[0]) > 0", "is not finite at some draws"),
        ("1 < 2", "has no parameter"),
        ("sd > True", "has True"),
        ("__import__('os').system('x') > 0", "has __import__"),
        ("sd > '0'", "has '0'"),
        ("", "cannot be read"),
        ("sd >", "cannot be read"),
    ],
)
def test_what_is_no_statement_is_refused(statement, message):
    rng = np.random.default_rng(2)
    draws = made(b=rng.normal(size=(2, 50, 3)), sd=rng.gamma(2, size=(2, 50)))
    with pytest.raises(ValueError, match=message):
        hypotheses(draws, statement)


def test_intervals_have_a_probability(run):
    with pytest.raises(ValueError, match="prob is 95"):
        run.hypothesis("b[0] > 0", prob=95)
