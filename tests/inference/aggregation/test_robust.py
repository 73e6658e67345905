"""Robust aggregation rules: closed forms, breakdown, and the mean where nothing is cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import promises
import pytest
import torch
import toys
from checks import close
from hypothesis import given, settings
from hypothesis import strategies as st
from promises import others_slow
from torch import Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import average, get_rule, krum, median, middle
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.models import (
    fedabml,
    fedavg,
    fedavgm,
    fedbe,
    fedpop,
    fedprox,
    metavd,
    pfedbayes,
    pfedmb,
    pfedvem,
    scaffold,
)
from pyrofl.nets import build
from pyrofl.tensors import Tensors, add_trailing_axes, generator, matches, pick

EVERY = ("mean", "median", "trimmed:0.2", "krum:2", "krum:2:4", "clip:0.1")
SERVER = {"w": torch.zeros(3, 2, dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
MEANS = {  # that train in ways of their own
    "fedabml": partial(fedabml.build, epochs=1),
    "fedpop": partial(fedpop.build, burn_in=1, epochs=1),
    "metavd": partial(metavd.build, epochs=1),
    "pfedbayes": partial(pfedbayes.build, epochs=1),
    "pfedmb": partial(pfedmb.build, branches=2, epochs=1, batch=10),
    "pfedvem": partial(pfedvem.build, head_epochs=2, base_epochs=1, lr_head=0.01, lr_base=0.02),
}
BUILDS = MEANS | {
    "fedavg": partial(fedavg.build, epochs=1, lr=0.02),
    "fedprox": partial(fedprox.build, epochs=1, lr=0.02),
    "fedavgm": partial(fedavgm.build, epochs=1, lr=0.02),
    "scaffold": partial(scaffold.build, epochs=1, lr=0.02),
}


def messages(clients: int = 9, seed: int = 0, bad: int = 0, by: float = 1e6) -> Tensors:
    """Draw messages near the server's values; the first few are moved away by `by`."""
    g = generator(seed)
    noise = {
        n: 0.1 * torch.randn(clients, *v.shape, generator=g, dtype=v.dtype)
        for n, v in SERVER.items()
    }
    away = torch.zeros(clients, dtype=torch.float64)
    away[:bad] = by
    return {n: v + noise[n] + away.reshape(-1, *(1 for _ in v.shape)) for n, v in SERVER.items()}


def sizes(clients: int = 9) -> Tensor:
    return torch.arange(1.0, clients + 1, dtype=torch.float64)


def one(values: list[float]) -> Tensors:
    return {"w": torch.tensor(values, dtype=torch.float64)[:, None]}


def found(how: str, values: list[float], weight: list[float], server: float = 0.0) -> Tensor:
    start = {"w": torch.tensor([server], dtype=torch.float64)}
    return get_rule(how)(one(values), torch.tensor(weight, dtype=torch.float64), start)["w"]


@pytest.mark.parametrize(
    ("how", "values", "weight", "expected"),
    [
        ("median", [5.0, 1.0, 100.0], [1, 1, 50], 5.0),
        ("median", [5.0, 1.0, 100.0, 2.0], [1, 1, 50, 1], 3.5),
        ("median", [7.0], [3], 7.0),
        ("trimmed:0.25", [9.0, 1.0, 2.0, -7.0], [1, 3, 1, 1], 1.25),
        ("trimmed:0.49", [4.0, 1.0, 2.0], [1, 3, 5], 2.0),
        ("trimmed:0.1", [4.0, 1.0], [1, 3], 1.75),
        ("clip:1", [3.0, -0.5], [1, 1], 0.25),
        ("clip:2", [3.0, -4.0], [3, 1], 1.0),
        # Scores with C - f - 2 = 2 neighbors: 0 -> 1 + 4, 1 -> 1 + 1, 2 -> 1 + 4, 50 and 60 more.
        ("krum:1", [0.0, 60.0, 1.0, 50.0, 2.0], [1, 1, 1, 1, 1], 1.0),
        ("krum:1:3", [0.0, 60.0, 1.0, 50.0, 2.0], [1, 1, 4, 1, 5], 1.4),
    ],
)
def test_they_are_what_their_papers_say(how, values, weight, expected):
    close(found(how, values, weight), [expected])


def test_a_clipped_change_counts_all_tensors_of_a_client():
    server = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.ones((), dtype=torch.float64)}
    message = {
        "a": torch.tensor([[3.0, 0.0], [0.1, 0.0]], dtype=torch.float64),
        "b": torch.tensor([5.0, 1.0], dtype=torch.float64),  # the first client's change: (3, 0, 4)
    }
    got = get_rule("clip:2.5")(message, torch.ones(2, dtype=torch.float64), server)
    close(got["a"], [(1.5 + 0.1) / 2, 0.0])
    close(got["b"], (3.0 + 1.0) / 2)


