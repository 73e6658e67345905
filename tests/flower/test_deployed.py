"""Flower's own server and nodes on this machine: the numbers of the loop, for all methods."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import hospitals
import pytest
import test_contract as contract
from deployed import abroad, called, command, environment, left, same
from hospitals import NAMES

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

METHODS = tuple(contract.METHODS)
SETTINGS = ("epochs=1", "distil_epochs=1")


def test_all_methods_in_one_run_are_those_of_the_loop(tmp_path):
    project = hospitals.project(
        tmp_path / "p", methods=METHODS, settings=SETTINGS, unlabelled="spare.csv", net="mlp:3"
    )
    rows = (project.folder / "sites/hospital_1.csv").read_text().splitlines()
    (project.folder / "spare.csv").write_text("\n".join(rows[:20]) + "\n")
    begun, out = time.monotonic(), tmp_path / "out"
    words = command("up", str(project.folder), "--sites", "3", "--out", str(out))
    with open(tmp_path / "said", "w") as said:
        run = subprocess.Popen(words, stdout=said, stderr=said, env=environment(tmp_path))
        most = 0
        while run.poll() is None:
            odd, here = abroad([run.pid, *left(tmp_path)])
            assert not odd
            most = max(most, here)
            time.sleep(0.5)
    told = (tmp_path / "said").read_text()
    print(f"{time.monotonic() - begun:.0f} s\n{told}")
    assert run.returncode == 0
    assert not left(tmp_path)
    same(out, project)
    assert not called(tmp_path)
    assert most > 4  # the server and three nodes listen, and call each other
    no_axis_of_rows(out)
    for name in METHODS:
        assert f"{name}\nmodel " in told
        assert (out / name / "figures/curves.png").is_file()


def no_axis_of_rows(out: Path) -> None:
    """What three sites of 32, 52 and 72 rows wrote that leaves them has the same shapes."""
    each = []
    for name in NAMES:
        log = (out / "sites" / name / "site.log").read_text()
        leaves = re.findall(r"leaves: ([^:]+): (.*)", log)
        shapes = {(what, tensor) for what, of in leaves for tensor in of.split(" bytes")[:-1]}
        each.append(shapes - {(what, of) for what, of in shapes if what == "hello"})
    assert len(each[0]) > 20 * len(METHODS)
    assert each[0] == each[1] == each[2]
