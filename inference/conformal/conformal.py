"""Split conformal prediction: calibrate prediction sets of any fitted run on test rows.

A set with the threshold q contains all responses with a score (`scores`) up to q. From n scores of
exchangeable rows, q is the order statistic of rank ceil((1 - alpha)(n + 1)). Then

    1 - alpha <= P(y in set) <= 1 - alpha + 1 / (n + 1)

where the upper bound needs distinct scores (Vovk, Gammerman and Shafer, "Algorithmic Learning in a
Random World", 2005; Lei et al., JASA 2018). There are three thresholds:

- of a client, from its own scores: coverage at each client, for any model and any differences
  between clients.
- pooled, from the scores of all K clients (`quantiles`): coverage for a row of client k with
  probability (n_k + 1) / (n + K) (Lu, Yu, Karimireddy, Jordan and Raskar, "Federated Conformal
  Predictors for Distributed Uncertainty Quantification", ICML 2023). Single clients may have less.
- of a new client. Without weights: coverage on average over new clients that are exchangeable with
  the training clients (Lee, Barber and Willett, "Distribution-free inference with hierarchical
  data", 2023). With weights w = p_new / p_pooled: coverage for rows of that density (Tibshirani,
  Barber, Candes and Ramdas, "Conformal Prediction Under Covariate Shift", NeurIPS 2019; for labels
  Podkopaev and Ramdas, "Distribution-free uncertainty quantification for classification under label
  shift", UAI 2021).

Pooled thresholds need one exchange. Humbert et al., "One-Shot Federated Conformal Prediction", ICML
2023, send one quantile of each client instead, which needs scores of the same distribution at all
clients; several quantiles need no such assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf, nan
from typing import Any, Unpack

import torch
from torch import Tensor

from pyrofl.arguments import Count, PositiveShare, ProperShare, checked
from pyrofl.data import Federation
from pyrofl.data.tables.wording import listed
from pyrofl.inference.conformal.quantiles import (
    RANK_TOLERANCE,
    ScoreSummary,
    pooled_quantile,
    quantile,
    summarize,
)
from pyrofl.inference.conformal.scores import Forecast, test_predictions
from pyrofl.inference.conformal.sets import (
    Conformal,
    Pooling,
    Weights,
    new_adaptation,
    row_weights,
    set_sizes,
)
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.state import refuse_absent_states
from pyrofl.inference.evaluation.predictions import PredictionOptions
from pyrofl.inference.evaluation.specification import EvaluationSpec, default_evaluation
from pyrofl.inference.fitted_run.run import Run
from pyrofl.turns import synchronized
from pyrofl.user_warnings import warn_user

LEVEL = 0.95
MAX_NAMED_CLIENTS = 3  # clients that a warning names
MEASURE_NAMES = ("coverage", "error", "low", "high", "size", "empty")


@checked
@synchronized
def conformal(
    run: Run,
    alpha: ProperShare = 0.1,
    *,
    share: PositiveShare = 0.5,
    randomized: bool = True,
    num_quantiles: Count = 100,
    weights: Weights | None = None,
    **asked: Unpack[PredictionOptions],
) -> Conformal:
    """Calibrate prediction sets that contain the response with probability 1 - alpha.

    A random fraction of every client's test rows calibrates, and the others measure coverage. Rows
    that trained a model must not calibrate: to use training rows, withhold them from the fit as
    test rows. The scores of a client stay there; for pooled thresholds it sends their number and
    at most `num_quantiles` order statistics, and with weights the sums of weights between them.
    The pooled threshold is rounded up, never down, see `Conformal.summary`. Messages are not
    protected by differential privacy.

    Args:
        run: a fitted run with test rows.
        alpha: error rate.
        share: fraction of every client's test rows that calibrates, rounded up; 1 measures nothing.
        randomized: whether sets of classes are randomized, as published: exact coverage, but some
            sets are empty. Otherwise no set is empty, and coverage is higher.
        num_quantiles: largest number of order statistics in a message.
        weights: density ratio of the rows of new clients to the pooled rows, up to a factor: a
            function of rows [N, *x] -> [N] where their inputs differ; or class -> weight, 1 for
            others, where their class frequencies differ.
        asked: model, adaptation, draws, seed and chunk_size of `evaluate`. By default the main
            model with the method's adaptation if it is personal, and seed and draws of the run.

    Returns:
        The calibrated run, see `checks.Conformal`: `predict` returns sets or intervals, `frame` the
        coverage by client.

    Raises:
        ValueError: if there are no test rows, test rows were used for training, or no threshold is
            finite: a client needs at least (1 - alpha) / alpha calibration rows.

    Warns:
        UserWarning: if some clients have too few rows, so that their sets contain all classes; or
            if the run has differential privacy, which does not cover the calibration.

    Examples:
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import fedavg
        >>> data = federations.split(datasets.load("digits"), "iid", clients=4)
        >>> run = pyrofl.fit(
        ...     fedavg.build(nets.build("softmax", (64,), 10), lr=0.1), data, 5, progress=False
        ... )
        >>> calibrated = pyrofl.conformal(run, alpha=0.1)
        >>> calibrated.frame().groupby("pooling")["coverage"].mean().round(1).to_dict()
        {'client': 0.9, 'pooled': 0.9}
        >>> sets = calibrated.predict(data.x[:3], "client 0")
        >>> tuple(sets.sets.shape)
        (3, 10)
    """
    model, adaptation = default_evaluation(run.method)
    if asked.get("model") not in (None, model):
        model, adaptation = str(asked["model"]), "none"
    options: dict[str, Any] = {n: v for n, v in asked.items() if v is not None}
    how = EvaluationSpec.of(
        {"model": model, "adaptation": adaptation, "seed": run.seed, "draws": run.draws, **options},
        excluded=("population", "part"),
    )
    data = run.data
    _check_rows(data)
    refuse_absent_states(
        run.method, data, run.state, torch.arange(data.clients), how.view_name(run.method)
    )
    if run.privacy is not None:
        warn_user(
            "the run has differential privacy, but calibration scores are sent without noise; use "
            "only thresholds of single clients, or account for this exchange separately"
        )
    marked = _calibration_rows(data, share, how.seed)
    evaluation_rows: dict[int, tuple[Forecast, Tensor]] = {}  # evaluation rows
    messages: dict[int, ScoreSummary] = {}
    thresholds = torch.full((data.clients,), torch.inf, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    for i, forecast, y in _forecasts(run, how, randomized):
        use = marked[i]
        scores = forecast.select(use).scores(y[use])
        if len(scores):
            thresholds[i] = quantile(scores, torch.ones_like(scores), alpha, one)
            x = data.x[data.test[i][use].to(data.device)].cpu()
            mass = None if weights is None else row_weights(weights, run, x, y[use])
            messages[i] = summarize(scores, num_quantiles, mass)
        evaluation_rows[i] = forecast.select(~use), y[~use]
    messages = {i: messages[i] for i in sorted(messages)}
    unweighted = [part._replace(mass=part.counts) for part in messages.values()]
    pooled = float(pooled_quantile(unweighted, alpha))
    _check_enough(data, thresholds, pooled, alpha)
    calibrated = Conformal(run, alpha, how, randomized, messages, thresholds, pooled, weights, ())
    every = sum(int(part.num_scores) for part in messages.values())
    kinds: tuple[Pooling, ...] = ("client", "pooled")
    lines = [
        _line(
            calibrated,
            i,
            pooling,
            int(marked[i].sum()) if pooling == "client" else every,
            *evaluation_rows[i],
        )
        for i in sorted(evaluation_rows)
        for pooling in kinds
    ]
    new = sorted(_held_out(calibrated), key=lambda one: one[0])
    lines += [_line(calibrated, i, "new_client", every, forecast, y) for i, forecast, y in new]
    return replace(calibrated, rows=lines)


def _check_rows(data: Federation) -> None:
    """Raise ValueError if there are no test rows, or a test row was used for training."""
    if not any(map(len, data.test[: data.clients])):
        raise ValueError(
            "no client has test rows, and rows that trained the model cannot calibrate it; "
            "withhold rows before the fit (of a loaded run: pyrofl.load(DIR, data=...))"
        )
    trained = torch.zeros(len(data.x), dtype=torch.bool)
    trained[torch.cat(data.train).cpu()] = True
    for name, rows in zip(data.names, data.test, strict=True):
        if bad := int(trained[rows.cpu()].sum()):
            raise ValueError(
                f"{name}: {bad} of {len(rows)} test rows are training rows, which cannot calibrate "
                "the model; withhold rows before the fit"
            )


def _check_enough(data: Federation, thresholds: Tensor, pooled: float, alpha: float) -> None:
    """Raise ValueError if all clients' conformal thresholds are infinite; warn if some are."""
    few = [name for name, q in zip(data.names, thresholds.tolist(), strict=False) if q == inf]
    least = ceil((1 - alpha) / alpha - RANK_TOLERANCE)
    needed = f"at least {least} calibration rows for alpha {alpha:g}"
    if len(few) == data.clients and pooled == inf:
        raise ValueError(
            f"every client needs {needed}, as (n + 1)(1 - alpha) > n makes sets infinite; use more "
            "test rows, a larger share or a larger alpha"
        )
    if few:
        instead = "" if pooled == inf else "pooling='pooled', "
        warn_user(
            f"{listed(few, MAX_NAMED_CLIENTS)} ({len(few)} of {data.clients} clients) have "
            f"infinite sets, as a client needs {needed}; use {instead}more test rows or a larger "
            "alpha"
        )


