"""Runs of one method on one federation with several seeds, as chains for ArviZ."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from pyrofl.choices import Until
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.files import run_folder
from pyrofl.files.lock import lock_folder
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Seeds, separate
from pyrofl.inference.definition.table_method import TableMethod, variables_of
from pyrofl.inference.engine.federate import LoopOptions
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.evaluate import Metric
from pyrofl.inference.evaluation.predictions import Predictions
from pyrofl.inference.evaluation.specification import EvaluationFields
from pyrofl.inference.fitted_run.loading import load
from pyrofl.inference.fitted_run.records import RoundRecord
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.monitoring.status import ConvergenceStatus, Kind
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.hypotheses import hypotheses
from pyrofl.inference.posteriors.summary import summarize
from pyrofl.summaries import Summarized
from pyrofl.tensors import Tensors

MethodOrBuilder = Method | Callable[[int], Method]

WORST_FIRST: tuple[Kind, ...] = ("diverged", "stuck", "not converged", "converged")

if TYPE_CHECKING:
    from pandas import DataFrame


class FitOptions(LoopOptions, total=False):
    """Optional keyword arguments of `fit`, shared by all runs; `seed` is that of the first run."""

    seed: Seed | None
    server_state: Tensors | RoundState | None
    eval_every: int
    stop_when: Until | None
    draws: int | None
    metrics: Mapping[str, Metric] | None
    progress: bool
    callback: Callable[[Any], object] | None
    logger: Callable[[Any, RoundRecord], None] | None


@dataclass(frozen=True, repr=False)
class Chains(Summarized, Sequence[Run]):
    """Sequence of fitted runs with different seeds, as returned by `fit(seeds=4)`.

    R-hat of `arviz.summary(chains.to_arviz())` compares fits started from different seeds (and,
    where initialization is random, different starting values). Values near 1 show that the fits
    have converged to the same posterior. They do not show that the guide's family is wide enough,
    as all fits may share the same error; use `checks.sbc` and `reference.compare_posteriors`.

    Attributes:
        runs: one for each seed.
    """

    runs: tuple[Run, ...]

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Run, ...]: ...
    def __getitem__(self, index: int | slice) -> Run | tuple[Run, ...]:
        return self.runs[index]

    def __len__(self) -> int:
        return len(self.runs)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save all runs for `Chains.load`, in the folders chain-0, chain-1 and so on.

        See `Run.save`.

        Raises:
            ValueError: if the folder holds other files, or cannot be written to.
        """
        path = run_folder.prepare(folder, holding=r"chain-\d+" * overwrite)
        with lock_folder(path):
            for number, run in enumerate(self.runs):
                run.save(path / f"chain-{number}", overwrite=overwrite)
            # Further runs that were saved here before would be loaded with these.
            former = map(path.joinpath, (f"chain-{n}" for n in count(len(self.runs))))
            for further in takewhile(Path.is_dir, former):
                shutil.rmtree(further)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        method: MethodOrBuilder | None = None,
        data: Federation | Tables | None = None,
    ) -> Chains:
        """Load runs that `save` wrote; arguments and errors are those of `pyrofl.load`."""
        folders = (Path(folder, f"chain-{number}") for number in count())
        runs = [load(one, method=method, data=data) for one in takewhile(Path.is_dir, folders)]
        if not runs:
            raise ValueError(f"{folder} holds no folder chain-0; expected a folder of Chains.save")
        return cls(tuple(runs))

    def predict(
        self, x: Any, client: str | None = None, *, draws: int | None = None, seed: Any = None
    ) -> Predictions:
        """Predict new rows of a table by the draws of all runs of a regression, equally weighted.

        See `pyrofl.effects.predict`.

        Raises:
            ValueError: if the runs are not of a regression.
        """
        method = self.runs[0].method
        if not isinstance(method, TableMethod):
            raise ValueError(
                f"these are runs of method {method.name}; expected those of a regression: predict "
                "with one run, as in chains[0].predict(x, client)"
            )
        of_all: Predictions = method.predict_table(
            self, x, client, None, {"draws": draws, "seed": seed}
        )
        return of_all

    def to_arviz(
        self, draws: int = 100, dims: dict[str, tuple[str, ...]] | None = None, **what: Any
    ) -> Any:
        """Return the posterior draws of all runs for ArviZ, with one chain for each run.

        Arguments are those of `pyrofl.to_arviz`.
        """
        return to_arviz(self.runs, draws, dims, **what)

    def summary(self, draws: int = 1000, prob: float = 0.95, **what: Any) -> DataFrame:
        """Return posterior summaries of all runs together, with R-hat over the seeds.

        See `pyrofl.inference.posteriors.summary.summarize`; `what` are arguments of `to_arviz`.

        Args:
            draws: number of draws of each run.
            prob: probability of the intervals.
            what: further arguments of `to_arviz`.
        """
        return summarize(self.to_arviz(draws, **what), prob, variables_of(self.runs[0].method))

    def hypothesis(
        self, statements: str | Sequence[str], draws: int = 4000, prob: float = 0.95, **what: Any
    ) -> DataFrame:
        """Return the posterior probability of statements such as "b[treat] < 0" as a table.

        See `pyrofl.inference.posteriors.hypotheses.hypotheses`; `what` are arguments of `to_arviz`.
        """
        return hypotheses(
            self.to_arviz(draws, **what), statements, prob, variables_of(self.runs[0].method)
        )

    def evaluate(
        self, metrics: Mapping[str, Metric] | None = None, **asked: Unpack[EvaluationFields]
    ) -> DataFrame:
        """Return the scores of all runs, averaged over clients, with mean and sd over the seeds.

        Arguments are those of `Run.evaluate`.

        Returns:
            A data frame with one row per metric, and the columns mean, sd and "seed S" of each run.
            The sd is that of a seed, with denominator n - 1; NaN for a single one.
        """
        from pandas import DataFrame

        scores = {f"seed {run.seed}": run.evaluate(metrics, **asked) for run in self.runs}
        each = DataFrame(
            {seed: {n: one.mean(n) for n in one.values} for seed, one in scores.items()}
        )
        spread = {"mean": each.mean(axis=1), "sd": each.std(axis=1)}
        return DataFrame(spread).join(each).rename_axis("metric")

    def parameter_changes(self) -> DataFrame:
        """Return a table of the parameter changes of all runs, with the seed as first column."""
        from pandas import concat

        tables = {str(run.seed): run.parameter_changes() for run in self.runs}
        return concat(tables, names=["seed"]).reset_index("seed").reset_index(drop=True)

    @property
    def status(self) -> ConvergenceStatus:
        """Return the worst convergence status of all runs, with the run's seed."""
        each = [(run.seed, run.status) for run in self.runs]
        seed, worst = min(each, key=lambda one: WORST_FIRST.index(one[1].kind))
        return replace(worst, why=f"seed {seed}: {worst.why}")

    @property
    def title(self) -> str:
        """Return the title of the printed summary: the number of runs and their seeds."""
        return f"{len(self.runs)} runs, seeds {', '.join(str(run.seed) for run in self.runs)}"

    def overview(self) -> dict[str, str]:
        """Return the printed summary: rounds and convergence status of each run."""
        return {f"seed {run.seed}": f"{run.state.number} rounds, {run.status}" for run in self}


