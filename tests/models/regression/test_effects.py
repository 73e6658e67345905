"""Results of regressions: summaries, ratios, effects of groups, predictions and their errors."""

import math
import warnings

import arviz
import numpy as np
import pandas as pd
import promises
import pyro
import pyro.distributions as dist
import pytest
import torch

pytest.importorskip("formulae")

import pyrofl
from pyrofl import effects, federations, figures
from pyrofl.inference import hmc as sampler
from pyrofl.inference.posteriors import corrected, importance_sampling
from pyrofl.models.regression.families import FAMILIES

SIZES = {"bern": 4, "basel": 9, "chur": 6, "zug": 2}  # clients of different sizes
NOISE, SPREAD = 1.0, 2.0


def fixed(value):
    return dist.Uniform(value - 1e-3, value + 1e-3)


def fit(formula, frames, seeds=None, **how):
    tables = federations.from_frames(frames)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        method = pyrofl.regression(formula, tables, **how)
    return pyrofl.fit(method, tables, progress=False, seeds=seeds)


def frames(seed=0):
    random = np.random.default_rng(seed)
    found = {}
    for k, (name, n) in enumerate(SIZES.items()):
        x = random.normal(size=n)
        y = 1.0 + 0.5 * x + random.normal(0, SPREAD) + random.normal(0, NOISE, n)
        ward = ["north" if i % 2 else f"only {k}" for i in range(n)]
        treat = [["no", "yes"][i % 2] for i in range(n)]
        found[name] = pd.DataFrame({"y": y, "x": x, "ward": ward, "treat": treat})
        found[name]["item"] = [["a", "b"][(i + k) % 2] for i in range(n)]
    return found


GIVEN = {"Intercept": dist.Normal(0.5, 3.0), "sigma": fixed(NOISE), "sd": fixed(SPREAD)}


@pytest.fixture(scope="module")
def one_way():
    """Return a run of a one-way model with known variances."""
    return fit("y ~ 1 + (1 | client)", frames(), priors=GIVEN)


def closed_form():
    """Return mean and variance of the population's mean, and of each client's mean."""
    each = {n: (f["y"].mean(), SPREAD**2 + NOISE**2 / len(f)) for n, f in frames().items()}
    precision = 1 / 9 + sum(1 / v for _, v in each.values())
    mean = (0.5 / 9 + sum(m / v for m, v in each.values())) / precision
    clients = {}
    for name, (own, _) in each.items():
        rows = SIZES[name] / NOISE**2
        share = rows / (rows + 1 / SPREAD**2)
        within = 1 / (rows + 1 / SPREAD**2)
        clients[name] = share * own + (1 - share) * mean, within + (1 - share) ** 2 / precision
    return mean, 1 / precision, clients


def close(value, expected, sd, draws):
    """Return whether a mean of draws is within five standard errors of the expected one."""
    return abs(value - expected) < 5 * sd / math.sqrt(draws)


def test_a_new_client_has_the_variance_of_clients_and_of_noise(one_way):
    mean, variance, clients = closed_form()
    row = {"y": [0.0]}
    new = effects.predict(one_way, row, draws=4000)
    expected = math.sqrt(variance + SPREAD**2 + NOISE**2)
    assert close(float(new.mean), mean, expected, 2000)
    assert float(new.values["sd"]) == pytest.approx(expected, rel=5 / math.sqrt(4000))
    for name, (own, within) in clients.items():
        known = effects.predict(one_way, row, name, draws=4000)
        expected = math.sqrt(within + NOISE**2)
        assert close(float(known.mean), own, expected, 2000)
        assert float(known.values["sd"]) == pytest.approx(expected, rel=5 / math.sqrt(4000))
        assert float(known.values["sd"]) < 0.7 * float(new.values["sd"])


def test_quantiles_of_predictions_are_those_of_the_normal_distribution(one_way):
    mean, variance, _ = closed_form()
    table = one_way.predict({"y": [0.0, 1.0]}, None, draws=4000).frame()
    sd = math.sqrt(variance + SPREAD**2 + NOISE**2)
    # The density at the 5% quantile is 0.103 / sd.
    error = 5 * sd * math.sqrt(0.05 * 0.95 / 2000) / 0.103
    assert np.abs(table["5%"] - (mean - 1.645 * sd)).max() < error
    assert np.abs(table["95%"] - (mean + 1.645 * sd)).max() < error


