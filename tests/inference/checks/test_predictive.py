"""Predictive checks find the clients that a model cannot make up, and those alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import kstest

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.posteriors.export import inference_data, load, save
from pyrofl.models import pvi
from pyrofl.tensors import Tensors

SIZES, STRANGE = (60, 40, 80, 50, 70), (1, 3)
NAMES = tuple("abcde")


def federation(y: list[np.ndarray]) -> Federation:
    values = torch.from_numpy(np.concatenate(y)).double()
    parts = torch.arange(len(values)).split([len(v) for v in y])
    none = [p[:0] for p in parts]
    return Federation(values.new_ones(len(values), 1), values, parts, none, names=NAMES)


def counts(bursts: bool) -> Federation:
    """Return Poisson counts; two clients' are overdispersed if there are to be bursts."""
    g = np.random.default_rng(1)
    rates = np.exp(g.normal(1.5, 0.5, len(SIZES)))
    return federation(
        [
            g.poisson(r * (g.gamma(1.0, 1.0, n) if bursts and j in STRANGE else np.ones(n)))
            for j, (r, n) in enumerate(zip(rates, SIZES, strict=True))
        ]
    )


def measured(outliers: bool) -> Federation:
    """Return normal rows around clients' means; one row in ten of two clients may be far off."""
    g = np.random.default_rng(2)
    found = []
    for j, n in enumerate(SIZES):
        y = g.normal(g.normal(), 1.0, n)
        y[: n // 10] += 8.0 * (outliers and j in STRANGE)
        found.append(y)
    return federation(found)


def poisson(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Poisson((mu + 0.5 * eta).exp()), obs=batch.y)


def normal(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu + eta, 1.0), obs=batch.y)


def fitted(model: Program, data: Federation) -> pyrofl.Run:
    method = pvi.hierarchical(model, data, shared="mu", damping=0.7, num_particles=16, steps=6)
    return pyrofl.fit(method, data, 4, progress=False)


def values(table: pd.DataFrame) -> pd.DataFrame:
    return table.pivot(index="client", columns="statistic", values="p")


@pytest.mark.parametrize(
    ("model", "make"), [(poisson, counts), (normal, measured)], ids=["counts", "measured"]
)
def test_checks_find_the_clients_that_are_misfitted(model, make):
    good = values(pyrofl.checks.predictive_checks(fitted(model, make(False)), draws=300))
    assert ((good > 0.01) & (good < 0.99)).all(axis=None)
    bad = values(pyrofl.checks.predictive_checks(fitted(model, make(True)), draws=300))
    strange = bad.index.isin([NAMES[j] for j in STRANGE])
    assert (bad.loc[strange, ["sd", "max"]] < 0.01).all(axis=None)
    # A mean is what the model fits, so that it is right everywhere.
    assert ((bad["mean"] > 0.05) & (bad["mean"] < 0.95)).all()
    assert ((bad.loc[~strange] > 0.01) & (bad.loc[~strange] < 0.99)).all(axis=None)


def idata(made: object, seen: object, owner: str = "aab") -> object:
    """Return draws [S, N] of rows [N]."""
    arrays = {
        "posterior_predictive": {"y": np.asarray(made, dtype=float)[None]},
        "observed_data": {"y": np.asarray(seen, dtype=float)},
    }
    dims = {"posterior_predictive/y": ("chain", "draw", "row"), "observed_data/y": ("row",)}
    return inference_data(arrays, dims, {}, {"row_client": ("row", list(owner))})


def test_p_values_count_draws_above_and_half_of_those_equal():
    made = [[1, 2, 0], [3, 4, 5], [1, 4, 5], [0, 4, 9]]
    table = pyrofl.checks.predictive_checks(idata(made, [2, 3, 5]), ("mean", "max"))
    assert table[["client", "statistic"]].to_numpy().tolist() == [
        ["a", "mean"],
        ["a", "max"],
        ["b", "mean"],
        ["b", "max"],
    ]
    assert table["variable"].unique().tolist() == ["y"]
    assert table["observed"].tolist() == [2.5, 3.0, 5.0, 5.0]
    # Means of a: 1.5, 3.5, 2.5, 2; maxima 2, 4, 4, 4; b: 0, 5, 5, 9.
    assert table["p"].tolist() == [0.25 + 0.125, 0.75, 0.25 + 0.25, 0.25 + 0.25]
    assert table["mean"].tolist() == [2.375, 3.5, 4.75, 4.75]
    np.testing.assert_allclose(table["low"][0], np.quantile([1.5, 3.5, 2.5, 2], 0.025))


