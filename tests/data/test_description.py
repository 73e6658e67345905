"""A description by sums equals that of pandas on the pooled rows; small counts are suppressed."""

from __future__ import annotations

import re
from itertools import combinations_with_replacement, product

import numpy as np
import pandas as pd
import pytest
from hospitals import written
from messy_files import COLUMNS, correct_tables, write_messy
from messy_files import SIZES as MESSY_SIZES

import pyrofl
from pyrofl.cli.parser import main
from pyrofl.data.tables.description import (
    bound_counts,
    clients_without_moments,
    describe_tables,
    table_rows,
)
from pyrofl.data.tables.near_copies import near_copies
from pyrofl.data.tables.table_files import columns_of

RULES = pyrofl.SiteRules()
SIZES = {"bern": 80, "basel": 35, "chur": 12}


def hospitals(seed=0):
    random, frames = np.random.default_rng(seed), {}
    for k, (name, n) in enumerate(SIZES.items()):
        frame = pd.DataFrame({"age": random.normal(60 + 3 * k, 11, n).round(1)})
        frame["crp"] = random.lognormal(1, 1.2, n).round(2)
        frame["beds"] = 12
        frame["sex"] = random.choice(["f", "m"], n)
        frame.loc[:2, "age"], frame.loc[:2, "sex"] = np.nan, None
        frames[name] = frame
    frames["chur"]["sex"] = ["f"] * 5 + ["m"] * 7
    return frames


