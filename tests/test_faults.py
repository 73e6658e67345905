"""The fault table: what is injected into the rounds of every method, and what comes of it.

`python tests/test_faults.py` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import faults
import pytest
import test_contract as contract
import torch
import toys
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.fit import fit
from pyrofl.inference.messages import BadMessage, kinds
from pyrofl.inference.method import Method
from pyrofl.inference.rounds import advance, federate, first
from pyrofl.inference.state import Round
from pyrofl.inference.stragglers import Stragglers
from pyrofl.models import fedavg
from pyrofl.records import table

BAD = (1, 4)
CLIENTS = torch.arange(6)
GOOD = torch.tensor([0, 2, 3, 5])
SENDING = [name for name in contract.METHODS if contract.SCALARS[name][1]]
RULED = {name: contract.built(name).rules for name in contract.METHODS}

sending = pytest.mark.parametrize("name", SENDING)


@cache
def data() -> Federation:
    return toys.blobs((3, 9, 7, 12, 4, 8))


@cache
def begun(name: str) -> Round:
    return next(iter(federate(contract.built(name), data(), 1, chunk=1)))


@cache
def without(name: str) -> Round:
    """A second round in which the bad clients train and are not heard."""
    return advance(contract.built(name), data(), begun(name), CLIENTS, GOOD, chunk=1)


def spoilt(name: str, method: Method, federation: Federation | None = None) -> Round:
    return advance(method, federation or data(), begun(name), CLIENTS, CLIENTS, chunk=1)


def check(name: str, state: Round, words: str) -> int:
    """Require that the bad clients are named and left out; return how many."""
    toys.assert_same(state.server, without(name).server)
    assert torch.equal(state.who.ids, GOOD)
    assert [r.split(":")[0] for r in sorted(state.rejected)] == [f"client {i}" for i in BAD]
    assert all(words in reason for reason in state.rejected), state.rejected
    for n, v in begun(name).private.items():
        assert torch.equal(state.private[n][list(BAD)], v[list(BAD)])
    return len(state.rejected)


@sending
@pytest.mark.parametrize("kind", faults.POISONS)
def test_a_bad_message_is_named_and_left_out(name, kind):
    poison, words = faults.POISONS[kind]
    if kind == "missing tensor" and len(begun(name).message) == 1:
        words = "expected"
    assert (
        check(name, spoilt(name, faults.corrupted(contract.built(name), poison, *BAD)), words) == 2
    )


@pytest.mark.parametrize("name", [name for name, rules in RULED.items() if rules])
def test_what_must_be_positive_is_looked_at(name):
    for patterns, rule in RULED[name].items():
        if not [n for n in begun(name).message if contract.matches(n, patterns)]:
            continue
        poison = faults.entry(-1.0, patterns)
        state = spoilt(name, faults.corrupted(contract.built(name), poison, *BAD))
        assert check(name, state, f"; expected {rule.text}") == 2


def test_methods_that_send_variances_or_weights_say_so():
    assert {"fedpop", "pfedmb", "pfedvem", "pvi"} <= {n for n, rules in RULED.items() if rules}


@contract.everywhere
@pytest.mark.parametrize("size", [0.0, -3.0, torch.nan, torch.inf])
def test_a_size_that_cannot_be_is_refused(name, size):
    other = faults.claiming(data(), dict.fromkeys(BAD, size))
    state = spoilt(name, contract.built(name), other)
    assert check(name, state, f"its size is {size:g}; expected ") == 2


def test_the_first_bad_entry_is_named(blobs):
    method = fedavg.build(toys.net(), epochs=1)
    poison = faults.entry(torch.nan, "w/fc1.weight")
    (state,) = federate(faults.corrupted(method, poison, 3), blobs, 1)
    assert state.rejected == ("client 3: w/fc1.weight[5, 7] is nan; expected a finite number",)
    assert kinds(state.rejected * 3) == {"a finite number": 3}


@sending
def test_a_bad_message_stops_the_run_if_that_is_asked(name):
    method = faults.corrupted(contract.built(name), faults.entry(torch.nan), *BAD)
    with pytest.raises(BadMessage, match=r"client 1: .* is nan.*; client 4: .* is nan"):
        list(federate(method, data(), 2, on_bad_message="raise"))


@sending
def test_without_a_good_message_the_server_keeps_its_state_and_says_so(name, capsys):
    method = faults.corrupted(contract.built(name), faults.entry(torch.inf), *range(6))
    run = fit(method, data(), 2, draws=None)
    toys.assert_same(run.state.server, first(method, data(), 0).server)
    assert run.reported == [[], []]
    assert [len(reasons) for reasons in run.rejected] == [6, 6]
    assert "round 2: nobody reports; server unchanged" in capsys.readouterr().err


def test_a_merge_that_overflows_is_undone(blobs):
    def merge(server, message, who, generator):
        return {n: v.sum(0) * 1e308 * 1e10 for n, v in message.items()}

    method = replace(fedavg.build(toys.net(), epochs=1), merge=merge)
    (state,) = federate(method, blobs, 1)
    toys.assert_same(state.server, first(method, blobs, 0).server)
    assert state.rejected[0].startswith("the server: merged w/fc1.weight[0, 0] is ")
    assert kinds(state.rejected) == {"a finite number": 1}
    with pytest.raises(BadMessage, match="the server"):
        list(federate(method, blobs, 1, on_bad_message="raise"))


# What clients fail to do.


@contract.everywhere
def test_who_is_not_heard_has_trained_and_the_rest_is_exact(name):
    loss = Stragglers(fail=0.5)
    (state,) = federate(contract.built(name), data(), 1, seed=3, chunk=6, stragglers=loss)
    heard = loss.heard(CLIENTS, data().names, 3, 0)
    assert 0 < len(heard) < 6
    assert torch.equal(state.who.ids, heard)
    assert torch.equal(state.trained, CLIENTS)
    start = first(contract.built(name), data(), 3)
    exact = advance(contract.built(name), data(), start, CLIENTS, heard, seed=3, chunk=6)
    toys.assert_same_round(state, exact)


@contract.everywhere
def test_part_of_the_work_is_finite_and_less(name):
    (part,) = federate(contract.built(name), data(), 1, chunk=6, stragglers=Stragglers(least=0.01))
    assert torch.equal(part.who.ids, CLIENTS)
    assert not part.rejected
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
        heard[number, Stragglers(0.3).heard(ids, names, 0, number)] = 1
    assert rate(heard.flatten(), 0.7) < 3
    assert heard.mean(0).std() < 3 * (0.21 / 40) ** 0.5
    again = Stragglers(0.3).heard(ids[::2], names, 0, 7)
    assert again.tolist() == [i for i in heard[7].nonzero().flatten().tolist() if i % 2 == 0]


def test_epochs_are_drawn_for_every_client_and_round():
    method = fedavg.build(toys.net(), epochs=10)
    ids, names = torch.arange(200), [f"client {i}" for i in range(200)]

    def epochs(number: int) -> Tensor:
        return Stragglers(least=0.2).working(method, names, 0, number).phases[0].epochs(ids)

    first_, second = epochs(0), epochs(1)
    assert (int(first_.min()), int(first_.max())) == (3, 10)  # more than 2, at most 10
    assert not torch.equal(first_, second)
    assert torch.equal(epochs(0), first_)
    error = (8 / 12**0.5) / 200**0.5
    assert abs(float(first_.double().mean()) - 6.5) < 3 * error
    assert Stragglers().working(method, names, 0, 0) is method


def test_epochs_of_ones_own_are_shortened_too():
    method = fedavg.build(toys.net(), epochs=lambda ids: ids)
    got = Stragglers(least=0.5).working(method, data().names, 0, 0).phases[0].epochs(CLIENTS)
    assert got[0] == 0
    assert all(-(-i // 2) <= e <= i for i, e in enumerate(got.tolist()))


@pytest.mark.parametrize(("fail", "least"), [(-0.1, 1), (1.1, 1), (0, 0), (0, 1.5), (torch.nan, 1)])
def test_stragglers_out_of_range_are_refused(fail, least):
    with pytest.raises(ValueError, match=f"fail is {fail}, least {least}; expected"):
        Stragglers(fail, least)


def test_records_count_who_trained_and_who_reported():
    run = fit(fedavg.build(toys.net()), data(), 4, stragglers=Stragglers(0.5), progress=False)
    assert run.trained == [list(range(6))] * 4
    assert 0 < sum(map(len, run.reported)) < 24
    assert run.reported[-1] == run.state.who.ids.tolist()


def rows(names: Sequence[str]) -> list[tuple[str, int, str, int]]:
    """Return the fault table of some methods: kind, times injected, promise, times kept."""
    found: dict[str, list[int]] = {}

    def count(kind: str, injected: int, kept: int) -> None:
        total = found.setdefault(kind, [0, 0])
        total[0] += injected
        total[1] += kept

    for name in names:
        method = contract.built(name)
        for kind, (poison, _) in faults.POISONS.items() if name in SENDING else ():
            state = spoilt(name, faults.corrupted(method, poison, *BAD))
            count(f"{kind} in a message", 2, check(name, state, "expected"))
        for patterns in RULED[name]:
            if [n for n in begun(name).message if contract.matches(n, patterns)]:
                poison = faults.entry(-1.0, patterns)
                state = spoilt(name, faults.corrupted(method, poison, *BAD))
                count("negative variance, precision or weight", 2, check(name, state, "expected"))
        for size in (0.0, -3.0, torch.nan):
            state = spoilt(name, method, faults.claiming(data(), dict.fromkeys(BAD, size)))
            count("zero, negative or NaN size", 2, check(name, state, "expected"))
    promise = "client named and left out, others exact"
    return [(kind, n, promise, kept) for kind, (n, kept) in found.items()]


def test_the_fault_table_keeps_every_promise():
    for kind, injected, _, kept in rows(("fedavg", "pfedvem")):
        assert injected == kept > 0, kind


if __name__ == "__main__":
    print(table(("fault", "injected", "promised", "kept"), rows(contract.METHODS)))
