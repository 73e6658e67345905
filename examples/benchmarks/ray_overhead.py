"""Measure what the Ray engine adds to a round of many small clients, with workers on this machine.

Rounds of FedAvg in one process and by Ray take turns, on the same clients of four rows. Reported
are seconds by the clock and of all processes on the processor, the bytes that clients receive and
send, the memory of the processes, and these for more clients.

Run: python examples/benchmarks/ray_overhead.py [--clients 1000 10000] [--out TABLE]
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from pyrofl import nets
from pyrofl.data import Federation
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedavg

ROWS, INPUTS, CLASSES = 4, 20, 2  # of a client


class Measured(NamedTuple):
    """A row of the table: medians over rounds of all clients."""

    clients: int
    workers: int
    local_s: float  # by the clock, in one process
    ray_s: float
    local_cpu_s: float  # of all processors
    ray_cpu_s: float  # of this process and the workers
    overhead_s: float  # ray_cpu_s - local_cpu_s
    overhead_ms_per_client: float
    start_s: float  # of Ray, its workers and the first round
    bytes_per_client: float  # received and sent in a round
    server_mib: float  # resident memory of this process
    worker_mib: float  # of the largest worker


def federation(clients: int) -> Federation:
    """Return clients of a few rows each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * ROWS, INPUTS, generator=generator)
    rows = torch.arange(len(x)).split(ROWS)
    none = (torch.arange(0),) * clients
    return Federation(x, (x[:, 0] > 0).long(), rows, none, classes=tuple(map(str, range(CLASSES))))


def worker_processes() -> list[int]:
    """Return the ids of the workers that this process has started by Ray."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_text()
            if line.startswith("ray::Actor") and is_ours(process):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def is_ours(process: Path) -> bool:
    """Return whether a process was started by this one, or by a process that it started."""
    while process.name not in ("0", "1"):
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        if int(fields[1]) == os.getpid():
            return True
        process = Path("/proc") / fields[1]
    return False


def cpu_seconds(processes: Sequence[int]) -> float:
    """Return the seconds of the processor that some processes have used."""
    total = 0
    for process in processes:  # nanoseconds of each thread
        for thread in Path(f"/proc/{process}/task").iterdir():
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def resident_mib(process: int) -> float:
    """Return the resident memory of a process, in MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 2**10


def measure(clients: int, workers: int, turns: int) -> Measured:
    """Alternate rounds in one process and by Ray."""
    data = federation(clients)
    method = fedavg.build(nets.build("softmax", (INPUTS,), CLASSES), epochs=1, batch=None)
    rounds = turns + 2
    local = federate(method, data, rounds)
    begin = perf_counter()
    by_ray = federate(method, data, rounds, engine="ray", workers=workers)
    next(by_ray)
    start = perf_counter() - begin
    next(local)
    processes = [os.getpid(), *worker_processes()]
    seconds: list[list[float]] = [[], [], [], []]
    for turn in range(turns):
        for i in (0, 1) if turn % 2 else (1, 0):
            before, begin = cpu_seconds(processes), perf_counter()
            state = next((local, by_ray)[i])
            seconds[i].append(perf_counter() - begin)
            seconds[2 + i].append(cpu_seconds(processes) - before)
    local_s, ray_s, local_cpu, ray_cpu = map(median, seconds)
    traffic = float(state.bytes_down.sum() + state.bytes_up.sum()) / clients
    memory = [resident_mib(process) for process in processes]
    by_ray.close()
    overhead = ray_cpu - local_cpu
    return Measured(
        clients,
        workers,
        local_s,
        ray_s,
        local_cpu,
        ray_cpu,
        overhead,
        1000 * overhead / clients,
        start,
        traffic,
        memory[0],
        max(memory[1:]),
    )


def per_client(rows: Sequence[Measured], column: str) -> tuple[float, float]:
    """Return intercept and slope of a column in the number of clients, by its first and last."""
    first, last = rows[0], rows[-1]
    change = getattr(last, column) - getattr(first, column)
    slope = change / (last.clients - first.clients)
    return getattr(first, column) - slope * first.clients, slope


def main(words: Sequence[str] | None = None) -> int:
    """Write a table of measurements, and print what they extrapolate to."""
    one = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    one.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000])
    one.add_argument("--workers", type=int, default=2)
    one.add_argument("--turns", type=int, default=5, help="rounds that count (default: 5)")
    one.add_argument("--to", type=int, default=1_000_000, help="clients to extrapolate to")
    one.add_argument("--out", type=Path, default=Path("results/ray.csv"), help="table to write")
    args = one.parse_args(words)
    if min(args.clients) < args.workers or args.workers < 1 or args.turns < 1:
        one.error("--workers and --turns are at least 1, and --clients at least the workers")
    torch.set_num_threads(1)
    rows = [measure(clients, args.workers, args.turns) for clients in sorted(args.clients)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", newline="") as file:
        csv.writer(file).writerows([Measured._fields, *rows])
    for row in rows:
        print(", ".join(f"{n} {v:.4g}" for n, v in row._asdict().items()))
    if len(rows) > 1:
        print(f"{args.to} clients:")
        for column in ("local_cpu_s", "ray_cpu_s", "server_mib", "worker_mib"):
            intercept, slope = per_client(rows, column)
            print(f"  {column} {intercept + slope * args.to:.4g}")
        print(f"  bytes of a round {rows[-1].bytes_per_client * args.to:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
