"""Privacy by command line: where epsilon is told, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from pyrofl.cli.parser import main

pytest.importorskip("dp_accounting")

SMALL = ["--data", "eight_schools", "--partition", "iid", "--clients", "3", "--rounds", "2"]
SMALL += ["--quiet", "--set", "epochs=1"]
ASKED = ["--privacy", "clip=1.0,noise_multiplier=2.0,delta=0.01"]


def test_a_run_tells_what_it_has_spent(tmp_path, capsys):
    from arviz import from_netcdf

    out = tmp_path / "run"
    words = ["run", "fedavg", *SMALL, *ASKED, "--posterior-draws", "2", "--out", str(out)]
    assert main(words) == 0
    spent = json.loads((out / "run.json").read_text())["privacy"]
    assert 0 < spent["epsilon"] < 10
    assert spent["delta"] == 0.01
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["epsilon", "delta"]
    assert {tuple(line.split()[-2:]) for line in lines} == {(f"{spent['epsilon']:.4g}", "0.01")}
    found = from_netcdf(out / "posterior.nc").posterior.attrs
    assert (found["epsilon"], found["delta"]) == (spent["epsilon"], 0.01)
    rows = csv.DictReader((out / "clients.csv").read_text().splitlines())
    each = [float(row["value"]) for row in rows if row["metric"] == "epsilon"]
    assert each == spent["clients"]
    assert len(each) == 3


def test_a_seeded_run_is_called_not_private_in_every_output(tmp_path, capsys):
    from arviz import from_netcdf

    out, seeded = tmp_path / "run", "not private: seeded"
    words = [
        "run",
        "fedavg",
        *SMALL,
        "--privacy",
        "clip=1.0,noise_multiplier=2.0,delta=0.01,seed=0",
    ]
    assert main([*words, "--posterior-draws", "2", "--out", str(out)]) == 0
    assert f"epsilon ({seeded})" in capsys.readouterr().out
    assert seeded in from_netcdf(out / "posterior.nc").posterior.attrs["privacy"]
    assert f"epsilon ({seeded})" in (out / "clients.csv").read_text()
    assert json.loads((out / "run.json").read_text())["privacy"]["seeded"] is True


def test_a_run_goes_on_with_the_same_privacy_alone(tmp_path, capsys):
    words = ["run", "fedavg", *SMALL, "--posterior-draws", "0", "--out", str(tmp_path / "run")]
    assert main([*words, *ASKED, "--checkpoint-every", "1"]) == 0
    assert main([*words, *ASKED, "--resume", "--rounds", "3"]) == 0
    assert main([*words, "--resume", "--rounds", "4"]) == 2
    assert "privacy" in capsys.readouterr().err


def test_methods_that_cannot_be_private_are_refused_before_any_work(tmp_path: Path, capsys):
    words = ["compare", "fedavg", "pvi", *SMALL[:-2], *ASKED, "--out", str(tmp_path / "both")]
    assert main(words) == 2
    assert "pvi: its server stores a tensor of each client" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()
