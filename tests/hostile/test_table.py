"""No traceback, no wrong number in silence, no hang, no exit code that lies: a table of inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from dying import Nursery
from hostile import flags, predictions, servers, settings
from hostile.case import BEGIN, Case, contents, problems
from hostile.table import TABLE, WAITING, counted, met

from pyrofl.cli.parser import COMMANDS, FLOWER


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Fork children that have imported everything."""
    made = Nursery()
    yield made
    made.close()


def given() -> list[Any]:
    """Return the cases; the ordinary suite runs a tenth."""
    found = []
    for case in TABLE:
        marks = [] if case.every_day else [pytest.mark.slow]
        if case.id in WAITING:
            marks.append(pytest.mark.xfail(reason=WAITING[case.id], strict=True))
        found.append(pytest.param(case, id=case.id, marks=marks))
    return found


@pytest.mark.parametrize("case", given())
def test_it_ends_as_it_must(case: Case, nursery: Nursery) -> None:
    assert met(case, nursery)[1] == ""


def test_the_table_is_long_and_no_two_are_called_alike() -> None:
    assert len(TABLE) >= 1500
    assert not [name for name, n in Counter(case.id for case in TABLE).items() if n > 1]
    assert {case.id for case in TABLE} >= WAITING.keys()
    kinds = Counter(case.kind for case in TABLE)
    for kind, ends in counted().items():  # with a new method there are more than were counted
        assert sum(ends.values()) <= kinds[kind], f"{kind}: run tests/fault_table.py --inputs"


def test_every_flag_and_setting_has_its_rule() -> None:
    rows = [row for _, _, some in COMMANDS.values() for row in some]
    words = {row[0].partition(" ")[0] for row in rows if row[0].startswith("--")}
    known = {*flags.WHOLE, *flags.SHARES, *flags.TEXT, *flags.TOGGLES, *flags.OTHERS}
    known |= set(predictions.FLAGS)
    assert words <= known
    rows = [row for _, some in FLOWER.values() for row in some]
    assert {row[0].partition(" ")[0] for row in rows if row[0].startswith("--")} == servers.FLAGS
    lacking = [n for m, n in settings.known() if (m, n) not in settings.OTHERS]
    assert set(lacking) <= settings.KINDS.keys()


@pytest.mark.parametrize(
    ("codes", "told", "problem"),
    [
        ([0], [f"{BEGIN}x; expected y"], "done; expected refused"),
        ([1], ["Traceback (most recent call last):"], "code 1; expected refused; a Traceback"),
        ([2], [], "0 lines"),
        ([2], [f"{BEGIN}--flag is 3; expected 4", "more"], "2 lines"),
        ([2], [f"{BEGIN}--flag is 3"], "no word of what was expected"),
        ([2], [f"{BEGIN}it is 3; expected 4"], "no word of ['--flag']"),
        ([2], [f"{BEGIN}--flag; expected \x1b[2J"], "a line that cannot be printed"),
        ([2], [f"{BEGIN}--flag; expected {'x' * 2000}"], "a line of 2032 characters"),
        ([-14], [], "hung"),
        ([2], [f"{BEGIN}--flag is 3; expected 4"], ""),
    ],
)
def test_the_judge_sees_what_is_wrong(tmp_path, codes, told, problem) -> None:
    from dying import Ended

    case = Case("one", "flag", ("run",), told=("--flag",))
    found = problems(case, Ended(codes, told), tmp_path, contents(tmp_path))
    assert problem in found
    assert bool(problem) == bool(found)


def test_the_judge_sees_what_was_written_and_other_numbers(tmp_path) -> None:
    from dying import Ended

    before = contents(tmp_path)
    for name, value in (("out", "nan"), ("like", "2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"round,value\n1,{value}\n")
    refused, done = Case("one", "flag", ("run",)), Case("two", "flag", ("run",), ("done",))
    told = [f"{BEGIN}x; expected y"]
    assert "touched" in problems(refused, Ended([2], told), tmp_path, before)
    assert "scores ['nan']" in problems(done, Ended([0], []), tmp_path, before)
    alike = Case("three", "flag", ("run",), ("done",), like=("run",))
    assert "other numbers" in problems(alike, Ended([0, 0], []), tmp_path, before)
