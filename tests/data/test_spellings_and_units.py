"""Times, booleans, spellings and units of a user's tables, which must not pass silently."""

from __future__ import annotations

import unicodedata
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from pyrofl import Federation, Preprocessor, datasets, federations
from pyrofl.cli import main
from pyrofl.data import summarize_columns
from pyrofl.data.tables.data_quality import spelling_and_unit_warnings
from pyrofl.data.tables.table_files import columns_of


def split(path, **how):
    how = {"target": "y", "scaling": "standardize", **how}
    return federations.split(datasets.load(f"csv:{path}", **how), "groups")


@pytest.mark.parametrize(
    "times",
    [
        [
            "2026-01-31T9:05",
            "2026-01-31T10:00",
            "2026-01-31 11:00",
            "2026-02-01",
            "2026-02-01T1:00",
        ],
        ["2026-01-31 23:59:59.5", "2026-02-01T00:00:00", "2026-02-01 00:00:00.000000001"],
        ["2026-01-31T11:00+02:00", "2026-01-31T09:30Z", "2026-01-31 10:00+0000"],
        ["9", "10", "100"],
    ],
)
def test_the_last_rows_are_those_with_the_latest_times(tmp_path, times):
    path = tmp_path / "t.csv"
    order = np.random.default_rng(0).permutation(len(times))
    path.write_text("\n".join(["when,a,y", *(f"{times[i]},{i},{i}.5" for i in order)]))
    share = 1 / len(times)
    found = datasets.load(
        f"csv:{path}", target="y", features=["a"], test_last="when", test_fraction=share
    )
    (tested,) = found.x[found.is_test].flatten().tolist()
    latest = len(times) - 1 if not times[1].endswith("00:00:00") else None
    assert tested == latest or (latest is None and tested in (1, 2))


@pytest.mark.parametrize("word", ["2026-02-30", "2026-01-31T25:00", "2026-1-3", "31.01.2026"])
def test_times_that_are_none_are_refused(tmp_path, word):
    path = tmp_path / "t.csv"
    path.write_text(f"when,a,y\n2026-01-01,1,2.5\n{word},2,3.5\n2026-01-02,3,3\n")
    with pytest.raises(
        ValueError, match="in line 3; expected numbers, or dates such as 2026-01-31"
    ):
        datasets.load(f"csv:{path}", target="y", features=["a"], test_last="when")
    path.write_text("when,a,y\n2026-01-01 10:00Z,1,2.5\n2026-01-02,2,3.5\n")
    with pytest.raises(ValueError, match="in line 3; expected a time zone in all rows, or in none"):
        datasets.load(f"csv:{path}", target="y", features=["a"], test_last="when")


def test_booleans_are_alike_in_csv_parquet_and_mixed_folders(tmp_path):
    pytest.importorskip("pyarrow")
    sick = [True, False, True, True, False, False]
    frame = pd.DataFrame({"a": range(6), "flag": sick[::-1], "y": sick})
    (tmp_path / "csv").mkdir()
    (tmp_path / "mixed").mkdir()
    frame.to_csv(tmp_path / "csv" / "one.csv", index=False)
    frame.to_csv(tmp_path / "mixed" / "one.csv", index=False)
    frame.assign(a=frame.a + 10).to_parquet(tmp_path / "mixed" / "two.parquet")
    upper = frame.replace({"y": {True: "TRUE", False: "FALSE"}})
    upper.assign(a=frame.a + 20).to_csv(tmp_path / "mixed" / "three.csv", index=False)
    (2 * frame.a).to_frame().join(frame[["flag", "y"]].astype(int)).to_csv(
        tmp_path / "mixed" / "four.csv", index=False
    )
    for path in ("csv", "mixed/two.parquet", "mixed"):
        found = datasets.load(f"csv:{tmp_path / path}", target="y", scaling="standardize")
        assert found.classes == ("False", "True")
        assert found.y.tolist() == [int(s) for s in sick] * (len(found.y) // 6)
        assert found.recipe.columns == ("a", "flag")
        assert found.x[:6, 1].tolist() == [float(s) for s in sick[::-1]]
        numbers = datasets.load(f"csv:{tmp_path / path}", target="y", likelihood="bernoulli")
        assert numbers.y[:6].tolist() == [float(s) for s in sick]


def test_a_boolean_column_beside_other_numbers_is_no_boolean(tmp_path):
    (tmp_path / "one.csv").write_text("a,y\n1,True\n2,False\n3,True\n4,False\n")
    (tmp_path / "two.csv").write_text("a,y\n1,3\n2,4\n3,5\n4,6\n")
    with pytest.raises(ValueError, match=r"column y holds True or False in one\.csv, and numbers"):
        datasets.load(f"csv:{tmp_path}", target="y")


def test_composed_and_decomposed_letters_are_one_word(tmp_path):
    names = ["Zürich", unicodedata.normalize("NFD", "Zürich")]
    assert len(set(names)) == 2
    rows = [
        f"{names[i % 2]},{i},{'jä' if i % 3 else unicodedata.normalize('NFD', 'jä')}"
        for i in range(12)
    ]
    rows = [*rows, *(f"Bern,{i},nein" for i in range(6))]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([unicodedata.normalize("NFD", "größe") + ",a,y", *rows]))
    found = datasets.load(f"csv:{path}", target="y", client_column="größe", scaling="standardize")
    assert found.group_names == {"größe": ("Bern", "Zürich")}
    assert found.classes == ("jä", "nein")
    words = ["run", "local", "--data", f"csv:{path}", "--target", "y", "--rounds", "1", "--quiet"]
    words += ["--client-column", unicodedata.normalize("NFD", "größe"), "--posterior-draws", "0"]
    assert main([*words, "--held-out", names[1] + ",", "--out", str(tmp_path / "o")]) == 0


