"""Replies that are lost, late, bad or of others, and sides that stop and begin again."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import test_contract as contract
import torch
import toys
from sites import CLOSE, SIZES, some

import pyrofl
from pyrofl.data import Federation
from pyrofl.files.lock import lock_folder
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.transport import Client, Server
from pyrofl.inference.transport.message_checks import InvalidRequestError, StateLostError
from pyrofl.models import conjugate, fedavg, fedbe, pvi, scaffold
from pyrofl.tensors import role

DATA = toys.blobs(SIZES)


def begun(method: Any, state: Path | None = None, **options: Any) -> Server:
    return Server(method, DATA.names, DATA.sizes, DATA.dtype, state=state, **options)


def sites(method: Any, folder: Path | None = None) -> dict[str, Client]:
    """Return six clients, each with its rows alone."""
    folders = {n: folder / n if folder else None for n in DATA.names}
    own = {n: some(DATA, [n]) for n in DATA.names}
    return {n: Client(method, own[n], state=folders[n], min_scored_rows=1) for n in DATA.names}


def a_round(server: Server, clients: dict[str, Client]) -> dict[str, Any]:
    return {n: clients[n].train(order) for n, order in server.configure_train().items()}


def sent(flat: Any) -> Any:
    """Send something over a wire."""
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_both_sides_may_stop_after_every_message(tmp_path):
    method = scaffold.build(toys.net(), epochs=1)
    last = {}
    for state in federate(method, DATA, 3):
        server = begun(method, tmp_path / "server")
        replies = {
            name: sent(sites(method, tmp_path)[name].train(sent(order)))
            for name, order in server.configure_train().items()
        }
        again = begun(method, tmp_path / "server")
        again.aggregate_train(replies)
        toys.assert_same(again.state.server, state.server, **CLOSE)
        last = begun(method, tmp_path / "server").checkpoint
    toys.assert_same(role("state", last), again.state.server)
    assert (last["round"], last["accepted"].tolist()) == (3, [3] * 6)


def test_an_order_may_come_twice_and_its_reply_be_lost(tmp_path):
    method = scaffold.build(toys.net(), epochs=1)
    server, clients = begun(method), sites(method, tmp_path)
    server.aggregate_train(a_round(server, clients))
    once, twice = (a_round(server, clients) for _ in range(2))
    for name, reply in once.items():
        toys.assert_same(role("up", reply), role("up", twice[name]))
    lost = server.aggregate_train({})  # round 2 never happened
    assert lost.silent.tolist() == list(range(6))
    assert server.accepted.tolist() == [1] * 6
    state = server.aggregate_train(a_round(server, clients))
    mean = {n: 0 for n in role("control", state.server)}
    for client in clients.values():
        (own,) = (one.settled(3).client_state for one in client._records.values())
        mean = {n: v + own[f"own/{n}"] / 6 for n, v in mean.items()}
    toys.assert_same(mean, role("control", state.server), 0.0, 1e-15)


def test_a_question_between_order_and_merge_changes_nothing():
    method = scaffold.build(toys.net(), epochs=1)
    states = []
    for asked in (False, True):
        server, clients = begun(method), sites(method)
        for _ in range(3):
            replies = a_round(server, clients)
            if asked:
                found = {n: clients[n].evaluate(q) for n, q in server.configure_evaluate().items()}
                assert server.aggregate_evaluate(found).rows.tolist() == [4] * 6
            server.aggregate_train(replies)
        states.append(server.state)
    toys.assert_same(states[0].server, states[1].server)


def test_clients_that_are_not_asked_to_report_keep_what_they_make():
    method = contract.built("pfedvem")
    draws = {"participation": fixed(2), "training_clients": fixed(4)}
    server, clients = begun(method, **draws), sites(method)
    for state in federate(method, DATA, 3, chunk_size=1, **draws):
        found = server.aggregate_train(a_round(server, clients))
        toys.assert_same(found.server, state.server, **CLOSE)
        assert found.trained.tolist() == state.trained.tolist()
        for i, name in enumerate(DATA.names):
            mine = clients[name]._records[name].settled(int(server.accepted[i])).client_state
            assert (mine is None) == (not state.seen[i])
            for n, v in (mine or {}).items():
                toys.assert_same({n: v}, {n: state.client_states[n][i]}, **CLOSE)


def test_state_that_does_not_belong_to_the_servers_is_refused():
    method = scaffold.build(toys.net(), epochs=1)
    server, clients = begun(method), sites(method)
    server.aggregate_train(a_round(server, clients))
    (order,) = (o for n, o in server.configure_train().items() if n == "client 2")
    fresh = sites(method)["client 2"]
    told = "client 2: the server has aggregated its message of round 1, .+ is of round 0; use"
    for ask in (fresh.train, fresh.evaluate):
        with pytest.raises(ValueError, match=told):
            ask(order | {"model": "global"})
    server.aggregate_train(a_round(server, clients))
    a_round(server, clients)
    for late in (order, order | {"round": 1}):  # as of a server that went back
        with pytest.raises(
            ValueError, match=r"client 2: a request of round . arrived after that of"
        ):
            clients["client 2"].train(late)
    clients["client 2"].forget(["client 2"])
    with pytest.raises(ValueError, match="of round 1, but its state here is of round 0; use"):
        clients["client 2"].train(order)
    plain = fedavg.build(toys.net(), epochs=1)  # which keeps nothing that could be lost
    order = begun(plain).configure_train()["client 2"] | {"accepted": torch.tensor([7])}
    assert sites(plain)["client 2"].train(order)["odd"] == ("",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"data": toys.blobs((4, *SIZES[1:]))},
            "client 0 has 4 training rows, but 3 at the server",
        ),
        ({"data": DATA.to("cpu", torch.float32)}, "float64 in the request, but the data are"),
        ({"data": replace(DATA, names=tuple("abcdef"))}, "a request is for 'client 0', but"),
        ({"seed": 1}, "seed of init is 1, but 0 at the server; use the same"),
        ({"order": {"ids": torch.tensor([6])}}, "client 0 has id 6; expected 0 to 5"),
        ({"order": {"round": None}}, "round is None; expected a whole number"),
        (
            {"order": {"reports": torch.ones(2)}},
            r"reports is torch.float32 \[2\]; expected torch.bool",
        ),
        ({"order": {"names": ("client 0", "client 0")}}, "expected distinct names"),
        ({"order": {"down/w/head.bias": 3}}, "down/w/head.bias is a int; expected a tensor"),
    ],
)
def test_orders_that_do_not_fit_are_refused(change, told):
    method = fedavg.build(toys.net(), epochs=1)
    order = begun(method).configure_train()["client 0"] | change.get("order", {})
    with pytest.raises(ValueError, match=told):
        Client(method, change.get("data", DATA), change.get("seed", 0)).train(order)


def test_an_order_of_other_versions_or_another_method_is_refused_by_name():
    for net, change, told in (
        (toys.net(), {"epochs": 2}, "method of phases is [0-9a-f]{12}, but [0-9a-f]{12} at the"),
        (toys.net(), {"lr": 0.3}, "method of phases is"),
        (toys.net(), {}, "version of torch is .+, but 1.0 at the server; use the same"),
    ):
        order = begun(fedavg.build(net, epochs=1)).configure_train()["client 0"]
        order |= {} if change else {"version/torch": "1.0"}
        other = sites(fedavg.build(net, **({"epochs": 1} | change)))["client 0"]
        with pytest.raises(InvalidRequestError, match=told):
            other.train(order)
    question = begun(fedavg.build(toys.net(), lr=0.3)).configure_evaluate()["client 0"]
    with pytest.raises(InvalidRequestError, match="method of phases is"):
        sites(fedavg.build(toys.net()))["client 0"].evaluate(question)


def test_one_folder_has_one_server(tmp_path):
    method = fedavg.build(toys.net(), epochs=1)
    one, other = (begun(method, tmp_path / "s") for _ in range(2))
    replies = a_round(one, sites(method))
    with lock_folder(tmp_path / "s"), pytest.raises(ValueError, match="is in use by process"):
        one.aggregate_train(replies)
    one.aggregate_train(replies)
    with pytest.raises(
        ValueError, match=r"server\.safetensors has round 1 of another server, but this"
    ):
        other.aggregate_train(replies)
    assert other.state.number == 0
    one.aggregate_train({})


def test_who_has_lost_its_state_comes_back_as_a_newcomer(tmp_path):
    # As PVI has it: the factor stays with the server, and what the client keeps begins again.
    method = contract.built("pfedvem")
    server, clients = begun(method, tmp_path / "server"), sites(method)
    server.aggregate_train(a_round(server, clients))
    clients["client 2"] = sites(method)["client 2"]
    with pytest.raises(StateLostError, match="or reset these clients by forget") as lost:
        a_round(server, clients)
    assert lost.value.names == ("client 2",)
    clients["client 2"].forget(lost.value.names)
    before = server.state.server
    server.reset_clients(lost.value.names)
    toys.assert_same(server.state.server, before)
    assert begun(method, tmp_path / "server").accepted.tolist() == [1, 1, 0, 1, 1, 1]
    state = server.aggregate_train(a_round(server, clients))
    assert not state.rejected
    assert server.accepted.tolist() == [2] * 6
    server.reset_clients(["client 2"])
    with pytest.raises(ValueError, match="unknown client 'me'"):
        server.reset_clients(["me"])


def test_a_server_that_lacks_what_a_client_has_lost_refuses_to_take_it_back():
    method = scaffold.build(toys.net(), epochs=1)
    server = begun(method)
    server.reset_clients(["client 2"])  # which is no loss before its first message
    server.aggregate_train(a_round(server, sites(method)))
    with pytest.raises(ValueError, match=r"its c_j, is in c for good, .+ expected remember"):
        server.reset_clients(["client 2"])
    assert server.accepted.tolist() == [1] * 6


def test_conjugate_sums_are_not_counted_twice():
    def coin(received: Any, local: Any, batch: Any) -> None:
        with batch.clients():
            p = pyro.sample("p", dist.Beta(1.0, 1.0))
            with batch.rows():
                pyro.sample("y", dist.Bernoulli(p), obs=batch.y)

    data = Federation.from_arrays({"a": (torch.zeros(3, 1), [1.0, 0.0, 1.0])})
    method = conjugate.method(coin, data)
    server = Server(method, data.names, data.sizes, data.dtype)
    server.reset_clients(["a"])
    order = server.configure_train()["a"]
    state = server.aggregate_train({"a": Client(method, data).train(order)})
    with pytest.raises(ValueError, match="would be counted twice; expected clients that keep"):
        server.reset_clients(["a"])
    toys.assert_same(server.state.server, state.server)


def test_scaffold_takes_what_a_client_has_lost_out_of_its_mean():
    plain, method = (scaffold.build(toys.net(), epochs=1, remember=r) for r in (False, True))
    server, clients, other = begun(method), sites(method), begun(plain)
    for _ in range(2):
        replies = a_round(server, clients)
        other.aggregate_train(replies)
        server.aggregate_train(replies)
    toys.assert_same(role("control", server.state.server), role("control", other.state.server))
    clients["client 2"] = sites(method)["client 2"]
    server.reset_clients(["client 2"])
    for _ in range(2):  # c stays the mean of all c_j, a newcomer's zero among them
        mine = {n: one for c in clients.values() for n, one in c._records.items()}
        for n, v in role("control", server.state.server).items():
            at = zip(DATA.names, server.accepted.tolist(), strict=True)
            own = [mine[name].settled(last).client_state for name, last in at]
            mean = sum(one[f"own/{n}"] for one in own if one) / 6
            toys.assert_same({n: v}, {n: mean}, **CLOSE)
        assert not server.aggregate_train(a_round(server, clients)).rejected
    assert server.accepted.tolist() == [4] * 6
    with pytest.raises(
        ValueError, match="remember is True and aggregation is 'median'; expected 'mean'"
    ):
        scaffold.build(toys.net(), remember=True, aggregation="median")


NAN = torch.full((1, toys.CLASSES), torch.nan, dtype=torch.float64)
ONES = torch.ones_like(NAN)
BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "late": (lambda r: r | {"round": 0}, "its reply is of round 0; expected round 1"),
    "another's": (
        lambda r: r | {"names": ("client 1",)},
        "its reply is of client 1; expected a reply of its own",
    ),
    "NaN": (
        lambda r: r | {"up/w/head.bias": NAN},
        "w/head.bias[0] is nan; expected a finite number",
    ),
    "shape": (
        lambda r: r | {"up/w/head.bias": ONES[:, :2]},
        "has shape [2]; expected shape [5]",
    ),
    "rows": (lambda r: r | {"up/w/head.bias": ONES[0]}, "expected shape [1, ...]"),
    "type": (
        lambda r: r | {"up/w/head.bias": ONES.float()},
        "is torch.float32; expected torch.float64",
    ),
    "missing": (lambda r: {n: v for n, v in r.items() if n != "up/w/head.bias"}, "is missing"),
    "no message": (lambda r: r | {"sends": torch.tensor([False])}, "it sends no message"),
    "its own word": (lambda r: r | {"odd": ("client 0: lost",)}, "lost"),
    "no steps": (lambda r: r | {"steps": None}, "steps is None; expected torch.int64 [1]"),
    "none": (lambda r: {}, "names is None; expected"),
    "text": (lambda r: r | {"up/w/head.bias": "x"}, "up/w/head.bias is a str; expected a tensor"),
    "nothing": (lambda r: None, "client 0: "),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_named_and_left_out(kind):
    method = fedavg.build(toys.net(), epochs=1)
    change, told = BAD[kind]
    replies = a_round(begun(method), sites(method))
    bad, without = begun(method), begun(method)
    found = bad.aggregate_train(replies | {"client 0": change(replies["client 0"])})
    expected = without.aggregate_train({n: r for n, r in replies.items() if n != "client 0"})
    toys.assert_same(found.server, expected.server)
    assert len(found.rejected) == 1
    assert found.rejected[0].startswith("client 0: ")
    assert told in found.rejected[0]
    assert bad.accepted.tolist() == without.accepted.tolist() == [0, 1, 1, 1, 1, 1]


def test_a_client_cannot_reply_twice_or_unasked():
    method = fedavg.build(toys.net(), epochs=1)
    server = begun(method, participation=lambda *_: torch.tensor([0, 1]))
    replies = a_round(server, sites(method))
    copied = {
        "machine": replies["client 0"],
        "other": replies["client 1"] | {"names": ("client 5",)},
    }
    found = server.aggregate_train(replies | copied)
    assert found.reporters.ids.tolist() == [0, 1]
    assert [r.split(":")[0] for r in found.rejected] == ["machine", "other"]


def test_only_the_metrics_that_are_asked_for_are_told():
    method = fedavg.build(toys.net(), epochs=1)
    server = begun(method)

    def surest(found: Any, y: Any, mask: Any) -> torch.Tensor:
        return found.mean.amax((1, 2))

    mine = {"surest": surest}
    how = {"metrics": mine, "min_scored_rows": 1}
    clients = {n: Client(method, some(DATA, [n]), **how) for n in DATA.names}
    asked = server.configure_evaluate(metrics=["surest", "accuracy"], part="train")
    answers = {n: clients[n].evaluate(q) for n, q in asked.items()}
    assert server.aggregate_evaluate(answers).values.keys() == {"surest", "accuracy"}
    assert not [n for flat in answers.values() for n in flat if n.startswith("up/")]
    del answers["client 3"]
    found = server.aggregate_evaluate(answers)
    assert (found.ids.tolist(), found.rows.tolist()) == ([0, 1, 2, 4, 5], [3, 9, 7, 4, 8])
    for change, told in (
        ({"part": "test"}, "client 4: replies to .+; expected replies to"),
        ({"rows": None}, "client 4: rows is None; expected torch.int64"),
        ({"names": ("me",)}, "client 4: its reply is of me; expected a reply of its own clients"),
    ):
        found = server.aggregate_evaluate(answers | {"client 4": answers["client 4"] | change})
        assert found.ids.tolist() == [0, 1, 2, 5]
        assert re.search(told, *found.rejected)
    with pytest.raises(ValueError, match="no client has replied"):
        server.aggregate_evaluate({})


@pytest.mark.parametrize(("least", "sent"), [({}, [1, 2, 3, 5]), (8, [1, 3, 5]), (None, [])])
def test_scores_of_few_rows_and_of_clients_that_share_none_are_not_sent(least, sent):
    method = fedavg.build(toys.net(), epochs=1)
    server = begun(method)
    how = {"min_scored_rows": least} if least != {} else {}
    holders = {"here": list(DATA.names)}
    (asked,) = server.configure_evaluate(holders, part="train").values()
    answer = Client(method, DATA, **how).evaluate(asked)
    assert answer["names"] == tuple(DATA.names[i] for i in sent)
    assert all(len(v) == len(sent) for n, v in answer.items() if torch.is_tensor(v))
    if sent:
        found, every = (
            server.aggregate_evaluate({"here": answer}),
            Client(method, DATA, min_scored_rows=1),
        )
        whole = server.aggregate_evaluate({"here": every.evaluate(asked)})
        assert found.ids.tolist() == sent
        toys.assert_same(found.values, {n: v[sent] for n, v in whole.values.items()})


def test_a_client_without_test_rows_has_nothing_to_tell():
    data = some(DATA, ["client 0"])
    none = replace(data, test=(torch.zeros(0, dtype=torch.long),))
    method = fedavg.build(toys.net(), epochs=1)
    server, question = begun(method), begun(method).configure_evaluate()
    answers = {"client 0": Client(method, none).evaluate(question["client 0"])}
    assert answers["client 0"]["names"] == ()
    answers["client 1"] = sites(method)["client 1"].evaluate(question["client 1"])
    assert server.aggregate_evaluate(answers).ids.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"names": ["a", "a"], "sizes": [1, 2]}, "names: expected distinct names, found 'a' twice"),
        ({"names": ["a"], "sizes": [1, 2]}, "names and sizes differ in length: 1, 2"),
        ({"names": ["a", "b"], "sizes": [1, 0]}, "b has 0 training rows; expected at least one"),
        ({"dtype": torch.int64}, "dtype is torch.int64; expected torch.float32"),
        ({"seed": -1}, "seed of init is -1"),
    ],
)
def test_what_a_server_is_told_is_checked(change, told):
    usual = {"names": DATA.names, "sizes": DATA.sizes, "dtype": DATA.dtype}
    with pytest.raises(ValueError, match=told):
        Server(fedavg.build(toys.net()), **(usual | change))


def test_folders_of_other_runs_are_refused(tmp_path):
    method, other = (fedavg.build(toys.net(), epochs=1, lr=lr) for lr in (0.01, 0.1))
    server, clients = begun(method, tmp_path / "s"), sites(method, tmp_path)
    server.aggregate_train(a_round(server, clients))
    with pytest.raises(ValueError, match=r"of another run; now phases.+0\.1"):
        begun(other, tmp_path / "s")
    with pytest.raises(ValueError, match=r"of another run; now phases.+0\.1"):
        sites(other, tmp_path)
    with pytest.raises(ValueError, match="seed of noise is 3 and was 0"):
        begun(method, tmp_path / "s", seed=3)
    with pytest.raises(ValueError, match="hash of the data is"):
        Client(method, some(DATA, ["client 1"]), state=tmp_path / "client 0")
    with pytest.raises(ValueError, match=r"is not empty, it holds server\.safetensors"):
        Client(method, some(DATA, ["client 1"]), state=tmp_path / "s")


@contract.on_archetypes
def test_a_server_needs_no_rows(name, monkeypatch):
    def refuse(self: Federation, *_: object, **__: object) -> None:
        raise AssertionError("a server has rows")

    method = contract.built(name)
    monkeypatch.setattr(Federation, "__init__", refuse)
    server = begun(method)
    assert server.configure_train().keys() == server.configure_evaluate().keys() == set(DATA.names)
    assert server.aggregate_train({}).number == 1


def test_the_rows_without_labels_are_the_servers():
    rows, teaching = toys.blobs().x[-30:], {"distil_epochs": 1, "epochs": 1}
    whole = fedbe.build(toys.net(), server_data=rows, **teaching)
    clients = sites(fedbe.build(toys.net(), distil="none", epochs=1))
    server = begun(whole)
    for state in federate(whole, DATA, 2, chunk_size=1):
        server.aggregate_train(a_round(server, clients))
        toys.assert_same(server.state.server, state.server, **CLOSE)


def test_a_method_that_looks_at_shapes_is_built_from_an_outline():
    outline = pyrofl.data.outline(
        DATA.names, DATA.sizes, (8,), classes=tuple("abcde"), dtype=DATA.dtype
    )
    assert outline.x.untyped_storage().nbytes() == 8

    def model(received: Any, local: Any, batch: Any) -> None:
        with batch.clients():
            mean = pyro.sample("mean", dist.Normal(torch.zeros(1, 5).double(), 1.0).to_event(1))
            own = pyro.sample("own", dist.Normal(mean, 1.0).to_event(1))
            with batch.rows():
                logits = own + batch.x[..., :5]
                pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)

    real, made = (
        pvi.hierarchical(model, data, shared="mean", num_particles=8, steps=2)
        for data in (DATA, outline)
    )
    server, clients = begun(made), sites(made)
    for state in federate(real, DATA, 2, chunk_size=1):
        server.aggregate_train(a_round(server, clients))
        toys.assert_same(server.state.server, state.server, **CLOSE)
