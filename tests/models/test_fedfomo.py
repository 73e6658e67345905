"""FedFomo: its weights by hand, who is chosen, and which rows judge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from checks import close
from promises import Promises
from toys import crossed, last

from pyrofl.data.loaders.conjugate import conjugate
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedavg, fedfomo, likelihoods, local
from pyrofl.nets import build

M = 5
SENT = frozenset(f"w/{n}" for n in toys.net().shapes)
PROMISES = {
    "fedfomo": Promises(
        message=(toys.ALL + M, M * toys.ALL + M), unordered={"downloads": None}, sent=SENT
    )
}


def means(*values: float) -> tuple[Method, RoundState, object]:
    """Let clients have a row y = value at x = 1, stand at 0 and have sent their own values."""
    each = [torch.tensor([v], dtype=torch.float64) for v in values]
    data = conjugate([torch.ones(1, 1)] * len(values), each).federation
    method = fedfomo.build(
        build("linear", (1,), 1), likelihood=likelihoods.normal(), epochs=0, downloads=None
    )
    state = first(method, data, 0)
    own = {"w/w": torch.stack(each), "base/w/w": torch.zeros(len(values), 1).double()}
    server = {"server/model/w/w": torch.stack(each), "server/heard": torch.ones(len(values))}
    begun = replace(
        state, server=state.server | server, client_states=own, seen=torch.ones(len(values)).bool()
    )
    return method, begun, data


def test_a_step_by_hand():
    # Client 0 has y = 1 and is at 0: V = 1/2. Its own model 1 has V = 0, that of client 1, 1.5,
    # 1/8, and that of client 2, -1, 2, which is worse.
    method, begun, data = means(1.0, 1.5, -1.0)
    state = run_round(method, data, begun, *[torch.tensor([0])] * 2)
    own, other = 0.5 / 1, (0.5 - 0.125) / 1.5
    close(state.client_states["w/w"][0], [(own * 1 + other * 1.5) / (own + other)])
    assert torch.equal(state.client_states["base/w/w"][0], state.client_states["w/w"][0])


def test_who_finds_no_better_model_goes_on_from_its_own():
    method, begun, data = means(0.0, 5.0)
    worse = begun.client_states | {"w/w": torch.tensor([[0.5], [5.0]]).double()}
    state = run_round(method, data, replace(begun, client_states=worse), *[torch.tensor([0])] * 2)
    assert state.client_states["w/w"][0].tolist() == [0.5]


def test_what_clients_value_is_added_up_and_chosen_next():
    data, method = crossed(8), fedfomo.build(toys.net(), downloads=3, explore=0.0, lr=0.05)
    state = last(method, data, 8)
    table, chosen = state.server["server/affinity"], state.server["server/chosen"]
    kind = torch.arange(8) % 2
    alike = kind[:, None] == kind
    assert table[alike].sum() > 10 * table[~alike].sum()
    for i, row in enumerate(chosen.tolist()):
        assert len(set(row)) == 3
        assert i not in row
        assert sorted(table[i, row]) == sorted(table[i])[-3:]
    after = run_round(method, data, state, *[torch.arange(8)] * 2)
    added = after.server["server/affinity"] - table
    close(added.gather(1, chosen), after.message["weight"])
    close(added.sum(1), after.message["weight"].sum(1))


def test_some_are_chosen_at_random():
    score = torch.arange(6.0).expand(2, 6)
    picked = fedfomo.choose_downloads(
        score,
        torch.tensor([[9.0, 8, 7, 6, 5, 4]]).expand(2, 6),
        torch.tensor([[False, False, False], [True, False, True]]),
        torch.tensor([[True] * 5 + [False], [True] * 6]),
    )
    assert picked.tolist() == [[4, 3, 2], [0, 5, 1]]


def test_every_fifth_row_judges_and_is_not_learned_from(blobs):
    data = blobs.batch(torch.arange(12))
    held = fedfomo.is_judge(data, 0.2, 1) & data.mask
    size = torch.tensor(toys.SIZES)
    assert held.sum(1).tolist() == torch.where(size < 5, size, size // 5).tolist()
    assert held[1].nonzero().flatten().tolist() == list(range(4, 40, 5))
    method = fedfomo.build(toys.net(), epochs=1, least=8)
    x = blobs.x.clone()
    x[blobs.train[1][4::5]] += 100.0
    plain, moved = (
        run_round(method, d, first(method, d, 0), *[torch.tensor([1])] * 2)
        for d in (blobs, replace(blobs, x=x))
    )
    for n, value in plain.message.items():
        assert torch.equal(value, moved.message[n])


def test_alone_it_is_local_on_the_rows_that_are_left():
    data = toys.blobs((4,))  # too few to hold any back
    method = fedfomo.build(toys.net(), epochs=1)
    state = last(method, data, 1)
    alone = last(local.build(toys.net(), epochs=1), data, 1)
    for n, value in alone.client_states.items():
        close(state.client_states[n], value)


@pytest.mark.slow
def test_it_helps_where_there_are_two_kinds_of_clients():
    data = crossed(8)
    method, plain = fedfomo.build(toys.net()), fedavg.build(toys.net())
    own = evaluate(method, data, last(method, data, 12)).mean("accuracy")
    assert own > evaluate(plain, data, last(plain, data, 12)).mean("accuracy") + 0.2


def test_who_comes_later_weighs_what_all_others_value():
    data = replace(crossed(10), held_out=2)
    method = fedfomo.build(toys.net(), lr=0.05)
    state = last(method, data, 10, participation=fixed(6))
    held = {"model": "personal", "population": "held_out"}
    adaptation = evaluate(method, data, state, adaptation="fine_tune", **held).mean("nll")
    assert adaptation < evaluate(method, data, state, adaptation="none", **held).mean("nll")
