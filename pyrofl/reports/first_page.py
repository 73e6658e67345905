"""First page of a report: question, data, results, certainty and warnings in plain sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pyrofl import figures
from pyrofl.choices import RowScore
from pyrofl.experiments.rows import (
    LOSSES,
    class_probabilities,
    classes_of,
    comparison_score,
    with_scores,
)
from pyrofl.figures import many
from pyrofl.metrics import calibration_bins, calibration_error
from pyrofl.nouns import nouns
from pyrofl.paired import Interval, interval
from pyrofl.reports.calibration import LINEAR, NETWORKS, results_of_method
from pyrofl.reports.page import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

MAX_RELIABLE_K = 0.7  # largest reliable Pareto k
MIN_COVERAGE_PERCENT = 90  # percent that 95% intervals cover at least
KINDS: dict[RowScore, str] = {
    "accuracy": "Fraction of correct predictions",
    "error": "Mean absolute error",
    "log_score": "Mean log score per row",
    "crps": "Mean CRPS",
}
POINTS = "percentage points (expected calibration error)"


class ClientScore(NamedTuple):
    """Score of a client's test rows, with its 95% interval."""

    client: str
    size: int  # training rows
    rows: int  # test rows
    score: Interval


def number(value: float) -> str:
    """Format a number with three significant digits.

    >>> number(1.2345), number(-0.5), number(12345.6)
    ('1.23', '-0.5', '12,346')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio_numbers(*values: float) -> list[str]:
    """Format ratios with three significant digits, or as many as none needs to round to 1.

    >>> ratio_numbers(1.0096, 1.0027, 1.0164), ratio_numbers(1.5, 1.0, 2.0)
    (['1.01', '1.003', '1.016'], ['1.5', '1', '2'])
    """
    digits = 3
    while digits < 6 and any(f"{v:.{digits}g}" == "1" and f"{v:.6g}" != "1" for v in values):
        digits += 1
    return [number(v) if digits == 3 or abs(v) >= 1000 else f"{v:.{digits}g}" for v in values]


def format_interval(low: float, high: float, times: float = 1.0, unit: str = "") -> str:
    """Format the ends of a 95% interval."""
    if np.isnan(low) or np.isnan(high):
        return "interval unknown, as there are fewer than two rows"
    return f"95% interval {number(times * low)}{unit} to {number(times * high)}{unit}"


def size_of(names: Sequence[str], sizes: Sequence[int], data: str, rows: str = "rows") -> str:
    """Return a sentence on the data: number of clients and rows, and where the rows are."""
    ends = " to ".join(f"{end:,}" for end in sorted({min(sizes), max(sizes)}))
    each = f" ({ends} each)" if len(sizes) > 1 else f" ({names[0]})"
    size_text = f"{sum(sizes):,} {rows} at {nouns().client.count(len(sizes))}{each}"
    return f"{data.removeprefix('csv:')}: {size_text}" if data else size_text


def how_well(methods: Sequence[str], target: str, clients: int) -> str:
    """Return the question that the report of methods for prediction answers."""
    does = f"does {methods[0]}" if len(methods) == 1 else f"do {', '.join(methods)}"
    at = nouns().client.count(clients) if clients > 1 else f"one {nouns().client}"
    return f"How well {does} predict {target} at {at}?"


def first_page(
    about: Iterable[tuple[str, str]],
    results: Sequence[str],
    drawn: tuple[Any, str] | None,
    statuses: Sequence[tuple[str, str, str]],
    certain: Sequence[str],
    problems: Sequence[str],
) -> Section:
    """Return the first page: data and model, results, one figure, certainty and warnings.

    Args:
        about: labels and texts on data, model and method.
        results: sentences.
        drawn: figure or PNG file, and its caption.
        statuses: name of each run, kind and reason of its convergence status.
        certain: sentences on the certainty of the results, besides convergence.
        problems: warnings.
    """
    summary, kinds = Section("Summary").table((), [*about]), {kind for _, kind, _ in statuses}
    heading = "Result" if kinds == {"converged"} else "Preliminary result (see convergence below)"
    summary.list(heading, results or ["There is no result."])
    if drawn:
        summary.figure(*drawn)
    summary.list("How certain is this?", [*convergence_sentences(statuses), *certain])
    return summary.list("Warnings", problems or ["None."])


def convergence_sentences(statuses: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Yield sentences on the convergence of runs, and on what it means for the numbers."""
    several = len(statuses) > 1
    parts: dict[str, list[tuple[str, str]]] = {}
    for name, kind, why in statuses:
        parts.setdefault(kind, []).append((name, why))
    for kind, some in parts.items():
        names = ", ".join(name for name, _ in some) if several else "The fit"
        verb = "have" if len(some) > 1 else "has"
        reasons = "; ".join(f"{name}: {why}" if several else why for name, why in some)
        if kind == "converged":
            yield f"{names} {verb} converged: more rounds would change these numbers little."
        elif kind == "not converged":
            yield (
                f"{names} {verb} not converged, and the numbers may still change. Fit for more "
                f"rounds before you use them ({reasons})."
            )
        else:
            yield f"{names} failed ({kind}). Do not use the numbers ({reasons})."


