"""How long two sides take, and how time and memory grow with clients, rows and chunks."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from pyrofl.arguments import Count, checked
from pyrofl.bench.cases import Side, equal, many_clients, network, ours
from pyrofl.bench.children import child
from pyrofl.inference.loop.participation import fraction
from pyrofl.models import pfedvem

CLIENTS = (10, 100, 1000, 10_000)
ROWS = (10, 50, 250, 1000)
CHUNKS = (1, 10, 30, 100, 300)


class Measured(NamedTuple):
    """How long two sides took; a row of bench.csv."""

    case: str
    ours_s: float  # median
    other_s: float  # median
    ratio: float  # median of the other's time over ours in the same turn
    low: float  # smallest of these ratios
    high: float  # largest


class Peak(NamedTuple):
    """Memory of a process that runs pFedVEM; a row of memory.csv."""

    clients: int
    chunk: int
    seconds: float  # of a round, median of two
    mib: float  # most that was ever resident, without what importing and the data take
    state_mib: float  # of all clients' private state


@checked
def alternate(case: str, ours: Side, other: Side, turns: Count) -> Measured:
    """Run both sides in turn, so that both are disturbed; the first turn does not count."""
    pairs = [(_seconds(ours), _seconds(other)) for _ in range(turns + 1)][1:]
    return summed_up(case, pairs)


def summed_up(case: str, pairs: list[tuple[float, float]]) -> Measured:
    """Summarise seconds (ours, other) of every turn.

    >>> summed_up("a", [(1.0, 2.0), (1.0, 4.0), (2.0, 6.0)])
    Measured(case='a', ours_s=1.0, other_s=4.0, ratio=3.0, low=2.0, high=4.0)
    """
    ratios = [other / ours for ours, other in pairs]
    ours_s, other_s = (median(side) for side in zip(*pairs, strict=True))
    return Measured(case, ours_s, other_s, median(ratios), min(ratios), max(ratios))


def clients(turns: int, counts: tuple[int, ...] = CLIENTS) -> list[Measured]:
    """Time a tenth of the clients beside as many of a thousand: a ratio of 1 is linear."""
    sides = {n: many_clients(n) for n in counts}
    return _against("clients", sides, min(1000, max(counts)), turns)


def rows(turns: int, counts: tuple[int, ...] = ROWS) -> list[Measured]:
    """Time rounds of 100 clients by their number of rows; the other side is 50 rows, by row."""
    sides = {n: (many_clients(100, share=1.0, rows=n)[0], n) for n in counts}
    return _against("rows", sides, 50, turns)


def _against(
    name: str, sides: dict[int, tuple[Side, int]], base: int, turns: int
) -> list[Measured]:
    """Time sides in turn; the other one is a base, by what there is to do."""
    times = [{n: _seconds(side) for n, (side, _) in sides.items()} for _ in range(turns + 1)][1:]
    return [
        summed_up(f"{name}={n}", [(t[n], t[base] / sides[base][1] * work) for t in times])
        for n, (_, work) in sides.items()
    ]


def memory(clients: int, chunks: tuple[int, ...] = CHUNKS, limit: int = 2**30) -> list[Peak]:
    """Measure chunks in a process each; private state beyond `limit`, in bytes, is on the disk."""
    found = []
    for chunk in chunks:
        words = [sys.executable, "-m", __name__, *map(str, (clients, chunk, limit))]
        told = child(f"memory of {clients} clients, chunk {chunk}", words)
        found.append(Peak(clients, chunk, **json.loads(told.splitlines()[-1])))
    return found


def one_peak(clients: int, chunk: int, limit: int) -> dict[str, float]:
    """Run three rounds in which a tenth of the clients trains, and say what they took."""
    torch.set_num_threads(1)
    data = equal(clients, 50)
    net = network(data)
    method, draw = pfedvem.build(net, head_epochs=2, base_epochs=1), fraction(0.1)
    run = ours(method, data, trains=draw, chunk=chunk or None, state_memory=limit)
    before = _resident()
    seconds = [_seconds(run) for _ in range(3)]
    own = sum(shape.numel() for shape in net.shapes.values())
    head = sum(shape.numel() for shape in net.matching(net.head).values())
    state = 4 * clients * (own + head + 1) / 2**20
    return {"seconds": median(seconds[1:]), "mib": _resident() - before, "state_mib": state}


def _seconds(side: Side) -> float:
    begin = perf_counter()
    side()
    return perf_counter() - begin


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
