"""Results of a hyperparameter search: its trials, the chosen setting and its margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from pyrofl.choices import Metric
from pyrofl.summaries import Summarized

if TYPE_CHECKING:
    from pandas import DataFrame

Setting = Mapping[str, Any]

COLUMNS = ("setting", "rounds", "seed", "score", "behind", "error", "chosen", "problem")


@dataclass(frozen=True)
class TrialScore:
    """Score of one hyperparameter setting after some rounds of training, with one seed.

    Attributes:
        setting: index of the setting.
        rounds: number of rounds of training.
        seed: 0 is the seed of the search; finalists also have 1, 2 and so on.
        score: mean over clients of the metric on validation rows; NaN if there is none.
        seconds: seconds of training, from its first round on.
        problem: reason of a failure, which ranks the setting last; "" if there is none.
    """

    setting: int
    rounds: int
    seed: int
    score: float
    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class Margin:
    """Score difference between another finalist of a hyperparameter search and the chosen setting.

    Differences are in units of the metric.

    Attributes:
        setting: index of the setting.
        behind: mean over the seeds of the difference of scores; positive if it is worse.
        error: standard error of that mean; NaN with one seed.
        seeds: number of seeds.
    """

    setting: int
    behind: float
    error: float
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether the score difference exceeds twice its standard error."""
        return self.behind > 2 * self.error  # False where the error is NaN


@dataclass(frozen=True, repr=False)
class TuningResult(Summarized):
    """Result of a hyperparameter search: all settings, all trials, and the chosen setting.

    Attributes:
        settings: all settings.
        trials: their trials, in the order of training.
        metric: metric of the choice.
        chosen: index of the chosen setting.
    """

    settings: tuple[Setting, ...]
    trials: tuple[TrialScore, ...]
    metric: Metric
    chosen: int

    @property
    def best(self) -> dict[str, Any]:
        """Chosen hyperparameter setting, as keyword arguments."""
        return dict(self.settings[self.chosen])

    @property
    def score(self) -> float:
        """Score of the chosen hyperparameter setting after its last round, averaged over seeds."""
        return fmean(self._scores(self.chosen).values())

    @property
    def total_seconds(self) -> float:
        """Total training time of all trials, in seconds."""
        last = {(one.setting, one.seed): one.seconds for one in self.trials}
        return sum(last.values())

    @property
    def total_rounds(self) -> int:
        """Total number of training rounds of all trials."""
        last = {(one.setting, one.seed): one.rounds for one in self.trials}
        return sum(last.values())

    @property
    def margins(self) -> tuple[Margin, ...]:
        """Score differences between the chosen setting and each other finalist, best first."""
        better = loss_sign(self.metric)
        best, others = self._scores(self.chosen), list[Margin]()
        for place in ranked_settings(self.trials, self.metric):
            scores_by_seed = self._scores(place)
            if place != self.chosen and scores_by_seed.keys() >= best.keys():
                by_seed = [better * (scores_by_seed[k] - best[k]) for k in best]
                error = stdev(by_seed) / len(by_seed) ** 0.5 if len(by_seed) > 1 else nan
                others.append(Margin(place, fmean(by_seed), error, len(by_seed)))
        return tuple(others)

    @property
    def edge_warnings(self) -> list[str]:
        """Warnings of chosen numbers that are the smallest or largest of at least three.

        A smallest value of 0 is left out, as it is usually the smallest valid one.
        """
        texts = list[str]()
        for name, value in self.best.items():
            values = {_as_number(one[name]) for one in self.settings if name in one}
            numbers = sorted(v for v in values if v is not None)
            chosen = _as_number(value)
            if (
                len(numbers) > 2
                and None not in values
                and chosen in (numbers[0] or None, numbers[-1])
            ):
                edge = "smallest" if chosen == numbers[0] else "largest"
                which = f"the {edge} of {len(numbers)} values"
                texts.append(f"{name}={value} is {which} and was chosen; widen the grid")
        return texts

    def rows(self) -> list[tuple[str, int, int, float, float | str, float | str, bool, str]]:
        """Return a table of trials, one row each; only finalists have a margin to the best.

        The columns are `COLUMNS`.
        """
        margin_by_setting: dict[int, tuple[float, float]] = {
            m.setting: (m.behind, m.error) for m in self.margins
        }
        margin_by_setting[self.chosen] = 0.0, 0.0
        return [
            (
                describe_setting(self.settings[t.setting]),
                t.rounds,
                t.seed,
                t.score,
                *(
                    margin_by_setting.get(t.setting, ("", ""))
                    if t.rounds == self._final_rounds
                    else ("", "")
                ),
                t.setting == self.chosen,
                t.problem,
            )
            for t in self.trials
        ]

    def frame(self) -> DataFrame:
        """Return a DataFrame with one row per trial, including its training time in seconds."""
        from pandas import DataFrame

        table = DataFrame(self.rows(), columns=list(COLUMNS))
        return table.assign(seconds=[one.seconds for one in self.trials])

    @property
    def title(self) -> str:
        """Title of the printed summary, with the number of settings and the metric."""
        return f"{len(self.settings)} settings, chosen by {self.metric} on validation rows"

    def overview(self) -> dict[str, object]:
        """Return the printed summary of the search, as label -> text."""
        failed = {one.setting for one in self.trials if one.problem}
        seeds = len(self._scores(self.chosen))
        return {
            "chosen": describe_setting(self.best),
            self.metric: f"{self.score:.4g} after {self._final_rounds} rounds, {_seeds(seeds)}",
            **({"margin": self.margin_text} if self.margins else {}),
            **({"at the edge": "; ".join(self.edge_warnings)} if self.edge_warnings else {}),
            "rounds": f"{self.total_rounds} in all, {self.total_seconds:.1f} s of training",
            "failed": f"{len(failed)} of {len(self.settings)}",
        }

    @property
    def margin_text(self) -> str:
        """Score margin of the chosen setting over the runner-up, as text; "" if there is none."""
        if not self.margins:
            return ""
        first = self.margins[0]
        error = f" +- {first.error:.2g}" if isfinite(first.error) else ""
        unclear = "" if first.clear else ", not clear: less than twice its standard error"
        unclear = unclear if isfinite(first.error) else ", of one seed: its error is unknown"
        return (
            f"{first.behind:.4f}{error} over {describe_setting(self.settings[first.setting])}, "
            f"{_seeds(first.seeds)}{unclear}"
        )

    @property
    def _final_rounds(self) -> int:
        return max(one.rounds for one in self.trials if one.setting == self.chosen)

    def _scores(self, place: int) -> dict[int, float]:
        """Return a setting's scores by seed, after as many rounds as the chosen setting had."""
        return {
            one.seed: one.score
            for one in self.trials
            if (one.setting, one.rounds) == (place, self._final_rounds)
        }


