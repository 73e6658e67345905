"""Labels, weights and columns that would be read as something else than they are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from pyrofl import Federation, datasets, federations, fit, nets
from pyrofl.models import fedavg

X = np.random.default_rng(0).normal(size=(10, 2))
SICK = np.array(["sick", "well"] * 5)


@pytest.mark.parametrize(
    "other",
    [
        np.array([1, 0] * 5),
        SICK == "sick",
        torch.tensor([1.0, 0.0] * 5),
        np.array([1, "well"] * 5, dtype=object),
    ],
)
def test_numbers_at_one_site_and_texts_at_another_are_no_classes(other):
    """1 for sick would be read as the second name in the alphabet, well."""
    for sites in ({"A": (X, SICK), "B": (X, other)}, {"A": (X, SICK), "B": (X, SICK, X, other)}):
        with pytest.raises(ValueError, match="B: y holds numbers, and elsewhere text such as"):
            Federation.from_arrays(sites)
        named = Federation.from_arrays(sites, classes=("well", "sick"))
        assert named.y.tolist()[-10:] == [1, 0] * 5


def test_weights_that_are_masked_are_refused():
    weights = np.ma.array(np.ones(10), mask=[True] + 9 * [False])
    with pytest.raises(ValueError, match="A: weights are masked in some rows"):
        Federation.from_arrays({"A": (X, SICK)}, weights={"A": weights})


@pytest.mark.parametrize("value", [0.1, 3.7, 123456.789, 1e9 + 0.1])
def test_a_constant_that_float32_rounds_is_taken(tmp_path, value):
    """The standard deviation of equal numbers is not always 0."""
    for rows in (3, 7, 10, 100):
        x, y = np.full((rows, 1), value), np.arange(rows)
        assert Federation.from_arrays({"A": (x, y)}).x.unique().tolist() == [np.float32(value)]
        file = tmp_path / "rows.csv"
        file.write_text("\n".join(["a,b,y", *(f"{value!r},{k},{k * k % 7}" for k in range(rows))]))
        assert datasets.load(f"csv:{file}", target="y", scaling="none").x[0, 0] == np.float32(value)


def test_numbers_too_small_for_float32_are_refused(tmp_path):
    """Their squares are 0 even in float64, and so is their standard deviation."""
    with pytest.raises(ValueError, match=r"column 0 runs from .*e-200"):
        Federation.from_arrays({"A": (X * 1e-200, SICK)})
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["a,y", *(f"{a},{k}" for k, a in enumerate(X[:, 0] * 1e-200))]))
    with pytest.raises(ValueError, match=r"column a runs from .*e-200"):
        datasets.load(f"csv:{file}", target="y", scaling="none")


def test_all_groups_held_out_are_refused_by_name(tmp_path):
    file = tmp_path / "rows.csv"
    rows = (f"{a},{'AB'[k % 2]},{SICK[k]}" for k, a in enumerate(X[:, 0]))
    file.write_text("\n".join(["a,g,y", *rows]))
    table = datasets.load(f"csv:{file}", target="y", client_column="g", scaling="standardize")
    with pytest.raises(ValueError, match="held_out names all groups"):
        federations.split(table, "groups", held_out=["A", "B"])


def test_numpy_numbers_are_chunks():
    data = Federation.from_arrays({"A": (X, SICK), "B": (X, SICK)})
    method = fedavg.build(nets.build("softmax", (2,), 2))
    run = fit(method, data, 1, chunk_size=np.int64(1), progress=False)
    assert run.predict(X, "A", chunk_size=np.int64(1)).mean.shape == (10, 2)


def test_weights_with_another_index_than_x_are_refused():
    x = pd.DataFrame(X, columns=["p", "q"])
    weights = pd.Series(range(1, 11), index=range(9, -1, -1))
    with pytest.raises(ValueError, match=r"A: x and weights have different indexes.*x\.index"):
        Federation.from_arrays({"A": (x, SICK)}, weights={"A": weights})
    taken = Federation.from_arrays({"A": (x, SICK)}, weights={"A": weights.loc[x.index]})
    assert taken.weights.tolist() == [*range(10, 0, -1)]


def test_spellings_of_one_class_are_warned_of():
    with pytest.warns(UserWarning, match="column y holds 'Sick' and 'sick', 'Well' and 'well'"):
        made = Federation.from_arrays({"A": (X, SICK), "B": (X, np.char.capitalize(SICK))})
    assert len(made.classes) == 4


def test_booleans_are_two_classes_as_in_tables():
    x, y = np.arange(4.0)[:, None], np.array([True, False, False, True])
    for given in (y, torch.from_numpy(y), y.tolist()):
        made = Federation.from_arrays({"A": (x, given), "B": (x, given, x, given)})
        assert made.classes == ("False", "True")
        assert made.y[:4].tolist() == [1, 0, 0, 1]
    assert Federation.from_arrays({"A": (x, y.astype(float))}).classes == ()
    assert Federation.from_arrays({"A": (x, y)}, classes=("no", "yes")).classes == ("no", "yes")
    with pytest.raises(ValueError, match="A: y holds True or False, and there are other numbers"):
        Federation.from_arrays({"A": (x, y), "B": (x, [0.5, 1.0, 0.0, 2.0])})


@pytest.mark.parametrize("labels", [torch.arange(12) % 3, np.arange(12) % 3])
def test_integer_labels_without_classes_are_refused_by_a_network_of_classes(labels):
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    sites = {name: (x, labels) for name in "ab"}
    method = fedavg.build(nets.build("softmax", (2,), 3))
    with pytest.raises(ValueError, match="y holds numbers without classes; pass classes=3, or"):
        fit(method, Federation.from_arrays(sites), 1, progress=False)
    run = fit(method, Federation.from_arrays(sites, classes=3), 1, progress=False)
    assert run.predict(x, "a").classes == ("0", "1", "2")


def test_declared_categories_are_the_order_of_classes():
    x, words = np.zeros((4, 1)), ["no", "yes", "maybe", "no"]
    order = ["yes", "no", "never", "maybe"]
    y = pd.Series(pd.Categorical(words, order))
    data = Federation.from_arrays({"a": (x, y), "b": (x, y)})
    assert data.classes == ("yes", "no", "maybe")
    assert data.y.tolist() == [1, 0, 2, 1] * 2
    plain = Federation.from_arrays({"a": (x, y), "b": (x, words)})
    assert plain.classes == ("maybe", "no", "yes")
