"""The order of categories is declared, or that of whole numbers: never that of the alphabet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import pyrofl
from pyrofl import Federation, federations
from pyrofl.cli import main
from pyrofl.data.frames import Tables
from pyrofl.experiments.regressions import with_levels

WORDS = ["low", "mid", "high"]


def tables(change: Any = lambda frame: frame) -> Tables:
    rng = np.random.default_rng(1)
    found = {}
    for name in "ab":
        x = rng.normal(size=60)
        y = np.digitize(1.5 * x + rng.logistic(size=60), [-1.0, 1.0])
        found[name] = change(pd.DataFrame({"x": x, "y": y}))
    return federations.from_frames(found)


def words(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(y=[WORDS[k] for k in frame.y])


def declared(categories: list[Any], ordered: bool = True) -> Any:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        return words(frame).assign(y=pd.Categorical(words(frame).y, categories, ordered=ordered))

    return change


def answers(data: Tables, family: str = "cumulative") -> tuple[Any, ...]:
    return pyrofl.regression("y ~ x", data, family=family).design.answers


def test_ordinal_text_without_an_order_is_refused_with_the_line_that_declares_it() -> None:
    line = (
        r"response y holds text, whose order is unknown; declare it: frame\['y'\] = "
        r"pd.Categorical\(frame\['y'\], \[LOWEST, ..., HIGHEST\], ordered=True\)"
    )
    for change in (words, lambda frame: words(frame).astype({"y": "category"})):
        with pytest.raises(ValueError, match=line):
            answers(tables(change))
    numbers = tables(lambda frame: frame.assign(y=(frame.y + 9).astype(str)))  # "10" < "9"
    with pytest.raises(ValueError, match=r"frame\['y'\] = frame\['y'\].astype\(int\)$"):
        answers(numbers)
    with pytest.raises(ValueError, match=r"a: response y is 0\.5; expected whole numbers, or"):
        answers(tables(lambda frame: frame.assign(y=frame.y + 0.5)))


def test_declared_order_is_that_of_integers() -> None:
    data = tables(declared(WORDS))
    assert answers(data) == tuple(WORDS)
    one, other = (
        pyrofl.regression("y ~ x", some, family="cumulative").prepare(some).y
        for some in (tables(), data)
    )
    assert one.tolist() == other.tolist()
    with pytest.warns(
        UserWarning, match="not marked as ordered; their declared order is used: low"
    ):
        assert answers(tables(declared(WORDS, ordered=False))) == tuple(WORDS)


def test_gaps_of_ordinal_integers_and_unused_levels_are_said() -> None:
    gapped = tables(lambda frame: frame.assign(y=frame.y.replace({2: 3})))
    with pytest.warns(UserWarning, match="response y holds 0, 1, 3, with gaps: the model has"):
        assert answers(gapped) == (0, 1, 3)
    with pytest.warns(UserWarning, match="no row has vast of response y: only priors place"):
        assert answers(tables(declared([*WORDS, "vast"]))) == (*WORDS, "vast")


@pytest.mark.parametrize("ordered", [True, False])
def test_declared_categories_are_honored_in_all_families(ordered: bool) -> None:
    assert answers(tables(declared(WORDS, ordered)), "categorical")[0] == "low"

    def mortality(frame: pd.DataFrame) -> pd.DataFrame:
        y = np.where(frame.y > 0, "alive", "dead")
        arm = pd.Categorical(np.where(frame.x > 0, "drug", "placebo"), ["placebo", "drug", "none"])
        y = pd.Categorical(y, ["dead", "alive"], ordered=ordered)
        return frame.assign(alive=(frame.y > 0) * 1.0, y=y, arm=arm, x=frame.x**2)

    data = tables(mortality)
    method = pyrofl.regression("y ~ x + arm", data, family="bernoulli")
    assert method.design.answers == ("dead", "alive")
    assert method.design.terms == ["x", "arm[drug]"]  # the level that no row has is left out
    expected = np.concatenate([frame.alive for frame in data.frames.values()])
    assert method.prepare(data).y.tolist() == expected.tolist()


def test_categories_declared_in_different_ways_are_refused() -> None:
    frames = tables(declared(WORDS, ordered=False)).frames
    frames["b"] = declared(WORDS[::-1], ordered=False)(tables().frames["b"])
    with pytest.raises(ValueError, match="categories of column y are declared in different ways"):
        answers(federations.from_frames(frames), "categorical")


def test_an_order_that_contradicts_categories_in_the_alphabet_is_refused() -> None:
    frames = tables(declared(sorted(WORDS), ordered=False)).frames
    frames["b"] = declared(WORDS, ordered=False)(tables().frames["b"])
    with pytest.raises(ValueError, match="categories of column y are declared in different ways"):
        answers(federations.from_frames(frames), "categorical")
    frames["a"] = words(tables().frames["a"])  # text declares no order
    assert answers(federations.from_frames(frames), "categorical") == tuple(WORDS)


def test_classes_of_a_federation_have_the_order_of_numbers_or_of_classes() -> None:
    x = np.random.default_rng(0).normal(size=(24, 1))
    y = np.arange(24) % 12

    def of(classes: Any, labels: Any) -> Any:
        sites = {name: (pd.DataFrame(x, columns=["x"]), labels) for name in "ab"}
        data = Federation.from_arrays(sites, classes=classes)
        return pyrofl.regression("y ~ x", data, family="cumulative").design.answers

    assert of(12, y) == tuple(range(12))
    with pytest.warns(UserWarning, match="declared order is used: low < mid < high"):
        assert of(WORDS, y % 3) == tuple(WORDS)
    with pytest.raises(ValueError, match="response y holds text, whose order is unknown"):
        of(None, np.array(WORDS)[y % 3])


@pytest.mark.slow
def test_the_command_line_declares_levels(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    frames = tables(words).frames
    pd.concat([frame.assign(site=name) for name, frame in frames.items()]).to_csv("t.csv")
    line = ["regress", "y ~ x", "--data", "csv:t.csv", "--client-column", "site", "--out", "r"]
    line += ["--family", "cumulative", "--quiet", "--posterior-draws", "400"]
    assert main(line) == 2
    assert "--levels y=LOWEST,...,HIGHEST, with high, low, mid in" in capsys.readouterr().err
    for levels, told in (
        ("y=low,mid", "a: column y holds high, which is no level of --levels; expected one of"),
        ("y=low", "expected COLUMN=LEVEL,LEVEL,... with two or more levels"),
        ("z=low,mid", "unknown column of --levels: 'z'; expected one of (column 1), x, y, site\n"),
        ("=low,mid", "--levels is '=low,mid'; expected COLUMN=LEVEL,LEVEL,..."),
        ("y=low,mid,low", "--levels gives low twice; expected each level of y once"),
    ):
        assert main([*line, "--levels", levels]) == 2
        assert told in capsys.readouterr().err
    assert main([*line, "--levels", "y=low,mid,high"]) == 0
    assert pd.read_csv("r/estimates.csv").set_index("parameter")["mean"]["b[x]"] > 1.0


def test_truth_values_can_be_levels_of_the_command_line() -> None:
    frames = {"a": pd.DataFrame({"ill": [True, False]}), "b": pd.DataFrame({"ill": [True, True]})}
    found = with_levels(frames, ("ill=True,False",))
    assert [list(frame["ill"].cat.codes) for frame in found.values()] == [[0, 1], [0, 0]]


def test_two_clients_of_one_value_in_the_client_column_are_refused() -> None:
    frames = tables(lambda frame: frame.assign(ward="w")).frames
    text = "column ward is 'w' at a and b; expected another value at each client"
    with pytest.raises(ValueError, match=text):
        pyrofl.regression("y ~ x + (1 | ward)", federations.from_frames(frames), client="ward")