def describe_setting(setting: Setting) -> str:
    """Return a hyperparameter setting as text, such as "lr=0.1"; "defaults" if it is empty."""
    return " ".join(f"{name}={value}" for name, value in setting.items()) or "defaults"


def _as_number(value: Any) -> float | None:
    """Return a number, or one that a text stands for; None for other values."""
    with suppress(TypeError, ValueError):
        return None if isinstance(value, bool) else float(value)
    return None


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count > 1)}"


def loss_sign(by: Metric) -> int:
    """Return -1 for a metric of which larger values are better, and 1 otherwise."""
    return -1 if by == "accuracy" else 1


def ranked_settings(trials: Sequence[TrialScore], by: Metric) -> list[int]:
    """Return indices of settings, ranked by numbers of rounds and seeds, then by mean score.

    Equal settings keep their order. A setting that fails in any trial is left out.
    """
    failed = {one.setting for one in trials if one.problem}
    trials_by_setting: dict[int, list[TrialScore]] = {}
    for one in sorted(trials, key=lambda one: one.rounds):
        if one.setting not in failed:
            had = trials_by_setting.get(one.setting, [])
            trials_by_setting[one.setting] = [*(t for t in had if t.rounds == one.rounds), one]
    means = {which: fmean(t.score for t in some) for which, some in trials_by_setting.items()}
    return sorted(
        means,
        key=lambda which: (
            *(-trials_by_setting[which][0].rounds, -len(trials_by_setting[which])),
            *(loss_sign(by) * means[which], which),
        ),
    )