def described(frames, columns, rules=RULES):
    tables = {name: columns_of(frame) for name, frame in frames.items()}
    entries = describe_tables(tables, columns, rules).entries
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
    assert ("arm", "a", "chur") not in {k for k, e in found.items() if e.value is not None}
    assert found["arm", "a", "all"].value is None  # else two levels of at most two rows were four
    frames["chur"]["arm"] = ["y"] + ["x"] * 2 + ["a"] * 9
    found = described(frames, ["arm"])
    assert found["arm", "a", "chur"].value == 9
    assert found["arm", "a", "all"].value == 48 + 35 + 9
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
    entries = describe_tables(
        {n: columns_of(f) for n, f in frames.items()}, ["spike", "age"], RULES
    ).entries
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
    (tmp_path / "rules.toml").write_text("min-level-rows = 4\n")
    words = ["describe", str(tmp_path), "--rules", str(tmp_path / "rules.toml")]
    assert main([*words, "--columns", "age,sex"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["column", "statistic", "basel", "bern", "chur", "all"]
    assert "± " in said
    assert "- is a number of fewer than 4 rows, or would reveal one" in said
    assert main(["describe", str(tmp_path), "--columns", "age,heigth"]) == 2
    said = capsys.readouterr()
    assert "3 problems in 3 files; expected none" in said.err
    assert re.search(r"bern.csv +heigth +is missing +add it", said.out)


NUMBERS = np.random.default_rng(5).normal(60, 11, 40).round(1)
ATTACKED = {  # cells of a column at one hospital
    "one row": [61.5],
    "two rows": [61.5, 48.0],
    "three equal rows": [7.0] * 3,
    "four equal rows": [7.0] * 4,
    "four equal words": ["ill"] * 4,
    "three words": ["ill", "ill", "well"],
    "one event": [1] + [0] * 39,
    "one without event": [0] + [1] * 39,
    "two events as words": ["yes"] * 2 + ["no"] * 38,
    "one word of three levels": ["a"] * 20 + ["b"] * 19 + ["c"],
    "two levels of two": ["a"] * 20 + ["b"] * 2 + ["c"] * 2,
    "two levels of one": ["a"] * 20 + ["b"] + ["c"],
    "zeros but for 2, 1, 1": [0] * 37 + [2, 1, 1],
    "zeros but for 3, 2, 1, 1": [0] * 36 + [3, 2, 1, 1],
    "one outlier": [*NUMBERS[:-1], 1e5],
    "two outliers": [*NUMBERS[:-2], 1e5, -1e5],
    "six numbers": [*NUMBERS[:6]],
    "nine numbers": [*NUMBERS[:9]],
    "identifiers": [f"person {k // 3}" for k in range(150)],
    "notes": ["see the letter of his doctor; " * 4] * 5 + ["none"] * 35,
    "three values among gaps": [50.0, 55.5, 61.0] + [np.nan] * 37,
    "two words among gaps": ["ill", "ill"] + [None] * 38,
}


def rows_from_counts(cells, values):
    """Return levels of one or two rows that printed counts give, with the total."""
    levels = sorted({str(cell) for cell in cells})
    shown = {level: values[level] for level in levels if values.get(level) is not None}
    hidden = [level for level in levels if level not in shown]
    counts = [level for level, count in shown.items() if 0 < count < 3]
    rest = len(cells) - sum(shown.values())
    largest = [*range(1, 3)] if all(cells.count(level) < 3 for level in hidden) else [*range(1, 60)]
    if len(hidden) < 4:  # every way to divide the rest among the hidden levels
        ways = [w for w in product(largest, repeat=len(hidden)) if sum(w) == rest]
        counts += [hidden[k] for k in range(len(hidden)) if len({w[k] for w in ways}) == 1]
    return [level for level in counts if cells.count(level) < 3]


def rows_from_moments(cells, values):
    """Return the rows that mean and sd give, if all others have the most frequent number."""
    if values["mean"] is None:
        return []
    usual = max(set(cells), key=cells.count)
    sums = [values["mean"] * len(cells) - usual * len(cells)]
    sums += [values["sd"] ** 2 * (len(cells) - 1) + sums[0] ** 2 / len(cells)]
    steps = [k for k in range(-4, 5) if k]
    ways = [
        way
        for count in range(1, 5)
        for way in combinations_with_replacement(steps, count)
        if np.allclose([sum(way), sum(k * k for k in way)], sums, atol=1e-6)
    ]
    few = [way for way in ways if min(map(way.count, way)) < 3]
    return list(few[0]) if len(ways) == 1 and few else []


def rows_from_quantiles(cells, found):
    """Return the smallest and the largest number if an end of a printed interval is beside it."""
    ends = []
    for statistic in ("25 %", "median", "75 %"):
        if (one := found["secret", statistic, "bern"]).value is not None:
            ends += [one.value - one.error, one.value + one.error]
    near = 0.05 * np.std(cells)
    return [x for x in (min(cells), max(cells)) if any(abs(x - end) <= near for end in ends)]


@pytest.mark.parametrize("kind", ATTACKED)
def test_a_description_reveals_no_row(kind):
    """Attacks on what is printed of one column, by one who knows the number of rows."""
    cells = ATTACKED[kind]
    frames = {"bern": pd.DataFrame({"secret": cells})}
    whole = cells if isinstance(cells[0], str) else [*NUMBERS]
    frames["basel"] = pd.DataFrame({"secret": [*dict.fromkeys(map(str, whole))] * 9})
    frames["basel"] = (
        frames["basel"] if isinstance(cells[0], str) else pd.DataFrame({"secret": NUMBERS})
    )
    found = described(frames, ["secret"])
    values = {s: e.value for (_, s, client), e in found.items() if client == "bern"}
    filled = [cell for cell in cells if cell is not None and cell == cell]
    if isinstance(cells[0], str):
        assert len(filled) < 5 or rows_from_counts(filled, values) == []
        assert not [name for name, n in values.items() if n and len(name) > 80]
        assert kind != "identifiers" or set(values.values()) <= {0, None}
    else:
        assert rows_from_moments(filled, values) == []
        assert len(set(filled)) < 3 or rows_from_quantiles(filled, found) == []
    if len(filled) < 5:
        assert not {n for n in values.values() if n is not None and n > 0}
        pooled = frames["basel"]["secret"]
        of_all = {s: e.value for (_, s, client), e in found.items() if client == "all"}
        assert of_all.get("n") in (None, len(pooled))


def test_messy_files_are_described_as_their_correct_rows(tmp_path, capsys):
    """By separator, decimal mark, headers and levels of the dictionary, as the check proposes."""
    tables = correct_tables()
    write_messy(tmp_path / "files")
    thun = (tmp_path / "files/thun.csv").read_bytes()
    (tmp_path / "files/thun.csv").write_bytes(thun.replace(b"F,", b"unbekannt,", 1))
    used = {"age": COLUMNS["age"], "sex": COLUMNS["sex"]}
    entries = {"formula": "age ~ sex", "columns": used, "unit": "hospital"}
    study = written(tmp_path, entries)
    words = ["describe", str(tmp_path / "files"), "--study", str(study.file)]
    assert main([*words, "--na", "unbekannt"]) == 0
    said = capsys.readouterr().out
    lines = {tuple(line.split()[:2]): line.split()[2:] for line in said.splitlines()}
    assert lines["column", "statistic"] == [*sorted(MESSY_SIZES), "all"]
    for place, name in enumerate(sorted(MESSY_SIZES)):
        age, sex = tables[name]["age"], tables[name]["sex"]
        if name == "thun":
            sex = sex.where(sex.index != sex[sex == "f"].index[0])
        mean = f"{age.mean():.4g}" if len(age) > 4 else "-"
        assert lines["age", "mean"][place] == mean
        if len(age) > 4:
            assert lines["sex", "f"][place] == str((sex == "f").sum())
    assert "luzern.csv: age is called 'Age'" in said
    assert "thun.csv: sex counts Weiblich as f, F as f, M as m" in said
    assert "basel.csv: separator ';', encoding utf-8, decimal mark ','" in said
    assert main(["describe", str(tmp_path / "files"), "--columns", "creatinine"]) == 0
    study = written(tmp_path, entries | {"columns": COLUMNS, "formula": "creatinine ~ age"})
    assert main(words) == 2
    said = capsys.readouterr()
    assert "convert it from mg/dL to umol/L, and rename it creatinine" in said.out
    assert "1 problem in 7 files" in said.err


@pytest.mark.parametrize("seed", range(40))
def test_a_printed_quantile_is_within_its_printed_error(seed):
    """By both usual definitions, for numbers of any size, spread and rounding."""
    random = np.random.default_rng(seed)
    scale, shift = 10.0 ** random.integers(-6, 7), random.choice([0, 1, -50, 1e4])
    draws = [random.normal, random.lognormal, random.uniform, random.standard_cauchy]
    frames = {}
    for name in ("bern", "basel", "chur")[: random.integers(1, 4)]:
        values = draws[random.integers(4)](size=random.integers(5, 120))
        values = values.round(random.integers(0, 4)) if random.integers(2) else values
        frames[name] = pd.DataFrame({"x": scale * (shift + values)})
    entries = describe_tables({n: columns_of(f) for n, f in frames.items()}, ["x"], RULES).entries
    means = {e.client: e.value for e in entries if e.statistic == "mean"}
    sds = {e.client: e.value for e in entries if e.statistic == "sd"}
    shown = [frame for name, frame in frames.items() if means[name] is not None]
    frames["all"] = pd.concat(shown or [*frames.values()])
    parts = {"25 %": 0.25, "median": 0.5, "75 %": 0.75}
    for row in table_rows(entries, [*frames][:-1]):
        for client, cell in zip(frames, row[2:], strict=True):
            if row[1] in parts and "±" in cell:
                number, error = map(float, cell.split(" ± "))
                values = frames[client]["x"]
                for method in ("inverted_cdf", "linear"):
                    exact = np.quantile(values, parts[row[1]], method=method)
                    assert abs(number - exact) <= error, (client, cell, exact)
                assert error <= 1.1 * sds[client] + 1e-3 * abs(number)


def test_few_missing_values_are_suppressed_and_do_not_follow():
    """Not from n, counts of levels and "all", with the number of rows."""
    for missing in range(5):
        frames = hospitals()
        for name, frame in frames.items():
            frame["lab"], frame["ward"] = (
                np.arange(len(frame)) % 5.0,
                ["a", "b"] * 6 + ["a"] * (len(frame) - 12),
            )
            if name == "basel":
                frame.loc[: missing - 1, ["lab", "ward"]] = None
        found = described(frames, ["lab", "ward"])
        for name in ("lab", "ward"):
            expected = missing if missing in (0, 3, 4) else None
            assert found[name, "missing", "basel"].value == expected
            assert found[name, "missing", "all"].value == expected
        for client, rows in (("basel", 35), ("all", sum(SIZES.values()))):
            n = found["lab", "n", client]
            assert n.error == (missing in (1, 2))
            assert abs(n.value - (rows - missing)) <= n.error
        if missing in (1, 2):  # either number is possible
            n = found["lab", "n", "basel"]
            assert n.value - n.error <= 33
            assert n.value + n.error >= 34
            counts = [e.value for (c, s, k), e in found.items() if c == "ward" and k == "basel"]
            assert counts.count(None) > 2  # missing, rare levels, and the smaller level


LAB = np.random.default_rng(3).normal(100, 20, 12).round()
FLAG = np.array([1.0] * 5 + [0.0] * 7)
PAIRS = {  # a column, and one that differs from it in one or two rows
    "a copy with a gap": (LAB, np.where(np.arange(12) == 4, np.nan, LAB)),
    "another unit with a gap": (LAB, np.where(np.arange(12) == 4, np.nan, (LAB / 18).round(1))),
    "a correction": (LAB, np.where(np.arange(12) < 2, LAB + 30, LAB)),
    "nested flags": (FLAG, np.where(np.arange(12) == 0, 0.0, FLAG)),
    "opposite flags": (FLAG, np.where(np.arange(12) == 0, 1.0, 1 - FLAG)),
    "words": (FLAG, np.where(np.where(np.arange(12) == 0, 0, FLAG) > 0, "yes", "no")),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_columns_that_differ_in_few_rows_are_not_both_described(kind):
    one, other = PAIRS[kind]
    random = np.random.default_rng(0)
    tables = {
        "bern": pd.DataFrame({"one": one, "other": other}),
        "chur": pd.DataFrame({"one": one, "other": random.permutation(one)}),
    }
    if kind == "words":
        tables["chur"]["other"] = np.where(tables["chur"]["other"] > 0, "yes", "no")
    result = describe_tables({n: columns_of(f) for n, f in tables.items()}, ["one", "other"], RULES)
    assert result.near_copies == {"bern": {"other": "one"}}
    found = {(e.column, e.statistic, e.client): e.value for e in result.entries}
    assert found["one", "mean", "bern"] == pytest.approx(one.mean())
    for statistic in ("mean", "sd", "median", "yes", "no"):
        assert found.get(("other", statistic, "bern")) is None
    if kind != "words":
        assert found["other", "mean", "all"] == pytest.approx(tables["chur"]["other"].mean())


def test_other_columns_are_no_near_copies():
    """Equal, constant, correlated and independent ones, and those that differ in more rows."""
    random = np.random.default_rng(0)
    x = random.normal(60, 10, 300)
    flags = random.integers(0, 2, (4, 300))
    table = {"x": x, "same": x, "unit": 0.1 * x, "noisy": x + random.normal(0, 3, 300)}
    table |= {"beds": np.full(300, 12.0), "three": np.where(np.arange(300) < 3, 0.0, x)}
    table |= {f"flag {k}": flag for k, flag in enumerate(flags)}
    table |= {"rare": np.arange(300) < 4, "other rare": np.arange(300) > 295}
    table |= {"word": ["a", "b", "c"] * 100, "beds with gap": [np.nan] + [12.0] * 299}
    assert near_copies(columns_of(pd.DataFrame(table)), 3) == {}
    table["late"] = np.where(np.arange(300) == 299, 0.0, x)
    assert near_copies(columns_of(pd.DataFrame(table)), 3) == {"late": "x"}


def write(folder, **texts):
    """Write files by name; return their paths."""
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text)
    return [str(folder / f"{name}.csv") for name in texts]


def rows_of(header, count=12, separator=","):
    lines = [separator.join(str(50 + (7 * k + 3 * j) % 40) for j in range(2)) for k in range(count)]
    return "\n".join([header, *lines]) + "\n"


def test_headers_that_are_nearly_alike_are_described_and_others_named(tmp_path, capsys):
    """In several paths: by case and blanks in one line, a misspelt one as left out."""
    paths = write(tmp_path, x=rows_of("Age , creatinine"), y=rows_of("age;creatinin", 12, ";"))
    assert main(["describe", *paths]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Age +mean +\d", printed)
    assert "y.csv: Age is called 'age'" in printed
    assert "x.csv: left out, as not in most files: creatinine (nearly creatinin)" in printed
    assert main(["check", *paths]) == 2
    assert "creatinin (nearly creatinine)" in capsys.readouterr().out
    paths = write(tmp_path, x=rows_of("sbp,note"), y=rows_of("age,weight"))
    for command in ("describe", "check"):
        assert main([command, ",".join(paths)]) == 2
        assert "have no column that most of them have" in capsys.readouterr().out


@pytest.mark.parametrize(
    "cells",
    [["-9"] * 3, ["<5"] * 30, ["1e301"] * 30, ["low"] * 30],
    ids=["code", "limit", "large", "word"],
)
def test_columns_that_the_check_questions_are_named_without_their_cells(cells, tmp_path, capsys):
    lines = ["crp,age", *(f"{k + 2},{50 + k}" for k in range(20)), *(f"{w},50" for w in cells)]
    (path,) = write(tmp_path, bern="\n".join(lines) + "\n")
    assert main(["describe", path]) == 0
    printed = capsys.readouterr().out
    assert "crp: pyrofl check lists 1 problem in bern.csv" in printed
    assert "age: pyrofl" not in printed
    if cells[0] != "low":
        assert cells[0] not in printed.split("crp: pyrofl")[1]
    assert main(["check", path]) == 2
    assert re.search(r"bern.csv +crp ", capsys.readouterr().out)


def test_a_file_or_a_client_is_described_once(tmp_path, capsys):
    (path,) = write(tmp_path, bern=rows_of("age,crp"))
    assert main(["describe", path, path]) == 2
    assert f"{path} is named twice; expected each file once" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (other,) = write(tmp_path / "other", bern=rows_of("age,crp", 14))
    assert main(["describe", path, other]) == 2
    assert "are both of client bern; expected other names" in capsys.readouterr().err
