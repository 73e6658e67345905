"""Fit a method to a federation: run its rounds, evaluate at intervals and return a `Run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from inspect import signature
from time import perf_counter
from typing import Any, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from pyrofl.arguments import Count, Whole, check_name, checked, described
from pyrofl.choices import Until
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.extensions import find_extension, required
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, resumed_seed
from pyrofl.inference.definition.table_method import prepare_data
from pyrofl.inference.engine.federate import LoopOptions, federate
from pyrofl.inference.engine.origin import validate_resume
from pyrofl.inference.engine.participation import everyone
from pyrofl.inference.engine.start import first, method_schedule
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import Metric
from pyrofl.inference.fitted_run.chains import Chains, FitOptions, MethodOrBuilder, seeds_and_starts
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.progress import Progress
from pyrofl.inference.monitoring.status import monitor_of
from pyrofl.returned import ClientError
from pyrofl.tensors import Tensors
from pyrofl.user_warnings import warn_user

MAX_ROUNDS = 100  # rounds, unless their number is given
# Rounds, or a tenth of them, between two tests whether a quiet run is at its optimum.
ROUNDS_BETWEEN_TESTS = 5


@overload
def fit(
    method: MethodOrBuilder,
    data: Federation | Tables,
    rounds: int | None = None,
    *,
    seeds: None = None,
    resume_from: RoundState | Run | None = None,
    **how: Unpack[FitOptions],
) -> Run: ...
@overload
def fit(
    method: MethodOrBuilder,
    data: Federation | Tables,
    rounds: int | None = None,
    *,
    seeds: int | Sequence[Seed],
    **how: Unpack[FitOptions],
) -> Chains: ...
@overload
def fit(
    method: MethodOrBuilder,
    data: Federation | Tables,
    rounds: int | None = None,
    *,
    resume_from: Chains,
    **how: Unpack[FitOptions],
) -> Chains: ...
@checked
def fit(
    method: MethodOrBuilder,
    data: Federation | Tables,
    rounds: Whole | None = None,
    *,
    seed: Seed | None = None,
    seeds: Count | Sequence[Seed] | None = None,
    server_state: Tensors | RoundState | None = None,
    resume_from: RoundState | Run | Chains | None = None,
    eval_every: Whole = 0,
    stop_when: Until | None = None,
    draws: Count | None = None,
    metrics: Mapping[str, Metric] | None = None,
    progress: bool = True,
    callback: Callable[[Run], object] | None = None,
    logger: Callable[[Run, RoundRecord], None] | None = None,
    **loop: Unpack[LoopOptions],
) -> Run | Chains:
    """Fit a method to a federation, evaluate it at intervals and return the fitted run.

    Args:
        method: a method, or round number (from 0) -> method.
        data: the federation, or tables, if the method is a `regression`.
        rounds: number of the last round (the maximum, with `stop_when`). None: as
            `stop_when="converged"`, with at most 100 rounds after those of `resume_from`. If
            likelihood factors fail, see `pyrofl.hierarchical`, PVI starts from its
            round 1 and runs until it has converged, in at most 100 rounds.
        seed: fixes all random numbers; `Seeds` sets several seeds. None is the seed of a resumed
            Run, otherwise 0.
        seeds: number of seeds (`seed` and the following ones) or a list of seeds. One run is
            fitted for each, sequentially, and `Chains` are returned; `callback` sees every run.
        server_state: initial state of the server, as in `federate`.
        resume_from: a `RoundState`, a Run (its records are continued) or Chains (each run is
            continued separately), of the same clients with the same training rows.
        eval_every: rounds between evaluations; 0 disables them.
        stop_when: "converged" stops early once `Run.status` reports a converged, stuck or diverged
            run. Each of several seeds stops separately. Methods that need several rounds to judge
            this run at least 3.
        draws: number of posterior draws for predictions; None uses the mean of the guide, or the
            number of a resumed Run.
        metrics: name -> custom metric, computed in addition to the built-in ones; see `evaluate`.
            None: those of a resumed Run.
        progress: show rounds, loss and remaining time on stderr: as a bar in a terminal or a
            notebook with ipywidgets, as about ten lines elsewhere.
        callback: function of the run, called after every round before its evaluation, such as a
            `Keeper`; `run.evaluate()` scores the round. If it returns True, the fit ends after this
            round. If the last round of a resumed Run was not evaluated, this is done first.
        logger: function of the run and its `RoundRecord`, called after every round and its
            evaluation, such as `loggers.tensorboard(DIR)`.
        loop: further arguments of `federate`, such as participation, chunk_size or privacy;
            evaluations run in this process.

    Returns:
        A `Run`; `Chains` if `seeds` is given or Chains are resumed.

    Raises:
        ValueError: as `federate`, as are other errors; if the seed differs from that of a resumed
            run, or seeds are equal.

    Warns:
        UserWarning: after round one, if no learned tensor has changed, or a trained tensor has not;
            if PVI replaces likelihood factors, see `Run.switched`.

    Examples:
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import pfedvem
        >>> data = federations.split(datasets.load("digits"), "slices:5", clients=4)
        >>> method = pfedvem.build(nets.build("softmax", (64,), 10))
        >>> run = pyrofl.fit(method, data, rounds=2, progress=False)
        >>> len(run.records), run.status.kind
        (2, 'not converged')
    """
    for name in loop:
        check_name(name, (*signature(fit).parameters, *LoopOptions.__annotations__), "argument")
    if seeds is not None or isinstance(resume_from, Chains):
        same: dict[str, Any] = {
            "server_state": server_state,
            "eval_every": eval_every,
            "stop_when": stop_when,
            "draws": draws,
        }
        same |= {"metrics": metrics, "progress": progress, "callback": callback}
        same |= {"logger": logger, **loop}
        each = seeds_and_starts(seeds, seed, resume_from)
        return Chains(tuple(fit(method, data, rounds, **one, **same) for one in each))
    if rounds is None:
        past = resume_from.state if isinstance(resume_from, Run) else resume_from
        rounds, stop_when = MAX_ROUNDS + (past.number if past else 0), "converged"
    if isinstance(resume_from, Run) and resume_from.switched and _alternative(method):
        method = resume_from.method
    draw = loop.get("participation", everyone)
    data = prepare_data(method_schedule(method)(0), data)
    if (privacy := loop.pop("privacy", None)) is not None:
        method = required("privacy", "privacy")(method, privacy, data.clients, draw)
    at = method_schedule(method)
    past_run, begun = (
        (resume_from, resume_from.state) if isinstance(resume_from, Run) else (None, resume_from)
    )
    begun = validate_resume(begun, data) if begun else None
    seed = resumed_seed(seed, past_run.seed if past_run else None)
    state = begun or first(at(0), data, seed, server_state)
    run = (past_run or Run(at(0), data, state)).copy(
        method=at(max(state.number - 1, 0)),
        data=data,
        seed=seed,
        draws=draws or (past_run.draws if past_run else None),
        custom_metrics=(past_run.custom_metrics if past_run else {})
        if metrics is None
        else metrics,
    )

    judge = monitor_of(run.method, data, run.records) if stop_when else None
    alternative, failure = _alternative(method), ""

    again = 0  # first round in which the end is tested again

    def at_end() -> bool:
        """Return whether training stops after this round: at convergence or in the last round."""
        nonlocal again
        number = run.state.number
        run.ending = {}
        if number < rounds and (judge is None or number < again or not judge.over):
            return False
        run.test_ending()
        again = number + max(ROUNDS_BETWEEN_TESTS, number // 10)
        status = run.status
        return number == rounds or status.kind != "not converged" or status.ended

    def test_if_due(last: bool) -> None:
        """Evaluate and record scores if an evaluation is due after this round."""
        number = run.state.number
        if eval_every and number and (number % eval_every == 0 or last):
            run.record_scores()

    def states_until_failure() -> Iterator[RoundState]:
        """Yield the rounds; end at an error in clients' rows if there is another method."""
        nonlocal failure
        try:
            yield from states
        except ClientError as error:
            if alternative is None:
                raise
            failure = f"round {run.state.number + 1}: {str(error).partition(';')[0]}"

    states = federate(method, data, rounds, seed=seed, resume_from=state, **loop)
    with (
        closing(states),
        Progress(rounds, state.number, data.sizes, progress, judge is not None) as shown,
    ):
        if progress and run.method.metadata.sites and not state.number:
            shown.tell(run.method.metadata.sites)
        if past_run and all(row["round"] != state.number for row in run.history):
            test_if_due(run.state.number == rounds or (judge is not None and judge.over))
        clock = perf_counter()
        for state in states_until_failure() if judge is None or not at_end() else ():
            seconds = perf_counter() - clock
            run.method = at(state.number - 1)
            run.records.append(RoundRecord.of(state, run.state, run.method, seconds))
            run.state = state
            if judge:
                judge.add(run.records[-1])
            if state.number == 1 and run.status.kind == "stuck":
                warn_user(f"after round 1: {run.status.why}")
            if alternative and (why := monitor_of(run.method, data, run.records).failure):
                failure = f"round {state.number}: {why}"
            last = at_end() or bool(failure)
            # Before the evaluation: what a callback saves is that of a fit with more rounds.
            if callback and ends_fit(call_user_function("callback", callback, run)):
                last, failure = True, ""
            test_if_due(last)
            if logger:
                call_user_function("logger", logger, run, run.records[-1])
            idle = () if len(state.reporters.ids) else ("no client reported; server unchanged",)
            for told in (*state.rejected, *idle):
                shown.tell(f"round {state.number}: {told}")
            shown.add(run.method, state)
            if last:
                break
            clock = perf_counter()
        if progress and run.records and not failure:
            work = [(max(one.steps, default=0), one.seconds) for one in run.records]
            unrecorded = (
                find_extension("unrecorded updates") if loop.get("record") is None else None
            )
            slow = unrecorded(run.method, work) if unrecorded else ()
            for text in dict.fromkeys((str(run.status), *run.warnings, *slow)):
                shown.tell(text)
    if alternative is None or not failure:
        return run
    other = alternative(data)
    why = f"fitted by {other.name}, as {run.method.name} failed in {failure}"
    warn_user(why)
    begun = first(other, data, seed)
    run = Run(other, data, begun, seed, run.draws, run.custom_metrics, switched=why)
    how: dict[str, Any] = {"eval_every": eval_every, "progress": progress, "callback": callback}
    return fit(other, data, resume_from=run, logger=logger, **how, **loop)


def _alternative(method: MethodOrBuilder) -> Callable[[Federation], Method] | None:
    """Return what builds the method with which `fit` continues if this one fails."""
    return method.metadata.alternative if isinstance(method, Method) else None


def ends_fit(value: object) -> bool:
    """Return whether a callback's value ends the fit.

    Raises:
        ValueError: if it is neither a Boolean nor None.
    """
    if value is None or isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Tensor) and value.dtype is torch.bool and value.numel() == 1:
        return bool(value)
    raise ValueError(
        f"callback returns {described(value)}; expected True to end the fit, or False or None"
    )


def call_user_function(name: str, function: Callable[..., object], *args: object) -> object:
    """Return what a user's function returns; raise ValueError if it raises StopIteration.

    A loop around `fit` would end in silence.
    """
    try:
        return function(*args)
    except StopIteration as error:
        raise ValueError(
            f"{name} raises StopIteration; return True from callback to end the fit, or give "
            "next() a default"
        ) from error
