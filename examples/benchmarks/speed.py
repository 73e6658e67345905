"""Time rounds of the library, and the same work by other code or by another checkout.

Each case runs in a process of its own. Both sides take turns, so that other work on the machine
disturbs both. Rows that the table already has are not measured again.

Run: python examples/benchmarks/speed.py [--quick] [--case NAME] [--against CHECKOUT] [--out TABLE]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from threading import Timer
from time import perf_counter
from typing import NamedTuple, get_type_hints

from pyrofl.files import text_tables

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0  # seconds for a turn, after which a process is stopped
SLOWER = 1.1  # times as long as another checkout, above which a case is named
QUICK = ("fedavg-good-two", "pfedvem-good-dirichlet", "fedavg-good-giant", "ditto-good-slices")
QUICK += ("cnn-good-20", "import")
ALLOCATOR = {  # memory that is freed stays with the process, on both sides
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


class Time(NamedTuple):
    """Seconds by the clock, and of the processor; those of child processes included."""

    wall: float
    cpu: float


class Measured(NamedTuple):
    """The seconds of both sides; a row of the table. Ratios are the other's time over ours."""

    case: str
    threads: int
    ours_s: float  # median
    other_s: float  # median
    ratio: float  # median over turns
    low: float  # smallest
    high: float  # largest
    ours_cpu_s: float  # the same in seconds of the processor, which other work disturbs less
    other_cpu_s: float
    cpu_ratio: float
    first_s: float  # of the first turn, which prepares later ones
    other_first_s: float


# What runs in the process of a case.


def work(case: str, threads: int) -> None:
    """Run a side for each line of the input, and answer with its seconds; end with the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that nothing else is in the answers
    import torch
    from cases import CASES

    torch.set_num_threads(threads)
    ours, other = CASES[case].sides()
    sides = {"ours": ours, "other": other}
    print(json.dumps([CASES[case].warm, 0]), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(timed(sides[line.strip()])), file=answers, flush=True)


def timed(side: Callable[[], object]) -> Time:
    """Return the seconds of a side."""
    begin, worked = perf_counter(), cpu_seconds()
    side()
    return Time(perf_counter() - begin, cpu_seconds() - worked)


def cpu_seconds() -> float:
    """Return the seconds of the processor that this process and its children have used."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def peak(clients: int) -> tuple[float, float]:
    """Return the peak memory of pFedVEM in MiB, without the data, and seconds of a round.

    A tenth of the clients trains in each of three rounds.
    """
    import torch
    from cases import network, ours, sized

    from pyrofl.inference.engine.participation import fraction
    from pyrofl.models import pfedvem

    torch.set_num_threads(1)
    data = sized([50] * clients)
    method = pfedvem.build(network(data), head_epochs=2, base_epochs=1)
    run = ours(method, data, training_clients=fraction(0.1))
    before = resident()
    seconds = [timed(run).wall for _ in range(3)]
    return resident() - before, median(seconds[1:])


def resident() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    try:  # getrusage would count the memory of the parent before exec
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 2**20 if sys.platform == "darwin" else most / 2**10


# What runs in the process of the command.


