"""IFCA: who is in which cluster, and FedAvg inside each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch.nn.functional import cross_entropy, one_hot
from toys import crossed, last

from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedavg, ifca, pfedmb
from pyrofl.nets import build
from pyrofl.tensors import generator, role, under

PROMISES = {"ifca": Promises(message=(toys.ALL + 1, 2 * toys.ALL), sent=frozenset({"cluster"}))}


def test_one_cluster_is_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    one = last(ifca.build(net, clusters=1, batch=2, lr=0.1), tiny, 3)
    plain = last(fedavg.build(net, batch=2, lr=0.1), tiny, 3)
    for n, value in plain.server.items():
        assert torch.equal(one.server[f"cluster/{n}"][0], value)


def test_a_client_takes_the_model_of_least_loss(tiny):
    net = build("mlp:5", (4,), 3)
    method = ifca.build(net, clusters=4, lr=0.0)
    begun = first(method, tiny, 0)
    state = last(method, tiny, 1)
    models = role("cluster/w", begun.server)
    for j, rows in enumerate(tiny.train):
        x, y = tiny.x[rows], tiny.y[rows]
        losses = [
            float(cross_entropy(net.apply({n: v[k] for n, v in models.items()}, x), y))
            for k in range(4)
        ]
        nearest = losses.index(min(losses))
        assert int(state.client_states["cluster"][j]) == nearest
        for n, value in models.items():
            close(state.message[f"w/{n}"][j], value[nearest])
    assert len(set(state.client_states["cluster"].tolist())) > 1


def test_every_cluster_is_fedavg_of_its_clients():
    net, data = toys.net(), crossed()
    method = ifca.build(net, clusters=2, epochs=2, lr=0.1)
    begun = last(method, data, 2)
    state = run_round(method, data, begun, torch.arange(6), torch.arange(6))
    for k in range(2):
        ids = (state.client_states["cluster"] == k).nonzero().flatten()
        assert len(ids)
        plain = fedavg.build(net, epochs=2, lr=0.1)
        start = replace(first(plain, data, 0, cut_to(begun.server, k)), number=begun.number)
        alone = run_round(plain, data, start, ids, ids)
        for n, value in alone.server.items():
            close(state.server[f"cluster/{n}"][k], value, 1e-9)


def cut_to(server: dict[str, torch.Tensor], k: int) -> dict[str, torch.Tensor]:
    return {n: v[k] for n, v in role("cluster", server).items()}


def test_a_cluster_without_clients_stays_as_it_was(tiny):
    method = ifca.build(build("mlp:5", (4,), 3), clusters=6)
    old = first(method, tiny, 0).server
    state = last(method, tiny, 1)
    chosen = set(state.client_states["cluster"].tolist())
    for n, value in state.server.items():
        for k in range(6):
            assert torch.equal(value[k], old[n][k]) != (k in chosen)


def test_the_server_is_pfedmbs_with_all_weight_on_one_branch(tiny):
    method = ifca.build(build("mlp:5", (4,), 3), clusters=3)
    old = first(method, tiny, 0).server
    state = last(method, tiny, 1)
    branched = pfedmb.build(build("mlp:5", (4,), 3), branches=3, shared=True)
    message = {"alpha": one_hot(state.message["cluster"].long(), 3)[:, None].double()}
    for n in role("cluster/w", state.server):
        sent = state.message[f"w/{n}"]
        message[f"branch/{n}"] = sent[:, None].expand(-1, 3, *sent.shape[1:])
    found = branched.aggregate(
        under("branch", role("cluster/w", old)), message, state.reporters, generator(0)
    )
    for n, value in role("cluster/w", state.server).items():
        close(value, found[f"branch/{n}"])


@pytest.mark.slow
def test_clients_of_one_kind_find_each_other():
    data = crossed()
    method = ifca.build(toys.net(), lr=0.05)
    # From some starts all choose one model, so there are three, as the paper has it.
    states = [last(method, data, 12, seed=seed) for seed in range(3)]
    seed, state = min(enumerate(states), key=lambda found: float(found[1].loss["w/*"].mean()))
    clusters = state.client_states["cluster"]
    assert clusters[0] != clusters[1]
    assert clusters[0::2].unique().numel() == clusters[1::2].unique().numel() == 1
    plain = fedavg.build(toys.net(), lr=0.05)
    common = evaluate(plain, data, last(plain, data, 12, seed=seed)).mean("accuracy")
    assert evaluate(method, data, state).mean("accuracy") > common + 0.2


def test_who_comes_later_chooses_before_a_test():
    data = replace(crossed(8), held_out=2)
    method = ifca.build(toys.net(), lr=0.05)
    state = last(method, data, 12, seed=1, participation=fixed(5))
    held = {"model": "personal", "population": "held_out"}
    chosen = evaluate(method, data, state, adaptation="fine_tune", **held).mean("nll")
    assert chosen < evaluate(method, data, state, adaptation="none", **held).mean("nll")


def test_a_message_is_one_model_and_its_cluster(tiny):
    method = ifca.build(build("mlp:5", (4,), 3), clusters=4)
    state = last(method, tiny, 1)
    sizes = {n: v[0].numel() for n, v in state.message.items()}
    assert sizes.pop("cluster") == 1
    assert state.bytes_up.tolist() == [8 * sum(sizes.values()) + 4] * 3
    received = method.download(state.server, state.reporters)
    assert sum(v[0].numel() for v in received.values()) == 4 * sum(sizes.values())


def test_clusters_are_at_least_one():
    with pytest.raises(ValueError, match="clusters is 0"):
        ifca.build(build("softmax", (4,), 3), clusters=0)
