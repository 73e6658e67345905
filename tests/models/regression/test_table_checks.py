"""Units, spellings, codes and copies in tables of regressions."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations
from pyrofl.cli import main


def hospitals(rows=(30, 12, 45, 9), **columns):
    """Return tables of hospitals; columns are functions of a generator and the table."""
    rng = np.random.default_rng(5)
    frames = {}
    for name, n in zip(["Basel", "Bern", "Genf", "Lyon"], rows, strict=True):
        creatinine = rng.lognormal(0.1, 0.35, n).round(2)
        frame = pd.DataFrame({"creatinine": creatinine, "age": rng.normal(60, 12, n).round()})
        frame["sex"] = rng.choice(["F", "M"], n)
        frame["y"] = (0.75 * creatinine + rng.normal(0, 0.3, n)).round(3)
        for column, change in columns.items():
            frame[column] = change(rng, name, frame)
        frames[name] = frame
    return frames


def told(frames, formula="y ~ creatinine + age + sex + (1 | client)", **how):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pyrofl.regression(formula, federations.from_frames(frames), **how)
    return [str(one.message) for one in found]


def in_lyon(column, change):
    """Return a column that is changed in Lyon."""

    def values(rng, name, frame):
        return change(frame[column]) if name == "Lyon" else frame[column]

    return {column: values}


DOUBTFUL = {
    "units of a predictor": (
        in_lyon("creatinine", lambda v: 88.42 * v),
        "column creatinine: the numbers in Lyon are about",
    ),
    "units of the response": (in_lyon("y", lambda v: 1000 * v), "column y: the numbers in Lyon"),
    "spellings": (
        in_lyon("sex", lambda v: v.replace({"F": "f"})),
        "column sex holds 'F' (in Basel, Bern, Genf) and 'f' (in Lyon)",
    ),
    "words of another language": (
        in_lyon("sex", lambda v: v.replace({"F": "Weiblich"})),
        "'F' (in Basel, Bern, Genf) and 'Weiblich' (in Lyon)",
    ),
    "codes": (
        {"age": lambda rng, name, f: f["age"].where(np.arange(len(f)) % 9 > 0, -999)},
        "column age holds -999 in",
    ),
    "a single cell": (
        {"age": lambda rng, name, f: f["age"].mask((f.index == 3) & (name == "Genf"), -999)},
        r"column age holds -999 in row 4 of Genf, from which nearly all its variance comes (the",
    ),
    "codes at the end of the range": (
        {"age": lambda rng, name, f: f["age"].clip(18, 94).where(np.arange(len(f)) % 7 > 0, 99)},
        "column age holds 99 in",
    ),
    "numbers with decimal commas": (
        {"age": lambda rng, name, f: f["age"].map(lambda v: f"{v:.1f}".replace(".", ","))},
        "column age holds text that reads as numbers, such as",
    ),
    "dates": (
        {"age": lambda rng, name, f: [f"{1 + k % 28:02d}.03.2024" for k in range(len(f))]},
        "column age holds text that reads as dates, such as '01.03.2024', and counts as 28",
    ),
    "a function of the response": (
        {"age": lambda rng, name, f: 2 * f["y"] + 1},
        "column age determines the target y",
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_doubtful_columns_are_named(name):
    columns, text = DOUBTFUL[name]
    assert any(text in one for one in told(hospitals(**columns))), told(hospitals(**columns))


def test_usual_tables_and_unused_columns_have_no_warning():
    assert told(hospitals()) == []
    unused = hospitals(
        other=lambda rng, name, f: 88.42 * f["creatinine"] if name == "Lyon" else f["creatinine"],
        mixed=lambda rng, name, f: pd.Series([1, "a"] * len(f), dtype=object)[: len(f)],
        day=lambda rng, name, f: pd.Timestamp("2026-01-31"),
    )
    assert told(unused) == []


def test_text_that_is_declared_as_categories_or_has_a_code_has_no_such_warning():
    def names(form):
        return {"age": lambda rng, name, f: [form.format(k % 20) for k in range(len(f))]}

    def all_of(formula, form="{}", change=lambda v: v):
        frames = hospitals(**names(form))
        for frame in frames.values():
            frame["age"] = change(frame["age"])
        return [text for text in told(frames, formula) if "that reads as" in text]

    assert len(all_of("y ~ age")) == 1
    assert all_of("y ~ C(age)") == all_of("y ~ creatinine + (1 | age)") == []
    assert all_of("y ~ age", "{:03d}") == all_of("y ~ age", "w{}") == []
    assert all_of("y ~ age", change=lambda v: v.astype("category")) == []


def test_numbers_in_a_column_of_objects_are_numbers():
    frames = hospitals(age=lambda rng, name, f: f["age"].astype(object))
    frames["Bern"].loc[2, "age"] = None
    with pytest.warns(UserWarning, match="1 of 96 rows are dropped"):
        method = pyrofl.regression("y ~ age + sex", federations.from_frames(frames))
    assert method.design.terms == ["age", "sex[M]"]


def test_two_names_that_are_one_as_text_are_refused():
    frame = hospitals()["Bern"]
    with pytest.raises(ValueError, match="two clients are called 1; expected names that differ"):
        federations.from_frames({1: frame, "1": frame})
    twice = pd.concat([frame, frame[["age"]]], axis=1)
    with pytest.raises(ValueError, match="a has two columns of one name, age; expected"):
        federations.from_frames({"a": twice})


def test_units_of_offsets_and_trials_are_compared():
    frames = hospitals(
        months=lambda rng, name, f: rng.uniform(1, 9, len(f)) * (365.25 if name == "Genf" else 12),
        deaths=lambda rng, name, f: rng.poisson(2.0, len(f)),
    )
    found = told(frames, "deaths ~ creatinine + offset(log(months))", family="poisson")
    assert any("column months: the numbers in Genf are about" in one for one in found)


def test_copies_of_rows_are_named():
    frames = hospitals()
    frames["Bern"] = pd.concat([frames["Bern"]] * 2, ignore_index=True)
    with pytest.warns(UserWarning, match="nearly all rows of Bern occur twice or more"):
        federations.from_frames(frames)
    frames["Bern"] = frames["Genf"].copy()
    with pytest.warns(UserWarning, match="Bern and Genf hold the same rows"):
        federations.from_frames(frames)


def test_names_of_clients_that_differ_in_case_are_named():
    frames = hospitals()
    frames["bern"] = frames.pop("Basel")
    assert any("'Bern' and 'bern'" in one for one in told(frames))


@pytest.mark.parametrize(
    ("names", "close"), [({"age": "Age"}, "Age"), ({"age": " age"}, "' age'"), ({"y": "Y"}, "Y")]
)
def test_headers_that_differ_in_blanks_or_case_are_proposed(names, close):
    frames = {name: frame.rename(columns=names) for name, frame in hospitals().items()}
    with pytest.raises(ValueError, match=f"did you mean {close}[?]"):
        pyrofl.regression("y ~ age", federations.from_frames(frames))
    frames = hospitals() | {"Lyon": frames["Lyon"]}
    with pytest.raises(ValueError, match=f"missing at Lyon; .*; did you mean {close}[?]"):
        pyrofl.regression("y ~ age", federations.from_frames(frames))


def test_on_the_command_line(tmp_path, capsys):
    """Columns that the formula does not use may hold anything."""
    change = in_lyon("creatinine", lambda v: 88.42 * v)
    patient = {"patient": lambda rng, name, f: [*map(str, range(len(f) - 1)), "12a"]}
    (tmp_path / "sites").mkdir()
    for name, frame in hospitals(**change, **patient).items():
        frame.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    words = ["regress", "y ~ creatinine", "--data", f"csv:{tmp_path / 'sites'}", "--rounds", "1"]
    words += ["--posterior-draws", "50", "--quiet", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "column creatinine: the numbers in Lyon are about" in capsys.readouterr().err
    assert main([*words[:1], "y ~ patient", *words[2:]]) != 0
    assert "holds '12a' in line" in capsys.readouterr().err


def test_whole_numbers_are_the_same_levels_in_columns_of_integers_and_of_decimals():
    random = np.random.default_rng(0)
    frames = {
        name: pd.DataFrame(
            {
                "y": random.normal(size=8),
                "ward": pd.Series(random.permutation([1, 2, 3, 1, 2, 3, 1, 2])).astype(kind),
            }
        )
        for name, kind in {"Basel": int, "Bern": float}.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method = pyrofl.regression("y ~ C(ward)", federations.from_frames(frames))
    assert method.priors().count("C(ward)") == 2


def test_ranks_of_tables_are_those_of_the_prepared_rows():
    random = np.random.default_rng(0)
    frames = {
        name: pd.DataFrame({"x": random.normal(size=n), "y": random.normal(size=n)})
        for name, n in {"a": 9, "b": 1, "c": 5}.items()
    }
    tables = pyrofl.federations.from_frames(frames)
    method = pyrofl.regression("y ~ x", tables)
    how = {"rounds": 1, "replications": 3, "draws": 5, "bins": 2}
    found, expected = (
        pyrofl.checks.sbc(method, data, **how).ranks for data in (tables, method.prepare(tables))
    )
    assert found.equals(expected)
