"""Every tutorial runs from its first cell to its last, with the short settings that it states."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("[0-9]*.py"))


def shortened(text: str) -> str:
    """Return a tutorial with the settings of its comment `# quick:` in effect."""
    short, count = re.subn(r"(?m)^# quick: ", "", text)
    assert count == 1, f"expected one line `# quick: NAME = VALUE`, found {count}"
    return short


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_to_its_end(path: Path, tmp_path: Path):
    script = tmp_path / path.name
    script.write_text(shortened(path.read_text()))
    ended = run(script, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_has_pictures_exercises_and_solutions(path: Path):
    text = path.read_text()
    assert 'tags=["parameters"]' in text
    assert "## Exercises" in text and 'tags=["hide-cell"]' in text
    asked = re.findall(r"(?m)^# (\d)\. ", text.split("## Exercises")[1].split("### Solutions")[0])
    solved = re.findall(r"(?m)^# (\d)\. ", text.split("### Solutions")[1])
    assert asked and asked == solved, "every exercise has a solution"


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs_in_full(path: Path, tmp_path: Path):
    ended = run(path, tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    known = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script)]
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True)
