"""No traceback, no wrong number in silence, no hang, no exit code that lies, whatever is given."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from dying import Ended
from hostile import files, flags, images, lines, python, settings, sheets
from hostile.case import BEGIN, REFUSED, Case, contents, met, problems
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as how
from hypothesis.strategies import SearchStrategy

from pyrofl.cli.parser import COMMANDS, STUDIES

KINDS: dict[str, SearchStrategy[Case]] = {
    "whole numbers": flags.whole(),
    "shares": flags.shares(),
    "texts": flags.texts(),
    "places": flags.paths(),
    "lines": lines.lines(),
    "names with numbers": lines.specs(),
    "networks": lines.networks(),
    "runs": files.runs(),
    "settings": settings.settings(),
    "cells": sheets.cells(),
    "tables": sheets.tables(),
    "images": images.images(),
}
SOME, MANY = 18, 200  # examples of a kind in the ordinary suite, and when slow


def meet(kind: str, examples: int) -> Counter[str]:
    """Meet so many inputs of a kind; return how often they ended how."""
    import arviz  # noqa: F401  # which writes into the home folder once a day

    ends: Counter[str] = Counter()

    @how(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind])
    def one(case: Case) -> None:
        end, problem = met(case)
        ends[end] += 1
        assert problem == "", " ".join(case.words)[:500]

    one()
    return ends


def calls() -> Counter[str]:
    """Make all odd calls from Python; return how often they ended how."""
    import arviz  # noqa: F401  # which writes into the home folder once a day

    ends = {case.words[1]: met(case) for case in python.cases()}
    assert not {code: problem for code, (_, problem) in ends.items() if problem}
    return Counter(end for end, _ in ends.values())


def test_all_odd_calls_from_python_are_refused_or_right() -> None:
    assert calls().total() > 1500


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_inputs_end_as_they_must(kind: str) -> None:
    assert meet(kind, SOME).total() > SOME / 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_hostile_inputs_end_as_they_must(kind: str) -> None:
    assert meet(kind, MANY)[REFUSED] > MANY / 9


def test_every_flag_and_setting_has_its_rule() -> None:
    tables = (flags.TEXT, flags.REFUSING, flags.TAKING, flags.SHARES, files.RIGHT, lines.TOGGLES)
    known = " ".join([*(line for table in tables for line in table), *lines.LINES.values()])
    words = {*re.split("[ =~>]", known), *(rule[1] for rule in flags.NUMBERS)}
    some = [row for _, _, rows in COMMANDS.values() for row in rows]
    some += [row for _, rows in STUDIES.values() for row in rows]
    rows = {row.flag for row in some if row.flag.startswith("--")}
    others = {"--question", "--no-figures"}  # which take any text, and no value
    assert rows - words <= {"--config", "--data-dir", "--deterministic", "--rejoin", *others}
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
    case = Case(("run",), told=("--flag",))
    found = problems(case, Ended(codes, told), tmp_path, contents(tmp_path))
    assert problem in found
    assert bool(problem) == bool(found)


def test_the_judge_sees_what_was_written_and_other_numbers(tmp_path) -> None:
    before = contents(tmp_path)
    for name, value in (("out", "nan"), ("like", "2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(f"round,value\n1,{value}\n")
    refused, done = Case(("run",)), Case(("run",), ("done",))
    told = [f"{BEGIN}x; expected y"]
    assert "touched" in problems(refused, Ended([2], told), tmp_path, before)
    assert "scores ['nan']" in problems(done, Ended([0], []), tmp_path, before)
    alike = Case(("run",), ("done",), like=("run",))
    assert "other numbers" in problems(alike, Ended([0, 0], []), tmp_path, before)