@pytest.mark.parametrize("how", ["mean", "trimmed:0", "trimmed:0.1", "clip:1e9", "krum:0:9"])
def test_they_are_the_mean_where_nothing_is_cut(how):
    expected = average(messages(), sizes())
    toys.assert_same(get_rule(how)(messages(), sizes(), SERVER), expected)


@pytest.mark.parametrize("how", EVERY)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_clients_changes_nothing(how, seed):
    order = torch.randperm(9, generator=generator(seed))
    message = messages(seed=seed)
    mixed = {n: v[order] for n, v in message.items()}
    a = get_rule(how)(message, sizes(), SERVER)
    b = get_rule(how)(mixed, sizes()[order], SERVER)
    toys.assert_same(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("how", "bears"), [("median", 4), ("trimmed:0.25", 2), ("krum:3", 3)])
@pytest.mark.parametrize("by", [1e3, -1e150])
def test_they_bear_bad_messages_up_to_their_breakdown_and_no_more(how, bears, by):
    def error(bad: int) -> float:
        got = get_rule(how)(messages(9, 1, bad, by), sizes(), SERVER)
        return max(float((v - SERVER[n]).abs().max()) for n, v in got.items())

    assert error(bears) < 0.5
    if how != "krum:3":  # five equal outliers are no more alike than four: Krum's chance, not rule
        assert error(bears + 1) > abs(by) / 35  # of the five that are kept one has 1/31 or more
    mean = average(messages(9, 1, 1, by), sizes())
    assert float(mean["b"].abs().max()) > 10


def test_bad_messages_that_stay_within_the_norm_move_the_mean_by_no_more_than_it():
    got = get_rule("clip:0.5")(messages(9, 1, 2, 1e6), torch.ones(9), SERVER)
    good = get_rule("clip:0.5")(messages(9, 1, 0), torch.ones(9), SERVER)
    moved = sum(float((got[n] - good[n]).square().sum()) for n in SERVER) ** 0.5
    assert 0 < moved <= 2 * 0.5 * 2 / 9


def test_krum_takes_a_message_as_it_is():
    message = messages(9, 2)
    got = krum(message, sizes(), 3)
    hits = [all(torch.equal(v[i], got[n]) for n, v in message.items()) for i in range(9)]
    assert sum(hits) == 1


def test_krum_needs_a_majority():
    with pytest.raises(ValueError, match=r"krum received 6 messages, .* 2 bad.* at least 7"):
        krum(messages(6), sizes(6), 2)
    with pytest.raises(ValueError, match="expected at least 12"):
        krum(messages(9), sizes(), 2, 12)


def test_the_median_ignores_what_size_a_client_claims():
    toys.assert_same(median(messages(), sizes(), SERVER), median(messages(), sizes() ** 9, SERVER))


def test_the_middle_keeps_every_weight_with_its_value():
    value = torch.tensor([[1.0, 30.0], [2.0, 10.0], [3.0, 20.0], [9.0, -1.0]])
    got = middle(value, torch.tensor([1.0, 3.0, 1.0, 5.0]), 1)
    close(got, [(3 * 2 + 1 * 3) / 4, (3 * 10 + 1 * 20) / 4], atol=1e-6)


@pytest.mark.parametrize("name", others_slow(BUILDS))
def test_methods_take_them(name, blobs):
    plain = toys.last(BUILDS[name](toys.net()), blobs, 2)
    for how in EVERY:
        robust = toys.last(BUILDS[name](toys.net(), aggregation=how), blobs, 2)
        assert all(bool(v.isfinite().all()) for v in robust.server.values()), how
        same = all(torch.equal(robust.server[n], v) for n, v in plain.server.items())
        assert same == (how == "mean"), how


def test_a_function_of_ones_own_will_do(blobs):
    def largest(message: Tensors, weight: Tensor, server: Tensors) -> Tensors:
        return {n: v[weight.argmax()] for n, v in message.items()}

    state = toys.last(fedavg.build(toys.net(), aggregation=largest, epochs=1), blobs, 1)
    toys.assert_same(state.server, {n: v[1] for n, v in state.message.items()})


def test_fedbe_teaches_from_the_robust_model(blobs):
    options = {"distil": "none", "epochs": 1, "server_data": blobs.x[:9]}
    got = toys.last(fedbe.build(toys.net(), aggregation="median", **options), blobs, 1)
    plain = toys.last(fedavg.build(toys.net(), aggregation="median", epochs=1), blobs, 1)
    toys.assert_same({n: got.server[n] for n in plain.server}, plain.server)


FIFTH = [3, 8]  # of ten clients
OLD = {"pfedvem": {"mean": "loc"}, "fedpop": {"mean": "loc"}}  # roles of messages, at the server


