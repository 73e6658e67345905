"""FedAvgM: momentum at the server, and FedAvg without."""

from __future__ import annotations

import torch
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.inference.engine.federate import federate
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
    for state in federate(method, tiny, 4, server_state=before):
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
    assert method.download(state.server, state.reporters).keys() == state.message.keys()
