"""Messages that are folded as they come: the same round, in the memory of a chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_contract as contract
import torch
import toys
from checks import MEAN
from promises import others_slow
from torch import Generator

import pyrofl
from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.aggregator import Aggregator, Weighed
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli
from pyrofl.inference.engine.round import run_round
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fitted_run import checkpoints as checkpoint
from pyrofl.models import fedabml, fedavg, guides, local, pfedmb, pfedvem
from pyrofl.models.priors import learned_scales
from pyrofl.tensors import Tensors

FOLD = [name for name in contract.METHODS if isinstance(contract.built(name).aggregate, Aggregator)]
DO_NOT = {
    **{name: contract.built(name) for name in contract.METHODS if name not in FOLD},
    "fedavg, median": fedavg.build(toys.net(), aggregation="median"),
    "fedavg, krum": fedavg.build(toys.net(), aggregation="krum:1"),
    "pfedvem, trimmed": pfedvem.build(toys.net(), aggregation="trimmed:0.1"),
    "pfedvem, two M-steps": pfedvem.build(toys.net(), m_step_iters=2),
    "pfedmb, median": pfedmb.build(toys.net(), aggregation="median"),
}
SOME = torch.tensor([0, 2, 3, 5, 6, 8, 9, 11])  # of 3 to 40 rows
ALL = torch.arange(12)


def both(
    method: Method, data: Federation | None = None, chunk_size: int | None = None
) -> tuple[RoundState, RoundState]:
    """Return the second round with all its messages, and without."""
    data = toys.blobs() if data is None else data
    (begun,) = federate(method, data, 1, chunk_size=12)
    kept, folded = (
        run_round(method, data, begun, ALL, SOME, chunk_size=chunk_size, keep_messages=keep)
        for keep in (True, False)
    )
    return kept, folded


def assert_alike(kept: RoundState, folded: RoundState, terms: int = MEAN) -> None:
    toys.assert_same(folded.server, kept.server, terms=terms)
    none = {n: v[:0] for n, v in kept.message.items()}
    toys.assert_same_round(replace(folded, server=kept.server), replace(kept, message=none))


def test_means_fold_and_others_do_not():
    assert {"fedavg", "fedprox", "fedopt", "fedper", "fedrep", "pfedvem", "pfedmb"} <= set(FOLD)
    assert {"scaffold", "pfedme", "pfedbayes", "fedabml", "fedpop"} <= set(FOLD)
    assert {"ifca"} <= set(FOLD)
    assert {"fedbe", "pvi", "metavd"} <= set(DO_NOT)


# That all methods fold in groups of five is in their contract.
@pytest.mark.parametrize("name", ["fedavg", "ifca", "pfedvem", "pfedmb", "scaffold"])
@pytest.mark.parametrize("chunk_size", others_slow([1, 3, None], [3]))
def test_a_round_is_the_same_up_to_rounding(name, chunk_size):
    kept, folded = both(contract.built(name), chunk_size=chunk_size)
    assert len(kept.reporters.ids) == 8
    assert_alike(kept, folded)


@pytest.mark.parametrize("name", ["fedavg", "pfedvem"])
def test_so_it_is_in_single_precision(name):
    kept, folded = both(contract.built(name), toys.blobs(dtype=torch.float32), chunk_size=1)
    assert_alike(kept, folded)


@pytest.mark.parametrize(
    "options",
    others_slow(
        [{"guide": "projection", "lr_alpha": 50.0}, {"weighted": False}, {"drop": 0.19}],
        [{"drop": 0.19}],
    ),
    ids=str,
)
def test_branches_that_some_chunks_do_not_use_fold_too(options):
    assert_alike(*both(pfedmb.build(toys.net(), **options), chunk_size=1))


@pytest.mark.parametrize("average", others_slow(["mnu", "std", "moments"], ["moments"]))
def test_all_averages_of_a_prior_fold(average):
    method = fedabml.build(toys.net(), average=average)
    assert_alike(*both(method, chunk_size=3))


def test_learned_scales_fold():
    net = toys.net()
    method = fedavg.build(
        net, prior=learned_scales.learned(), guide=guides.mean_field, init_scale=0.1
    )
    method = learned_scales.learning(method, net.shapes)
    assert_alike(*both(method, chunk_size=3))


@pytest.mark.parametrize("name", ["fedavg", "pfedvem"])
@pytest.mark.parametrize("chunk_size", [1, 5])
def test_a_bad_client_is_left_out_by_name(name, chunk_size):
    kept, folded = both(toys.poisoned(contract.built(name), 5, 7), chunk_size=chunk_size)
    assert {reason.split(":")[0] for reason in folded.rejected} == {"client 5", "client 7"}
    assert 5 not in folded.reporters.ids.tolist()
    assert_alike(kept, folded)


def test_with_nobody_heard_the_server_keeps_its_state():
    method = contract.built("pfedvem")
    (begun,) = federate(method, toys.blobs(), 1)
    nobody = torch.zeros(0, dtype=torch.long)
    after = run_round(method, toys.blobs(), begun, ALL, nobody, keep_messages=False)
    toys.assert_same(after.server, begun.server)
    assert after.message.keys() == begun.message.keys()


def test_where_nothing_travels_there_is_nothing_to_fold():
    *_, state = federate(local.build(toys.net()), toys.blobs(), 2, keep_messages=False)
    assert not state.message
    assert state.bytes_up.tolist() == [0] * 12


def marking(method: Method, *ids: int) -> Method:
    """Return the method in which some clients, alone in their chunk, send one tensor longer."""

    def mark(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"odd": torch.isin(batch.ids, torch.tensor(ids)).to(batch.size)}

    def upload(received: Tensors, local: Tensors) -> Tensors:
        message = method.upload(received, local)
        extra = {n: torch.cat([v, v], -1) for n, v in list(message.items())[:1]}
        return message | (extra if bool(local["odd"].any()) else {})

    return replace(method, phases=(*method.phases, Phase((mark,))), upload=upload)


def test_messages_are_compared_with_those_of_a_round_that_kept_none():
    largest = toys.SIZES.index(40)  # trained first
    begun, state = federate(
        lambda number: marking(contract.built("fedavg"), *([largest] if number else [])),
        toys.blobs(),
        2,
        chunk_size=1,
        keep_messages=False,
    )
    assert not begun.rejected
    assert [reason.split(":")[0] for reason in state.rejected] == [f"client {largest}"]
    assert "expected shape" in state.rejected[0]
    assert len(state.reporters.ids) == 11


@pytest.mark.parametrize("keep_messages", [True, False])
@pytest.mark.parametrize(("name", "lacking"), [("pfedvem", "tau"), ("pfedmb", "alpha")])
def test_a_message_that_cannot_be_folded_is_left_out(name, lacking, keep_messages):
    method = contract.built(name)

    def mark(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {"odd": torch.isin(batch.ids, torch.tensor([3])).to(batch.size)}

    def upload(received: Tensors, local: Tensors) -> Tensors:
        message = method.upload(received, local)
        return {n: v for n, v in message.items() if n != lacking or not bool(local["odd"].any())}

    poor = replace(method, phases=(*method.phases, Phase((mark,))), upload=upload)
    (state,) = federate(poor, toys.blobs(), 1, chunk_size=1, keep_messages=keep_messages)
    assert [reason[:20] for reason in state.rejected] == [f"client 3: {lacking} is mis"[:20]]
    assert len(state.reporters.ids) == 11


class Watched(Aggregator):
    """Writes down for how many clients it holds something."""

    def fold(self, *parts: Weighed) -> Weighed:
        HELD.append(sum(len(v) for part in parts for v in list(part.values.values())[:1]))
        return super().fold(*parts)

    def close(self, server: Tensors, weighed: Weighed, generator: Generator) -> Tensors:
        HELD.extend(len(v) for v in (*weighed.values.values(), *weighed.weights.values()))
        return super().close(server, weighed, generator)


HELD: list[int] = []


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_no_more_than_a_chunk_is_ever_held(chunk_size):
    method = contract.built("fedavg")
    assert isinstance(method.aggregate, Aggregator)
    HELD.clear()
    spied = replace(method, aggregate=Watched(method.aggregate.weights))
    (state,) = federate(spied, toys.blobs(), 1, chunk_size=chunk_size, keep_messages=False)
    assert len(state.reporters.ids) == 12
    assert HELD[-1] == 1
    assert max(HELD) == max(chunk_size, 2)  # a chunk's, or two that stand


def test_a_run_is_taken_up_to_the_last_bit(tmp_path):
    method, data = contract.built("pfedvem"), toys.blobs()
    options = {
        "participation": bernoulli(0.5),
        "chunk_size": 5,
        "keep_messages": False,
        "progress": False,
    }
    whole = pyrofl.fit(method, data, 3, **options)
    checkpoint.save(pyrofl.fit(method, data, 2, **options), tmp_path / "file")
    start = checkpoint.load(tmp_path / "file", method, data)
    taken_up = pyrofl.fit(method, data, 3, resume_from=start, **options)
    toys.assert_same_round(taken_up.state, whole.state)
    assert [r.bytes_up for r in taken_up.records] == [r.bytes_up for r in whole.records]
    assert all(v.shape[0] == 0 for v in whole.state.message.values())


@pytest.mark.parametrize("name", DO_NOT)
def test_a_merge_that_needs_all_messages_is_refused_before_any_work(name):
    def never(*_: object) -> Tensors:
        raise AssertionError("work was done")

    method = replace(DO_NOT[name], init=never)
    with pytest.raises(ValueError, match="needs all messages at once; use"):
        federate(method, toys.blobs(), 1, keep_messages=False)


def test_a_schedule_is_refused_in_the_round_that_cannot():
    methods = [fedavg.build(toys.net()), fedavg.build(toys.net(), aggregation="median")]
    states = federate(methods.__getitem__, toys.blobs(), 2, keep_messages=False)
    assert next(states).number == 1
    with pytest.raises(ValueError, match="keep_messages is False"):
        next(states)


@pytest.mark.parametrize("reporters", [SOME, ALL, SOME[:1]])
@pytest.mark.parametrize("chunk_size", others_slow([None, 5], [5]))
def test_messages_are_in_order_and_hold_the_memory_of_their_clients_alone(reporters, chunk_size):
    method, data = pfedvem.build(toys.net()), toys.blobs()
    start = next(federate(method, data, 1))
    state = run_round(method, data, start, ALL, reporters, chunk_size=chunk_size)
    whole = run_round(method, data, start, ALL, ALL, chunk_size=1)
    assert state.reporters.ids.tolist() == reporters.tolist()
    for n, v in state.message.items():
        torch.testing.assert_close(v, whole.message[n][reporters], rtol=1e-8, atol=1e-9)
        assert v.untyped_storage().nbytes() == v.numel() * v.element_size()
