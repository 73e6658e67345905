"""The table of faults in `examples/FAULTS.md`: what tests inject, counted from them.

`python tests/fault_table.py` rewrites it. With `--hostile` it first lets every method meet its
hostile federations again, which takes several minutes, and notes what became of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "examples" / "FAULTS.md"
HOSTILE = TESTS / "hostile" / "federations.json"
FILES = (
    *("test_contract.py", "test_faults.py", "test_kills.py", "cli/test_stops.py"),
    *(
        "inference/test_checkpoints.py",
        "inference/aggregation/test_robust.py",
        "inference/engine/test_round.py",
    ),
)
ENDS = {
    "finite": "finite results",
    "finite without some clients": "finite results without some clients",
    "diverged, or merged nothing": "a status of divergence or of no update",
    "refused at the boundary": "a clear error",
    "refused while training": "a clear error",
    "refused at a test": "a clear error",
    "ended on its way": "an unclear error",
}
HEAD = "| fault | injected | guaranteed behavior |\n|---|---|---|\n"


class Fault(NamedTuple):
    """A row of the table."""

    kind: str
    tests: str  # pattern of "file::test[parameters]"
    promise: str
    each: int = 1  # faults in one of these tests


SPOILT = r"faults::test_a_bad_message_is_named_and_left_out"
LEFT_OUT = "left out"
FAULTS = (
    Fault(
        "NaN, infinity, a wrong shape, number of rows or type, or a missing tensor in a message",
        rf"{SPOILT}\[(NaN|.*inf|wrong|miss)",
        LEFT_OUT,
        2,
    ),
    Fault(
        "a wrong shape, number of rows or type in round one",
        r"::test_most_clients_decide",
        "left out; the majority counts as correct",
    ),
    Fault(
        "a size that is zero, negative, NaN or infinite",
        r"::test_a_size_that_cannot_be",
        LEFT_OUT,
        2,
    ),
    Fault(
        "a variance, precision, weight or cluster out of range",
        r"::test_(what_must_be_positive|a_variance_of_zero|a_share_is)",
        LEFT_OUT,
        2,
    ),
    Fault(
        "a client that diverges",
        r"::test_a_client_(that_turns_bad|with_hopeless)|::test_a_bad_client_is_named",
        "left out; it keeps its last valid state",
    ),
    Fault(
        "all messages invalid",
        r"::test_(without_a_good_message|all_clients_turn_bad)",
        "the server keeps its state and warns",
    ),
    Fault(
        "a fifth of the clients send values a million times too large",
        r"::test_robust_merges_bear",
        "with robust aggregation, a loss within 10% of that without them",
    ),
    Fault(
        "clients that drop out",
        r"::test_who_is_not_heard",
        "a warning; bitwise equal to a round of the others",
    ),
    Fault(
        "clients that complete only part of their work",
        r"::test_part_of_the_work",
        "finite results; their steps are counted",
    ),
    Fault(
        "interrupted twice and resumed from a file, every method",
        r"::test_every_method_goes_on",
        "bitwise equal to an uninterrupted run",
    ),
    Fault(
        "SIGKILL in a random round, every method; in a comparison; around and during writes",
        r"kills::test_(a_kill_in_training_loses_nothing_with_any|a_kill_before_or_after"
        r"|a_kill_inside|a_comparison_goes_on)",
        "the same bytes after `--resume`",
    ),
    Fault(
        "Ctrl-C",
        r"stops::test_an_interrupt",
        "the same",
    ),
    Fault(
        "a full disk; a folder or file that cannot be written",
        r"::test_(a_full_disk|a_folder_that_cannot|the_old_file_stays|a_disk_that|.*on_a_disk)",
        "a one-line error; the run can be resumed",
    ),
    Fault(
        "a checkpoint that is corrupted, contains code, or has other arguments, data or versions",
        r"checkpoints::test_(a_file_that_was_cut|a_single_bit|files_of_others|no_code)"
        r"|::test_(another_se|a_checkpoint_of_another_run)",
        "a one-line error that names the reason; no code is run",
    ),
)


@cache
def collected() -> tuple[str, ...]:
    """Return the names of all tests in the files, as "file::test[parameters]"."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "", *FILES]
    found = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True)
    return tuple(line for line in found.stdout.splitlines() if "::" in line)


def rows() -> list[tuple[str, int, str]]:
    """Return the table: kind of fault, how many are injected, what was promised and kept.

    Raises:
        ValueError: if no test injects a kind.
    """
    names = [name.replace(".py::", "::") for name in collected()]
    table = []
    for fault in FAULTS:
        tests = sum(bool(re.search(fault.tests, name)) for name in names)
        if not tests:
            raise ValueError(f"no test injects {fault.kind!r}; expected one like {fault.tests!r}")
        table.append((fault.kind, fault.each * tests, fault.promise))
    kind = "unusual federations: an empty class, one row, a very large client, scales up to 1e30"
    table.append((kind, *became(HOSTILE)))
    kind = "invalid options, settings, tables, image files and calls from Python"
    return [*table, (kind, inputs(), "a one-line error, or correct results")]


def inputs() -> int:
    """Return how many hostile inputs the slow tests draw, and how many calls they make."""
    from hostile import python
    from hostile.test_inputs import KINDS, MANY

    return len(KINDS) * MANY + len(list(python.cases()))


def became(counts: Path) -> tuple[int, str]:
    """Return how many hostile things there are in a file of counts, and what became of them."""
    ends: Counter[str] = Counter()
    for found in json.loads(counts.read_text()).values():
        for end, number in found.items():
            ends[ENDS[end]] += number
    ordered = sorted(ends.items(), key=lambda v: -v[1])
    return ends.total(), ", ".join(f"{what} ({n:,})" for what, n in ordered)


def written() -> str:
    """Return the table as the page has it."""
    return HEAD + "".join(f"| {kind} | {n:,} | {promise} |\n" for kind, n, promise in rows())


def shown(text: str) -> str:
    """Return the table that a page shows."""
    return text[text.index(HEAD) :].partition("\n\n")[0].rstrip() + "\n"


def main(words: list[str]) -> None:
    """Rewrite the page's table."""
    if "--hostile" in words:
        from hostile.test_federations import hunt
        from test_contract import METHODS

        HOSTILE.write_text(json.dumps({name: hunt(name) for name in METHODS}, indent=1) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(text.replace(shown(text), written()))


if __name__ == "__main__":
    main(sys.argv[1:])
