"""Preparation: sums over clients are those of pooled rows, and come back to the last bit."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import pyrofl
from pyrofl import datasets, federations
from pyrofl.data.tables.column_summary import ColumnSummary, summarize_columns, summarize_values
from pyrofl.data.tables.preprocessor import ColumnPreprocessing, Preprocessor
from pyrofl.models import fedavg

ROWS = """hospital,age,chol,pain,sex,sick
a,63,233,low,m,no
a,41,,high,f,yes
a,57,190.5,low,m,no
a,44,211,none,m,yes
b,70,288,low,f,yes
b,39,,none,,no
b,52,245,high,m,no
c,48,0.25,low,f,no
c,66,301,odd,m,yes
c,51,NA,low,f,no
"""


@pytest.fixture
def hospitals(tmp_path):
    path = tmp_path / "hospitals.csv"
    path.write_text(ROWS)
    return f"csv:{path}"


def loaded(name, **more):
    asked = {
        "target": "sick",
        "client_column": "hospital",
        "test_fraction": 0.0,
        "missing": "impute",
    }
    return datasets.load(name, **{**asked, "scaling": "standardize", **more})


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), max_size=30), min_size=1, max_size=8),
    st.floats(-1e6, 1e6),
)
def test_sums_over_clients_are_those_of_the_pooled_rows(clients, shift):
    parts = [np.array(values) + shift for values in clients]
    pooled = np.concatenate(parts)
    found = sum((summarize_values(values) for values in parts), ColumnSummary())
    assert found.count == len(pooled)
    if len(pooled):
        size = np.abs(pooled).max()
        assert found.mean == pytest.approx(pooled.mean(), abs=1e-12 * size)
        squares = ((pooled - pooled.mean()) ** 2).sum()
        assert found.squares == pytest.approx(squares, rel=1e-12, abs=1e-12 * size**2)


def test_features_are_those_of_scikit_learn_on_pooled_rows():
    """Three clients of 40 rows: scales and levels of one that has seen all rows, to 1e-12."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "chol": rng.normal(240, 50, 120),
            "flux": rng.normal(1e6, 1e-2, 120),
            "pain": rng.choice(["low", "high", "none"], 120),
        }
    )
    parts = [frame[i : i + 40] for i in (0, 40, 80)]
    made = Preprocessor.of(summarize_columns(part, list(frame), ["pain"]) for part in parts)
    scaler = StandardScaler().fit(frame[["chol", "flux"]])
    torch.testing.assert_close(
        made.center[:2], torch.from_numpy(scaler.mean_), rtol=1e-12, atol=0.0
    )
    # The mean of flux is known to 1e-16 of a million, which is 1e-8 of its standard deviation.
    assert made.scale[0].item() == pytest.approx(scaler.scale_[0], rel=1e-12)
    assert made.scale[1].item() == pytest.approx(scaler.scale_[1], rel=1e-8)
    coder = OneHotEncoder(sparse_output=False).fit(frame[["pain"]])
    expected = [scaler.transform(frame[["chol", "flux"]]), coder.transform(frame[["pain"]])]
    torch.testing.assert_close(
        made.apply(frame), torch.from_numpy(np.hstack(expected)).float(), rtol=1e-6, atol=1e-6
    )
    assert made.features == ("chol", "flux", "pain=high", "pain=low", "pain=none")


def test_it_comes_back_to_the_last_bit(hospitals):
    data = federations.split(loaded(hospitals), "groups")
    made = data.source.preparation
    again = Preprocessor.from_json(made.to_json())
    assert again == made
    new = {"chol": ["250", ""], "sex": ["f", "m"], "age": [50, 61.5], "pain": ["odd", "low"]}
    assert torch.equal(again.apply(new), made.apply(new))
    assert torch.equal(again.apply(hospitals.removeprefix("csv:")), data.x)
    assert torch.equal(again.apply(pd.DataFrame(new)), made.apply(new))


