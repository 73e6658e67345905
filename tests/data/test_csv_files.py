"""CSV files: columns, gaps, classes and test rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrofl.data.csv_files import codes_of, draw_test_rows
from pyrofl.data.datasets import load
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
    data = load(table(), target="species", group="site")
    assert data.name == "pets"
    assert data.classes == ("cat", "dog")
    assert data.y.tolist() == [0, 1, 0, 1, 1, 0]
    assert data.likelihood == "categorical"
    assert data.x.dtype == torch.float32
    torch.testing.assert_close(data.x[0], torch.tensor([4.5, 40, 1]))
    assert data.group_names == {"site": ("9", "10")}
    assert data.groups["site"].tolist() == [1, 0, 1, 0, 1, 0]


def test_a_number_is_a_response(table):
    data = load(table(), target="mass", features=["length"])
    assert data.classes == ()
    assert data.likelihood == "normal"
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
        ({"target": "mass", "group": "zone"}, "unknown column in .*'zone'; expected one of site"),
        ({"target": "mass", "features": ["wings"]}, "unknown column in .*'wings'"),
        ({"target": "mass", "features": ["species"]}, "column species holds text"),
        (
            {"target": "mass", "features": ["mass"]},
            "features are mass; expected no target or group",
        ),
        ({"target": "note"}, "column note lacks 4 of 6 values"),
        ({"target": "mass", "features": ["note"]}, "column note lacks 4 of 6 values"),
        ({"target": "mass", "group": "note"}, "column note lacks 4 of 6 values"),
        (
            {"target": "mass", "likelihood": "categorical"},
            "column mass holds numbers with decimals",
        ),
        (
            {"target": "species", "likelihood": "normal"},
            "column species holds text; expected numbers for normal",
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
        ("a,b\n1,2,3\n", "Expected 2 fields in line 2, saw 3"),
        ("a,b\n1,2\n3\n", "row 2 has 1 fields; expected 2"),
        ('a,b\n"1,2\n', "cannot be read as CSV: unexpected end of data"),
        ("", "cannot be read as CSV: No columns"),
        ("a,a\n1,2\n", "no two columns alike"),
        ("a,b\n", "has 1 lines; expected a header and at least one row"),
        ("b\n1\n", "no column of numbers besides b"),
    ],
)
def test_refuses_files(table, text, message):
    with pytest.raises(ValueError, match=message):
        load(table(text), target="b")


def test_refuses_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot be read as CSV"):
        load(f"csv:{tmp_path}/no.csv", target="y")


def test_a_fifth_of_each_group_is_for_testing(table):
    rows = [f"{g},{i},{i}" for g, n in (("a", 20), ("b", 10), ("c", 1), ("d", 2)) for i in range(n)]
    text = "\n".join(["g,x,y", *rows])
    data, again, other = (load(table(text), target="y", group="g", seed=s) for s in (0, 0, 1))
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
    path.write_text("g,x,y\n" + "".join(f"{i % 2},{i},{i}.5\n" for i in range(20)))
    data = load(f"csv:{path}", target="y", group="g", test_share=0.0)
    assert not data.is_test.any()
    half = load(f"csv:{path}", target="y", group="g", test_share=0.5)
    assert int(half.is_test.sum()) == 10
    with pytest.raises(
        ValueError, match=r"test_share is 1\.0; expected a number from 0 to below 1"
    ):
        load(f"csv:{path}", target="y", test_share=1.0)
