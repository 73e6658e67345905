"""Flower's own server and nodes on this machine: the numbers of the loop, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import hospitals
import pytest
import torch
import toys
from hospitals import NAMES, looped

from pyrofl.cli.ends import Stopped
from pyrofl.flower.command import kept_by, run, serve_on, start_node
from pyrofl.flower.processes import Crew, connect, crew, end, free_port, marked
from pyrofl.tensors import role

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

METHODS = ("fedavg", "pfedvem", "pfedmb", "metavd", "fedbe", "fedabml", "scaffold", "pvi")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCH = """
import os
import sys


def hook(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo"):
        where = args[0] if event == "socket.getaddrinfo" else args[1]
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{event} {where!r}\\n")


sys.addaudithook(hook)
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pyrofl", "flower", *words]


@pytest.fixture
def watched(tmp_path):
    """Give an environment in which every process notes whom it calls."""
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch/sitecustomize.py").write_text(WATCH)
    path = os.pathsep.join([str(tmp_path / "watch"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "SEEN": str(tmp_path / "seen"), "OMP_NUM_THREADS": "1"}


def abroad(tmp_path: Path) -> list[str]:
    """Return whom any process called, besides this machine."""
    seen = (tmp_path / "seen").read_text().splitlines()
    assert any(line.startswith("socket.connect ('127.0.0.1'") for line in seen)
    return [line for line in seen if not any(repr(name) in line for name in LOOPBACK)]


def left(tmp_path: Path) -> list[int]:
    """Return the processes that a test has started, by the folder that Flower was given."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"FLWR_HOME={tmp_path}/".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def state(out: Path, name: str) -> Any:
    """Return what a server has written."""
    return torch.load(out / name / "server/server.pt", weights_only=True)["content"]


def same(out: Path, project: Any, absent: Any = ()) -> None:
    """Compare all methods with the loop."""
    for name in project.labels:
        expected = looped(project, name, absent).server
        toys.assert_same(role("state", state(out, name)), expected, **CLOSE)


def test_all_methods_in_one_run_are_those_of_the_loop(tmp_path, watched):
    settings = ("epochs=1", "distil_epochs=1")
    project = hospitals.project(
        tmp_path / "p", methods=METHODS, settings=settings, unlabelled="spare.csv", net="mlp:3"
    )
    rows = (project.folder / "sites/hospital_1.csv").read_text().splitlines()
    (project.folder / "spare.csv").write_text("\n".join(rows[:20]) + "\n")
    begun = time.monotonic()
    words = command("up", str(project.folder), "--sites", "3", "--out", str(tmp_path / "out"))
    done = subprocess.run(words, capture_output=True, text=True, env=watched)
    print(f"{time.monotonic() - begun:.0f} s\n{done.stdout}\n{done.stderr}")
    assert done.returncode == 0
    assert not left(tmp_path)
    same(tmp_path / "out", project)
    assert not abroad(tmp_path)
    for name in METHODS:
        assert f"{name}\nmodel " in done.stdout
        assert (tmp_path / f"out/{name}/figures/curves.png").is_file()


FAULTS = """
import time
from pathlib import Path

from pyrofl.flower import apps

real = apps.answered


def answered(own, sheets):
    found = real(own, sheets)
    rounds = {flat["round"] for what, flat in sheets.items() if what.startswith("order/")}
    for number in rounds:
        fault = Path(own["state"]) / f"fault-{number}"
        kind = fault.read_text() if fault.exists() else ""
        if kind:
            fault.rename(fault.with_name(f"done-{number}"))
        if kind == "raise":
            raise OSError("after it has saved")
        if kind == "nan":
            for flat in found.values():
                flat |= {n: v * float("nan") for n, v in flat.items() if n.startswith("up/")}
        if kind == "hang":
            time.sleep(600)
    return found


apps.answered = answered
client = apps.client_app()
server = apps.server_app()
"""


def until(what: Callable[[], object], seconds: float = 600) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def kill(team: Crew, name: str) -> None:
    """Kill a node with all that it has started, at once."""
    node = team.running[f"node-{name}"]
    node.kill()
    node.wait()
    for pid in marked(team.mark):
        try:
            told = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if f"--parent-pid\0{node.pid}\0" in told or _runs_for(pid, team, name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _runs_for(pid: int, team: Crew, name: str) -> bool:
    """Say whether a process calls the local port of a node."""
    with suppress(OSError):
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
        own = team.running[f"node-{name}"].args
        port = own[own.index("--port") + 1]
        return f"127.0.0.1:{port}" in words
    return False


def missed(out: Path, project: Any) -> list[set[str]]:
    """Return who was left out of each round, by what the server has written; all methods agree."""
    found = []
    for name in project.labels:
        rounds = json.loads((out / name / "run.json").read_text())["each_round"]
        each = [
            {*row["silent_clients"], *(why.split(":")[0] for why in row["rejected_reasons"])}
            for row in rounds
        ]
        found.append(each)
    assert all(each == found[0] for each in found)
    return found[0]


def test_what_dies_is_left_out_and_nothing_is_counted_twice(tmp_path):
    project = hospitals.project(
        tmp_path / "p", methods=("fedavg", "scaffold"), settings=("epochs=1",), rounds=6
    )
    (project.folder / "app.py").write_text(FAULTS)
    out, port = tmp_path / "out", free_port()
    states = {name: out / "sites" / name for name in NAMES}
    for name, number, kind in (
        ("hospital_1", 2, "raise"),
        ("hospital_2", 3, "nan"),
        ("hospital_3", 4, "hang"),
    ):
        states[name].mkdir(parents=True, exist_ok=True)
        (states[name] / f"fault-{number}").write_text(kind)
    args = Namespace(sites=3, min_sites=1, timeout=150.0, quiet=True)
    log = out / "server.log"

    def said(text: str) -> bool:
        return log.exists() and text in log.read_text()

    with crew(out / "flower") as team, ThreadPoolExecutor() as threads:

        def start(name: str) -> None:
            rows = str(project.folder / f"sites/{name}.csv")
            node = {"name": name, "project": str(project.folder), "data": rows}
            node |= {"state": str(states[name])}
            start_node(team, name, f"127.0.0.1:{port}", node, ["--insecure"])

        serve_on(team, "127.0.0.1", port, kept_by(team))
        connect(team.home, f"127.0.0.1:{port}")
        for name in NAMES:
            start(name)
        first = threads.submit(run, args, team, project, out)
        until(lambda: (states["hospital_3"] / "done-4").exists())
        kill(team, "hospital_3")  # during round 4
        start("hospital_3")
        until(lambda: said("round 4 of 6"))
        kill(team, "hospital_1")  # between rounds
        start("hospital_1")
        until(lambda: said("round 5 of 6"))
        end(team.running["superlink"])  # the server itself; its database stays
        with pytest.raises(Stopped):
            first.result()
        until(lambda: not [p for p in marked(team.mark) if b"serverapp" in cmdline(p)])
        serve_on(team, "127.0.0.1", port, kept_by(team))
        ended = run(args, team, project, out)
    print(log.read_text())
    assert ended["code"] == 0
    assert not left(tmp_path)
    absent = missed(out, project)
    assert len(absent) == 6
    assert absent[:4] == [set(), {"hospital_1"}, {"hospital_2"}, {"hospital_3"}]
    same(out, project, absent)


def cmdline(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""