def test_gaps_are_filled_with_means_and_marked(hospitals):
    data = federations.split(loaded(hospitals), "groups")
    chol = [233, 190.5, 211, 288, 245, 0.25, 301]
    levels = ("pain=high", "pain=low", "pain=none", "pain=odd")
    levels += ("sex=f", "sex=m", "sex is missing")
    assert data.source.features == ("age", "chol", "chol is missing", *levels)
    x = dict(zip(data.source.features, data.x.T, strict=True))
    gaps = torch.tensor([0.0, 1, 0, 0, 0, 1, 0, 0, 0, 1])
    assert torch.equal(x["chol is missing"], gaps)
    known = (torch.tensor(chol) - np.mean(chol)) / np.std(chol)
    torch.testing.assert_close(x["chol"][gaps == 0], known.float())
    assert torch.equal(x["chol"][gaps == 1], torch.zeros(3))
    assert x["sex=f"][5] == x["sex=m"][5] == 0
    assert data.x.dtype == torch.float32


def test_clients_that_are_held_out_tell_nothing(hospitals):
    """Of a and b alone; a category that c alone has is taken for none, and said."""
    data = federations.split(loaded(hospitals), "groups", held_out=1)
    made = data.source.preparation
    assert made.columns[0].center == pytest.approx(np.mean([63, 41, 57, 44, 70, 39, 52]))
    assert "pain=odd" not in made.features
    assert data.source.unseen == {"pain": "odd in 1 rows"}
    pain = [n for n, name in enumerate(made.features) if name.startswith("pain=")]
    assert data.x[8, pain].tolist() == [0, 0, 0]
    told = data.overview()["categories absent from all training rows, treated as missing"]
    assert told == "pain odd in 1 rows"


def test_test_rows_tell_nothing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "g,x,y,part\n" + "".join(f"a,{i},{i * i % 7}.5,{int(i > 6)}\n" for i in range(10))
    )
    asked = {"target": "y", "client_column": "g", "scaling": "standardize", "test_column": "part"}
    data = federations.split(datasets.load(f"csv:{path}", **asked), "groups")
    assert data.source.preparation.columns[0].center == 3
    assert [len(rows) for rows in (*data.train, *data.test)] == [7, 3]
    assert data.source.features == ("x",)


def test_rows_of_the_server_are_prepared_too(hospitals):
    data = federations.split(loaded(hospitals), "iid", 2, server_data=3)
    assert data.server_data.shape == (3, data.x.shape[1])
    assert data.server_data.isfinite().all()


def test_coefficients_come_back_to_units_of_the_columns(hospitals):
    data = federations.split(loaded(hospitals), "groups")
    made = data.source.preparation
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(3, len(made.features), generator=g, dtype=torch.float64)
    bias = torch.randn(3, generator=g, dtype=torch.float64)
    raw, at_zero = made.on_raw_scale(weight, bias)
    columns = dict(zip(made.features, data.x.double().T, strict=True))
    columns["age"] = torch.tensor([63.0, 41, 57, 44, 70, 39, 52, 48, 66, 51]).double()
    mean = np.mean([233, 190.5, 211, 288, 245, 0.25, 301])
    chol = torch.tensor([233, mean, 190.5, 211, 288, mean, 245, 0.25, 301, mean])
    columns["chol"] = chol.double()
    x = torch.stack(list(columns.values()), 1)
    expected = bias + data.x.double() @ weight.T
    torch.testing.assert_close(at_zero + x @ raw.T, expected, rtol=1e-6, atol=1e-6)
    array = made.on_raw_scale(weight.numpy(), bias.numpy())
    np.testing.assert_allclose(array[0], raw.numpy(), rtol=1e-15)
    with pytest.raises(ValueError, match=r"weight has shape \[2\]; expected 10 features along"):
        made.on_raw_scale(torch.ones(2))


def test_columns_without_a_difference_are_left_out_and_said(tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"{'ab'[i % 2]},{i},0.1,{i * i % 7}.5" for i in range(10)]
    path.write_text("\n".join(["g,x,one,y", *rows]))
    asked = {"target": "y", "client_column": "g", "scaling": "standardize"}
    data = federations.split(datasets.load(f"csv:{path}", **asked), "groups")
    assert data.source.features == ("x",)
    assert data.overview()["prepared"].endswith("left out: one (all training rows have 0.1)")
    none = datasets.load(f"csv:{path}", **asked, features=["one"])
    with pytest.raises(ValueError, match=r"no column is left: one \(all training rows have 0.1\)"):
        federations.split(none, "groups")


