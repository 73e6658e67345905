"""Draws of a linear layer as more outputs of one layer."""

from __future__ import annotations

import pytest
import torch

from pyrofl.layers import linear_draws


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_draws_as_outputs_are_the_draws(bias: bool, shape: tuple[int, ...]):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, *shape, 5, generator=g, dtype=torch.float64)
    weight = torch.randn(3, 4, 2, 5, generator=g, dtype=torch.float64)
    offset = torch.randn(3, 4, 2, generator=g, dtype=torch.float64) if bias else None
    found = linear_draws(x, weight, offset)
    assert found.shape == (3, 4, 6, *shape, 2)
    for k in range(3):
        for c in range(4):
            one = torch.nn.functional.linear(
                x[c], weight[k, c], None if offset is None else offset[k, c]
            )
            torch.testing.assert_close(found[k, c], one)
