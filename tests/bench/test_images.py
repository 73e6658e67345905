"""The loop beside which convolutions are timed does the work of ours."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from pyrofl import nets
from pyrofl.bench import image_cases
from pyrofl.data import Federation
from pyrofl.inference.loop.rounds import federate
from pyrofl.models import fedavg
from pyrofl.tensors import generator, role


@pytest.mark.parametrize("spec", ["cnn-pfedvem", "resnet20"])
def test_a_loop_by_hand_is_ours(spec):
    g, rows = generator(0), torch.arange(12)
    x, y = torch.rand(12, 3, 16, 16, generator=g), rows % 3
    parts = tuple(rows.split([3, 4, 5]))
    data = Federation(x, y, parts, parts, classes=("a", "b", "c"))
    net = nets.build(spec, (3, 16, 16), 3)
    method = fedavg.build(net, epochs=1, batch=None, lr=0.1)  # so that no order of rows differs
    server = {f"w/{n}": v for n, v in net.init(generator(0)).items()}
    *_, ours = federate(method, data, 2, server=server)
    *_, by_hand = islice(image_cases.loop(data, net.fresh(generator(0)), batch=12, lr=0.1), 2)
    for mine, other in zip(role("w", ours.server).values(), by_hand, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)
