"""Censored and left-truncated times: likelihoods by hand, maximum likelihood, and refusals.

With the cumulative hazard H of `scipy.stats`, a row has the log likelihood log f(t) of an event at
t, -H(t) of a censored time, log(S(t) - S(u)) of an event between t and u, and further + H(entry).
"""

import math
import re
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats
import torch
from pyro import poutine

pytest.importorskip("formulae")

from promises import others_slow

import pyrofl
from pyrofl import federations
from pyrofl.models.regression.effects import coefficient_draws
from pyrofl.models.regression.prediction import posterior_draws
from pyrofl.models.regression.program import cox

FAMILIES = ("exponential", "weibull", "lognormal")
FORMULA = "censored(time, event, upper=until, entry=start) ~ x"
SHIFT, RATIO = 0.1, 0.07  # in standard errors, and of standard deviations


def tables(sizes=(140, 90, 170), seed=3):
    """Return times that are seen, right, left and interval censored, with delayed entry."""
    random, frames = np.random.default_rng(seed), {}
    for name, n in zip(("bern", "basel", "chur"), sizes, strict=True):
        x, start = np.zeros(0), np.zeros(0)
        while len(x) < n:  # those that are event-free at their entry
            more, begin = random.normal(size=4 * n), random.choice([0.0, 0.3], 4 * n)
            whole = random.weibull(1.4, 4 * n) * np.exp(-(0.4 + 0.6 * more) / 1.4)
            late = whole > begin
            x, start, time = more[late][:n], begin[late][:n], whole[late][:n]
        kind = random.integers(0, 4, n)  # seen, right, interval, left
        limit = random.uniform(start, 2.0)
        kind = np.where((kind == 1) & (time <= limit), 0, kind)
        width = random.uniform(0.1, 0.5, n)
        low = np.maximum(start, time - width * random.uniform(size=n))
        low = np.where((kind == 3) | (low < 1e-9), start, low)
        frame = pd.DataFrame({"x": x, "start": start, "event": (kind != 1).astype(int)})
        frame["time"] = np.select([kind == 0, kind == 1], [time, limit], low)
        frame["until"] = np.select([kind == 0, kind == 1], [time, limit], time + width)
        frames[name] = frame
    return frames


def distribution(family, eta, shape):
    """Return the distribution of scipy; shape is sigma of lognormal."""
    if family == "lognormal":
        return scipy.stats.lognorm(shape, scale=np.exp(eta))
    power = shape if family == "weibull" else 1.0
    return scipy.stats.weibull_min(power, scale=np.exp(-eta / power))


def log_likelihood(family, frame, eta, shape):
    """Return the log likelihood of each row [N], by scipy."""
    law = distribution(family, eta, shape)
    time, upper = frame["time"].to_numpy(), frame["until"].to_numpy()
    event = frame["event"] == 1
    with np.errstate(divide="ignore", invalid="ignore"):
        within = np.log(law.cdf(upper) - law.cdf(time))
        rows = np.select(
            [event & (upper > time), event], [within, law.logpdf(time)], law.logsf(time)
        )
    return rows - law.logsf(frame["start"])


