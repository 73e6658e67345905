"""Choose settings on rows that are held back inside the clients.

Successive halving leaves three finalists: all settings are trained for few rounds with one seed,
the best third of them for three times as many, and so on. Finalists are trained for all rounds with
several seeds, each of which draws other rows to hold back. The one with the best mean
over the seeds is chosen; of equal ones, the first in the order of the settings. Its margin over the
runner-up is the mean of their differences, seed by seed, with its standard error.

Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016, with thirds as in Li et al., "Hyperband", JMLR 2018.

No test row is used: the federation in which settings are tried does not hold them. A setting that
diverges, fails or merges nothing, with any seed, counts as last. A run continues from the rounds
that its setting has been trained for, so that no round is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import isfinite, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from pyrofl.arguments import Count, ProperShare, checked
from pyrofl.data import Federation
from pyrofl.inference.engine.messages import BadMessage
from pyrofl.inference.evaluation.specification import default_model
from pyrofl.inference.federate import LoopOptions
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.chains import Fitting
from pyrofl.inference.fitted_run.checkpoints import Keeper, load
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.status import convergence_status
from pyrofl.inference.seeds import Seed, later, separate
from pyrofl.inference.tuning.results import By, Setting, Trial, TuningResult, ranked, told
from pyrofl.partitions.validation import held_back

KEEP = 3  # one of so many settings goes on, for so many times as many rounds
FINALISTS = 3  # or fewer where there are fewer settings
FAILS = (ArithmeticError, BadMessage, RuntimeError, ValueError)  # of numbers that are none


class AllFailed(ValueError):
    """Raised by a search, none of whose settings can be trained."""


@checked
def tune(
    build: Callable[..., Fitting],
    data: Federation,
    param_grid: Mapping[str, Sequence[Any]] | Sequence[Setting],
    rounds: Count,
    *,
    metric: By | None = None,
    share: ProperShare = 0.2,
    seed: Seed = 0,
    draws: Count | None = None,
    folder: str | Path | None = None,
    every: Count | None = None,
    seeds: Count = 3,
    about: Mapping[str, Any] | None = None,
    progress: bool = True,
    **loop: Unpack[LoopOptions],
) -> TuningResult:
    """Choose settings of a method on rows held back inside the clients, by successive halving.

    Args:
        build: keyword arguments -> a method, or round number -> method.
        data: the federation; its test rows are not looked at.
        param_grid: name -> values to try, all combinations; or a list of settings, each
            name -> value.
        rounds: of the last comparison. With 4 to 9 settings the first is after a third of them, so
            that with three seeds 9 settings cost as much as 11 runs, and 6 settings as 10.
        metric: mean over clients; "accuracy", or "nll" or "rmse", the smaller the better. None is
            accuracy of classes, nll of numbers. The model is that which the method is about, a
            personal one adapted as the method says.
        share: of every client's training rows that is held back.
        seed: of the rows held back, and of the runs, which have the same random numbers. The
            further seeds of the finalists are the next numbers.
        draws: of the guide, for predictions; None takes its mean.
        folder: where runs are kept meanwhile, SETTING-SEED.safetensors. A run that is there is
            continued if it has the same settings, and refused if not. None takes a temporary one.
        every: also write runs there every so many rounds.
        seeds: on how many seeds the finalists are compared.
        about: what else the runs depend on, see `save`.
        progress: show every run's rounds.
        loop: participation, chunk, stragglers and so on of `federate`.

    Raises:
        ValueError: if there is no setting, two are alike, build refuses one, no client has two
            training rows, the metric is not among the scores of the method, or all settings fail.
    """
    settings = combinations(param_grid)
    made = [build(**setting) for setting in settings]
    refuse_metric(metric, data)
    by: By = metric or ("accuracy" if data.classes else "nll")
    how: Any = {"draws": draws, "progress": progress, **loop}
    held: dict[int, Federation] = {}
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(TemporaryDirectory(prefix="pyrofl-")))

        def attempt(which: int, number: int, k: int) -> Trial:
            own = later(seed, k)
            if k not in held:
                held[k] = held_back(data, share, seed=separate(own).noise)
            path, same = place / f"{which + 1}-{k}.safetensors", {"setting": told(settings[which])}
            keeper = Keeper(path, every, about={**same, **(about or {})})
            if path.exists():  # of a smaller number of rounds, or of a process that was stopped
                keeper.last = load(path, made[which], held[k], keeper.about, seed=own)
                keeper.written = keeper.last.state.number
            problem = _trained(made[which], held[k], number, keeper, own, how)
            return _judged(Trial(which, number, k, nan, 0.0, problem), keeper.last, by)

        tries = halved(len(settings), rounds, by, attempt, seeds)
    return TuningResult(settings, tuple(tries), by, ranked(tries, by)[0])


def refuse_metric(metric: By | None, data: Federation) -> None:
    """Refuse a metric that the response has not, before any work."""
    is_binary = not data.y.dim() > 1 and bool(((data.y == 0) | (data.y == 1)).all())
    if metric == "rmse" and data.classes:
        raise ValueError("metric is 'rmse', and y holds classes; expected accuracy or nll")
    if metric == "accuracy" and not data.classes and not is_binary:
        raise ValueError("metric is 'accuracy', and y holds numbers; expected rmse or nll")


def combinations(
    param_grid: Mapping[str, Sequence[Any]] | Sequence[Setting],
) -> tuple[Setting, ...]:
    """Return all settings, and refuse none, or two that are alike.

    >>> [told(setting) for setting in combinations({"lr": (0.1, 0.3), "momentum": (0, 0.9)})]
    ['lr=0.1 momentum=0', 'lr=0.1 momentum=0.9', 'lr=0.3 momentum=0', 'lr=0.3 momentum=0.9']
    """
    if isinstance(param_grid, Mapping):
        for name, values in param_grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ValueError(f"param_grid[{name!r}] is {values!r}; expected a list of values")
        found = [dict(zip(param_grid, some, strict=True)) for some in product(*param_grid.values())]
    else:
        found = [_named(setting) for setting in param_grid]
    words = [told(setting) for setting in found]
    if not found or len(set(words)) < len(words):
        again = next((f"{w!r} twice" for w in words if words.count(w) > 1), "no setting")
        raise ValueError(f"param_grid has {again}; expected some settings, no two alike")
    return tuple(found)


def _named(setting: Any) -> dict[str, Any]:
    if not isinstance(setting, Mapping):
        raise ValueError(f"param_grid has {setting!r}; expected dicts, name -> value")
    return dict(setting)


def halved(
    count: int, rounds: int, by: By, attempt: Callable[[int, int, int], Trial], seeds: int = 3
) -> list[Trial]:
    """Trial settings 0 to count - 1 for more and more rounds, each time the best third of the last.

    The three that remain are tried for all rounds with every seed; a single setting with one.
    """
    left, tries = list(range(count)), list[Trial]()
    *screens, last = rungs(count, rounds)
    for number in screens:
        tries += [attempt(which, number, 0) for which in left]
        good = ranked([one for one in tries if one.rounds == number], by)
        left = good[: max(FINALISTS, -(-len(left) // KEEP))]
    for seed in range(seeds if len(left) > 1 else 1):
        for which in left:
            if not any(one.problem for one in tries if one.setting == which):
                tries.append(attempt(which, last, seed))
    if not ranked(tries, by):
        raise AllFailed(
            f"all of {count} settings fail, the first: {tries[0].problem}; expected others, such "
            "as smaller learning rates"
        )
    return tries


def rungs(count: int, rounds: int) -> list[int]:
    """Return after how many rounds settings are compared.

    >>> rungs(9, 45), rungs(10, 45), rungs(3, 20), rungs(9, 1)
    ([15, 45], [5, 15, 45], [20], [1])
    """
    often = 0
    while count > FINALISTS:
        count, often = max(FINALISTS, -(-count // KEEP)), often + 1
    return sorted({max(1, round(rounds / KEEP**k)) for k in range(often + 1)})


def _trained(
    method: Fitting, held: Federation, rounds: int, keeper: Keeper, seed: Seed, how: Any
) -> str:
    """Train up to so many rounds, test, and leave that at the keeper; return what went wrong."""
    if keeper.last and _row(keeper.last, rounds):
        return ""
    try:
        run = fit(
            method,
            held,
            rounds,
            seed=seed,
            resume_from=keeper.last,
            eval_every=rounds,
            callback=keeper,
            **how,
        )
        keeper.last, keeper.written = run, None  # with its test
    except FAILS as error:
        return str(error).partition("\n")[0] or type(error).__name__
    finally:
        keeper.rescue()  # whatever ends it
    return ""


def _judged(found: Trial, run: Run | None, by: By) -> Trial:
    """Return a try with its score and its seconds, or with what is wrong with it."""
    if run is None:  # not one round was made
        return found
    records, problem, score = run.records[: found.rounds], found.problem, nan
    if (so_far := convergence_status(records)).kind == "diverged":
        problem = problem or str(so_far)
    if not problem:
        scores = _row(run, found.rounds)
        kinds = {"accuracy", "rmse"} & scores.keys()
        if by not in scores and by != "nll" and kinds:
            raise ValueError(f"metric is {by!r}, and there is none; expected {kinds.pop()} or nll")
        score = scores.get(by, nan)
        problem = "" if isfinite(score) else f"{by} is no finite number"
    seconds = sum(record.seconds for record in records)
    return replace(found, score=score, seconds=seconds, problem=problem)


def _row(run: Run, rounds: int) -> dict[str, float]:
    """Return the scores of the model that the method is about after so many rounds."""
    asked = (rounds, *default_model(run.method), "training")
    return {
        row["metric"]: row["value"]
        for row in run.history
        if (row["round"], row["model"], row["adaptation"], row["population"]) == asked
    }
