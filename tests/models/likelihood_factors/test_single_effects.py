"""The sum of many clients' factors with one effect each, and its derivatives."""

from __future__ import annotations

import pytest
import torch

from pyrofl.models.likelihood_factors import factors, single_effects
from pyrofl.tensors import Tensors, generator


def many(clients: int, p: int = 3) -> Tensors:
    """Return factors of clients, of which one in four has a negative precision of its effect."""
    source = generator("single effects")
    root = torch.randn(clients, p + 1, p + 1, generator=source, dtype=torch.float64)
    precision = root @ root.mT
    precision[::4, p, p] *= -0.01
    shift = torch.randn(clients, p + 1, generator=source, dtype=torch.float64)
    return {"shift": shift, "precision": precision}


@pytest.mark.parametrize("cells", [700, 60_000])
def test_values_and_gradients_are_those_of_the_elimination(monkeypatch, cells):
    monkeypatch.setattr(single_effects, "BLOCK_CELLS", cells)
    clients, draws = factors.MANY_CLIENTS, 7
    data, source = many(clients), generator("draws")
    points = [
        torch.randn(draws, 3, generator=source, dtype=torch.float64),
        torch.rand(draws, 1, 1, generator=source, dtype=torch.float64) + 0.1,
        torch.rand(draws, generator=source, dtype=torch.float64) + 0.5,
    ]
    found = []
    for limit in (clients, clients + 1):
        monkeypatch.setattr(factors, "MANY_CLIENTS", limit)
        u, root, noise = (v.clone().requires_grad_() for v in points)
        value = factors.log_product(u, root, noise, data)
        slopes = torch.autograd.grad(value.square().sum(), (u, root, noise), create_graph=True)
        plain = torch.autograd.grad(value.square().sum(), (u, root, noise), retain_graph=True)
        second = torch.autograd.grad(sum(v.square().sum() for v in slopes), (u, root, noise))
        found.append([value, *slopes, *plain, *second])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_negative_variance_has_no_density():
    data = many(factors.MANY_CLIENTS)
    u, one = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    root = torch.tensor([0.1, 100.0], dtype=torch.float64).reshape(2, 1, 1)
    value = factors.log_product(u, root, one, data)
    assert value[0].isfinite()
    assert value[1] == -torch.inf