def correction(corrected: str, k: float, ess: float) -> str:
    """Return a sentence on the correction of the posterior draws, as `to_arviz` states it.

    Args:
        corrected: attribute "corrected" of the posterior.
        k: largest Pareto k.
        ess: smallest effective sample size.
    """
    if corrected == "yes" and k <= MAX_RELIABLE_K:
        return (
            "The fit is an approximation; its draws were corrected to the exact posterior, and the "
            f"correction is reliable (Pareto k is {k:.2f}, at most {MAX_RELIABLE_K} is reliable; "
            f"weighted draws are worth {number(ess)} independent ones)."
        )
    if corrected == "yes":
        return (
            "The fit is an approximation, and the correction of its draws is not reliable (Pareto "
            f"k is {k:.2f}, at most {MAX_RELIABLE_K} is reliable): intervals may be wrong."
        )
    reason = corrected.removeprefix("no: ")
    if "exact posterior" in reason:
        return "The intervals are those of the exact posterior."
    return (
        "The intervals are those of an approximation that was not corrected; they may be too "
        f"narrow ({reason})."
    )


def score_of(part: DataFrame, by: RowScore) -> Interval:
    """Return the mean score of rows with a 95% interval: Wilson's for accuracy, else Student's."""
    from scipy.stats import binomtest

    values = with_scores(part, by)["score"].to_numpy()
    if by == "accuracy":
        ends = binomtest(int(values.sum()), len(values)).proportion_ci(method="wilson")
        return Interval(float(values.mean()), float(ends.low), float(ends.high))
    score = interval(values)
    return Interval(-score.mean, -score.high, -score.low) if by in LOSSES else score


def scores_by_client(part: DataFrame, sizes: dict[str, int], by: RowScore) -> list[ClientScore]:
    """Return the score of every client's test rows, the client with the fewest rows first."""
    scores = [
        ClientScore(str(name), sizes.get(str(name), 0), len(own), score_of(own, by))
        for name, own in part.groupby("client")
    ]
    return sorted(scores, key=lambda one: (one.size, one.client))