def test_effects_of_groups_and_coefficients_are_those_in_closed_form(one_way):
    _, _, clients = closed_form()
    table = effects.groups(one_way, "client", total=True, draws=4000)
    assert table.index.get_level_values("level").tolist() == list(SIZES)
    for name, (mean, variance) in clients.items():
        row = table.loc["client", name, "Intercept"]
        sd = math.sqrt(variance)
        assert close(row["mean"], mean, sd, 2000)
        assert row["sd"] == pytest.approx(sd, rel=5 / math.sqrt(4000))
    deviations = effects.groups(one_way, draws=4000)
    intercept = one_way.summary(4000).loc["Intercept", "mean"]
    assert np.allclose(table["mean"] - deviations["mean"], intercept, atol=1e-9)


def test_new_levels_of_shared_and_nested_groups_are_drawn_from_their_distribution():
    given = {**GIVEN, "sd_item": fixed(1.5), "sd_client_ward": fixed(0.8)}
    run = fit("y ~ 1 + (1 | client/ward) + (1 | item)", frames(), priors=given)
    rows = {"ward": ["north", "new"] * 2, "item": ["a", "a", "c", "c"]}
    found = effects.predict(run, rows, "basel", draws=4000)
    wards = [(name, w) for k, name in enumerate(SIZES) for w in ("north", f"only {k}")]
    wards.append(("basel", "new"))
    pooled = pd.concat([frame.assign(client=name) for name, frame in frames().items()])
    new = pd.DataFrame(rows).assign(client="basel")

    def design(table):
        """Return the columns of the mean, clients, wards and items."""
        parts = [np.ones((len(table), 1)), table["client"].to_numpy()[:, None] == list(SIZES)]
        pairs = list(zip(table["client"], table["ward"], strict=True))
        parts += [np.array([[pair == ward for ward in wards] for pair in pairs])]
        parts += [table["item"].to_numpy()[:, None] == ["a", "b", "c"]]
        return np.concatenate(parts, 1).astype(float)

    variances = [9.0, *[SPREAD**2] * 4, *[0.8**2] * 9, *[1.5**2] * 3]
    z = design(pooled)
    covariance = np.linalg.inv(np.diag(1 / np.array(variances)) + z.T @ z / NOISE**2)
    at = np.zeros(len(variances))
    at[0] = 0.5 / 9
    mean = design(new) @ covariance @ (at + z.T @ pooled["y"].to_numpy() / NOISE**2)
    sd = np.sqrt(np.diag(design(new) @ covariance @ design(new).T) + NOISE**2)
    assert sd[0] < sd[1] < sd[2] < sd[3]
    for k in range(4):
        assert close(float(found.mean[k]), mean[k], sd[k], 2000)
        assert float(found.values["sd"][k]) == pytest.approx(sd[k], rel=5 / math.sqrt(4000))
    names = effects.groups(run, "client:ward").index.get_level_values("level").tolist()
    assert names == [
        f"{name}:{ward}" for k, name in enumerate(SIZES) for ward in ("north", f"only {k}")
    ]


def test_rows_with_the_same_new_level_share_its_effect(one_way):
    from pyrofl.models.regression import prediction

    drawn = prediction.posterior_draws(one_way, 500)
    frame = pd.DataFrame({"client": ["new client"] * 2})
    rows = prediction.run_program(one_way.method, drawn, frame, "new client")
    eta = rows.eta.expand(500, 1, 2)
    assert torch.equal(eta[..., 0], eta[..., 1])
    assert float(eta[..., 0].std()) > 1.5


@pytest.fixture(scope="module")
def two_lines():
    return fit("y ~ x * treat + (1 | client)", frames(), seeds=2)


