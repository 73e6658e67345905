"""No command replaces its own input files, and `predict` names the cure where there is no run."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from pyrofl.cli import main
from pyrofl.cli.commands.input_files import WRITTEN

RUN = ["--target", "ill", "--client-column", "site", "--net", "softmax", "--rounds", "1", "--quiet"]
RUN += ["--posterior-draws", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [
        f"s{i % 2},{x:.3f},{'yes' if x > 0 else 'no'}" for i, x in enumerate(rng.normal(size=40))
    ]
    Path("data.csv").write_text("\n".join(["site,age,ill", *rows]))
    return tmp_path


PREDICT = ["predict", "run", "--data", "data.csv", "--client", "s0", "--overwrite"]
REPLACING = {
    "predict": [*PREDICT, "--out", "data.csv"],
    "predict, other path": [*PREDICT, "--out", "./run/../data.csv"],
    "predict, a hard link": [*PREDICT, "--out", "link.csv"],
    "predict, own rows": [
        *["predict", "run", "--data", "link.csv", "--new-client", "--overwrite"],
        *["--own-rows", "own.csv", "--out", "own.csv"],
    ],
    "predict, a result": [*PREDICT, "--out", "run/metrics.csv"],
    "run": ["run", "fedavg", *RUN, "--data", "csv:o/metrics.csv", "--out", "o", "--overwrite"],
    "run, a folder": ["run", "fedavg", *RUN, "--data", "csv:o", "--out", "o", "--overwrite"],
    "run, resumed": ["run", "fedavg", *RUN, "--data", "csv:o/rows.csv", "--out", "o", "--resume"],
    "compare": [
        *["compare", "fedavg", "local", *RUN, "--seeds", "1"],
        *["--data", "csv:o/fedavg-0/clients.csv", "--out", "o", "--overwrite"],
    ],
    "tune": [
        *["tune", "fedavg", "--over", "lr=.1,.2", *RUN[:-2], "--data", "csv:o/tune.csv"],
        *["--out", "o", "--overwrite"],
    ],
    "partition": [
        *["partition", "--data", "csv:fig.png", "--target", "ill", "--client-column", "site"],
        *["--out", "fig.png", "--overwrite"],
    ],
}


@pytest.mark.parametrize("words", REPLACING.values(), ids=REPLACING)
def test_no_command_replaces_its_own_input(words, capsys):
    text = Path("data.csv").read_text()
    Path("link.csv").hardlink_to("data.csv")
    copies = ["fig.png", "own.csv", "o/metrics.csv", "o/tune.csv", "o/fedavg-0/clients.csv"]
    copies = ["o/metrics.csv"] if "csv:o" in words else [*copies, "o/rows.csv", "o/run.json"]
    for name in copies:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    if words[0] == "predict":
        assert main(["run", "fedavg", *RUN, "--data", "csv:data.csv", "--out", "run"]) == 0
        kept = Path("run/metrics.csv").read_text()
    capsys.readouterr()
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "would replace; expected another" in line or "results of a run; expected" in line
    assert all(Path(name).read_text() == text for name in ["data.csv", *copies])
    assert words[0] != "predict" or Path("run/metrics.csv").read_text() == kept


def test_another_file_in_the_folder_of_results_is_kept():
    words = ["run", "fedavg", *RUN, "--data", "csv:data.csv", "--out", ".", "--overwrite"]
    text = Path("data.csv").read_text()
    assert main(words) == 0
    assert Path("data.csv").read_text() == text


def test_all_files_that_commands_write_are_known():
    data = [*RUN, "--data", "csv:data.csv"]
    words = [*data, "--save-predictions", "--checkpoint-every", "1", "--seeds", "1", "--tune"]
    words += ["--trials", "2", "--metric", "accuracy"]
    assert main(["compare", "fedavg", "local", *words, "--out", "o"]) == 0
    assert main(["benefit", "o"]) == 0
    assert main(["report", "o"]) == 0
    found = [p for p in Path("o").rglob("*") if p.is_file() and not p.name.startswith(".")]
    assert len(found) > 20
    assert not [p for p in found if p.parent.name != "figures" and not WRITTEN.fullmatch(p.name)]


def test_predict_after_compare_names_the_cure(capsys):
    words = ["compare", "fedavg", "local", *RUN, "--seeds", "1", "--data", "csv:data.csv"]
    assert main([*words, "--out", "o"]) == 0
    capsys.readouterr()
    ask = ["--data", "data.csv", "--client-column", "site", "--out", "found.csv"]
    assert main(["predict", "o/fedavg-0", *ask]) == 2
    assert "pyrofl compare removes it once all its runs are done" in capsys.readouterr().err
    assert main(["predict", "o", *ask]) == 2
    assert "expected the folder of one run (pyrofl run METHOD --out DIR)" in capsys.readouterr().err
    assert main([*words, "--out", "o", "--overwrite", "--checkpoint-every", "1"]) == 0
    assert main(["predict", "o", *ask]) == 2
    assert "expected the folder of one run, such as o/fedavg-0" in capsys.readouterr().err
    assert main(["predict", "o/fedavg-0", *ask]) == 0


def test_names_that_look_like_formulas_are_neutral_in_tables_and_known_to_reports():
    text = Path("data.csv").read_text().replace("s0,", "=s0,").replace("no", "@no")
    Path("data.csv").write_text(text)
    words = ["compare", "fedavg", "local", *RUN, "--seeds", "1", "--data", "csv:data.csv"]
    assert main([*words, "--out", "o", "--checkpoint-every", "1"]) == 0
    assert main(["benefit", "o"]) == 0
    assert main(["report", "o"]) == 0
    ask = ["--data", "data.csv", "--client-column", "site", "--out", "found.csv"]
    assert main(["predict", "o/fedavg-0", *ask]) == 0
    for file in [*Path("o").rglob("*.csv"), Path("found.csv")]:
        cells = [cell for row in csv.reader(file.read_text().splitlines()) for cell in row]
        assert not [c for c in cells if c.startswith(("=", "@"))]
        assert file.name not in ("clients.csv", "benefit.csv", "found.csv") or "'=s0" in cells
    assert "=s0" in Path("o/report.html").read_text()
    assert "&#39;=s0" not in Path("o/report.html").read_text()
