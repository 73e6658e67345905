"""FedOpt: algorithm 2 written out, torch's Adagrad, and the methods that it contains."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor
from toys import last

from pyrofl.inference.definition.aggregator import descend
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.models import fedavg, fedavgm, fedopt, fedper
from pyrofl.nets import build
from pyrofl.tensors import Tensors, pick, role

PROMISES = {"fedopt": Promises(together="*", message=(toys.ALL, toys.ALL))}

NET = build("mlp:5", (4,), 3)
USUAL = {"batch": 2, "lr": 0.1}


def steps(rule: fedopt.Rule, changes: list[float], **options: float) -> list[float]:
    """Let a server at 1 make steps along the clients' mean changes."""
    settings = {"server_lr": 0.5, "beta1": 0.0, "beta2": 0.75, "tau": 0.1} | options
    make = fedopt.adaptive(rule, **settings)
    server: Tensors = {"w": torch.tensor(1.0, dtype=torch.float64)}
    found = []
    for change in changes:
        server |= descend(make, server, {"w": -torch.tensor(change, dtype=torch.float64)})
        found.append(float(server["w"]))
    return found


def test_numbers_by_hand():
    # v before is 0.01. adagrad: v = 0.01 + 0.15 = 0.16, and 0.16 + 0.09 = 0.25.
    d = 0.15**0.5
    one = 1 + 0.5 * d / (0.4 + 0.1)
    assert steps("adagrad", [d, 0.3]) == pytest.approx([one, one + 0.5 * 0.3 / (0.5 + 0.1)])
    # adam: v = 0.75 * 0.01 + 0.25 * 0.33 = 0.09, and 0.75 * 0.09 + 0.25 * 0.09 = 0.09.
    d = 0.33**0.5
    one = 1 + 0.5 * d / (0.3 + 0.1)
    assert steps("adam", [d, -0.3]) == pytest.approx([one, one - 0.5 * 0.3 / (0.3 + 0.1)])
    # yogi: v = 0.01 + 0.25 * 0.6 = 0.16, and 0.16 - 0.25 * 0.08 = 0.14.
    d = 0.6**0.5
    one = 1 + 0.5 * d / (0.4 + 0.1)
    two = one + 0.5 * 0.08**0.5 / (0.14**0.5 + 0.1)
    assert steps("yogi", [d, 0.08**0.5]) == pytest.approx([one, two])


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad"])
def test_a_steady_change_fills_the_momentum(rule):
    # m = (1 - beta1^t) d without correction; d = tau leaves every v but adagrad's at tau^2.
    found = [1.0, *steps(rule, [0.1] * 4, beta1=0.5)]
    for t in range(4):
        v = 0.01 * (t + 2) if rule == "adagrad" else 0.01
        gone = 0.5 * (1 - 0.5 ** (t + 1)) * 0.1 / (v**0.5 + 0.1)
        assert found[t + 1] - found[t] == pytest.approx(gone)


def test_adagrad_is_torchs():
    changes = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).double()
    server: Tensors = {"w": torch.zeros(3, dtype=torch.float64)}
    theirs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adagrad([theirs], 0.3, initial_accumulator_value=0.2**2, eps=0.2)
    make = fedopt.adaptive("adagrad", 0.3, 0.0, 0.99, 0.2)
    for change in changes:
        server |= descend(make, server, {"w": change})
        theirs.grad = change
        optimizer.step()
        close(server["w"], theirs.detach())


@pytest.mark.parametrize("optimizer", ["adam", "yogi", "adagrad", "sgd"])
def test_rounds_are_steps_along_the_mean_change(tiny, optimizer):
    method = fedopt.build(NET, optimizer=optimizer, server_lr=0.1, **USUAL)
    rule: fedopt.Rule = optimizer
    make = fedopt.sgd(0.1, 0.9) if rule == "sgd" else fedopt.adaptive(rule, 0.1, 0.9, 0.99, 1e-3)
    start = {n: v.double() for n, v in method.init(torch.Generator().manual_seed(1), 3).items()}
    known = dict(start)
    size = torch.tensor([3, 5, 4], dtype=torch.float64)

    def mean(value: Tensor, weight: Tensor) -> Tensor:
        return torch.tensordot(weight / weight.sum(), value, 1)

    for state in federate(method, tiny, 3, server_state=start, participation=fixed(2)):
        own = {n: mean(v, size[state.reporters.ids]) for n, v in state.message.items()}
        known |= descend(make, known, {n: known[n] - v for n, v in own.items()})
        for n, v in known.items():
            close(state.server[n], v)
    memory = {"momentum_buffer"} if rule == "sgd" else {"m", "v"}
    kept = {f"{n}:{what}" for n in state.message for what in memory}
    assert role("server/optim", state.server).keys() == kept
    assert method.download(state.server, state.reporters).keys() == state.message.keys()
    assert set(pick(state.server, "w/*")) == set(state.message)


def test_plain_steps_of_rate_one_are_fedavg(tiny):
    method = fedopt.build(NET, optimizer="sgd", server_lr=1.0, beta1=0.0, **USUAL)
    for one, other in zip(
        federate(method, tiny, 3), federate(fedavg.build(NET, **USUAL), tiny, 3), strict=True
    ):
        for n, v in other.server.items():
            close(one.server[n], v)


def test_momentum_is_fedavgm(tiny):
    one = fedopt.build(NET, optimizer="sgd", server_lr=0.3, beta1=0.8, **USUAL)
    other = fedavgm.build(NET, server_lr=0.3, server_momentum=0.8, **USUAL)
    for a, b in zip(federate(one, tiny, 3), federate(other, tiny, 3), strict=True):
        for n, v in b.server.items():
            assert torch.equal(a.server[n], v)


def test_a_large_tau_is_plain_momentum(tiny):
    # d / (v^1/2 + tau) is d / (2 tau) at v = tau^2.
    tau = 1e6
    method = fedopt.build(NET, optimizer="adagrad", server_lr=2 * tau, beta1=0.0, tau=tau, **USUAL)
    one, other = last(method, tiny, 2), last(fedavg.build(NET, **USUAL), tiny, 2)
    for n, v in other.server.items():
        close(one.server[n], v, 1e-6)


def test_any_server_may_step(tiny):
    method = fedopt.with_server_optimizer(
        fedper.build(NET, **USUAL), fedopt.adaptive("yogi", 0.1, 0.9, 0.9, 0.1)
    )
    first, second = federate(method, tiny, 2)
    assert set(first.message) == {"w/fc1.weight", "w/fc1.bias"}
    assert set(second.client_states) == {"w/head.weight", "w/head.bias"}
    for n in first.message:
        assert f"server/optim/{n}:v" in second.server
        assert not torch.equal(first.server[n], second.server[n])