def test_conditional_effects_are_the_design_times_the_coefficients(two_lines):
    table = effects.conditional(two_lines, "x", "treat", points=3, draws=200)
    found = two_lines.to_arviz(200, progress=False)["posterior"]
    b = {str(t): found["b"].sel(term=t).values.flatten() for t in found["term"].values}
    intercept = found["Intercept"].values.flatten()
    assert len(table) == 6
    for _, row in table.iterrows():
        yes = row["treat"] == "yes"
        line = (
            intercept + b["x"] * row["x"] + yes * (b["treat[yes]"] + b["x:treat[yes]"] * row["x"])
        )
        assert row["mean"] == pytest.approx(line.mean(), abs=1e-9)
        assert row["2.5%"] == pytest.approx(np.quantile(line, 0.025), abs=1e-9)
    values = np.concatenate([frame["x"] for frame in frames().values()])
    ends = values.mean() - 2 * values.std(), values.mean() + 2 * values.std()
    assert table["x"].iloc[[0, -1]].tolist() == pytest.approx(ends)
    (yes,) = effects.conditional(two_lines, "treat", at={"treat": "yes"}, draws=200)["mean"]
    at_mean = intercept + b["treat[yes]"] + values.mean() * (b["x"] + b["x:treat[yes]"])
    assert yes == pytest.approx(at_mean.mean(), abs=1e-9)
    own = effects.conditional(two_lines, "x", client="chur", at={"treat": "yes"}, draws=200)
    effect = found["r_client"].sel(client="chur").values.flatten()
    line = intercept + effect + b["treat[yes]"] + own["x"][7] * (b["x"] + b["x:treat[yes]"])
    assert own["mean"][7] == pytest.approx(line.mean(), abs=1e-9)


def test_several_runs_predict_by_the_draws_of_all(two_lines):
    rows = pd.DataFrame({"x": [0.5, -1.0], "treat": ["yes", "no"]})
    together = two_lines.predict(rows, "chur", draws=500)
    means = [run.predict(rows, "chur", draws=500).mean for run in two_lines]
    error = together.values["sd"] / 500**0.5  # of a difference of two means of 1,000 draws
    assert bool(((together.mean - torch.stack(means).mean(0)).abs() < 4 * error).all())
    assert "1000 draws" in together.about


def test_a_summary_has_the_numbers_of_arviz(two_lines):
    table = two_lines.summary(300)
    data = two_lines.to_arviz(300, progress=False)
    asked = {"var_names": ["b", "Intercept", "sd_client", "sigma"]}
    posterior = data["posterior"]
    assert table.index.tolist() == [
        *(f"b[{term}]" for term in posterior["term"].values),
        "Intercept",
        "sd_client",
        "sigma",
    ]
    b = posterior["b"]
    assert np.allclose(table["mean"][:3], b.mean(("chain", "draw")))
    assert np.allclose(table["sd"][:3], b.std(("chain", "draw"), ddof=1))
    for column, found in {
        "ess_bulk": arviz.ess(data, **asked),
        "ess_tail": arviz.ess(data, method="tail", **asked),
        "r_hat": arviz.rhat(data, **asked),
    }.items():
        expected = [*found["b"].values, *(float(found[n]) for n in asked["var_names"][1:])]
        assert np.allclose(table[column], expected), column
    assert table.attrs["corrected"] == "no: the draws are of the exact posterior"
    assert two_lines[0].summary(50)["r_hat"].isna().all()
    with pytest.raises(ValueError, match="expected a probability between 0 and 1"):
        two_lines.summary(50, prob=95)


def test_ratios_are_exponentials_of_coefficients():
    tables = frames()
    for frame in tables.values():
        frame["died"] = [int(i % 3 == 0) for i in range(len(frame))]
    given = {"treat[yes]": dist.StudentT(3.0, 0.0, 1.0)}
    run = fit("died ~ x + treat", tables, family="bernoulli", priors=given)
    table = effects.ratios(run, draws=500)
    b = run.to_arviz(500, progress=False)["posterior"]
    for term, values in {"x": b["b"].values[0, :, 0], "treat[yes]": b["b_0"].values[0]}.items():
        assert table.loc[term, "median"] == pytest.approx(np.median(np.exp(values)))
        assert table.loc[term, "97.5%"] == pytest.approx(np.exp(np.quantile(values, 0.975)), 1e-3)
        assert table.loc[term, "p_above_1"] == pytest.approx((values > 0).mean())
    assert table.index.name == "odds ratio"
    summary = run.summary(500)
    assert summary.index.tolist() == ["b[x]", "b[treat[yes]]", "Intercept"]
    assert summary["pareto_k"].max() < 0.7
    assert summary["importance_ess"].min() > 400


