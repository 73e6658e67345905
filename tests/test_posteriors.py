"""The benchmark of posteriors: its metrics, references, partitions, methods and runner."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import grouped_tables
import hard
import normal_models
import numpy as np
import page
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import references
import run
import torch
from density import Density
from methods import METHODS
from metrics import Reference, Statistics, Worst, accurate, compare, energy, labeled, statistics
from problems import HERE, NAMES, Problem, load

from pyrofl import Federation
from pyrofl.tensors import generator

INCLUDED = {path.stem for path in (HERE / "data").glob("*.csv")}
INCLUDED |= {"eight_schools", "rat_tumours", "baseball", "squares", "separated", "levels"}


def means(received, local, batch):
    """Return clients' means, normal around mu with known variances."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        pyro.deterministic("theta", mu + 1.5 * eta)
        with batch.rows():
            pyro.sample("y", dist.Normal(mu + 1.5 * eta, 1.0), obs=batch.y)


def one_mean(received, local, batch):
    """Return one mean of all clients."""
    with batch.clients():
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(a, 1.0), obs=batch.y)


def few() -> Federation:
    """Return three clients with 4, 1 and 2 rows."""
    y = torch.randn(7, generator=generator(3), dtype=torch.float64) + 1
    rows = torch.arange(7).split([4, 1, 2])
    return Federation(y[:, None], y, rows, [r[:0] for r in rows], names=tuple("abc"))


@pytest.fixture
def hierarchy(monkeypatch) -> Problem:
    monkeypatch.setattr(grouped_tables, "few", few, raising=False)
    monkeypatch.setattr(hard, "means", means, raising=False)
    return Problem("means", "few", "hard.means", "mu", "normal", own="theta")


@pytest.fixture
def mean(monkeypatch) -> Problem:
    monkeypatch.setattr(hard, "one_mean", one_mean, raising=False)
    return Problem("one_mean", "squares", "hard.one_mean", "a", "normal")


def exact(problem: Problem) -> tuple[float, float]:
    """Return mean and standard deviation of the posterior of `one_mean`."""
    y = problem.federation.y
    return float(y.sum() / (len(y) + 1)), (len(y) + 1) ** -0.5


@pytest.mark.parametrize("how", ["quadrature", "normal", "hmc"])
def test_references_are_exact_for_normal_models(how, hierarchy, monkeypatch):
    monkeypatch.setattr(references, "PROPOSED", (2000,))
    monkeypatch.setattr(references, "OF_CHAIN", 64)
    monkeypatch.setattr(references, "FIRST", 500)
    data = few()
    found = references.make(replace(hierarchy, made_by=how))
    sizes = data.sizes.double()
    y = torch.stack([data.y[rows].mean() for rows in data.train])
    precision = 1 / 4 + (1 / (1.5**2 + 1 / sizes)).sum()
    mean = (y / (1.5**2 + 1 / sizes)).sum() / precision
    share = 1.5**2 / (1.5**2 + 1 / sizes)  # of theta that follows the client's own rows
    theta = mean + share * (y - mean)
    spread = (share / sizes + (1 - share) ** 2 / precision).sqrt()
    for one, m, sd in zip(
        found.statistics.values(), [mean, *theta], [precision**-0.5, *spread], strict=True
    ):
        assert abs(one.mean - m) < 4 * one.mcse_mean
        assert abs(one.sd - sd) < 4 * one.mcse_sd
        assert one.mcse_mean < 0.05 * sd
    assert found.draws["mu"].shape == (1000,)


def test_a_grid_is_exact(mean):
    found = references.make(replace(mean, made_by="grid", box=((-1.0, 3.0),)))
    (one,), (m, sd) = found.statistics.values(), exact(mean)
    assert abs(one.mean - m) < 4 * one.mcse_mean
    assert abs(one.sd - sd) < 4 * one.mcse_sd


@pytest.mark.parametrize("method", ["consensus", "fedavg_laplace"])
def test_methods_are_exact_for_one_normal_mean(method, mean):
    found = METHODS[method](mean)
    (one,), (m, sd) = (
        statistics({"a": found["posterior"]["a"].values}, ["a"]).values(),
        exact(mean),
    )
    assert abs(one.mean - m) < 5 * one.mcse_mean  # covariances of clients are estimated, too
    assert abs(one.sd - sd) < 5 * one.mcse_sd
    assert found.attrs["exchanges"] == (1 if method == "consensus" else 501)


