"""Data sets by name: the embedded ones and the synthetic ones."""

from __future__ import annotations

import pytest
import torch

from pyrofl.data import Dataset, Federation
from pyrofl.data.loaders.datasets import DATASETS, load, per_class
from pyrofl.partitions.federations import split


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_digits(digits):
    assert digits.x.shape == (1797, 64)
    assert digits.x.dtype == torch.float32
    assert (digits.x.min(), digits.x.max()) == (0, 1)
    assert digits.classes == tuple("0123456789")
    assert int(digits.is_test.sum()) == 450
    share = torch.bincount(digits.y[digits.is_test]) / torch.bincount(digits.y)
    assert (share - 0.25).abs().max() < 0.01


def test_digits_are_the_same_whatever_the_seed(digits):
    assert torch.equal(digits.is_test, load("digits", seed=7).is_test)


def test_eight_schools():
    data = load("eight_schools")
    assert data.likelihood == "normal_known_sd"
    assert data.group_names == {"school": tuple("ABCDEFGH")}
    assert data.y.tolist() == [28, 8, -3, 7, -1, 1, 18, 12]
    assert data.x.tolist() == [[15], [10], [16], [11], [9], [11], [10], [18]]
    assert not data.is_test.any()
    # Rubin's pooled estimate and its standard error: 7.7 and 4.1.
    weights = data.x[:, 0] ** -2
    assert float((weights * data.y).sum() / weights.sum()) == pytest.approx(7.7, abs=0.05)
    assert float(weights.sum() ** -0.5) == pytest.approx(4.1, abs=0.05)


@pytest.mark.parametrize(("name", "clients"), [("gaussian", 10), ("linear", 20)])
def test_synthetic_data_come_with_their_clients(name, clients):
    data, again, other = (load(name, seed=s) for s in (1, 1, 2))
    assert split(data, "groups").clients == clients
    assert data.likelihood == "normal"
    assert data.classes == ()
    assert torch.equal(data.y, again.y)
    assert not torch.equal(data.y, other.y)


def test_gaussian_clients_differ_in_width():
    data = load("gaussian")
    precision = data.x.square().sum(1)
    torch.testing.assert_close(1 / precision[::2], torch.linspace(0.05, 1.0, 10))


def test_linear_clients_keep_a_fifth_for_testing():
    federation = split(load("linear"), "groups")
    for train, test in zip(federation.train, federation.test, strict=True):
        assert len(test) == round(0.2 * (len(train) + len(test)))


def test_per_class_keeps_the_first_training_rows_and_all_test_rows(digits):
    few = per_class(digits, 5)
    assert torch.bincount(few.y[~few.is_test]).tolist() == [5] * 10
    assert torch.equal(few.x[few.is_test], digits.x[digits.is_test])
    threes = digits.x[(digits.y == 3) & ~digits.is_test][:5]
    assert torch.equal(few.x[(few.y == 3) & ~few.is_test], threes)


def test_per_class_cuts_types_and_groups_too():
    y = torch.tensor([0, 0, 0, 1, 1, 0])
    data = Dataset(
        "toy",
        torch.arange(6.0)[:, None],
        y,
        torch.tensor([0, 0, 0, 0, 0, 1]).bool(),
        ("a", "b"),
        types=torch.arange(6),
        groups={"g": torch.arange(6)},
    )
    few = per_class(data, 2)
    assert few.types.tolist() == few.groups["g"].tolist() == [0, 1, 3, 4, 5]
    assert few.y.tolist() == [0, 0, 1, 1, 0]


def test_every_data_set_is_described_in_one_line():
    assert all(about and "\n" not in about for about in DATASETS.values())
    assert set(DATASETS) >= {"digits", "eight_schools", "mnist", "npz:PATH", "csv:PATH"}


def test_a_federation_of_digits_passes_its_own_checks(digits):
    federation = split(digits, "dirichlet:0.3", 10)
    assert isinstance(federation, Federation)
    assert int(federation.sizes.sum()) == 1347