def test_figures_show_clients_and_bands(two_lines):
    figure = effects.forest(two_lines, draws=50)
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == [*SIZES, "population"]
    table = effects.conditional(two_lines, "x", "treat", draws=50)
    shown = figures.conditional(table, "score").axes[0]
    assert shown.get_ylabel() == "score"
    assert len(shown.collections) == len(shown.lines) == 2
    (line, _) = shown.lines
    assert line.get_ydata().tolist() == table["mean"][table["treat"] == "no"].tolist()
    assert figures.conditional(effects.conditional(two_lines, "treat", draws=50)).axes


@pytest.mark.parametrize(
    ("rows", "client", "text"),
    [
        ({"x": [1.0]}, "bern", "new rows have no column 'treat'; expected all of"),
        ({"x": [1.0], "treat": ["maybe"]}, "bern", "has level 'maybe'.* expected one of no, yes"),
        ({"x": ["a"], "treat": ["no"]}, "bern", "x of new rows holds text; expected numbers"),
        ({"x": [1.0, 2.0], "treat": ["no"]}, "bern", "dict without a list of one length for each"),
        ({"x": 1.0, "treat": "no"}, "bern", "dict without a list of one length for each column"),
        ({"x": [math.nan], "treat": ["no"]}, "bern", "x of new rows is missing in row 1"),
        ({"x": [], "treat": []}, "bern", "new rows are empty"),
        ({"x": [1.0], "treat": ["no"]}, "graz", "unknown client 'graz'"),
        ([[1.0, 2.0]], "bern", "expected a data frame, or a dict"),
    ],
)
def test_wrong_rows_are_refused_in_a_line(two_lines, rows, client, text):
    with pytest.raises(ValueError, match=text) as error:
        two_lines[0].predict(rows, client)
    assert "\n" not in str(error.value)


def test_a_number_far_from_all_training_rows_is_named(two_lines):
    rows = {"x": [1.0, -999.0], "treat": ["no", "yes"]}
    with pytest.warns(UserWarning, match="column x of new rows holds -999 in row 2, .* standard"):
        two_lines[0].predict(rows, "bern")
    with pytest.warns(UserWarning, match="column x of new rows holds .* in row 3"):
        two_lines[0].predict({"x": [11.0, 12.0, 13.0], "treat": ["no"] * 3}, "bern")
    two_lines[0].predict({"x": np.array([1, 2], object), "treat": ["no", "yes"]}, "bern")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run: effects.ratios(run), "link identity .* has no ratios"),
        (lambda run: effects.groups(run, "ward"), "unknown grouping factor 'ward'"),
        (lambda run: effects.forest(run, "x"), "no group has the term 'x'"),
        (lambda run: effects.conditional(run, "z"), "unknown column of the formula: 'z'"),
        (lambda run: effects.conditional(run, "x", client="graz"), "unknown client 'graz'"),
        (lambda run: effects.conditional(run, "client"), "unknown column of the formula"),
        (lambda run: effects.conditional(run, "x", at={"treat": ["no"]}), "expected one value"),
        (lambda run: effects.conditional(run, "x", at={"treat": "new"}), "has level 'new'"),
        (lambda run: run.predict({"x": [1.0]}, None, model="global"), "model cannot be given"),
        (lambda run: effects.groups(3), "expected what pyrofl.fit returns"),
        (lambda run: run.predict({"x": [1.0]}, None, own=(1, 2)), "with pyrofl.join"),
    ],
)
def test_wrong_requests_are_refused_in_a_line(two_lines, call, text):
    with pytest.raises(ValueError, match=text) as error:
        call(two_lines[0])
    assert "\n" not in str(error.value)


RESPONSES = {
    "bernoulli": "died",
    **dict.fromkeys(("binomial", "beta_binomial"), "p(died, 3)"),
    "gamma": "time",
    "lognormal": "time",
    **dict.fromkeys(("beta", "zero_one_inflated_beta"), "share"),
    **dict.fromkeys(("cumulative", "sratio", "acat"), "grade"),
    "categorical": "grade",
    **dict.fromkeys(("exponential", "weibull", "cox"), "censored(time, died)"),
    **dict.fromkeys(("gaussian", "student", "skew_normal", "asym_laplace"), "y"),
}


KEPT = ("gaussian", "zero_inflated_poisson", "gamma", "cumulative", "cox")  # of each kind


