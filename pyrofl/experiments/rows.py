"""The file rows.csv with every model's prediction for every test row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pyrofl.choices import RowScore
from pyrofl.data import Federation
from pyrofl.experiments.experiment import Experiment
from pyrofl.files import run_folder
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.metrics import MIN_LOG_DENSITY

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pandas import DataFrame

ROWS_FILE = "rows.csv"
COLUMNS = ("population", "client", "row", "model", "adaptation", "y", "log_score")
MAX_WRITTEN_NUMBERS = 1_000_000  # numbers that are written unasked
LOSSES: tuple[RowScore, ...] = ("error", "crps")  # the smaller, the better
Model = tuple[str, str, str]
"""Method, view, and how it was adapted."""


def save(experiment: Experiment, folder: Path, data: Federation, scores: list[Scores]) -> None:
    """Write rows.csv: one line per row, model and client, with prediction and score.

    Rows are identified by their number in the data, from 0. Many rows are written on request.
    """
    selected = [s for s in scores if s.population != "pooled" and s.predicted is not None]
    if (
        experiment.save_predictions
        or sum(s.predicted.mean.numel() for s in selected if s.predicted) <= MAX_WRITTEN_NUMBERS
    ):
        columns, lines = _table(data, selected)
        run_folder.write_csv(folder / ROWS_FILE, columns, lines, is_private=True)


def rows_of_run(data: Federation, scores: list[Scores]) -> DataFrame:
    """Return the predictions of single rows, as `read` returns them of a saved run."""
    from pandas import DataFrame

    selected = [s for s in scores if s.population == "training" and s.predicted is not None]
    columns, lines = _table(data, selected)
    return DataFrame(lines, columns=[*columns])


def _table(data: Federation, scores: list[Scores]) -> tuple[tuple[str, ...], Iterator[list[Any]]]:
    """Return the columns and the lines of rows.csv."""
    names = classes(data, scores) if scores else ()
    more = [f"p({name})" for name in names] or ["prediction", "crps"]
    return (*COLUMNS, *more), (line for s in scores for line in _lines(data, s, names))


def classes(data: Federation, scores: list[Scores]) -> tuple[str, ...]:
    """Return the class names: those of the data, "0" and "1" for binary targets, or none."""
    return data.classes or (("0", "1") if "accuracy" in scores[0].values else ())


def _lines(data: Federation, scores: Scores, classes: tuple[str, ...]) -> Iterator[list[Any]]:
    of = data.train if scores.part == "train" else data.test
    assert scores.predicted is not None
    mean, density, crps = scores.predicted
    names = [data.names[i] for i in scores.ids.tolist() for _ in of[i]]
    rows = torch.cat([of[i] for i in scores.ids.tolist()]).cpu()
    y = data.y.cpu()[rows]
    if classes:
        likely = mean.gather(-1, y[:, None].long())[:, 0]
        density = likely.clamp(min=torch.finfo(mean.dtype).tiny).log()
    labels = [classes[int(k)] for k in y.tolist()] if classes else y.numpy()
    each = mean if classes else torch.stack([mean, crps], 1)
    columns = (names, rows.tolist(), labels, density.clamp(min=MIN_LOG_DENSITY).numpy())
    for name, row, truth, score, values in zip(*columns, each.numpy(), strict=True):
        yield [scores.population, name, row, scores.model, scores.adaptation, truth, score, *values]


def read(folder: Path) -> DataFrame:
    """Read a run's predictions of single rows (rows.csv), restricted to the training clients."""
    from pandas import read_csv

    path = folder / ROWS_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; run again with --save-predictions --overwrite (files of more "
            "than a million numbers are written on request only)"
        )
    try:
        texts = dict.fromkeys(("population", "client", "model", "adaptation", "y"), str)
        gaps = {name: ["nan"] for name in ("prediction", "crps")}
        table = read_csv(path, dtype=texts, keep_default_na=False, na_values=gaps)
        if list(table.columns[: len(COLUMNS)]) != list(COLUMNS):
            raise ValueError(f"columns are {', '.join(map(str, table.columns[:9]))}")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; expected the rows of a run") from error
    for name in texts:
        table[name] = table[name].map(run_folder.plain_cell)
    return table[table["population"] == "training"]


def classes_of(table: DataFrame) -> list[str]:
    """Return the class names that a table of predictions has probabilities of; [] in regression."""
    return [c[2:-1] for c in table.columns[len(COLUMNS) :] if c.startswith("p(") and c[-1] == ")"]


def class_probabilities(table: DataFrame) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return class probabilities [N, K] and true class indices [N] from a table of predictions."""
    names = classes_of(table)
    y = table["y"].map({name: k for k, name in enumerate(names)}).to_numpy(dtype=int)
    return table[[f"p({name})" for name in names]].to_numpy(dtype=float), y


def comparison_score(table: DataFrame, by: RowScore | None) -> RowScore:
    """Return the score for comparing models; raise ValueError if the predictions do not have it."""
    classes = classes_of(table)
    fits: tuple[RowScore, ...] = (
        ("accuracy", "log_score") if classes else ("error", "log_score", "crps")
    )
    if by and by not in fits:
        kind = "classes" if classes else "numbers"
        raise ValueError(f"--by is {by}, and {kind} are predicted; expected {' or '.join(fits)}")
    if by == "crps" and not has_crps(table):
        raise ValueError(f"--by is crps, which {ROWS_FILE} lacks; expected error or log_score")
    meanless = not classes and bool(table["prediction"].isna().any())
    return by or fits[meanless]


def has_crps(table: DataFrame) -> bool:
    """Return whether every row of a table of predictions has a CRPS."""
    return "crps" in table and bool(table["crps"].notna().all())


def with_scores(table: DataFrame, by: RowScore) -> DataFrame:
    """Add a column with each row's score to a table of predictions; larger scores are better."""
    if by == "log_score":
        score = table["log_score"]
    elif by == "crps":
        score = -table["crps"]
    elif by == "error":
        score = -(table["prediction"] - table["y"].astype(float)).abs()
    else:
        probs, y = class_probabilities(table)
        score = (probs.argmax(1) == y).astype(float)
    return table.assign(score=score)


def rows_of_model(table: DataFrame, model: Model) -> DataFrame:
    """Return the rows of a table of predictions that were predicted by the given model."""
    return table[(table["model"] == model[1]) & (table["adaptation"] == model[2])]