def _calibration_rows(data: Federation, share: float, seed: Seed) -> list[Tensor]:
    """Choose which of each training client's test rows calibrate prediction sets, as bool [n].

    A row that is a test row of several clients has the same use at all of them, so that no row that
    measures coverage is in a pooled threshold.
    """
    tests = [rows.cpu() for rows in data.test[: data.clients]]
    every = torch.cat(tests)
    if len(every.unique()) < len(every):
        order = torch.randperm(len(data.x), generator=stream(seed, Stream.CONFORMAL))
        is_calibration = torch.zeros(len(data.x), dtype=torch.bool)
        distinct = order[torch.isin(order, every)]
        is_calibration[distinct[: ceil(share * len(distinct) - RANK_TOLERANCE)]] = True
        return [is_calibration[rows] for rows in tests]
    marks = []
    for name, rows in zip(data.names, tests, strict=False):
        order = torch.randperm(len(rows), generator=stream(seed, Stream.CONFORMAL, name))
        marks.append(order < ceil(share * len(rows) - RANK_TOLERANCE))
    return marks


def _forecasts(
    run: Run, how: EvaluationSpec, randomized: bool
) -> Iterator[tuple[int, Forecast, Tensor]]:
    """For each client with test rows, yield its id and the rows' predictions and responses."""
    for i, mean, sd, y in test_predictions(run.method, run.data, run.state, how):
        u = torch.ones(len(mean), dtype=mean.dtype)
        if randomized:
            u.uniform_(generator=stream(how.seed, Stream.CONFORMAL, run.data.names[i], "scores"))
        yield i, Forecast(mean, sd, u), y


