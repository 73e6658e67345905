"""Clients assigned to workers: the rounds of one process, and state that stays with the workers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import faults
import pytest
import test_contract as contract
import torch
import toys
from engine_posts import Fake

from pyrofl.inference.engine import federate as rounds
from pyrofl.inference.engine import start
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Stragglers, bernoulli
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.checkpoints import load, save
from pyrofl.inference.transport.pool import Pool
from pyrofl.models import fedavg, pfedvem
from pyrofl.tensors import Tensors

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
ODD = {"participation": bernoulli(0.6), "stragglers": Stragglers(0.3, 0.4), "seed": 5}


@pytest.fixture
def posts(monkeypatch):
    """Let every engine be workers in this process, and collect them."""
    made = []

    def starting(engine, workers, data):
        made.append(Fake(workers or 1))
        return partial(Pool, data, made[-1])

    monkeypatch.setattr(rounds, "engine_starter", starting)
    return made


def small(**settings: object):
    return pfedvem.build(toys.net(), num_particles=2, head_epochs=2, base_epochs=1, **settings)


@contract.on_archetypes
def test_two_workers_make_the_rounds_of_one_process(name, posts):
    data, method = contract.data(), contract.built(name)
    carried = federate(method, data, 3, workers=2, **ODD)
    for found, expected in zip(carried, alone(method, data, 3, **ODD), strict=True):
        toys.assert_same_round(found, expected, **CLOSE)
        assert torch.equal(found.silent, expected.silent)


def alone(method, data, last, **how):
    """Return the rounds of one process, whatever engines are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "engine_starter", start.engine_starter)
        return federate(method, data, last, **how)


def test_what_clients_keep_stays_with_the_workers_until_it_is_asked_for(blobs, posts):
    states = federate(small(), blobs, 3, workers=2)
    one, two = next(states), next(states)
    (post,) = posts
    assert "kept" not in {what for _, what in post.calls}
    assert [what for _, what in post.calls].count("learn") == 2
    first = {n: v.clone() for n, v in next(alone(small(), blobs, 1)).client_states.items()}
    toys.assert_same(
        dict(one.client_states), first, **CLOSE
    )  # the workers hold what a `RoundState` refers to
    assert {*two.client_states} == {*two.client_states.keys()} == set(dict(two.client_states))
    asked = [what for _, what in post.calls].count("kept")
    three = next(states)
    assert "tau" in two.client_states
    states.close()
    assert not post.open
    assert (three.client_states["tau"] != two.client_states["tau"]).any()
    assert asked == 4
    assert [what for _, what in post.calls].count("kept") == 6


def test_a_run_goes_on_with_other_workers_and_from_a_file(blobs, posts, tmp_path):
    method = small()
    *_, whole = alone(method, blobs, 4, **ODD)
    run = fit(method, blobs, 2, workers=3, progress=False, **ODD)
    save(run, tmp_path / "run.safetensors")
    again = fit(
        method,
        blobs,
        4,
        resume_from=load(tmp_path / "run.safetensors", method, blobs, seed=5),
        workers=2,
        progress=False,
        **ODD,
    )
    toys.assert_same_round(again.state, whole, **CLOSE)
    toys.assert_same_round(
        list(alone(method, blobs, 4, resume_from=run.state, **ODD))[-1], whole, **CLOSE
    )


@pytest.mark.parametrize("poison", ["NaN", "wrong type"])
def test_clients_whose_messages_are_left_out_go_back(blobs, posts, poison):
    odd = faults.corrupted(small(), faults.POISONS[poison][0], 3, 8)

    *_, found = federate(odd, blobs, 2, workers=2, chunk_size=1)
    *_, expected = alone(odd, blobs, 2, chunk_size=1)
    assert len(found.rejected) == 2
    toys.assert_same_round(found, expected, **CLOSE)


def test_what_was_committed_is_there_when_a_later_round_fails(blobs, posts):
    def fail(*_: object) -> Tensors:
        raise KeyboardInterrupt

    method = small()
    broken = replace(method, aggregate=fail)
    states = federate(lambda n: broken if n == 2 else method, blobs, 3, workers=2)
    last = [next(states), next(states)][1]
    with pytest.raises(KeyboardInterrupt):
        next(states)
    assert [what for _, what in posts[0].calls].count("undo") == 2
    assert not posts[0].open
    *_, expected = alone(method, blobs, 2)
    toys.assert_same_round(last, expected, **CLOSE)


def test_what_a_method_does_wrong_at_a_worker_is_told_as_here(blobs, posts):
    method = fedavg.build(toys.net())
    wrong = replace(method, upload=lambda received, local: 3)
    with pytest.raises(ValueError, match="what upload returns is a int"):
        next(federate(wrong, blobs, 1, workers=2, check=False))
    assert not posts[0].open


def test_a_worker_that_dies_ends_the_run_in_one_line(blobs, posts):
    states = federate(small(), blobs, 3, workers=2)
    state = next(states)
    posts[0].hands[1] = None
    with pytest.raises(ChildProcessError, match="worker 1 has died"):
        next(states)
    assert not posts[0].open
    with pytest.raises(ChildProcessError):
        dict(state.client_states)


def test_folded_messages_are_the_same(blobs, posts):
    method = fedavg.build(toys.net())
    *_, found = federate(method, blobs, 2, workers=3, chunk_size=1, keep_messages=False)
    *_, expected = alone(method, blobs, 2, keep_messages=False)
    toys.assert_same_round(found, expected, **CLOSE)
