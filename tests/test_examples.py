"""Every example runs, quickly, as its first lines say."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import real_tables
from dying import Nursery
from promises import others_slow

FOLDER = Path(__file__).parent.parent / "examples"
PAPERS = FOLDER / "papers"


def radon(g: np.random.Generator) -> str:
    rows = [(f"county {j}", i % 2, 0.1 * j, g.normal()) for j in range(6) for i in range(2 + j)]
    return table("county_name,floor,log_uranium,log_radon", rows)


def lines(g: np.random.Generator) -> str:
    rows = [(j, day, 250 + 10 * day + 20 * g.normal()) for j in range(5) for day in range(6)]
    return table("Subject,Days,Reaction", rows)


def heart_disease(g: np.random.Generator) -> str:
    """Return three hospitals, the last of which measures no cholesterol and counts no vessels."""
    rows = []
    for i in range(60):
        last = i >= 40
        chol, ca = ("0", "") if last else (f"{g.normal(240, 50):.0f}", f"{g.integers(0, 3)}")
        sick, few = g.integers(0, 2, 2), g.integers(0, 2, 4)
        rest = (50 + i % 9, few[0], 3 + few[1], 140 + i, few[2], few[3], chol, ca, sick[0])
        rows.append((f"hospital {i // 20}", *rest))
    return table("hospital,age,sex,cp,thalach,exang,oldpeak,chol,ca,target", rows)


def nes(g: np.random.Generator) -> str:
    names = "year,partyid7,real_ideo,race_adj,age_discrete,educ1,gender,income"
    high = (8, 8, 2, 5, 5, 3, 6)
    return table(
        names, [(1972 + 4 * (i % 3), *(g.integers(1, h) for h in high)) for i in range(90)]
    )


def table(header: str, rows: list[tuple[object, ...]]) -> str:
    return "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"


TABLES: dict[str, Callable[[np.random.Generator], str]] = {
    make.__name__: make for make in (radon, lines, heart_disease, nes)
}
"""script -> a small made-up table, for those that are given a file."""

LONG = {
    "calibrated",
    "calibrated_networks",
    "fedabml_entropy",
    "fedbe_distillation",
    "nes",
}
LONG |= {"pfedmb_pairs", "pfedvem_table", "tuned"}
"""Scripts that take over three minutes in full: they say so first."""

NEEDED = {"privacy": "dp_accounting"}
"""script -> what it needs besides what the tests need."""

SCRIPTS = sorted(FOLDER.glob("*.py"))
OF_PAPERS = [
    p for p in sorted(PAPERS.glob("*/*.py")) if p.parent.name != "parity" and p.stem != "studies"
]
QUICKEST = {"quickstart", "new_client", "own_sites", "pfedvem_table", "pull"}
QUICKEST |= {"regimes", "rounding"}


def quick(scripts: list[Path]) -> list[Path]:
    """Return the scripts that take a second or two."""
    return [path for path in scripts if path.stem in QUICKEST]


@pytest.mark.parametrize("script", others_slow(SCRIPTS, quick(SCRIPTS)), ids=lambda p: p.stem)
def test_example_draws_its_figure(script: Path, tmp_path: Path, forked: Nursery):
    if script.stem in NEEDED:
        pytest.importorskip(NEEDED[script.stem])
    command = [str(script), "--quick", "--out", str(tmp_path)]
    if script.stem in TABLES:
        path = tmp_path / "table.csv"
        path.write_text(TABLES[script.stem](np.random.default_rng(0)))
        command += ["--data", str(path)]
    ended = forked(command)
    assert ended.codes == [0], "\n".join(ended.told)
    assert list(tmp_path.glob("*.png")), ended.told
    warned = [bool(re.match("A full run takes about .*(minutes|hour)", x)) for x in ended.told]
    assert warned[:1] == [script.stem in LONG], ended.told[:1]


@pytest.mark.parametrize(
    "script",
    others_slow(OF_PAPERS, quick(OF_PAPERS)),
    ids=lambda path: f"{path.parent.name}_{path.stem}",
)
def test_papers_script_leaves_the_lines_of_its_runs(script: Path, tmp_path: Path, forked: Nursery):
    path = tmp_path / "lines.csv"
    ended = forked([str(script), "--quick", "--out", str(path)])
    assert ended.codes == [0], "\n".join(ended.told)
    for line in csv.DictReader(path.read_text().splitlines()):
        assert all(line[name] for name in ("seed", "settings", "seconds", "command")), line


@pytest.mark.slow
def test_hospitals_are_compared_as_they_should_be(tmp_path: Path):
    """By quadrature, one rate for all predicts a hospital from the others worse by 5.87 nats."""
    command = [sys.executable, FOLDER / "leave_one_client_out.py", "--out", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    better = re.search(r"by client: own rates is better by (\S+) \(se 4\.\d\)", told)
    assert better, told
    assert float(better[1]) == pytest.approx(5.87, abs=0.3)
    assert "by client: hospitals whose k is above 0.7: {'own rates': 0, 'one rate': 0}" in told
    by_row = re.search(r"by row: hospitals whose k is above 0.7: {'own rates': (\d+)", told)
    assert by_row, told
    assert int(by_row[1]) >= 5


@pytest.mark.slow
def test_sites_that_show_no_rows_lose_little_by_it(tmp_path: Path):
    """The tables lie in the folder HIERARCHICAL; three splits of them, so rows of a site are few.

    Found with it: accuracy of va, which is held out, .73 by FedAvg and .74 by scikit-learn on
    pooled rows, log scores .53 and .56; rmse over subjects 8.54 by FedAvg, 8.48 by ridge regression
    on pooled rows; 2.92 by pFedVEM's personal models, 2.76 by ridge regressions of each alone; of
    these two, log score 2.75 and 2.77 nats, CRPS 2.04 and 2.00.
    """
    command = [sys.executable, FOLDER / "own_sites.py", "--out", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    env["HIERARCHICAL"] = str(real_tables.folder())
    text = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    assert "va is held out" in text
    parts = [part for part in text.split("\n\n") if "; " in part or " over" in part]
    # The line of a model under the title of a table: its last number, or its first.
    tables = {re.split("; | over", part)[0] + " over" * (" over" in part): part for part in parts}
    line = re.compile(r"(?m)^(\S.*?)  +([\d.]+) .*?([\d.]+)$")
    last = {
        name: {model: float(v) for model, _, v in line.findall(tables[name])}
        for name in ("accuracy", "nll")
    }
    rmse, nll, crps = (
        {model: float(v) for model, v, _ in line.findall(tables[f"{name} over"])}
        for name in ("rmse", "nll", "crps")
    )
    pooled = "scikit-learn, pooled rows"
    # 160 rows of va: the standard error of a difference in accuracy is 0.03.
    assert last["accuracy"]["FedAvg, global"] == pytest.approx(last["accuracy"][pooled], abs=0.09)
    assert last["nll"]["FedAvg, global"] < last["nll"][pooled] + 0.06
    assert rmse["FedAvg, global"] == pytest.approx(rmse[pooled], abs=0.3)
    assert "ece; va is held out" in text
    personal, alone = "pFedVEM, personal", "scikit-learn, each alone"
    assert rmse[personal] == pytest.approx(rmse[alone], rel=0.15)
    assert nll[personal] < nll[alone] + 0.1  # its draws say how little a subject's rows tell
    assert crps[personal] == pytest.approx(crps[alone], rel=0.1)
    assert crps["FedAvg, global"] == pytest.approx(crps[pooled], abs=0.3)


@pytest.mark.slow
def test_adapters_reach_what_the_page_says(tmp_path: Path):
    """Other machines add up in another order: within 0.05, a standard error of a client's NLL."""
    command = [sys.executable, FOLDER / "lora.py", "--out", tmp_path]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    line = re.compile(r"(?m)^(none|whole network|shared|personal|Bayesian) +(.*)$")
    page = (FOLDER / "lora.txt").read_text()
    found, expected = (
        {name: [float(v) for v in numbers.split()] for name, numbers in line.findall(text)}
        for text in (told, page)
    )
    assert found.keys() == expected.keys()
    assert len(found) == 5
    for name, numbers in expected.items():
        assert found[name][:3] == pytest.approx(numbers[:3], abs=0.05), name
        assert found[name][3] == numbers[3], name
