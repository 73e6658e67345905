"""What federation costs on real groups; minutes, so only with `-m slow`.

The tables lie in the folder HIERARCHICAL: counties' radon, nights of sleep loss, Parkinson's.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import programs
import pytest
import real_tables
import torch

import pyrofl
from pyrofl import reference
from pyrofl.data import Federation
from pyrofl.data.loaders import datasets
from pyrofl.inference.definition.programs import Program
from pyrofl.models import pvi
from pyrofl.partitions import federations

FIT = pyrofl.fit  # which a test replaces


def table(file: str, target: str, group: str, *features: str) -> Federation:
    """Return one client per group."""
    folder = real_tables.folder()
    rows = datasets.load(
        f"csv:{folder / file}",
        target=target,
        client_column=group,
        features=list(features),
        test_fraction=0.0,
    )
    return federations.split(rows, "groups").to("cpu", torch.float64)


def cost_of(program: Program, data: Federation, shared: str, steps: int) -> pd.DataFrame:
    """Return what federation costs beside 200 draws of NUTS."""
    method = pvi.hierarchical(program, data, shared=shared, num_particles=32, steps=steps)
    run = pyrofl.fit(method, data, 50, progress=False)
    exact = reference.nuts(program, data, 200, 200, 1, shared=shared, jit=True, max_tree_depth=8)
    return reference.compare_posteriors(run.to_arviz(draws=2000), exact)


def per_variable(cost: pd.DataFrame) -> pd.DataFrame:
    """Average distances and ratios over the coordinates of each variable."""
    return cost.assign(difference=cost["difference"].abs()).groupby("variable").mean()


@pytest.mark.slow
def test_county_intercepts_are_those_of_nuts():
    """85 counties of Minnesota.

    A run of 3,000 draws of NUTS gave shifts of 0.02 sds on average, 0.08 at most; the posteriors of
    the population's sds are 0.91 times as wide (0.62 without powers of them in the guide).
    """
    data = table("radon_minnesota.csv", "log_radon", "county_name", "floor", "log_uranium")
    assert data.clients == 85
    found = per_variable(cost_of(programs.radon, data, "gamma sd sigma", steps=5))
    assert found["difference"]["intercept"] < 0.2
    assert found["ratio"]["intercept"] == pytest.approx(1.0, abs=0.1)
    assert found["difference"]["gamma"] < 0.4
    assert found["ratio"]["sd"] == pytest.approx(0.9, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "clients"),
    [
        (("sleepstudy.csv", "Reaction", "Subject", "Days"), 18),
        (("parkinsons_telemonitoring.csv", "motor_UPDRS", "subject", "test_time"), 42),
    ],
    ids=["sleepstudy", "parkinsons"],
)
def test_lines_of_every_client_are_those_of_nuts(columns, clients):
    data = table(*columns)
    assert data.clients == clients
    x, y = (v - v.mean() for v in (data.x, data.y))
    data = replace(data, x=x / x.std(), y=y / y.std())
    found = per_variable(cost_of(programs.lines, data, "beta sd sigma", steps=20))
    assert found["difference"]["w"] < 0.2
    assert found["ratio"]["w"] == pytest.approx(1.0, abs=0.1)


# Problem -> its table; site -> means and standard deviations of NUTS (2,000 draws; nes: 1,200;
# kidney: 400), and what the federated ones may be off: in standard deviations, and as the ratio of
# the spreads. Posteriors of spreads are skewed, and q is not.
NUTS = {
    "lines": (
        "sleepstudy.csv",
        {
            "beta": ("-0.001 0.529", "0.183 0.087", 0.15, 0.17),
            "sd": ("0.703 0.330", "0.128 0.076", 0.2, 0.15),
            "sigma": ("0.459", "0.028", 0.15, 0.15),
            "w": (
                "0.746 1.009 -1.413 0.191 -1.142 0.352 0.085 0.217 0.185 0.315 0.145 0.496 0.300 "
                "0.478 -0.055 0.612 -0.818 -0.029 1.311 0.891 -0.384 0.662 0.254 0.914 -0.141 "
                "0.364 0.659 0.666 0.123 0.567 -0.116 0.853 -0.059 0.480 0.325 0.570",
                "0.145 0.140 0.147 0.141 0.143 0.135 0.142 0.137 0.145 0.131 0.145 0.132 0.144 "
                "0.129 0.145 0.135 0.140 0.138 0.143 0.138 0.144 0.137 0.138 0.136 0.144 0.131 "
                "0.150 0.131 0.143 0.132 0.143 0.136 0.148 0.140 0.143 0.129",
                0.15,
                0.12,
            ),
        },
    ),
    "nes": (
        "nes_1972_2000.csv",
        {
            "beta": (
                "3.743 0.662 -1.353 -0.068 0.209 -0.021 0.137",
                "0.059 0.065 0.087 0.045 0.038 0.049 0.027",
                0.15,
                0.3,
            ),
            "tau": (
                "0.132 0.165 0.135 0.109 0.066 0.063 0.039",
                "0.060 0.062 0.091 0.048 0.040 0.049 0.026",
                0.5,
                0.35,
            ),
            "sigma": ("1.820", "0.014", 0.15, 0.15),
        },
    ),
    "kidney": (
        "kidney.csv",
        {
            "b0": ("-0.821", "0.724", 0.3, 0.2),
            "beta": ("0.087 -1.617", "0.142 0.521", 0.3, 0.2),
            "shape": ("1.225", "0.175", 0.3, 0.25),
            "tau": ("0.876", "0.294", 0.3, 0.35),
        },
    ),
}


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Return a function that runs an example without its reference, and gives its names."""
    cost = reference.compare_posteriors
    monkeypatch.setattr(reference, "hmc", lambda *_, **__: None)
    monkeypatch.setattr(
        reference, "compare_posteriors", lambda federated, _: cost(federated, federated)
    )

    def run(script):
        folder = real_tables.folder()
        file = str(folder / NUTS[script][0])
        monkeypatch.setattr(sys, "argv", [script, "--data", file, "--out", str(tmp_path)])
        return runpy.run_path(str(Path(__file__).parent.parent / "examples" / f"{script}.py"))

    return run


