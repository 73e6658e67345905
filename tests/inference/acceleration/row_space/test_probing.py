"""What views and likelihoods read, found by calling them."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor

from pyrofl.inference.acceleration.row_space.linear_views import ignores_rows, sums
from pyrofl.models import likelihoods
from pyrofl.tensors import Tensors, add_trailing_axes

NAMES = "w/a", "own/w/a"
LOCAL = {n: torch.ones(2, 5, 4) for n in NAMES} | {"alpha": torch.ones(2)}


def mixed(received: Tensors, local: Tensors) -> Tensors:
    return {
        "w/a": torch.lerp(
            local["w/a"], local["own/w/a"], add_trailing_axes(local["alpha"], local["w/a"])
        )
    }


VIEWS = {
    "own": (lambda received, local: {"w/a": local["own/w/a"]}, {"own/w/a"}),
    "mixed": (mixed, {*NAMES}),
    "squared": (lambda received, local: {"w/a": local["w/a"] ** 2}, None),
    "shifted": (lambda received, local: {"w/a": local["w/a"] + 1}, None),
    "turned": (lambda received, local: {"w/a": local["w/a"].roll(1, 1)}, None),
    "error": (lambda received, local: {"w/a": local["w/a"] @ received["w/a"]}, None),
}


@pytest.mark.parametrize("name", VIEWS)
def test_only_weighted_sums_of_entries_are_sums(name):
    view, expected = VIEWS[name]
    assert sums(view, "w/a", NAMES, (), {"w/a": LOCAL["w/a"]}, LOCAL) == expected


def test_weights_that_move_are_no_fixed_weights():
    assert sums(mixed, "w/a", NAMES, ("alpha",), {}, LOCAL) is None


def test_likelihoods_of_outputs_alone_are_found():
    def noisy(outputs: Tensor, x: Tensor) -> object:
        return likelihoods.normal()(outputs[..., :1] + x[..., :1], x)

    x = torch.rand(3, toys.FEATURES, dtype=torch.float64)
    assert ignores_rows(likelihoods.categorical, toys.net(), x)
    assert not ignores_rows(noisy, toys.net(), x)
    assert not ignores_rows(likelihoods.normal_known_sd, toys.net("softmax"), x)
