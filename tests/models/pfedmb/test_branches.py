"""Layers with branches: mixing outputs is mixing parameters."""

from __future__ import annotations

import pytest
import torch
from checks import close
from torch import nn

from pyrofl.models.pfedmb import layers, merge_branches, refuse_twins
from pyrofl.nets import Network, build
from pyrofl.tensors import Tensors, generator, role, under


def simplex(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(1), dtype=torch.float64).softmax(-1)


def drawn(net: Network, *lead: int) -> Tensors:
    g = generator(2)
    shapes = {n: (*lead, *s) for n, s in net.shapes.items()}
    values = {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
    return under("branch", values)


@pytest.mark.parametrize(
    ("layer", "rows"),
    [(nn.Linear(6, 4), (5, 6)), (nn.Conv2d(2, 3, 3, padding=1), (5, 2, 7, 7))],
)
def test_mixing_outputs_is_mixing_parameters(layer, rows):
    net = Network(layer)
    alpha, branches = simplex(1, 3), drawn(net, 3)
    x = torch.randn(rows, generator=generator(3), dtype=torch.float64)
    outputs = [
        net.apply({n: v[b] for n, v in role("branch", branches).items()}, x) for b in (0, 1, 2)
    ]
    mixed = torch.einsum("b,b...->...", alpha[0], torch.stack(outputs))
    close(net.apply(merge_branches(net, branches, alpha), x), mixed, 1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_clients_and_draws_mix_side_by_side(shared):
    net = build("mlp:4", (3,), 2)
    alpha, branches = simplex(7, 5, 1, 1 if shared else 2, 3), drawn(net, 5, 1, 3)
    found = merge_branches(net, branches, alpha)
    for n, shape in net.shapes.items():
        assert found[n].shape == (7, 5, 1, *shape)
        at = 0 if shared else n.startswith("head")
        expected = torch.einsum(
            "kcrb,crb...->kcr...", alpha[..., int(at), :], branches[f"branch/{n}"]
        )
        close(found[n], expected, 1e-14)


def test_what_has_no_branches_stays():
    net = build("mlp:4", (3,), 2)
    all_of_it = drawn(net, 5, 3)
    head = {n: v for n, v in all_of_it.items() if "head" in n}
    rest = {n.replace("branch", "w"): v[:, 0] for n, v in all_of_it.items() if "fc1" in n}
    found = merge_branches(net, head | rest, simplex(5, 1, 3))
    assert torch.equal(found["fc1.weight"], rest["w/fc1.weight"])
    assert found["head.weight"].shape == (5, 2, 4)


def test_layers_are_the_modules_that_own_parameters():
    names = ["a.weight", "a.bias", "b.c.weight", "b.d.weight", "b.d.bias"]
    assert list(layers(names).values()) == [0, 0, 1, 2, 2]
    assert set(layers(names, shared=True).values()) == {0}
    assert layers(["w"]) == {"w": 0}


def test_twins_are_refused_where_nothing_tells_them_apart():
    names = layers(["a.weight", "a.bias", "b.weight"])
    branches = {"a.weight": torch.eye(3), "a.bias": torch.zeros(3, 1), "b.weight": torch.eye(3)}
    refuse_twins(branches, names)  # equal biases, but different weights
    twins = branches | {"b.weight": torch.tensor([[1.0], [2.0], [1.0]])}
    with pytest.raises(ValueError, match=r"branches 0 and 2 of b.weight are equal"):
        refuse_twins(twins, names)
    # One simplex for all: the layers together tell the branches apart.
    refuse_twins(twins, layers(names, shared=True))
