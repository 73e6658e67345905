"""Validation of a method on several clients with their own ids and rows, and of the server's part.

The first checks see two clients of three rows. Here three clients have the ids and the numbers of
rows that they train with, up to a bound, so that code which depends on either runs as in a round.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.data.federation import Federation
from pyrofl.inference.definition.aggregator import Aggregator
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState, client_inputs, to_data, uploaded
from pyrofl.inference.validation.differences import warn_of_odd_losses
from pyrofl.inference.validation.gradients import WatchedStep, watched_phase
from pyrofl.inference.validation.independence import (
    TestRound,
    TrialRound,
    differs,
    refuse_changes,
    refuse_global_draws,
)
from pyrofl.inference.validation.program_checker import ProgramChecker
from pyrofl.inference.validation.repeatability import Reruns
from pyrofl.inference.validation.variants import with_other_padding
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, refuse_inplace_writes

MAX_FEATURE_NUMBERS = 2**15  # of the features of a client's rows
ROW_BOUNDS = 4, 64  # least and largest bound of a client's rows
FAILS = (RuntimeError, IndexError, KeyError, TypeError, AttributeError, ArithmeticError)


def refuse_dependent_clients(
    method: Method, few: Federation, ids: Tensor, server: Tensors | None
) -> None:
    """Raise ValueError if a function of the method mixes these clients, or has a memory.

    Args:
        method: the method.
        few: the result of `trial_federation`.
        ids: ids of the clients.
        server: the initial state of the server.
    """
    assert server is not None
    refuse_dependent_epochs(method, ids)
    state = RoundState(0, to_data(server, few), {}, torch.zeros(few.clients).bool())
    steps = list[WatchedStep]()
    phases = tuple(_short(phase, steps) for phase in (*method.phases, *method.adapt))
    for step in steps:
        step.keep = True
    trial = TestRound(method, few, state, phases, ids)
    try:
        trial_round = trial.run_round(ids)
    except (ValueError, *FAILS):
        return  # a program may need all rows of a client; the round reports other errors
    if not all(v.isfinite().all() for v in trial_round.local.values()):
        return  # the round reports it, and names the clients
    trial.refuse_mixed_clients(trial_round, lambda: None)
    if not steps and is_of_library(method.aggregate):
        # Closed-form updates, such as searches for a mode, are dear; and at states and rows that no
        # client has, they may amplify rounding.
        return
    after = None if is_of_library(method.aggregate) else aggregate_twice(trial, trial_round)
    if after is not None:
        later = replace(trial, state=replace(state, server=after))
        with suppress(*FAILS):
            try:
                second = later.run_round(ids)
            except ValueError:  # the messages were not checked before they were aggregated
                second = None
            if second is not None:
                later.refuse_mixed_clients(second, lambda: None)
    warn_of_odd_losses(method, steps)
    if few.x.is_floating_point():
        for client in (ids[0], ids[-1]):
            _refuse_far_rows(trial, int(client))


def trial_federation(data: Federation, ids: Tensor) -> Federation:
    """Return a federation in which the given clients have some of their rows, and others have one.

    All clients have their ids, and x and y have only the rows in use.
    """
    low, high = ROW_BOUNDS
    most = min(high, max(low, MAX_FEATURE_NUMBERS // max(1, data.x[0].numel())))
    rows = {i: data.train[i][:most] for i in ids.tolist()}
    table = torch.cat([*rows.values()])
    at = dict(
        zip(rows, torch.arange(len(table)).split([len(v) for v in rows.values()]), strict=True)
    )
    one = torch.zeros(1, dtype=torch.long)
    return replace(
        data,
        x=data.x[table],
        y=data.y[table],
        weights=None if data.weights is None else data.weights[table],
        train=tuple(at.get(i, one) for i in range(data.clients)),
        test=tuple(one[:0] for _ in range(data.clients)),
        names=data.names[: data.clients],
        held_out=0,
        pooled_test=None,
    )


def refuse_dependent_epochs(method: Method, ids: Tensor) -> None:
    """Raise ValueError if a client's number of epochs depends on the others that train."""
    for phase in (*method.phases, *method.adapt):
        if callable(phase.epochs):
            together, back = phase.count_epochs(ids), phase.count_epochs(ids.flip(0)).flip(0)
            alone = torch.cat([phase.count_epochs(ids[i : i + 1]) for i in range(len(ids))])
            for other in (alone, back):
                for i, one, two in zip(ids, together, other, strict=True):
                    if one != two:
                        raise ValueError(
                            f"epochs gives the client of id {int(i)} {int(one)} epochs, or "
                            f"{int(two)} if other clients train with it; expected a number that "
                            "depends on its id alone, such as table[ids]"
                        )


