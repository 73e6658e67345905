"""Fitting: drain the rounds, test every few of them, and keep what came out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, Unpack, overload

from pyrofl.arguments import Count, Whole, checked
from pyrofl.data import Federation
from pyrofl.inference.engine.participation import everyone
from pyrofl.inference.engine.server_round import by_round, first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import Metric
from pyrofl.inference.federate import LoopOptions, federate
from pyrofl.inference.fitted_run.chains import Chains, FitOptions, Fitting, Until, beginnings
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.progress import Progress
from pyrofl.inference.monitoring.status import ConvergenceMonitor, trained_by
from pyrofl.inference.privacy.noising import with_privacy
from pyrofl.inference.seeds import Seed, continued
from pyrofl.tensors import Tensors

WAIT = 5  # rounds, or a tenth of them, between two tests whether a quiet run is at its optimum


@overload
def fit(
    method: Fitting,
    data: Federation,
    rounds: int,
    *,
    seeds: None = None,
    resume_from: RoundState | Run | None = None,
    **how: Unpack[FitOptions],
) -> Run: ...
@overload
def fit(
    method: Fitting,
    data: Federation,
    rounds: int,
    *,
    seeds: int | Sequence[Seed],
    **how: Unpack[FitOptions],
) -> Chains: ...
@overload
def fit(
    method: Fitting,
    data: Federation,
    rounds: int,
    *,
    resume_from: Chains,
    **how: Unpack[FitOptions],
) -> Chains: ...
@checked
def fit(
    method: Fitting,
    data: Federation,
    rounds: Whole,
    *,
    seed: Seed | None = None,
    seeds: Count | Sequence[Seed] | None = None,
    server_state: Tensors | None = None,
    resume_from: RoundState | Run | Chains | None = None,
    eval_every: Whole = 0,
    stop_when: Until | None = None,
    draws: Count | None = None,
    metrics: Mapping[str, Metric] | None = None,
    progress: bool = True,
    callback: Callable[[Run], None] | None = None,
    logger: Callable[[Run, RoundRecord], None] | None = None,
    **loop: Unpack[LoopOptions],
) -> Run | Chains:
    """Run all rounds, with a progress bar, and test on the way.

    Args:
        method: a method, or round number (from 0) -> method.
        data: the federation.
        rounds: number of the last round, or the largest one.
        seed: fixes all random numbers; `Seeds` for several. None is that of a Run that is gone on
            from, otherwise 0.
        seeds: make a run of each of so many seeds, `seed` and the next ones, or of those given,
            one after the other, and return `Chains`; `callback` sees each.
        server_state: first state.
        resume_from: a `RoundState` to go on from, or a Run, whose records are continued; of the
            same clients with the same training rows. Chains are gone on with each by itself.
        eval_every: test after every so many rounds; 0 leaves testing to the caller.
        stop_when: "converged" stops after the first round at which `Run.status` says so, or after
            which it says that the run is stuck or has diverged, of 3 rounds and more: read which.
            Each of several seeds stops by itself.
        draws: of the guide, for predictions; None takes its mean, or as many as a start's Run.
        metrics: name -> one of your own, scored too; see `evaluate`. None: those of a start's Run.
        progress: show rounds, loss and the time left: a bar in a terminal or a notebook with
            ipywidgets, about ten lines elsewhere; all on stderr.
        callback: called after every round, before its test, such as a `Keeper`: what stops a test
            loses no round. If the last round of a start's Run lacks its test, that is made first.
        logger: called after every round and its test with the run and what the round left, such as
            `loggers.tensorboard(DIR)`.
        loop: participation, trains, chunk, stragglers, on_bad_message, state_memory, keep_messages,
            check, record, privacy, engine, workers of `federate`; tests are made in this process.

    Raises:
        ValueError: as `federate`, as are other errors; if a start's seed is another, or seeds are
            equal.

    Warns:
        UserWarning: after round one, if nothing that is learned has changed, or a tensor that
            clients train has not.
    """
    if seeds is not None or isinstance(resume_from, Chains):
        same: dict[str, Any] = {
            "server_state": server_state,
            "eval_every": eval_every,
            "stop_when": stop_when,
            "draws": draws,
        }
        same |= {"metrics": metrics, "progress": progress, "callback": callback}
        same |= {"logger": logger, **loop}
        each = beginnings(seeds, seed, resume_from)
        return Chains(tuple(fit(method, data, rounds, **one, **same) for one in each))
    draw = loop.get("participation", everyone)
    method = with_privacy(method, loop.pop("privacy", None), data.clients, draw)
    at = by_round(method)
    known, begun = (
        (resume_from, resume_from.state) if isinstance(resume_from, Run) else (None, resume_from)
    )
    seed = continued(seed, known.seed if known else None)
    state = begun or first(at(0), data, seed, server_state)
    run = (known or Run(at(0), data, state)).copy(
        method=at(max(state.number - 1, 0)),
        data=data,
        seed=seed,
        draws=draws or (known.draws if known else None),
        custom_metrics=(known.custom_metrics if known else {}) if metrics is None else metrics,
    )

    judge = ConvergenceMonitor(run.records, trained_by(run.method)) if stop_when else None

    again = 0  # round from which on the end is looked at once more

    def at_end() -> bool:
        """Return whether this round is the last, with the objective tested."""
        nonlocal again
        number = run.state.number
        run.ending = {}
        if number < rounds and (judge is None or number < again or not judge.over):
            return False
        run.test_ending()
        again = number + max(WAIT, number // 10)
        return number == rounds or run.status.kind != "not converged"

    def test_if_due(last: bool) -> None:
        """Test after every so many rounds, and after the last."""
        number = run.state.number
        if eval_every and number and (number % eval_every == 0 or last):
            run.record_scores()

    states = federate(method, data, rounds, seed=seed, resume_from=state, **loop)
    with closing(states), Progress(rounds, state.number, data.sizes, progress) as shown:
        if progress and run.method.metadata.sites and not state.number:
            shown.tell(run.method.metadata.sites)
        if known and all(row["round"] != state.number for row in run.history):
            test_if_due(run.state.number == rounds or (judge is not None and judge.over))
        clock = perf_counter()
        for state in states if judge is None or not at_end() else ():
            seconds = perf_counter() - clock
            run.method = at(state.number - 1)
            run.records.append(RoundRecord.of(state, run.state, run.method, seconds))
            run.state = state
            if judge:
                judge.add(run.records[-1])
            if state.number == 1 and run.status.kind == "stuck":
                warnings.warn(f"after round 1: {run.status.why}", stacklevel=3)
            last = at_end()
            if callback:
                callback(run)
            test_if_due(last)
            if logger:
                logger(run, run.records[-1])
            idle = () if len(state.reporters.ids) else ("nobody reports; server unchanged",)
            for told in (*state.rejected, *idle):
                shown.tell(f"round {state.number}: {told}")
            shown.add(run.method, state)
            if last:
                break
            clock = perf_counter()
        if progress and run.records:
            for told in (str(run.status), *run.warnings):
                shown.tell(told)
    return run