@pytest.mark.parametrize("likelihood", ["normal_known_sd", "binomial"])
def test_the_first_feature_keeps_its_units_where_the_likelihood_reads_it(tmp_path, likelihood):
    path = tmp_path / "t.csv"
    rows = [f"{'uv'[i % 2]},{20 + i},{i},{i * 3 % 7}\n" for i in range(10)]
    path.write_text("".join(["kind,n,x,y\n", *rows]))  # text comes behind
    asked = {"target": "y", "scaling": "standardize", "likelihood": likelihood}
    data = federations.split(datasets.load(f"csv:{path}", **asked), "iid", 2)
    assert data.source.features == ("n", "x", "kind=u", "kind=v")
    with pytest.raises(ValueError, match="features are categories only: kind; expected a numeric"):
        datasets.load(f"csv:{path}", **asked, features=["kind"])
    assert data.x[:, 0].tolist() == [20.0 + i for i in range(10)]
    assert data.x[:, 1].abs().max() < 3


def test_numbers_are_categories_where_they_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("k,x,y\n" + "".join(f"{i % 3 + 9},{i},{i * 3 % 5}\n" for i in range(12)))
    asked = {"target": "y", "categories": ["k"]}
    data = federations.split(datasets.load(f"csv:{path}", **asked), "iid", 2)
    assert data.source.features == ("k=9", "k=10", "k=11", "x")  # in numerical order
    assert data.x[:, 3].tolist() == list(range(12))  # not standardized
    assert data.x[:, :3].sum(1).tolist() == [1] * 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pain": ["grim"]}, "pain holds 'grim' in row 1, which no client had; expected one of hi"),
        ({"age": ["63 y"]}, "column age holds '63 y' in row 1, and 0 numbers; expected finite"),
        ({"chol": None}, "unknown column in the table: 'chol'; expected one of age, pain, sex"),
        ({"chol": [1, 2]}, "the table has columns of .*; expected equal lengths"),
    ],
)
def test_new_rows_that_cannot_be_are_refused(hospitals, change, message):
    made = federations.split(loaded(hospitals), "groups").source.preparation
    rows = {"age": [50], "chol": [240], "pain": ["low"], "sex": ["m"], **change}
    rows = {name: values for name, values in rows.items() if values is not None}
    with pytest.raises(ValueError, match=message):
        made.apply(rows)


def test_a_gap_is_refused_where_none_were_filled():
    made = Preprocessor.of([summarize_columns({"x": [1, 2, 4]}, ["x"])])
    with pytest.raises(ValueError, match="column x lacks a value in row 2; expected one, as"):
        made.apply({"x": [1, None]})
    unseen = Preprocessor.of([summarize_columns({"k": ["a", "b"]}, ["k"], ["k"])])
    assert unseen.apply({"k": ["b", "c"]}, unseen="zero").tolist() == [[0, 1], [0, 0]]
    with pytest.raises(ValueError, match="unseen is 'none'; expected one of refuse, zero"):
        unseen.apply({"k": ["b"]}, unseen="none")


def test_a_number_is_one_category_however_it_is_written():
    """Data frames write whole numbers beside gaps as 1.0."""
    made = Preprocessor.of([summarize_columns({"k": ["1", "2", "x"]}, ["k"], ["k"])], fill=True)
    new = made.apply(pd.DataFrame({"k": [1.0, None, 2.0]}))
    assert new.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    with pytest.raises(ValueError, match=r"k has categories '1' and '1\.0'; expected one spelling"):
        Preprocessor.of(
            [summarize_columns({"k": [word, "2"]}, ["k"], ["k"]) for word in ("1", "1.0")]
        )


