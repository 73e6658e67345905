"""Ray's workers: the same numbers, nothing listens outside, nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import test_contract as contract
import torch
import toys

from pyrofl.cli.parser import main
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Stragglers, bernoulli
from pyrofl.inference.transport import ray as by_ray
from pyrofl.models import pfedvem

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")]

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
ODD = {"participation": bernoulli(0.6), "stragglers": Stragglers(0.3, 0.4), "seed": 5}
BY_RAY = {"engine": "ray", "workers": 2}
WORDS = ["run", "pfedvem", "--per-class", "12", "--clients", "4", "--net", "mlp:6"]
WORDS += ["--eval-every", "9999", "--quiet", "--engine", "ray", "--workers", "2"]


@pytest.fixture(scope="module")
def running():
    """Start Ray once, as the engine does, for the tests that do not start it themselves."""
    by_ray._start(2, torch.device("cpu"))
    yield
    ray.shutdown()


def small():
    return pfedvem.build(toys.net(), num_particles=2, head_epochs=2, base_epochs=1)


def test_it_listens_on_this_machine_alone_and_a_cluster_that_is_there_is_left(blobs, running):
    states = federate(small(), blobs, 3, **BY_RAY, **ODD)
    next(states)
    assert not outside()
    *_, found = states
    *_, expected = federate(small(), blobs, 3, **ODD)
    toys.assert_same_round(found, expected, **CLOSE)
    assert ray.is_initialized()


def outside() -> list[str]:
    """Return which of Ray's processes listen, and not on 127.0.0.1."""
    ours = sockets()
    found = list[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            host = address.partition(":")[0]
            if state == "0A" and inode in ours and not host.endswith("0100007F"):
                found.append(address)
    assert ours
    return found


def sockets() -> set[str]:
    """Return the sockets of processes that belong to the session of Ray that runs."""
    session, found = (
        os.path.basename(ray._private.worker._global_node.get_session_dir_path()),
        set(),
    )
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_text()
            if session in line or line.startswith("ray::") or int(process.name) == os.getpid():
                links = [os.readlink(fd) for fd in (process / "fd").iterdir()]
                found |= {at[8:-1] for at in links if at.startswith("socket:[")}
        except OSError:
            continue
    return found


def test_a_worker_that_dies_ends_the_run_in_one_line(blobs, running):
    states = federate(small(), blobs, 3, **BY_RAY)
    state = next(states)
    (carrier,) = (v for v in states.gi_frame.f_locals.values() if hasattr(v, "post"))
    ray.kill(carrier.post.actors[1])
    with pytest.raises(ChildProcessError, match=r"^worker 2 of 2 has died, .+; resume from"):
        next(states)
    with pytest.raises(ChildProcessError, match="workers that have ended; resume"):
        dict(state.client_states)


@pytest.mark.slow
@contract.everywhere
def test_every_method_makes_the_rounds_of_one_process(name, running):
    data, method = contract.data(), contract.built(name)
    *_, found = federate(method, data, 2, **BY_RAY, **ODD)
    *_, expected = federate(method, data, 2, **ODD)
    # What pFedGP keeps is a root of a singular matrix, which has half of the digits.
    toys.assert_same_round(found, expected, **CLOSE | {"atol": 1e-9} if name == "pfedgp" else CLOSE)


@pytest.mark.slow
def test_an_interrupt_leaves_a_checkpoint_and_no_process(tmp_path):
    out, mark = tmp_path / "run", f"MARK_{os.getpid()}={tmp_path}"
    command = [sys.executable, "-m", "pyrofl", *WORDS, "--out", str(out), "--checkpoint-every", "2"]
    process = subprocess.Popen(
        [*command, "--rounds", "5000"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict([mark.split("=")])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        while not (out / "checkpoint.safetensors").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1]
    assert process.returncode == 130, told
    (line,) = told.strip().splitlines()
    number = re.search(r"after round (\d+) of 5000: interrupted; .+ continue with --resume$", line)
    assert number, line
    for _ in range(50):
        if not (left := marked(mark)):
            break
        time.sleep(0.1)
    assert not left
    last = str(int(number[1]) + 1)
    assert main([*WORDS[:-4], "--rounds", last, "--out", str(out), "--resume"]) == 0


def marked(mark: str) -> list[str]:
    """Return the processes that have a variable in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found
