"""Servers and clients apart: the numbers of the loop, whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import test_contract as contract
import torch
import toys
from sites import CLOSE, SIZES, some

from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Stragglers, bernoulli, sample_clients
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.transport import Client, Server
from pyrofl.tensors import Tensors

LESS = Stragglers(min_work=0.4)
HOLDERS = {"client 0": ["client 0"], "two": ["client 2", "client 1"], "rest": ["client 3"]}
HOLDERS["rest"] += ["client 4", "client 5"]


LOST = ({"two"}, {"client 0"}, set[str]())  # replies that never arrive, by round


def apart(name: str, **options: object) -> tuple[Server, dict[str, Client]]:
    """Return a server without any row, and clients on three machines."""
    data, method = toys.blobs(SIZES), contract.built(name)
    slow = lambda number: LESS.working(method, data.names, 5, number)  # noqa: E731
    server = Server(slow, data.names, data.sizes, data.dtype, 5, **options)
    rows = {h: some(data, names) for h, names in HOLDERS.items()}
    return server, {h: Client(slow, own, 5, min_scored_rows=1) for h, own in rows.items()}


def private(clients: Mapping[str, Client], merged: Mapping[str, int]) -> Tensors:
    """Return what clients keep, [J, ...], zeros of newcomers, given the rounds that were merged."""
    own = {n: one for client in clients.values() for n, one in client._records.items()}
    mine = [own[name].settled(number).client_state for name, number in merged.items()]
    like = next((one for one in mine if one), {})
    none = {n: torch.zeros_like(v) for n, v in like.items()}
    return {n: torch.stack([(one or none)[n] for one in mine]) for n in like}


def squared(tensors: Tensors) -> Tensors:
    """Compare matrices instead of their roots, which lose half of the digits where singular."""
    return {n: v @ v.mT if n.startswith("root/") else v for n, v in tensors.items()}


@contract.on_archetypes
def test_halves_make_the_rounds_of_the_loop(name):
    data, draw = toys.blobs(SIZES), bernoulli(0.7)
    server, clients = apart(name, participation=draw)
    state = first(contract.built(name), data, 5)
    for number, lost in enumerate(LOST):
        method = LESS.working(contract.built(name), data.names, 5, number)
        asked, ids = sample_clients(method, 6, 5, number, draw, None)
        missed = asked[
            torch.isin(asked, torch.tensor([int(n[-1]) for h in lost for n in HOLDERS[h]]))
        ]
        heard = asked[~torch.isin(asked, missed)]
        state = run_round(method, data, state, ids, heard, missed, seed=5, chunk_size=1)
        orders = server.configure_train(HOLDERS)
        replies = {h: clients[h].train(order) for h, order in orders.items()}
        for flat in (*orders.values(), *replies.values()):  # a view would take its table along
            each = [v for v in flat.values() if torch.is_tensor(v)]
            assert all(v.untyped_storage().nbytes() <= v.nbytes for v in each)
        found = server.aggregate_train({h: r for h, r in replies.items() if h not in lost})
        toys.assert_same(found.server, state.server, **CLOSE)
        toys.assert_same(found.message, state.message, **CLOSE)
        accepted = dict(zip(data.names, server.accepted.tolist(), strict=True))
        toys.assert_same(squared(private(clients, accepted)), squared(state.client_states), **CLOSE)
        assert found.reporters.ids.tolist() == heard.tolist()
        assert found.silent.tolist() == missed.tolist()
        assert found.bytes_up.tolist() == state.bytes_up.tolist()
        assert not found.rejected
    for view in method.views:
        asked = {"model": view, "draws": 2}
        asked |= {"adaptation": "train"} if view == method.main_view else {}
        expected = evaluate(method, data, state, seed=5, chunk_size=1, **asked)
        questions = server.configure_evaluate(HOLDERS, **asked)
        scores = server.aggregate_evaluate(
            {h: clients[h].evaluate(q) for h, q in questions.items()}
        )
        toys.assert_same(scores.values, expected.values, **CLOSE)
        assert scores.rows.tolist() == expected.rows.tolist()


@pytest.mark.parametrize("name", ["seed", "chunk_size", "chunk"])
def test_settings_of_the_machines_are_not_requested(name):
    data, method = toys.blobs(SIZES), contract.built("fedavg")
    names = list(data.names[: data.clients])
    server, client = Server(method, names, data.sizes, data.dtype), Client(method, data)
    server.aggregate_train({"all": client.train(server.configure_train({"all": names})["all"])})
    with pytest.raises(ValueError, match=name):
        server.configure_evaluate(**{name: 2})


@pytest.mark.parametrize("name", ["fedavg", "fedbe", "metavd", "pfedvem", "pvi"])
@pytest.mark.parametrize("population", ["held_out", "pooled"])
def test_rows_that_no_client_trains_on_are_scored_where_they_are(name, population):
    whole = toys.blobs(SIZES, held_out=2)
    data, method = replace(whole, pooled_test=torch.arange(9)), contract.built(name)
    names = list(data.names[: data.clients])
    server, client = Server(method, names, data.sizes[:4], data.dtype, 5), Client(method, data, 5)
    for _ in range(2):
        server.aggregate_train({"all": client.train(server.configure_train({"all": names})["all"])})
    with pytest.raises(ValueError, match=rf"is '{population}', but .+evaluate\(.+, server.st"):
        server.configure_evaluate(population=population)
    assert server.configure_evaluate(population="training").keys() == set(names)
    *_, state = federate(method, data, 2, seed=5)
    found, expected = (
        evaluate(method, data, one, seed=5, population=population).values
        for one in (server.state, state)
    )
    toys.assert_same(found, expected, **CLOSE)