def test_clients_that_differ_are_refused():
    one, other = (
        summarize_columns({"x": [1, 2]}, ["x"]),
        summarize_columns({"x": ["u", "v"]}, ["x"], ["x"]),
    )
    with pytest.raises(ValueError, match=r"numbers at client 0, and .* as u, v at client 1"):
        Preprocessor.of([one, other])
    with pytest.raises(ValueError, match="column x is missing at client 1, and client 0 has it; "):
        Preprocessor.of([one, summarize_columns({"z": [1]}, ["z"])])
    with pytest.raises(ValueError, match="there is no column summary; expected those of at least"):
        Preprocessor.of([])
    with pytest.raises(ValueError, match="unknown column 'z'; expected one of x"):
        summarize_columns({"x": [1]}, ["z"])
    with pytest.raises(ValueError, match=r"x holds 'u' in row 1, .* or name it among categories"):
        summarize_columns({"x": ["u"]}, ["x"])


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"columns": [{"nam": "x"}], "left_out": {}}', "null", '{"columns": 3}'],
)
def test_what_is_no_preparation_is_refused(text):
    with pytest.raises(ValueError, match=r"no preparation \(.*\); expected what `to_json` wrote"):
        Preprocessor.from_json(text)
    bad = json.dumps({"columns": [{"name": "x", "scale": 0.0}], "left_out": {}})
    with pytest.raises(ValueError, match="no preparation"):
        Preprocessor.from_json(bad)


def test_scales_that_are_far_apart_are_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,z,y\n" + "".join(f"{i * 300},{i % 2},{i * i % 7}\n" for i in range(12)))
    told = "the standard deviation of x is .* and that of z 0.5.*; expected similar ones, as by"
    with pytest.warns(UserWarning, match=told):
        datasets.load(f"csv:{path}", target="y")
    raw = datasets.load(f"csv:{path}", target="y", scaling="none")  # as asked
    assert raw.source.summary()["scales"].startswith("the standard deviation of x is")
    data = federations.split(
        datasets.load(f"csv:{path}", target="y", scaling="standardize"), "iid", 2
    )
    assert "scales" not in data.overview()
    path.write_text(
        "x,z,y\n" + "".join(f"{i if i else ''},{i % 2},{i * i % 7}\n" for i in range(12))
    )
    filled = datasets.load(f"csv:{path}", target="y", missing="impute", categories=["z"])
    assert not filled.source.scales  # of gaps and codes nothing is said


def test_rows_left_raw_have_a_preparation_that_changes_nothing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,z,y\n" + "".join(f"{i}.1,{i % 2},{i * i % 7}\n" for i in range(12)))
    data = federations.split(datasets.load(f"csv:{path}", target="y"), "iid", 2)
    assert data.source.preparation == Preprocessor(
        (ColumnPreprocessing("x"), ColumnPreprocessing("z"))
    )
    assert torch.equal(data.source.preparation.apply(path), data.x)


def test_scales_of_features_are_in_what_arviz_gets(hospitals):
    data = federations.split(loaded(hospitals), "groups")
    net = pyrofl.nets.build("softmax", (data.x.shape[1],), 2)
    method = fedavg.build(net, epochs=1)
    found = pyrofl.fit(method, data, 1, progress=False).to_arviz(3, groups=["constant_data"])
    constant = found["constant_data"]
    made = data.source.preparation
    assert constant["feature"].values.tolist() == list(made.features)
    assert constant["feature_scale"].sel(feature="chol").item() == made.columns[1].scale
    assert constant["feature_center"].sel(feature="age").item() == made.columns[0].center


def test_numbers_whose_squares_are_0_are_refused(tmp_path):
    lines = [f"{i % 3},{i % 7 + 1}e-300,{i % 5}.5" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["g,x,y", *lines]))
    how = {"target": "y", "client_column": "g", "scaling": "standardize"}
    data = datasets.load(f"csv:{tmp_path / 't.csv'}", **how)
    told = "column x holds numbers of about .e-300, whose squares are 0; .*use another unit"
    with pytest.raises(ValueError, match=told):
        federations.split(data, "groups")
