"""FedAvgM: momentum at the server, and FedAvg without."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.inference.federate import federate
from pyrofl.models import fedavg, fedavgm
from pyrofl.nets import build
from pyrofl.tensors import pick, role

PROMISES = {"fedavgm": Promises(together="*", message=(toys.ALL, toys.ALL))}


def test_without_momentum_it_is_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    plain = fedavg.build(net, batch=2)
    method = fedavgm.build(net, server_momentum=0.0, batch=2)
    for one, other in zip(federate(method, tiny, 3), federate(plain, tiny, 3), strict=True):
        for n, value in other.server.items():
            close(one.server[n], value)


def test_the_averaging_form_is_a_smaller_rate(tiny):
    beta = 0.9
    method = fedavgm.build(
        build("mlp:5", (4,), 3), server_lr=1 - beta, server_momentum=beta, batch=2
    )
    server, memory = None, {}
    size = torch.tensor([3, 5, 4], dtype=torch.float64)
    before = method.init(torch.Generator().manual_seed(1), 3)
    server = {n: v.double() for n, v in before.items()}
    for state in federate(method, tiny, 4, server=before):
        for n, value in server.items():
            gap = value - torch.tensordot(size / 12, state.message[n], 1)
            memory[n] = beta * memory.get(n, torch.zeros_like(value)) + (1 - beta) * gap
            server[n] = value - memory[n]
            close(state.server[n], server[n])


def test_what_the_server_remembers_stays_there(tiny):
    method = fedavgm.build(build("mlp:5", (4,), 3), batch=2)
    state = last(method, tiny, 2)
    assert role("server/optim", state.server).keys() == {
        f"{n}:momentum_buffer" for n in pick(state.server, "w/*")
    }
    assert method.download(state.server, state.who).keys() == state.message.keys()


def test_two_rounds_give_the_numbers_they_gave_before(tiny):
    method = fedavgm.build(build("mlp:3", (4,), 3), epochs=2, batch=2, lr=0.1)
    state = last(method, tiny, 2)
    # The start is drawn in single precision, which vector units round differently.
    close(state.server["w/head.bias"], [0.1137363, -0.2363853, -0.1643579], 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": -1.0}, "lr is -1.0"),
        ({"server_momentum": 1.0}, "momentum is 1.0; expected a number from 0 to below 1"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fedavgm.build(build("softmax", (4,), 3), **options)
