"""No traceback, no wrong number in silence, no hang, no exit code that lies, whatever is given."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from dying import Ended
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
from hostile.case import BEGIN, DONE, REFUSED, Case, contents, met, named, problems
from hypothesis import Phase, given
from hypothesis import settings as how
from hypothesis import strategies as st

from pyrofl.cli.parser import COMMANDS, FLOWER

COUNTS = Path(__file__).with_name("table.json")
PARTS = {
    part.__name__.rpartition(".")[2]: part
    for part in (flags, specs, lines, settings, sheets, questions, images, python, predictions)
} | {"servers": servers}
SOME = 18  # cases of a part that the ordinary suite meets
drawn = how(max_examples=SOME, deadline=None, derandomize=True, phases=[Phase.generate])


@cache
def cases(part: str) -> tuple[Case, ...]:
    return tuple(PARTS[part].cases())


def every() -> Iterator[Case]:
    for part in PARTS:
        yield from cases(part)


def wrong(part: str) -> dict[str, str]:
    return {case.id: problem for case in cases(part) if (problem := met(case)[1])}


def test_all_odd_calls_from_python_are_refused_or_right() -> None:
    import arviz  # noqa: F401  # which writes into the home folder once a day

    assert not wrong("python")


@pytest.mark.parametrize("part", sorted(PARTS.keys() - {"python"}))
def test_hostile_inputs_end_as_they_must(part: str) -> None:
    @drawn
    @given(st.sampled_from(cases(part)))
    def meet(case: Case) -> None:
        assert met(case)[1] == "", case.id

    meet()


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(PARTS.keys() - {"python"}))
def test_all_hostile_inputs_end_as_they_must(part: str) -> None:
    assert not wrong(part)


# Texts that nobody wrote down: they are refused, or happen to be right.

TEXTS = st.text(max_size=30).map(lambda text: text.replace("\0", "0"))
FLAGS = sorted({*flags.WHOLE, *flags.SHARES, *flags.TEXT} - {"--data", "--case", "--by", "--until"})


def flag_of(word: str, value: str) -> Case:
    base = flags.TEXT.get(word, ((*flags.RUN, *flags.SCHOOLS), ()))[0]
    words = (*base, "--out", "out", *flags.given(word, value))
    return Case(f"{word}={named(value)}", "flag", words, (DONE, REFUSED), make=flags.places)


def cell_of(place: str, value: str) -> Case:
    column, asked = sheets.PLACES[place]
    quoted = value.replace('"', '""')
    content = sheets.text({column: f'"{quoted}"'})
    words = sheets.asked(asked)
    return Case(
        f"{place} {named(value)}", "csv", words, (DONE, REFUSED), (), sheets.making(content)
    )


KINDS: dict[str, tuple[Callable[[str, str], Case], st.SearchStrategy[str]]] = {
    "flag": (flag_of, st.sampled_from(FLAGS)),
    "cell": (cell_of, st.sampled_from(sorted(sheets.PLACES))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_is_refused_or_right(kind: str) -> None:
    make, where = KINDS[kind]

    @drawn
    @given(where, TEXTS)
    def meet(place: str, value: str) -> None:
        assert met(make(place, value))[1] == "", value

    meet()


@drawn
@given(st.sampled_from(settings.known()), TEXTS)
def test_any_text_of_a_setting_is_refused_or_right(which: tuple[str, str], value: str) -> None:
    case = settings.of(*which, value, (DONE, REFUSED), told=False)
    assert met(case)[1] == "", value


def test_the_table_is_long_and_no_two_are_called_alike() -> None:
    kinds = Counter(case.kind for case in every())
    assert kinds.total() >= 1500
    assert not [name for name, n in Counter(case.id for case in every()).items() if n > 1]
    for kind, ends in counted().items():  # with a new method there are more than were counted
        assert sum(ends.values()) <= kinds[kind], f"{kind}: run tests/fault_table.py --inputs"


def counted() -> dict[str, dict[str, int]]:
    """Return how many of each kind ended how, when they were last counted."""
    known: dict[str, dict[str, int]] = json.loads(COUNTS.read_text())
    return known


def count() -> None:
    """Meet all cases, and write how many of each kind ended how."""
    ends: dict[str, Counter[str]] = {}
    for case in every():
        end, problem = met(case)
        ends.setdefault(case.kind, Counter())[end] += 1
        print(f"{case.id}: {problem[:700]}\n" if problem else "", end="", flush=True)
    told = {kind: dict(sorted(found.items())) for kind, found in ends.items()}
    COUNTS.write_text(json.dumps(told, indent=1) + "\n")


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
    case = Case("one", "flag", ("run",), told=("--flag",))
    found = problems(case, Ended(codes, told), tmp_path, contents(tmp_path))
    assert problem in found
    assert bool(problem) == bool(found)


def test_the_judge_sees_what_was_written_and_other_numbers(tmp_path) -> None:
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
