"""A description by sums equals that of pandas on the pooled rows; small counts are suppressed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pyrofl.cli.parser import main
from pyrofl.data.tables.description import bound_counts, clients_without_moments, describe_tables
from pyrofl.data.tables.table_files import columns_of

SIZES = {"bern": 80, "basel": 35, "chur": 12}


def hospitals(seed=0):
    random, frames = np.random.default_rng(seed), {}
    for k, (name, n) in enumerate(SIZES.items()):
        frame = pd.DataFrame({"age": random.normal(60 + 3 * k, 11, n).round(1)})
        frame["crp"] = random.lognormal(1, 1.2, n).round(2)
        frame["beds"] = 12
        frame["sex"] = random.choice(["f", "m"], n)
        frame.loc[:2, "age"], frame.loc[1, "sex"] = np.nan, None
        frames[name] = frame
    frames["chur"]["sex"] = ["f"] * 5 + ["m"] * 7
    return frames


def described(frames, columns, **how):
    tables = {name: columns_of(frame) for name, frame in frames.items()}
    entries = describe_tables(tables, columns, **how)
    return {(one.column, one.statistic, one.client): one for one in entries}


def test_moments_and_counts_are_those_of_pandas():
    frames = hospitals()
    found = described(frames, ["age", "crp", "beds", "sex"])
    pooled = pd.concat(frames.values(), ignore_index=True)
    for client, frame in {**frames, "all": pooled}.items():
        for name in ("age", "crp", "beds"):
            column = frame[name]
            expected = {"n": column.count(), "mean": column.mean(), "sd": column.std()}
            expected["missing"] = column.isna().sum()
            for statistic, value in expected.items():
                entry = found[name, statistic, client]
                assert entry.value == pytest.approx(value, rel=1e-12, abs=1e-12)
                assert entry.error == 0
        for level, count in frame["sex"].value_counts().items():
            assert found["sex", level, client].value == count
        assert found["sex", "missing", client].value == frame["sex"].isna().sum()


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_those_of_pandas_within_their_stated_error(seed):
    frames = hospitals(seed)
    found = described(frames, ["age", "crp", "beds"])
    for name in ("age", "crp", "beds"):
        shown = [f for client, f in frames.items() if found[name, "mean", client].value is not None]
        pooled = pd.concat(shown, ignore_index=True)
        for statistic, part in {"25 %": 0.25, "median": 0.5, "75 %": 0.75}.items():
            for client, frame in {**frames, "all": pooled}.items():
                entry = found[name, statistic, client]
                if entry.value is not None:
                    assert abs(entry.value - frame[name].quantile(part)) <= entry.error + 1e-9
        sd = pooled[name].std()
        assert found[name, "median", "all"].error <= max(0.25 * sd, 1e-6)


def test_small_counts_are_suppressed_and_do_not_follow_from_totals():
    frames = hospitals()
    frames["bern"]["arm"] = ["z"] * 2 + ["b"] * 30 + ["a"] * 48
    frames["basel"]["arm"], frames["chur"]["arm"] = "a", ["y"] * 2 + ["x"] * 2 + ["a"] * 8
    found = described(frames, ["arm"])
    assert ("arm", "z", "bern") not in found
    assert found["arm", "rare levels", "bern"].value is None
    assert found["arm", "a", "bern"].value == 48
    assert ("arm", "b", "bern") not in found  # else z were the rest of 80
    assert found["arm", "a", "chur"].value == 8  # the others are four rows together
    assert found["arm", "a", "all"].value == 48 + 35 + 8
    assert found["arm", "rare levels", "all"].value is None
    few = {"chur": frames["chur"][:2].assign(age=[50.0, 60.0]), "bern": frames["bern"]}
    found = described(few, ["age"])
    assert found["age", "mean", "chur"].value is None
    assert found["age", "mean", "all"].value == pytest.approx(frames["bern"]["age"].mean())


def test_moments_that_reveal_a_row_are_suppressed():
    frames = hospitals()
    for name, frame in frames.items():
        frame["spike"], frame["event"] = np.arange(len(frame)) % 7, np.arange(len(frame)) % 2
        if name == "basel":
            frame["spike"] = [0.0] * (len(frame) - 1) + [137.25]
            frame["event"] = [1, 1] + [0] * (len(frame) - 2)
    found = described(frames, ["spike", "event"])
    others = pd.concat([frames["bern"], frames["chur"]])
    for name in ("spike", "event"):
        for statistic in ("mean", "sd", "25 %", "median", "75 %"):
            assert found[name, statistic, "basel"].value is None
            assert found["spike", statistic, "bern"].value is not None
        assert found[name, "n", "basel"].value == SIZES["basel"]
        assert found[name, "n", "all"].value == len(others)
        assert found[name, "mean", "all"].value == pytest.approx(others[name].mean())
    entries = describe_tables({n: columns_of(f) for n, f in frames.items()}, ["spike", "age"])
    assert clients_without_moments(entries, [*frames]) == {"spike": ["basel"]}


@pytest.mark.parametrize("cell", ["1e300", "inf", "unknown"])
def test_cells_that_are_no_numbers_are_refused(cell):
    frames = hospitals()
    frames["bern"]["age"] = frames["bern"]["age"].astype(object)
    frames["bern"].loc[5, "age"] = cell
    with pytest.raises(ValueError, match=f"bern: .*column age holds '{cell}'.*expected numbers"):
        described(frames, ["age"])


def test_a_client_is_not_called_as_the_column_of_all_rows():
    frames = hospitals()
    frames["all"] = frames.pop("chur")
    with pytest.raises(ValueError, match=r"a client is called 'all', .*; expected another name"):
        described(frames, ["age"])


def test_reported_counts_have_enough_rows_between_bounds():
    values = np.random.default_rng(0).normal(size=57)
    grid = np.linspace(-4, 4, 801)
    pairs = bound_counts(values, grid, 3)
    counts = [0, *(count for _, count in pairs), len(values)]
    gaps = np.diff(counts)
    assert set(gaps[gaps < 3]) <= {0}
    for place, count in pairs:
        assert count == (values <= grid[place]).sum()


def test_the_command_prints_a_table_and_writes_it(tmp_path, capsys):
    for name, frame in hospitals().items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    assert main(["describe", str(tmp_path), "--columns", "age,sex", "--min-count", "4"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["column", "statistic", "basel", "bern", "chur", "all"]
    assert "± " in said
    assert "- is a number of fewer than 4 rows, or would reveal one" in said
    assert main(["describe", str(tmp_path), "--columns", "age,heigth"]) == 2
    assert "column heigth is missing in basel, bern, chur" in capsys.readouterr().err
