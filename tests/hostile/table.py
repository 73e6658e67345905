"""The table of hostile inputs, and a command that meets them all.

`python tests/fault_table.py --inputs` runs every case, says which fail, and writes how many ended
how to table.json; words after it choose cases by a part of their name.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from dying import Nursery
from hostile import (
    flags,
    images,
    lines,
    predictions,
    python,
    questions,
    servers,
    settings,
    sheets,
    specs,
)
from hostile.case import Case, contents, end_of, problems

COUNTS = Path(__file__).with_name("table.json")
LIMITS = (60, 4 * 2**30)  # seconds, and bytes beside what an idle process has
PARTS = (flags, specs, lines, settings, sheets, questions, images, python, predictions)
PARTS += (servers,)
TABLE: tuple[Case, ...] = tuple(case for part in PARTS for case in part.cases())
# What does not yet end as it must, and why.
WAITING: dict[str, str] = {}


def met(case: Case, nursery: Nursery) -> tuple[str, str]:
    """Run a case in a folder of its own; return how it ended, and what is wrong with that."""
    with TemporaryDirectory() as name:
        folder = Path(name, "here")
        folder.mkdir()
        if case.make:
            case.make(folder)
        before = contents(folder)
        commands = [case.words, *([case.like] if case.like else [])]
        ended = nursery(*commands, at=str(folder), within=LIMITS)
        return end_of(ended), problems(case, ended, folder, before)


def counted() -> dict[str, dict[str, int]]:
    """Return how many of each kind ended how, when they were last counted."""
    known: dict[str, dict[str, int]] = json.loads(COUNTS.read_text())
    return known


def meet(words: list[str]) -> None:
    """Meet the cases that are asked for, or all and write their counts."""
    asked = [case for case in TABLE if not words or any(word in case.id for word in words)]
    ends: dict[str, Counter[str]] = {case.kind: Counter() for case in asked}
    nursery, wrong, begun = Nursery(), 0, perf_counter()
    for case in asked:
        at = perf_counter()
        end, problem = met(case, nursery)
        ends[case.kind][end] += 1
        if problem:
            wrong += 1
            print(f"{case.id} ({perf_counter() - at:.1f} s): {problem[:700]}", flush=True)
    nursery.close()
    print(f"{len(asked)} cases, {wrong} wrong, {perf_counter() - begun:.0f} s: {ends}")
    if not words:
        told = {kind: dict(sorted(found.items())) for kind, found in ends.items()}
        COUNTS.write_text(json.dumps(told, indent=1) + "\n")