@pytest.mark.parametrize("family", promises.others_slow(FAMILIES, KEPT))
def test_every_family_predicts(family, monkeypatch):
    for name, value in {
        "NUM_METRIC_UPDATES": 1,
        "ITERATIONS_PER_UPDATE": 4,
        "DRAWS_PER_CHAIN": 4,
        "THINNING": 1,
    }.items():
        monkeypatch.setattr(sampler, name, value)
    monkeypatch.setattr(corrected, "MIN_SHARED_DRAWS", 40)
    monkeypatch.setattr(importance_sampling, "PILOT_DRAWS_PER_ENTRY", 10)
    tables = frames()
    for name, frame in tables.items():
        n = len(frame)
        frame["time"] = np.exp(frame["y"] / 4)
        frame["share"] = 1 / (1 + np.exp(-frame["y"]))
        frame["died"] = [i % 2 for i in range(n)]
        frame["count"] = [(i * len(name)) % 4 for i in range(n)]
        grades = ["low", "mid", "top"]
        frame["grade"] = pd.Categorical([grades[i % 3] for i in range(n)], grades, ordered=True)
    own = "" if family == "cox" else " + (1 | client)"
    formula = f"{RESPONSES.get(family, 'count')} ~ x{own}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if family == "asym_laplace":
            formula = {"y": formula, "quantile": 0.9}
        method = pyrofl.regression(formula, federations.from_frames(tables), family=family)
        run = pyrofl.fit(method, federations.from_frames(tables), 1, progress=False)
        table = effects.conditional(run, "x", points=3, draws=20)
        assert np.isfinite(table["median"]).all()
        assert table.attrs["response"]
        if family == "cox":
            with pytest.raises(ValueError, match="leaves the baseline hazard open"):
                run.predict({"x": [0.0]}, None)
            return
        found = run.predict({"x": [0.0, 0.3]}, None, draws=20)
    assert len(found.frame()) == 2
    if found.classes:
        assert found.mean.sum(-1).tolist() == pytest.approx([1.0, 1.0])
    else:
        assert (found.values["5%"] <= found.values["95%"]).all()


def test_correlations_have_the_names_of_their_effects():
    tables = frames()
    for frame in tables.values():
        frame["z"] = frame["x"].to_numpy()[::-1] ** 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run = fit("y ~ 1 + (1 + x | client)", tables)
        many = pyrofl.regression("y ~ 1 + (1 + x + z | client)", federations.from_frames(tables))
    assert "corr_client[Intercept, x]" in (table := run.summary(100)).index
    assert not (table["sd"] == 0).any()
    found = run.hypothesis("corr_client[Intercept, x] < 2", draws=100)
    assert found["probability"].item() == 1
    dims, coords = many.axes()
    assert dims["corr_client"] == ("client_pair",)
    assert coords["client_pair"] == ["Intercept, x", "Intercept, z", "x, z"]
    root = torch.linalg.cholesky(torch.tensor([[1.0, 0.1, 0.2], [0.1, 1.0, 0.3], [0.2, 0.3, 1.0]]))
    conditioned = pyro.poutine.condition(many.model, data={"root_client": root.double()})
    batch = many.prepare(federations.from_frames(tables)).batch(torch.arange(4))
    nodes = pyro.poutine.trace(conditioned).get_trace({}, {}, batch).nodes
    assert nodes["corr_client"]["value"].flatten()[:3].tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_effective_sizes_are_at_most_those_of_the_importance_sample():
    tables = frames()
    for frame in tables.values():
        frame["died"] = [int(i % 3 == 0) for i in range(len(frame))]
    run = fit("died ~ x + (1 | client)", tables, family="bernoulli")
    draws = run.to_arviz(20_000, progress=False)
    table = pyrofl.inference.posteriors.summary.summarize(draws)
    size = float(draws["sample_stats"]["importance_ess"].min())
    assert size < 20_000
    assert table["ess_bulk"].max() == pytest.approx(size)
    assert (table["ess_tail"] <= size).all()
    clients = effects.groups(run, ratio=True, draws=500)
    assert clients.attrs["ratio"] == "odds ratio"
    effect = run.to_arviz(500, progress=False)["posterior"]["r_client"].sel(client="bern").values
    row = clients.loc[("client", "bern", "Intercept")]
    assert row["median"] == pytest.approx(np.exp(np.median(effect)), rel=1e-3)
    assert row["p_above_1"] == pytest.approx((effect > 0).mean())
    with pytest.raises(ValueError, match="link identity of this family has no ratios"):
        effects.groups(fit("y ~ 1 + (1 | client)", frames(), priors=GIVEN), ratio=True)
