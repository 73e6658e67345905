"""Each satellite can be removed: the core imports none, and runs without any of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from module_imports import read
from satellites import (
    CORE_METHODS,
    ROOT,
    SATELLITES,
    copy_without,
    core_size,
    leaves,
    needs,
    removed_with,
    size_of,
)

PAGE = (ROOT / "examples/docs/architecture.md").read_text()
ROW = re.compile(r"^\| ([\w ]+) \| ([^|]+) \| ([^|]*) \| ([\d,]+) \|$", re.MULTILINE)
PROGRAM = """
import torch, pyrofl
from pyrofl import nets
from pyrofl.models import fedabml, fedavg, fedbe, metavd, pfedmb, pfedvem
g = torch.Generator().manual_seed(0)
sites = {n: (torch.randn(m, 3, generator=g), torch.arange(m) % 2) for n, m in zip("abc", (4, 7, 9))}
data = pyrofl.Federation.from_arrays(sites, classes=("0", "1"))
net = nets.build("mlp:5", (3,), 2)
for paper in (fedavg, fedabml, metavd, pfedmb, pfedvem):
    run = pyrofl.fit(paper.build(net), data, rounds=2, progress=False)
    print(paper.__name__, run.to_arviz(draws=20, progress=False)["posterior"].sizes["draw"])
print(data, run._repr_html_()[:1])
"""
RAY = """
try:
    pyrofl.fit(fedavg.build(net), data, 1, engine="ray", workers=2)
except ValueError as error:
    print(error)
"""
CORE_TESTS = (  # that import no satellite
    *("inference/engine/test_round.py", "inference/engine/test_messages.py"),
    *("inference/test_elbo.py", "inference/training/test_noise.py"),
    *("models/fedbe/test_posteriors.py", "models/metavd/test_metavd.py"),
    *("models/pfedmb/test_pfedmb.py", "models/test_ditto.py", "models/test_local.py"),
)


def test_the_core_imports_no_satellite():
    assert needs()["core"] == set()
    modules = read(types=False)
    for name, places in SATELLITES.items():
        for place in places:
            found = [m for m in modules if f"{m}.".startswith(f"pyrofl.{place}.")]
            assert found, f"{name}: no module {place}"
    assert all(f"pyrofl.models.{name}" in modules for name in CORE_METHODS)


def test_a_method_needs_at_most_another_and_satellites():
    """None is in a circle of methods, so that each can be deleted, with those that need it."""
    for name in leaves():
        assert name not in needs()[name]


def test_the_page_states_what_satellites_need_and_how_long_they_are():
    rows = {name: (needed, lines) for name, _, needed, lines in ROW.findall(PAGE)}
    sizes = {"core": core_size(), "other methods": size_of(leaves())}
    sizes |= {name: size_of([name]) for name in SATELLITES}
    assert rows.keys() >= sizes.keys()
    for name, size in sizes.items():
        needed, lines = rows[name]
        assert abs(int(lines.replace(",", "")) - size) <= max(100, 0.05 * size), name
        if name in SATELLITES:
            assert {n for n in needed.strip().split(", ") if n} == needs()[name], name


def run_in(folder: Path, *command: str) -> str:
    """Run Python with a copy of the package; return its output."""
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def fits_of(output: str) -> list[str]:
    """Return the lines of `PROGRAM` about fits."""
    return [line for line in output.splitlines() if line.startswith("pyrofl.models.")]


FITS = [f"pyrofl.models.{name} 20" for name in ("fedavg", "fedabml", "metavd", "pfedmb", "pfedvem")]


@pytest.mark.slow
@pytest.mark.parametrize("satellite", SATELLITES)
def test_the_core_runs_without_a_satellite(satellite, tmp_path):
    copy_without(tmp_path, satellite)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert fits_of(run_in(tmp_path, "-c", PROGRAM)) == FITS
    run_in(tmp_path, "-m", "pytest", "-q", "-n", "0", *(f"tests/{file}" for file in CORE_TESTS))


@pytest.mark.slow
def test_the_core_runs_without_all_satellites_and_other_methods(tmp_path):
    copy_without(tmp_path, *SATELLITES, *leaves())
    output = run_in(tmp_path, "-c", f"{PROGRAM}{RAY}")
    assert fits_of(output) == FITS
    assert "engine='ray' needs pyrofl.inference.transport.start" in output


def test_what_needs_a_satellite_is_removed_with_it():
    assert {"fisher", "fald", "fedlap", "fola"} <= {*removed_with("fisher")}
    assert removed_with("acceleration") == ["acceleration"]