def score_sentences(part: DataFrame, sizes: dict[str, int], whose: str, rows: str) -> list[str]:
    """Return sentences on the score of a model over all rows, and over clients.

    Args:
        part: predictions of single rows by the model.
        sizes: client -> number of its training rows.
        whose: the model, such as "the global model of fedavg".
        rows: kind of the rows: "test" or "train".
    """
    by = comparison_score(part, None)
    whole, each = score_of(part, by), scores_by_client(part, sizes, by)
    is_share = by == "accuracy"
    times, unit = (100.0, "%") if is_share else (1.0, "")
    kind = {"train": "training"}.get(rows, rows)
    score = f"{number(times * whole.mean)}{unit}"
    over, ends = f"{len(part):,} {kind} rows", format_interval(whole.low, whole.high, times, unit)
    if is_share:
        sentences = [f"{whose} predicts {score} of {over} correctly ({ends})."]
    else:
        sentences = [f"{KINDS[by]} of {whose} over {over}: {score} ({ends})."]
    sentences[0] = sentences[0][0].upper() + sentences[0][1:]
    if len(each) > 1:
        order = sorted(each, key=lambda one: one.score.mean, reverse=by in LOSSES)
        told = (
            f"{number(times * one.score.mean)}{unit} at {one.client} ({one.rows:,} {kind} rows, "
            f"{format_interval(one.score.low, one.score.high, times, unit)})"
            for one in (order[0], order[-1])
        )
        sentences.append(f"By {nouns().client}, it goes from {' to '.join(told)}.")
    if kind == "training":
        sentences.append("There are no test rows: training rows give too good a score.")
    return sentences


def score_table(
    part: DataFrame, sizes: dict[str, int]
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return head and lines of the table of the clients' scores with their 95% intervals."""
    by = comparison_score(part, None)
    head = (str(nouns().client), "training rows", "tested rows", KINDS[by].lower(), "2.5%", "97.5%")
    each = scores_by_client(part, sizes, by)
    return head, [(*one[:3], *vars(one.score).values()) for one in each]


def score_certainty(parts: Mapping[str, DataFrame]) -> list[str]:
    """Return sentences on the intervals of scores, and on the calibration: method -> its rows."""
    sentences = [
        "Intervals account for the number of rows that were tested, not for other training data "
        "or another seed."
    ]
    errors = {name: _calibration_error(part) for name, part in parts.items() if classes_of(part)}
    if errors:
        told = ", ".join(
            f"{100 * ece:.1f}{f' ({name})' if len(errors) > 1 else ''}"
            for name, ece in errors.items()
        )
        sentences.append(
            "The probability of the predicted class differs from the fraction of correct "
            f"predictions on average by {told} {POINTS}."
        )
    return sentences + [told for name in parts if (told := coverage(name))]


def _calibration_error(part: DataFrame) -> float:
    probs, y = (torch.tensor(v) for v in class_probabilities(part))
    sure, best = probs.max(1)
    return float(calibration_error(calibration_bins(sure, (best == y).to(sure)))[0])


def coverage(method: str) -> str:
    """Return a sentence on the measured coverage of a method's intervals; "" if not measured."""
    texts, low = [], 100
    for simulation, model in ((LINEAR, "a small linear model"), (NETWORKS, "networks")):
        if percentages := [one.percent for one in results_of_method(method, simulation)]:
            ends = (
                f"{min(percentages)} to {max(percentages)}%"
                if len({*percentages}) > 1
                else f"{percentages[0]}%"
            )
            texts.append(f"{ends} ({model})")
            low = min(low, *percentages)
    if not texts:
        return ""
    more = "" if low >= MIN_COVERAGE_PERCENT else ", so its posterior is too narrow"
    return (
        f"In simulations, 95% intervals of {method} contained the true parameter in "
        f"{' and '.join(texts)} of cases{more}."
    )


def score_figure(part: DataFrame, sizes: dict[str, int]) -> tuple[Figure, str]:
    """Plot the score of every client with its 95% interval; return the figure and its caption."""
    by = comparison_score(part, None)
    each = scores_by_client(part, sizes, by)
    summary = np.array([[*vars(one.score).values()] for one in each], dtype=float).T
    order = "" if len(each) > many.named() else "; fewest training rows first"
    text = f"{KINDS[by]} of each {nouns().client}, with 95% intervals{order}."
    fits = {"95% interval": tuple(summary)}
    return figures.forest(fits, [one.client for one in each], KINDS[by]), text
