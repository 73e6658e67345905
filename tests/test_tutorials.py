"""Every tutorial runs from its first cell to its last, with the short settings that it states."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dying import Nursery
from promises import others_slow

FOLDER = Path(__file__).parent.parent / "examples" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("[0-9]*.py"))
QUICK = TUTORIALS[0:3:2]


def shortened(text: str) -> str:
    """Return a tutorial with the settings of its comment `# quick:` in effect."""
    short, count = re.subn(r"(?m)^# quick: ", "", text)
    assert count == 1, f"expected one line `# quick: NAME = VALUE`, found {count}"
    return short


NEEDED = {"12": "dp_accounting"}
"""number -> what it needs besides what the tests need."""


def skip_without(path: Path) -> None:
    if (needed := NEEDED.get(path.name[:2])) is not None:
        pytest.importorskip(needed)


@pytest.mark.parametrize("path", others_slow(TUTORIALS, QUICK), ids=lambda path: path.stem)
def test_tutorial_runs_to_its_end(path: Path, tmp_path: Path, forked: Nursery):
    skip_without(path)
    script = tmp_path / path.name
    script.write_text(shortened(path.read_text()))
    ended = forked([str(script)], at=str(tmp_path))
    assert ended.codes == [0], "\n".join(ended.told)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_has_pictures_exercises_and_solutions(path: Path):
    text = path.read_text()
    assert 'tags=["parameters"]' in text
    assert len(re.findall(r"(?m)^plt\.show\(\)$|^figures\.|^moving\(", text)) >= 3, "pictures"
    explored = text.split("## Explore")[1]
    asked = re.findall(r"(?m)^# (\d)\. ", explored.split("# %%")[0])
    solved = re.findall(r'# %% tags=\["hide-cell", "solution"\]\n# (\d)\. ', explored)
    assert asked
    assert asked == solved, "every question has a solution"


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_in_full(path: Path, tmp_path: Path):
    skip_without(path)
    ended = run(path, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    known = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script)]
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True)


@pytest.mark.slow
def test_a_tutorial_runs_in_a_kernel_and_its_picture_moves(tmp_path: Path):
    jupytext = pytest.importorskip("jupytext")
    client = pytest.importorskip("nbclient")
    book = jupytext.reads(shortened((FOLDER / "07_confidence.py").read_text()), fmt="py:percent")
    client.NotebookClient(book, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = [out for cell in book.cells for out in cell.get("outputs", ()) if "data" in out]
    kinds = [kind for out in shown for kind in out["data"]]
    assert kinds.count("image/png") >= 2
    assert any("animation" in out["data"].get("text/html", "") for out in shown)
