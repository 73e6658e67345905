"""The command `pyrofl benefit`: estimate each client's benefit from federation."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyrofl import figures
from pyrofl.choices import RowScore
from pyrofl.cli.output.model_comparison import (
    ClientComparison,
    ModelComparison,
    compare_models,
    join_scores,
    mean_calibration,
    models_of_run,
    pair_with_local,
    same_sites,
)
from pyrofl.experiments import rows
from pyrofl.experiments.console import ending, show
from pyrofl.experiments.rows import LOSSES, comparison_score, rows_of_model
from pyrofl.experiments.saved_runs import NOT_CONVERGED, SavedRun, runs
from pyrofl.files import run_folder, text_tables
from pyrofl.files.link_safe_files import subfolder
from pyrofl.files.lock import lock_folder
from pyrofl.paired import LEVEL, Calibration, Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BENEFIT_FILE, BENEFIT_FIGURE = "benefit.csv", "figures/benefit.png"
COLUMNS = (
    *("method", "model", "adaptation", "client", "size", "rows"),
    *("own", "score", "better", "low", "high", "verdict", "not_converged"),
)
CALIBRATED = ("model", "temperature", "ECE", "ECE scaled", "NLL", "NLL scaled")
MAX_PRINTED_SITES = 20  # sites in the table that is printed
UNITS: dict[RowScore, tuple[float, str]] = {
    "accuracy": (100.0, "points of accuracy"),
    "error": (1.0, "units of the target, in mean absolute error"),
    "log_score": (1.0, "nats of log score per row"),
    "crps": (1.0, "units of the target, in mean CRPS"),
}


def benefit(args: Namespace) -> None:
    """Compare federated models with each client's local model; write a table and a figure."""
    folder = Path(args.folder)
    saved_runs = runs(folder)
    refuse_study(folder, saved_runs)
    with lock_folder(folder):
        subfolder((folder / BENEFIT_FIGURE).parent)
        answer = compare_with_local(folder, saved_runs, args.by)
        with ending(lambda what: f"the result cannot be written to {folder}: {what}"):
            write(folder, answer)
    show("\n\n".join(answer.told()), f"{folder} holds {BENEFIT_FILE} and {BENEFIT_FIGURE}")


def refuse_study(folder: Path, saved: Sequence[SavedRun]) -> None:
    """Raise ValueError for the results of a Flower study, which lack predictions of single rows."""
    if any("project" in one.facts for one in saved):
        raise ValueError(
            f"{folder} holds a Flower study, and the predictions of its test rows stay at the "
            "sites; expected a folder of pyrofl compare (clients.csv of each method has the scores "
            "that the sites sent)"
        )


def write(folder: Path, answer: Answer) -> None:
    """Write a comparison with local models to a folder: the table benefit.csv and a figure."""
    run_folder.write_csv(folder / BENEFIT_FILE, COLUMNS, answer.lines())
    figures.save(answer.figure(), folder / BENEFIT_FIGURE)


