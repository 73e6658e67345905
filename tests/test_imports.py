"""Who may import whom, what an import costs, and how long a file may be."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pyrofl

PACKAGE = Path(pyrofl.__file__).parent
FILES = [
    f for at in ("", "models/", "inference/", "bench/") for f in sorted(PACKAGE.glob(f"{at}*.py"))
]
CORE = [f for f in sorted(PACKAGE.glob("*.py")) if not f.name.startswith(("__", "cli"))]


def imported(file: Path) -> set[str]:
    """Return the modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inside(names: set[str], *packages: str) -> set[str]:
    return {n for n in names for p in packages if f"{n}.".startswith(f"{p}.")}


@pytest.mark.parametrize("file", CORE, ids=lambda f: f.stem)
def test_the_nouns_know_neither_verbs_nor_methods(file):
    assert not inside(imported(file), "pyrofl.models", "pyrofl.inference")


@pytest.mark.parametrize("file", sorted(PACKAGE.glob("inference/*.py")), ids=lambda f: f.stem)
def test_the_verbs_know_no_method(file):
    assert not inside(imported(file), "pyrofl.models")


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_nobody_imports_the_bare_folders(file):
    assert not inside(imported(file), "models", "inference", "tests", "examples")


def test_every_folder_is_looked_at():
    names = {str(f.relative_to(PACKAGE)) for f in FILES}
    assert {"data.py", "models/pfedvem.py", "inference/rounds.py"} <= names
    assert len(CORE) > 5


def test_the_rule_sees_every_form_of_import(tmp_path):
    file = tmp_path / "guilty.py"
    file.write_text("def f():\n    import pyrofl.models.x\nfrom pyrofl import inference\n")
    assert len(inside(imported(file), "pyrofl.models", "pyrofl.inference")) == 2
    file.write_text("from pyrofl.models import fedavg\nimport pyrofl.modelsomething\n")
    assert inside(imported(file), "pyrofl.models") == {"pyrofl.models.fedavg"}


def test_the_core_loads_nothing_heavy():
    heavy = ("torchvision", "sklearn", "matplotlib", "arviz", "xarray", "pandas")
    code = (
        "import sys, pyrofl, pyrofl.models.pfedvem, pyrofl.models.fedavg\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_folders_are_packages():
    for name in ("pyrofl.models.pfedvem", "pyrofl.inference.rounds"):
        assert import_module(name).__name__ == name
    assert (PACKAGE / "py.typed").is_file()
    for folder in ("models", "inference"):
        path = Path(import_module(f"pyrofl.{folder}").__file__ or "")
        assert path.resolve() == (PACKAGE / folder / "__init__.py").resolve()


def test_no_module_is_loaded_twice():
    import_module("pyrofl.models.pfedvem")
    assert not {"models", "inference"} & sys.modules.keys()
    spec = importlib.util.find_spec("pyrofl.models")
    assert spec is not None


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_files_fit_in_the_head(file):
    assert len(file.read_text().splitlines()) <= 250
