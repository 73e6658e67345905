"""Reports of runs: the numbers in their sentences are those of the closed form, or of scipy."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import binomtest

pytest.importorskip("jinja2")

import pyrofl
from pyrofl import Federation, datasets, federations, nets
from pyrofl.data.tables.wording import number_of
from pyrofl.models import fedavg, pvi
from pyrofl.reports.first_page import coverage, score_sentences

NAMES = ("<b>Süd</b>", "{{ 7 * 7 }} & 'V.A.'", '"$x$"')
SIZES = (3, 9, 20)


class Reader(HTMLParser):
    """Collects tags and texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.texts = set[str](), list[str]()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def first_page(self) -> str:
        """All texts before the links to the details."""
        return "\n".join(self.texts).partition("Details:")[0]


def rows(sizes=SIZES, names=NAMES) -> Federation:
    rng = np.random.default_rng(0)
    return Federation.from_arrays(
        {
            n: (np.zeros((k, 1)), rng.normal(j, 1, k))
            for j, (n, k) in enumerate(zip(names, sizes, strict=True))
        }
    ).to("cpu", torch.float64)


def model(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def exact(data: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Return means and standard deviations of mu and of theta of each client, by linear algebra."""
    n = data.sizes.double().numpy()
    total = np.array([float(data.y[r].sum()) for r in data.train])
    precision = np.diag(np.append(1 / 25 + len(n), n + 1.0))
    precision[0, 1:] = precision[1:, 0] = -1.0
    covariance = np.linalg.inv(precision)
    return covariance @ np.append(0.0, total), np.sqrt(np.diag(covariance))


def numbers(text: str) -> list[float]:
    return [float(v.replace(",", "")) for v in re.findall(r"-?\d[\d,]*\.?\d*", text)]


def close(told: list[float], mean: float, sd: float, draws: int) -> bool:
    """Whether a mean and the ends of its interval are exact to 5 standard errors, and rounding."""
    quantile = 5 * sd * (0.025 * 0.975 / draws) ** 0.5 / 0.0584  # density of N(0, 1) at 1.96
    errors = np.abs(np.array(told) - mean - sd * np.array([0.0, -1.96, 1.96]))
    rounding = 0.005 * (1 + np.abs(told))
    return bool((errors <= np.array([5 * sd / draws**0.5, quantile, quantile]) + rounding).all())


@pytest.fixture(scope="module")
def fitted():
    data = rows()
    return pyrofl.fit(pyrofl.hierarchical(model, data, shared="mu"), data, progress=False)


def test_sentences_on_a_program_have_the_numbers_of_the_closed_form(fitted, tmp_path):
    page = Reader(pyrofl.report(fitted, tmp_path / "r.html", data="wards", draws=4000))
    mean, sd = exact(fitted.data)
    (mu,) = re.findall(r"mu is (.*)\.\n", page.first_page)
    assert close(numbers(mu.replace("95%", "")), mean[0], sd[0], 4000)
    (theta,) = re.findall(r"theta goes from (.*)\.\n", page.first_page)
    order = mean[1:].argsort()
    for j, text in zip(order[[0, -1]], re.split(r"\) to ", theta), strict=True):
        assert NAMES[j] in text
        told = numbers(text.replace(NAMES[j], "").replace("95%", ""))
        assert close(told, mean[1 + j], sd[1 + j], 4000)
    for words in (
        "wards: 32 rows at 3 clients (3 to 20 each)",
        "What do the rows of 3 clients show about mu?",
        "\nResult\n",
        "The fit has converged",
        "The intervals are those of the exact posterior.",
        f"{fitted.method.name}, {number_of(fitted.state.number, 'round')}, seed 0",
    ):
        assert words in page.first_page
    assert not page.tags & {"b", "script"}
    assert all(name in page.texts for name in NAMES)
    assert "49" not in page.texts


@pytest.mark.slow
def test_a_run_that_has_not_converged_is_preliminary_and_many_clients_have_room(tmp_path):
    data = rows(tuple(range(3, 63)), tuple(f"ward {j}" for j in range(60)))
    run = pyrofl.fit(pvi.hierarchical(model, data, shared="mu"), data, rounds=2, progress=False)
    assert run.status.kind == "not converged"
    page = Reader(pyrofl.report(run, tmp_path / "r.html", question="Do wards differ?", draws=500))
    assert page.texts.count("Do wards differ?") == 2  # title and heading
    reliable = "the correction is reliable (Pareto k is"
    for words in ("Preliminary result", run.status.why, reliable, "theta of each client, with 95%"):
        assert words in page.first_page
    assert {f"ward {j}" for j in range(60)} <= {*page.texts}


def test_variables_that_were_asked_for_come_first(fitted, tmp_path):
    page = Reader(pyrofl.report(fitted, tmp_path / "r.html", var_names=["theta"], draws=500))
    assert "theta goes from" in page.first_page
    assert "mu is" not in page.first_page
    with pytest.raises(ValueError, match="unknown variable 'thta'; did you mean theta"):
        pyrofl.report(fitted, tmp_path / "s.html", var_names=["thta"])
    with pytest.raises(ValueError, match=r"ends in \.html"):
        pyrofl.report(fitted, tmp_path / "r.txt")
    with pytest.raises(ValueError, match=r"r\.html is there already"):
        pyrofl.report(fitted, tmp_path / "r.html")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"draws": 1}, "draws is 1; expected at least 100"),
        ({"var_names": []}, "var_names is "),
        ({"var_names": [5]}, "var_names is "),
        ({"var_names": ["nope"]}, "nope"),
    ],
)
def test_what_a_report_cannot_have_is_refused(fitted, tmp_path, change, told):
    with pytest.raises(ValueError, match=told):
        pyrofl.report(fitted, tmp_path / "page.html", **change)
    assert not [*tmp_path.iterdir()]


def test_variables_are_chosen_of_programs_only(tmp_path):
    data = federations.split(datasets.load("digits"), "iid", clients=2)
    method = fedavg.build(nets.build("softmax", (64,), 10))
    run = pyrofl.fit(method, data, rounds=1, progress=False)
    with pytest.raises(ValueError, match="var_names is for programs"):
        pyrofl.report(run, tmp_path / "page.html", var_names=["w"])


def test_a_diverged_run_has_a_page_that_says_so(tmp_path):
    data = rows()

    def wrong(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            with batch.rows():
                pyro.sample("y", dist.Normal(mu, 1.0), obs=batch.y)
                pyro.factor("wrong", 1e3 * mu**2)

    method = pvi.hierarchical(wrong, data, shared="mu")
    run = pyrofl.fit(method, data, rounds=8, progress=False)
    assert run.status.kind == "diverged"
    page = Reader(pyrofl.report(run, tmp_path / "r.html"))
    assert "There is no result." in page.first_page
    assert "The fit failed (diverged). Do not use the numbers" in page.first_page


@pytest.mark.parametrize("clients", [1, 30])
def test_accuracies_of_a_network_have_wilson_intervals(clients, tmp_path):
    data = federations.split(datasets.load("digits"), "iid", clients=clients)
    method = fedavg.build(nets.build("softmax", (64,), 10))
    run = pyrofl.fit(method, data, rounds=2, progress=False)
    page = Reader(pyrofl.report(run, tmp_path / "r.html", data="digits"))
    scores = run.evaluate(model="global")
    right = (scores.values["accuracy"] * scores.rows).round().long()

    def told(right: int, count: int) -> str:
        ends = binomtest(right, count).proportion_ci(method="wilson")
        low, high = (f"{100 * end:.3g}" for end in ends)
        return f"95% interval {low}% to {high}%"

    whole, count = int(right.sum()), int(scores.rows.sum())
    share = f"{100 * whole / count:.3g}%"
    over = f"{share} of {count} test rows correctly ({told(whole, count)})."
    words = f"The global model of fedavg predicts {over}"
    assert words in page.first_page
    assert ("By client, it goes from" in page.first_page) == (clients > 1)
    for i, k, n in zip(scores.ids.tolist(), right.tolist(), scores.rows.tolist(), strict=True):
        at = page.texts.index(data.names[i], page.texts.index("Details: "))
        line = [v for v in page.texts[at : at + 14] if v.strip()][1:6]
        ends = binomtest(k, n).proportion_ci(method="wilson")
        assert line[:2] == [f"{data.sizes[i]:,}", f"{n:,}"]
        assert line[2:] == [f"{v:.4g}" for v in (k / n, ends.low, ends.high)]


def test_errors_of_numbers_have_students_intervals():
    from pandas import DataFrame
    from scipy.stats import t

    rng = np.random.default_rng(1)
    y, prediction = rng.normal(size=(2, 12))
    table = DataFrame({"client": 6 * ["a"] + 6 * ["b"], "y": y, "prediction": prediction})
    table["log_score"] = 0.0
    whole, ends = score_sentences(table, {"a": 3, "b": 4}, "the model", "train")[:2]
    error = np.abs(y - prediction)
    half = t.ppf(0.975, 11) * error.std(ddof=1) / 12**0.5
    assert numbers(whole.replace("95%", "")) == pytest.approx(
        [12, error.mean(), error.mean() - half, error.mean() + half], abs=0.005
    )
    worst = max((error[:6].mean(), "a"), (error[6:].mean(), "b"))[1]
    first, _, last = ends.partition(f"at {worst} (6 training")
    assert first.startswith("By client, it goes from")
    assert " to " not in first
    assert "(6 training" in last


def test_measured_coverage_is_told_of_methods_that_were_measured():
    assert "contained the true parameter in" in coverage("pfedvem")
    assert "too narrow" in coverage("pfedvem")
    assert coverage("fedavg") == ""


def regression(family: str, response: Any) -> Any:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("formulae")
    rng = np.random.default_rng(3)
    frames = {}
    for name in NAMES:
        x, sex = rng.normal(size=60), np.array(["female", "male"])[rng.integers(0, 2, 60)]
        frames[name] = pd.DataFrame({"x": x, "sex": sex, "y": response(x, sex == "male", rng)})
    data = federations.from_frames(frames)
    method = pyrofl.regression("y ~ x + sex + (1 | client)", data, family=family)
    return pyrofl.fit(method, data, progress=False)


def test_a_regression_says_what_raises_the_odds_and_by_how_much(tmp_path):
    run = regression(
        "bernoulli", lambda x, male, rng: (rng.logistic(size=60) < 2 * x - 2 * male).astype(int)
    )
    page = Reader(pyrofl.report(run, tmp_path / "r.html", data="wards.csv"))
    table = pyrofl.effects.ratios(run)
    for label, subject, verb in (
        ("x", "One unit more of x", "raises"),
        ("sex[male]", "sex = male, compared with female,", "lowers"),
    ):
        middle, low, high = (f"{table.loc[label, c]:.3g}" for c in ("median", "2.5%", "97.5%"))
        words = f"by a factor of {middle} (95% interval {low} to {high})"
        assert f"{subject} {verb} the odds of y {words}." in page.first_page
    for words in (
        "How does y depend on",
        "bernoulli, link logit",
        "b[x] ~ Normal",
        "wards.csv: 180",
    ):
        assert words in page.first_page


def test_the_odds_of_a_response_of_two_words_are_those_of_the_second(tmp_path):
    run = regression(
        "bernoulli",
        lambda x, male, rng: np.where(rng.logistic(size=60) < 2 * x, "survived", "died"),
    )
    page = Reader(pyrofl.report(run, tmp_path / "r.html")).first_page
    assert "One unit more of x raises the odds of y = survived by a factor of" in page


def test_a_regression_without_ratios_says_by_how_much_the_mean_changes(tmp_path):
    run = regression("gaussian", lambda x, male, rng: -1.5 * x + rng.normal(size=60))
    page = Reader(pyrofl.report(run, tmp_path / "r.html"))
    (x,) = re.findall(r"One unit more of x lowers the mean of y by (.*)\.\n", page.first_page)
    row = run.summary().loc["b[x]"]
    assert numbers(x.replace("95%", "")) == pytest.approx(
        [-row["median"], -row["97.5%"], -row["2.5%"]], rel=0.01
    )
    words = "Whether sex = male, compared with female, changes the mean of y is uncertain: change"
    assert words in page.first_page