def seeds_and_starts(
    seeds: int | Sequence[Seed] | None, seed: Seed | None, resume_from: object
) -> list[dict[str, Any]]:
    """Return the seed of each chain, and the earlier run that it resumes, if any."""
    if isinstance(resume_from, Chains):
        if seeds is not None or seed is not None:
            raise ValueError(
                "resume_from is Chains, which have their own seeds; leave out seed and seeds"
            )
        return [{"seed": run.seed, "resume_from": run} for run in resume_from]
    if resume_from is not None:
        raise ValueError(
            f"resume_from is a {type(resume_from).__name__}, which has one seed; pass Chains to "
            "resume several runs, or leave out seeds"
        )
    if isinstance(seeds, Sequence):
        if seed is not None:
            raise ValueError(
                f"seed is {seed} and seeds are {list(seeds)}; pass only one of the two"
            )
        each = list(seeds)
    elif isinstance(seed, Seeds):
        raise ValueError(
            f"seed is {seed} and seeds is {seeds}; pass seeds as a list of Seeds instead"
        )
    else:
        each = [(seed or 0) + k for k in range(seeds or 0)]
    if not each or any(separate(a) == separate(b) for a, b in combinations(each, 2)):
        raise ValueError(f"seeds are {each}; expected at least one seed, all different")
    return [{"seed": one, "resume_from": None} for one in each]
