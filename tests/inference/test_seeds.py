"""Every purpose has its own stream of random numbers, and several have a seed of their own."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import product

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import toys
from torch import Tensor

import pyrofl
from pyrofl import Seeds, reference
from pyrofl.data import Federation
from pyrofl.data.loaders.conjugate import linear_regression
from pyrofl.inference.definition import seeds
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Stream, Streams, stream
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import Stragglers, bernoulli
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.training import phases
from pyrofl.models import fedavg, guides, likelihoods, pfedvem, priors, pvi
from pyrofl.nets import build
from pyrofl.tensors import generator

OPTIONS = {"participation": bernoulli(0.6), "stragglers": Stragglers(0.3, 0.4)}


def begin(*key: int | str) -> tuple[int, ...]:
    return tuple(torch.randint(2**62, (2,), generator=generator(*key)).tolist())


def test_keys_of_all_lengths_and_kinds_have_different_streams():
    words: list[int | str] = [0, 1, 3, 2**31, 2**32, 2**32 + 3, 2**64, "", "0", "3", "1, 0", "a'"]
    keys = [key for n in range(4) for key in product(words, repeat=n)]
    assert len({begin(*key) for key in keys}) == len(keys) == 1 + 12 + 12**2 + 12**3
    assert begin(np.int64(3), np.str_("a"), Stream.WHO) == begin(3, "a", 2)
    assert begin(Stream.START) == begin(1) != begin(True, 0)


def test_a_stream_is_a_mersenne_twister_all_of_whose_state_is_drawn():
    # 32 bits, which are all that torch takes of a seed, would let streams of a long run meet.
    g = generator(3, "a")
    words = g.get_state().numpy()[24 : 24 + 8 * 624].view(np.uint64)
    assert len(set(words.tolist())) == 624
    assert abs(words.mean() / 2**32 - 0.5) < 4 / (12 * 624) ** 0.5
    twister = np.random.MT19937()
    key = {"key": words.astype(np.uint32), "pos": 624}
    twister.state = {"bit_generator": "MT19937", "state": key}
    found = torch.empty(2000, dtype=torch.int64).random_(2**16, generator=g)
    assert found.tolist() == (twister.random_raw(2000) % 2**16).tolist()


@pytest.mark.parametrize("key", [(-1,), (0, -3), (2, "a", -1)])
def test_negative_keys_are_refused(key):
    with pytest.raises(ValueError, match=r"expected no negative number"):
        generator(*key)


def hierarchy() -> tuple[Method, Federation]:
    task = linear_regression(3, 2, [4, 9, 6], seed=1)
    prior = priors.fixed(dist.Normal, 0.0, 1.0)
    net = build("linear", (2,), 1)
    method = pvi.build(net, likelihood=likelihoods.normal(), prior=prior, epochs=2, batch=3)
    return method, task.federation


def test_all_streams_that_the_library_uses_are_different(monkeypatch):
    asked: set[tuple[int | str, ...]] = set()

    def noted(*key: int | str) -> torch.Generator:
        asked.add(key)
        return generator(*key)

    monkeypatch.setattr(seeds, "generator", noted)
    method, data = hierarchy()
    run = pyrofl.fit(method, data, 3, draws=2, progress=False, **OPTIONS)
    run.evaluate(adaptation="train", part="train")
    run.to_arviz(3, groups="all")
    pyrofl.checks.sbc(method, data, 1, replications=3, draws=3, bins=2)
    reference.nuts(method, data, 4, warmup=2, chains=2, state=run.state)
    reference.centralized(method, data, 2, steps=2, state=run.state)
    tested = run.copy(
        data=dataclasses.replace(
            data,
            x=data.x.repeat(2, 1),
            y=data.y.repeat(2),
            test=[rows + len(data.x) for rows in data.train],
        )
    )
    found = pyrofl.conformal(tested, 0.4, chunk_size=1)
    found.predict(data.x[:2], data.names[0], pooling="pooled")
    assert {key[1] for key in asked} == set(Stream) - {Stream.PRIVACY}  # which is not asked for
    assert all(key[1] in tuple(Stream) for key in asked)
    assert any(key[1:3] == (Stream.ROWS, Stream.PRIOR) for key in asked)  # not those of the sites
    keys = [*asked, *((seed,) for seed in range(50))]  # with one number alone data are made
    assert len({begin(*key) for key in keys}) == len(keys) > 150


def drawn(seed: pyrofl.inference.definition.seeds.Seed) -> list[RoundState]:
    method = fedavg.build(toys.net(), guide=guides.mean_field, epochs=3, batch=4)
    return list(federate(method, toys.blobs((3, 9, 7, 12)), 3, seed=seed, **OPTIONS))


def who(rounds: list[RoundState]) -> list[list[list[int]]]:
    return [[r.trained.tolist(), r.reporters.ids.tolist()] for r in rounds]


def starts(seed: pyrofl.inference.definition.seeds.Seed) -> Tensor:
    method, data = fedavg.build(toys.net()), toys.blobs()
    return next(iter(pyrofl.fit(method, data, 0, seed=seed, progress=False).state.server.values()))


def test_one_seed_for_all_is_the_same_seed_for_each():
    for one, other in zip(drawn(3), drawn(Seeds(3, 3, 3)), strict=True):
        toys.assert_same_round(one, other)


def test_a_seed_changes_what_it_is_for_and_nothing_else():
    base, init, takes, noise = (
        Seeds(), Seeds(init=1), Seeds(participation=1), Seeds(noise=1)
    )  # fmt: skip
    first = drawn(base)
    assert torch.equal(starts(base), starts(takes))
    assert torch.equal(starts(base), starts(noise))
    assert not torch.equal(starts(base), starts(init))
    assert who(first) == who(drawn(init)) == who(drawn(noise)) != who(drawn(takes))
    # The first server state is given: what is left of the seed of init is nothing.
    method, data = fedavg.build(toys.net(), guide=guides.mean_field), toys.blobs((3, 9, 7, 12))
    server = method.init(generator(0), 4)
    one, same, other = (
        next(iter(federate(method, data, 1, seed=s, server_state=server)))
        for s in (base, init, noise)
    )
    toys.assert_same_round(one, same)
    assert any(not torch.equal(v, other.server[n]) for n, v in one.server.items())


def test_rows_are_drawn_by_the_seed_of_noise_and_work_by_that_of_participation():
    assert [seeds.SEED_OF.get(purpose, "noise") for purpose in Stream] == [
        *("init", "participation", "participation"),
        *("noise" for _ in list(Stream)[3:]),
    ]
    for purpose in Stream:
        changed = Seeds(**{seeds.SEED_OF.get(purpose, "noise"): 7})
        a, b, c = (
            torch.rand(3, generator=stream(s, purpose, 2, "x")) for s in (changed, 7, Seeds())
        )
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_streams_are_made_when_they_are_needed_and_once():
    made: list[str] = []

    @cache
    def make(name: str) -> torch.Generator:
        made.append(name)
        return stream(3, Stream.NOISE, 0, name)

    streams = Streams(make, ["a", "b", "c", "d"])
    assert len(streams) == 4
    assert len(streams[1:]) == 3
    assert made == []
    first = torch.rand(2, generator=streams[1:][0])
    assert made == ["b"]
    known = stream(3, Stream.NOISE, 0, "b")
    assert torch.equal(first, torch.rand(2, generator=known))
    assert torch.equal(torch.rand(2, generator=streams[1]), torch.rand(2, generator=known))
    assert [g is streams[i] for i, g in enumerate(streams)] == [True] * 4
    assert made == ["b", "a", "c", "d"]


def test_programs_without_draws_make_no_streams_of_noise(monkeypatch):
    asked: list[Stream] = []

    def counted(seed, purpose, *key):
        asked.append(purpose)
        return stream(seed, purpose, *key)

    monkeypatch.setattr(phases, "stream", counted)
    next(federate(fedavg.build(toys.net()), toys.blobs(), 1, check=False))
    assert Stream.ORDER in asked
    assert Stream.NOISE not in asked
    next(federate(pfedvem.build(toys.net()), toys.blobs(), 1, check=False))
    assert asked.count(Stream.NOISE) == len(toys.SIZES)
