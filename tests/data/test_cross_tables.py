"""Cross tables equal those of pandas, and no small cell follows from totals and shown cells."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pandas as pd
import pytest

import pyrofl
from pyrofl.cli.parser import main
from pyrofl.data.tables.cross_tables import describe_cross_table, hidden_cells
from pyrofl.data.tables.table_files import columns_of

RULES = pyrofl.SiteRules()
SIZES = {"bern": 90, "basel": 60, "chur": 45}


def hospitals():
    random, frames = np.random.default_rng(0), {}
    for name, n in SIZES.items():
        columns = {"sex": random.choice(["f", "m"], n), "arm": random.choice(["a", "b", "c"], n)}
        frames[name] = pd.DataFrame(columns).astype(object)
    frames["bern"].loc[:5, "sex"] = None
    return frames


def crossed(frames):
    tables = {name: columns_of(frame) for name, frame in frames.items()}
    entries = describe_cross_table(tables, ("sex", "arm"), RULES)
    return {(one.statistic, one.client): one.value for one in entries}


def test_counts_are_those_of_pandas_on_the_pooled_rows():
    frames = hospitals()
    frames["bern"].loc[:5, "arm"] = ["a"] * 3 + ["b"] * 3
    found = crossed(frames)
    pooled = pd.concat(frames.values(), ignore_index=True)
    for client, frame in {**frames, "all": pooled}.items():
        expected = pd.crosstab(frame["sex"].fillna("missing"), frame["arm"])
        for sex, arm in product(expected.index, expected.columns):
            assert found[f"{sex}, {arm}", client] == expected.loc[sex, arm]
    assert {client for _, client in found} == {*SIZES, "all"}


def test_a_small_cell_is_suppressed_with_three_others_and_in_the_sum():
    frames = hospitals()
    frames["chur"] = pd.DataFrame(
        [("f", "a")] * 9 + [("m", "a")] + [("f", "b")] * 11 + [("m", "b")] * 8,
        columns=["sex", "arm"],
    )
    found = crossed(frames)
    for cell in ("f, a", "m, a", "f, b", "m, b"):
        assert found[cell, "chur"] is None
        assert found[cell, "all"] is None
        assert found[cell, "basel"] > 2
    assert found["f, c", "chur"] == 0


def possible(counts, hidden):
    """Return the values of each hidden cell in all tables with the totals and shown cells."""
    cells = sorted(hidden)
    totals = Counter()
    for cell in cells:
        for line in enumerate(cell):
            totals[line] += counts[cell]
    values = {cell: set() for cell in cells}

    def fill(at, numbers, left):
        if at == len(cells):
            if not any(left.values()):
                for cell, number in zip(cells, numbers, strict=True):
                    values[cell].add(number)
            return
        lines = list(enumerate(cells[at]))
        for number in range(1, min(left[line] for line in lines) + 1):
            fill(at + 1, [*numbers, number], left - Counter(dict.fromkeys(lines, number)))

    fill(0, [], totals)
    return values


def test_no_small_cell_follows_from_totals_and_shown_cells():
    """All tables with the same totals and shown cells, by enumeration."""
    random, protected = np.random.default_rng(1), 0
    for _ in range(150):
        table = random.poisson(random.choice([2, 4]), (random.integers(2, 4), 3))
        counts = {(f"r{i}", f"c{j}"): int(n) for (i, j), n in np.ndenumerate(table) if n}
        hidden = hidden_cells(counts, 3)
        small = {cell for cell, count in counts.items() if count < 3}
        if not small:
            assert hidden == set()
        elif hidden is not None and len(hidden) < 8:
            assert small <= hidden
            values = possible(counts, hidden)
            assert all(len(values[cell]) > 1 for cell in small)
            protected += 1
    assert protected > 60


def test_levels_that_a_description_suppresses_are_one_level():
    """Else their names and counts would follow from the cells: 2 of "x", 9 of "b"."""
    frames = hospitals()
    arms = ["a"] * 25 + ["b"] * 9 + ["x"] * 2
    frames["chur"] = pd.DataFrame({"sex": ["f", "m"] * 18, "arm": arms})
    found = crossed(frames)
    assert not any("x" in statistic for statistic, _ in found)
    assert found["f, rare levels", "chur"] + found["m, rare levels", "chur"] == 11
    assert found["f, a", "chur"] + found["m, a", "chur"] == 25
    for sex in "fm":
        assert found[f"{sex}, rare levels", "bern"] == 0
        assert found[f"{sex}, b", "chur"] is None
        assert found[f"{sex}, b", "all"] is None
        assert found[f"{sex}, b", "basel"] > 2


def test_a_table_of_a_near_copy_is_suppressed(tmp_path, capsys):
    for name, frame in hospitals().items():
        copy = frame.assign(flag=frame["sex"].fillna("f"), sex=frame["sex"].fillna("f"))
        if name == "chur":
            copy.loc[0, "flag"] = {"f": "m", "m": "f"}[copy.loc[0, "sex"]]
        copy.to_csv(tmp_path / f"{name}.csv", index=False)
    assert main(["describe", str(tmp_path), "--cross", "flag,arm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = [line.split() for line in lines if line.startswith("column")]
    cells = [line.split() for line in lines if line.startswith("flag and arm")]
    assert len(cells) == 6
    chur = head.index("chur") - len(head)  # from the right: statistics have blanks
    assert {cell[chur] for cell in cells} == {"-"}


def test_a_table_that_cannot_be_protected_is_suppressed():
    assert hidden_cells({("f", "a"): 2, ("f", "b"): 9}, 3) is None  # one row: cells are totals
    few = {name: frame[:4] for name, frame in hospitals().items()}
    names = {name: frame.assign(arm=range(len(frame))) for name, frame in hospitals().items()}
    for frames in (few, names):
        assert all("rare levels" in statistic for statistic, _ in crossed(frames))


def test_the_command_prints_the_cross_table(tmp_path, capsys):
    for name, frame in hospitals().items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    folder = str(tmp_path)
    assert main(["describe", folder, "--cross", "sex,arm"]) == 0
    printed = capsys.readouterr().out
    assert "sex and arm" in printed
    for words in ("sex", "sex,sex", "sex,arm,age"):
        assert main(["describe", folder, "--cross", words]) == 2
        assert f"--cross is {words!r}; expected two columns" in capsys.readouterr().err
    assert main(["describe", folder, "--cross", "sex,nothing"]) == 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_cell_alone_in_its_column_is_known_from_its_total(count):
    counts = {("f", "a"): 8, ("m", "a"): 9, ("f", "b"): count}
    assert hidden_cells(counts, 3) is None
