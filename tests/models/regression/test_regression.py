"""Regressions from formulas: programs, priors, closed forms, warnings and refusals."""

import math
import warnings

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations
from pyrofl.models.regression import program
from pyrofl.models.regression.families import FAMILIES
from pyrofl.models.regression.formula import read
from pyrofl.models.regression.program import cox
from pyrofl.tensors import default_type


def tables(seed=0, sizes=(5, 8, 12, 9), **columns):
    random = np.random.default_rng(seed)
    frames = {}
    for k, n in enumerate(sizes):
        x = random.normal(size=n)
        frame = pd.DataFrame({"x": x, "g": random.choice(["no", "yes"], n)})
        frame["item"] = [["a", "b", "c"][i % 3] for i in range(n)]
        frame["ward"] = [f"{k}{i % 2}" for i in range(n)]
        frame["y"] = 1.0 + 0.5 * x + 0.4 * k + random.normal(size=n)
        frame["died"] = random.integers(0, 2, n)
        frame["count"] = random.poisson(3.0, n)
        frame["time"] = random.gamma(2.0, size=n)
        grades = ["low", "mid", "top"]
        frame["grade"] = pd.Categorical([grades[i % 3] for i in range(n)], grades, ordered=True)
        for name, value in columns.items():
            frame[name] = value
        frames[f"site {k}"] = frame
    return frames


