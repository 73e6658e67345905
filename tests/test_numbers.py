"""Pages of figures are what their commands make of files."""

from __future__ import annotations

import csv
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PAPERS = EXAMPLES / "papers"
SAID_ELSEWHERE = {"tuned/scores.csv", "tuned/budget.csv", "tuned/reliability.csv"}  # by budget.csv


@pytest.mark.parametrize("script", ["numbers/make.py", "papers/tables.py", "regression/gallery.py"])
def test_pages_are_made_of_their_files(script: str):
    command = [sys.executable, str(EXAMPLES / script), "--check"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}; expected what {script} writes"


def test_every_number_of_a_paper_says_how_it_was_made():
    for path in PAPERS.glob("*/*.csv"):
        name = path.relative_to(PAPERS).as_posix()
        if path.name == "paper.csv" or name in SAID_ELSEWHERE:
            continue
        lines = list(csv.DictReader(path.read_text().splitlines()))
        several = {line.get("settings") for line in lines}
        assert len(several) == 1, f"{name}: lines of {several}; expected those of one experiment"
        for line in lines:
            empty = [n for n in ("seed", "seconds", "commit", "command") if not line.get(n)]
            assert not empty, f"{name}: {line} has no {empty}"
            script = line["command"].split()[1]
            assert (EXAMPLES.parent / script).is_file(), f"{name}: {script} is not there"


def test_scripts_that_pages_name_are_there():
    for page in PAPERS.glob("**/README.md"):
        for script in re.findall(r"python (examples/[\w/]+\.py)", page.read_text()):
            assert (EXAMPLES.parent / script).is_file(), f"{page}: {script} is not there"


def test_what_is_in_a_file_is_not_run_again(tmp_path: Path, monkeypatch):
    fill = runpy.run_path(str(PAPERS / "files.py"))["fill"]
    monkeypatch.setattr(sys, "argv", [str(PAPERS / "x.py"), "--data", "npz:/here/rows.npz"])
    path, head, made = tmp_path / "a.csv", ("method", "seed", "score"), []

    def measure(method: str, seed: int) -> list[list[float | None]]:
        if seed == 2:
            raise KeyboardInterrupt
        made.append((method, seed))
        return [[0.5 + seed], [None]]

    fill(path, head, [("a", 0)], measure)
    with pytest.raises(KeyboardInterrupt):
        fill(path, head, [("a", 0), ("a", 1), ("a", 2)], measure)
    lines = fill(path, head, [("a", 0), ("a", 1)], measure)
    assert made == [("a", 0), ("a", 1)]
    assert [line["score"] for line in lines] == ["0.5", "", "1.5", ""]
    assert {line["command"] for line in lines} == {
        "python examples/papers/x.py --data npz:rows.npz"
    }
    other = fill(path, head, [("a", 0)], measure, net="mlp:/here/2", rounds=3)
    assert made == [("a", 0), ("a", 1), ("a", 0)]  # with other settings it is another run
    assert {line["settings"] for line in other} == {"net=mlp:2 rounds=3"}
    assert fill(path, head, [("a", 0)], measure) == lines
    with pytest.raises(ValueError, match=r"expected .*'other'"):
        fill(path, ("method", "seed", "other"), [("a", 0)], measure)


def test_the_methods_that_beat_training_alone_are_those_of_the_table():
    text = " ".join((EXAMPLES / "NUMBERS.md").read_text().split())
    (named,) = re.findall(r"methods are better than training alone: ([^.]+)\.", text)
    table = text.partition("methods are better than training alone")[2].partition("CIFAR-10, 200")[
        0
    ]
    rows = re.findall(r"\| `(\w+)` \| [^|]+ \|[^|]+\|([^|]*)\|([^|]*)\|([^|]*)\|", table)
    best = {
        name: max(float(cell.split(" ")[1]) for cell in cells if cell.strip())
        for name, *cells in rows
    }
    better = {name for name, value in best.items() if value > best["local"]}
    words = {word.replace("-", "").lower() for word in re.findall(r"[\w-]+", named)}
    assert len(best) == 41
    assert words & best.keys() == better