class Worker:
    """A process of a checkout that runs the sides of a case on request.

    Attributes:
        first: what the process answers once it is ready.
    """

    def __init__(self, checkout: Path, *words: str, threads: int = 1) -> None:
        """Start the process."""
        env = ALLOCATOR | os.environ
        env |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(threads)}
        script = checkout / "examples" / "benchmarks" / "speed.py"
        self.words = [sys.executable, str(script), *words]
        self.process = subprocess.Popen(
            self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, side: str = "") -> Time:
        """Return the answer to a question.

        Raises:
            ValueError: if the process ends, or has not answered after `LIMIT` seconds.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        stop = Timer(LIMIT, self.process.kill)
        stop.start()
        try:
            if side:
                print(side, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            stop.cancel()
        if not answer:
            raise ValueError(
                f"a process ended with {self.process.wait()}; expected an answer in {LIMIT:g} s: "
                f"run alone {' '.join(self.words)}"
            )
        return Time(*json.loads(answer))

    def __enter__(self) -> Worker:
        """Wait until the process is ready."""
        try:
            self.first = self.ask()
        except ValueError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.communicate()


def measure(
    case: str, threads: int, turns: int, against: Path | None = None, quick: bool = False
) -> Measured:
    """Run both sides of a case, or a case in two checkouts, in turn."""
    with ExitStack() as stack:
        words = ("--worker", case, str(threads))
        here = stack.enter_context(Worker(ROOT, *words, threads=threads))
        there = stack.enter_context(Worker(against, *words, threads=threads)) if against else here
        warm = 1 if quick else int(here.first.wall)
        pairs = []
        for turn in range(warm + turns):
            sides = [(here, "ours"), (there, "ours" if against else "other")]
            order = (0, 1) if turn % 2 == 0 else (1, 0)  # so that neither is always the second
            found = {i: sides[i][0].ask(sides[i][1]) for i in order}
            pairs.append((found[0], found[1]))
    return summarized(case, threads, pairs, warm)


def summarized(
    case: str, threads: int, pairs: Sequence[tuple[Time, Time]], warm: int = 1
) -> Measured:
    """Summarize the seconds (ours, other) of all turns; the first `warm` do not count."""
    ours, others = (list(side) for side in zip(*pairs[warm:], strict=True))
    (wall, cpu), (other_wall, other_cpu) = (
        [median(seconds) for seconds in zip(*side, strict=True)] for side in (ours, others)
    )
    # Of little work the processor's clock may count nothing.
    ratios, cpu_ratios = (
        [b[kind] / max(a[kind], 1e-9) for a, b in zip(ours, others, strict=True)]
        for kind in range(2)
    )
    clock = median(ratios), min(ratios), max(ratios)
    first = pairs[0][0].wall, pairs[0][1].wall
    cpus = cpu, other_cpu, median(cpu_ratios)
    return Measured(case, threads, wall, other_wall, *clock, *cpus, *first)


def read(table: Path) -> list[Measured]:
    """Read a table."""
    kinds = get_type_hints(Measured)
    with open(table, newline="") as file:
        return [
            Measured(**{n: kind(row[n]) for n, kind in kinds.items()})
            for row in csv.DictReader(file)
        ]


def write(table: Path, rows: Sequence[Measured]) -> None:
    """Write a table, and the same for a page."""
    table.parent.mkdir(parents=True, exist_ok=True)
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([Measured._fields, *rows])
    table.with_suffix(".md").write_text(markdown(rows))


def markdown(rows: Sequence[Measured]) -> str:
    """Return a table of ratios of CPU time for a page, the smallest speed-up first."""
    head = ["case", "threads", "speed-up"]
    lines = [(row.case, row.threads, short(row.cpu_ratio)) for row in sorted(rows, key=speed_up)]
    return text_tables.markdown(head, lines) + "\n"


def worst(rows: Sequence[Measured]) -> list[Measured]:
    """Return the row with the smallest speed-up of each method and reference."""
    found: dict[str, Measured] = {}
    for row in sorted(rows, key=speed_up):
        found.setdefault("-".join(row.case.split("-")[:2]), row)
    return [*found.values()]


def speed_up(row: Measured) -> tuple[float, str]:
    """Return the key by which rows are sorted."""
    return row.cpu_ratio, row.case


def short(number: float) -> str:
    """Format a number with two digits."""
    return f"{number:#.2g}".rstrip(".")


def slower(rows: Sequence[Measured], limit: float = SLOWER) -> list[str]:
    """Return the cases that take more than `limit` times as long as the other checkout."""
    return [f"{r.case} ({r.threads})" for r in rows if r.cpu_ratio < 1 / limit]


def arguments(cases: Mapping[str, object], words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    one = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    one.add_argument("--case", action="append", choices=cases, metavar="NAME", help="this one only")
    one.add_argument("--like", type=Path, metavar="TABLE", help="the cases and threads of a table")
    one.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with a checkout")
    one.add_argument("--turns", type=int, default=7, help="that count (default: 7)")
    one.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    one.add_argument("--quick", action="store_true", help="two turns of few cases, one thread")
    one.add_argument("--memory", type=int, metavar="CLIENTS", help="measure peak memory instead")
    one.add_argument("--out", type=Path, default=Path("results/speed.csv"), help="table to write")
    args = one.parse_args(words)
    if args.turns < 1 or min(args.threads) < 1:
        one.error("--turns and --threads are whole numbers of at least 1")
    if args.against and not (args.against / "examples" / "benchmarks" / "speed.py").exists():
        one.error(f"{args.against} has no examples/benchmarks/speed.py; expected a checkout")
    args.against = args.against and args.against.resolve()
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Measure the requested cases; return 1 if a case failed or is slower than elsewhere."""
    from cases import CASES

    args = arguments(CASES, words)
    if args.memory:
        for checkout in filter(None, (ROOT, args.against)):
            with Worker(checkout, "--peak", str(args.memory)) as worker:
                mib, seconds = worker.first
                print(f"{checkout}: {mib:.0f} MiB above the data, {seconds:.2f} s per round")
        return 0
    names = args.case or (QUICK if args.quick else CASES)
    requested = [(n, t) for t in ([1] if args.quick else args.threads) for n in names]
    if args.like:
        requested = [(row.case, row.threads) for row in read(args.like)]
    rows, failed = read(args.out) if args.out.exists() else [], []
    known = {(row.case, row.threads) for row in rows}
    for case, threads in requested:
        if (case, threads) in known:
            print(f"{case}, {threads} threads: {args.out} has it", flush=True)
            continue
        try:
            turns = 2 if args.quick else args.turns
            rows.append(measure(case, threads, turns, args.against, args.quick))
        except ValueError as error:  # other cases may work
            failed.append(f"{case}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        write(args.out, rows)
        print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    behind = slower(rows) if args.against else []
    print(*behind, sep="\n")
    print(f"{args.out}: {len(rows)} rows, {len(failed)} cases failed", end="")
    print(f", {len(behind)} more than 10% slower" if args.against else "")
    return int(bool(failed or behind))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["--peak"]:
        print(json.dumps(peak(int(sys.argv[2]))))
    else:
        sys.exit(main())
