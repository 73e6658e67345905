"""How time grows with clients and rows, and memory with clients side by side."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from pyrofl.bench.cases import many_clients, network, ours
from pyrofl.bench.federations import equal
from pyrofl.bench.timing import Measured, Side, summed_up
from pyrofl.inference.loop.participation import fraction
from pyrofl.models import pfedvem

CLIENTS = (10, 100, 1000, 10_000)
ROWS = (10, 50, 250, 1000)
CHUNKS = (1, 10, 30, 100, 300)


class Peak(NamedTuple):
    """Memory of a process that runs pFedVEM; a row of memory.csv."""

    clients: int
    chunk: int
    seconds: float  # of a round, median of two
    mib: float  # most that was ever resident, without what importing and the data take
    state_mib: float  # of all clients' private state


def clients(turns: int, counts: tuple[int, ...] = CLIENTS) -> list[Measured]:
    """Time rounds in which a tenth of the clients takes part, by the number of clients.

    The other side is what a thousand clients take, by participant: a ratio of 1 is linear.
    """
    sides = {n: many_clients(n) for n in counts}
    return _against("clients", sides, min(1000, max(counts)), turns)


def rows(turns: int, counts: tuple[int, ...] = ROWS) -> list[Measured]:
    """Time rounds of 100 clients by their number of rows; the other side is 50 rows, by row."""
    sides = {n: (many_clients(100, share=1.0, rows=n)[0], n) for n in counts}
    return _against("rows", sides, 50, turns)


def _against(
    name: str, sides: dict[int, tuple[Side, int]], base: int, turns: int
) -> list[Measured]:
    seconds: dict[int, list[float]] = {n: [] for n in sides}
    for _ in range(turns + 1):
        for n, (side, _work) in sides.items():
            begin = perf_counter()
            side()
            seconds[n].append(perf_counter() - begin)
    unit = [s / sides[base][1] for s in seconds[base][1:]]
    return [
        summed_up(f"{name}={n}", [(s, u * work) for s, u in zip(seconds[n][1:], unit, strict=True)])
        for n, (_, work) in sides.items()
    ]


def memory(clients: int, chunks: tuple[int, ...] = CHUNKS, limit: int = 2**30) -> list[Peak]:
    """Measure the memory of pFedVEM in a process of its own for every number of clients in a chunk.

    Clients have 50 rows each, and a tenth of them trains in a round; private state is on the disk
    beyond this `limit`, in bytes.
    """
    found = []
    for chunk in chunks:
        words = [sys.executable, "-m", "pyrofl.bench.scaling", *map(str, (clients, chunk, limit))]
        told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found.append(Peak(clients, chunk, **json.loads(told.splitlines()[-1])))
    return found


def one_peak(clients: int, chunk: int, limit: int) -> dict[str, float]:
    """Run three rounds here and say what they took."""
    torch.set_num_threads(1)
    data = equal(clients, 50)
    net = network(data)
    method, draw = pfedvem.build(net, head_epochs=2, base_epochs=1), fraction(0.1)
    run = ours(method, data, trains=draw, chunk=chunk or None, state_memory=limit)
    before = _resident()
    seconds = []
    for _ in range(3):
        begin = perf_counter()
        run()
        seconds.append(perf_counter() - begin)
    own = sum(shape.numel() for shape in net.shapes.values())
    head = sum(shape.numel() for shape in net.matching(net.head).values())
    state = 4 * clients * (own + head + 1) / 2**20
    return {"seconds": median(seconds[1:]), "mib": _resident() - before, "state_mib": state}


def _resident() -> float:
    """Return the largest resident memory so far, in MiB."""
    try:  # what a child is told elsewhere starts at its parent's
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 2**20 if sys.platform == "darwin" else most / 2**10


if __name__ == "__main__":
    print(json.dumps(one_peak(*map(int, sys.argv[1:]))))