@pytest.mark.parametrize("name", ["nes", "radon_minnesota"])
def test_sums_have_the_density_of_the_rows(name, monkeypatch):
    """Up to a constant, on 30 simulated rows of three clients; the tables are not included."""
    g = np.random.default_rng(0)
    names = [*normal_models.NES, "partyid7", "floor", "log_radon"]
    table = pd.DataFrame(g.normal(size=(30, len(names))), columns=names)
    table["year"] = table["county_name"] = table["log_uranium"] = 1.0 * (np.arange(30) % 3)
    monkeypatch.setattr(grouped_tables, "read", lambda _: table)
    problem = load(name)
    rows = Density.of(problem.program, problem.federation, problem.shared)
    sums = Density.of(*problem.pooled(), problem.shared)
    d, clients, own = rows.sizes
    point = torch.randn(4, d + clients * own, generator=generator(0), dtype=torch.float64)
    difference = rows.joint(point) - sums.joint(point)
    torch.testing.assert_close(difference, difference[:1].expand(4), rtol=1e-9, atol=1e-9)
    assert sums.batch.mask.shape == (3, 1)


def test_energy_distance_is_that_of_normals():
    """E|X - Y| of normals is the mean of a folded normal; 20 sets of draws give the error."""
    g, m = np.random.default_rng(0), 1.0
    between = 2 / math.sqrt(math.pi) * math.exp(-(m**2) / 4) + m * math.erf(m / 2)
    exact = 1 - 2 / math.sqrt(math.pi) / between
    x, y = g.normal(m, 1, (20, 1000, 1)), g.normal(0, 1, (20, 1000, 1))
    found = np.array([energy(*pair).value for pair in zip(x, y, strict=True)])
    assert abs(found.mean() - exact) < 4 * found.std() / 20**0.5
    same = np.array([energy(pair[:500], pair[500:]).value for pair in y])
    assert abs(same.mean()) < 4 * same.std() / 20**0.5
    assert energy(3 * x[0] + 2, 3 * y[0] + 2).value == pytest.approx(energy(x[0], y[0]).value)


def test_errors_of_statistics_are_those_of_independent_draws():
    draws = np.random.default_rng(0).normal(2, 3, (4, 1000))
    (one,) = statistics({"a": draws}, ["a"]).values()
    assert one.mcse_mean == pytest.approx(3 / 4000**0.5, rel=0.2)
    assert one.mcse_sd == pytest.approx(3 / 8000**0.5, rel=0.2)
    (again,) = statistics({"a": draws}, ["a"], resampled=4000).values()
    assert again.mcse_mean == pytest.approx(3 / 2000**0.5, rel=0.2)


def test_the_worst_coordinate_counts():
    g = np.random.default_rng(0)
    known = {"mu": g.normal(size=(4, 2000)), "w": g.normal(size=(4, 2000, 3))}
    flat = {"mu": known["mu"].reshape(-1)[::8].astype(np.float32)}
    reference = Reference("grid", 0.0, None, 0.0, statistics(known, ["mu", "w"]), flat)
    same = compare(known, reference, ["mu"])
    assert accurate(same)
    assert abs(same["shift"].value) < 1e-3
    assert abs(same["energy"].value) < 0.01
    wide = compare(known | {"w": known["w"] * [1.0, 1.0, 1.3]}, reference, ["mu"])
    assert not accurate(wide)
    assert (wide["high"].at, round(wide["high"].value, 2)) == ("w[2]", 1.3)
    moved = compare(known | {"mu": known["mu"] - 0.3}, reference, ["mu"])
    assert not accurate(moved)
    assert (moved["shift"].at, round(moved["shift"].value, 1)) == ("mu", -0.3)
    modes = compare(known | {"mu": np.sign(known["mu"])}, reference, ["mu"])
    assert modes["high"].value < 1.1
    assert not accurate(modes)  # by the energy distance


def test_accurate_results_may_exceed_limits_by_their_errors():
    one, none = Worst(1.0, "a", 0.0), Worst(0.0, "", 0.0)
    good = {"low": one, "high": one, "energy": none}
    assert accurate(good | {"shift": Worst(-0.13, "a", 0.02)})
    assert not accurate(good | {"shift": Worst(-0.15, "a", 0.02)})
    assert not accurate(good | {"shift": none, "energy": Worst(0.015, "", 0.002)})