def quiet(formula, frames, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return pyrofl.regression(formula, federations.from_frames(frames), **how)


def test_formulas_are_read_in_parts():
    found = read("p(a, n) ~ x * (z + w) + (1 + x | g/h) + (0 + z || client) - 1")
    assert (found.response, found.columns) == ("a", {"trials": "n"})
    assert found.population == "x * (z + w) - 1"
    assert [(g.text, g.name, g.correlated) for g in found.groups] == [
        ("1 + x", "g", True),
        ("1 + x", "g:h", True),
        ("0 + z", "client", False),
    ]


def test_group_terms_have_the_levels_of_one_client_or_of_several():
    method = quiet("y ~ x + (1 | client/ward) + (1 | item)", tables())
    kinds = [(one.group.name, one.kind, one.count) for one in method.design.groups]
    assert kinds == [
        ("client", "client", 1),
        ("client:ward", "nested", 2),
        ("item", "shared", 3),
    ]
    assert "own to each client: r_client, r_client_ward (2)" in method.metadata.sites


def test_a_column_that_identifies_the_client_is_the_client():
    frames = tables()
    for name, frame in frames.items():
        frame["hospital"] = name.upper()
    method = quiet("y ~ x + (1 | hospital)", frames)
    assert method.design.groups[0].kind == "client"


def test_the_printed_program_can_be_copied():
    method = quiet("y ~ x + (1 | client)", tables())
    found = {"pyro": __import__("pyro"), "dist": dist, "torch": torch}
    exec(method.program(), found)
    data = method.prepare(federations.from_frames(tables()))
    shared = "b Intercept_centered sigma sd_client"

    copied = pyrofl.hierarchical(found["program"], data, shared=shared)
    one, other = (pyrofl.fit(m, data, rounds=1, progress=False) for m in (method, copied))
    assert torch.equal(one.posterior(10)["sigma"], other.posterior(10)["sigma"])


def test_normal_regression_has_the_posterior_in_closed_form():
    frames = tables()
    given = {"b": dist.Normal(0.0, 2.0), "Intercept": dist.Normal(0.5, 3.0)}
    given["sigma"] = dist.Uniform(0.999, 1.001)
    method = quiet("y ~ x", frames, priors=given, center=False)
    run = pyrofl.fit(method, federations.from_frames(frames), rounds=1, progress=False)
    pooled = pd.concat(frames.values())
    design = np.column_stack([np.ones(len(pooled)), pooled["x"]])
    precision = np.diag([1 / 9, 1 / 4]) + design.T @ design
    covariance = np.linalg.inv(precision)
    mean = covariance @ (np.array([0.5 / 9, 0.0]) + design.T @ pooled["y"])
    draws = run.posterior(4000)
    found = np.column_stack([draws["Intercept"].flatten(), draws["b"].flatten()])
    sd = np.sqrt(np.diag(covariance))
    assert np.abs((found.mean(0) - mean) / sd).max() < 5 / math.sqrt(2000)
    assert np.abs(found.std(0) / sd - 1).max() < 5 / math.sqrt(2000)


def test_arviz_names_terms_and_levels():
    frames = tables()
    method = quiet("y ~ x * g + (x || client)", frames)
    run = pyrofl.fit(method, federations.from_frames(frames), rounds=1, progress=False)
    found = run.to_arviz(10, progress=False).posterior
    assert found["term"].values.tolist() == ["x", "g[yes]", "x:g[yes]"]
    assert found["r_client"].dims == ("chain", "draw", "client", "client_term")
    assert found["client_term"].values.tolist() == ["Intercept", "x"]
    assert found["client"].values.tolist() == list(frames)
    dims, coords = quiet("y ~ x + (1 | item)", frames).axes()
    assert dims["r_item"] == ("item", "item_term")
    assert coords["item"] == ["a", "b", "c"]
    dims, coords = quiet("y ~ x + (x | client/ward)", frames).axes()
    assert dims["r_client_ward"] == ("client_ward_level", "client_ward_term")
    assert coords["client_ward_level"] == ["1", "2"]
    for frame in frames.values():
        frame["ward"] = frame["ward"].str[1]
    run = pyrofl.fit(
        quiet("y ~ x + (1 | client/ward)", frames),
        federations.from_frames(frames),
        rounds=1,
        progress=False,
    )
    found = run.to_arviz(10, progress=False).posterior
    assert found["r_client_ward"].dims == ("chain", "draw", "client", "client_ward_level")
    assert found["client_ward_level"].values.tolist() == ["0", "1"]


def test_default_priors_follow_from_sums():
    frames = tables()
    pooled = pd.concat(frames.values())
    text = quiet("y ~ x + (1 | client)", frames).priors()
    scale, spread = np.std(pooled["y"]), np.std(pooled["x"])
    assert f"b[x] ~ Normal(0.0, {2.5 * scale / spread:.4g})" in text
    assert f"Intercept ~ Normal({pooled['y'].mean():.4g}, {2.5 * scale:.4g})" in text
    assert f"sd_client ~ HalfNormal({2.5 * scale:.4g})" in text
    assert f"sigma ~ Exponential({1 / scale:.4g})" in text


def test_priors_are_replaced_by_name():
    given = {"x": dist.StudentT(3.0, 0.0, 1.5), "sd": dist.HalfCauchy(0.7), "corr": 2.0}
    method = quiet("y ~ x + g + (x | client)", tables(), priors=given)
    text = method.priors()
    assert "b[x] ~ StudentT(df=3.0, loc=0.0, scale=1.5)" in text
    assert "sd_client ~ HalfCauchy(scale=0.7)" in text
    assert "corr_client ~ LKJCholesky(2, 2.0)" in text
    assert "b_0 * (x[..., 0]" in method.program()


def test_priors_are_replaced_by_the_names_of_the_results():
    first, last = "b[x]", f"b[{quiet('y ~ x * g', tables()).design.terms[-1]}]"
    given = {first: dist.Normal(0.0, 0.7), last: dist.Normal(0.0, 0.3)}
    text = quiet("y ~ x * g", tables(), priors=given).priors()
    assert "b[x] ~ Normal(loc=0.0, scale=0.7)" in text
    assert f"{last} ~ Normal(loc=0.0, scale=0.3)" in text
    with pytest.raises(ValueError, match="one coefficient; expected one prior"):
        quiet("y ~ x * g", tables(), priors={**given, "x": given[first]})


def test_warnings_point_at_the_line_that_builds_the_regression():
    frame = pd.DataFrame({"y": [1.0, 2.0, None, 4.0], "x": [100.0, 101.0, 102.0, 103.0]})
    data = federations.from_frames({"a": frame, "b": frame})
    with pytest.warns(UserWarning, match="dropped|center") as seen:
        pyrofl.regression("y ~ x + (x | client)", data)
    assert len(seen) == 2
    assert {one.filename for one in seen} == {__file__}


def test_effects_of_categorical_responses_are_those_of_each_level():
    from pyro import poutine

    method = quiet("grade ~ x + (x || client)", tables(), family="categorical")
    assert method.design.groups[0].entries == [
        "Intercept (mid)",
        "Intercept (top)",
        "x (mid)",
        "x (top)",
    ]
    data = method.prepare(federations.from_frames(tables()))
    batch = data.batch(torch.arange(4))
    b, effects = torch.tensor([[0.3], [-0.7]]), torch.arange(16.0).reshape(4, 1, 4) / 5
    given = {"b": b.expand(4, 1, 2, 1), "Intercept_centered": torch.tensor([0.1, 0.2])}
    given |= {"r_client": effects}
    program = quiet("grade ~ x + (x || client)", tables(), family="categorical", center=False)
    given["Intercept"] = given.pop("Intercept_centered")
    names: dict = {"pyro": pyro, "dist": dist, "torch": torch}
    exec(program.program(), names)
    with poutine.condition(data={n: v.double() for n, v in given.items()}):
        nodes = poutine.trace(names["program"]).get_trace({}, {}, batch).nodes
    x = batch.x[..., 0, None]
    eta = given["Intercept"] + b[:, 0] * x + effects[..., :2] + effects[..., 2:] * x
    logits = torch.cat([torch.zeros_like(eta[..., :1]), eta], -1).log_softmax(-1)
    assert torch.allclose(nodes["grade"]["fn"].logits, logits)


@pytest.mark.parametrize("family", ["exponential", "weibull"])
def test_times_without_censoring_have_the_density_of_events(family):
    from pyro import poutine

    frames = tables()
    for frame in frames.values():
        frame["seen"] = 1
    found = []
    for response in ("time", "censored(time, seen)"):
        method = quiet(f"{response} ~ x", frames, family=family)
        batch = method.prepare(federations.from_frames(frames)).batch(torch.arange(4))
        pyro.set_rng_seed(0)
        tape = poutine.trace(method.model).get_trace({}, {}, batch)
        tape.compute_log_prob()
        (site,) = [s for n, s in tape.nodes.items() if "time" in n]
        found.append(site["log_prob"] * batch.mask)
    assert torch.allclose(*found)
    found = pyrofl.checks.prior_predictive(
        method := quiet("time ~ x", frames, family=family),
        federations.from_frames(frames),
        draws=20,
    )
    assert (found["prior_predictive"]["time"] > 0).all()
    assert method.design.family.response in method.program()


def test_cox_sums_over_events_with_ties_as_efron():
    eta = torch.tensor([[0.2, -0.5, 1.0, 0.3, 9.0]], dtype=torch.float64)
    time = torch.tensor([[1.0, 2.0, 2.0, 3.0, 3.0]], dtype=torch.float64)
    event = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    a, b, c, d = eta[0, :4].exp().tolist()
    expected = math.log(a / (a + b + c + d))
    expected += math.log(b / (b + c + d)) + math.log(c / (0.5 * (b + c) + d))
    assert float(cox(eta, time, event, mask)) == pytest.approx(expected, rel=1e-12)


def test_rows_with_missing_values_are_dropped_with_a_warning():
    frames = tables()
    frames["site 0"].loc[[0, 2], "x"] = np.nan
    with pytest.warns(UserWarning, match="2 of 34 rows are dropped, as values are missing .x 2."):
        method = pyrofl.regression("y ~ x + (1 | client)", federations.from_frames(frames))
    assert method.design.federation().sizes.tolist() == [3, 8, 12, 9]


@pytest.mark.parametrize(
    ("formula", "change", "family", "text"),
    [
        ("y ~ x + f", {"f": 1.0}, "gaussian", "column f is constant"),
        ("y ~ x + {2 * x}", {}, "gaussian", "is a combination of the others"),
        ("died ~ x", {"died": "sign"}, "bernoulli", "column x separates the responses"),
        ("y ~ g", {"g": "lonely"}, "gaussian", "only one client has level yes of g"),
        ("y ~ x + (x | client)", {"x": "far"}, "gaussian", r"collinear.*write center\(x\)"),
    ],
)
def test_warnings_name_the_column(formula, change, family, text):
    frames = tables()
    for k, frame in enumerate(frames.values()):
        for name, value in change.items():
            if value == "far":
                frame[name] += 60.0
            elif value == "sign":
                frame[name] = 1 * (frame["x"] > 0)
            elif value == "lonely":
                frame[name] = ["yes" if not k and not i else "no" for i in range(len(frame))]
            else:
                frame[name] = value
    with pytest.warns(UserWarning, match=text):
        pyrofl.regression(formula, federations.from_frames(frames), family=family)


@pytest.mark.parametrize(
    ("formula", "how", "text"),
    [
        ("y ~ z", {}, "unknown column 'z'"),
        ("y + x", {}, "expected one '~' with a response"),
        ("y ~ (x | ", {}, "parentheses do not match"),
        ("y ~ x | client", {}, "expected group terms in parentheses"),
        ("y ~ x +* g", {}, "is not a formula"),
        ("y ~ cr(x, df=4)", {}, r"cr\(\) in .* is not supported"),
        ("y ~ x", {"family": "guassian"}, "did you mean gaussian"),
        ("y ~ x", {"link": "logit"}, "unknown link 'logit'"),
        ("y ~ x", {"family": "poisson"}, "expected whole numbers of at least 0"),
        ("y ~ x", {"family": "bernoulli"}, "expected 0 and 1"),
        ("y ~ x", {"family": "beta"}, "expected numbers between 0 and 1"),
        ("count ~ x", {"family": "binomial"}, "needs the number of trials"),
        ("p(count, 2) ~ x", {"family": "binomial"}, "from 0 to the number of trials"),
        ("p(count, 20) ~ x", {"family": "poisson"}, "does not read"),
        ("censored(time, count) ~ x", {"family": "cox"}, "expected 1 for an event"),
        ("g ~ x", {}, "response g holds text"),
        ("grade ~ x + (x | client)", {"family": "categorical"}, r"expected .x .. client"),
        ("censored(time, died) ~ x + (1 | client)", {"family": "cox"}, "no group terms"),
        ("y ~ x", {"priors": {"z": dist.Normal(0.0, 1.0)}}, "unknown prior 'z'"),
        ("y ~ x", {"priors": {"b": 3}}, "expected a distribution"),
        ("y ~ x + (x | client)", {"priors": {"corr": -1.0}}, "concentration of an LKJ"),
    ],
)
def test_mistakes_are_refused_in_a_line(formula, how, text):
    with pytest.raises(ValueError, match=text) as error:
        quiet(formula, tables(), **how)
    assert "\n" not in str(error.value)


def test_other_methods_refuse_tables():
    from pyrofl.models import pvi

    frames = federations.from_frames(tables())
    data = quiet("y ~ x", tables()).prepare(frames)
    method = pvi.build(pyrofl.nets.build("softmax", (1,), 2))
    with pytest.raises(ValueError, match="has no formula that makes features of tables"):
        pyrofl.fit(method, frames, rounds=1, progress=False)
    assert data.source.features == ("x",)


RESPONSES = {
    "bernoulli": "died",
    **dict.fromkeys(("binomial", "beta_binomial"), "p(died, 1)"),
    "poisson": "count",
    "negative_binomial": "count",
    "zero_inflated_poisson": "count",
    "zero_inflated_negative_binomial": "count",
    **dict.fromkeys(("hurdle_poisson", "hurdle_negative_binomial", "hurdle_gamma"), "count"),
    "gamma": "time",
    "lognormal": "time",
    **dict.fromkeys(("beta", "zero_one_inflated_beta"), "share"),
    **dict.fromkeys(("cumulative", "sratio", "acat"), "grade"),
    "categorical": "grade",
    "exponential": "censored(time, died)",
    "weibull": "censored(time, died)",
    "cox": "censored(time, died)",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_program_with_finite_densities(family):
    from pyrofl.inference.definition.elbo import observed

    frames = tables()
    for frame in frames.values():
        frame["share"] = 1 / (1 + np.exp(-frame["y"]))
    groups = {"cox": "", "categorical": " + (x || client)"}.get(family, " + (x | client)")
    for link in FAMILIES[family].links:
        formula = f"{RESPONSES.get(family, 'y')} ~ x * g{groups}"
        if family == "asym_laplace":
            formula = {"y": formula, "quantile": 0.9}
        how = {}
        if (family, link) == ("poisson", "identity"):  # whose predictor has to be positive
            how = {"b": dist.Normal(0.0, 0.1), "Intercept": dist.Normal(50.0, 1.0)}
            how = {"priors": {**how, "sd": dist.HalfNormal(0.1)}}
        method = quiet(formula, frames, family=family, link=link, **how)
        data = method.prepare(federations.from_frames(frames))
        batch = data.batch(torch.arange(4))
        from pyro import poutine

        with default_type(torch.float64), poutine.trace() as tape:
            method.model({}, {}, batch)
        tape.trace.compute_log_prob()
        found = [site["log_prob"] for _, site in observed(tape.trace)]
        assert found
        assert all(bool(v.isfinite().all()) for v in found)


def test_products_of_many_columns_are_those_of_few(monkeypatch):
    random, frames = np.random.default_rng(3), {}
    names = [f"x{k}" for k in range(program.MANY_COLUMNS)]
    for j, n in enumerate([30, 1, 22]):
        numbers = pd.DataFrame(random.normal(size=(n, len(names))), columns=names)
        frames[f"client {j}"] = numbers.assign(t=random.uniform(size=n), y=random.poisson(2.0, n))
    data, formula = federations.from_frames(frames), f"y ~ {' + '.join(names)} + s(t)"
    densities = []
    for limit in (program.MANY_COLUMNS, 1000):
        monkeypatch.setattr(program, "MANY_COLUMNS", limit)
        method = pyrofl.regression(formula, data, family="poisson")
        assert method.text.count("torch.einsum") == (2 if limit < 1000 else 0)
        batch = method.prepare(data).batch(torch.arange(3))
        pyro.set_rng_seed(0)
        with default_type(torch.float64), pyro.poutine.trace() as tape:
            method.model({}, {}, batch)
        tape.trace.compute_log_prob()
        densities.append(tape.trace.nodes["y"]["log_prob"])
    assert densities[0].shape == (3, 30)
    torch.testing.assert_close(*densities, rtol=1e-10, atol=1e-10)


def test_standard_deviations_of_slopes_of_few_clients_are_those_of_the_marginal_density():
    random, frames = np.random.default_rng(1), {}
    for j, n in enumerate([30, 20, 2, 25, 15]):
        x = random.normal(size=n)
        slope = 1 + x + random.normal() + 0.5 * random.normal() * x
        frames[f"client {j}"] = pd.DataFrame({"x": x, "y": slope + random.normal(size=n)})
    data = federations.from_frames(frames)
    run = pyrofl.fit(pyrofl.regression("y ~ x + (x | client)", data), data, progress=False)
    table = run.summary()
    # By importance sampling of the density without effects: mean and sd, and .04 sd of error.
    expected = {"sd_client[Intercept]": (2.31, 1.12), "sd_client[x]": (1.40, 0.91)}
    expected |= {"Intercept": (0.47, 1.12), "b[x]": (0.87, 0.72)}
    for name, (mean, sd) in expected.items():
        assert abs(table.loc[name, "mean"] - mean) < 0.15 * sd, name
        assert 0.8 < table.loc[name, "sd"] / sd < 1.2, name
