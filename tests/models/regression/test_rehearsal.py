"""The attack on a hospital's own messages recovers rows exactly, and none under the rules."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from site_studies import DISCLOSIVE, HARMLESS, NAME, hospitals

pytest.importorskip("formulae")

import pyrofl
from pyrofl import SiteRules, federations

EXACT = SiteRules(exact_values=True)


def attack(frame, formula, rules=None, **how):
    """Return the recovered rows of a hospital."""
    return pyrofl.rehearse(formula, federations.from_frames({NAME: frame}), rules=rules, **how)


def rows_of(table):
    """Return the recovered values by row."""
    pairs = [
        {k: float(v) for k, v in (one.rsplit(" ", 1) for one in text.split(", "))}
        for text in table["values"]
    ]
    return dict(zip(table["row"], pairs, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_values_of_up_to_three_rows_follow_from_sums(count):
    frame = hospitals()[NAME][["score", "dose", "years"]][:count]
    found = attack(frame, "score ~ dose + years", EXACT)
    rows = rows_of(found[found["source"].str.startswith("sums")])
    assert {*rows} == {*range(1, count + 1)}
    assert all({*values} == {"score", "dose", "years"} for values in rows.values())
    for row, values in rows.items():
        for name, value in values.items():
            assert value == pytest.approx(frame[name].iloc[row - 1], abs=1e-6)


@pytest.mark.parametrize(
    "study",
    [
        *("one row", "two rows", "level of one row", "one event", "one without event"),
        *("flag of one person", "person as dummy", "all persons but one"),
    ],
)
def test_rows_that_rules_protect_are_recovered_without_them(study):
    formula, how, change, _ = DISCLOSIVE[study]
    frame = change(hospitals()[NAME]).reset_index(drop=True)
    found = attack(frame, formula, **how)
    assert len(found) >= 1
    for row, values in rows_of(found).items():
        for name in {*values} & {"age", "score", "died"}:
            assert values[name] == pytest.approx(frame[name].iloc[row - 1], abs=1e-6)


def test_a_difference_of_two_columns_is_a_row():
    frame = hospitals()[NAME]
    found = attack(frame, "score ~ age + {row < 5} + {row < 6}")
    assert found["row"].tolist() == [6]
    assert "without" in found["source"][0]
    values = rows_of(found)[6]
    assert values["score"] == pytest.approx(frame["score"][5], abs=1e-6)
    assert values["age"] == pytest.approx(frame["age"][5], abs=1e-6)


def test_exact_extremes_are_values_of_rows():
    frame = hospitals()[NAME]
    found = attack(frame, "score ~ age", EXACT)
    oldest = found[found["source"] == "largest age"]
    assert rows_of(oldest) == {int(frame["age"].argmax()) + 1: {"age": frame["age"].max()}}
    assert attack(frame, "score ~ age").empty


def test_rows_are_numbered_as_in_the_table():
    frame = hospitals()[NAME]
    frame.loc[[0, 4], "age"] = np.nan
    frame["flag"] = (frame["row"] == 9).astype(int)
    assert attack(frame, "score ~ age + flag")["row"].tolist() == [10]


@pytest.mark.parametrize("study", HARMLESS)
def test_no_row_of_a_harmless_study_is_recovered(study):
    formula, how = HARMLESS[study]
    found = attack(hospitals()[NAME], formula, **how)
    assert isinstance(found, pd.DataFrame)
    assert found.empty
