"""Prediction sets of a saved run: their coverage in a table, and sets of new rows."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import pyrofl
from pyrofl.cli import main
from pyrofl.cli.commands.predict import rows_of

RUN = ["--rounds", "2", "--posterior-draws", "0", "--quiet", "--net", "softmax", "--out", "r"]
TABLE = ["--data", "csv:old.csv", "--client-column", "site", "--test-fraction", "0.5"]
TABLE += ["--features", "age,dose"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["site,age,dose,ill,score"]
    for site in "ABC":
        for age, dose in rng.normal(size=(60, 2)).round(3):
            ill = "yes" if age + (site == "B") * dose > rng.normal() else "no"
            lines.append(f"site {site},{age},{dose},{ill},{age + rng.normal():.4f}")
    Path("old.csv").write_text("\n".join(lines))
    Path("new.csv").write_text("dose,site,age\n1,site A,2\n3,site C,4\n")
    return tmp_path


def table(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_table_is_that_of_the_library(capsys):
    assert main(["run", "fedavg", *TABLE, "--target", "ill", *RUN]) == 0
    assert main(["conformal", "r", "--alpha", "0.2", "--calibration-fraction", "0.6"]) == 0
    printed = capsys.readouterr().out
    run = pyrofl.load("r", data=rows_of(Path("r")))
    found = pyrofl.conformal(run, 0.2, share=0.6)
    lines = table("r/conformal.csv")
    assert [{n: str(v) for n, v in row.items()} for row in found.rows] == lines
    assert str(found) in printed
    assert Path("r/figures/conformal.png").stat().st_size > 1000
    assert main(["conformal", "r", "--deterministic"]) == 0
    assert {line["empty"] for line in table("r/conformal.csv")} == {"0.0"}


@pytest.mark.parametrize(("target", "columns"), [("ill", "set size"), ("score", "low high")])
def test_new_rows_get_sets(target, columns):
    words = [*TABLE, "--target", target, *(RUN if target == "ill" else RUN[:-4]), "--out", "r"]
    assert main(["run", "fedavg", *words]) == 0
    words = ["predict", "r", "--data", "new.csv", "--client-column", "site", "--out", "p.csv"]
    assert main([*words, "--alpha", "0.2"]) == 0
    run = pyrofl.load("r", data=rows_of(Path("r")))
    found, lines = pyrofl.conformal(run, 0.2, share=1.0), table("p.csv")
    assert list(lines[0])[-2:] == columns.split()
    for line, x in zip(
        lines, ({"age": [2.0], "dose": [1.0]}, {"age": [4.0], "dose": [3.0]}), strict=True
    ):
        sets = found.predict(run.data.source.preparation.apply(x), line["client"])
        assert {n: str(v[0]) for n, v in sets.columns().items()}.items() <= line.items()


def test_refusals_are_one_line(capsys):
    words = ["--data", "csv:old.csv", "--client-column", "site", "--test-fraction", "0.1"]
    assert main(["run", "fedavg", *words, "--target", "ill", *RUN]) == 0
    assert main(["conformal", "r"]) == 2
    told = capsys.readouterr().err
    assert "every client needs at least 9 calibration rows for alpha 0.1" in told
    assert told.count("\n") == 1
    Path("old.csv").unlink()
    assert main(["conformal", "r"]) == 2
    assert "r is calibrated on its test rows, and r/run.json does not" in capsys.readouterr().err
    assert main(["conformal", "r", "--alpha", "1"]) == 2


def test_a_file_in_place_of_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("x\n1\n")
    assert main(["conformal", str(tmp_path / "t.csv")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{tmp_path / 't.csv'} is a file; expected the folder of a run" in line
