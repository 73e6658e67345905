"""Survival curves and restricted means of given draws: those of scipy, Breslow and integrals."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

pytest.importorskip("formulae")

import pyrofl
from pyrofl import effects, federations, figures
from pyrofl.models.regression import survival_curves
from pyrofl.models.regression.prediction import NEW, RegressionDraws

DRAWS, TIMES = 4000, [0.0, 0.3, 1.0, 2.5]
PARAMETER = {"weibull": "shape", "gamma": "shape", "lognormal": "sigma"}
NAMES = ("bern", "basel", "chur")


def tables(sizes=(30, 8, 17)):
    random, frames = np.random.default_rng(2), {}
    for name, n in zip(NAMES, sizes, strict=True):
        frame = pd.DataFrame({"x": random.normal(size=n), "time": random.weibull(1.3, n).round(1)})
        frame["time"] = frame["time"].clip(lower=0.1)  # with ties
        frame["entry"] = (frame["time"] * random.choice([0.0, 0.5], n)).round(3)
        frames[name] = frame.assign(event=(random.uniform(size=n) < 0.7).astype(int))
    return frames


def run_of(monkeypatch, formula, family, sites, frames=None):
    """Return a run whose posterior draws are those of the given sites."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = federations.from_frames(frames or tables())
        method = pyrofl.regression(formula, data, family=family, center=False)
    drawn = RegressionDraws(sites, list(NAMES), "", 0)
    monkeypatch.setattr(survival_curves, "posterior_draws", lambda fitted, draws: drawn)
    return SimpleNamespace(method=method)


def sites(family, *, groups=False):
    random = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(DRAWS, *shape, generator=random, dtype=torch.float64)

    values = {"b": 0.5 + 0.1 * normal(1), "Intercept": -0.2 + 0.1 * normal()}
    values |= {PARAMETER[family]: (0.3 + 0.1 * normal()).exp()} if family in PARAMETER else {}
    return values | ({"sd_client": normal().abs(), "r_client": normal(3)} if groups else {})


def law(family, eta, shape):
    if family == "lognormal":
        return scipy.stats.lognorm(shape, scale=np.exp(eta))
    if family == "gamma":
        return scipy.stats.gamma(shape, scale=np.exp(eta) / shape)
    power = shape if family == "weibull" else 1.0
    return scipy.stats.weibull_min(power, scale=np.exp(-eta / power))


@pytest.mark.parametrize("family", ["exponential", "weibull", "lognormal", "gamma"])
def test_curves_and_means_of_clients_are_those_of_the_distribution(monkeypatch, family):
    values = sites(family, groups=True)
    response = "time" if family == "gamma" else "censored(time, event)"
    run = run_of(monkeypatch, f"{response} ~ x + (1 | client)", family, values)
    rows = pd.DataFrame({"x": [0.4, -1.0]})
    table = effects.survival(run, rows, TIMES, "basel", prob=0.9)
    assert table[["row", "time"]].to_numpy().tolist() == [[r, t] for r in (0, 1) for t in TIMES]
    assert len(effects.survival(run, rows, [1.0, 1.0], "basel")) == 4
    shape = values[PARAMETER[family]].numpy() if family in PARAMETER else 1.0
    means = effects.restricted_mean(run, rows, 2.0, "basel")
    for row, x in enumerate(rows["x"]):
        eta = (values["Intercept"] + values["b"][:, 0] * x + values["r_client"][:, 1]).numpy()
        expected = np.stack([law(family, eta, shape).sf(t) for t in TIMES], -1)
        found = table[table["row"] == row]
        assert found["mean"].to_numpy() == pytest.approx(expected.mean(0), abs=1e-12)
        assert found["5%"].to_numpy() == pytest.approx(np.quantile(expected, 0.05, 0), abs=1e-12)
        assert found["95%"].to_numpy() == pytest.approx(np.quantile(expected, 0.95, 0), abs=1e-12)
        grid = np.linspace(0, 2.0, 401)
        areas = np.trapezoid([law(family, eta, shape).sf(t) for t in grid], grid, axis=0)
        assert means.loc[row, "mean"] == pytest.approx(areas.mean(), abs=1e-4)
        assert means.loc[row, "sd"] == pytest.approx(areas.std(), rel=1e-3)


def test_rows_may_name_their_clients_and_new_ones_have_effects_from_their_distribution(monkeypatch):
    values = sites("weibull", groups=True)
    run = run_of(monkeypatch, "censored(time, event) ~ x + (1 | client)", "weibull", values)
    rows = pd.DataFrame({"x": [0.4, 0.4, 0.4], "client": ["chur", "zug", "basel"]})
    with pytest.warns(UserWarning, match="column client names zug besides known clients"):
        table = effects.survival(run, rows, [1.0])
    for row in (0, 2):
        alone = effects.survival(run, rows[row : row + 1], [1.0], rows["client"][row])
        assert table.loc[row, "mean"] == pytest.approx(alone.loc[0, "mean"], abs=1e-12)
    random = np.random.default_rng(0)
    effect = values["sd_client"].numpy() * random.normal(size=DRAWS)
    eta = (values["Intercept"] + 0.4 * values["b"][:, 0]).numpy() + effect
    expected = law("weibull", eta, values["shape"].numpy()).sf(1.0)
    error = expected.std() * math.sqrt(2 / DRAWS)
    assert abs(table.loc[1, "mean"] - expected.mean()) < 4 * error


