"""Preparation of clients for an evaluation: download, initialization and adaptation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack

import torch
from torch import Generator, Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.inference.description import refuse_other_constants
from pyrofl.inference.engine.state import RoundState, chunks, client_inputs
from pyrofl.inference.evaluation.specification import EvaluationSpec, ModelAsked
from pyrofl.inference.metadata import REPORTED, marked, no_statistics
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed, Stream, stream
from pyrofl.inference.training.local import train
from pyrofl.tensors import Tensors, cut, join_up, pick
from pyrofl.turns import synchronized


def ready(
    method: Method, data: Federation, state: RoundState, ids: Tensor, asked: EvaluationSpec
) -> Iterator[tuple[Tensor, Tensors, Tensors | list[Tensors], list[Generator]]]:
    """Prepare clients for evaluation; yield ids, downloads, model tensors and noise generators."""
    refuse_other_constants(method, state.constants)
    deployed = method.deployed(asked.view(method))
    for some in chunks(deployed, data, state, ids, asked.chunk_size, asked.seed):
        received, local = prepared(method, data, state, data.cohort(some), **vars(asked))
        names = [data.names[i] for i in some.tolist()]
        noise = [stream(asked.seed, Stream.TEST, state.number, name) for name in names]
        yield some, received, local, noise


def single(
    method: Method, data: Federation, state: RoundState, ids: Tensor, asked: EvaluationSpec
) -> Iterator[tuple[Tensor, Tensors, Tensors, list[Generator]]]:
    """Prepare clients for evaluation, as `ready` does; raise ValueError for ensemble models."""
    for some, received, local, noise in ready(method, data, state, ids, asked):
        if isinstance(local, list):
            raise ValueError(
                f"{asked.view(method)!r} is an ensemble, which has no posterior draws; choose "
                "another model"
            )
        yield some, received, local, noise


def prepared(
    method: Method, data: Federation, state: RoundState, cohort: Cohort, **asked: Unpack[ModelAsked]
) -> tuple[Tensors, Tensors | list[Tensors]]:
    """Return clients' downloads and model tensors, after adaptation if it is requested."""
    how = EvaluationSpec.of(asked)
    view, phases, seed = how.view(method), how.phases(method), how.seed
    received, private = client_inputs(method.deployed(view), data, state, cohort, seed)
    local = private | received
    if phases:
        with torch.enable_grad():
            local, *_ = train(
                method, received, local, data, cohort, seed=seed, number=state.number, phases=phases
            )
    return received, method.read_view(view, received, local)


def pooled_name(data: Federation) -> str:
    """Return an unused name for the artificial client that has all test rows."""
    name = "all test rows"
    while name in data.names:
        name += ", pooled"
    return name


def population_of(data: Federation, population: str) -> tuple[Federation, list[int]]:
    """Return a federation and the ids of a population: training, held-out or pooled clients."""
    everyone = len(data.train)
    if population != "pooled":
        ids = range(data.clients) if population == "training" else range(data.clients, everyone)
        return data, list(ids)
    rows = data.pooled_test if data.pooled_test is not None else torch.zeros(0, dtype=torch.long)
    train, test = (*data.train, torch.cat(data.train[: data.clients])), (*data.test, rows)
    names, held_out = (*data.names, pooled_name(data)), data.held_out + 1
    return replace(data, train=train, test=test, names=names, held_out=held_out), [everyone]


def with_rows(
    data: Federation, asked: EvaluationSpec
) -> tuple[Federation, tuple[Tensor, ...], Tensor]:
    """Select rows to evaluate; return federation, rows by client, and ids of clients with rows."""
    data, everyone = population_of(data, asked.population)
    rows = data.train if asked.part == "train" else data.test
    ids = torch.tensor([i for i in everyone if len(rows[i])], dtype=torch.long)
    if not len(ids):
        raise ValueError(
            f"no client of the {asked.population} population has {asked.part} rows; choose another "
            "part or population"
        )
    return data, rows, ids


@synchronized
def statistics(method: Method, data: Federation, state: RoundState, seed: Seed = 0) -> Tensors:
    """Return a method's client statistics, such as numbers of pruned weights: [J] or [J, *p]."""
    held = pick(state.server, marked(method.metadata.tensors, REPORTED))
    told = {n.removeprefix("server/"): v[: data.clients] for n, v in held.items()}
    if method.metadata.statistics is no_statistics:
        return told
    parts, found = [], []
    everyone = torch.arange(data.clients)
    for ids, received, local, _ in single(method, data, state, everyone, EvaluationSpec(seed=seed)):
        parts.append(ids)
        found.append(method.metadata.count(received, local, data.batch(ids)))
    return cut(join_up(found), torch.cat(parts).argsort()) | told
