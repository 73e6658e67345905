"""Pages of figures are what their commands make of files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "examples/numbers"


def test_the_page_of_numbers_is_made_of_its_files():
    command = [sys.executable, str(FOLDER / "make.py"), "--check"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{found.stderr}; expected the page that make.py writes"
