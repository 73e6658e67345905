"""Tables: one file for each site, Parquet, and which rows are for testing."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest
import torch

from pyrofl import datasets, federations
from pyrofl.data.tables.table_files import load_table

GOOD = {
    "lyon.csv": "age,dose,won\n" + "".join(f"{40 + i},{i}.5,{'ny'[i % 2]}\n" for i in range(10)),
    "bern.csv": "won,age,dose\n" + "".join(f"{'yn'[i % 2]},{50 + i},{i}\n" for i in range(5)),
    "graz.csv": "age,dose,won\n77,3,y\n",
}


@pytest.fixture
def sites(tmp_path):
    def write(**changed):
        files = {**GOOD, **{f"{name}.csv": text for name, text in changed.items()}}
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        return f"csv:{tmp_path}"

    return write


def test_every_file_is_a_site(sites):
    """Columns go by their names; a site of one row trains on it."""
    data = datasets.load(sites(), target="won")
    assert data.group_names == {"site": ("bern", "graz", "lyon")}
    assert data.source.features == ("age", "dose")
    assert data.source.summary()["columns in another order"] == "graz.csv, lyon.csv"
    fed = federations.split(data, "groups")
    assert fed.names == ("bern", "graz", "lyon")
    assert [len(rows) for rows in fed.train] == [4, 1, 8]
    assert sorted(fed.x[torch.cat([fed.train[0], fed.test[0]]), 0].tolist()) == [50, 51, 52, 53, 54]


def test_files_are_sites_in_the_order_given(sites):
    folder = sites().removeprefix("csv:")
    path = f"csv:{folder}/lyon.csv,{folder}/graz.csv,{folder}/bern.csv"
    data = federations.split(datasets.load(path, target="won"), "groups", held_out=1)
    assert data.names == ("lyon", "graz", "bern")
    assert data.x[data.train[2]][:, 0].min() >= 50


def test_one_file_with_a_comma_in_its_name_is_one(tmp_path):
    path = tmp_path / "a,b.csv"
    path.write_text(GOOD["lyon.csv"])
    assert datasets.load(f"csv:{path}", target="won").groups == {}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lyon": "age,won\n1,y\n"}, r"lyon.csv \(site lyon\) lacks column dose; expected the col"),
        (
            {"lyon": "age,doses,won\n1,2,y\n"},
            r"\(site lyon\) lacks column dose and has doses instead; .*; did you mean doses\?",
        ),
        (
            {"lyon": "age,dose,won,bmi\n1,2,y,3\n"},
            r"\(site lyon\) has column bmi, which .*bern.csv lacks; expected the columns of",
        ),
        (
            {"lyon": "age,dose,won\n1,low,y\n2,high,n\n"},
            "column dose holds text such as 'low' in lyon.csv, and numbers in bern.csv; expected",
        ),
        (
            {"lyon": GOOD["lyon.csv"].replace("41,", "41 years,")},
            "column age holds '41 years' in line 3 of lyon.csv, and 15 numbers; expected finite",
        ),
        ({"lyon": ""}, "lyon.csv is empty; expected a header and at least one row"),
        ({"lyon": "age,dose,won\n"}, "lyon.csv has a header only; expected a header and at least"),
        (
            {"lyon": "age,age,dose,won\n1,1,2,y\n"},
            "lyon.csv: expected distinct column names, found",
        ),
        ({"lyon": "age;dose;won\n1;2;y\n"}, "lyon.csv: the header has ';' and no comma; expected"),
        (
            {"lyon": 'age,dose,won\n1,"2,5",y\n2,"3,5",n\n'},
            "column dose holds text such as '2,5' in lyon.csv, and numbers in bern.csv",
        ),
        (
            {"lyon": GOOD["lyon.csv"].replace("41,", ",")},
            r"column age lacks 1 of 16 values, first in line 3 of lyon.csv \(''\)",
        ),
    ],
)
def test_a_file_that_is_unlike_the_others_is_named(sites, changed, message):
    path = sites(**changed)
    for prepare in ("none", "standardize"):
        with pytest.raises(ValueError, match=message):
            datasets.load(path, target="won", scaling=prepare)


def test_a_column_that_a_site_never_measured_is_filled_there(sites):
    """Of a column that nobody who trains has measured there is nothing to learn: it is said."""
    asked = {"target": "won", "scaling": "standardize", "missing": "impute"}
    rows = "".join(f"{40 + i},,{'ny'[i % 2]}\n" for i in range(10))
    path = sites(lyon=f"age,dose,won\n{rows}")
    data = federations.split(datasets.load(path, **asked), "groups")
    assert data.source.features == ("age", "dose", "dose is missing")
    lyon = data.x[torch.cat([data.train[2], data.test[2]])]
    assert torch.equal(lyon[:, 1:], torch.tensor([[0.0, 1.0]]).expand(10, 2))
    folder = path.removeprefix("csv:")
    path = f"csv:{folder}/lyon.csv,{folder}/bern.csv"
    data = federations.split(datasets.load(path, **asked), "groups", held_out=1)
    assert data.source.features == ("age",)
    assert "left out: dose (no training row has a value)" in data.overview()["prepared"]


def test_columns_that_nobody_asks_for_may_differ(sites):
    path = sites(lyon="dose,age,won,bmi\n1,2,y,3\n2,3,n,4\n")
    data = datasets.load(path, target="won", features=["dose"])
    assert data.x.flatten().tolist() == [0, 1, 2, 3, 4, 3, 1, 2]


def test_a_byte_order_mark_in_one_file_does_no_harm(sites):
    path = sites(lyon="\ufeff" + GOOD["lyon.csv"])
    assert len(datasets.load(path, target="won").y) == 16


def test_places_without_files_and_names_twice_are_refused(sites, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none is a folder without files; expected \.csv or \.pa"):
        datasets.load(f"csv:{tmp_path}/none", target="won")
    folder = sites().removeprefix("csv:")
    with pytest.raises(ValueError, match="are both called lyon; expected other names"):
        datasets.load(f"csv:{folder}/lyon.csv,{folder}/none/../lyon.csv", target="won")
    with pytest.raises(ValueError, match=r"no\.csv cannot be read as CSV: No such file"):
        datasets.load(f"csv:{folder}/lyon.csv,{folder}/no.csv", target="won")


def test_a_column_of_their_own_may_say_whose_a_row_is(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("site,x,y\np,1,2\nq,2,3\n")
    with pytest.raises(
        ValueError, match=r"have a column site, .*; expected --client-column site to use"
    ):
        datasets.load(f"csv:{tmp_path}", target="y")
    data = datasets.load(f"csv:{tmp_path}", target="y", client_column="site")
    assert data.group_names == {"site": ("p", "q")}


def test_decimal_commas_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,z,y\n" + "".join(f'"{i % 2},5",{i},{i}\n' for i in range(9)))
    told = "column x holds '0,5' in line 2; expected a full stop before decimals, as in 1.5"
    for more in ({}, {"scaling": "standardize"}, {"features": ["x"]}):
        with pytest.raises(ValueError, match=told):
            datasets.load(f"csv:{path}", target="y", **more)
    assert datasets.load(f"csv:{path}", target="y", features=["z"]).x.shape == (9, 1)


def test_text_of_many_words_is_no_category(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("name,x,y\n" + "".join(f"u{i},{i},{i}\n" for i in range(9)))
    data = datasets.load(f"csv:{path}", target="y", scaling="standardize")
    assert data.source.left_out == {"name": "text such as 'u0'"}
    with pytest.raises(ValueError, match="name holds text such as 'u0'; expected numbers as featu"):
        datasets.load(f"csv:{path}", target="y", scaling="standardize", features=["name"])
    with pytest.raises(ValueError, match="categories are y; expected names of features"):
        datasets.load(f"csv:{path}", target="y", categories=["y"])


def test_the_last_rows_of_each_site_are_tested(tmp_path):
    path = tmp_path / "t.csv"
    days = [
        f"{g},{(7 * i) % 10},2026-01-{10 + (7 * i) % 10},{(i + (g == 'b')) % 4}"
        for g in "ab"
        for i in range(10)
    ]
    path.write_text("\n".join(["g,day,date,y", *days]))
    for column in ("day", "date"):
        asked = {"target": "y", "client_column": "g", "features": ["day"], "test_last": column}
        data = federations.split(datasets.load(f"csv:{path}", **asked, test_fraction=0.3), "groups")
        for train, test in zip(data.train, data.test, strict=True):
            assert sorted(data.x[test].flatten().tolist()) == [7, 8, 9]
            assert len(train) == 7
    with pytest.raises(
        ValueError, match="test_column is 'g' and test_last 'day'; expected only one of"
    ):
        datasets.load(f"csv:{path}", target="y", test_last="day", test_column="g")


def test_bad_columns_of_test_rows_and_of_time_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,part,when,y\n" + "".join(f"{i},maybe,{i}/1/26,{i}\n" for i in range(5)))
    with pytest.raises(ValueError, match="part holds 'maybe' in line 2; expected test or train, 1"):
        datasets.load(f"csv:{path}", target="y", test_column="part")
    with pytest.raises(ValueError, match="when holds '0/1/26' in line 2; expected numbers, or dat"):
        datasets.load(f"csv:{path}", target="y", test_last="when")
    with pytest.raises(ValueError, match=r"unknown column in .*: 'time'; expected one of x, part"):
        datasets.load(f"csv:{path}", target="y", test_last="time")


def test_parquet_is_read_as_csv_is(tmp_path):
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame(
        {
            "age": np.arange(6, dtype=np.int32),
            "chol": [1.5, None, 3.25, 0.1, 5, 6],
            "fit": [True, False, True, True, False, True],
            "kind": pd.Categorical(list("uvuvuv")),
            "won": list("nynyny"),
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    frame.astype({"fit": int}).to_csv(tmp_path / "t.csv", index=False)
    found = [
        datasets.load(
            f"csv:{tmp_path}/t.{kind}", target="won", missing="impute", scaling="standardize"
        )
        for kind in ("csv", "parquet")
    ]
    assert torch.equal(found[0].x.nan_to_num(-7), found[1].x.nan_to_num(-7))
    assert found[0].source.features == ("age", "chol", "fit", "kind")
    with pytest.raises(
        ValueError, match=r"t.parquet: column chol lacks 1 of 6 values, .* in row 2"
    ):
        datasets.load(f"csv:{tmp_path}/t.parquet", target="won")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"bad.parquet cannot be read as Parquet: "):
        load_table(f"{tmp_path}/bad.parquet")


def test_without_pyarrow_one_line_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    for name in ("pyarrow", "fastparquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ValueError, match=r"expected pip install -e '\.\[tables\]' in the clone, or a CSV"
    ):
        load_table(str(path))


def test_hidden_files_are_no_sites_and_names_may_be_in_capitals(tmp_path):
    (tmp_path / "lyon.CSV").write_text(GOOD["lyon.csv"])
    (tmp_path / "bern.csv").write_text(GOOD["bern.csv"])
    (tmp_path / "._bern.csv").write_bytes(b"\0\5\x16\7")  # as macOS leaves it
    data = datasets.load(f"csv:{tmp_path}", target="won")
    assert federations.split(data, "groups").names == ("bern", "lyon")
