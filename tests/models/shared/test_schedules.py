"""Schedules: what changes with the rounds and from client to client."""

from __future__ import annotations

import pytest
import torch
from toys import last

from pyrofl.models import fedavg
from pyrofl.models.shared import schedules
from pyrofl.nets import build


def test_the_rate_falls_twice():
    rates = [schedules.decayed(0.01, r / 40) for r in range(40)]
    assert rates == [0.01] * 12 + [0.001] * 12 + [0.0001] * 16
    assert schedules.decayed(0.01, None) == 0.01
    with pytest.raises(ValueError, match=r"elapsed is 1\.5; expected a number from 0 to 1"):
        schedules.decayed(0.01, 1.5)


def test_budgets_are_uniform_and_the_clients_own():
    epochs = schedules.uneven(20, seed=3)
    found = epochs(torch.arange(4000))
    assert set(found.tolist()) == set(range(1, 21))
    deviation = ((20**2 - 1) / 12) ** 0.5
    assert abs(found.double().mean() - 10.5) < 4 * deviation / 4000**0.5
    assert torch.equal(epochs(torch.tensor([7, 2])), found[[7, 2]])
    assert not torch.equal(schedules.uneven(20, seed=4)(torch.arange(9)), found[:9])
    with pytest.raises(ValueError, match="most is 0"):
        schedules.uneven(0)


def test_clients_train_as_long_as_they_can(tiny):
    net = build("softmax", (4,), 3)
    epochs = schedules.uneven(3)
    each = epochs(torch.arange(3)).tolist()
    assert len(set(each)) > 1
    uneven = last(fedavg.build(net, epochs=epochs, batch=2), tiny, 1)
    for j, mine in enumerate(each):
        alone = last(fedavg.build(net, epochs=mine, batch=2), tiny, 1)
        for n, value in alone.message.items():
            torch.testing.assert_close(uneven.message[n][j], value[j])