def assert_as_nuts(script, federated):
    """Compare draws with what is known."""
    for name, (mean, sd, off, spread) in NUTS[script][1].items():
        known, width = (torch.tensor([float(v) for v in text.split()]) for text in (mean, sd))
        found = torch.tensor(federated["posterior"][name].values[0]).reshape(-1, len(known))
        assert ((found.mean(0) - known).abs() / width).max() < off, name
        assert (found.std(0) / width - 1).abs().max() < spread, name


@pytest.mark.slow
@pytest.mark.parametrize("script", ["lines", "nes"])
def test_examples_come_to_the_posterior_of_nuts(script, ran):
    assert_as_nuts(script, ran(script)["federated"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_seed_loses_the_spreads_of_lines(seed, ran, monkeypatch):
    """The scale of slopes went to 0.001 within five rounds, and stayed there."""
    monkeypatch.setattr(pyrofl, "fit", lambda method, data, rounds: run_of(method, data))

    def run_of(method, data):
        few = pvi.hierarchical(
            programs.lines, data, shared="beta sd sigma", num_particles=16, steps=20
        )
        return FIT(few, data, 20, seed=seed, progress=False)

    assert_as_nuts("lines", ran("lines")["federated"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_censored_times_with_frailties_are_those_of_nuts(seed):
    """Where steps were not shortened, means went to 100,000 in two rounds.

    y^shape has no mean under a log-normal shape: a single draw far out once made a client's factor
    a million times as narrow as its rows say, with seed 0, and the others could not follow.
    """
    data = table("kidney.csv", "time", "patient", "status", "age", "sex")
    status, age, sex = data.x.T
    x = torch.stack([status, age / 10, 1.0 * (sex == 2)], 1)
    data = replace(data, x=x, y=data.y / 30)
    method = pvi.hierarchical(programs.frailty, data, shared="b0 beta shape tau", num_particles=64)
    run = pyrofl.fit(method, data, 30, seed=seed, progress=False)
    assert not any(round.rejected for round in run.records)
    assert_as_nuts("kidney", run.to_arviz(draws=2000))