@dataclass(frozen=True)
class Answer:
    """Comparisons of federated models with the clients' local models, and their calibration."""

    by: RowScore
    comparisons: list[ModelComparison]
    calibration: dict[str, Calibration]
    notes: list[str]

    def lines(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of benefit.csv, each with a client's difference from its local model."""
        for one in self.comparisons:
            for site in one.sites:
                client, size, count, own, score, better = vars(site).values()
                ends = (better.mean, better.low, better.high, better.verdict)
                yield (*one.model, client, size, count, own, score, *ends, one.convergence_note)

    def figure(self) -> Figure:
        """Plot each client's score difference, federated minus local, with confidence intervals."""
        times, unit = UNITS[self.by]
        drawn = {
            _marked(one.name, one.open): {
                site.client: [times * end for end in vars(site.better).values()]
                for site in one.sites
            }
            for one in self.comparisons
        }
        return figures.differences(drawn, unit, own=self._own("own model"))

    def _own(self, text: str) -> str:
        """Append "not converged" to a text if any client's local model has not converged."""
        return _marked(text, self.comparisons[0].open_own)

    @property
    def head(self) -> tuple[str, ...]:
        """Column headings of the printed comparison of federated and local models."""
        names = (_marked(one.name, one.open) for one in self.comparisons)
        return ("client", "training rows", "test rows", "own", *names)

    def table(self) -> list[tuple[str, ...]]:
        """Return the printed comparison with local models: a row per client, and a row of totals.

        The clients with the fewest training rows come first.
        """
        lines, first = [], self.comparisons[0]
        for of in zip(*(one.sites for one in self.comparisons), strict=True):
            own = self._number(abs(of[0].own) if self.by in LOSSES else of[0].own)
            counts = f"{of[0].size:,}", f"{of[0].rows:,}"
            lines.append((of[0].client, *counts, self._own(own), *map(self._verdict, of)))
        counts = f"{sum(site.size for site in first.sites):,}", f"{first.rows:,}"
        return [*lines, ("all", *counts, self._own(""), *map(self._verdict, self.comparisons))]

    def _verdict(self, of: ClientComparison | ModelComparison) -> str:
        return f"{self._number(of.better.mean, '+')} ({self._ends(of.better)}) {of.better.verdict}"

    def calibrated(self) -> list[tuple[Any, ...]]:
        """Return the rows of the printed calibration table, one for each model."""
        each = self.calibration.items()
        return [(name, one.temperature, *one.ece, *one.nll) for name, one in each]

    @property
    def sentences(self) -> list[str]:
        """Summary of the comparison with local models: one sentence for each federated model."""
        lacks = [one.convergence_note for one in self.comparisons]
        more = [
            f" This may change, as {lack}: train with more rounds." if lack else ""
            for lack in lacks
        ]
        return [f"{sentence}{end}" for sentence, end in zip(self.results, more, strict=True)]

    @property
    def results(self) -> list[str]:
        """Sentences of the comparison, without a note on runs that have not converged."""
        return [self._sentence(one) for one in self.comparisons]

    def told(self) -> list[str]:
        """Return all text that `pyrofl benefit` prints, in blocks: tables, sentences and notes."""
        *sites, whole = self.table()
        more = (
            f"\n{len(sites) - MAX_PRINTED_SITES} larger clients: see {BENEFIT_FILE}"
            if len(sites) > MAX_PRINTED_SITES
            else ""
        )
        parts = [text_tables.table(self.head, [*sites[:MAX_PRINTED_SITES], whole]) + more]
        if self.calibration:
            parts.append(text_tables.table(CALIBRATED, self.calibrated()))
        return [*parts, *self.sentences, "\n".join(self.notes)]

    def _sentence(self, one: ModelComparison) -> str:
        ends = Counter(site.better.verdict for site in one.sites)
        over = f"95% interval {self._ends(one.better)}"
        if one.seeds:
            over += f"; over seeds {self._ends(one.seeds)}"
        how = "better" if one.better.mean >= 0 else "worse"
        return (
            f"At {ends['better']} of {len(one.sites)} clients the {one.name} predicts better than "
            f"their own; at {ends['worse']} it predicts worse; at {ends['inconclusive']} the "
            f"result is inconclusive. Over all {one.rows:,} test rows it is {how} by "
            f"{self._number(abs(one.better.mean))} {UNITS[self.by][1]} ({over})."
        )

    def _ends(self, of: Interval) -> str:
        return f"{self._number(of.low)} to {self._number(of.high)}"

    def _number(self, value: float, sign: str = "") -> str:
        number = f"{UNITS[self.by][0] * value:{sign}.{1 if self.by == 'accuracy' else 3}f}"
        return number.replace("nan", "unknown")


def _marked(text: str, count: int) -> str:
    """Append "not converged" to a text if `count`, a number of unconverged runs, is positive."""
    return f"{text} ({NOT_CONVERGED})".lstrip() if count else text


def compare_with_local(folder: Path, saved: Sequence[SavedRun], by: RowScore | None) -> Answer:
    """Compare every method's models with the clients' local models."""
    pairs = pair_with_local(folder, saved)
    tables = {one.path: rows.read(one.path) for pair in pairs for one in pair}
    score = comparison_score(tables[pairs[0][0].path], by)
    results, predicted = [], dict[str, list[Any]]()
    owns = list(dict.fromkeys(own.path for own, _ in pairs))
    own_model = models_of_run(pairs[0][0], tables[owns[0]])[-1]
    predicted["own models"] = [rows_of_model(tables[path], own_model) for path in owns]
    for method in dict.fromkeys(one.method for _, one in pairs):
        of = [pair for pair in pairs if pair[1].method == method]
        for model in models_of_run(of[0][1], tables[of[0][1].path]):
            one = compare_models(join_scores(of, model, tables, score), model, score, of)
            predicted[one.name] = [rows_of_model(tables[its.path], model) for _, its in of]
            results.append(one)
    each = {name: mean_calibration(some) for name, some in predicted.items()}
    with_draws = {name: one for name, one in each.items() if one}
    return Answer(score, results, with_draws, list(notes(saved, pairs, results, bool(with_draws))))


def notes(
    saved: Sequence[SavedRun],
    pairs: Sequence[tuple[SavedRun, SavedRun]],
    comparisons: Sequence[ModelComparison],
    calibrated: bool,
) -> Iterator[str]:
    """Yield notes that help to interpret a comparison of federated models with local models."""
    chance = (1 - LEVEL) * len(comparisons[0].sites)
    yield (
        f"Each client is judged by its own 95% interval over test rows: without any difference, "
        f"{chance:.2g} of {len(comparisons[0].sites)} would count as better or worse by chance."
    )
    if calibrated:
        yield (
            "ECE: calibration error of the most probable class. Scaled: by the temperature that "
            "fits the other half of the test rows (scipy), one for all clients."
        )
    if not same_sites([own for own, _ in pairs]):
        yield "Each seed has its own partition, so its clients differ."
    if alone := sorted({one.path.name for one in saved} - {m.path.name for p in pairs for m in p}):
        yield f"Left out, as no partner has their seed: {', '.join(alone)}."
    if bad := [one.path.name for one in saved if one.facts["status"]["kind"] == "diverged"]:
        yield f"Diverged: {', '.join(bad)}."
