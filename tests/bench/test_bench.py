"""The other sides of the benchmarks do the same work, and the command says what it measured."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from pyrofl.bench import command, measuring, one_by_one, worker
from pyrofl.bench.children import child, lines
from pyrofl.bench.federations import equal, images
from pyrofl.bench.image_cases import IMAGES
from pyrofl.bench.loop_cases import LOOPS
from pyrofl.bench.measuring import Measured, Told, alternate
from pyrofl.bench.personal_cases import PERSONAL
from pyrofl.bench.worker import CASES, QUICK, Task
from pyrofl.cli.parser import main
from pyrofl.data import Federation, datasets
from pyrofl.partitions import federations


@pytest.fixture(scope="module")
def digits() -> Federation:
    return federations.split(datasets.load("digits"), "slices:5", clients=8, test="labels_global")


def test_pyro_svi_learns_on_every_client(digits):
    rounds = one_by_one.svi(digits, steps=20, lr=0.5, scale=0.05)
    for _ in range(5):
        weight = next(rounds)
    rows = digits.pooled_test
    assert rows is not None
    right = ((digits.x[rows].flatten(1) @ weight.T).argmax(1) == digits.y[rows]).float().mean()
    assert right > 0.7


def test_federations_are_as_described():
    assert images(None, flat=True, clients=20).clients == 20
    assert images(None, flat=False, clients=20).x.shape[1:] == (1, 28, 28)
    data = equal(30, 7)
    assert data.sizes.tolist() == [7] * 30


def test_sides_take_turns():
    calls: list[str] = []
    found = alternate("a", lambda: calls.append("o"), lambda: calls.append("x"), 3)
    assert "".join(calls) == "oxoxoxox"
    assert found.low <= found.ratio <= found.high
    with pytest.raises(ValueError, match="turns is 0; expected a whole number of at least 1"):
        alternate("a", list, list, 0)


def test_growth_is_measured_against_its_base():
    found = measuring.clients(1, (10, 20))
    assert [row.case for row in found] == ["clients=10", "clients=20"]
    assert (found[1].ratio, found[1].low) == (1.0, 1.0)


def test_memory_is_measured_in_a_process_of_its_own():
    (peak,) = measuring.memory(300, (100,), limit=0)
    assert (peak.clients, peak.chunk) == (300, 100)
    assert 0 < peak.mib < 2000
    assert peak.state_mib == pytest.approx(300 * 4 * (79_510 + 1_010 + 1) / 2**20)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    out = tmp_path / "bench"
    assert (
        main(["bench", "--quick", "--case", "fedavg-good-two", "--threads", "1", "--out", str(out)])
        == 0
    )
    with open(out / "bench.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row) == list(Measured._fields)
    assert float(row["low"]) <= float(row["ratio"]) <= float(row["high"])
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"{float(row['cpu_ratio']):.4f}")
    assert (out / "ratios.png").exists()
    assert "| fedavg-good-two | 1 |" in (out / "bench.md").read_text()


def test_an_unknown_case_is_refused(tmp_path, capsys):
    assert main(["bench", "--case", "fast", "--out", str(tmp_path / "b")]) == 2
    assert "case is 'fast'; expected one of pfedvem-authors-slices" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_every_case_says_what_it_compares():
    assert {*QUICK, *PERSONAL, *IMAGES, *LOOPS} <= set(CASES)
    for case in CASES.values():
        assert getattr(case.sides, "func", case.sides).__doc__.startswith("Put ")
        assert case.target is None or case.target > 0


def test_a_child_that_waits_is_killed_and_told_where_it_was(tmp_path):
    program = tmp_path / "sleeper.py"
    program.write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    heard: list[str] = []
    told = lines("a sleeper", [sys.executable, str(program)], 0.6, heard.append, beat=0.2)
    assert next(told) == "begun"
    where = rf"a sleeper was silent for 0.6 s and was killed, at {program}:3; expected it to end"
    with pytest.raises(ValueError, match=where):
        next(told)
    assert re.match(r"a sleeper has run \d+ s", heard[0])


def test_a_child_that_fills_its_streams_asks_or_leaves_others_behind_is_not_waited_for():
    full = "import sys; [s.write('x' * 10**6) for s in (sys.stdout, sys.stderr)]"
    assert len(child("much", [sys.executable, "-c", full])) == 10**6 + 1  # a line
    with pytest.raises(ValueError, match=r"a question ended with 1: EOFError"):
        child("a question", [sys.executable, "-c", "input()"])
    assert child("a parent", ["sh", "-c", "sleep 60 & echo 7"], limit=5) == "7\n"


def test_a_case_that_fails_is_told_and_the_others_are_measured(tmp_path, capsys, monkeypatch):
    def one(name: str, task: Task, tell: object) -> list[Measured]:
        if name == "svi":
            raise ValueError("svi was silent")
        return [Measured(name, task.threads, *map(float, range(10)))]

    monkeypatch.setattr(command, "measured", one)
    words = ["bench", "--turns", "2", "--out", str(tmp_path), "--threads"]
    cases = [word for name in ("svi", "import") for word in ("--case", name)]
    assert main([*words, "1", *cases]) == 3
    assert "bench ended before all was measured: svi was silent" in capsys.readouterr().err
    assert main([*words, "2", "--resume", "--case", "import"]) == 0
    with open(tmp_path / "bench.csv", newline="") as file:
        found = [(row["case"], row["threads"]) for row in csv.DictReader(file)]
    assert found == [("import", "1"), ("import", "2")]
    assert main(["bench", "--turns", "3", "--out", str(tmp_path), "--resume"]) == 2
    assert "turns is 3 and was 2" in capsys.readouterr().err


def test_a_worker_whose_parent_is_gone_ends_at_its_next_turn(monkeypatch, capsys):
    parents = iter((7, 7, 1, 1))

    def turns(name: str, task: Task, tell: Told) -> list[Measured]:
        for turn in range(3):
            tell(f"turn {turn}")
        return []

    monkeypatch.setattr(worker.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(worker, "rows", turns)
    with pytest.raises(SystemExit, match="nobody waits for this"):
        worker.work("svi", Task(1, 1, None, None))
    assert capsys.readouterr().out == "turn 0\nturn 1\n"


def test_the_page_on_speed_has_the_table_of_its_csv():
    docs = Path(__file__).parents[2] / "examples" / "docs"
    assert command.markdown(command.read(docs / "speed.csv")) in (docs / "speed.md").read_text()