@pytest.mark.parametrize("name", grouped_tables.PARTITIONS)
def test_partitions_keep_every_row(name):
    data = grouped_tables.levels()
    found = grouped_tables.partitioned(data, name)
    rows = torch.cat(found.train)
    assert rows.sort().values.equal(torch.arange(60))
    if name == "one_large":
        assert found.sizes.tolist() == [54, 2, 1, 1, 1, 1]
    elif name == "one_row":
        assert found.sizes.tolist() == [1] * 60
    elif name == "by_class":
        assert sum(len(found.y[r].unique()) == 1 for r in found.train) >= 4
    elif name == "by_level":
        assert found.sizes.tolist() == [56, 4]


def test_difficult_clients_are_as_described():
    data = grouped_tables.separated()
    x, y = data.x[data.train[0], 0], data.y[data.train[0]]
    assert y.equal((x > 0).double())
    assert bool((data.y[data.train[1]] == 1).all())
    levels = grouped_tables.levels()
    assert [bool(levels.x[rows, 1].any()) for rows in levels.train] == [True] + [False] * 4


@pytest.mark.parametrize("name", NAMES)
def test_problems_describe_their_reference(name):
    problem = load(name)
    assert problem.name == name
    assert problem.partition in grouped_tables.PARTITIONS
    assert callable(problem.program)
    known = Reference.load(HERE / "references", problem.reference)
    sites = {label.partition("[")[0] for label in known.statistics}
    assert sites == set(problem.compared)
    assert known.made_by == problem.made_by
    assert set(known.draws) == set(problem.population)
    draws = labeled(known.draws, problem.population, 1)
    for label, values in draws.items():  # 1,000 draws, thinned from those of the statistics
        one = known.statistics[label]
        assert abs(values.mean() - one.mean) < 5 * math.hypot(one.sd / 1000**0.5, one.mcse_mean)
    for one in known.statistics.values():
        assert one.mcse_mean < 0.03 * one.sd
    if known.made_by == "hmc":
        assert known.diagnostic < 1.01
    if problem.data in INCLUDED:
        own = problem.own.split()
        clients = problem.federation.clients
        for site in own:
            labels = [n for n in known.statistics if n.startswith(f"{site}[")]
            assert len(labels) % clients == 0


STRANGER = """
import arviz
import numpy as np


def mine(problem):
    g = np.random.default_rng(problem.seed)
    open("calls", "a").write(problem.name + " ")
    draws = {"a": g.normal(0.096, 0.98, (4, 1000))}
    if arviz.__version__ < "1":
        return arviz.from_dict(posterior=draws)
    return arviz.from_dict({"posterior": draws})


def broken(problem):
    raise ValueError("no such luck")
"""


def test_runner_takes_functions_of_others_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(STRANGER)
    words = ["--problems", "two_modes", "--out", "out.csv", "--methods"]
    run.main([*words, "mine.py:mine", "mine.py:broken"])
    assert capsys.readouterr().out.startswith("A full run takes some hours on one core; --problems")
    mine, broken = run.read(Path("out.csv"))
    assert abs(float(mine["shift"])) < 0.1
    assert mine["verdict"] == "inaccurate"  # mean and sd are right, but there is one mode
    assert float(mine["energy"]) > 0.01
    assert (broken["verdict"], broken["warning"]) == ("failed", "ValueError: no such luck")
    run.main([*words, "mine.py:mine", "mine.py:broken", "--resume", "--seeds", "0", "1"])
    assert Path("calls").read_text().split() == ["two_modes"] * 2
    assert [row["seed"] for row in run.read(Path("out.csv"))] == ["0", "0", "1", "1"]
    run.main(["--out", "out.csv", "--page", "page.md"])
    text = Path("page.md").read_text()
    assert "- `mine.py:broken`, two_modes: ValueError: no such luck" in text
    assert re.search(r"- `mine.py:mine`, two_modes: mean of a .* sd, ratios of sds", text)
    assert not re.search(r"@\w+@", text)
    assert Path("posteriors/rounds.png").exists()