def _short(phase: Phase, steps: list[WatchedStep]) -> Phase:
    """Return a training phase of one epoch, with its updates wrapped and its own minibatches."""
    epochs = 1 if callable(phase.epochs) else min(phase.epochs, 1 + (phase.batch is None))
    return replace(watched_phase(phase, set(), steps), epochs=epochs, batch=phase.batch)


def is_of_library(aggregate: Any) -> bool:
    """Return whether an aggregation is a method of a class of the library, which has no memory."""
    owner = type(getattr(aggregate, "__self__", None))
    return (owner.__module__ or "").startswith("pyrofl.")


def aggregate_twice(trial: TestRound, trial_round: TrialRound) -> Tensors | None:
    """Return the next state of the server; raise ValueError if a second call gives another one."""
    method, few = without_secret_noise(trial.method), trial.data
    cohort, server = few.cohort(trial.ids), trial.state.server
    with torch.no_grad():
        message = uploaded(method, trial_round.received, trial_round.local)

    def aggregated(aggregate: Any) -> Tensors:
        copy = {n: v.clone() for n, v in server.items()}
        with (
            torch.no_grad(),
            refuse_global_draws("aggregate", few.device),
            calling("aggregate"),
            refuse_inplace_writes("aggregate", message),
        ):
            new = aggregate(copy, message, cohort, stream(0, Stream.MERGE))
        return as_tensors("what aggregate returns", new)

    try:
        first = aggregated(_guarded(method.aggregate))
        second = aggregated(method.aggregate)
    except (AggregationError, *FAILS):
        return None  # a few clients may not suffice for it, or the round raises it
    for name, value in first.items():
        if name not in second or differs(value, second[name]):
            raise ValueError(
                f"aggregate gives {name!r} other numbers in a second call with the same messages; "
                "keep its memory, such as momentum, in tensors of the server's state named "
                "'server/...', and draw from the generator in its arguments"
            )
    if any(first[n].shape != v.shape for n, v in server.items() if n in first):
        return None  # the round refuses it
    return to_data({**server, **first}, few)


def without_secret_noise(method: Method) -> Method:
    """Return a private method without the noise of its server, which no seed repeats."""
    if method.metadata.privacy is None or not isinstance(method.aggregate, Aggregator):
        return method
    return replace(method, aggregate=replace(method.aggregate, add_noise=lambda pooled, _: pooled))


def _guarded(aggregate: Any) -> Any:
    """Return the aggregation with a `server_step` that may not write into the server's state."""
    if not isinstance(aggregate, Aggregator):
        return aggregate

    def step(server: Tensors, pooled: Tensors) -> Tensors:
        with refuse_changes("server_step", server):
            return aggregate.server_step(server, pooled)

    return replace(aggregate, server_step=step)


def _refuse_far_rows(trial: TestRound, client: int) -> None:
    """Raise `Mixed` if a client's results change where others, or its padding, have far values.

    A branch on all rows, such as `(x > 2).any()`, then differs from that of its own rows.
    """
    few = trial.data
    client_rows, x = few.train[client].to(few.device), few.x
    sign = 1.0 - 2 * (torch.arange(x[0].numel(), device=x.device) % 2).reshape(x[0].shape)
    far = (sign * (10 + 3 * x.abs().max())).to(x).expand_as(x).clone()
    if not far.isfinite().all():
        return
    far[client_rows] = x[client_rows] / (1 + 10 * x.abs().max())
    with_far_rows = replace(trial, data=with_other_padding(replace(few, x=far)), alone=client)
    try:
        trial_round = with_far_rows.run_round(with_far_rows.ids)
        with_far_rows.run_round(torch.tensor([client]))
    except (ValueError, *FAILS):
        return  # a program need not support such values
    with_far_rows.refuse_mixed_clients(trial_round, lambda: None)
    with suppress(*FAILS):
        ids = torch.tensor([client])
        cohort = few.cohort(ids)
        received, private = client_inputs(trial.method, with_far_rows.data, trial.state, cohort, 0)
        look = ProgramChecker(trial.method, with_far_rows.data, received, private | received, ids)
        if few.sizes[client] > 1:
            Reruns(look, any(phase.batch for phase in trial.phases), True).refuse_mixed_rows()
