"""FedPer, FedRep, FedBABU, LG-FedAvg: what stays, what trains when, and what they are limits of."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch.nn.functional import cross_entropy
from toys import assert_same, last

from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import fedavg, fedbabu, fedper, fedrep, guides, lgfedavg, local
from pyrofl.models.fedopt import with_server_optimizer
from pyrofl.nets import build
from pyrofl.tensors import pick, role

PROMISES = {
    **{n: Promises(message=(toys.BASE, toys.BASE), together="fc1.*") for n in ("fedper", "fedrep")},
    "fedbabu": Promises(message=(toys.BASE, toys.BASE)),
    "lgfedavg": Promises(message=(toys.HEAD, toys.HEAD), together="head.*"),
}

NET = build("mlp:5", (4,), 3)
HEAD, BASE = {"w/head.weight", "w/head.bias"}, {"w/fc1.weight", "w/fc1.bias"}
USUAL = {"batch": 2, "epochs": 2, "lr": 0.1}
METHODS = {"fedper": fedper, "fedrep": fedrep, "fedbabu": fedbabu, "lgfedavg": lgfedavg}


def made(name: str, **options: object) -> Method:
    method: Method = METHODS[name].build(NET, **(USUAL | options))
    return method


@pytest.mark.parametrize("name", METHODS)
def test_one_part_travels_and_the_other_stays(tiny, name):
    state = last(made(name), tiny, 2)
    shared, own = (HEAD, BASE) if name == "lgfedavg" else (BASE, HEAD)
    assert set(state.server) == set(state.message) == shared
    assert set(state.client_states) == own
    scalars = sum(v[0].numel() for v in state.message.values())
    assert state.bytes_up.tolist() == state.bytes_down.tolist() == [8 * scalars] * 3
    assert scalars == (5 * 3 + 3 if name == "lgfedavg" else 4 * 5 + 5)
    share = torch.tensor([3, 5, 4], dtype=torch.float64) / 12
    for n, v in state.server.items():
        close(v, torch.tensordot(share, state.message[n], 1))


@pytest.mark.parametrize("options", [{}, {"guide": guides.mean_field}])
@pytest.mark.parametrize(("name", "head"), [("fedper", ""), ("lgfedavg", "*")])
def test_with_nothing_personal_it_is_fedavg(tiny, name, head, options):
    method, plain = made(name, head=head, **options), fedavg.build(NET, **USUAL, **options)
    for one, other in zip(
        federate(method, tiny, 3, participation=fixed(2)),
        federate(plain, tiny, 3, participation=fixed(2)),
        strict=True,
    ):
        assert_same(one.server, other.server)
        assert one.client_states == {}


@pytest.mark.parametrize(("name", "head"), [("fedper", "*"), ("lgfedavg", "")])
def test_with_nothing_shared_it_is_local(tiny, name, head):
    one = last(made(name, head=head), tiny, 3)
    other = last(local.build(NET, **USUAL), tiny, 3)
    assert_same(one.client_states, other.client_states)
    assert one.server == one.message == {}


def test_the_parts_may_be_exchanged(tiny):
    one = last(made("lgfedavg", head="fc1.*"), tiny, 3)
    other = last(made("fedper", head="head.*"), tiny, 3)
    assert_same(one.server, other.server)
    assert_same(one.client_states, other.client_states)


def test_fedper_by_hand(tiny):
    # Two rounds; the head goes on from where the client left it, the base from the average.
    method = fedper.build(NET, epochs=3, batch=None, lr=0.1, momentum=0.0)
    start = {n: v.double() for n, v in fedavg.build(NET).init(stream(0, Stream.START), 3).items()}
    base = {n.removeprefix("w/"): start[n] for n in BASE}
    heads = [{n.removeprefix("w/"): start[n] for n in HEAD} for _ in range(3)]
    for _ in range(2):
        mean = {n: torch.zeros_like(v) for n, v in base.items()}
        for j, rows in enumerate(tiny.train):
            w = {n: v.clone().requires_grad_() for n, v in (base | heads[j]).items()}
            optimizer = torch.optim.SGD(w.values(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                cross_entropy(NET.apply(w, tiny.x[rows]), tiny.y[rows]).backward()
                optimizer.step()
            heads[j] = {n: w[n].detach() for n in heads[j]}
            mean = {n: v + len(rows) / 12 * w[n].detach() for n, v in mean.items()}
        base = mean
    state = last(method, tiny, 2)
    for n, v in base.items():
        close(state.server[f"w/{n}"], v)
    for j in range(3):
        for n, v in heads[j].items():
            close(state.client_states[f"w/{n}"][j], v)


def test_fedrep_without_epochs_on_the_base_fits_heads_only(tiny):
    begun, state = federate(made("fedrep", epochs=0, head_epochs=2), tiny, 2)
    start = made("fedper").init(stream(0, Stream.START), 3)
    for n, v in state.server.items():
        close(v, start[n])
    assert all(not torch.equal(v, begun.client_states[n]) for n, v in state.client_states.items())


def test_fedrep_without_epochs_on_the_head_is_fedbabu(tiny):
    one = last(made("fedrep", head_epochs=0), tiny, 3)
    other = last(made("fedbabu"), tiny, 3)
    assert_same(one.server, other.server)
    assert_same(one.client_states, other.client_states)


def test_fedrep_moves_the_base_after_the_head(tiny):
    method = made("fedrep", head_epochs=3, epochs=1, batch=None, momentum=0.0)
    state = last(method, tiny, 1)
    start = {n: v.double() for n, v in fedavg.build(NET).init(stream(0, Stream.START), 3).items()}
    w = {n: v.clone().requires_grad_() for n, v in role("w", start).items()}

    def step(names: str) -> None:
        moving = list(pick(w, names).values())
        loss = cross_entropy(NET.apply(w, tiny.x[tiny.train[1]]), tiny.y[tiny.train[1]])
        for p, g in zip(moving, torch.autograd.grad(loss, moving), strict=True):
            p.data -= 0.1 * g

    for names in ("head.*", "head.*", "head.*", "fc1.*"):
        step(names)
    found = pick(state.client_states, "*head*") | state.message
    for n, v in found.items():
        close(v[1], w[n.removeprefix("w/")].detach())


def test_the_head_of_fedbabu_does_not_move_until_it_is_tuned(tiny):
    method = made("fedbabu", tune="head", fine_tune=3)
    start = fedavg.build(NET).init(stream(0, Stream.START), 3)
    cohort = tiny.cohort(torch.arange(3))
    for state in federate(method, tiny, 3):
        for n in HEAD:
            assert torch.equal(
                state.client_states[n], start[n].double().expand_as(state.client_states[n])
            )
    _, tuned = prepared(method, tiny, state, cohort, adaptation="fine_tune")
    assert not isinstance(tuned, list)
    for n in HEAD:
        assert bool((tuned[n] != state.client_states[n]).all(0).any())
    for n in BASE:
        assert torch.equal(tuned[n], state.server[n].expand_as(tuned[n]))


@pytest.mark.parametrize(("tune", "moves"), [("head", HEAD), ("base", BASE), ("all", HEAD | BASE)])
def test_fedbabu_tunes_what_it_is_told(tiny, tune, moves):
    method = made("fedbabu", tune=tune)
    state = last(method, tiny, 1, check=False)  # heads that stay drawn are warned of
    _, tuned = prepared(method, tiny, state, tiny.cohort(torch.arange(3)), adaptation="fine_tune")
    assert not isinstance(tuned, list)
    known = state.client_states | {n: v.expand_as(tuned[n]) for n, v in state.server.items()}
    changed = {n for n, v in tuned.items() if not torch.equal(v, known[n])}
    assert changed == moves
    assert max(phase.epochs for phase in method.adapt) == 5
    assert made("fedbabu", fine_tune=0).adapt == ()


def test_fedrep_fits_the_head_before_a_test_if_asked_to(tiny):
    method = made("fedrep", fine_tune=4)
    state = last(method, tiny, 1)
    _, tuned = prepared(method, tiny, state, tiny.cohort(torch.arange(3)), adaptation="fine_tune")
    assert not isinstance(tuned, list)
    for n, v in state.server.items():
        assert torch.equal(tuned[n], v.expand_as(tuned[n]))
    assert all(not torch.equal(tuned[n], v) for n, v in state.client_states.items())
    assert max(phase.epochs for phase in method.adapt) == 4


def test_the_server_may_step_towards_the_average_of_bases(tiny):
    # Momentum 0 and rate 1 change nothing; what the optimizer remembers stays at the server.
    plain, method = made("fedper"), with_server_optimizer(made("fedper"), sgd(1.0))
    for one, other in zip(federate(method, tiny, 3), federate(plain, tiny, 3), strict=True):
        for n, v in other.server.items():
            close(one.server[n], v)
        assert set(one.message) == BASE


def test_a_robust_merge_of_nothing_is_nothing(tiny):
    assert last(made("fedper", head="*", aggregation="krum:0"), tiny, 1).server == {}


@pytest.mark.parametrize("name", ["fedrep", "fedbabu"])
@pytest.mark.parametrize("head", ["", "*"])
def test_turns_need_two_parts(name, head):
    with pytest.raises(ValueError, match="expected patterns of some but not all of fc1"):
        made(name, head=head)
