"""Loops and floors of personal methods do the work of ours."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from pyrofl import nets
from pyrofl.bench import bayesian_floors, proximal
from pyrofl.bench.cases import start
from pyrofl.bench.personal_cases import PERSONAL
from pyrofl.bench.worker import CASES
from pyrofl.data import Federation, datasets
from pyrofl.inference.loop.rounds import federate
from pyrofl.models import apfl, ditto, fedprox, pfedme
from pyrofl.partitions import federations
from pyrofl.tensors import generator, role

ALL = 10_000  # rows in a minibatch: all that there are, so that no order of the rows differs
PLAIN = {"epochs": 1, "batch": None, "lr": 0.1, "momentum": 0.0}
LOOPS = {
    "fedprox": (lambda n: fedprox.build(n, mu=0.5, **PLAIN), proximal.fedprox, (0.5,)),
    "ditto": (lambda n: ditto.build(n, strength=0.5, **PLAIN), proximal.ditto, (0.5,)),
    "pfedme": (
        lambda n: pfedme.build(n, strength=5.0, lr_centre=0.05, **PLAIN),
        proximal.pfedme,
        (0.05, 5.0, 5),
    ),
    "apfl": (lambda n: apfl.build(n, lr_alpha=0.3, **PLAIN), proximal.apfl, (0.5, 0.3)),
}


@pytest.fixture(scope="module")
def digits() -> Federation:
    return federations.split(datasets.load("digits"), "slices:5", clients=4, test="labels_global")


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_by_hand_is_ours(digits, name):
    build, loop, settings = LOOPS[name]
    net = nets.build("mlp:100", (64,), 10)
    server = {f"w/{n}": v for n, v in net.init(generator(0)).items()}
    *_, ours = federate(build(net), digits, 3, server=server)
    *_, by_hand = islice(loop(digits, start(digits), ALL, 0.1, *settings), 3)
    for mine, other in zip(role("w", ours.server).values(), by_hand, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def right(digits: Federation, weights: list[torch.Tensor]) -> float:
    w1, b1, w2, b2 = weights
    rows = digits.pooled_test
    outputs = (digits.x[rows].flatten(1) @ w1.T + b1).relu() @ w2.T + b2
    return float((outputs.argmax(1) == digits.y[rows]).float().mean())


def test_floors_learn(digits):
    first = start(digits)
    share = 1 / digits.clients  # of the way: factors of clients that agree do not overshoot
    *_, flat = islice(bayesian_floors.pvi(digits, first, 3, damping=share), 4)
    shapes = [w.shape for w in first]
    parts = flat.split([s.numel() for s in shapes])
    assert right(digits, [v.view(s) for v, s in zip(parts, shapes, strict=True)]) > 0.5
    *_, prior = islice(bayesian_floors.pfedbayes(digits, first, 3), 2)
    assert right(digits, prior[:4]) > 0.5
    *_, weights = islice(bayesian_floors.fedpop(digits, first, 3), 2)
    assert right(digits, weights) > 0.5


def test_the_command_knows_them():
    assert set(PERSONAL) <= set(CASES)
    assert all(case.target for case in PERSONAL.values())