def test_function_of_the_page_runs(tmp_path, monkeypatch):
    """Nine lines, on the logistic regression with a level that four clients lack."""
    monkeypatch.chdir(tmp_path)
    page = (HERE.parent / "POSTERIORS.md").read_text()
    code = re.findall(r"```python\n# mine.py\n(.*?)```", page, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line]) < 10
    Path("mine.py").write_text(code)
    words = ["--methods", "mine.py:mine", "--problems", "missing_level", "--out", "out.csv"]
    run.main([*words, "--limit", "300"])
    (row,) = run.read(Path("out.csv"))
    assert row["verdict"] == "accurate", row


def test_slow_methods_are_stopped():
    def slow(problem: Problem) -> object:
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue

    row = run.evaluate(slow, load("two_modes"), limit=1)
    assert row == {"verdict": "stopped", "warning": "stopped after 1 s of CPU time", "seconds": 1}
    row = {n: str(row.get(n, "")) for n in run.COLUMNS} | {"problem": "two_modes", "method": "x"}
    assert page.verdict(row) == page.cell(row) == "stopped"
    assert page.reasons([row], "failed", "stopped").endswith(
        "two_modes: stopped after 1 s of CPU time"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "mine.py:mine"], "method 'mine.py:mine' does not exist; expected FILE.py"),
        (["--methods", "defualt"], "method 'defualt' does not exist"),
    ],
)
def test_runner_refuses_unknown_methods_before_any_work(words, told, tmp_path):
    with pytest.raises(ValueError, match=re.escape(told)):
        run.main([*words, "--out", str(tmp_path / "out.csv")])
    assert not list(tmp_path.iterdir())


def test_warnings_of_methods_are_in_their_rows():
    def warned(problem: Problem) -> object:
        found = METHODS["consensus"](problem)
        found.attrs["status"] = "not converged: as it was stopped"
        return found

    row = run.evaluate(warned, load("missing_level"))
    assert row["warning"] == "not converged: as it was stopped"
    row = {n: str(row.get(n, "")) for n in run.COLUMNS}
    assert page.verdict(row | {"verdict": "inaccurate"}) == "inaccurate, warned"
    assert page.verdict(row | {"verdict": "inaccurate", "warning": ""}) == "inaccurate, silent"
    row = run.evaluate(METHODS["fisher"], load("surgical"))
    assert row["verdict"] == "not applicable"


QUICK = {"num_particles": 32, "steps": 5}


@pytest.mark.parametrize("name", ["surgical", pytest.param("seeds", marks=pytest.mark.slow)])
def test_a_small_posterior_is_near_the_exact_one(name):
    """Draws of q have spreads 0.86 and 0.79 of the exact ones, as q is not skewed."""
    problem = replace(load(name), pvi=QUICK, rounds=25)
    known = Reference.load(HERE / "references", name)
    for method, least in (("pvi_guide", 0.75), ("pvi", 0.95)):
        posterior = METHODS[method](problem)["posterior"]
        draws = {n: posterior[n].values for n in problem.population}
        for label, one in statistics(draws, problem.population).items():
            other: Statistics = known.statistics[label]
            error = math.hypot(one.mcse_mean, other.mcse_mean)
            assert abs(one.mean - other.mean) < 0.1 * other.sd + 4 * error, label
            error = math.hypot(one.mcse_sd, other.mcse_sd)
            assert least * other.sd - 4 * error < one.sd < 1.05 * other.sd + 4 * error, label


RESULTS = [row for row in run.read(HERE / "results.csv") if row["seed"] == "0"]


def test_the_page_is_that_of_the_results(tmp_path):
    page.write(RESULTS, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (HERE.parent / "POSTERIORS.md").read_text()


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"pvi", "pvi_guide", "nuts"}))
def test_methods_have_a_row_of_every_problem(method):
    """Whether they are accurate, inaccurate, failed, stopped or not applicable."""
    done = {row["problem"] for row in RESULTS if row["method"] == method and not row["rounds"]}
    assert done == set(NAMES)


def test_the_default_is_never_silently_inaccurate():
    found = [page.verdict(row) for row in RESULTS if row["method"] == "default"]
    assert set(found) <= {"accurate", "accurate, warned", "inaccurate, warned"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_default_is_accurate_or_warns(name):
    row = run.evaluate(METHODS["default"], load(name))
    assert row["verdict"] == "accurate" or row["warning"], row
