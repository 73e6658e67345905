"""MetaVD: what the server learns, its limits, its variants, its heads and its pruning."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import toys
from checks import TRAINED, close
from promises import Promises, others_slow
from torch.nn.functional import linear
from toys import last

import pyrofl
from pyrofl.data import Cohort
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState, client_inputs
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedavg, guides, metavd
from pyrofl.models.guides.dropout import MIN_SQUARED_MEAN
from pyrofl.models.metavd import hypernetwork
from pyrofl.nets import build as network
from pyrofl.tensors import Tensors, generator, role, under

PROMISES = {
    "metavd": Promises(
        random=True,
        sites={"fc1.weight": toys.AXES["fc1.weight"]},
        statistics={
            **dict.fromkeys(("dropout_rate", "exact_beta", "rates_above_0.9", "sparsity"), ()),
            "dropout_rate.fc1.weight": toys.AXES["fc1.weight"],
            "log_alpha.fc1.weight": toys.AXES["fc1.weight"],
            "embedding": ("embedding_dim_0",),
        },
        message=(toys.ALL + 6 * toys.FEATURES, toys.ALL + 6 * toys.FEATURES),
        rises=frozenset({"loc/* spread/*"}),
    )
}

SIZES = (3, 11, 7, 5)
WHO = Cohort(torch.arange(3), torch.tensor([2.0, 5.0, 3.0], dtype=torch.float64))
G = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
PLAIN = {"server_lr": 1.0, "momentum": 0.0}
LOUD = {"prune": 0.5, "init_scale": 0.3}
FIRST = {"fc2.weight": torch.full((5, 6), -8.5, dtype=torch.float64)}
SOURCE = hypernetwork.hypernetwork(FIRST, [10], None, 8.5, (sgd(1.0), sgd(1.0)))  # of `small`


def net(spec: str = "mlp:6,5") -> Any:
    return toys.net(spec)


def small(**options: Any) -> Method:
    usual = {"width": 10, "depth": 1, "batch": 4, "epochs": 1, "lr": 0.02, "hyper_lr": 0.9}
    return metavd.build(net(), **(usual | options))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def server_of(method: Method, clients: int = 4) -> Tensors:
    return first(method, toys.blobs(SIZES[:clients]), 0).server


def message_of(
    method: Method, server: Tensors, cohort: Cohort = WHO, noise: float = 0.1
) -> Tensors:
    """Return what clients would send that moved a little."""
    received = method.download(server, cohort)
    return {n: v + noise * random(*v.shape, seed=i) for i, (n, v) in enumerate(received.items())}


# What the server learns


def linear_hypernetwork() -> tuple[hypernetwork.DropoutSource, Tensors, Tensors]:
    """Return s = A e with one-hot embeddings and A = I + something, and what clients found."""
    start = {"w": torch.zeros(4, dtype=torch.float64)}
    source = hypernetwork.hypernetwork(start, [], 3, 1e9, (sgd(1.0), sgd(1.0)))
    server = {
        "server/psi/weight0": random(4, 3),
        "server/psi/bias0": torch.zeros(4, dtype=torch.float64),
        "server/embedding": random(3, 3, seed=1),
    }
    return source, server, {"w": random(3, 4, seed=2)}


def test_pseudo_gradients_of_a_linear_hypernetwork():
    source, server, found = linear_hypernetwork()
    a, e = server["server/psi/weight0"], server["server/embedding"]
    sent = source.read(server, WHO.ids)["w"]
    close(sent, e @ a.T)
    slope = source.slope(server, WHO, found)
    gap = G[:, None] * (sent - found["w"])
    close(slope["server/psi/weight0"], gap.T @ e)
    close(slope["server/embedding"], gap @ a)


@pytest.mark.parametrize("name", ["server/psi/weight0", "server/embedding"])
def test_one_step_moves_a_table_to_what_clients_found(name):
    # One-hot embeddings and A = I: s_m -> (1 - g_m) s_server + g_m s_local.
    eye = torch.eye(3, dtype=torch.float64)
    source = hypernetwork.hypernetwork(
        {"w": torch.zeros(3, dtype=torch.float64)}, [], 3, 1e9, (sgd(1.0), sgd(1.0))
    )
    server = {
        "server/psi/weight0": eye,
        "server/psi/bias0": eye.new_zeros(3),
        "server/embedding": eye,
    }
    found = {"w": random(3, 3)}
    moved = hypernetwork.learn(server, source.slope(server, WHO, found), {name: sgd(1.0)}, clip=1e9)
    close(
        source.read(server | moved, WHO.ids)["w"],
        (1 - G[:, None]) * eye + G[:, None] * found["w"],
        1e-8,
    )


@pytest.fixture
def forward_passes(monkeypatch) -> list[int]:
    """Return the numbers of clients of which the hypernetwork computes parameters."""
    clients: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if len(weight) == FIRST["fc2.weight"].numel():  # the last layer
            clients.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr(hypernetwork, "linear", counted)
    return clients


def test_the_hypernetwork_runs_once_per_round(forward_passes):
    data = toys.blobs(SIZES)
    assert len(list(federate(small(), data, 3, chunk_size=4, check=False))) == 3
    assert forward_passes == [4] * 4  # for the first message, and after each update


def test_a_resumed_run_computes_the_same_parameters_again():
    data = toys.blobs(SIZES)
    *_, two, three = federate(small(), data, 3, chunk_size=4)
    (resumed,) = federate(small(), data, 3, chunk_size=4, resume_from=two)
    toys.assert_same(resumed.server, three.server)
    toys.assert_same(resumed.message, three.message)


def test_parameters_are_computed_again_once_something_was_written(forward_passes):
    server, ids = dict(server_of(small())), torch.tensor([2, 0])
    before = SOURCE.read(server, ids)
    assert SOURCE.read(server, ids.flip(0))["fc2.weight"].equal(before["fc2.weight"].flip(0))
    assert forward_passes == [2]
    for name in ("server/embedding", "server/psi/weight1"):
        server[name].mul_(0.5)
        after = SOURCE.read(server, ids)
        copies = {n: v.clone() for n, v in server.items()}
        toys.assert_same(after, SOURCE.read(copies, ids))
        assert not after["fc2.weight"].equal(before["fc2.weight"])
    before = SOURCE.read(server, ids)
    values = {n: v.clone() for n, v in before.items()}
    before["fc2.weight"].zero_()
    toys.assert_same(SOURCE.read(server, ids), values)


def test_copies_for_other_processes_have_no_outputs():
    latest = hypernetwork.LatestOutputs(lambda held, ids: {"out": held["w"][ids]})
    latest({"w": torch.randn(3, 1000)}, torch.tensor([0, 2]))
    assert len(latest._outputs) == 1
    assert copy.deepcopy(latest)._outputs == []


def test_outputs_beyond_the_bound_teach_nothing():
    source, server, found = linear_hypernetwork()
    bounded = hypernetwork.hypernetwork(
        {"w": torch.zeros(4).double()}, [], 3, 1e-3, (sgd(1.0), sgd(1.0))
    )
    assert float(source.read(server, WHO.ids)["w"].abs().min()) > 1e-3
    assert all(bool((v == 0).all()) for v in bounded.slope(server, WHO, found).values())


def test_spreads_that_did_not_change_leave_decay_alone():
    method = small()
    server = server_of(method)
    moved = method.aggregate(server, method.download(server, WHO), WHO, generator(0))
    for n, value in server.items():
        decay = 1 if n.startswith("loc/") else 1 - 0.9 * 5e-4
        close(moved[n], decay * value, 1e-12 if n.startswith("server") else 1e-9)


def test_absent_clients_decay_and_coast():
    method = small()
    server = server_of(method)
    one = method.aggregate(server, message_of(method, server), WHO, generator(0))
    absent = server["server/embedding"][3]
    close(one["server/embedding"][3], (1 - 0.9 * 5e-4) * absent)
    two = method.aggregate(one, message_of(method, one), WHO, generator(0))
    step = 0.3 * 5e-4 * absent + 5e-4 * one["server/embedding"][3]
    close(two["server/embedding"][3], one["server/embedding"][3] - 0.9 * step)


@pytest.mark.parametrize("precision", ["variance", "alpha"])
def test_the_server_averages_the_layer_by_precision_and_the_rest_by_size(precision):
    method = small(precision=precision, on="fedavg")
    server = server_of(method)
    message = message_of(method, server)
    moved = method.aggregate(server, message, WHO, generator(0))
    for n, v in role("loc", message).items():
        mean = torch.einsum("c,c...->...", G, v)
        if n == "fc2.weight":
            g, s = G[:, None, None], message["spread/fc2.weight"].clamp(-8.5, 8.5)
            weight = g / (
                s.exp() / ((v**2).clamp(min=MIN_SQUARED_MEAN) if precision == "alpha" else 1)
                + 1e-10
            )
            assert not torch.allclose(mean, (weight * v).sum(0) / weight.sum(0), rtol=1e-3)
            mean = (weight * v).sum(0) / weight.sum(0)
        close(moved[f"loc/{n}"], mean, 1e-12)


def test_momentum_and_the_joint_norm_of_all_gradients():
    method = small()
    server = server_of(method)
    message = message_of(method, server)
    cohort = Cohort(WHO.ids, torch.ones(3).double())
    message["loc/head.bias"] += 1e3
    slope = SOURCE.slope(server, cohort, role("spread", message))
    one = method.aggregate(server, message, cohort, generator(0))
    bias = server["loc/head.bias"] - message["loc/head.bias"].mean(0)
    velocity = (server["loc/head.bias"] - one["loc/head.bias"]) / 0.9
    shrunk = velocity / bias
    assert float(velocity.norm()) == pytest.approx(100, abs=0.1)  # the rest is short
    close(shrunk, shrunk.mean().expand(5))
    for n in ("server/psi/bias1", "server/embedding"):
        close(one[n], server[n] - 0.9 * (shrunk[0] * slope[n] + 5e-4 * server[n]))
    again = method.aggregate(one, method.download(one, cohort), cohort, generator(0))
    close(again["loc/head.bias"], one["loc/head.bias"] - 0.9 * 0.9 * velocity)


def test_a_vd_spread_is_averaged_and_an_ensembles_is_kept():
    vd, ensemble = (small(dropout=d) for d in ("vd", "ensemble"))
    server = server_of(vd)
    message = message_of(vd, server)
    moved = vd.aggregate(server, message, WHO, generator(0))
    # The server holds the change since the start, so that weight decay leads back there.
    assert not server["server/spread/fc2.weight"].any()
    change = 0.9 * (torch.einsum("c,c...->...", G, message["spread/fc2.weight"]) + 8.5)
    close(moved["server/spread/fc2.weight"], change, 1e-6)
    later = vd.aggregate(moved, vd.download(moved, WHO), WHO, generator(0))
    coasted = change + 0.6 * change - 0.9 * 5e-4 * change
    close(later["server/spread/fc2.weight"], coasted, 1e-6)

    server = server_of(ensemble)
    message = message_of(ensemble, server)
    moved = ensemble.aggregate(server, message, WHO, generator(0))
    rows = moved["server/spread/fc2.weight"]
    assert torch.equal(rows[:3], message["spread/fc2.weight"])
    assert torch.equal(rows[3], server["server/spread/fc2.weight"][3])
    received = ensemble.download(moved, Cohort(torch.tensor([1, 9]), torch.ones(2)))
    close(received["spread/fc2.weight"][0], rows[1])
    close(received["spread/fc2.weight"][1], rows.mean(0))


# How fast spreads move


def fast(**options: Any) -> Method:
    """Return a method whose rates run away: steps of 0.9 on a divergence that counts ten-fold."""
    return small(
        **({"lr": 0.3, "clip": 1e9, "epochs": 4, "beta": 100.0, "init_scale": 0.3} | options)
    )


def spreads(server: Tensors, method: Method) -> torch.Tensor:
    whose = Cohort(torch.arange(len(SIZES)), torch.ones(len(SIZES)).double())
    return role("spread", method.download(server, whose))["fc2.weight"]


@pytest.mark.parametrize("dropout", others_slow(["meta", "vd", "ensemble"], ["meta"]))
def test_no_spread_of_any_client_moves_by_more_than_the_bound(dropout):
    data, most = toys.blobs(SIZES), 0.05
    free, bound = (fast(dropout=dropout, hyper_step=step) for step in (None, most))
    half = bernoulli(0.5)  # absent clients move with psi, and coast
    moves = {}
    for method in (free, bound):
        states = [first(method, data, 0), *federate(method, data, 6, participation=half)]
        s = [spreads(state.server, method) for state in states]
        moves[method is bound] = [float((b - a).abs().max()) for a, b in pairwise(s)]
    assert max(moves[False]) > 3 * most  # it would have moved further
    assert max(moves[True]) <= most * (1 + 1e-5)
    assert max(moves[True]) > 0.9 * most  # and goes as far as it may


def test_a_bound_that_is_never_reached_changes_nothing():
    data = toys.blobs(SIZES)
    free, bound = (last(small(hyper_step=step), data, 3).server for step in (None, 1e3))
    toys.assert_same(free, bound)


def test_a_shortened_step_of_a_linear_hypernetwork_is_a_share_of_the_whole():
    source, server, found = linear_hypernetwork()
    slope = {"server/psi/bias0": source.slope(server, WHO, found)["server/psi/bias0"]}
    moved = hypernetwork.learn(server, slope, {"server/psi/bias0": sgd(1.0, 0.6)}, clip=1e9)
    source = replace(source, optims={"server/psi/bias0": sgd(1.0, 0.6)})
    whole = moved["server/psi/bias0"] - server["server/psi/bias0"]  # s moves as the bias does
    share = 0.01 / whole.abs().max()
    short = hypernetwork.shorten_step(source, server, moved, 0.01)
    close(short["server/psi/bias0"], server["server/psi/bias0"] + share * whole)
    velocity = "server/optim/server/psi/bias0:momentum_buffer"
    close(short[velocity], share * moved[velocity])


def test_predictions_use_the_mean_of_the_weights_unless_draws_are_given():
    data, method = toys.blobs(SIZES), small(on="fedavg", init_scale=2.0)
    run, x = pyrofl.fit(method, data, 1, progress=False), random(9, 8)
    theta = role("loc", run.state.server)
    close(run.predict(x, "client 1").mean, net().apply(theta, x).softmax(-1))
    weights = run.posterior(400)["fc2.weight"][:, 1]  # that `to_arviz` has
    drawn = [net().apply(theta | {"fc2.weight": w}, x).softmax(-1) for w in weights]
    average = run.predict(x, "client 1", draws=400).mean
    torch.testing.assert_close(average, torch.stack(drawn).mean(0), atol=0.03, rtol=0)
    assert float((average - run.predict(x, "client 1").mean).abs().max()) > 0.05
    assert "draws=100" in str(metavd.__doc__)
    assert "draws=100" in str(pyrofl.Run.predict.__doc__)


def test_the_share_of_high_rates_is_told_of_every_round_and_warned_of():
    method = small(on="fedavg", lr=0.1, beta=100.0, init_scale=0.3)
    run = pyrofl.fit(method, toys.blobs(SIZES), 5, progress=False)
    shares = list(run.rounds["rates_above_0.9"])
    assert shares[0] < 0.5 < shares[-1]
    (note,) = run.warnings
    assert note.startswith(f"rates_above_0.9 is {shares[-1]:.2g} in round 5: ")
    assert "hyper_step=0.1" in note
    assert note in run.overview()["status"]
    theta, s = run.state.server["loc/fc2.weight"], spreads(run.state.server, run.method)
    high = (s.clamp(-8.5, 8.5).exp() > 9 * theta.square()).double()  # rate > 0.9: alpha > 9
    assert shares[-1] == pytest.approx(float(high.mean()))
    close(run.statistics()["rates_above_0.9"], high.flatten(1).mean(1))
    assert pyrofl.fit(small(), toys.blobs(SIZES), 1, progress=False).warnings == []
    assert pyrofl.fit(small(dropout="none"), toys.blobs(SIZES), 1, progress=False).warnings == []


def test_beta_of_exact_bayes_is_told_and_is_exact():
    data = toys.blobs(SIZES)
    told = pyrofl.fit(small(), data, 1, progress=False).statistics()["exact_beta"]
    close(told, [30 / n for n in SIZES])
    # A client alone that is given that number is trained as by beta=None.
    alone = toys.blobs(SIZES[1:2])
    pair = [last(small(beta=beta), alone, 2).server for beta in (None, 30 / SIZES[1])]
    toys.assert_same(*pair, terms=TRAINED)


# Sizes


def test_the_hypernetwork_has_the_papers_size():
    method = metavd.build(network("cnn-metavd", (3, 32, 32), 10))
    server = method.init(generator(0), 100)
    counts = {
        "theta": sum(v.numel() for v in role("loc", server).values()),
        "e": server["server/embedding"].numel(),
        "psi": sum(v.numel() for v in role("server/psi", server).values()),
    }
    assert counts == {"theta": 372_234, "e": 2_600, "psi": 5_400 + 2 * 40_200 + 6_586_368}
    received = method.download(server, Cohort(torch.tensor([3]), torch.ones(1)))
    assert sum(v.numel() for v in received.values()) == 405_002
    raw = received["spread/fc2.weight"] + 8.5
    assert 0.4 < float((raw < 0).float().mean()) < 0.6  # in the dead zone of the clamp
    assert float(raw.std()) < 0.1


@pytest.mark.parametrize(
    ("spec", "name"),
    [("mlp:6,5", "fc2.weight"), ("mlp:6", "fc1.weight"), ("softmax", "head.weight")],
)
def test_the_layer_before_the_output_is_random(spec, name):
    assert metavd.layer_before_output(net(spec)) == name


# Limits


def assert_alike(a: Method, b: Method, role_a: str, role_b: str, atol: float = 0.0) -> None:
    """Compare three rounds of two methods on the parameters of the network."""
    data = toys.blobs(SIZES)
    start = generator(0)
    theta = {n: v.double() for n, v in net().init(start).items()}
    pair = []
    for method, prefix in ((a, role_a), (b, role_b)):
        server = server_of(method) | under(prefix, theta)
        pair.append(role(prefix, last(method, data, 3, server_state=server).server))
    toys.assert_same(pair[0], pair[1], atol=atol)


@pytest.mark.parametrize("on", ["fedavg", "reptile"])
def test_without_noise_it_is_fedavg(on):
    plain = fedavg.build(net(), batch=4, epochs=1, lr=0.02, momentum=0.0)
    options = {"on": on, "clip": 1e9, **(PLAIN if on == "reptile" else {})}
    assert_alike(small(dropout="none", **options), plain, "loc", "w", 1e-14)
    assert_alike(small(guide=guides.delta, **options), plain, "loc", "w", 1e-14)


@pytest.mark.parametrize("sampling", ["activations", "weights"])
def test_the_noise_of_a_guide_that_has_almost_none_vanishes(sampling):
    faint = {"guide": guides.mean_field, "init_scale": 1e-9, "beta": 0.0, "sampling": sampling}
    for on in ("fedavg", "reptile", "maml", "perfedavg"):
        assert_alike(small(on=on, **faint), small(on=on, dropout="none"), "loc", "loc", 1e-7)


def test_spreads_learn_in_the_outer_step_but_not_before_a_test():
    for on, moves in (("reptile", True), ("maml", False), ("perfedavg", False)):
        method = small(on=on, init_scale=0.3)
        assert [("spread" in step.names) for step in method.adapt[0].updates] == [moves]
        state = last(method, toys.blobs(SIZES), 1)
        received = method.download(first(method, toys.blobs(SIZES), 0).server, state.reporters)
        assert bool((state.message["spread/fc2.weight"] != received["spread/fc2.weight"]).any())
    assert small(on="fedavg").adapt == ()


# Variants


VARIANTS = [
    {"on": on, "dropout": dropout, "coords": coords, "sampling": sampling}
    for on, dropout, coords, sampling in (
        ("fedavg", "meta", "logvar", "activations"),
        ("fedavg", "vd", "alpha", "weights"),
        ("fedavg", "ensemble", "alpha", "activations"),
        ("reptile", "meta", "alpha", "activations"),
        ("reptile", "meta", "logvar", "weights"),
        ("reptile", "vd", "logvar", "activations"),
        ("reptile", "ensemble", "logvar", "weights"),
        ("maml", "meta", "logvar", "weights"),
        ("maml", "meta", "logvar", "activations"),
        ("maml", "vd", "logvar", "weights"),
        ("maml", "ensemble", "logvar", "weights"),
        ("perfedavg", "meta", "alpha", "activations"),
        ("perfedavg", "vd", "logvar", "activations"),
        ("perfedavg", "ensemble", "logvar", "activations"),
    )
]
VARIANTS += [{"on": on, "dropout": "none"} for on in ("fedavg", "reptile", "maml", "perfedavg")]
VARIANTS += [
    {"precision": "alpha", "logit_average": True},
    {"precision": "alpha", "coords": "alpha", "beta": None},
    {"guide": guides.mean_field, "init_scale": 0.1},
    {"bayesian": "fc*.weight", "elapsed": 0.01},
    {"bayesian": "*", "sampling": "weights"},
    {"prune": 0.5, "init_scale": 0.3},
    {"prune": 0.5, "coords": "alpha", "init_scale": 0.9, "dropout": "ensemble"},
    {"prune": "snip", "dropout": "none"},
    {"prune": "snip", "head": "code"},
]


def label(options: dict[str, Any]) -> str:
    return "-".join(str(getattr(v, "__name__", v)) for v in options.values())


@pytest.mark.parametrize("options", others_slow(VARIANTS, VARIANTS[::4]), ids=label)
def test_every_variant_keeps_the_contract(options):
    method, data = small(**options), toys.blobs(SIZES, held_out=1)
    some = {"participation": bernoulli(0.7)}
    together = list(federate(method, data, 2, chunk_size=3, **some))
    one_by_one = list(federate(method, data, 2, chunk_size=1, **some))
    for a, b in zip(together, one_by_one, strict=True):
        toys.assert_same_round(a, b, rtol=1e-7, atol=1e-7)
    begun = together[0]
    begun = RoundState(begun.number, begun.server, begun.client_states, begun.seen)
    again = last(method, data, 2, resume_from=begun, chunk_size=3, **some)
    toys.assert_same_round(again, together[-1])
    adaptation = "fine_tune" if method.adapt else "none"
    for population in ("training", "held_out"):
        for draws in (None, 3):
            scores = evaluate(
                method, data, again, population=population, adaptation=adaptation, draws=draws
            )
            assert bool(scores.values["nll"].isfinite().all())


# Heads


def test_held_out_clients_have_the_mean_embedding():
    method, data = small(), toys.blobs(SIZES, held_out=1)
    state = last(method, data, 1)
    table = state.server["server/embedding"]
    held = method.download(state.server, toys.who(data, 3))
    grown = state.server | {"server/embedding": torch.cat([table, table.mean(0)[None]])}
    close(held["spread/fc2.weight"], method.download(grown, toys.who(data, 3))["spread/fc2.weight"])


def test_the_authors_head_starts_again_from_one_spread():
    method, data = small(head="code"), toys.blobs(SIZES, held_out=1)
    state = last(method, data, 2)
    cohort = toys.who(data, 0, 3)
    received, _ = client_inputs(method.deployed("personal"), data, state, cohort, 0)
    close(received["spread/fc2.weight"], torch.full((2, 5, 6), -8.5))
    own, _ = client_inputs(method, data, state, cohort, 0)
    assert bool((own["spread/fc2.weight"] != -8.5).any())
    for n in role("loc", own):
        assert torch.equal(own[f"loc/{n}"], received[f"loc/{n}"])
    assert small().deployed("personal").download is not method.deployed("personal").download
    plain = small()
    assert plain.deployed("personal") is plain


def test_personal_and_global_models():
    method, data = small(), toys.blobs(SIZES)
    state = last(method, data, 2)
    received, _ = client_inputs(method, data, state, toys.who(data, 0, 1), 0)
    local = {n: v + 1 for n, v in received.items()}
    assert method.views["personal"](received, local) is local
    common = method.views["global"](received, local)
    close(common["spread/fc2.weight"], torch.full((2, 5, 6), -8.5))
    assert torch.equal(common["loc/fc1.bias"], received["loc/fc1.bias"])


def test_embeddings_of_unseen_clients_follow_the_pseudo_gradient():
    method, data = small(), toys.blobs((*SIZES, 20), held_out=2)
    state = last(method, data, 2)
    one = metavd.embed(method, data, state, steps=1, lr=0.5)
    table = state.server["server/embedding"]
    assert torch.equal(one.server["server/embedding"][:3], table)
    mean = table.mean(0)
    grown = {n: v for n, v in state.server.items() if "optim" not in n}
    grown["server/embedding"] = torch.cat([table, mean.expand(2, -1)])
    for i in (3, 4):
        cohort = toys.who(data, i)
        alone = replace(data, held_out=0)
        trained = next(
            federate(
                method,
                alone,
                state.number + 1,
                resume_from=RoundState(state.number, grown, {}, torch.zeros(5).bool()),
                participation=lambda *_, i=i: torch.tensor([i]),
            )
        )
        slope = SOURCE.slope(grown, cohort, role("spread", trained.message))["server/embedding"][i]
        close(one.server["server/embedding"][i], mean - 0.5 * slope, 1e-10)
    far = metavd.embed(method, data, state, steps=30)
    assert float((far.server["server/embedding"][3] - mean).abs().max()) > 1e-3
    assert bool(evaluate(method, data, far, population="held_out").values["nll"].isfinite().all())
    with pytest.raises(ValueError, match="holds 5 embeddings; expected 3"):
        metavd.embed(method, data, far)
    with pytest.raises(ValueError, match="holds 0 embeddings"):
        metavd.embed(small(dropout="vd"), data, last(small(dropout="vd"), data, 1))


# What is told of clients


@pytest.mark.parametrize("coords", ["logvar", "alpha"])
def test_rates_of_every_weight_and_embeddings_are_told_exactly(coords):
    data = toys.blobs(SIZES)
    method = small(coords=coords, init_scale=0.3)
    run = pyrofl.fit(method, data, 2, progress=False)
    dims = {n: net().dims(n) for n in net().shapes}
    found = run.to_arviz(400, dims)
    stats, posterior = found["sample_stats"], found["posterior"]
    sent = method.download(run.state.server, data.cohort(torch.arange(4)))
    theta, s = (sent[f"{part}/fc2.weight"] for part in ("loc", "spread"))
    log_alpha = s if coords == "alpha" else s - theta.square().log()
    assert stats["log_alpha.fc2.weight"].dims == ("chain", "client", "fc2_out", "fc2_in")
    close(torch.tensor(stats["log_alpha.fc2.weight"].values[0]), log_alpha, atol=1e-8)
    rate = stats["dropout_rate.fc2.weight"]
    close(torch.tensor(rate.values[0]), log_alpha.sigmoid(), atol=1e-8)
    np.testing.assert_allclose(rate.mean(("fc2_out", "fc2_in")), stats["dropout_rate"])
    table = run.state.server["server/embedding"]
    np.testing.assert_array_equal(stats["embedding"].values[0], table)
    # Draws spread as they should: the logarithm of a variance has an error of sqrt(2 / draws).
    spread = np.log(posterior["fc2.weight"].var("draw")) - 2 * np.log(abs(theta.numpy()))
    off = (spread - log_alpha.numpy()) / np.sqrt(2 / 400)
    assert abs(float(off.mean())) < 4 / np.sqrt(off.size)
    assert float(abs(off).max()) < 5


def test_all_clients_of_vd_have_one_rate_and_no_embedding():
    run = pyrofl.fit(small(dropout="vd"), toys.blobs(SIZES), 1, progress=False)
    stats = run.to_arviz(2)["sample_stats"]
    rate = stats["dropout_rate.fc2.weight"].values[0]
    assert (rate == rate[:1]).all()
    assert "embedding" not in stats


# Pruning


def test_dropped_weights_are_zero_both_ways_and_cost_a_bit():
    data = toys.blobs(SIZES)
    method, dense = small(**LOUD), small(init_scale=0.3)
    state = last(method, data, 3)
    theta, s = (state.message[f"{part}/fc2.weight"] for part in ("loc", "spread"))
    dropped = theta == 0
    assert 0.2 < float(dropped.float().mean()) < 0.95
    assert bool((s[dropped] == 0).all())
    assert not bool((s.exp() > theta**2)[~dropped].any())  # p > 1/2
    sent = 8 * (theta[0].numel() - dropped.flatten(1).sum(1)) + 4  # 30 bits take 4 bytes
    rest = sum(v[0].numel() * 8 for n, v in state.message.items() if "fc2.weight" not in n)
    assert state.bytes_up.tolist() == (2 * sent.clamp(max=240) + rest).tolist()
    assert int(state.bytes_up.max()) < int(last(dense, data, 3).bytes_up.min())
    received = method.download(state.server, state.reporters)
    zero = received["loc/fc2.weight"] == 0
    after = next(federate(method, data, 4, resume_from=state))
    assert bool((after.message["loc/fc2.weight"][zero] == 0).all())
    found = method.metadata.statistics(received, received, data.batch(torch.arange(4)))
    close(found["sparsity"], zero.flatten(1).double().mean(1))
    assert bool((found["dropout_rate"] > 0).all())


def test_spreads_of_dropped_weights_teach_nothing():
    method = small(**LOUD, coords="logvar")
    server = server_of(method)
    sent = method.download(server, WHO)
    assert bool((sent["loc/fc2.weight"] == 0).any())
    moved = method.aggregate(server, sent, WHO, generator(0))
    for n in (n for n in server if n.startswith("server/")):
        close(moved[n], (1 - 0.9 * 5e-4) * server[n])


def test_pruning_waits_for_its_share_of_the_rounds():
    early, late = (small(**LOUD, elapsed=done) for done in (0.149, 0.15))
    server = server_of(early)
    assert not bool((early.download(server, WHO)["loc/fc2.weight"] == 0).any())
    assert bool((late.download(server, WHO)["loc/fc2.weight"] == 0).any())


def test_snip_fixes_its_mask_after_round_one():
    method = small(dropout="none", prune="snip", sparsity=0.6)
    data = toys.blobs(SIZES)
    states = list(federate(method, data, 3))
    start = first(method, data, 0).server["loc/fc2.weight"]
    mean = torch.einsum(
        "c,c...->...", states[0].reporters.size / 26, states[0].message["loc/fc2.weight"]
    )
    sensitivity = (start * (start - mean)).abs().flatten()
    keep = torch.zeros(30).bool()
    keep[sensitivity.argsort(descending=True)[:12]] = True
    for state in states:
        assert torch.equal(state.server["loc/fc2.weight"].flatten() != 0, keep)
    assert bool((states[-1].message["loc/fc2.weight"].flatten(1)[:, ~keep] == 0).all())


# What is refused