def _held_out(calibrated: Conformal) -> Iterator[tuple[int, Forecast, Tensor]]:
    """For each held-out client, yield its id, and predictions and responses of its test rows."""
    run, how = calibrated.run, calibrated.how
    if not any(map(len, run.data.test[run.data.clients :])):
        return
    adaptation = new_adaptation(run) if how.model == "personal" else how.adaptation
    yield from _forecasts(
        run, replace(how, population="held_out", adaptation=adaptation), calibrated.randomized
    )


def _line(
    calibrated: Conformal, i: int, pooling: Pooling, count: int, forecast: Forecast, y: Tensor
) -> dict[str, Any]:
    """Return the row of one client and one kind of threshold in the table `Conformal.frame`."""
    data, alpha, n = calibrated.run.data, calibrated.alpha, len(y)
    name = data.names[i]
    line: dict[str, Any] = {
        "client": name,
        "population": "training" if i < data.clients else "held_out",
        "pooling": pooling,
        "target": 1 - alpha,
        "calibration_rows": count,
        "test_rows": n,
    }
    x = data.x[data.test[i].to(data.device)].cpu() if pooling == "new_client" else None
    q = calibrated.threshold(pooling, n, name, x)
    line["threshold"] = float(q.max()) if n else nan
    if not n:
        return line | dict.fromkeys(MEASURE_NAMES, nan)
    sets = calibrated.sets(forecast, q)
    if forecast.has_classes:
        held = sets.gather(1, y.long()[:, None])[:, 0]  # [n, K] -> [n]
    else:
        held = (sets[:, 0] <= y) & (y <= sets[:, 1])
    size = set_sizes(sets).double()
    error, ends = (alpha * (1 - alpha) / n) ** 0.5, coverage_range(count, n, alpha)
    coverage, width, empty = (float(v.double().mean()) for v in (held, size, size == 0))
    return line | dict(zip(MEASURE_NAMES, (coverage, error, *ends, width, empty), strict=True))


def coverage_range(count: int, tested: int, alpha: float) -> tuple[float, float]:
    """Return the range that contains the coverage of some test rows with 95% probability.

    Given the calibration rows the coverage has the distribution Beta(k, n + 1 - k) with the rank
    k = ceil((1 - alpha)(n + 1)), and the number of covered test rows a beta-binomial one (Vovk,
    "Conditional Validity of Inductive Conformal Predictors", ACML 2012).

    Args:
        count: number n of calibration rows.
        tested: number of test rows.
        alpha: error rate.

    >>> coverage_range(99, 100, 0.1)
    (0.81, 0.97)
    """
    from scipy.stats import betabinom

    rank = ceil((1 - alpha) * (count + 1) - RANK_TOLERANCE)
    if rank > count:
        return 1.0, 1.0
    low, high = betabinom.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2], tested, rank, count + 1 - rank)
    return float(low / tested), float(high / tested)