def lying(method: Method, names: str) -> Method:
    """Return the method in which a fifth of the clients send huge finite numbers."""

    def mark(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"evil": torch.isin(batch.ids, torch.tensor(FIFTH)).to(batch.size)}

    def upload(received: Tensors, local: Tensors) -> Tensors:
        message = method.upload(received, local)
        evil = {n: add_trailing_axes(local["evil"], v) > 0 for n, v in message.items()}
        wrong = {n: torch.where(evil[n], 1e6, v) for n, v in pick(message, names).items()}
        return message | wrong

    return replace(method, phases=(*method.phases, Phase((mark,))), upload=upload)


def outside(name: str, method: Method, names: str) -> float:
    """Return how far the server lands outside of what it had and honest clients sent."""
    data = toys.blobs(toys.SIZES[:10])
    (state,) = federate(lying(method, names), data, 1)
    assert not state.rejected
    before, far = first(method, data, 0).server, 0.0
    honest = torch.tensor([i for i in range(10) if i not in FIFTH])
    for n, sent in state.message.items():
        kind, _, rest = n.partition("/")
        at = f"{OLD.get(name, {}).get(kind, kind)}/{rest}"
        if at in before and matches(n, names):
            all_ = torch.cat([sent[honest], before[at][None]])
            over = torch.maximum(state.server[at] - all_.amax(0), all_.amin(0) - state.server[at])
            far = max(far, float(over.max()))
    return far


@pytest.mark.parametrize("name", promises.others_slow(MEANS))
def test_a_fifth_of_liars_moves_no_server_beyond_the_honest(name):
    # What a hypernetwork learns is a sum; branch weights beyond 1 are refused.
    names = {"metavd": "loc/*", "pfedmb": "branch/*"}.get(name, "*")

    def after(aggregation: str) -> float:
        return outside(name, MEANS[name](toys.net(), aggregation=aggregation), names)

    # A median, a trimmed mean and a message are within what honest clients sent, rounding aside.
    assert [how for how in ("median", "trimmed:0.2", "krum:2") if after(how) > 1e-9] == []
    assert after("mean") > 1


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_is_what_they_do_anyhow(name, blobs):
    made = MEANS[name]
    plain, mean = (
        toys.last(made(toys.net(), **o), blobs, 2) for o in ({}, {"aggregation": "mean"})
    )
    toys.assert_same(mean.server, plain.server)


def test_a_lie_about_confidence_does_not_buy_the_head():
    method = pfedvem.build(toys.net(), head_epochs=3, lr_head=0.01, aggregation="median")
    (state,) = federate(lying(method, "tau"), toys.blobs(toys.SIZES[:10]), 1)
    (honest,) = federate(method, toys.blobs(toys.SIZES[:10]), 1)
    assert float(state.message["tau"].max()) == 1e6
    toys.assert_same(state.server, honest.server)


@pytest.mark.parametrize("how", ["median", "trimmed:0.3", "krum:0", "clip:9"])
def test_messages_that_weigh_nothing_are_not_there(how):
    weight = sizes() * (torch.arange(9) > 2)
    got = get_rule(how)(messages(9, 3, 3), weight, SERVER)
    rest = {n: v[3:] for n, v in messages(9, 3, 3).items()}
    toys.assert_same(got, get_rule(how)(rest, weight[3:], SERVER))


def test_distances_from_the_population_are_robust_about_its_robust_center():
    """The median of squared distances of normal heads is 0.455 of their variance."""
    count, g = 4001, generator(5)
    z = 3.0 + 0.5 * torch.randn(count, 4, generator=g, dtype=torch.float64)
    z[:400] = 1e5
    net = build("softmax", (1,), 2)
    method = fedpop.build(net, head="*", aggregation="median")
    server = {n: v.double() for n, v in method.init(generator(0), count).items()}
    message, at = {}, 0
    for n, shape in net.shapes.items():
        part = z[:, at : at + shape.numel()].reshape(count, *shape)
        distance = part - server[f"loc/{n}"]
        message |= {f"mean/{n}": part, f"square/{n}": distance.square()}
        at += shape.numel()
    cohort = Cohort(torch.arange(count), torch.ones(count, dtype=torch.float64))
    new = method.aggregate(server, message, cohort, generator(0))
    # 400 of 4,001 far off make the median of the rest its 5/9 quantile, both for m and for s.
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    shift = normal.icdf(torch.tensor(0.5 / 0.9, dtype=torch.float64))
    for n in net.shapes:
        loc, variance = new[f"loc/{n}"], (2 * new[f"log_scale/{n}"]).exp()
        close(loc, torch.full_like(loc, 3.0 + 0.5 * float(shift)), 6 * 1.25 * 0.5 / 3600**0.5)
        assert float(variance.min()) > 0.455 * 0.25
        assert float(variance.max()) < 0.25