def test_a_statistic_may_be_any_function_of_rows():
    made = np.arange(12.0).reshape(4, 3)
    table = pyrofl.checks.predictive_checks(
        idata(made, [0, 5, 1]), {"range": lambda y: y.max(-1) - y.min(-1)}
    )
    assert table["observed"].tolist() == [5.0, 0.0]
    assert table["p"].tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        (("mean", "median"), "statistics are mean, median; expected names from"),
        ((), "statistics are none"),
        ({"own": "mean"}, "statistics are own"),
        ({"all": lambda y: y}, "'all' returns shape .* must reduce the last axis"),
        ({"pooled": lambda y: y.mean()}, "'pooled' returns shape .* must reduce the last axis"),
    ],
)
def test_other_statistics_are_refused(statistics, words):
    with pytest.raises(ValueError, match=words):
        pyrofl.checks.predictive_checks(idata(np.zeros((4, 3)), np.zeros(3)), statistics)


def test_groups_that_are_missing_are_named():
    alone = inference_data({"observed_data": {"y": np.zeros(3)}}, {"y": ("row",)}, {})
    with pytest.raises(ValueError, match="group posterior_predictive is missing"):
        pyrofl.checks.predictive_checks(alone)
    nobody = inference_data(
        {"posterior_predictive": {"y": np.zeros((1, 4, 3))}, "observed_data": {"y": np.zeros(3)}},
        {"posterior_predictive/y": ("chain", "draw", "row"), "observed_data/y": ("row",)},
        {},
    )
    with pytest.raises(ValueError, match="the coordinate row_client"):
        pyrofl.checks.pit(nobody)


def test_a_file_of_several_chains_serves_as_well_as_a_run(tmp_path):
    data = measured(False)
    method = pvi.hierarchical(normal, data, shared="mu", damping=0.5, num_particles=8, steps=4)
    runs = [pyrofl.fit(method, data, 2, seed=s, progress=False) for s in (0, 1)]
    found = pyrofl.to_arviz(runs, 50, groups=("posterior_predictive", "observed_data"))
    table = pyrofl.checks.predictive_checks(found)
    save(found, tmp_path / "run.nc")
    pd.testing.assert_frame_equal(pyrofl.checks.predictive_checks(load(tmp_path / "run.nc")), table)
    assert table["client"].unique().tolist() == list(NAMES)
    one = pyrofl.checks.predictive_checks(runs[0], draws=50)
    assert (one["observed"] == table["observed"]).all()


def test_pit_counts_draws_below_and_half_of_those_equal():
    table = pyrofl.checks.pit(idata([[1, 2, 0], [3, 4, 5], [1, 4, 5], [0, 4, 9]], [2, 3, 5]))
    assert table["pit"].tolist() == [0.75, 0.25, 0.25 + 0.25]
    assert table["client"].tolist() == ["a", "a", "b"]


def test_pit_is_uniform_for_calibrated_forecasts():
    def forecaster(width: float) -> Method:
        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            pass

        def model(received: Tensors, local: Tensors, batch: Batch) -> None:
            with batch.clients(), batch.rows():
                pyro.sample("y", dist.Normal(local["at"], width), obs=batch.y)

        return Method(
            init=lambda generator, clients: {},
            init_client=lambda received, cohort, generator: {"at": 0 * cohort.size},
            model=model,
            guide=guide,
            phases=(Phase((lambda received, local, batch: {"at": local["at"]},)),),
            aggregate=lambda server, message, cohort, generator: server,
        )

    g = np.random.default_rng(3)
    data = federation([g.normal(0, 1, 200) for _ in NAMES])
    for width, right in ((1.0, True), (0.6, False), (1.6, False)):
        run = pyrofl.fit(forecaster(width), data, 1, progress=False)
        table = pyrofl.checks.pit(run, draws=400)
        assert len(table) == 1000
        assert (kstest(table["pit"], "uniform").pvalue > 0.01) == right
