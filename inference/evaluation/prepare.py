"""Preparation of clients for an evaluation: download, initialization and adaptation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack

import torch
from torch import Generator, Tensor

from pyrofl.data import Cohort, Federation
from pyrofl.data.outlines import Hidden
from pyrofl.data.tables.wording import listed
from pyrofl.inference.definition.metadata import REPORTED, marked_names, no_statistics
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.origin import refuse_other_clients, refuse_other_constants
from pyrofl.inference.engine.state import RoundState, chunks, client_inputs
from pyrofl.inference.evaluation.specification import EvaluationSpec, ModelOptions
from pyrofl.inference.training.phases import train
from pyrofl.tensors import Tensors, cut, join_up, pick
from pyrofl.turns import synchronized

MAX_NAMED_CLIENTS = 3  # clients that a warning names


def ready(
    method: Method, data: Federation, state: RoundState, ids: Tensor, spec: EvaluationSpec
) -> Iterator[tuple[Tensor, Tensors, Tensors | list[Tensors], list[Generator]]]:
    """Prepare clients for evaluation; yield ids, downloads, model tensors and noise generators."""
    refuse_other_constants(method, state.constants)
    refuse_other_clients(method, data, state)
    deployed = method.deployed(spec.view_name(method))
    for some in chunks(deployed, data, state, ids, spec.chunk_size, spec.seed):
        received, local = prepared(method, data, state, data.cohort(some), **vars(spec))
        names = [data.names[i] for i in some.tolist()]
        noise = [stream(spec.seed, Stream.TEST, state.number, name) for name in names]
        yield some, received, local, noise


def single(
    method: Method, data: Federation, state: RoundState, ids: Tensor, spec: EvaluationSpec
) -> Iterator[tuple[Tensor, Tensors, Tensors, list[Generator]]]:
    """Prepare clients for evaluation, as `ready` does; raise ValueError for ensemble models."""
    for some, received, local, noise in ready(method, data, state, ids, spec):
        if isinstance(local, list):
            raise ValueError(
                f"{spec.view_name(method)!r} is an ensemble, which has no posterior draws; choose "
                "another model"
            )
        yield some, received, local, noise


def prepared(
    method: Method,
    data: Federation,
    state: RoundState,
    cohort: Cohort,
    **options: Unpack[ModelOptions],
) -> tuple[Tensors, Tensors | list[Tensors]]:
    """Return clients' downloads and model tensors, after adaptation if it is requested."""
    how = EvaluationSpec.of(options)
    view, phases, seed = how.view_name(method), how.phases(method), how.seed
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
    data: Federation, spec: EvaluationSpec
) -> tuple[Federation, tuple[Tensor, ...], Tensor]:
    """Select rows to evaluate; return federation, rows by client, and ids of clients with rows."""
    data, everyone = population_of(data, spec.population)
    rows = data.train if spec.part == "train" else data.test
    ids = torch.tensor([i for i in everyone if len(rows[i])], dtype=torch.long)
    if not len(ids):
        if isinstance(data, Hidden):
            data.gather()
        raise ValueError(
            f"no client of the {spec.population} population has {spec.part} rows; choose another "
            "part or population"
        )
    return data, rows, ids


def untrained(
    method: Method, data: Federation, state: RoundState, spec: EvaluationSpec
) -> tuple[str, ...]:
    """Return the names of training clients whose personal model is the initial one.

    They have not trained, or their messages were rejected, and the evaluation does not adapt them.
    Clients that keep nothing between rounds have no model of their own.
    """
    names = data.names[: data.clients]
    unseen = (~state.seen).nonzero().flatten()
    is_personal = spec.view_name(method) == "personal" and spec.population == "training"
    if not is_personal or spec.adaptation != "none" or not state.number or not len(unseen):
        return ()
    if state.names not in ((), names):  # a state that fits all clients
        return ()
    deployed, one = method.deployed("personal"), data.cohort(unseen[:1])
    _, private = client_inputs(deployed, data, state, one, spec.seed)
    if not private and not pick(state.server, method.per_client):
        return ()
    return tuple(names[i] for i in unseen.tolist())


def warning_of_untrained(method: Method, data: Federation, state: RoundState) -> str:
    """Return a warning about clients whose personal model has not trained; "" if all have."""
    if "personal" not in method.views or method.adapt:  # these adapt before an evaluation
        return ""
    names = untrained(method, data, state, EvaluationSpec(model="personal"))
    if not names:
        return ""
    return (
        f"the personal model of {len(names)} of {data.clients} clients has not trained, so that "
        f"it is the initial one: {listed(names, MAX_NAMED_CLIENTS)}; fit more rounds, or "
        "evaluate with adaptation='train'"
    )


@synchronized
def statistics(method: Method, data: Federation, state: RoundState, seed: Seed = 0) -> Tensors:
    """Return a method's client statistics, such as numbers of pruned weights: [J] or [J, *p]."""
    refuse_other_clients(method, data, state)
    held = pick(state.server, marked_names(method.metadata.tensors, REPORTED))
    server_values = {n.removeprefix("server/"): v[: data.clients] for n, v in held.items()}
    if method.metadata.statistics is no_statistics:
        return server_values
    parts, statistics_by_part = [], []
    everyone = torch.arange(data.clients)
    for ids, received, local, _ in single(method, data, state, everyone, EvaluationSpec(seed=seed)):
        parts.append(ids)
        statistics_by_part.append(method.metadata.count(received, local, data.batch(ids)))
    return cut(join_up(statistics_by_part), torch.cat(parts).argsort()) | server_values
