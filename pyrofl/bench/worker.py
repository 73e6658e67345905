"""One case of `pyrofl bench`, in a process of its own that says which turn is done.

`python -m pyrofl.bench.worker CASE TASK`, where the task is a list in JSON, writes a line for each
turn, and each row of bench.csv as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from pyrofl.bench import cases, measuring
from pyrofl.bench.cases import Case
from pyrofl.bench.children import lines
from pyrofl.bench.image_cases import IMAGES
from pyrofl.bench.loop_cases import LOOPS
from pyrofl.bench.measuring import Measured, Told
from pyrofl.bench.personal_cases import PERSONAL
from pyrofl.cli.setup import threads
from pyrofl.data import datasets

CASES: Mapping[str, Case] = {**LOOPS, **PERSONAL, **IMAGES, **cases.CASES}
GROWTH = {
    "clients": (measuring.clients, measuring.CLIENTS),
    "rows": (measuring.rows, measuring.ROWS),
}
NAMES = (*CASES, *GROWTH, "memory")
QUICK = (
    *("pfedvem-authors-slices", "pfedvem-good-dirichlet", "fedavg-good-giant", "fedavg-good-two"),
    *("ditto-good-slices", "cnn-good-20", "resnet-good-20", "import"),
)
SHORT, FEW = 2, 3  # turns of a quick run, and points of its curves


class Task(NamedTuple):
    """What a worker is to do."""

    turns: int
    threads: int
    data: str | None
    data_dir: str | None
    quick: bool = False


def measured(name: str, task: Task, tell: Told) -> list[Measured]:
    """Measure one case in a process of its own; see `children.lines` for what it raises."""
    words = [sys.executable, "-m", __name__, name, json.dumps(task)]
    found = []
    for line in lines(name, words, tell=tell):
        if line.startswith("{"):
            found.append(Measured(**json.loads(line)))
        else:
            tell(f"{name}: {line}\n")
    return found


def rows(name: str, task: Task, tell: Told) -> list[Measured]:
    """Measure one case here."""
    with threads(task.threads):
        if name in GROWTH:
            grow, counts = GROWTH[name]
            return grow(task.turns, counts[: FEW if task.quick else None], tell)
        case = CASES[name]
        loaded = datasets.load(task.data, data_dir=task.data_dir) if task.data else None
        warm = 1 if task.quick else case.warm
        return [measuring.alternate(name, *case.sides(loaded), task.turns, warm, tell)]


def work(name: str, task: Task) -> None:
    """Say what is done and found; end when the process that asked for it is gone."""
    parent = os.getppid()

    def say(text: str) -> None:
        print(text, flush=True)
        if os.getppid() != parent:  # killed, so that it could not end this one
            raise SystemExit("nobody waits for this")

    for row in rows(name, task, say):
        say(json.dumps(row._asdict()))


if __name__ == "__main__":
    work(sys.argv[1], Task(*json.loads(sys.argv[2])))
