"""Tables of scores, of one run and of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from pyrofl.files.run_folder import table
from pyrofl.inference.evaluation.evaluate import Scores
from pyrofl.inference.fit import Run

CompareRow = tuple[str, int, str, str, str, float]
"""method, seed, model, adapted, metric, value"""

SMALLEST = 0.1  # share of the clients that counts as small
SHOWN = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "smallest_accuracy": "smallest 10%",
    "smallest_rmse": "smallest 10%",
    "held_out_accuracy": "new clients",
    "held_out_rmse": "new clients",
    "pooled_accuracy": "all test rows",
    "pooled_rmse": "all test rows",
    "nll": "NLL",
    "ece": "ECE",
}


def main_metric(scores: list[Scores]) -> str:
    """Return the metric that figures show: accuracy of classes, else RMSE."""
    return next(iter(scores[0].values))


def score_table(scores: list[Scores]) -> str:
    """Lay out the scores of one run: a line for each model and population."""
    metrics = list(scores[0].values)
    lines = (
        (s.model, s.adapted, s.population, *(s.mean(metric) for metric in metrics)) for s in scores
    )
    return table(("model", "adapted", "population", *metrics), lines)


def compare_rows(
    method: str, seed: int, run: Run, scores: list[Scores]
) -> Iterator[tuple[str, int, str, str, str, float]]:
    """Yield the rows of compare.csv for one run.

    A metric's name alone is about clients that train; "held_out_..." is about new ones,
    "pooled_..." about all test rows, "smallest_..." about the tenth with the fewest rows.
    """
    for s in scores:
        prefix = "" if s.population == "training" else f"{s.population}_"
        for metric in s.values:
            yield method, seed, s.model, s.adapted, f"{prefix}{metric}", s.mean(metric)
        if s.population == "training":
            small = s.smallest(SMALLEST, run.data.sizes)
            for metric in s.values:
                yield method, seed, s.model, s.adapted, f"smallest_{metric}", small.mean(metric)


def compare_table(rows: Iterable[tuple[str, int, str, str, str, float]]) -> str:
    """Lay out mean ± standard error over seeds, a line for each method and model."""
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for method, _, model, adapted, metric, value in rows:
        found.setdefault((method, model, adapted), {}).setdefault(metric, []).append(value)
    lines = found.values()
    metrics = [metric for metric in SHOWN if any(metric in line for line in lines)]
    return table(
        ("method", "model", "adapted", *(SHOWN[metric] for metric in metrics)),
        ((*key, *(spread(v.get(metric, [])) for metric in metrics)) for key, v in found.items()),
    )


def spread(values: list[float]) -> str:
    """Write a mean and, of two values or more, its standard error.

    >>> spread([0.9, 0.92]), spread([0.9]), spread([])
    ('0.9100 ± 0.0100', '0.9000', '-')
    """
    if not values:
        return "-"
    found = torch.tensor(values, dtype=torch.float64)
    error = f" ± {float(found.std()) / math.sqrt(len(values)):.4f}" if len(values) > 1 else ""
    return f"{float(found.mean()):.4f}{error}"
