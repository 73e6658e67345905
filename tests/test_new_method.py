"""A new method is three files: its own, its tests and a row of a table; nothing else changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")

# Every test of all methods, but those that take long.
LOOKED_AT = (
    *("test_contract.py", "test_faults.py", "hostile/test_federations.py"),
    *("test_determinism.py", "inference/test_checkpoints.py"),
    *("inference/posteriors/test_posterior_files.py", "models/test_proximal.py"),
)
RUN = "proximal and not chunk and not another_model and not another_merge"
RULES = "named or two_thousand or found or one_way or no_folder or have_numbers"
QUICK = "proximal and (by_its_name or message or loss_falls or axes) or methods_are_found"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Copy everything, with FedProx once more under a name that nothing else knows."""
    root: Path = tmp_path_factory.mktemp("tree") / "copy"
    root.mkdir()
    for part in ("pyrofl", "models", "inference", "tests"):
        shutil.copytree(ROOT / part, root / part, symlinks=True, ignore=LEFT)
    for part in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / part, root / part)
    for old, new in (
        ("models/fedprox.py", "models/proximal.py"),
        ("tests/models/test_fedprox.py", "tests/models/test_proximal.py"),
    ):
        (root / new).write_text(re.sub(r"\bfedprox\b", "proximal", (root / old).read_text()))
    table = root / "examples/docs/all_methods.md"
    table.parent.mkdir(parents=True)
    text = (ROOT / "examples/docs/all_methods.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `fedprox`"))
    table.write_text(text.replace(row, f"{row}\n{row.replace('fedprox', 'proximal')}"))
    return root


def pytest_in(root: Path, *words: str) -> str:
    """Run pytest in a tree, which finds its own package there; return what it says."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
            *words,
        ],
        cwd=root / "tests",
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.slow
def test_it_needs_no_table_of_methods(tree):
    files = ("test_contract.py", "inference/posteriors/test_posterior_files.py")
    told = pytest_in(tree, *files, "-k", QUICK)
    assert re.search(r"\b1[0-2] passed", told)


@pytest.mark.slow
def test_every_test_of_all_methods_meets_it(tree):
    told = pytest_in(tree, "--collect-only", *LOOKED_AT)
    named = {line.partition("::")[0] for line in told.splitlines() if "proximal" in line}
    assert named == {f"tests/{file}" for file in LOOKED_AT}
    for name in re.findall(r"::(\w+)\[fedprox\]", told):
        assert f"::{name}[proximal]" in told


@pytest.mark.slow
def test_it_keeps_the_contract_without_any_change_to_it(tree):
    told = pytest_in(tree, "test_contract.py", "models/test_proximal.py", "-k", RUN)
    assert re.search(r"\d{2} passed", told)
    files = ("hostile/test_federations.py", "test_imports.py", "golden/test_redesign.py")
    pytest_in(tree, "test_contract.py", *files, "-k", RULES)
