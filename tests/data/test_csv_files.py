"""CSV files: columns, gaps, classes and test rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.data.loaders.csv_files import codes_of, draw_test_rows
from pyrofl.data.loaders.datasets import load
from pyrofl.partitions.federations import split

ROWS = """site,species,mass,length,rank,note
10,cat,4.5,40,1,
9,dog,20,90,2,old
10,cat,3.5,38,2,
9,dog,25,95,1,
10,dog,18,80,3,fat
9,cat,4,41,1,
"""


@pytest.fixture
def table(tmp_path):
    def write(text=ROWS, name="pets.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return f"csv:{path}"

    return write


def test_text_gives_classes_and_numbers_features(table):
    data = load(table(), target="species", client_column="site")
    assert data.name == "pets"
    assert data.classes == ("cat", "dog")
    assert data.y.tolist() == [0, 1, 0, 1, 1, 0]
    assert data.likelihood == "categorical"
    assert data.x.dtype == torch.float32
    torch.testing.assert_close(data.x[0], torch.tensor([4.5, 40, 1]))
    assert data.group_names == {"site": ("9", "10")}
    assert data.groups["site"].tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("column", ["mass", "length"])
def test_numbers_beyond_single_precision_are_no_text(table, column):
    """One is named with its line; a whole column is refused with what is wrong with it."""
    header, *lines = [line.split(",") for line in ROWS.strip().splitlines()]
    at = header.index(column)
    for some in (lines[2:3], lines):
        rows = [list(line) for line in lines]
        for line in rows[2:3] if len(some) == 1 else rows:
            line[at] += "e40"
        text = "\n".join(",".join(line) for line in (header, *rows))
        with pytest.raises(ValueError, match=rf"column {column} holds '.*e40' in line .*3\.4e\+38"):
            load(table(text), target="mass", features=["length"], likelihood="normal:1.0")
    with pytest.raises(ValueError, match=rf"{column} holds '.*e40' in line 2; .*3\.4e\+38: use a"):
        load(table(text), target="mass")


def test_decimal_commas_of_the_target_are_refused(table):
    text = (
        ROWS.replace("4.5", '"4,5"')
        .replace("3.5", '"3,5"')
        .replace("20,", '"20,0",')
        .replace("25,", '"25,0",')
    )
    with pytest.raises(ValueError, match=r"mass holds '4,5' in line 2; expected a full stop"):
        load(table(text), target="mass", features=["length"], likelihood="normal:1.0")


def test_a_number_is_a_response(table):
    data = load(table(), target="mass", features=["length"])
    assert data.classes == ()
    assert data.likelihood == "normal:learned"
    torch.testing.assert_close(data.y, torch.tensor([4.5, 20, 3.5, 25, 18, 4]))
    assert data.x.shape == (6, 1)
    assert data.groups == {}


def test_integers_are_classes_if_the_likelihood_says_so(table):
    data = load(table(), target="rank", features=["mass"], likelihood="categorical")
    assert data.classes == ("1", "2", "3")
    assert data.y.tolist() == [0, 1, 1, 0, 2, 0]
    counts = load(table(), target="rank", features=["mass"], likelihood="poisson")
    assert counts.likelihood == "poisson"
    assert counts.y.tolist() == [1, 2, 2, 1, 3, 1]


def test_features_keep_their_order(table):
    data = load(table(), target="species", features=["length", "mass"])
    torch.testing.assert_close(data.x[0], torch.tensor([40, 4.5]))


def test_spaces_blank_lines_and_a_byte_order_mark_do_no_harm(table):
    data = load(table("\ufeffx, y\n1, 2\n\n3, 4\n"), target="y")
    assert data.y.tolist() == [2, 4]
    assert data.x.tolist() == [[1], [3]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "target is missing; expected one of site, species"),
        ({"target": "specie"}, "unknown column in .*'specie'; did you mean species"),
        (
            {"target": "mass", "client_column": "zone"},
            "unknown column in .*'zone'; expected one of site",
        ),
        ({"target": "mass", "features": ["wings"]}, "unknown column in .*'wings'"),
        ({"target": "mass", "features": ["species"]}, "column species holds text"),
        (
            {"target": "mass", "features": ["mass"]},
            "features are mass; expected at least one column",
        ),
        ({"target": "note"}, "column note lacks 4 of 6 values"),
        ({"target": "mass", "features": ["note"]}, "column note holds text such as 'old'"),
        (
            {"target": "mass", "features": ["rank", "rank"]},
            "features are rank, rank; expected distinct",
        ),
        ({"target": "mass", "features": []}, "features are ; expected at least one column"),
        (
            {"target": "site", "client_column": "site"},
            "target and client column are both site; expected two different",
        ),
        (
            {"target": "mass", "missing": "mode"},
            "missing is 'mode'; expected one of error, drop, i",
        ),
        ({"target": "mass", "client_column": "note"}, "column note lacks 4 of 6 values"),
        (
            {"target": "mass", "likelihood": "categorical"},
            "column mass holds numbers with decimals",
        ),
        (
            {"target": "species", "likelihood": "normal"},
            "column species holds text such as 'cat'; expected numbers for normal",
        ),
        (
            {"target": "mass", "likelihood": "norml"},
            "unknown likelihood 'norml'; did you mean normal",
        ),
    ],
)
def test_refuses_arguments(table, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(table(), **arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n,3\n,4\n", "column a lacks 2 of 3 values"),
        ("a,b\nnan,2\n1,3\n", "column a lacks 1 of 2 values"),
        ("a,b\n1,2,3\n", "line 2 has 3 cells; expected 2, as in the header"),
        ("a,b\n\n1,2\n\n3\n", "line 5 has 1 cells; expected 2"),
        ('a,b\n1,"2\n3"\n4\n', "line 4 has 1 cells; expected 2"),
        ('a,b\n"1,2\n', "cannot be read as CSV after line 1: unexpected end of data"),
        ("", "is empty; expected a header and at least one row"),
        ("a,b\nx,y\na,b\nz,y\n", "line 3 repeats the header; expected it in line 1 only"),
        ("a,b\n1,x\0\n", "line 2 holds a zero byte; expected text in UTF-8"),
        ("a,a\n1,2\n", "expected distinct column names, found a twice"),
        ("a,b\n", "has a header only; expected a header and at least one row"),
        ("a;b\n1;2\n", "the header has ';' and no comma; expected commas"),
        ("b\n1\n2\n", "no numeric column besides b"),
        ("a,b\n1,2\n3,2\n", "column b holds only '2'; expected at least two different values"),
        ("a,b\n1,x\n3,x\n", "column b holds only 'x'; expected at least two different values"),
        (
            'a,b\n1,"0,5"\n2,"1,5"\n3,"2,5"\n',
            "column b holds '0,5' in line 2; expected a full stop",
        ),
        ("a,b\n1700000001,1\n1700000002,2\n", "a runs from 1700000001 to 1700000002; expected num"),
    ],
)
def test_refuses_files(table, text, message):
    with pytest.raises(ValueError, match=message):
        load(table(text), target="b")


@pytest.mark.parametrize("cell", ["", ".", "NA", "na", "n/a", "NaN", "-nan", "null", "NULL"])
def test_a_row_that_lacks_a_value_is_refused_or_dropped(table, cell):
    rows = [f"{i},{i % 3},{i}.5,{'ab'[i % 2]}" for i in range(8)]
    for column, spoilt in enumerate(("3,{},3.5,b", "3,0,{},b", "3,0,3.5,{}"), 1):
        text = "\n".join(["k,x,y,g", *rows[:3], spoilt.format(cell), *rows[4:]])
        name = "kxyg"[column]
        told = f"column {name} lacks 1 of 8 values, first in line 5 \\('{cell}'\\); expected"
        with pytest.raises(ValueError, match=told):
            load(table(text), target="y", client_column="g")
        data = load(table(text), target="y", client_column="g", missing="drop")
        assert data.y.tolist() == [0.5, 1.5, 2.5, 4.5, 5.5, 6.5, 7.5]
        assert (data.source.dropped, data.source.lacking) == (1, {name: 1})
        clients = split(data, "groups")
        assert (clients.source.dropped, clients.source.lacking) == (1, {name: 1})
        assert clients.overview()["rows dropped"] == f"1 ({name} lacks 1)"


def test_all_that_lack_a_value_are_counted(table):
    text = "g,x,z,y\na,1,,2\na,NA,1,3\nb,.,4,5\n"
    told = r"x lacks 2 of 3 values, first in line 3 \('NA'\), z lacks 1; expected a value in every"
    with pytest.raises(ValueError, match=told):
        load(table(text), target="y")
    with pytest.raises(ValueError, match="z lacks 1; missing is 'drop', and no row is left"):
        load(table(text), target="y", missing="drop")
    assert load(table(text), target="y", features=["z"], missing="drop").y.tolist() == [3, 5]
    data = load(table(text + "a,7,8,9\na,8,9,1\n"), target="y", client_column="g", missing="drop")
    assert data.source.summary() == {
        "target": "y",
        "features": "2 (x, z)",
        "rows dropped": "3 (x lacks 2, z lacks 1; no row is left of b)",
    }


@pytest.mark.parametrize(
    "cell", ["5%", "0x10", '"1,5"', "inf", "1e999", "1e39", "1_000", '"1,234"', "\u22125", "1 000"]
)
def test_a_cell_that_is_no_number_among_numbers_is_named(table, cell):
    rows = [f"{i},{i}.5" for i in range(4)]
    shown = cell.strip('"')
    for spoilt, column, cure in (
        (f"{cell},4.5", "x", "or name the features that are wanted"),
        (f"4,{cell}", "y", r"or take all for classes \(--likelihood categorical\)"),
    ):
        text = "\n".join(["x,y", *rows[:2], spoilt, *rows[2:]])
        told = f"column {column} holds '{shown}' in line 4, and 4 numbers; .* {cure}"
        with pytest.raises(ValueError, match=told):
            load(table(text), target="y", features=["x"])
        with pytest.raises(ValueError, match=told):
            load(table(text), target="y", missing="drop")


def test_half_of_the_cells_decide_what_a_column_is(table):
    text = "x,z,y\n1,a,1\n2,b,2\n,3,3\nb,4,4\na,c,5\n"
    told = "x holds 'b' in line 5, 'a' in line 6, and 2 numbers"
    with pytest.raises(ValueError, match=told):
        load(table(text), target="y")
    with pytest.raises(ValueError, match="z holds text such as 'a'; expected numbers as features"):
        load(table(text), target="y", features=["z"])
    kept = load(table(text.replace("b,4", "6,4").replace("a,c", "7,c")), target="y", missing="drop")
    assert kept.source.features == ("x",)
    assert kept.source.left_out == {"z": "text such as 'a'"}


def test_what_is_left_out_is_said(table):
    text = ",k,a,b,empty,y\n1,5,1,u,,1.5\n2,6,2,v,,2.5\n3,7,3,u,,3.5\n"
    source = load(table(text), target="y", client_column="k").source
    assert source.features == ("a",)
    reasons = {"(column 1)": "it has no name", "b": "text such as 'u'", "empty": "no value"}
    assert source.left_out == reasons
    source = load(table(text), target="y", features=["a", "k"]).source
    assert source.features == ("a", "k")
    told = source.summary()["left out"]
    assert told == "(column 1), b, empty (not requested)"


def test_mixed_words_are_classes_if_the_likelihood_says_so(table):
    text = "x,y\n1,1\n2,3+\n3,2\n4,1\n"
    with pytest.raises(ValueError, match="column y holds '3\\+' in line 3, and 3 numbers"):
        load(table(text), target="y")
    data = load(table(text), target="y", likelihood="categorical")
    assert data.classes == ("1", "2", "3+")


@pytest.mark.parametrize("column", ["y", "g"])
def test_a_number_that_is_a_name_is_written_in_one_way(table, column):
    text = f"x,{column},z\n1,1,5\n2,2,6\n3,1.0,7\n"
    given = {"target": "y", "likelihood": "categorical"}
    given = given if column == "y" else {"target": "z", "client_column": "g"}
    told = f"column {column} holds '1' and, in line 4, '1.0'; expected one spelling"
    with pytest.raises(ValueError, match=told):
        load(table(text), **given)


def test_classes_that_hardly_come_again_need_the_likelihood(table):
    text = "x,y\n1,a\n2,b\n3,c\n4,a\n"
    with pytest.raises(ValueError, match="holds 3 different texts, such as 'a', in 4 rows"):
        load(table(text), target="y")
    assert len(load(table(text), target="y", likelihood="categorical").classes) == 3


def test_quotes_blanks_and_lines_of_commas_do_no_harm(table):
    data = load(table('x,y\n " 1" ,2\n,\n 3, "4"\n'.replace('" ,', '",')), target="y")
    assert (data.x.tolist(), data.y.tolist()) == ([[1], [3]], [2, 4])


def test_a_wrong_count_of_trials_is_refused(table):
    with pytest.raises(ValueError, match="likelihood is 'binomial:few'; expected binomial:N"):
        load(table(), target="rank", likelihood="binomial:few")


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,2\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"cannot be read as CSV: .*; expected UTF-8"):
        load(f"csv:{path}", target="y")


@pytest.mark.parametrize("start", [b"PK\x03\x04\x80", b"\x1f\x8b\x08"])
def test_spreadsheets_and_compressed_files_are_refused(tmp_path, start):
    (tmp_path / "t.csv").write_bytes(start)
    with pytest.raises(ValueError, match=r"t\.csv cannot be read as CSV: it is a spreadsheet or"):
        load(f"csv:{tmp_path / 't.csv'}", target="y")


def test_refuses_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read as CSV"):
        load(f"csv:{tmp_path}/no.csv", target="y")


def test_a_fifth_of_each_group_is_for_testing(table):
    rows = [
        f"{g},{i * i % 7},{i}"
        for g, n in (("a", 20), ("b", 10), ("c", 1), ("d", 2))
        for i in range(n)
    ]
    text = "\n".join(["g,x,y", *rows])
    data, again, other = (
        load(table(text), target="y", client_column="g", seed=s) for s in (0, 0, 1)
    )
    assert [len(rows) for rows in split(data, "groups").test] == [4, 2, 0, 0]
    assert torch.equal(data.is_test, again.is_test)
    assert not torch.equal(data.is_test, other.is_test)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 2**32))
def test_every_group_keeps_a_training_row(codes, seed):
    codes = np.array(codes)
    is_test = draw_test_rows(codes, np.random.default_rng(seed)).numpy()
    for code in np.unique(codes):
        mine = is_test[codes == code]
        assert not mine.all()
        assert abs(mine.sum() - 0.2 * len(mine)) <= 0.5


@given(st.lists(st.sampled_from(["b", "a", "10", "9", "c"]), min_size=1))
def test_codes_name_the_words(words):
    codes, names = codes_of(words)
    assert [names[code] for code in codes] == words
    assert len(set(names)) == len(names)


def test_all_rows_may_train(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("g,x,y\n" + "".join(f"{i % 2},{i},{i * i % 7}.5\n" for i in range(20)))
    data = load(f"csv:{path}", target="y", client_column="g", test_fraction=0.0)
    assert not data.is_test.any()
    half = load(f"csv:{path}", target="y", client_column="g", test_fraction=0.5)
    assert int(half.is_test.sum()) == 10
    with pytest.raises(
        ValueError, match=r"test_fraction is 1\.0; expected a number from 0 to below 1"
    ):
        load(f"csv:{path}", target="y", test_fraction=1.0)


def test_omitted_text_with_few_levels_is_reported(tmp_path):
    """A column such as sex would be missing from the model without a word."""
    rows = [f"{30 + i},{'mf'[i % 2]},note {i},{i // 3 % 2}" for i in range(24)]
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(["age,sex,note,y", *rows]))
    with pytest.warns(UserWarning, match=r"text is left out: sex \(2 levels\)"):
        load(f"csv:{path}", target="y")
    for options in ({"features": ["age"]}, {"categories": ["sex"]}, {"scaling": "standardize"}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load(f"csv:{path}", target="y", **options)
