"""What tests of Flower's own server and nodes have in common."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import toys
from hospitals import looped

from pyrofl.files import checkpoint_file
from pyrofl.flower.processes import end
from pyrofl.flower.project import Project
from pyrofl.tensors import role

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
LISTENS, CONNECTED = "0A", "01"
LOCAL = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pyrofl", "study", *words]


STARTED: list[subprocess.Popen[bytes]] = []


def started(log: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to a file; see `end_started`."""
    with open(log, "wb") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command(*words), stdout=file, stderr=file, env=environment)
    STARTED.append(process)
    return process


def end_started() -> None:
    """End the commands that a failed test has left running."""
    for process in STARTED:
        end(process)
    STARTED.clear()


def until(what: Callable[[], object], seconds: float = 600) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def left(folder: Path) -> list[int]:
    """Return the processes that a test has started, by the folder that Flower was given."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"FLWR_HOME={folder}/".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def state(out: Path, name: str) -> Any:
    """Return what a server has written."""
    return checkpoint_file.read_any(out / name / "server/server.safetensors")[1]


def same(out: Path, project: Project, absent: Sequence[set[str]] = ()) -> None:
    """Compare all methods with the loop."""
    for name in project.labels:
        expected = looped(project, name, absent).server
        toys.assert_same(role("state", state(out, name)), expected, **CLOSE)


def abroad(processes: Sequence[int]) -> tuple[set[str], int]:
    """Return the ends of sockets that are not on this machine, and how many are.

    Looked up in the system's own tables, of the sockets that these processes hold.
    """
    ours, found, here = set[str](), set[str](), 0
    for pid in processes:
        with suppress(OSError):
            links = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
            ours |= {m[1] for at in links if (m := re.fullmatch(r"socket:\[(\d+)\]", at))}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, mine, theirs, kind, *_, inode = line.split()[:10]
            if inode not in ours:
                continue
            ends = [mine] if kind == LISTENS else [mine, theirs]
            odd = {end for end in ends if end.partition(":")[0] not in LOCAL}
            here, found = here + (not odd), found | odd
    return found, here


def environment(folder: Path, **more: str) -> Mapping[str, str]:
    """Give an environment in which every Python process notes whom it calls: see `called`."""
    (folder / "watch").mkdir()
    (folder / "watch/sitecustomize.py").write_text(WATCH)
    path = os.pathsep.join([str(folder / "watch"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "SEEN": str(folder / "seen"), "OMP_NUM_THREADS": "1"}
    return os.environ | own | more


def called(folder: Path) -> list[str]:
    """Return whom any process called, besides this machine."""
    seen = (folder / "seen").read_text().splitlines()
    assert any(line.startswith("socket.connect ('127.0.0.1'") for line in seen)
    names = ("127.0.0.1", "localhost", "::1")
    return [line for line in seen if not any(repr(name) in line for name in names)]


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
