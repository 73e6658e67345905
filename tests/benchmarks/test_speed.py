"""The command that times cases: what it measures, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import speed
from cases import CASES
from clients import SETTINGS, sized

DOCS = Path(__file__).parents[2] / "examples" / "docs"


def test_clients_are_as_described():
    assert sized([7] * 30).sizes.tolist() == [7] * 30
    assert SETTINGS["giant"].make().sizes.tolist() == [4000, *(50,) * 99]


def test_turns_are_summarized_without_the_first():
    of = speed.Time
    turns = [(of(9, 9), of(9, 9)), (of(1, 1), of(2, 3)), (of(2, 1), of(6, 3))]
    found = speed.summarized("a", 2, turns)
    assert found == ("a", 2, 1.5, 4.0, 2.5, 2.0, 3.0, 1.0, 3.0, 3.0, 9, 9)
    assert speed.slower([found]) == []
    assert speed.slower([found._replace(cpu_ratio=0.9)]) == ["a (2)"]


def test_every_case_of_the_page_can_be_measured():
    rows = speed.read(DOCS / "speed.csv")
    assert {row.case for row in rows} <= set(CASES)
    assert speed.markdown(speed.worst(rows)) in (DOCS / "speed.md").read_text()


def test_the_worst_case_of_each_method_and_reference_is_shown():
    numbers = {"fedavg-good-two": 1.5, "fedavg-good-even": 5.8, "fedavg-floor": 0.9, "svi": 61.0}
    rows = [speed.Measured(n, 1, 1, 1, 1, 1, 1, 1, 1, v, 1, 1) for n, v in numbers.items()]
    assert [row.case for row in speed.worst(rows)] == ["fedavg-floor", "fedavg-good-two", "svi"]


@pytest.mark.slow
def test_two_checkouts_take_turns_and_a_table_is_continued(tmp_path, capsys):
    words = ["--case", "fedavg-good-two", "--threads", "1", "--turns", "1"]
    words += ["--out", str(tmp_path / "speed.csv"), "--against", str(speed.ROOT)]
    speed.main(words)
    (row,) = speed.read(tmp_path / "speed.csv")
    assert (row.case, row.threads) == ("fedavg-good-two", 1)
    assert row.low <= row.ratio <= row.high
    assert "| fedavg-good-two | 1 |" in (tmp_path / "speed.md").read_text()
    speed.main(words)
    assert "has it" in capsys.readouterr().out
    assert len(speed.read(tmp_path / "speed.csv")) == 1


def test_a_case_that_fails_is_named_and_others_are_measured(tmp_path, capsys, monkeypatch):
    def fails(case: str, *_: object) -> speed.Measured:
        if case == "svi":
            raise ValueError("a process ended with 1")
        return speed.Measured(case, 1, *map(float, range(1, 11)))

    monkeypatch.setattr(speed, "measure", fails)
    words = ["--case", "svi", "--case", "import", "--threads", "1"]
    assert speed.main([*words, "--out", str(tmp_path / "t.csv")]) == 1
    assert "svi: a process ended with 1" in capsys.readouterr().err
    assert [row.case for row in speed.read(tmp_path / "t.csv")] == ["import"]


@pytest.mark.slow
def test_a_process_that_ends_or_is_silent_is_no_answer(monkeypatch):
    with (
        pytest.raises(ValueError, match=r"expected an answer in 300 s: run alone .*nothing"),
        speed.Worker(speed.ROOT, "--worker", "nothing", "1"),
    ):
        pass
    monkeypatch.setattr(speed, "LIMIT", 0.2)
    with (
        pytest.raises(ValueError, match=r"ended with -9; expected an answer in 0\.2 s"),
        speed.Worker(speed.ROOT, "--worker", "svi", "1"),
    ):
        pass


def test_unknown_cases_and_folders_are_refused(tmp_path, capsys):
    for words, message in (
        (["--case", "fast"], "fast"),
        (["--against", str(tmp_path)], "expected a checkout"),
        (["--turns", "0"], "at least 1"),
    ):
        with pytest.raises(SystemExit):
            speed.main(words)
        assert message in capsys.readouterr().err
