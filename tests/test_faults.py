"""Faults that are injected into the rounds of every method, and what comes of them.

`fault_table.py` counts them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import faults
import promises
import pytest
import test_contract as contract
import torch
import toys
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.metadata import MODERATE
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.messages import BadMessage, count_by_rule
from pyrofl.inference.engine.participation import Stragglers
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.fit import fit
from pyrofl.models import fedavg, guides, pfedvem
from pyrofl.tensors import Tensors, add_trailing_axes

BAD = (1, 4)
CLIENTS = torch.arange(6)
GOOD = torch.tensor([0, 2, 3, 5])
NEAR = {"rtol": 1e-8, "atol": 1e-9}
FEW: dict[str, int] = {"num_particles": 2, "head_epochs": 1, "base_epochs": 1}
SENDING = [name for name in contract.METHODS if contract.sends(name)]
RULED = {name: dict(contract.built(name).rules) for name in contract.METHODS}

sending = pytest.mark.parametrize("name", promises.others_slow(SENDING))


@cache
def data() -> Federation:
    return toys.blobs((3, 9, 7, 12, 4, 8))


@cache
def begun(name: str) -> RoundState:
    return next(iter(federate(contract.built(name), data(), 1, chunk_size=1)))


@cache
def without(name: str) -> RoundState:
    """A second round in which the bad clients train and are not heard."""
    return run_round(contract.built(name), data(), begun(name), CLIENTS, GOOD, chunk_size=1)


def spoilt(name: str, method: Method, federation: Federation | None = None) -> RoundState:
    return run_round(method, federation or data(), begun(name), CLIENTS, CLIENTS, chunk_size=1)


def check(name: str, state: RoundState, words: str) -> int:
    """Require that the bad clients are named and left out; return how many."""
    toys.assert_same(state.server, without(name).server)
    assert torch.equal(state.reporters.ids, GOOD)
    assert [r.split(":")[0] for r in sorted(state.rejected)] == [f"client {i}" for i in BAD]
    assert all(words in reason for reason in state.rejected), state.rejected
    for n, v in begun(name).client_states.items():
        assert torch.equal(state.client_states[n][list(BAD)], v[list(BAD)])
    return len(state.rejected)


EACH = list(product(faults.POISONS, SENDING))
DAILY = [(k, n) for k, n in EACH if n in promises.ARCHETYPES and (k == "NaN" or n == "pfedvem")]


@pytest.mark.parametrize(("kind", "name"), promises.others_slow(EACH, DAILY))
def test_a_bad_message_is_named_and_left_out(name, kind):
    poison, words = faults.POISONS[kind]
    if kind == "missing tensor" and len(begun(name).message) == 1:
        words = "expected"
    assert (
        check(name, spoilt(name, faults.corrupted(contract.built(name), poison, *BAD)), words) == 2
    )


WITH_RULE = [
    (n, p) for n in RULED for p in RULED[n] if p != "variance" and RULED[n][p] is not MODERATE
]
OFTEN = [(n, p) for n, p in WITH_RULE if n in promises.ARCHETYPES]


@pytest.mark.parametrize(("name", "patterns"), promises.others_slow(WITH_RULE, OFTEN))
def test_what_must_be_positive_is_looked_at(name, patterns):
    poison = faults.entry(-1.0, patterns)
    state = spoilt(name, faults.corrupted(contract.built(name), poison, *BAD))
    assert check(name, state, f"; expected {RULED[name][patterns].text}") == 2


@sending
def test_what_is_sent_may_be_any_number_or_has_a_rule(name):
    # A new role is either promised, with a look at what it means, or has a rule.
    any_number = "w/* base/* branch/* mean/* loc/* log_scale/* spread/* shift change/*"
    known = " ".join([any_number, promises.of(name).any_number, *RULED[name]])
    assert not [n for n in begun(name).message if not contract.matches(n, known)]


@pytest.mark.parametrize("guide", [guides.mean_field, guides.delta])
def test_a_variance_of_zero_is_none_unless_the_guide_is_a_point(guide):
    method = pfedvem.build(toys.net(), guide=guide, m_step_iters=2, **FEW)
    told = [
        next(federate(faults.corrupted(method, faults.entry(v, "variance"), 2), data(), 1)).rejected
        for v in (0.0, -1.0)
    ]
    zero = "client 2: variance is 0; expected > 0"
    assert told[0] == ((zero,) if guide is guides.mean_field else ())
    assert len(told[1]) == 1


def test_a_share_is_no_more_than_one():
    method = faults.corrupted(contract.built("pfedmb"), faults.entry(1.5, "alpha"), *BAD)
    (state,) = federate(method, data(), 1)
    told = "alpha[1, 4] is 1.5; expected 0 to 1"
    assert state.rejected == (f"client 1: {told}", f"client 4: {told}")


# In the first round there is no earlier message to compare with.

PLACES = {"first": 3, "middle": 5, "last": 0}  # clients train from the largest to the smallest


@pytest.mark.parametrize("kind", ["wrong shape", "wrong rows", "wrong type", "missing tensor"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["fedavg", "pfedvem"])
def test_most_clients_decide_what_the_first_message_looks_like(name, place, kind):
    method, bad = contract.built(name), PLACES[place]
    start, good = first(method, data(), 0), CLIENTS[bad != CLIENTS]
    odd = faults.corrupted(method, faults.POISONS[kind][0], bad)
    found = run_round(odd, data(), start, CLIENTS, CLIENTS, chunk_size=1)
    expected = run_round(method, data(), start, CLIENTS, good, chunk_size=1)
    toys.assert_same(found.server, expected.server)
    toys.assert_same(found.message, expected.message)
    assert [reason.split(":")[0] for reason in found.rejected] == [f"client {bad}"]
    assert found.seen.tolist() == [i != bad for i in range(6)]
    for n, v in found.client_states.items():
        assert not bool(v[bad].any())
        assert n == faults.ID or torch.equal(v[good], expected.client_states[n][good])


def test_clients_are_counted_and_not_the_chunks_that_they_train_in():
    method = fedavg.build(toys.net(), epochs=1)
    start = first(method, data(), 0)
    halved = faults.POISONS["wrong type"][0]
    for chunk, bad, left in ((2, (3, 1), (0, 2, 4, 5)), (4, (3, 1, 5, 2), (1, 2, 3, 5))):
        odd = faults.corrupted(method, halved, *bad)
        state = run_round(odd, data(), start, CLIENTS, CLIENTS, chunk_size=chunk)
        assert state.reporters.ids.tolist() == list(left)
        assert len(state.rejected) == 6 - len(left)
    whole = run_round(faults.corrupted(method, halved, *range(6)), data(), start, CLIENTS, CLIENTS)
    assert not whole.rejected  # all agree


# Messages that are well formed, and lies.


@pytest.mark.parametrize("aggregation", ["median", "trimmed:0.2", "krum:2", "clip:1"])
@pytest.mark.parametrize("by", [1e6, -1e6])
def test_robust_merges_bear_a_fifth_of_liars(aggregation, by):
    federation = toys.blobs((20,) * 10)

    def lie(message: Tensors, bad: Tensor) -> Tensors:
        return {
            n: torch.where(add_trailing_axes(bad, v), by * (1 + v), v) for n, v in message.items()
        }

    def loss(how: str, *liars: int) -> float:
        method = faults.corrupted(fedavg.build(toys.net(), aggregation=how, epochs=1), lie, *liars)
        state = toys.last(method, federation, 3)
        assert not state.rejected
        return evaluate(method, federation, state, model="global").mean("nll")

    assert loss(aggregation, 4, 7) < loss(aggregation) + 0.1 * abs(loss(aggregation))
    assert loss("mean", 4, 7) > 10 * loss("mean")


@contract.on_archetypes
@pytest.mark.parametrize("size", promises.others_slow([0.0, -3.0, torch.nan, torch.inf], [0.0]))
def test_a_size_that_cannot_be_is_refused(name, size):
    other = faults.claiming(data(), dict.fromkeys(BAD, size))
    state = spoilt(name, contract.built(name), other)
    assert check(name, state, f"its size is {size:g}; expected ") == 2


def test_the_first_bad_entry_is_named(blobs):
    method = fedavg.build(toys.net(), epochs=1)
    poison = faults.entry(torch.nan, "w/fc1.weight")
    (state,) = federate(faults.corrupted(method, poison, 3), blobs, 1)
    assert state.rejected == ("client 3: w/fc1.weight[5, 7] is nan; expected a finite number",)
    assert count_by_rule(state.rejected * 3) == {"a finite number": 3}


@sending
def test_a_bad_message_stops_the_run_if_that_is_asked(name):
    method = faults.corrupted(contract.built(name), faults.entry(torch.nan), *BAD)
    with pytest.raises(BadMessage, match=r"client 1: .* is nan.*; client 4: .* is nan"):
        list(federate(method, data(), 2, on_bad_message="raise"))


def test_of_many_bad_messages_the_first_are_told():
    method = faults.corrupted(contract.built("fedavg"), faults.entry(torch.nan), *range(1, 6))
    with pytest.raises(BadMessage, match=r"^(client \d: [^;]*; expected [^;]*; ){3}and 2 more$"):
        list(federate(method, data(), 2, on_bad_message="raise"))


@sending
def test_without_a_good_message_the_server_keeps_its_state_and_says_so(name, capsys):
    method = faults.corrupted(contract.built(name), faults.entry(torch.inf), *range(6))
    run = fit(method, data(), 2, draws=None)
    toys.assert_same(run.state.server, first(method, data(), 0).server)
    assert [(r.reported, len(r.rejected)) for r in run.records] == [([], 6)] * 2
    assert "round 2: no client reported; server unchanged" in capsys.readouterr().err


def test_a_merge_that_overflows_is_undone(blobs):
    def aggregate(server, message, cohort, generator):
        return {n: v.sum(0) * 1e308 * 1e10 for n, v in message.items()}

    method = replace(fedavg.build(toys.net(), epochs=1), aggregate=aggregate)
    (state,) = federate(method, blobs, 1)
    toys.assert_same(state.server, first(method, blobs, 0).server)
    assert state.rejected[0].startswith("the server: aggregated w/fc1.weight[0, 0] is ")
    assert count_by_rule(state.rejected) == {"a finite number": 1}
    with pytest.raises(BadMessage, match="the server"):
        list(federate(method, blobs, 1, on_bad_message="raise"))


# What clients fail to do.


@contract.on_archetypes
def test_who_is_not_heard_has_trained_and_the_rest_is_exact(name):
    loss = Stragglers(drop_rate=0.5)
    (state,) = federate(contract.built(name), data(), 1, seed=3, chunk_size=6, stragglers=loss)
    heard = loss.reported(CLIENTS, data().names, 3, 0)
    assert 0 < len(heard) < 6
    assert torch.equal(state.reporters.ids, heard)
    assert torch.equal(state.trained, CLIENTS)
    assert sorted(state.silent.tolist() + heard.tolist()) == CLIENTS.tolist()
    start = first(contract.built(name), data(), 3)
    method, lost = contract.built(name), state.silent
    exact = run_round(method, data(), start, CLIENTS, heard, lost, seed=3, chunk_size=6)
    assert torch.equal(state.steps, exact.steps)
    toys.assert_same_round(state, exact)
    assert state.seen.nonzero().flatten().tolist() == heard.tolist()
    toys.assert_same(
        state.server, run_round(method, data(), start, heard, heard, seed=3).server, **NEAR
    )


def refused(*_: object) -> Tensors:
    raise AggregationError("no message suits")


@contract.on_archetypes
def test_who_was_not_merged_goes_back_to_what_it_had(name):
    method, some = contract.built(name), CLIENTS[:4]  # two are new afterwards

    def begin() -> RoundState:
        return run_round(method, data(), first(method, data(), 0), some, some)

    heard, lost = torch.tensor([1, 3]), [0, 2, 4]
    kept = torch.tensor([1, 3, 5])  # the last is not asked to report
    had = {n: v.clone() for n, v in begin().client_states.items()}
    exact = run_round(method, data(), begin(), kept, heard).client_states
    after = run_round(method, data(), begin(), CLIENTS, heard, torch.tensor(lost))
    toys.assert_same(*({n: v[lost] for n, v in p.items()} for p in (after.client_states, had)))
    toys.assert_same(
        *({n: v[kept] for n, v in p.items()} for p in (after.client_states, exact)), **NEAR
    )
    assert after.seen.nonzero().flatten().tolist() == [0, 1, 2, 3, 5]
    had = {n: v.clone() for n, v in after.client_states.items()}
    stuck = run_round(replace(method, aggregate=refused), data(), after, CLIENTS, CLIENTS)
    assert stuck.rejected == ("the server: no message suits",)
    toys.assert_same(dict(stuck.client_states.items()), had)
    assert torch.equal(stuck.seen, after.seen)


@contract.on_archetypes
def test_part_of_the_work_is_finite_and_less(name):
    (part,) = federate(
        contract.built(name), data(), 1, chunk_size=6, stragglers=Stragglers(min_work=0.01)
    )
    assert torch.equal(part.reporters.ids, CLIENTS)
    assert not part.rejected
    (whole,) = federate(contract.built(name), data(), 1, chunk_size=6)
    assert bool((part.steps <= whole.steps).all())
    assert bool((part.steps > 0).all())
    several = any(callable(p.epochs) or p.epochs > 1 for p in contract.built(name).phases)
    assert bool((part.steps < whole.steps).any()) == several
    assert all(bool(v.isfinite().all()) for v in contract.tensors(part) if v.is_floating_point())


def rate(found: Tensor, expected: float) -> float:
    """Return how many standard errors a share is away."""
    return float(
        (found.double().mean() - expected).abs() / (expected * (1 - expected) / len(found)) ** 0.5
    )


def test_failures_come_at_their_rate_and_are_drawn_anew():
    ids, names = torch.arange(50), [f"client {i}" for i in range(50)]
    heard = torch.zeros(40, 50)
    for number in range(40):
        heard[number, Stragglers(0.3).reported(ids, names, 0, number)] = 1
    assert rate(heard.flatten(), 0.7) < 3
    assert heard.mean(0).std() < 3 * (0.21 / 40) ** 0.5
    again = Stragglers(0.3).reported(ids[::2], names, 0, 7)
    assert again.tolist() == [i for i in heard[7].nonzero().flatten().tolist() if i % 2 == 0]


def test_epochs_are_drawn_for_every_client_and_round():
    method = fedavg.build(toys.net(), epochs=10)
    ids, names = torch.arange(200), [f"client {i}" for i in range(200)]

    def epochs(number: int) -> Tensor:
        return Stragglers(min_work=0.2).working(method, names, 0, number).phases[0].epochs(ids)

    first_, second = epochs(0), epochs(1)
    assert (int(first_.min()), int(first_.max())) == (3, 10)  # more than 2, at most 10
    assert not torch.equal(first_, second)
    assert torch.equal(epochs(0), first_)
    error = (8 / 12**0.5) / 200**0.5
    assert abs(float(first_.double().mean()) - 6.5) < 3 * error
    assert Stragglers().working(method, names, 0, 0) is method


def test_epochs_of_ones_own_are_shortened_too():
    method = fedavg.build(toys.net(), epochs=lambda ids: ids)
    got = Stragglers(min_work=0.5).working(method, data().names, 0, 0).phases[0].epochs(CLIENTS)
    assert got[0] == 0
    assert all(-(-i // 2) <= e <= i for i, e in enumerate(got.tolist()))


@pytest.mark.parametrize(("fail", "least"), [(-0.1, 1), (1.1, 1), (0, 0), (0, 1.5), (torch.nan, 1)])
def test_stragglers_out_of_range_are_refused(fail, least):
    with pytest.raises(
        ValueError, match=f"(drop_rate is {fail}|min_work is {least}); expected a number"
    ):
        Stragglers(fail, least)


def test_records_count_who_trained_and_who_reported():
    run = fit(fedavg.build(toys.net()), data(), 4, stragglers=Stragglers(0.5), progress=False)
    assert [r.trained for r in run.records] == [list(range(6))] * 4
    assert 0 < sum(len(r.reported) for r in run.records) < 24
    assert run.records[-1].reported == run.state.reporters.ids.tolist()
    assert all(sorted(r.reported + r.silent) == r.trained for r in run.records)


def test_records_count_the_steps_of_every_client():
    part = Stragglers(min_work=0.3)
    method = fedavg.build(toys.net(), epochs=4, batch=5)
    run = fit(method, data(), 2, stragglers=part, progress=False)
    batches = [-(-size // 5) for size in data().sizes.tolist()]
    steps = [record.steps for record in run.records]
    for number, made in enumerate(steps):
        epochs = part.working(method, data().names, 0, number).phases[0].epochs(CLIENTS).tolist()
        assert made == [e * b for e, b in zip(epochs, batches, strict=True)]
    found = run.workload()
    assert found["gradient_steps"][3] == steps[0][3] + steps[1][3]
    assert found["rounds_trained"][3] == 2
    assert found["rounds_silent"][3] == 0
