"""Clients made ready for a test: what they receive, how they adapt, which model is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pyrofl.data import Federation, Who
from pyrofl.inference.loop.local import train
from pyrofl.inference.loop.state import Round, chunks, meet
from pyrofl.inference.method import Method, Phase, no_statistics
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.tensors import Tensors, cut, join_up


class Ready(NamedTuple):
    """Some clients side by side, ready to predict."""

    ids: Tensor  # [C]
    received: Tensors  # [C, ...]
    local: Tensors | list[Tensors]  # [C, ...] as the view has it; a list is an ensemble
    noise: list[Generator]  # of each client


def ready(
    method: Method,
    data: Federation,
    state: Round,
    ids: Tensor,
    *,
    model: str | None = None,
    adapted: str = "none",
    seed: Seed = 0,
    chunk: int | None = None,
) -> Iterator[Ready]:
    """Yield clients, some at a time and the largest first, as `evaluate` tests them."""
    for some in chunks(_deployed(method, model), data, state, ids, chunk, seed):
        who = data.who(some)
        received, local = prepared(
            method, data, state, who, model=model, adapted=adapted, seed=seed
        )
        names = [data.names[i] for i in some.tolist()]
        noise = [stream(seed, Stream.TEST, state.number, name) for name in names]
        yield Ready(some, received, local, noise)


def _deployed(method: Method, model: str | None) -> Method:
    view = model or method.main_view
    return method.deployed(view) if view in method.views else method


def prepared(
    method: Method,
    data: Federation,
    state: Round,
    who: Who,
    *,
    model: str | None = None,
    adapted: str = "none",
    seed: Seed = 0,
) -> tuple[Tensors, Tensors | list[Tensors]]:
    """Return what programs are to read as received and local, to test a model of some clients.

    Raises:
        ValueError: if the method has no such view, or `adapted` is unknown.
    """
    view = model or method.main_view
    if view not in method.views:
        raise ValueError(f"no {view!r} model; this method has {', '.join(method.views)}")
    known: dict[str, tuple[Phase, ...]] = {
        "none": (),
        "adapt": method.adapt,
        "phases": method.phases,
    }
    if adapted not in known:
        raise ValueError(f"adapted is {adapted!r}; expected one of {', '.join(known)}")
    if adapted == "adapt" and not method.adapt:
        raise ValueError("adapted is 'adapt'; this method runs nothing before its test")
    received, private = meet(method.deployed(view), data, state, who, seed)
    local = private | received
    if known[adapted]:
        with torch.enable_grad():
            local, *_ = train(
                method,
                received,
                local,
                data,
                who,
                seed=seed,
                number=state.number,
                phases=known[adapted],
            )
    return received, method.views[view](received, local)


def pooled_name(data: Federation) -> str:
    """Return the name of the client that holds all test rows, which no other one has."""
    name = "all test rows"
    while name in data.names:
        name += ", pooled"
    return name


def population_of(data: Federation, population: str) -> tuple[Federation, list[int]]:
    """Return the ids of a population; the pooled client is put behind all others."""
    everyone = len(data.train)
    if population == "training":
        return data, list(range(data.clients))
    if population == "held_out":
        return data, list(range(data.clients, everyone))
    if population != "pooled":
        raise ValueError(
            f"population is {population!r}; expected 'training', 'held_out' or 'pooled'"
        )
    rows = data.pooled_test if data.pooled_test is not None else torch.zeros(0, dtype=torch.long)
    pooled = replace(
        data,
        train=(*data.train, torch.cat(data.train[: data.clients])),
        test=(*data.test, rows),
        names=(*data.names, pooled_name(data)),
        held_out=data.held_out + 1,
    )
    return pooled, [everyone]


def statistics(method: Method, data: Federation, state: Round, seed: Seed = 0) -> Tensors:
    """Return what a method reports about the clients that train: name -> [J].

    Args:
        method: as trained.
        data: the federation.
        state: the round.
        seed: of the run.
    """
    if method.statistics is no_statistics:
        return {}
    parts, found = [], []
    for ids, received, local, _ in ready(
        method, data, state, torch.arange(data.clients), seed=seed
    ):
        assert not isinstance(local, list)
        parts.append(ids)
        found.append(method.statistics(received, local, data.batch(ids)))
    return cut(join_up(found), torch.cat(parts).argsort())
