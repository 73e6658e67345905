"""Flower's own server and nodes on this machine: the numbers of the loop, for all methods."""

from __future__ import annotations

import json
import re
import subprocess
import time
import warnings
from pathlib import Path

import hospitals
import messy_hospitals
import numpy as np
import pandas as pd
import pytest
import test_contract as contract
import toys
from deployed import CLOSE, abroad, called, command, environment, left, same, state, until
from hospitals import NAMES
from messy_hospitals import LOGISTIC, study

import pyrofl
from pyrofl import federations
from pyrofl.cli.parser import main
from pyrofl.flower.processes import connect, free_port, process_group, wait_for_port, words_of
from pyrofl.flower.template import write_app
from pyrofl.tensors import role

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

METHODS = tuple(contract.METHODS)
OFFLINE = "--disable-runtime-dependency-installation"
SETTINGS = ("epochs=1", "distil_epochs=1")


def test_all_methods_in_one_run_are_those_of_the_loop(tmp_path):
    project = hospitals.project(
        tmp_path / "p", methods=METHODS, settings=SETTINGS, server_data="spare.csv", net="mlp:3"
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


def test_the_commands_of_flower_run_a_project(tmp_path):
    """No setting is filled in by `pyrofl study`: results go to run/ beside the study file."""
    project = hospitals.project(tmp_path / "p", methods=("fedavg",), settings=SETTINGS[:1])
    port = free_port()
    with process_group(tmp_path / "flower") as group:
        words = ["--host", "127.0.0.1", "--port", str(port), "--insecure"]
        group.start("superlink", ["flower-superlink", *words, OFFLINE])
        wait_for_port(group, "superlink", "127.0.0.1", port)
        connect(group.home, f"127.0.0.1:{port}")
        for name in NAMES:
            node = hospitals.site(project, tmp_path / "states", name)
            words = ["--insecure", "--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1"]
            words += ["--port", str(free_port()), "--node-config", words_of(node)]
            group.start(name, ["flower-supernode", *words])
        app = write_app(tmp_path / "app")
        folder = words_of({"project": str(project.file)})
        group.ask("flwr", "run", str(app), "here", "--run-config", folder)
        until((project.folder / "run/end.json").exists)
    end = json.loads((project.folder / "run/end.json").read_text())
    assert (end["code"], end["error"]) == (0, "")
    same(project.folder / "run", project)
    assert not left(tmp_path)


@pytest.mark.parametrize("name", ["eight_schools", "mixed"])
def test_hierarchical_programs_have_the_draws_of_one_process(name, tmp_path):
    """Server and nodes build likelihood factors from no row; clients have 1 to 90 rows."""
    project, out = hospitals.hierarchical(tmp_path / "p", name, rounds=20), tmp_path / "out"
    words = command("up", str(project.folder), "--sites", "3", "--out", str(out))
    words += ["--rules", hospitals.lenient(tmp_path / "states")]
    run = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not called(tmp_path)
    stored, here = out / name / "server/server.safetensors", hospitals.in_one_process(project)
    print(run.stdout, run.stderr)
    hospitals.same_draws(stored, here, 1e-8 if name == "eight_schools" else 1e-4)
    hospitals.same_posteriors(out / name, out / "sites", hospitals.at_server(stored, here))
    assert here.status.kind == "converged"
    rounds = f"converged after {here.state.number} of at most {project.rounds} rounds"
    assert here.state.number < project.rounds
    assert rounds in run.stdout
    assert f"{name}: {rounds}" in run.stderr
    # Pareto k is a shape that may be below 0, of weights with an upper end; above 0.7 the draws
    # would not be corrected.
    corrected = {
        "eight_schools": "draws are not corrected; the draws are of the exact posterior",
        "mixed": r"draws are corrected by importance weights; Pareto k is (-|0\.[0-7])",
    }
    assert re.search(f"posterior.nc: {corrected[name]}", run.stdout)
    if name == "mixed":  # whose sites have one client each
        no_axis_of_rows(out, least=4)


def test_a_regression_by_formula_has_the_estimates_of_one_process(tmp_path):
    """Hospitals agree on levels, means and missing values; the page has the study's question."""
    formula, how = LOGISTIC
    project = study(tmp_path / "p", formula, rounds=4, question="Who dies?", **how)
    words = command("up", str(project.folder), "--sites", "3", "--out", str(tmp_path / "out"))
    words += ["--rules", hospitals.lenient(tmp_path / "states")]
    run = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not called(tmp_path)
    assert not left(tmp_path)
    print(run.stdout, run.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the server prints them
        tables = federations.from_frames(dict(sorted(messy_hospitals.hospitals().items())))
        method = pyrofl.regression(formula, tables, **how)
    here = pyrofl.fit(method, tables, 4, stop_when="converged", progress=False, chunk_size=1)
    rules = ["--rules", hospitals.lenient(tmp_path / "states"), "--quiet"]
    assert main(["study", "run", str(project.folder), *rules, "--out", str(tmp_path / "here")]) == 0
    # The chains of the server amplify rounding by many orders of magnitude, so that draws of `fit`,
    # which adds in another order, differ by up to .002 sd; those of messages are the same.
    own, other = (role("state", state(tmp_path / n, "regression")) for n in ("out", "here"))
    toys.assert_same(own, other, **CLOSE)
    out = tmp_path / "out/regression"
    stored = out / "server/server.safetensors"
    found = pd.read_csv(out / "estimates.csv", index_col="parameter")
    expected = hospitals.at_server(stored, here).summary(1000)
    for column in ("mean", "sd"):
        np.testing.assert_allclose(found[column], expected[column], rtol=1e-6)
    assert "<h1>Who dies?</h1>" in (out / "report.html").read_text()
    assert "warning: only one client has level c of arm" in run.stderr


def no_axis_of_rows(out: Path, least: int = 20 * len(METHODS)) -> None:
    """What three sites of 32, 52 and 72 rows wrote that leaves them has the same shapes."""
    each = []
    for name in NAMES:
        log = (out / "sites" / name / "site.log").read_text()
        leaves = re.findall(r"leaves: ([^:]+): (.*)", log)
        shapes = {(what, tensor) for what, of in leaves for tensor in of.split(" bytes")[:-1]}
        each.append(shapes - {(what, of) for what, of in shapes if what == "hello"})
    assert len(each[0]) > least
    assert each[0] == each[1] == each[2]
