"""Codes for missing values, copies of rows and features that determine the target."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pyrofl import Federation, datasets, federations
from pyrofl.data.frames import Tables
from pyrofl.data.tables.data_quality import code_warning, spellings
from pyrofl.data.tables.row_checks import is_determined, is_doubled, relation_of, shared_row_warning

RNG = np.random.default_rng(52)
AGES = RNG.normal(60, 15, 300).clip(18, 95).round()
LAB = RNG.lognormal(0, 0.5, 300)
SATURATION = RNG.binomial(5, 0.5, 300) + 94.0
COUNTS = RNG.poisson(RNG.gamma(1.0, 10.0, 300)).astype(float)


def with_code(values, code, count):
    return np.append(values, [float(code)] * count)


@pytest.mark.parametrize(
    ("values", "code", "count"),
    [
        (AGES, -999, 2),
        (AGES, 99, 12),
        (AGES, 999, 2),
        (AGES, -9, 3),
        (AGES, -1, 3),
        (AGES, 888, 2),
        (LAB, 99, 2),
        (LAB, -1, 2),
        (COUNTS, 9999, 2),
        (COUNTS, -9, 2),
        (RNG.integers(0, 2, 90).astype(float), 9, 5),
        (np.repeat([5.0, 6.0], 45), 9, 3),
        (RNG.integers(1, 6, 90).astype(float), 99, 3),
        (RNG.normal(size=90), -999, 2),
        (RNG.normal(size=90), 99, 2),
    ],
)
def test_codes_for_missing_values_are_named(values, code, count):
    values = with_code(values, code, count)
    told = code_warning("a", [values[::3], values[1::3], values[2::3]])
    assert f"column a holds {code} in {count} rows, and otherwise" in told
    assert code_warning("a", [values]) == told


@pytest.mark.parametrize(
    "values",
    [
        AGES,
        LAB,
        COUNTS,
        SATURATION,
        np.append(AGES, 99),
        with_code(RNG.integers(60, 101, 400).astype(float), 99, 5),
        RNG.integers(0, 100, 500),
        RNG.integers(-9, 10, 100),
        RNG.integers(1, 10, 100),
        RNG.integers(0, 10, 100),
        np.arange(1.0, 150),
        RNG.choice([-1.0, 0.0, 1.0], 90),
        RNG.choice([0.0, 99.0], 90),
        RNG.normal(0, 60, 400).round(),
        RNG.poisson(90, 300),
        RNG.integers(1990, 2020, 90),
        np.zeros(20),
        np.full(20, 99.0),
        np.zeros(0),
    ],
)
def test_usual_numbers_are_no_codes(values):
    values = np.asarray(values, float)
    assert code_warning("a", [values[::2], values[1::2]]) == ""


Y = RNG.normal(size=60)


@pytest.mark.parametrize(
    ("feature", "target", "expected"),
    [
        (2 * Y + 1, Y, True),
        ((2 * Y + 1).round(5), Y.round(5), True),
        (-Y, Y, True),
        (np.exp(Y), Y, True),
        (Y**3, Y, True),
        (Y + RNG.normal(0, 0.1, 60), Y, False),
        (AGES[:60], Y, False),
        (np.repeat(np.arange(6.0), 10), np.repeat([3.0, 1, 2, 0, 5, 4], 10), True),
        (np.repeat(np.arange(6.0), 10), np.repeat([1.0, 1, 0, 0, 1, 0], 10), False),
        (np.array(["a", "b", "c"] * 20, object), np.array(["u", "v", "w"] * 20, object), True),
        (np.ones(60), Y, False),
        (np.arange(60.0), RNG.permutation(60) * 1.0, False),
    ],
)
@pytest.mark.parametrize("clients", [1, 7])
def test_features_that_determine_the_target_are_found(feature, target, expected, clients):
    parts = [np.arange(60) % clients == k for k in range(clients)]
    assert is_determined([relation_of(feature[p], target[p]) for p in parts]) == expected


def test_few_rows_determine_nothing():
    assert not is_determined([relation_of(np.arange(4.0), 2 * np.arange(4.0))])
    assert not is_determined([relation_of(Y[:2], Y[2:4]) for _ in range(40)])


def test_copies_of_all_rows_of_a_client_are_found():
    table = [AGES[:30], LAB[:30], Y[:30].round(1), Y[:30] > 0]
    assert not is_doubled(table)
    assert is_doubled([np.tile(column, 2) for column in table])
    grid = [RNG.integers(0, 3, 60), RNG.integers(0, 4, 60), RNG.integers(0, 2, 60)]
    assert not is_doubled([np.tile(column, 2) for column in grid])


def test_values_of_wards_are_no_copies():
    """All columns but a binary response are those of the ward, in each of six rows."""
    ward = np.repeat(np.arange(10), 6)
    lonely = [ward, *(RNG.normal(size=10)[ward] for _ in range(3))]
    assert not is_doubled([*lonely, RNG.integers(0, 2, 60)])


@pytest.mark.parametrize(
    ("words", "alike"),
    [
        (["F", "f", "Weiblich", "M"], [["F", "f", "Weiblich"]]),
        (["female", "male", "w", "m"], [["female", "w"], ["male", "m"]]),
        (["ja", "nein", "yes", "no", "unknown"], [["yes", "ja"], ["no", "nein"]]),
        (["N", "NO", "O", "SO", "S", "SW", "W", "NW"], []),
        (["m", "f", "x"], []),
        (["f", "g", "w"], []),
    ],
)
def test_spellings_of_sex_and_truth(words, alike):
    assert [sorted(group) for group in spellings(words)] == [sorted(group) for group in alike]


def test_new_rows_in_another_unit_are_outliers_and_a_rare_code_is_not(tmp_path):
    rng = np.random.default_rng(0)
    age, chol = rng.normal(60, 8, 200), rng.normal(240, 50, 200)
    dialysis = (np.arange(200) % 25 == 0) * 1.0
    table = {"age": age, "chol": chol, "dialysis": dialysis, "sick": np.array(["n", "y"] * 100)}
    pd.DataFrame(table).to_csv(tmp_path / "t.csv", index=False)
    loaded = datasets.load(f"csv:{tmp_path / 't.csv'}", target="sick", scaling="standardize")
    made = federations.split(loaded, "iid", 2).source.preparation
    rows = {name: table[name][25:50] for name in ("age", "chol", "dialysis")}

    def worst(**changed):
        found = made.find_outlier(made.apply({**rows, **changed}))
        return found and found[1].name

    assert worst() is None
    assert worst(dialysis=np.ones(25)) is None
    assert worst(chol=rows["chol"] / 38.67) == "chol"  # in mmol/l
    assert worst(age=np.append(rows["age"][1:], -999)) == "age"


def federation_of(*parts):
    """Return the columns of clients whose rows [N, C] are given."""
    return {f"c{k}": list(np.asarray(part, float).T) for k, part in enumerate(parts)}


def test_rows_of_two_clients_are_found():
    own = [RNG.normal(size=(40, 3)).round(2) for _ in range(20)]
    assert shared_row_warning(federation_of(*own)) == ""
    some = [*own[:-1], np.concatenate([own[3][:12], own[-1]])]
    assert shared_row_warning(federation_of(*some)).startswith(
        "12 rows of c3 and c19 are equal in all col"
    )
    scattered = [np.concatenate([part, own[k - 1][:5]]) for k, part in enumerate(own)]
    text = shared_row_warning(federation_of(*scattered))
    assert text.startswith("100 rows of several clients, such as c")
    few = [*own[:-1], np.concatenate([own[3][:8], own[-1]])]
    assert shared_row_warning(federation_of(*few)) == ""
    numbered = [np.c_[part, np.arange(len(part)) + 1000 * k] for k, part in enumerate(some)]
    assert shared_row_warning(federation_of(*numbered)) == ""


@pytest.mark.parametrize("clients", [2, 10])
def test_rows_that_are_equal_by_chance_are_not(clients):
    binary = [RNG.integers(0, 2, (60, 5)) for _ in range(clients)]
    assert shared_row_warning(federation_of(*binary)) == ""
    low = [RNG.normal(size=(300, 1)) for _ in range(clients)]
    grades = [(low_ + RNG.normal(size=(300, 8)) / 5).round() for low_ in low]  # that agree
    assert shared_row_warning(federation_of(*grades)) == ""
    time = np.arange(60)
    design = [np.c_[time, time**2, RNG.integers(0, 2, 60)] for _ in range(clients)]
    assert shared_row_warning(federation_of(*design)) == ""
    grid = np.array(np.meshgrid(range(6), range(5))).reshape(2, -1).T
    crossed = [np.c_[grid, RNG.random(30) < 0.1] for _ in range(clients)]
    assert shared_row_warning(federation_of(*crossed)) == ""


@pytest.mark.parametrize("door", ["csv", "arrays", "frames"])
def test_every_door_names_rows_of_two_clients(door, tmp_path):
    frame = pd.DataFrame(RNG.normal(size=(80, 2)).round(3), columns=["age", "wait"])
    frame["home"] = np.repeat(["a", "b"], 40)
    frame = pd.concat([frame, frame[:15].assign(home="b")], ignore_index=True)
    parts = dict(iter(frame.groupby("home")[["age", "wait"]]))
    frame.to_csv(tmp_path / "t.csv", index=False)
    csv = f"csv:{tmp_path / 't.csv'}"
    load = {
        "csv": lambda: datasets.load(csv, target="wait", client_column="home"),
        "frames": lambda: Tables(parts),
        "arrays": lambda: Federation.from_arrays(
            {name: (one[["age"]].to_numpy(), one.wait.to_numpy()) for name, one in parts.items()},
            features=["age"],
        ),
    }[door]
    with pytest.warns(UserWarning, match="15 rows of a and b are equal in all columns") as found:
        load()
    assert sum("rows of a and b" in str(one.message) for one in found) == 1
