"""Private methods: bounds that hold exactly, noise as it is stated, and epsilon of the library."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import test_contract as contract
import torch
import toys
from checks import TRAINED
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, norm
from sites import SIZES, some

import pyrofl
from pyrofl import Privacy
from pyrofl.data import Federation
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli, everyone, fixed, fraction
from pyrofl.inference.privacy.differential_privacy import ClipAndNoise, private, secret_normals
from pyrofl.inference.transport import Client, Server
from pyrofl.models import fedavg, pfedvem, pvi
from pyrofl.tensors import Tensors, generator, sum_per_client

accounting = pytest.importorskip("dp_accounting")
from dp_accounting import rdp  # noqa: E402

DATA = toys.blobs(SIZES)
FAINT = 1e-12  # noise that is there, and changes nothing
PLAIN = fedavg.build(toys.net("softmax"), lr=0.2)


def server(privacy: Privacy, method: Any = PLAIN, data: Federation = DATA, **how: Any) -> Tensors:
    return next(federate(method, data, 1, privacy=privacy, **how)).server


def gap(a: Tensors, b: Tensors) -> torch.Tensor:
    """Return the difference of two states in one row."""
    return torch.cat([(a[n] - b[n]).flatten() for n in a])


def assert_normal(z: torch.Tensor, tail: float = 0.0005) -> None:
    """Accept standard normal numbers: mean and squares between quantiles of their laws."""
    assert abs(float(z.mean())) < norm.isf(tail) / len(z) ** 0.5
    low, high = chi2.ppf([tail, 1 - tail], len(z))
    assert low < float(z.square().sum()) < high


numbers = st.floats(-1e6, 1e6, width=32)


@given(rows=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_bounds_exactly_and_leaves_alone_what_is_small(rows, dtype):
    value = torch.tensor(rows, dtype=dtype)
    sent = {"sum/a": value[:, :2], "sum/b": value[:, 2]}
    found = ClipAndNoise(Privacy(clip=3.0, noise_multiplier=1.0)).clip_contributions(sent)
    before, after = (
        sum_per_client({n: v.double().square() for n, v in t.items()}) for t in (sent, found)
    )
    assert (after <= 9.0).all()
    for c in (before <= 9.0).nonzero().flatten():
        assert all(torch.equal(found[n][c], sent[n][c]) for n in sent)
    assert ((after - 9).abs() < 1e-5)[before > 9].all()


def test_weights_are_bounded_with_what_they_weigh():
    bounds = ClipAndNoise(Privacy(clip=100.0, noise_multiplier=1.0))
    sent = {"weight/0": torch.tensor([4.0, 0.5]), "sum/a": torch.tensor([[8.0], [1.0]])}
    found = bounds.clip_contributions(sent)
    assert found["weight/0"][0] <= 1
    torch.testing.assert_close(found["sum/a"] / found["weight/0"][:, None], torch.full((2, 1), 2.0))
    assert torch.equal(found["sum/a"][1], sent["sum/a"][1])


def test_what_is_not_finite_adds_nothing():
    sent = {"sum/a": torch.tensor([[1.0, torch.nan], [torch.inf, 0.0], [1.0, 2.0]])}
    found = ClipAndNoise(Privacy(clip=9.0, noise_multiplier=1.0)).clip_contributions(sent)["sum/a"]
    assert found.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize("where", ["server", "client"])
def test_another_client_moves_the_sum_by_twice_the_clip_at_most(where):
    """Whatever its rows are, and however many."""
    privacy = Privacy(clip=0.3, noise_multiplier=FAINT, where=where)
    other = replace(DATA, x=torch.where(torch.arange(len(DATA.x))[:, None] < 3, 1e4, DATA.x))
    fewer = replace(DATA, train=(*DATA.train[:-1], DATA.train[-1][:1]))
    usual = server(privacy)
    assert sum_per_client({n: v.square()[None] for n, v in usual.items()}) > 0
    for data in (other, fewer):
        moved = len(SIZES) * float(gap(server(privacy, data=data), usual).norm())
        assert 1e-3 < moved < 0.6 + 1e-9


@pytest.mark.parametrize(("where", "times"), [("server", 1), ("client", len(SIZES) ** 0.5)])
def test_the_error_of_the_mean_is_the_stated_noise(where, times):
    calm = server(Privacy(clip=0.5, noise_multiplier=FAINT, where=where))
    noisy = (server(Privacy(clip=0.5, noise_multiplier=2.0, where=where, seed=s)) for s in range(8))
    stated = 2.0 * 0.5 * times / len(SIZES)
    assert_normal(torch.cat([gap(one, calm) for one in noisy]) / stated)


def test_weights_that_clients_tell_have_noise_too():
    """Both parts then have 2^1/2 times the noise, which together is worth what one part has."""
    bounds, none = ClipAndNoise(Privacy(clip=5.0, noise_multiplier=3.0)), torch.zeros(400).double()
    found = bounds.add_noise({"weight/0": none, "sum/a": none}, generator(0))
    assert_normal(found["weight/0"] / (3 * 2**0.5))
    assert_normal(found["sum/a"] / (3 * 2**0.5 * 5))
    assert_normal(bounds.add_noise({"sum/a": none}, generator(0))["sum/a"] / 15)
    sent = next(
        federate(
            pfedvem.build(toys.net()), DATA, 1, privacy=Privacy(clip=1.0, noise_multiplier=1.0)
        )
    )
    assert sorted(n for n in sent.message if n.startswith("weight")) == ["weight/0"]


def test_noise_depends_on_both_seeds_the_round_and_the_client():
    base = Privacy(clip=1.0, noise_multiplier=1.0, seed=0)
    toys.assert_same(server(base), server(base))
    assert gap(server(base), server(replace(base, seed=1))).norm() > 0.1
    assert gap(server(base), server(base, seed=1)).norm() > 0.1
    two = list(federate(PLAIN, DATA, 2, privacy=base))
    again = next(federate(PLAIN, DATA, 2, privacy=base, resume_from=two[0]))
    toys.assert_same(two[1].server, again.server)
    bounds, same = ClipAndNoise(replace(base, where="client")), torch.zeros(3, 5)
    sources = [generator(c) for c in range(3)]
    rows = bounds.privatize_messages({}, {"sum/a": same}, sources)["sum/a"]
    assert len(rows.unique()) == 15


@pytest.mark.parametrize(("where", "times"), [("server", 1), ("client", len(SIZES) ** 0.5)])
def test_noise_without_a_seed_cannot_be_repeated(where, times):
    """It has the stated law, and two runs with equal seeds have independent noise."""
    calm = server(Privacy(clip=0.5, noise_multiplier=FAINT, where=where))
    privacy = Privacy(clip=0.5, noise_multiplier=2.0, where=where)
    noise = [gap(server(privacy), calm) * len(SIZES) / times for _ in range(32)]
    rare = (
        5e-7  # each run of this test has other noise: few false alarms, with four times the draws
    )
    assert_normal(torch.cat(noise), rare)
    differences = [one - other for one, other in zip(noise[::2], noise[1::2], strict=True)]
    assert_normal(torch.cat(differences) / 2**0.5, rare)
    assert_normal(secret_normals((400, 100)).flatten(), rare)


def test_a_seeded_run_is_called_not_private():
    secret, open_ = (
        Privacy(clip=1.0, noise_multiplier=2.0),
        Privacy(clip=1.0, noise_multiplier=2.0, seed=7),
    )
    runs = [pyrofl.fit(PLAIN, DATA, 1, privacy=p, progress=False) for p in (secret, open_)]
    assert [run.privacy.seeded for run in runs] == [False, True]
    assert "not private" not in str(runs[0].privacy)
    assert str(runs[1].privacy).endswith("; not private: seeded")
    assert runs[1].overview()["privacy"].endswith("; not private: seeded")
    assert "epsilon (not private: seeded)" in set(runs[1].clients["metric"])


def test_a_client_gives_one_noisy_reply_in_a_round(tmp_path):
    """Replies to repeated requests with new noise could be averaged."""
    method = private(PLAIN, Privacy(clip=1.0, noise_multiplier=1.0, where="client"), len(SIZES))
    there = Server(method, DATA.names, DATA.sizes, DATA.dtype)
    both = {"here": list(DATA.names[:2]), **{n: [n] for n in DATA.names[2:]}}
    orders = there.configure_train(both)
    mine = some(DATA, DATA.names[:2])
    replies = [Client(method, mine, state=tmp_path).train(orders["here"]) for _ in range(2)]
    toys.assert_same(*({n: r[n] for n in r if n.startswith("up/")} for r in replies))
    alone = there.configure_train()[DATA.names[0]]
    told = "client 0: a noisy reply of round 1 was sent already; send a request for a later"
    with pytest.raises(ValueError, match=f"^{told}"):
        Client(method, mine, state=tmp_path).train(alone)
    there.aggregate_train({"here": replies[0]})
    after = Client(method, mine, state=tmp_path).train(there.configure_train(both)["here"])
    assert after["round"] == 2


def test_the_sum_is_divided_by_how_many_were_expected():
    """Not by who came, which would tell."""
    privacy, draw = Privacy(clip=1e6, noise_multiplier=FAINT), bernoulli(0.5, min_clients=1)
    state = next(federate(PLAIN, DATA, 1, privacy=privacy, participation=draw, seed=3))
    start = contract.first(PLAIN, DATA, 3).server
    for n, v in start.items():
        mean = state.message[f"sum/{n}"].sum(0) / (0.5 * len(SIZES))
        torch.testing.assert_close(state.server[n], v + mean, atol=1e-5, rtol=0)


def test_messages_may_be_folded():
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, seed=0)
    folded = server(privacy, chunk_size=2, keep_messages=False)
    toys.assert_same(folded, server(privacy), terms=TRAINED)


def test_halves_make_the_noise_of_the_loop_and_tell_no_loss():
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, where="client", seed=0)
    method = private(PLAIN, privacy, len(SIZES))
    there = Server(method, DATA.names, DATA.sizes, DATA.dtype, 5)
    here = {n: Client(method, some(DATA, [n]), 5) for n in DATA.names}
    replies = {n: here[n].train(order) for n, order in there.configure_train().items()}
    assert not [n for reply in replies.values() for n in reply if n.startswith(("loss", "begun"))]
    found = there.aggregate_train(replies)
    assert not found.rejected
    toys.assert_same(found.server, server(privacy, seed=5), terms=TRAINED)


@pytest.mark.parametrize("name", ["pfedmb", "ifca", "fedpop", "fedabml", "scaffold", "fedopt"])
def test_methods_of_sums_run(name):
    for where in ("server", "client"):
        privacy = Privacy(clip=0.1, noise_multiplier=0.1, where=where, max_weight=10.0)
        run = pyrofl.fit(contract.built(name), DATA, 2, privacy=privacy, progress=False)
        assert not run.state.rejected


def conjugate() -> tuple[Any, Federation]:
    """Return PVI that is exact in one round, and its rows."""
    g, rows = torch.Generator().manual_seed(1), torch.arange(24).split([8, 10, 6])
    x = torch.randn(24, 2, generator=g, dtype=torch.float64)
    data = Federation(x, x @ torch.tensor([1.0, -1.0]).double(), rows, tuple(r[:0] for r in rows))

    def program(received: Tensors, local: Tensors, batch: Any) -> None:
        with batch.clients():
            w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
            with batch.rows():
                line = (w * batch.x).sum(-1)
                pyro.sample("y", dist.Normal(line, 0.5), obs=batch.y)

    return pvi.hierarchical(program, data, shared="w", damping=1.0, steps=2), data


def test_pvi_adds_noise_to_the_change_of_each_factor():
    method, data = conjugate()
    exact = next(federate(method, data, 1)).server
    quiet = Privacy(clip=1e4, noise_multiplier=1e-5, where="client")
    noise: list[torch.Tensor] = []
    for seed in range(12):
        found = server(replace(quiet, seed=seed), method, data)
        for n in ("shift", "precision"):
            toys.assert_same(
                {n: found[n] - exact[n]},
                {n: (found[f"server/{n}"] - exact[f"server/{n}"]).sum(0)},
                atol=1e-9,
            )
            noise.append((found[f"server/{n}"] - exact[f"server/{n}"]).flatten() / 0.1)
    assert_normal(torch.cat(noise))  # so it is unbiased, and no more than stated


def test_pvi_clips_the_change_of_a_factor():
    method, data = conjugate()
    start = contract.first(method, data, 0).server
    found = server(Privacy(clip=0.5, noise_multiplier=FAINT, where="client"), method, data)
    change = {n: found[f"server/{n}"] - start[f"server/{n}"] for n in ("shift", "precision")}
    moved = sum_per_client({n: v.square() for n, v in change.items()}).sqrt()
    torch.testing.assert_close(moved, torch.full((3,), 0.5).double(), atol=1e-9, rtol=0)


REFUSED = {
    "pvi": "^pvi: its server stores a tensor .*; use Privacy\\(\\.\\.\\., where='client'\\)$",
    "metavd": "^metavd: aggregation is not a weighted mean, so its server needs every",
    "fedbe": "^fedbe: aggregation is not a weighted mean, so its server needs every",
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_of_another_kind_are_refused_by_name(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        federate(contract.built(name), DATA, 1, privacy=Privacy(clip=1.0, noise_multiplier=1.0))


def test_draws_of_unknown_chances_are_refused():
    def mine(generator: torch.Generator, clients: int) -> torch.Tensor:
        return torch.arange(2)

    usual = Privacy(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(
        ValueError, match=r"^participation is mine, with unknown sampling probabilities; "
    ):
        federate(PLAIN, DATA, 1, privacy=usual, participation=mine)


def test_a_promise_is_for_one_method_and_so_many_clients():
    made = private(PLAIN, Privacy(clip=1.0, noise_multiplier=1.0), 7)
    with pytest.raises(ValueError, match=r"^fedavg: the method is private already; pass"):
        private(made, Privacy(clip=1.0, noise_multiplier=1.0), 7)
    run = pyrofl.fit(made, DATA, 1, progress=False)
    with pytest.raises(
        ValueError, match=r"^the method was made private for 7 clients, but 6 train"
    ):
        run.privacy  # noqa: B018


def spent(draw: Any, rounds: int, clients: int = 1000, delta: float = 1e-5, **how: Any) -> Any:
    made = private(PLAIN, Privacy(clip=1.0, delta=delta, **how), clients, draw)
    assert made.metadata.privacy
    return made.metadata.privacy.spent(rounds, [rounds] * clients)


def test_epsilon_is_that_of_the_library():
    # Its own test says: this multiplier gives exactly (1, 1e-6); of coarser orders a bit more.
    assert spent(everyone, 1, noise_multiplier=4.530877117, delta=1e-6).epsilon == pytest.approx(
        1, rel=5e-3
    )
    gaussian = accounting.GaussianDpEvent
    poisson = rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation(3))
    poisson.compose(accounting.PoissonSampledDpEvent(0.1, gaussian(1.1)), 30)
    assert spent(
        bernoulli(0.1, min_clients=0), 30, noise_multiplier=1.1
    ).epsilon == poisson.get_epsilon(1e-5)
    without = rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation(2))
    without.compose(accounting.SampledWithoutReplacementDpEvent(1000, 10, gaussian(2.0)), 30)
    for draw in (fixed(10), fraction(0.01)):
        assert spent(draw, 30, noise_multiplier=4.0).epsilon == without.get_epsilon(1e-5)


def test_epsilon_of_a_bound_that_does_not_hold_is_not_told():
    """A draw repeated until there are two is no Poisson sample: how likely that is costs delta."""
    few, plain = (
        spent(bernoulli(0.5), 3, 6, noise_multiplier=1.1),
        spent(everyone, 3, 6, noise_multiplier=1.1),
    )
    assert few.epsilon == plain.epsilon
    assert few.bound.startswith("Gaussian")
    exact, more = (spent(bernoulli(0.1, n), 30, noise_multiplier=1.1).epsilon for n in (0, 2))
    assert exact <= more < 1.0001 * exact
    local = spent(bernoulli(0.1), 30, noise_multiplier=1.1, where="client")
    assert local.epsilon > 5 * more  # the server knows whose message it is


def test_a_run_tells_what_it_has_spent():
    privacy = Privacy(clip=1.0, noise_multiplier=2.0)
    run = pyrofl.fit(PLAIN, DATA, 2, privacy=privacy, participation=fixed(3), progress=False)
    found = run.privacy
    assert found
    took = [sum(i in r.reported for r in run.records) for i in range(len(SIZES))]
    by_times = dict(zip(took, found.clients, strict=True))
    assert [by_times[n] for n in took] == list(found.clients)
    assert sorted(found.clients) == [by_times[n] for n in sorted(took)]
    assert by_times.get(0, 0.0) == 0.0
    assert found.epsilon <= max(found.clients)
    assert run.overview()["privacy"] == str(found)
    assert pyrofl.fit(PLAIN, DATA, 1, progress=False).privacy is None


def test_a_delta_of_one_over_the_clients_or_more_is_warned_of():
    """At delta = 1 / J all rows of one client may be published."""
    told = "delta is 0.5, with 6 clients: .* set delta well below 1 / 6"
    with pytest.warns(UserWarning, match=told):
        run = pyrofl.fit(PLAIN, DATA, 1, privacy=Privacy(1.0, 1.0, delta=0.5), progress=False)
    assert re.search(told, str(run.privacy))
    quiet = pyrofl.fit(PLAIN, DATA, 1, privacy=Privacy(1.0, 1.0, delta=0.1), progress=False)
    assert "expected" not in str(quiet.privacy)


@pytest.mark.parametrize("build", [fedavg.build, pfedvem.build])
def test_noise_that_no_seed_repeats_is_no_memory_of_the_server(build: Any) -> None:
    """A private method is validated before round one, as `fit` does, and its noise is accepted."""
    method = build(toys.net("softmax"))
    run = pyrofl.fit(method, DATA, 1, progress=False, privacy=Privacy(1.0, 2.0, delta=1e-3))
    assert run.privacy.epsilon > 0


def test_the_memory_of_a_private_server_is_refused() -> None:
    """Its aggregation is called twice without the noise: other differences are of a memory."""
    calls = list[int]()

    def step(state: Tensors, pooled: Tensors) -> Tensors:
        calls.append(1)
        return {n: v + len(calls) for n, v in pooled.items()}

    method = replace(PLAIN, aggregate=replace(PLAIN.aggregate, server_step=step))
    with pytest.raises(ValueError, match="other numbers in a second call"):
        server(Privacy(1.0, 2.0, delta=1e-3), method)
