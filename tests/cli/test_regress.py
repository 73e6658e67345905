"""Regressions of the command line: those of the library, with a page, and refusals in one line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("formulae")
pytest.importorskip("jinja2")

import pyrofl
from pyrofl import federations
from pyrofl.cli import main
from pyrofl.cli.commands import regress as command

SIZES = {"basel": 7, "bern": 12, "chur": 5}
FORMULA = "y ~ x + g + (1 | hospital)"


def frames() -> dict[str, pd.DataFrame]:
    random = np.random.default_rng(1)
    found = {}
    for k, (name, n) in enumerate(SIZES.items()):
        x, g = random.normal(size=n).round(3), np.array(["no", "yes"])[np.arange(n) % 2]
        y = (k + x + 0.5 * (g == "yes") + random.normal(size=n)).round(3)
        found[name] = pd.DataFrame({"x": x, "g": g, "y": y, "died": np.arange(n) % 2})
    return found


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    for name, frame in frames().items():
        frame.to_csv(f"sites/{name}.csv", index=False)
    parts = [frame.assign(hospital=name) for name, frame in frames().items()]
    pd.concat(parts).to_csv("all.csv", index=False)


SITES = ["--data", "csv:sites", "--client-column", "hospital", "--quiet"]


def test_estimates_are_those_of_the_library(capsys):
    assert main(["regress", FORMULA, *SITES, "--posterior-draws", "500", "--out", "r"]) == 0
    out = capsys.readouterr().out
    tables = federations.from_frames(frames())
    method = pyrofl.regression(FORMULA, tables, client="hospital")
    run = pyrofl.fit(method, tables, progress=False, seed=0)
    known = run.summary(500, progress=False)
    found = pd.read_csv("r/estimates.csv", index_col=0)
    assert found.index.tolist() == known.index.tolist()
    np.testing.assert_allclose(found["mean"], known["mean"])
    np.testing.assert_allclose(found["97.5%"], known["97.5%"])
    assert all(name in out for name in known.index)
    assert {"posterior.nc", "run.json", "report.html"} <= {p.name for p in Path("r").iterdir()}
    loaded = pyrofl.load("r", method=method, data=tables)
    assert loaded.summary(500, progress=False).equals(known)
    page = Path("r/report.html").read_text()
    for line in (FORMULA, *SIZES, "b[x] ~ Normal", "def program(", str(run.status)):
        assert line.replace("'", "&#39;") in page
    linked = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert all(link.startswith(("data:", "#")) for link in linked)
    assert main(["predict", "r", "--data", "all.csv", "--out", "p.csv", "--new-client"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["report", "r"]) == 0
    assert "r/report.html" in capsys.readouterr().out


def test_one_file_with_a_gap_and_a_prior_warns_and_uses_both(capsys):
    whole = pd.read_csv("all.csv")
    whole.loc[3, "x"] = np.nan
    whole.to_csv("all.csv", index=False)
    words = ["--data", "csv:all.csv", "--client-column", "hospital", "--quiet", "--out", "r"]
    words += ["--prior", "x=Normal(5, 0.001)", "--posterior-draws", "400"]
    assert main(["regress", FORMULA, *words]) == 0
    text = "1 of 24 rows are dropped, as values are missing (x 1)"
    assert f"warning: {text}" in capsys.readouterr().err
    page = Path("r/report.html").read_text()
    assert text in page
    assert "b[x] ~ Normal(loc=5.0, scale=0.001)" in page
    found = pd.read_csv("r/estimates.csv", index_col=0)
    # The rows move the mean by at most 0.001^2 times their slope: far below one standard deviation.
    assert found.loc["b[x]", "mean"] == pytest.approx(5.0, abs=5 * 0.001 / 400**0.5)
    assert main(["regress", FORMULA, *words]) == 2
    assert "r is not empty" in capsys.readouterr().err


def test_a_response_is_named_by_the_line_of_its_file(capsys):
    rows = ["site,note,y,x", 'a,"two\nlines",1,0.5', "a,,,0.1", 'a,"one\n\nmore",-7,0.2', "b,c,2,0"]
    Path("one.csv").write_text("\n".join([*rows, "b,c,3,1", "b,c,4,2", ""]))
    words = ["--family", "poisson", "--out", "r", "--quiet"]
    one = ["--data", "csv:one.csv", "--client-column", "site"]
    assert main(["regress", "y ~ x", *one, *words]) == 2
    assert "a: response y is -7 in line 5; expected whole numbers" in capsys.readouterr().err
    two = [rows[0], "b,c,3,1", *rows[4:]]
    Path("two").mkdir()
    Path("two/b.csv").write_text("\n".join([*two, ""]))
    assert main(["regress", "y ~ log(x)", "--data", "csv:two", *words]) == 2
    assert (
        "b: log(x) is not a finite number in line 3; expected finite numbers"
        in capsys.readouterr().err
    )
    Path("one.csv").write_text(Path("one.csv").read_text().replace("b,c,4,2", ",c,4,2"))
    assert main(["regress", "y ~ x", *one, *words]) == 2
    assert "one.csv: column site is empty in line 10; expected" in capsys.readouterr().err


BAD = {
    "column": (["y ~ xx + (1 | hospital)"], "unknown column 'xx'; did you mean x?"),
    "family": ([FORMULA, "--family", "gausian"], "unknown family 'gausian'; did you mean gaussian"),
    "link": ([FORMULA, "--link", "logit"], "unknown link 'logit'"),
    "support": (["y ~ x", "--family", "poisson"], "expected whole numbers of at least 0"),
    "folder": ([FORMULA, "--data", "csv:nowhere"], "nowhere"),
    "kind": ([FORMULA, "--data", "sites"], "--data is 'sites'; expected csv:FOLDER"),
    "file": ([FORMULA, "--data", "csv:sites/bern.csv", "--client-column="], "--client-column"),
    "client": (
        [FORMULA, "--data", "csv:all.csv", "--client-column", "hospitl"],
        "unknown client column 'hospitl'; did you mean hospital?",
    ),
    "formula": (["y x"], "expected one '~'"),
    "prior name": ([FORMULA, "--prior", "z=Normal(0, 1)"], "unknown prior 'z'"),
    "prior text": ([FORMULA, "--prior", "x"], "expected NAME=DIST"),
    "prior code": ([FORMULA, "--prior", "x=Normal(open('a'), 1)"], "expected NAME=DIST with"),
    "prior kind": ([FORMULA, "--prior", "x=Norml(0, 1)"], "unknown distribution 'Norml'"),
    "prior value": (
        [FORMULA, "--prior", "x=Normal(0, -1)"],
        "--prior is 'x=Normal(0, -1)': its scale is invalid; expected one that is greater than 0",
    ),
    "prior twice": ([FORMULA, "--prior", "x=Normal(0, 1)", "x=Normal(0, 2)"], "x twice"),
    "draws": ([FORMULA, "--posterior-draws", "0"], "a whole number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line_before_any_work(name, capsys, monkeypatch):
    monkeypatch.setattr(command, "fit", None)
    words, told = BAD[name]
    try:
        code = main(["regress", words[0], *SITES, "--out", "r", *words[1:]])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not Path("r").exists()


def test_files_of_one_name_and_text_among_numbers_are_refused(capsys):
    Path("sites/bern.csv").write_text("x,g,y\n1,no,2\n3,yes,4\nfour,no,1\n")
    assert main(["regress", FORMULA, *SITES]) == 2
    assert "four" in capsys.readouterr().err
    Path("sites/bern.csv").write_text("x,g,y\n")
    assert main(["regress", FORMULA, *SITES]) == 2
    assert "bern" in capsys.readouterr().err
    assert not Path("runs").exists()
