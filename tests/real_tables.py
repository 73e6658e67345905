"""Folder of the real tables that slow tests compare with published results."""

import os
from pathlib import Path

import pytest


def folder() -> Path:
    """Return the folder that HIERARCHICAL names; skip the test if there is none."""
    found = Path(os.environ.get("HIERARCHICAL", "../shared/data/hierarchical"))
    if not found.is_dir():
        pytest.skip(f"{found} is no folder; set HIERARCHICAL to that of the real tables")
    return found.resolve()
