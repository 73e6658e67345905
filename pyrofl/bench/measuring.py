"""How long two sides take, and how time and memory grow with clients, rows and chunks."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from pyrofl.arguments import Count, checked
from pyrofl.bench.cases import Side, many_clients, network, ours
from pyrofl.bench.children import lines
from pyrofl.bench.federations import equal
from pyrofl.inference.loop.participation import fraction
from pyrofl.models import pfedvem

CLIENTS = (10, 100, 1000, 10_000)
ROWS = (10, 50, 250, 1000)
CHUNKS = (1, 10, 30, 100, 300)


class Measured(NamedTuple):
    """How long two sides took; a row of bench.csv. Ratios are the other's time over ours."""

    case: str
    threads: int
    ours_s: float  # median
    other_s: float  # median
    ratio: float  # median of those of the turns
    low: float  # smallest of them
    high: float  # largest
    ours_cpu_s: float  # the same in seconds of the processor, which others on it disturb less
    other_cpu_s: float
    cpu_ratio: float
    first_s: float  # of the first turn, in which much is made that serves later ones
    other_first_s: float


class Time(NamedTuple):
    """Seconds that something took, and those of the processor, its children's too."""

    wall: float
    cpu: float


class Peak(NamedTuple):
    """Memory of a process that runs pFedVEM; a row of memory.csv."""

    clients: int
    chunk: int
    seconds: float  # of a round, median of two
    mib: float  # most that was ever resident, without what importing and the data take
    state_mib: float  # of all clients' private state


Told = Callable[[str], object]
"""Hears when a turn is done."""


@checked
def alternate(
    case: str, ours: Side, other: Side, turns: Count, warm: Count = 1, told: Told = str
) -> Measured:
    """Run both sides in turn, so that both are disturbed; the first `warm` turns do not count."""
    pairs = []
    for turn in range(warm + turns):
        pairs.append((_time(ours), _time(other)))
        told(f"turn {turn + 1} of {warm + turns}")
    return summed_up(case, pairs, warm)


def summed_up(case: str, pairs: list[tuple[Time, Time]], warm: int = 1) -> Measured:
    """Summarise what every turn took, (ours, other).

    >>> turns = [(Time(9, 9), Time(9, 9)), (Time(1, 1), Time(2, 3)), (Time(2, 1), Time(6, 3))]
    >>> summed_up("a", turns)[2:]
    (1.5, 4.0, 2.5, 2.0, 3.0, 1.0, 3.0, 3.0, 9, 9)
    """
    (first, other_first), later = pairs[0], pairs[warm:]
    found: list[tuple[float, float, list[float]]] = []
    for kind in range(2):
        ours, other = ([side[kind] for side in sides] for sides in zip(*later, strict=True))
        ratios = [b / a for a, b in zip(ours, other, strict=True)]
        found.append((median(ours), median(other), ratios))
    (wall, other_wall, ratios), (cpu, other_cpu, cpu_ratios) = found
    return Measured(
        case,
        torch.get_num_threads(),
        wall,
        other_wall,
        median(ratios),
        min(ratios),
        max(ratios),
        cpu,
        other_cpu,
        median(cpu_ratios),
        first.wall,
        other_first.wall,
    )


def clients(turns: int, counts: tuple[int, ...] = CLIENTS, told: Told = str) -> list[Measured]:
    """Time a tenth of the clients beside as many of a thousand: a ratio of 1 is linear."""
    sides = {n: many_clients(n) for n in counts}
    return _against("clients", sides, min(1000, max(counts)), turns, told)


def rows(turns: int, counts: tuple[int, ...] = ROWS, told: Told = str) -> list[Measured]:
    """Time rounds of 100 clients by their number of rows; the other side is 50 rows, by row."""
    sides = {n: (many_clients(100, share=1.0, rows=n)[0], n) for n in counts}
    return _against("rows", sides, 50, turns, told)


def _against(
    name: str, sides: dict[int, tuple[Side, int]], base: int, turns: int, told: Told
) -> list[Measured]:
    """Time sides in turn; the other one is a base, by what there is to do."""
    times: list[dict[int, Time]] = []
    for turn in range(turns + 1):
        times.append({})
        for n, (side, _) in sides.items():
            times[-1][n] = _time(side)
            told(f"turn {turn + 1} of {turns + 1}, {name}={n}")
    found = []
    for n, (_, work) in sides.items():
        share = work / sides[base][1]
        others = [Time(*(v * share for v in t[base])) for t in times]
        found.append(
            summed_up(f"{name}={n}", list(zip((t[n] for t in times), others, strict=True)))
        )
    return found


def memory(
    clients: int, chunks: tuple[int, ...] = CHUNKS, limit: int = 2**30, tell: Told = str
) -> list[Peak]:
    """Measure chunks in a process each; private state beyond `limit`, in bytes, is on the disk."""
    found = []
    for chunk in chunks:
        words = [sys.executable, "-m", __name__, *map(str, (clients, chunk, limit))]
        *_, told = lines(f"memory of {clients} clients, chunk {chunk}", words, tell=tell)
        found.append(Peak(clients, chunk, **json.loads(told)))
    return found


def one_peak(clients: int, chunk: int, limit: int) -> dict[str, float]:
    """Run three rounds in which a tenth of the clients trains, and say what they took."""
    torch.set_num_threads(1)
    data = equal(clients, 50)
    net = network(data)
    method, draw = pfedvem.build(net, head_epochs=2, base_epochs=1), fraction(0.1)
    run = ours(method, data, trains=draw, chunk=chunk or None, state_memory=limit)
    before = _resident()
    seconds = [_time(run).wall for _ in range(3)]
    own = sum(shape.numel() for shape in net.shapes.values())
    head = sum(shape.numel() for shape in net.matching(net.head).values())
    state = 4 * clients * (own + head + 1) / 2**20
    return {"seconds": median(seconds[1:]), "mib": _resident() - before, "state_mib": state}


def _time(side: Side) -> Time:
    begin, worked = perf_counter(), _worked()
    side()
    return Time(perf_counter() - begin, _worked() - worked)


def _worked() -> float:
    """Return the seconds of the processor that this process and its children took."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


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
