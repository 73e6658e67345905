"""Settings are chosen on rows held back inside the clients, by successive halving.

All settings are trained for few rounds, the best third of them for three times as many, and so on;
the last one, or few, for all rounds. Each goes on from where it was, so that nothing is trained
twice. Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", AISTATS 2016, with thirds as in Li et al., "Hyperband", JMLR 2018.

Test rows are never looked at: the federation in which settings are tried does not hold them. A
setting that diverges, fails or merges nothing counts as last, at whatever rounds it does so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite, nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pyrofl.arguments import Count, ProperShare, checked
from pyrofl.data import Federation
from pyrofl.inference.chains import Fitting
from pyrofl.inference.checkpoints import Keeper, load
from pyrofl.inference.evaluation.asked import usual
from pyrofl.inference.fit import fit
from pyrofl.inference.loop.messages import BadMessage
from pyrofl.inference.loop.rounds import LoopOptions
from pyrofl.inference.run import Run
from pyrofl.inference.seeds import Seed, separate
from pyrofl.inference.verdict import verdict
from pyrofl.partitions.validation import held_back
from pyrofl.summaries import Summarised

if TYPE_CHECKING:
    from pandas import DataFrame

By = Literal["accuracy", "nll", "rmse"]
Setting = Mapping[str, Any]

KEEP = 3  # one of so many settings goes on, for so many times as many rounds
FAILS = (ArithmeticError, BadMessage, RuntimeError, ValueError)  # of numbers that are none
COLUMNS = ("setting", "rounds", "score", "chosen", "problem")


@dataclass(frozen=True)
class Try:
    """What came of a setting after so many rounds.

    Attributes:
        setting: its place among all.
        rounds: that it has been trained for.
        score: mean over clients of the metric on rows held back; NaN if there is none.
        seconds: of training, from its first round on.
        problem: why it counts as last; "" if it does not.
    """

    setting: int
    rounds: int
    score: float
    seconds: float
    problem: str = ""


@dataclass(frozen=True, repr=False)
class Tuned(Summarised):
    """Settings that were tried, and the one that was chosen.

    Attributes:
        settings: all of them.
        tries: what came of them, in the order in which they were made.
        metric: that they were chosen by.
        chosen: place of the chosen one among all.
    """

    settings: tuple[Setting, ...]
    tries: tuple[Try, ...]
    metric: By
    chosen: int

    @property
    def best(self) -> dict[str, Any]:
        """The chosen setting, as keyword arguments."""
        return dict(self.settings[self.chosen])

    @property
    def score(self) -> float:
        """Score of the chosen setting after its last rounds."""
        return self._last.score

    @property
    def seconds(self) -> float:
        """All seconds of training."""
        last = {one.setting: one.seconds for one in self.tries}
        return sum(last.values())

    @property
    def rounds(self) -> int:
        """All rounds of training."""
        last = {one.setting: one.rounds for one in self.tries}
        return sum(last.values())

    def lines(self) -> list[tuple[str, int, float, bool, str]]:
        """Return a line for every try: setting, rounds, score, chosen, problem."""
        return [
            (told(self.settings[t.setting]), t.rounds, t.score, t.setting == self.chosen, t.problem)
            for t in self.tries
        ]

    def frame(self) -> DataFrame:
        """Return a table of every try, with the seconds of training."""
        from pandas import DataFrame

        found = DataFrame(self.lines(), columns=list(COLUMNS))
        return found.assign(seconds=[one.seconds for one in self.tries])

    @property
    def title(self) -> str:
        """How many there were."""
        return f"{len(self.settings)} settings, chosen by {self.metric} on rows held back"

    def summary(self) -> dict[str, object]:
        """Tell what was chosen, and what it took."""
        failed = {one.setting for one in self.tries if one.problem}
        return {
            "chosen": told(self.best),
            self.metric: f"{self.score:.4g} after {self._last.rounds} rounds",
            "rounds": f"{self.rounds} in all, {self.seconds:.1f} s of training",
            "failed": f"{len(failed)} of {len(self.settings)}",
        }

    @property
    def _last(self) -> Try:
        return [one for one in self.tries if one.setting == self.chosen][-1]


def told(setting: Setting) -> str:
    """Write a setting in words; one that changes nothing is the defaults."""
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "defaults"


@checked
def tune(
    build: Callable[..., Fitting],
    data: Federation,
    over: Mapping[str, Sequence[Any]] | Sequence[Setting],
    rounds: Count,
    *,
    metric: By | None = None,
    share: ProperShare = 0.2,
    seed: Seed = 0,
    draws: Count | None = None,
    folder: str | Path | None = None,
    every: Count | None = None,
    finish: bool = True,
    about: Mapping[str, Any] | None = None,
    progress: bool = True,
    **loop: Unpack[LoopOptions],
) -> Tuned:
    """Choose settings of a method on rows held back inside the clients, by successive halving.

    Args:
        build: keyword arguments -> a method, or round number -> method.
        data: the federation; its test rows are not looked at.
        over: name -> values to try, all combinations; or a list of settings, each name -> value.
        rounds: of the last comparison. With n settings, the first is after rounds / n or a little
            later, so that all is about two and a third times one run for 9 settings.
        metric: mean over clients; "accuracy", or "nll" or "rmse", the smaller the better. None is
            accuracy of classes, nll of numbers. The model is that which the method is about, a
            personal one adapted as the method says.
        share: of every client's training rows that is held back.
        seed: of the rows held back, and of the runs, which have the same random numbers.
        draws: of the guide, for predictions; None takes its mean.
        folder: where runs lie meanwhile, SETTING.pt; what is there is gone on from if it is of the
            same settings, and refused if not. None takes a temporary one.
        every: also write runs there every so many rounds.
        finish: train the last one left for all rounds, too, though that can only show that it
            diverges; False leaves that to whoever runs it then.
        about: what else the runs depend on, see `save`.
        progress: show every run's rounds.
        loop: participation, chunk, stragglers and so on of `federate`.

    Raises:
        ValueError: if there is no setting, two are alike, build refuses one, no client has two
            training rows, the metric is not among the scores of the method, or all settings fail.
    """
    settings = combinations(over)
    made = [build(**setting) for setting in settings]
    held = held_back(data, share, seed=separate(seed).noise)
    by: By = metric or ("accuracy" if data.classes else "nll")
    how: Any = {"draws": draws, "progress": progress, **loop}
    with ExitStack() as stack:
        place = Path(folder or stack.enter_context(TemporaryDirectory(prefix="pyrofl-")))

        def attempt(which: int, number: int) -> Try:
            path, same = place / f"{which + 1}.pt", {"setting": told(settings[which])}
            keeper = Keeper(path, every, about={**same, **(about or {})})
            if path.exists():  # of a smaller number of rounds, or of a process that was stopped
                keeper.last = load(path, made[which], held, keeper.about, seed=seed)
                keeper.written = keeper.last.state.number
            problem = _trained(made[which], held, number, keeper, seed, how)
            return _judged(Try(which, number, nan, 0.0, problem), keeper.last, by)

        tries = halved(len(settings), rounds, by, attempt, finish)
    return Tuned(settings, tuple(tries), by, _ranked(tries, by)[0].setting)


def combinations(over: Mapping[str, Sequence[Any]] | Sequence[Setting]) -> tuple[Setting, ...]:
    """Return all settings, and refuse none, or two that are alike.

    >>> [told(setting) for setting in combinations({"lr": (0.1, 0.3), "momentum": (0, 0.9)})]
    ['lr=0.1 momentum=0', 'lr=0.1 momentum=0.9', 'lr=0.3 momentum=0', 'lr=0.3 momentum=0.9']
    """
    if isinstance(over, Mapping):
        for name, values in over.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ValueError(f"over[{name!r}] is {values!r}; expected a list of values")
        found = [dict(zip(over, some, strict=True)) for some in product(*over.values())]
    else:
        found = [_named(setting) for setting in over]
    words = [told(setting) for setting in found]
    if not found or len(set(words)) < len(words):
        again = next((f"{w!r} twice" for w in words if words.count(w) > 1), "no setting")
        raise ValueError(f"over has {again}; expected some settings, no two alike")
    return tuple(found)


def _named(setting: Any) -> dict[str, Any]:
    if not isinstance(setting, Mapping):
        raise ValueError(f"over has {setting!r}; expected dicts, name -> value")
    return dict(setting)


def halved(
    count: int,
    rounds: int,
    by: By,
    attempt: Callable[[int, int], Try],
    finish: bool = True,
) -> list[Try]:
    """Try settings 0 to count - 1 for more and more rounds, each time the best third of the last.

    One that is left alone goes on, for all rounds, if it is to `finish`.

    Raises:
        ValueError: if all fail.
    """
    left, tries = list(range(count)), list[Try]()
    for number in rungs(count, rounds):
        if len(left) == 1 < count and not finish:
            break
        tries += [attempt(which, number) for which in left]
        good = _ranked([one for one in tries if one.rounds == number], by)
        left = [one.setting for one in good[: -(-len(left) // KEEP)]]
    if not _ranked(tries, by):
        raise ValueError(
            f"all of {count} settings fail, the first: {tries[0].problem}; expected others, such "
            "as smaller learning rates"
        )
    return tries


def rungs(count: int, rounds: int) -> list[int]:
    """Return after how many rounds settings are compared.

    >>> rungs(9, 45), rungs(4, 20), rungs(1, 20), rungs(9, 2)
    ([5, 15, 45], [2, 7, 20], [20], [1, 2])
    """
    often = 0
    while KEEP**often < count:
        often += 1
    return sorted({max(1, round(rounds / KEEP**k)) for k in range(often + 1)})


def _ranked(tries: Sequence[Try], by: By) -> list[Try]:
    """Order tries: the most rounds first, then the best; of equal ones the first setting.

    One that fails at any of them is none at all.
    """
    sign = -1 if by == "accuracy" else 1
    failed = {one.setting for one in tries if one.problem}
    good = [one for one in tries if one.setting not in failed]
    return sorted(good, key=lambda one: (-one.rounds, sign * one.score, one.setting))


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
            start=keeper.last,
            every=rounds,
            after=keeper,
            **how,
        )
        keeper.last, keeper.written = run, None  # with its test
    except FAILS as error:
        return str(error).partition("\n")[0] or type(error).__name__
    finally:
        keeper.rescue()  # whatever ends it
    return ""


def _judged(found: Try, run: Run | None, by: By) -> Try:
    """Return a try with its score and its seconds, or with what is wrong with it."""
    if run is None:  # not one round was made
        return found
    records, problem, score = run.records[: found.rounds], found.problem, nan
    if (so_far := verdict(records)).kind == "diverged":
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
    asked = (rounds, *usual(run.method), "training")
    return {
        row["metric"]: row["value"]
        for row in run.history
        if (row["round"], row["model"], row["adapted"], row["population"]) == asked
    }
