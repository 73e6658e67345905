"""Federations of one's own sites: what is cast, and what is refused in one line."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch

import pyrofl
from pyrofl import Federation

RNG = np.random.default_rng(5)
X = RNG.normal(size=(6, 2))
Y = np.array([0, 1, 1, 0, 1, 0])
FRAME = pd.DataFrame(X, columns=["age", "dose"])


def test_arrays_tensors_and_frames_give_the_same_federation():
    kinds = [(X, Y), (torch.from_numpy(X), torch.from_numpy(Y)), (X.tolist(), Y.tolist())]
    kinds += [(FRAME, pd.Series(Y)), (pd.DataFrame(X), Y.astype(float)), (X, Y.astype(np.int8))]
    for x, y in kinds:
        data = Federation.from_arrays({"A": (x, y), "B": (x[:4], y[:4], x[4:], y[4:])}, classes=2)
        assert data.names == ("A", "B")
        assert data.x.dtype == torch.float32
        assert data.y.dtype == torch.int64
        assert torch.equal(data.x, torch.from_numpy(np.concatenate([X, X])).float())
        assert data.y.tolist() == [*Y, *Y]
        assert [rows.tolist() for rows in data.train] == [[*range(6)], [*range(6, 10)]]
        assert [rows.tolist() for rows in data.test] == [[], [10, 11]]
        assert data.pooled_test.tolist() == [10, 11]


def test_columns_without_variation_are_accepted():
    data = Federation.from_arrays({"A": (np.full((3, 1), 0.1), Y[:3])})
    assert data.x.tolist() == torch.full((3, 1), 0.1).tolist()


def test_sites_that_are_held_out_come_last():
    sites = {name: (X, Y) for name in "ABCD"}
    data = Federation.from_arrays(sites, classes=2, held_out=["C", "A"])
    assert data.names == ("B", "D", "C", "A")
    assert (data.clients, data.held_out) == (2, 2)


def test_labels_are_names_or_places():
    words = np.array(["no", "yes"], dtype=object)[Y]
    for y, classes in ((words, None), (words, ("no", "yes")), (Y, ("no", "yes")), (Y == 1, 2)):
        data = Federation.from_arrays({"A": (X, y)}, classes=classes)
        assert data.y.tolist() == Y.tolist()
        assert len(data.classes) == 2
    numbered = Federation.from_arrays({"A": (X, Y + 1)}, classes=("2", "1"))  # these are names
    assert numbered.y.tolist() == (1 - Y).tolist()
    categories = pd.Series(pd.Categorical(words))
    assert Federation.from_arrays({"A": (FRAME, categories)}).classes == ("no", "yes")


def test_columns_have_names():
    data = Federation.from_arrays({"A": (FRAME, Y), "B": (FRAME, Y)}, classes=2)
    assert data.source.features == ("age", "dose")
    two = Federation.from_arrays(
        {"A": (FRAME, Y), "B": (FRAME[["dose", "age"]], Y)}, features=["dose"]
    )
    assert torch.equal(two.x[:6], two.x[6:])
    assert two.x.shape == (12, 1)
    arrays = Federation.from_arrays({"A": (X, Y)}, classes=2, features=("age", "dose"))
    assert arrays.source.features == ("age", "dose")
    named = Federation.from_arrays({"A": (FRAME, pd.Series(Y, name="ill"))})
    assert named.source.target == "ill"


def test_images_and_responses_of_several_numbers():
    data = Federation.from_arrays({"A": (X.reshape(6, 1, 2, 1), X)})
    assert data.x.shape == (6, 1, 2, 1)
    assert data.y.shape == (6, 2)


def test_a_method_learns_from_own_sites():
    from pyrofl import nets
    from pyrofl.models import fedavg

    data = Federation.from_arrays({"A": (FRAME, Y), "B": (FRAME, Y)}, classes=("no", "yes"))
    run = pyrofl.fit(fedavg.build(nets.build("softmax", (2,), 2)), data, rounds=1, progress=False)
    assert run.evaluate(part="train").values["accuracy"].shape == (2,)


GAP = FRAME.assign(age=[1.0, np.nan, 2, 3, np.nan, 4])
BAD = [
    ({}, {}, "sites is empty; expected a non-empty dict"),
    ([("A", (X, Y))], {}, "sites is a list; expected a non-empty dict"),
    ({1: (X, Y)}, {}, "names of sites[0] is 1; expected a string"),
    ({"": (X, Y)}, {}, "names of sites[0] is ''; expected a string"),
    ({"A": (X, Y, X)}, {}, "A has a tuple of 3; expected (x, y) or (x, y, x_test, y_test)"),
    ({"A": X}, {}, "A has a ndarray; expected (x, y)"),
    ({"A": (X, Y[:5])}, {}, "A: x has 6 rows and y has 5; expected the same number"),
    ({"A": (X, Y, X, Y[:2])}, {}, "A: test x has 6 rows and y has 2; expected the same number"),
    ({"A": (X[:0], Y[:0])}, {}, "A has no training row"),
    ({"A": ((255 * X).astype(np.uint8), Y)}, {}, "A: x is uint8, 0 to 255 as in images"),
    ({"A": (X[:, 0], Y)}, {}, "A: x has shape [6]; expected [N, columns]: x[:, None]"),
    ({"A": (X.astype(str), Y)}, {}, "A: x is <U"),
    ({"A": (X.astype(complex), Y)}, {}, "A: x is complex128; expected numbers"),
    ({"A": ("rows", Y)}, {}, "A: x is a str; expected an array"),
    ({"A": (None, Y)}, {}, "A: x is a NoneType; expected an array"),
    ({"A": ([[1, 2], [3]], Y[:2])}, {}, "A: x is ragged"),
    ({"A": (np.where(X > 1, np.nan, X), Y)}, {}, "A: x: column"),
    ({"A": (GAP, Y)}, {}, "A: x: column age is missing, NaN or infinite in 2 rows, first in row 1"),
    ({"A": (FRAME.assign(sex="m"), Y)}, {}, "A: x: column sex holds"),
    ({"A": (FRAME.assign(age=1e300 * X[:, 0]), Y)}, {}, "age runs from"),
    ({"A": (FRAME.assign(age=1e12 + X[:, 0]), Y)}, {}, "torch.float32 distinguishes"),
    ({"A": (FRAME, pd.Series(Y, index=range(1, 7)))}, {}, "A: x and y have different indexes"),
    ({"A": (FRAME, Y), "B": (FRAME[["dose", "age"]], Y)}, {}, "B: its columns are dose, age, in"),
    (
        {"A": (FRAME, Y), "B": (FRAME[["dose"]], Y)},
        {},
        "B and A differ in columns: only one has age",
    ),
    ({"A": (FRAME, Y), "B": (X, Y)}, {}, "B and A differ in columns"),
    (
        {"A": (X, Y), "B": (X[:, :1], Y)},
        {},
        "B: x has rows of shape [1]; expected [2], the shape of A",
    ),
    ({"A": (X, X), "B": (X, Y)}, {}, "B: y has [] per row; expected [2], the shape of A"),
    (
        {"A": (FRAME, Y)},
        {"features": ["age", "size"]},
        "A: x lacks column size; expected its name among age, dose",
    ),
    ({"A": (X, Y)}, {"features": ["age"]}, "A: x has rows of shape [2]; expected [1]"),
    ({"A": (X, Y)}, {"features": "ab"}, "features is a str"),
    ({"A": (X, Y)}, {"features": ("a", "a")}, "found 'a' twice"),
    ({"A": (X, Y)}, {"classes": 1}, "classes is 1; expected 2 or more"),
    ({"A": (X, Y)}, {"classes": ("a", "a")}, "found 'a' twice"),
    ({"A": (X, Y + 1)}, {"classes": ("no", "yes")}, "A: y is 2 in row 1; expected one of no, yes"),
    ({"A": (X, Y + 0.5)}, {"classes": 2}, "A: y is 0.5 in row 0; expected one of 0, 1"),
    ({"A": (X, np.array(list("nynynx")))}, {"classes": ("n", "y")}, "A: y is 'x' in row 5"),
    ({"A": (X, Y[:, None])}, {"classes": 2}, "A: y has shape [6, 1]; expected a label"),
    ({"A": (X, Y[:, None])}, {}, "A: y has shape [6, 1]; expected [N]: y[:, 0]"),
    ({"A": (X, np.where(Y, np.nan, 1.0))}, {}, "A: y is missing, NaN or infinite in 3 rows"),
    ({"A": (X, np.where(Y, np.nan, 1.0))}, {"classes": 2}, "A: y is nan in row 1"),
    ({"A": (X, [None, *Y[1:]])}, {"classes": 2}, "A: y is None in row 0"),
    ({"A": (X, Y)}, {"held_out": ["B"]}, "unknown held-out site 'B'"),
    ({"A": (X, Y)}, {"held_out": ["A"]}, "held_out is 1; expected 0 to 0"),
    ({"A": (X, Y), "B": (X, Y)}, {"held_out": "B"}, "held_out is a str"),
]


@pytest.mark.parametrize(("sites", "how", "told"), BAD, ids=[told[:40] for *_, told in BAD])
def test_what_is_no_federation_is_refused_in_one_line(sites, how, told):
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        Federation.from_arrays(sites, **how)
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value) or "did you mean" in str(caught.value)
