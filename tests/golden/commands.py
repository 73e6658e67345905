"""Store what the commands of README and start page print, to compare it from version to version.

Run, after a change that is meant: python tests/golden/commands.py --make
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PATH = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "examples/docs/start.md")
NUMBER = re.compile(r"(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")


def of_pages() -> list[str]:
    """Return the commands of the pages that need no files of the reader, and that for help."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    found = re.findall(r"\.venv/bin/(pyrofl (?:list|explain|compare)\b[^\n&`]*)", text)
    return [*dict.fromkeys(command.strip() for command in found), "pyrofl --help"]


def run(command: str) -> dict[str, Any]:
    """Run a command in an empty folder; return its exit status and what it prints."""
    words = [sys.executable, "-m", *shlex.split(command)]
    fixed = {"COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env = os.environ | fixed
    with TemporaryDirectory() as folder:
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    printed = {"stdout": done.stdout.splitlines(), "stderr": done.stderr.splitlines()}
    return {"status": done.returncode, **printed}


def words_and_numbers(printed: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Return the lines of both outputs with # for each number and single spaces, and the numbers.

    Spaces depend on the widths of the numbers.
    """
    lines = printed["stdout"] + printed["stderr"]
    numbers = [float(n.replace(",", "")) for line in lines for n in NUMBER.findall(line)]
    return [" ".join(NUMBER.sub("#", line).split()) for line in lines], numbers


if __name__ == "__main__":
    if "--make" not in sys.argv:
        sys.exit(__doc__)
    now = {command: run(command) for command in of_pages()}
    PATH.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