def quiet(formula, frames, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pyrofl.regression(formula, federations.from_frames(frames), **how)


def factor(method, frames, **values):
    """Return the log likelihood of each row of a program at values of its sites."""
    batch = method.prepare(federations.from_frames(frames)).batch(torch.arange(len(frames)))
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    with poutine.condition(data=values):
        tape = poutine.trace(method.model).get_trace({}, {}, batch)
    tape.compute_log_prob()
    rows = tape.nodes["time"]["log_prob"]
    return torch.cat([one[at] for one, at in zip(rows, batch.mask, strict=True)]).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_the_likelihood_of_scipy(family):
    frames = tables((30, 20, 25))
    method = quiet(FORMULA, frames, family=family, center=False)
    name = {"weibull": "shape", "lognormal": "sigma"}.get(family)
    values = {"b": [0.5], "Intercept": 0.3} | ({name: 1.3} if name else {})
    whole = pd.concat(frames.values())
    expected = log_likelihood(family, whole, 0.3 + 0.5 * whole["x"].to_numpy(), 1.3)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(factor(method, frames, **values), expected, rtol=1e-9, atol=1e-12)


def standard_errors(loss, best, step=1e-3):
    """Return standard errors by second differences of a loss at its minimum."""
    steps = step * np.eye(len(best))
    second = [
        [sum(i * j * loss(best + i * a + j * b) for i in (-1, 1) for j in (-1, 1)) for a in steps]
        for b in steps
    ]
    return np.sqrt(np.diag(np.linalg.inv(np.array(second) / (4 * step**2))))


@pytest.mark.parametrize("family", others_slow(FAMILIES, ()))
def test_coefficients_are_those_of_maximum_likelihood(family):
    frames = tables()
    whole = pd.concat(frames.values())
    x = whole["x"].to_numpy()

    def loss(w):
        return -log_likelihood(family, whole, w[0] + w[1] * x, np.exp(w[2])).sum()

    size = 2 if family == "exponential" else 3
    best = scipy.optimize.minimize(
        lambda w: loss([*w, 0.0]), np.zeros(size), method="Nelder-Mead", tol=1e-8
    ).x
    errors = standard_errors(lambda w: loss([*w, 0.0]), best)
    method = quiet(FORMULA, frames, family=family)
    run = pyrofl.fit(method, federations.from_frames(frames), progress=False)
    drawn = coefficient_draws(method, posterior_draws(run, 4000))
    for place, term in enumerate(("Intercept", "x")):
        shift = (float(drawn[term].mean()) - best[place]) / errors[place]
        assert abs(shift) < SHIFT
        assert float(drawn[term].std()) == pytest.approx(errors[place], rel=RATIO)


def test_cox_leaves_out_rows_that_enter_later():
    eta = torch.tensor([[0.2, -0.5, 1.0, 0.3, 9.0]], dtype=torch.float64)
    time = torch.tensor([[1.0, 2.0, 3.0, 3.5, 3.0]], dtype=torch.float64)
    entry = torch.tensor([[0.0, 1.0, 0.5, 2.0, 0.0]], dtype=torch.float64)
    event = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    a, b, c, d = eta[0, :4].exp().tolist()
    expected = math.log(a / (a + c)) + math.log(b / (b + c)) + math.log(c / (c + d))
    assert float(cox(eta, time, event, mask, entry)) == pytest.approx(expected, rel=1e-12)


INTERVAL, ENTRY = "censored(time, event, upper=until) ~ x", "censored(time, event, entry=start) ~ x"
REFUSED = {
    "a time of 0": (ENTRY, {"time": 0.0}, "basel: response time is 0 in row 3; expected numbers"),
    "a left-censored time without event": (
        INTERVAL,
        {"time": 0.0, "event": 0, "until": 2.0},
        "basel: response time is 0 in row 3; expected numbers above 0",
    ),
    "an upper bound below": (
        INTERVAL,
        {"time": 3.0, "event": 1, "until": 2.0},
        "basel: until is 2 and time is 3 in row 3; expected bounds of at least the time",
    ),
    "an upper bound of a censored time": (
        INTERVAL,
        {"time": 1.0, "event": 0, "until": 2.0},
        "where event is 0; expected the time itself for censored times",
    ),
    "a bound that differs by rounding": (
        INTERVAL,
        {"time": 1.0, "event": 1, "until": 1.0 + 1e-13},
        "expected the time itself, or an interval of at least 1e-09 of the time",
    ),
    "an infinite bound": (
        INTERVAL,
        {"until": np.inf},
        "basel: column until has 1 missing or infinite upper bounds; expected numbers: write",
    ),
    "a missing bound": (INTERVAL, {"until": np.nan}, "has 1 missing or infinite upper bounds"),
    "an entry at the time": (
        ENTRY,
        {"time": 2.0, "start": 2.0},
        "basel: start is 2 and time is 2 in row 3; expected entries before the time",
    ),
    "an entry within the interval": (
        FORMULA,
        {"time": 1.0, "event": 1, "start": 1.5, "until": 2.0},
        "expected entries before the time",
    ),
    "a negative entry": (ENTRY, {"start": -1.0}, "basel: start is -1 in row 3; expected times"),
    "an infinite entry": (ENTRY, {"start": np.inf}, "entry of the response is not a finite number"),
    "events of 1 and 2": (ENTRY, {"event": 2}, "expected 1 for an event and 0 for a censored time"),
    "entry as text": ("censored(time, event, entry=g) ~ x", {}, "column g holds text; expected"),
    "an unknown column": ("censored(time, event, entry=sart) ~ x", {}, "did you mean start"),
    "three columns": ("censored(start, time, event) ~ x", {}, "and entry=column for delayed"),
    "two entries": ("censored(time, event, entry=start, entry=start) ~ x", {}, "upper= and entry="),
    "Surv": ("Surv(start, time, event) ~ x", {}, "expected censored(time, event), with entry="),
    "p": ("p(time, event, upper=until) ~ x", {}, "expected two columns: p(successes, trials)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_times_are_refused_in_one_line(case):
    formula, cells, text = REFUSED[case]
    frames = tables((9, 12, 10))
    if formula == ENTRY:
        frames = {name: frame.assign(time=frame["until"]) for name, frame in frames.items()}
    for name, value in cells.items():
        frames["basel"][name] = frames["basel"][name].astype(float)
        frames["basel"].loc[2, name] = value
    frames = {name: frame.assign(g="a") for name, frame in frames.items()}
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        quiet(formula, frames, family="weibull")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("formula", "family", "text"),
    [
        (
            INTERVAL,
            "cox",
            "column of upper, which family cox does not read; expected time alone, or",
        ),
        (ENTRY, "gaussian", "or family gamma or lognormal or exponential or weibull or cox"),
    ],
)
def test_families_that_do_not_read_a_column_name_those_that_do(formula, family, text):
    with pytest.raises(ValueError, match=text):
        quiet(formula, tables((9, 12, 10)), family=family)


def test_left_censored_times_alone_have_finite_densities():
    frames = tables((60, 50, 70))
    frames = {n: f.assign(until=f["until"].clip(lower=0.1)) for n, f in frames.items()}
    frames = {n: f.assign(time=0.0, event=1) for n, f in frames.items()}
    for family in FAMILIES:
        method = quiet("censored(time, 1, upper=until) ~ x", frames, family=family)
        batch = method.prepare(federations.from_frames(frames)).batch(torch.arange(3))
        tape = poutine.trace(method.model).get_trace({}, {}, batch)
        tape.compute_log_prob()
        assert torch.isfinite(tape.nodes["time"]["log_prob"]).all()


def in_unit(frames, unit):
    """Return tables with times in another unit."""
    times = ["time", "start", "until"]
    return {name: frame.assign(**frame[times] * unit) for name, frame in frames.items()}


@pytest.mark.parametrize(
    ("family", "power", "variance"), [("exponential", 1, 0), ("weibull", 2, 2)]
)
def test_the_prior_of_a_log_hazard_follows_the_unit_of_time(family, power, variance):
    frames = tables((30, 20, 25))
    log_mean = math.log(pd.concat(frames.values())["time"].mean() * 365)
    frames = {name: frame.assign(event=1) for name, frame in in_unit(frames, 365).items()}
    frames = {name: frame.assign(time=frame["time"] + 1e-6) for name, frame in frames.items()}
    text = quiet("censored(time, event) ~ x", frames, family=family).priors()
    loc, scale = (
        float(part) for part in re.search(r"Intercept ~ Normal.(.*), (.*).", text).groups()
    )
    assert loc == pytest.approx(-power * log_mean, rel=1e-3)
    assert scale == pytest.approx(math.sqrt(2.5**2 + variance * log_mean**2), rel=1e-3)
    if family == "weibull":
        fixed = quiet({"time": "censored(time, event) ~ x", "shape": 3}, frames, family=family)
        assert f"Intercept ~ Normal({-3 * log_mean:.4g}, 2.5)" in fixed.priors()


@pytest.mark.slow
def test_coefficients_and_shape_do_not_depend_on_the_unit_of_time():
    means = []
    for unit in (1.0, 365.0, 1e9):
        frames = in_unit(tables((40, 30, 50)), unit)
        method = quiet("censored(time, event, upper=until) ~ x", frames, family="weibull")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of Pareto k
            run = pyrofl.fit(method, federations.from_frames(frames), progress=False)
            summary = run.summary()
        means.append(summary.loc[["b[x]", "shape"], ["mean", "sd"]].to_numpy())
    for other in means[1:]:
        assert (np.abs(other[:, 0] - means[0][:, 0]) < 0.15 * means[0][:, 1]).all()
        assert other[:, 1] == pytest.approx(means[0][:, 1], rel=0.1)


def test_times_without_events_are_warned_of():
    frames = {name: frame.assign(event=0) for name, frame in tables((9, 12, 10)).items()}
    frames = {name: frame.assign(time=frame["until"]) for name, frame in frames.items()}
    with pytest.warns(UserWarning, match="no time has an event; only priors bound the hazards"):
        pyrofl.regression(
            "censored(time, event) ~ x", federations.from_frames(frames), family="weibull"
        )