@pytest.mark.parametrize("entry", ["", ", entry=entry"])
def test_cox_has_the_baseline_of_breslow_for_each_client(monkeypatch, entry):
    b = 0.5
    values = {"b": torch.full((DRAWS, 1), b, dtype=torch.float64)}
    run = run_of(monkeypatch, f"censored(time, event{entry}) ~ x", "cox", values)
    frame, last = tables()["bern"], float(tables()["bern"]["time"].max())
    seen = frame[frame["event"] == 1]
    begin = frame["entry"] if entry else -1.0
    times = sorted(seen["time"].unique())
    jumps, variances = [], []
    for time in times:
        rate = np.exp(b * frame["x"])[(frame["time"] >= time) & (begin < time)].sum()
        jumps.append((seen["time"] == time).sum() / rate)
        variances.append((seen["time"] == time).sum() / rate**2)
    table = effects.survival(run, {"x": [0.3]}, [0.0, *times], "bern")
    assert table.attrs["steps"]
    assert table["mean"][0] == table["2.5%"][0] == 1.0
    assert (table["mean"].diff().dropna() < 0).all()
    # The gamma variables of the increments determine the mean of exp(-hazard).
    risk, counts = math.exp(b * 0.3), np.array([(seen["time"] == t).sum() for t in times])
    rates = counts / np.array(jumps)
    expected = np.cumprod((1 + risk / rates) ** -counts)
    curve = survival_curves._baseline(
        run.method, RegressionDraws(values, list(NAMES), "", 0), "bern"
    )
    hazard = curve[1].numpy()
    error = np.sqrt(np.cumsum(variances) / DRAWS)
    assert (np.abs(hazard.mean(0) - np.cumsum(jumps)) < 4 * error).all()
    assert hazard.std(0) == pytest.approx(np.sqrt(np.cumsum(variances)), rel=0.07)
    assert table["mean"].to_numpy()[1:] == pytest.approx(expected, abs=4 * risk * error.max())
    mean = effects.restricted_mean(run, {"x": [0.3]}, last, "bern")
    area = np.diff([0.0, *times, last]) @ table["mean"].to_numpy()
    assert mean.loc[0, "mean"] == pytest.approx(area, abs=1e-9)


def test_what_has_no_curve_is_refused_in_one_line(monkeypatch):
    cox = {"b": torch.full((9, 1), 0.5, dtype=torch.float64)}
    run = run_of(monkeypatch, "censored(time, event) ~ x", "cox", cox)
    for call, text in (
        (lambda: effects.survival(run, {"x": [0.0]}, [1.0]), "no baseline hazard of a new client"),
        (lambda: effects.survival(run, {"x": [0.0]}, [99.0], "bern"), "a time is 99, and the last"),
        (lambda: effects.restricted_mean(run, {"x": [0.0]}, 99.0, "bern"), "a time is 99, and the"),
        (lambda: effects.survival(run, {"x": [0.0]}, [-1.0], "bern"), "expected times of at least"),
        (lambda: effects.survival(run, {"x": [0.0]}, [], "bern"), "expected times of at least 0"),
        (lambda: effects.survival(run, {"x": [0.0]}, [np.nan], "bern"), "expected times of at"),
        (lambda: effects.survival(run, {"z": [0.0]}, [1.0], "bern"), "new rows have no column 'x'"),
        (lambda: effects.survival(run, {"x": [0.0]}, [1.0], "zug"), "unknown client 'zug'"),
    ):
        with pytest.raises(ValueError, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)
    run.method.design.clients.frames.pop("bern")
    with pytest.raises(ValueError, match="would disclose its event times and the relative"):
        effects.survival(run, {"x": [0.0]}, [1.0], "bern")
    run = run_of(monkeypatch, "time ~ x", "gaussian", cox)
    with pytest.raises(ValueError, match=r"response time is no time; expected a run of family exp"):
        effects.survival(run, {"x": [0.0]}, [1.0])


def test_figures_have_a_curve_for_each_row(monkeypatch):
    values = sites("weibull")
    run = run_of(monkeypatch, "censored(time, event) ~ x", "weibull", values)
    table = effects.survival(run, {"x": [0.0, 1.0, 2.0]}, TIMES)
    figure = figures.survival(table)
    axes = figure.axes[0]
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["x = 0.0", "x = 1.0", "x = 2.0"]
    equal = effects.survival(run, {"x": [0.0, 1.0, 1.0]}, TIMES)
    shown = [text.get_text() for text in figures.survival(equal).legends[0].get_texts()]
    assert shown == ["row 0", "row 1", "row 2"]
    for row, line in enumerate(axes.get_lines()[:3]):
        assert line.get_ydata().tolist() == table[table["row"] == row]["mean"].tolist()
        assert line.get_drawstyle() == "default"
    assert axes.get_ylabel() == "survival probability"
    assert len(figures.survival(table[table["row"] == 0]).axes[0].get_lines()) >= 1
    assert NEW not in table.columns
