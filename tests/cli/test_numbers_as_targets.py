"""A numeric target is standardized inside and its noise is learned, in the target's own unit."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import pyrofl
from pyrofl import datasets, federations, likelihoods, nets
from pyrofl.cli import main
from pyrofl.models import fedavg

NOISE = 1_400.0


def bills(path, rng, shift, rows=60):
    lines = ["site,age,cost"]
    for name, own in zip("ABCD", shift, strict=True):
        for age in rng.normal(50, 12, rows).round(2):
            cost = 50_000 + own + 160 * (age - 50) + rng.normal(0, NOISE)
            lines.append(f"{name},{age},{cost:.1f}")
    path.write_text("\n".join(lines))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    shift = rng.normal(0, 300, 4)
    bills(Path("old.csv"), rng, shift)
    bills(Path("new.csv"), rng, shift, 250)
    return tmp_path


RUN = [
    "--data",
    "csv:old.csv",
    "--target",
    "cost",
    "--client-column",
    "site",
    "--quiet",
    "--eval-every",
    "20",
]


def predicted(folder):
    words = [
        "predict",
        folder,
        "--data",
        "new.csv",
        "--client-column",
        "site",
        "--out",
        "found.csv",
    ]
    assert main([*words, "--overwrite"]) == 0
    with open("found.csv") as file:
        found = list(csv.DictReader(file))
    with open("new.csv") as file:
        y = np.array([float(row["cost"]) for row in csv.DictReader(file)])
    return y, *(np.array([float(row[n]) for row in found]) for n in ("mean", "sd"))


@pytest.mark.parametrize(
    "method", ["fedavg", "pfedvem", pytest.param("pvi", marks=pytest.mark.slow)]
)
def test_intervals_and_scores_are_right_in_the_unit_of_the_target(method):
    rounds = ["--rounds", "20", "--posterior-draws", "0"]
    assert main(["run", method, *RUN, *rounds, "--out", "run"]) == 0
    y, mean, sd = predicted("run")
    # Noise of 1,400 and effects of clients of 300; 1,000 rows give an RMSE to 2.2%, and a share of
    # .95 to .7 points. The models are of 192 rows and 20 rounds: 4 standard errors and some bias.
    assert np.sqrt(np.mean((y - mean) ** 2)) == pytest.approx(NOISE, rel=0.12)
    assert np.median(sd) == pytest.approx(NOISE, rel=0.15)
    assert np.mean(np.abs(y - mean) < 1.96 * sd) == pytest.approx(0.95, abs=0.035)
    about = json.loads(Path("run/run.json").read_text())
    assert about["data"]["likelihood"] == "normal:learned"
    assert about["data"]["scale"] == pytest.approx(2_400, rel=0.15)
    with open("run/metrics.csv") as file:
        scores = [r for r in csv.DictReader(file) if r["metric"] == "nll" and r["round"] == "20"]
    exact = 0.5 * np.log(2 * np.pi * np.e * NOISE**2)  # of the noise alone, in nats
    assert all(abs(float(row["value"]) - exact) < 0.3 for row in scores)


def test_the_unit_is_stated_and_saved_with_the_run(capsys):
    arviz = pytest.importorskip("arviz")
    words = ["run", "pvi", *[w for w in RUN if w != "--quiet"], "--rounds", "30"]
    assert main([*words, "--posterior-draws", "5", "--out", "run"]) == 0
    told = capsys.readouterr().err
    assert "target standardized internally: mean 50" in told
    assert "predictions and scores are in its own unit" in told
    found, run = arviz.from_netcdf("run/posterior.nc"), pyrofl.load("run")
    attrs, source = found["posterior"].attrs, run.data.source
    assert (attrs["target"], attrs["target_center"]) == ("cost", source.center)
    assert "have the unit of cost" in attrs["target_unit"]
    assert 40_000 < float(found["observed_data"]["y"].mean()) < 60_000
    assert float(found["posterior_predictive"]["y"].mean()) == pytest.approx(source.center, rel=0.1)
    assert "noise.log_scale" in found["posterior"]


def test_counts_are_told_of_poisson(capsys):
    rng = np.random.default_rng(1)
    Path("old.csv").write_text("a,visits\n" + "".join(f"{i},{rng.poisson(3)}\n" for i in range(60)))
    words = ["run", "local", "--data", "csv:old.csv", "--target", "visits", "--rounds", "1"]
    assert main([*words, "--clients", "3", "--posterior-draws", "0", "--out", "run"]) == 0
    told = "all are whole: for counts, --likelihood poisson; for classes, --likelihood categorical"
    assert told in capsys.readouterr().err


def test_the_sums_are_of_clients_that_train_and_their_training_rows():
    data = federations.split(
        datasets.load("csv:old.csv", target="cost", client_column="site"), "groups", held_out=["D"]
    )
    mine = data.y[torch.cat(data.train[:3])].double()
    assert data.source.center == pytest.approx(float(mine.mean()), rel=1e-12)
    assert data.source.scale == pytest.approx(float(mine.std(correction=0)), rel=1e-9)
    known = datasets.load("csv:old.csv", target="cost", client_column="site", likelihood="normal:3")
    assert not federations.split(known, "groups").source.is_standardized


def test_steps_of_least_squares_have_the_density_and_gradient_they_claim():
    outputs = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    y = 50.0 + 3 * torch.randn(2, 5, dtype=torch.float64)
    exact, squares = (
        likelihoods.learned_normal(50.0, 3.0, least_squares=one)(outputs, y)
        for one in (False, True)
    )
    torch.testing.assert_close(squares.log_prob(y), exact.log_prob(y))
    one, two = (torch.autograd.grad(fn.log_prob(y).sum(), outputs)[0] for fn in (exact, squares))
    torch.testing.assert_close(one[..., 1], two[..., 1])
    torch.testing.assert_close(two[..., 0], ((y - 50) / 3 - outputs[..., 0]).detach())
    again = squares.expand([4, 2, 5])
    torch.testing.assert_close(again.log_prob(y), exact.log_prob(y).expand(4, 2, 5))


@pytest.mark.parametrize("spec", ["softmax", "mlp:4", "mean", "linear"])
def test_every_network_gets_a_second_output(spec):
    net = nets.with_noise(nets.build(spec, (3,), 1))
    net.check(torch.zeros(1, 1, 3), 2)
    *_, last = net.shapes
    assert last == "noise.log_scale"
    assert last not in net.select_params(net.head)
    x = torch.randn(2, 5, 3)
    weights = {n: torch.randn(4, 2, 1, *shape) for n, shape in net.shapes.items()}
    found = net(weights, x)
    assert found.shape == (4, 2, 5, 2)
    alone = {n: v[3, 1, 0] for n, v in weights.items()}
    torch.testing.assert_close(found[3, 1], net.apply(alone, x[1]))
    assert torch.equal(found[..., 1], weights[last][..., 0].expand(4, 2, 5))
    method = fedavg.build(net, likelihood=likelihoods.learned_normal(1.0, 2.0))
    assert set(method.init(torch.Generator(), 2)) == {f"w/{n}" for n in net.shapes}