@pytest.mark.parametrize(
    ("one", "two"), [("Yes", "yes"), ("New York", "new  york"), ("\uff21\uff22", "AB")]
)
def test_spellings_of_one_word_are_named(tmp_path, one, two):
    path = tmp_path / "t.csv"
    rows = [f"{[one, two, 'other'][i % 3]},{i}.5,{'uv'[i % 2]}" for i in range(18)]
    path.write_text("\n".join(["g,a,y", *rows]))
    with pytest.warns(
        UserWarning, match=rf"column g holds '{one}' and '{two}', .* different groups"
    ):
        datasets.load(f"csv:{path}", target="y", client_column="g", features=["a"])
    with pytest.warns(UserWarning, match=rf"holds '{one}' and '{two}', .* as different classes"):
        datasets.load(f"csv:{path}", target="g", features=["a"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        datasets.load(f"csv:{path}", target="y", features=["a"])


def ward(rng, factor=1.0, offset=0.0, sex="FM", rows=40):
    weight = rng.normal(75, 15, rows) * factor + offset
    return {
        "weight": weight,
        "sex": [sex[i % 2] for i in range(rows)],
        "lab": rng.normal(size=rows),
    }


@pytest.mark.parametrize(
    ("factor", "offset", "told"),
    [
        (88.4, 0.0, r"8\d\.\d times larger"),
        (2.2046, 0.0, r"2\.\d+ times larger"),
        (0.001, 0.0, ".* times smaller"),
    ],
)
def test_clients_with_another_unit_are_named(factor, offset, told):
    rng = np.random.default_rng(1)
    tables = {name: ward(rng) for name in ("Bern", "Genf", "Basel")}
    tables["Lyon"] = ward(rng, factor, offset)
    sums = [
        summarize_columns(table, ["weight", "sex", "lab"], ["sex"]) for table in tables.values()
    ]
    with pytest.warns(UserWarning, match=rf"column weight: the numbers in Lyon are about {told}"):
        Preprocessor.of(sums, names=list(tables))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Preprocessor.of(sums[:3], names=list(tables)[:3])


def test_degrees_fahrenheit_are_named():
    rng = np.random.default_rng(2)
    tables = [{"t": rng.normal(37, 0.6, 50)} for _ in range(3)]
    tables.append({"t": rng.normal(37, 0.6, 50) * 1.8 + 32})
    with pytest.warns(UserWarning, match="column t: the numbers in client 3 are about 2.66 times"):
        Preprocessor.of([summarize_columns(table, ["t"]) for table in tables])


def test_clients_that_truly_differ_are_hardly_ever_named():
    rng, named = np.random.default_rng(3), 0
    for _ in range(200):
        shift, rows = rng.normal(0, 2), int(rng.integers(20, 60))
        clients = [
            {
                "normal": rng.normal(rng.normal(0, 1), 1, rows),
                "shifted": rng.normal(50 + 8 * shift, 10, rows),
                "skewed": rng.lognormal(rng.normal(0, 0.4), 1, rows),
                "count": rng.poisson(rng.gamma(2.0, 5.0), rows),
                "binary": 1.0 * (rng.random(rows) < rng.random()),
                "altitude": np.full(rows, rng.uniform(10, 2000)),
            }
            for _ in range(4)
        ]
        told = [summarize_columns(one, list(one)) for one in clients]
        named += len(spelling_and_unit_warnings(told, "ABCD"))
    assert named <= 0.01 * 200 * 6  # it is 0.4%; some differences look like those of units


def test_spellings_that_differ_between_clients_are_named(tmp_path):
    rng = np.random.default_rng(4)
    sums = [
        summarize_columns(ward(rng, sex=sex), ["weight", "sex"], ["sex"])
        for sex in ("FM", "FM", "fm")
    ]
    told = r"column sex holds 'F' \(in A, B\) and 'f' \(in C\), 'M' \(in A, B\) and 'm' \(in C\)"
    with pytest.warns(UserWarning, match=told):
        Preprocessor.of(sums, names=["A", "B", "C"])
    for name, sex, factor in (("A", "FM", 1.0), ("B", "FM", 1.0), ("C", "fm", 2.2046)):
        frame = pd.DataFrame(ward(rng, factor, sex=sex, rows=150)).assign(y=rng.normal(size=150))
        frame.assign(y=frame.y * factor * 9 + factor * 700).to_csv(tmp_path / f"{name}.csv")
    with pytest.warns(UserWarning, match="column") as found:
        split(tmp_path, features=["weight", "sex"])
    told = " ".join(str(one.message) for one in found)
    assert "'f' (in C)" in told
    assert "column weight: the numbers in C" in told
    assert "column y: the numbers in C are about 2.2" in told


def test_masked_values_are_gaps():
    y = np.arange(4.0)
    x = np.ma.array(np.ones((4, 2)), mask=[[0, 0], [0, 1], [0, 0], [0, 0]])
    with pytest.raises(ValueError, match="ward: x is masked in 1 rows, first in row 1; expected"):
        Federation.from_arrays({"ward": (x, y)})
    with pytest.raises(ValueError, match="ward: y is masked in 2 rows, first in row 0"):
        Federation.from_arrays({"ward": (x.data, np.ma.array(y, mask=[1, 0, 0, 1]))})
    with pytest.raises(ValueError, match="ward: y is masked"):
        Federation.from_arrays(
            {"ward": (x.data, np.ma.array(["a", "b", "a", "b"], mask=[1, 0, 0, 1]))}
        )
    whole = Federation.from_arrays({"ward": (np.ma.array(x.data), np.ma.array(y))})
    assert torch.equal(whole.y, torch.arange(4.0))
    column = columns_of({"a": np.ma.array([1, 2, 3], mask=[0, 1, 0])})["a"]
    assert column.gaps.tolist() == [False, True, False]


GROUPS = ["A", "B", "C"]


def warned(tmp_path, rows, head="g,a,y", **how):
    path = tmp_path / "t.csv"
    path.write_text("\n".join([head, *rows]))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        split(path, **{"client_column": "g", **how})
    return " ".join(str(one.message) for one in found)


LINES = [(GROUPS[i % 3], 20 + (7 * i) % 40, 1.5 * ((11 * i) % 60)) for i in range(60)]
DOUBTFUL = {
    "zero-width space": (
        [f"{g}{chr(0x200B) * (i % 2)},{a},{y}" for i, (g, a, y) in enumerate(LINES)],
        "spellings",
    ),
    "dashes": (
        [f"St{'-' if i % 2 else chr(0x2013)}Lo,{a},{y}" for i, (_, a, y) in enumerate(LINES)],
        "spellings",
    ),
    "initials": (
        [f"{g},{a},{['yes', 'no', 'Y', 'N'][i % 4]}" for i, (g, a, _) in enumerate(LINES)],
        "'Y' and 'yes'",
    ),
    "codes": (
        [f"{g},{-999 if i % 8 == 0 else a},{y}" for i, (g, a, y) in enumerate(LINES)],
        "holds -999 in 8 rows",
    ),
    "a total": (
        [f"{g},{a},{y}" for g, a, y in LINES] + ["Total,2400,2700"],
        "'Total' in a single row",
    ),
    "a slip": (
        [f"{g},{a * 1000 if i == 7 else a},{y}" for i, (g, a, y) in enumerate(LINES)],
        "holds 29000 in line 9",
    ),
    "a slip of the target": (
        [f"{g},{a},{'9e6' if i == 7 else y}" for i, (g, a, y) in enumerate(LINES)],
        "y holds 9e6",
    ),
    "dates": (
        [f"{g},{20260101 + 100 * (i % 12) + i % 28},{y}" for i, (g, _, y) in enumerate(LINES)],
        "look like dates",
    ),
    "codes of its own": (
        [
            f"{g},{a},{('yes', 'no')[i % 2] if g != 'C' else ('ja', 'nein')[i % 2]}"
            for i, (g, a, _) in enumerate(LINES)
        ],
        "in C and no, yes elsewhere",
    ),
}


@pytest.mark.parametrize(("rows", "told"), DOUBTFUL.values(), ids=DOUBTFUL)
def test_cells_that_are_hardly_meant_are_named(tmp_path, rows, told):
    assert told in warned(tmp_path, rows)


def test_row_numbers_and_copies_of_a_file_are_named(tmp_path):
    rows = [f"{g},{i},{a},{y}" for i, (g, a, y) in enumerate(LINES)]
    assert "column patient_id holds a different number" in warned(
        tmp_path, rows, "g,patient_id,a,y"
    )
    (tmp_path / "sites").mkdir()
    for name in "AB":
        (tmp_path / "sites" / f"{name}.csv").write_text((tmp_path / "t.csv").read_text())
    with pytest.warns(UserWarning, match=r"A\.csv and .*B\.csv hold the same rows"):
        datasets.load(f"csv:{tmp_path / 'sites'}", target="y", features=["a"])


def test_a_usual_table_has_no_warning(tmp_path):
    rows = [f"{g},{a},{y}" for g, a, y in LINES]
    assert warned(tmp_path, rows) == ""
    skewed = np.random.default_rng(0).lognormal(0, 1.5, 60)
    assert (
        warned(tmp_path, [f"{g},{x:.4g},{y}" for (g, _, y), x in zip(LINES, skewed, strict=True)])
        == ""
    )
    sparse = [f"{g},{i == 7:d},{y}" for i, (g, _, y) in enumerate(LINES)]
    assert warned(tmp_path, [*sparse, "A,1,3.5"]) == ""


def warnings_of(path, text, **how):
    path.write_text(text)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        datasets.load(f"csv:{path}", target="y", **how)
    return [str(one.message) for one in found]


def lines(names, *columns):
    return "\n".join([names, *(",".join(map(str, row)) for row in zip(*columns, strict=True))])


RNG = np.random.default_rng(4)
NUMBERS = RNG.normal(size=80).round(3)
WARDS = RNG.integers(3, size=80)
RATES = RNG.poisson(1.5, size=80)


@pytest.mark.parametrize(
    ("answer", "y", "found"),
    [
        (NUMBERS, NUMBERS, True),
        (NUMBERS**3, NUMBERS, True),
        (-2 * WARDS, WARDS, True),
        (["abc"[w] for w in WARDS], ["xyz"[w] for w in WARDS], True),
        (NUMBERS > 0, NUMBERS, False),
        (WARDS, RATES, False),
        (np.arange(80), RNG.permutation(80), False),
        ([0, 0, 1, 1], [1, 1, 0, 0], False),
    ],
)
def test_a_feature_that_is_the_target_is_named(tmp_path, answer, y, found):
    other = RNG.normal(size=len(y)).round(4)
    text = [] if np.asarray(answer).dtype.kind != "U" else ["answer"]
    told = warnings_of(tmp_path / "t.csv", lines("a,answer,y", other, answer, y), categories=text)
    assert [t for t in told if "column answer determines the target y: each value" in t] == (
        told if found else []
    )
    assert len(told) == found


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("kind", ["normal", "rounded", "counts", "trials"])
def test_a_table_of_copies_is_named(tmp_path, kind, times):
    """Rows that are equal as they have few different values are none."""
    rng = np.random.default_rng(7)
    x, noise = rng.normal(size=(2, 90))
    group = np.arange(90) % 3
    y = {
        "normal": (x + noise).round(2),
        "rounded": (x + noise).round(1),
        "counts": rng.poisson(2.0, size=90),
        "trials": rng.integers(2, size=90),
    }[kind]
    x = x.round(3) if kind == "normal" else np.arange(90) // 30
    columns = [np.tile(column, times) for column in (group, x, y)]
    told = warnings_of(tmp_path / "t.csv", lines("site,a,y", *columns), client_column="site")
    copied = times > 1 and kind in ("normal", "rounded")
    assert [("test rows equal a training row" in t) for t in told] == [True] * copied
