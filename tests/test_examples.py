"""Every example runs, quickly, as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_example_draws_its_figure(script: Path, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"MPLCONFIGDIR": str(tmp_path / "mpl")},
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.png")), done.stdout
