"""The federated loop: who takes part, what is kept, and runs that can be taken up again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Generator

from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import average
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine import state as engine_state
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli, everyone, fixed, fraction
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState, chunks, client_inputs
from pyrofl.models import fedavg
from pyrofl.tensors import Tensors, generator

# A method whose every number is known: clients add their id + 1 to what they keep and what they
# send; a round's average is then plain arithmetic.


def add_id(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    step = (batch.ids + 1).to(batch.size)
    return {"kept": local["kept"] + step, "sum": local["sum"] + step}


def counting() -> Method:
    def init(generator: Generator, clients: int) -> Tensors:
        return {"sum": torch.zeros(()), "server/rounds": torch.tensor(0)}

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        assert torch.equal(cohort.ids, cohort.ids.sort().values)
        return average(message, torch.ones_like(cohort.size)) | {
            "server/rounds": server["server/rounds"] + 1,
            "server/heard": cohort.ids,
            "server/draw": torch.rand((), generator=generator),
        }

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        return {"kept": 100.0 * (cohort.ids + 1)}

    def nothing(*_: object) -> None:
        return None

    return Method(init, nothing, nothing, (Phase((add_id,)),), aggregate, init_client=init_client)


def only(*ids: int):
    return lambda generator, clients: torch.tensor(ids)


def test_a_round_is_the_average_of_those_who_report(blobs):
    states = list(federate(counting(), blobs, 2, participation=only(7, 1), chunk_size=1))
    assert states[0].server["sum"] == (2 + 8) / 2
    assert states[1].server["sum"] == 5 + (2 + 8) / 2
    assert states[1].server["server/heard"].tolist() == [1, 7]
    assert states[1].client_states["kept"][[1, 7, 0]].tolist() == [204, 816, 0]
    assert states[1].seen.nonzero().flatten().tolist() == [1, 7]
    assert states[1].message["sum"].tolist() == [5 + 2, 5 + 8]
    assert states[1].reporters.size.tolist() == [40, 33]
    assert [s.number for s in states] == [1, 2]


def test_who_trains_and_who_reports_are_drawn_apart(blobs):
    (state,) = federate(
        counting(), blobs, 1, participation=only(5, 2), training_clients=only(9, 5, 3)
    )
    assert state.trained.tolist() == [3, 5, 9]
    assert state.reporters.ids.tolist() == [5]
    assert state.seen.nonzero().flatten().tolist() == [3, 5, 9]
    assert state.server["sum"] == 6
    assert state.client_states["kept"][9] == 1000 + 10


def test_all_may_train_while_some_report(blobs):
    method = replace(counting(), metadata=Metadata(train_all_clients=True))
    (state,) = federate(method, blobs, 1, participation=only(5, 2))
    assert state.trained.tolist() == list(range(12))
    assert state.reporters.ids.tolist() == [2, 5]
    assert bool(state.seen.all())


def test_nobody_is_heard(blobs):
    (state,) = federate(counting(), blobs, 1, participation=only(2), training_clients=only(3))
    begun = first(counting(), blobs, 0)
    toys.assert_same(state.server, begun.server)
    assert (len(state.reporters.ids), state.message["sum"].shape, len(state.bytes_up)) == (
        0,
        (0,),
        0,
    )
    assert state.seen.nonzero().flatten().tolist() == [3]


def test_names_under_server_do_not_travel(blobs):
    (state,) = federate(counting(), blobs, 1)
    assert state.message.keys() == {"sum"}
    # One float64 number each way.
    assert state.bytes_down.tolist() == state.bytes_up.tolist() == [8] * 12


def test_bytes_are_counted_per_client():
    data = toys.blobs(dtype=torch.float32)
    (state,) = federate(fedavg.build(toys.net(), epochs=1), data, 1, participation=fixed(3))
    scalars = sum(shape.numel() for shape in toys.net().shapes.values())
    assert scalars == 8 * 6 + 6 + 6 * 5 + 5
    assert state.bytes_down.tolist() == state.bytes_up.tolist() == [4 * scalars] * 3


def test_private_state_is_made_once(blobs):
    method = counting()
    states = list(federate(method, blobs, 3, participation=only(0, 3)))
    received, private = client_inputs(method, blobs, states[-1], toys.who(blobs, 3, 4), 0)
    assert private["kept"].tolist() == [400 + 3 * 4, 500]
    assert torch.equal(received["sum"], states[-1].server["sum"].expand(2))


def test_held_out_clients_never_train():
    data = toys.blobs(held_out=4)
    (state,) = federate(counting(), data, 1)
    assert state.trained.tolist() == list(range(8))
    _, private = client_inputs(counting(), data, state, toys.who(data, 11, 2), 0)
    assert private["kept"].tolist() == [1200, 303]


def test_method_may_depend_on_the_round(blobs):
    def faster(number: int) -> Method:
        def add(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
            return {"sum": local["sum"] + 10**number}

        return replace(counting(), phases=(Phase((add,)),))

    sums = [float(s.server["sum"]) for s in federate(faster, blobs, 3)]
    assert sums == pytest.approx([1, 11, 111])
    later = RoundState(
        2,
        {"sum": torch.tensor(11.0), "server/rounds": torch.tensor(2)},
        {},
        torch.zeros(12, dtype=torch.bool),
    )
    (state,) = federate(faster, blobs, 3, resume_from=later)
    assert float(state.server["sum"]) == pytest.approx(111)


# Participation.


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32))
def test_fixed_draws_that_many_distinct_clients(count, clients, seed):
    if count > clients:
        with pytest.raises(ValueError, match=f"count of participants is {count}; expected at most"):
            fixed(count)(generator(seed), clients)
    else:
        ids = fixed(count)(generator(seed), clients)
        assert len(ids.unique()) == len(ids) == count
        assert 0 <= int(ids.min()) <= int(ids.max()) < clients


@settings(deadline=None, max_examples=50)
@given(st.floats(0.001, 1), st.integers(1, 200))
def test_fraction_draws_that_share(share, clients):
    ids = fraction(share)(generator(1), clients)
    assert len(ids.unique()) == len(ids) == max(1, round(share * clients))


@settings(deadline=None, max_examples=50)
@given(st.floats(0.05, 1), st.integers(2, 50), st.integers(0, 2**32))
def test_bernoulli_draws_at_least_two(probability, clients, seed):
    few = (1 - probability) ** (clients - 1) * (1 - probability + clients * probability)
    assume(few**1000 < 1e-9)  # otherwise it may give up, and says so
    ids = bernoulli(probability)(generator(seed), clients)
    assert 2 <= len(ids) == len(ids.unique())
    assert int(ids.max()) < clients


# Of ten, given that a binomial (10, 0.3) is at least two: (3 - P(1)) / (1 - P(0) - P(1)) / 10.
GIVEN_TWO = (3 - 3 * 0.7**9) / (1 - 0.7**10 - 3 * 0.7**9) / 10


@pytest.mark.parametrize(
    ("draw", "expected"), [(fixed(3), 0.3), (fraction(0.3), 0.3), (bernoulli(0.3), GIVEN_TWO)]
)
def test_every_client_is_as_likely(draw, expected):
    g = generator(3)
    counts = torch.zeros(10)
    for _ in range(2000):
        counts[draw(g, 10)] += 1
    error = (expected * (1 - expected) / 2000) ** 0.5
    assert ((counts / 2000 - expected).abs() < 4 * error).all()


def test_bernoulli_gives_up_with_a_reason():
    with pytest.raises(ValueError, match=r"1e-09; a thousand draws from 5 clients gave fewer"):
        bernoulli(1e-9)(generator(1), 5)
    with pytest.raises(ValueError, match="from 1 clients gave fewer than 2"):
        bernoulli(1.0)(generator(1), 1)


def test_everyone_is_everyone():
    assert everyone(generator(1), 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("ids", [[], [3, 3], [-1], [12]])
def test_draws_that_do_not_fit_are_refused(blobs, ids):
    draw = only(*ids) if ids else (lambda generator, clients: torch.zeros(0, dtype=torch.long))
    for options in ({"participation": draw}, {"training_clients": draw}):
        with pytest.raises(ValueError, match="distinct, from 0 to 11"):
            next(federate(counting(), blobs, 1, **options))


# Seeds and resuming.


def noisy(data: object) -> Method:
    return toys.trained(toys.FAMILIES["mean_field"], data)  # type: ignore[arg-type]


def test_rounds_draw_afresh(blobs):
    drawn = [s.trained.tolist() for s in federate(counting(), blobs, 6, participation=fixed(4))]
    assert len({tuple(ids) for ids in drawn}) > 3
    servers = [float(s.server["server/draw"]) for s in federate(counting(), blobs, 6)]
    assert len(set(servers)) == 6


def test_a_server_state_can_be_given(blobs):
    server = {"sum": torch.tensor(50.0), "server/rounds": torch.tensor(7)}
    (state,) = federate(counting(), blobs, 1, server_state=server, participation=only(0))
    assert state.server["sum"] == 51
    assert state.server["server/rounds"] == 8
    assert server["sum"] == 50


# Clients that turn NaN.


def test_a_newcomer_that_turns_bad_stays_unseen(blobs):
    (state,) = federate(toys.poisoned(noisy(blobs), 3), blobs, 1)
    assert (~state.seen).nonzero().flatten().tolist() == [3]
    assert all((v[3] == 0).all() for v in state.client_states.values())


def test_what_federate_is_given_is_checked_before_the_first_round(blobs):
    method = fedavg.build(toys.net())
    other = first(method, toys.blobs(held_out=2), 0)
    for options, message in (
        ({"rounds": -1}, "rounds is -1"),
        ({"rounds": 1, "chunk_size": 0}, "chunk_size is 0"),
        (
            {"rounds": 1, "resume_from": other},
            "resume_from is a round of 10 clients, but the data have 12; resume",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            federate(method, blobs, **options)


def test_too_few_messages_for_krum_leave_the_server_as_it_is(blobs):
    method = fedavg.build(toys.net(), epochs=1, aggregation="krum:2")
    begun = first(method, blobs, 0)
    (state,) = federate(method, blobs, 1, participation=only(1, 2, 3))
    toys.assert_same(state.server, begun.server)
    assert state.rejected == (
        "the server: krum received 3 messages, to choose 1 with up to 2 bad; expected at least 7 "
        "messages in every round",
    )


@pytest.mark.parametrize("chunk_size", [5, None])
def test_all_clients_train_once_the_largest_first(blobs, monkeypatch, chunk_size):
    method = fedavg.build(toys.net())
    begun = first(method, blobs, 0)
    one = sum(v.numel() * v.element_size() for v in begun.server.values())
    monkeypatch.setattr(engine_state, "chunk_bytes", lambda: 5 * one)
    some = list(chunks(method, blobs, begun, torch.arange(12), chunk_size, 0))
    assert [len(ids) for ids in some] == [5, 5, 2]
    assert torch.cat(some).unique().tolist() == list(range(12))
    assert blobs.sizes[torch.cat(some)].tolist() == sorted(toys.SIZES, reverse=True)
    monkeypatch.setattr(engine_state, "chunk_bytes", lambda: one // 2)  # less than for a client
    each = list(chunks(method, blobs, begun, torch.arange(12), None, 0))
    assert [len(ids) for ids in each] == [1] * 12
