"""Flower's own server and nodes: whatever dies, nothing is lost or counted twice."""

from __future__ import annotations

import json
import os
import signal
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import hospitals
import pytest
from deployed import left, same, until
from hospitals import NAMES

from pyrofl.experiments.console import Stopped
from pyrofl.flower.commands import kept_by, serve_on, start_node, submit
from pyrofl.flower.processes import ProcessGroup, connect, end, free_port, marked, process_group
from pyrofl.flower.template import write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

FAULTS = """
import time
from pathlib import Path

from pyrofl.flower import apps

real = apps.answered


def answered(own, records):
    found = real(own, records)
    rounds = {flat["round"] for what, flat in records.items() if what.startswith("order/")}
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
app = apps.client_app()
"""


def kill(group: ProcessGroup, name: str) -> None:
    """Kill a node with all that it has started, at once."""
    node = group.running[f"node-{name}"]
    node.kill()
    node.wait()
    for pid in marked(group.mark):
        try:
            told = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if f"--parent-pid\0{node.pid}\0" in told or _runs_for(pid, group, name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _runs_for(pid: int, group: ProcessGroup, name: str) -> bool:
    """Say whether a process calls the local port of a node."""
    with suppress(OSError):
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
        own = group.running[f"node-{name}"].args
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


def test_what_dies_is_left_out_and_nothing_is_counted_twice(tmp_path, monkeypatch):
    project = hospitals.project(
        tmp_path / "p",
        methods=("fedavg", "scaffold", "pvi", "pfedvem"),
        settings=("epochs=1",),
        rounds=6,
    )

    def app_with_faults(folder):
        path = write_app(folder)
        (path / "study/client_app.py").write_text(FAULTS)
        return path

    monkeypatch.setattr("pyrofl.flower.commands.write_app", app_with_faults)
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

    with process_group(out / "flower") as group, ThreadPoolExecutor() as threads:

        def start(name: str) -> None:
            rows = str(project.folder / f"sites/{name}.csv")
            node = {"name": name, "project": str(project.file), "data": rows}
            node |= {"state": str(states[name])}
            start_node(group, name, f"127.0.0.1:{port}", node, ["--insecure"])

        serve_on(group, "127.0.0.1", port, kept_by(group))
        connect(group.home, f"127.0.0.1:{port}")
        for name in NAMES:
            start(name)
        first = threads.submit(submit, args, group, project, out)
        until(lambda: (states["hospital_3"] / "done-4").exists())
        kill(group, "hospital_3")  # during round 4
        start("hospital_3")
        until(lambda: said("round 4 of at most 6"))
        kill(group, "hospital_1")  # between rounds
        start("hospital_1")
        until(lambda: said("round 5 of at most 6"))
        end(group.running["superlink"])  # the server itself; its database stays
        with pytest.raises(Stopped):
            first.result()
        until(lambda: not [p for p in marked(group.mark) if b"serverapp" in cmdline(p)])
        serve_on(group, "127.0.0.1", port, kept_by(group))
        ended = submit(args, group, project, out)
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
