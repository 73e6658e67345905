"""Standardized ratios, marginal means, R2 and draws of rows, computed by hand on pooled rows."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("formulae")

from scipy import optimize, stats

import pyrofl
from pyrofl import effects, federations
from pyrofl.models.regression.ratio_figures import _limit

SIZES = {"bern": 12, "basel": 60, "chur": 40}


def frames():
    """Return the tables of three clients with a binary and a numeric response."""
    random = np.random.default_rng(11)
    tables = {}
    for k, (name, n) in enumerate(SIZES.items()):
        x, treat = random.normal(size=n), random.choice(["no", "yes"], n)
        eta = -0.5 + 0.7 * x + 0.8 * (treat == "yes") + [-0.8, 0.6, 0.0][k]
        died = (random.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
        y = eta + random.normal(0, 0.7, n)
        tables[name] = pd.DataFrame({"x": x, "treat": treat, "died": died, "y": y})
    return tables


@pytest.fixture(scope="module")
def run():
    """Return a run of a logistic regression with effects of clients."""
    tables = federations.from_frames(frames())
    method = pyrofl.regression("died ~ x + treat + (1 | client)", tables, family="bernoulli")
    return pyrofl.fit(method, tables, progress=False)


def probabilities(run, *, effect, treat=None):
    """Return probabilities [S, N] of each client by the formula, from posterior draws."""
    posterior = run.to_arviz(2000, progress=False)["posterior"]
    b, intercept = posterior["b"].values[0], posterior["Intercept"].values[0]
    found = {}
    for name, frame in frames().items():
        given = frame["treat"] == "yes" if treat is None else np.full(len(frame), treat == "yes")
        eta = intercept[:, None] + np.outer(b[:, 0], frame["x"]) + np.outer(b[:, 1], given)
        eta = eta + effect * posterior["r_client"].sel(client=name).values[0][:, None]
        found[name] = 1 / (1 + np.exp(-eta))
    return found


def test_standardized_ratios_are_predicted_over_expected_events(run):
    table = effects.standardize(run)
    with_effect, without = (probabilities(run, effect=e) for e in (1, 0))
    for name, frame in frames().items():
        ratio = with_effect[name].sum(1) / without[name].sum(1)
        row = table.loc[name]
        assert row["rows"] == len(frame)
        assert row["observed"] == frame["died"].sum()
        assert row["expected"] == pytest.approx(without[name].sum(1).mean())
        assert row["raw"] == pytest.approx(row["observed"] / row["expected"])
        assert row["median"] == pytest.approx(np.median(ratio), rel=1e-3)
        assert row["97.5%"] == pytest.approx(np.quantile(ratio, 0.975), rel=1e-2)
        assert row["p_above_1"] == pytest.approx((ratio > 1).mean())
        assert abs(np.log(row["median"])) < abs(np.log(row["raw"]))  # shrunken
    assert effects.funnel(table).axes[0].get_xlabel() == "expected events"
    labels = [t.get_text() for t in effects.caterpillar(table).axes[0].get_yticklabels()]
    assert labels == table["median"].sort_values().index.tolist()


def test_weights_count_events_of_a_standardized_ratio(run):
    tables = federations.from_frames({n: f.assign(w=2.0) for n, f in frames().items()})
    formula = "died | weights(w) ~ x + treat + (1 | client)"
    method = pyrofl.regression(formula, tables, family="bernoulli")
    doubled = pyrofl.fit(method, tables, rounds=2, progress=False)
    table, single = effects.standardize(doubled, draws=500), effects.standardize(run)
    assert table["observed"].tolist() == (2 * single["observed"]).tolist()
    assert table["rows"].tolist() == (2 * single["rows"]).tolist()


def test_marginal_means_average_over_the_rows_of_all_clients(run):
    table = effects.marginal(run, "treat")
    means = {
        value: np.concatenate([*probabilities(run, effect=1, treat=value).values()], 1).mean(1)
        for value in ("no", "yes")
    }
    assert table.index.tolist() == ["treat = no", "treat = yes", "yes - no"]
    for value, mean in means.items():
        assert table.loc[f"treat = {value}", "mean"] == pytest.approx(mean.mean())
    difference = means["yes"] - means["no"]
    assert table.loc["yes - no", "sd"] == pytest.approx(difference.std(ddof=1))
    ratio = effects.marginal(run, "treat", comparison="ratio").loc["yes / no"]
    assert ratio["mean"] == pytest.approx((means["yes"] / means["no"]).mean())
    numbers = effects.marginal(run, "x", [-1.0, 1.0])
    assert numbers.loc["1.0 - -1.0", "mean"] > 0


def test_r2_and_draws_of_normal_rows_follow_from_the_posterior():
    tables = federations.from_frames(frames())
    method = pyrofl.regression("y ~ x + (1 | client)", tables)
    run = pyrofl.fit(method, tables, progress=False)
    posterior = run.to_arviz(2000, progress=False)["posterior"]
    parts = [
        posterior["Intercept"].values[0][:, None]
        + np.outer(posterior["b"].values[0][:, 0], frame["x"])
        + posterior["r_client"].sel(client=name).values[0][:, None]
        for name, frame in frames().items()
    ]
    mean = np.concatenate(parts, 1)
    sigma = posterior["sigma"].values[0]
    expected = mean.var(1) / (mean.var(1) + sigma**2)
    assert effects.r2(run).loc["R2", "mean"] == pytest.approx(expected.mean())
    assert effects.r2(run).loc["R2", "sd"] == pytest.approx(expected.std(ddof=1))
    found = effects.row_draws(run)["predictions"]
    assert found["y"].dims == ("chain", "draw", "row")
    assert np.allclose(found["epred"].values[0], mean)
    assert np.allclose(found["linpred"].values[0], mean)
    residual = (found["y"].values[0] - mean) / sigma[:, None]
    assert residual.std() == pytest.approx(1, abs=4 / np.sqrt(2 * residual.size))
    assert found["row_client"].values.tolist()[:12] == ["bern"] * 12
    new = effects.row_draws(run, {"x": [0.0, 1.0]})["predictions"]
    assert new["row_client"].values.tolist() == ["new client"] * 2
    assert new["epred"].std("draw").values.min() > found["epred"].std("draw").values.min()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda r: effects.marginal(r, "tret"), "did you mean treat"),
        (lambda r: effects.marginal(r, "x"), "column x holds numbers; expected values"),
        (lambda r: effects.marginal(r, "treat", ["no"]), "expected two or more"),
        (lambda r: effects.marginal(r, "treat", ["no", "maybe"]), "has level 'maybe'"),
        (lambda r: effects.marginal(r, "x", ["a", "b"]), "expected numbers"),
        (lambda r: effects.row_draws(r, {"x": [1.0]}), "new rows have no column 'treat'"),
        (lambda r: effects.row_draws(r, client="bern"), "client is given without rows"),
        (lambda r: effects.r2(3), "expected what pyrofl.fit returns"),
    ],
)
def test_mistakes_are_refused_in_a_line(run, call, text):
    with pytest.raises(ValueError, match=text) as error:
        call(run)
    assert "\n" not in str(error.value)


def test_ratios_need_events_and_effects_of_clients():
    tables = federations.from_frames(frames())
    for formula, family, text in (
        ("y ~ x + (1 | client)", "gaussian", "response y is no event or count"),
        ("died ~ x", "bernoulli", r"no effects of clients; expected one, such as \(1 . client\)"),
    ):
        method = pyrofl.regression(formula, tables, family=family)
        fitted = pyrofl.fit(method, tables, rounds=1, progress=False)
        with pytest.raises(ValueError, match=text):
            effects.standardize(fitted)


def test_limits_of_a_funnel_are_those_of_poisson_counts():
    for count, p in ((12, 0.975), (3, 0.025), (100, 0.999)):
        solve = optimize.brentq(lambda e, c=count, q=p: stats.poisson.cdf(c, e) - q, 1e-3, 400)
        above, below = (float(_limit(p, np.array([solve * f]))[0]) * solve for f in (1 - 1e-9, 1.0))
        assert above == pytest.approx(count, abs=1e-4)
        assert below == pytest.approx(count, abs=1e-4)
    assert _limit(0.025, np.array([0.1])).tolist() == [0.0]


def test_averages_over_some_clients_say_so_and_over_none_are_refused(run, monkeypatch):
    clients = run.method.design.clients
    frames = dict(clients.frames)
    first = next(iter(frames))
    part, every = len(frames[first]), sum(map(len, frames.values()))
    monkeypatch.setitem(run.method.design.__dict__, "clients", replace(clients, frames={}))
    with pytest.raises(ValueError, match="no client has its rows here"):
        effects.r2(run, draws=20)
    some = replace(clients, frames={first: frames[first]})
    monkeypatch.setitem(run.method.design.__dict__, "clients", some)
    for average in (effects.r2, partial(effects.marginal, column="treat")):
        with pytest.warns(UserWarning, match=f"an average over {part} of {every} rows"):
            average(run, draws=20)
