"""Averages of expected responses over rows: standardized ratios, marginal means, R2, and draws.

Clients contribute sums over their rows at each posterior draw; functions are in `pyrofl.effects`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from pyro.distributions import AsymmetricLaplace
from torch import Tensor

from pyrofl.arguments import Count, ProperShare, check_name, checked
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.posteriors.export import inference_data
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.prediction import (
    NEW,
    PIECE,
    Effects,
    RegressionDraws,
    RowPredictors,
    mean_of_rows,
    posterior_draws,
    read_table,
    regression_of,
    run_program,
)
from pyrofl.models.regression.result_tables import interval_table, ratio_table
from pyrofl.models.regression.rows import tensor
from pyrofl.tensors import lent
from pyrofl.user_warnings import warn_user

EVENTS = ("binary", "count", "trials")
RESERVED = ("linpred", "epred", "chain", "draw", "row", "row_client")  # names in `row_draws`
Comparison = Literal["difference", "ratio"]


@checked
def standardize(
    fitted: Any, *, prob: ProperShare = 0.95, draws: Count | None = None
) -> pd.DataFrame:
    """Return observed and expected events of each client, and their standardized ratio.

    This is indirect standardization, as of hospitals' mortality: expected events are those of the
    client's own rows with client effects of 0, and the standardized ratio divides the events that
    the model predicts with the client's effect by these. Its posterior shrinks ratios of small
    clients towards 1 (Normand, Glickman and Gatsonis, JASA 1997; Ash et al., "Statistical Issues
    in Assessing Hospital Performance", COPSS-CMS White Paper 2012). Effects of levels that several
    clients have, such as surgeons, are in both. `pyrofl.effects.funnel` and
    `pyrofl.effects.caterpillar` plot the table.

    Args:
        fitted: a run of a regression with effects of clients, or several.
        prob: probability of the interval.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        A row for each client: rows (sum of their weights), observed and expected events (posterior
        mean), raw (observed / expected), median and interval of the standardized ratio, and
        p_above_1, the posterior probability of a ratio above 1.

    Raises:
        ValueError: if responses are no events or counts, or the formula has no effects of clients.

    Examples:
        >>> import pandas as pd
        >>> import pyrofl
        >>> from pyrofl import federations
        >>> bern = pd.DataFrame({"died": [0, 0, 1, 0], "age": [50.0, 60.0, 55.0, 70.0]})
        >>> basel = pd.DataFrame({"died": [0, 1, 1, 1], "age": [45.0, 65.0, 60.0, 75.0]})
        >>> tables = federations.from_frames({"bern": bern, "basel": basel})
        >>> formula = "died ~ age + (1 | client)"
        >>> method = pyrofl.regression(formula, tables, family="bernoulli")
        >>> run = pyrofl.fit(method, tables, rounds=3, progress=False)
        >>> standardize(run, draws=200)["observed"].tolist()
        [1.0, 3.0]
    """
    method = regression_of(fitted)
    design: Design = method.design
    if design.family.support not in EVENTS:
        raise ValueError(
            f"response {design.formula.response} is no event or count; expected a family such as "
            "bernoulli, binomial or poisson"
        )
    if all(one.kind == "shared" or one.parameter for one in design.groups):
        raise ValueError(
            f"the formula has no effects of clients; expected one, such as (1 | {design.client})"
        )
    drawn = posterior_draws(fitted, draws)
    logs, table = {}, {}
    for name, frame in _frames(design).items():
        weights = design.response_column("weights", frame)
        predicted, expected = (
            _sum(method, drawn, frame, name, effects) for effects in ("client", "shared")
        )
        observed, mean = float(weights @ design.y(frame)), float(expected.mean())
        table[name] = [float(weights.sum()), observed, mean, observed / mean]
        logs[name] = (predicted / expected).log()
    columns = pd.DataFrame(table, ["rows", "observed", "expected", "raw"]).T
    return pd.concat([columns, ratio_table(logs, prob)], axis=1).rename_axis("client")


@checked
def marginal(
    fitted: Any,
    column: str,
    values: Sequence[Any] | None = None,
    *,
    comparison: Comparison = "difference",
    prob: ProperShare = 0.95,
    draws: Count | None = None,
) -> pd.DataFrame:
    """Return marginal means for values of a column, and their contrasts, over all clients' rows.

    The marginal mean of a value is the mean expected response of all rows, weighted by their
    weights, with the column set to the value and other columns as observed, as of
    `avg_predictions` of the R package marginaleffects (g-computation). Effects of clients and
    levels are those of each row.

    Args:
        fitted: a run of a regression, or several.
        column: column of the formula.
        values: values to compare; None is all levels of a category.
        comparison: contrast of two values: the "difference" or the "ratio" of their means.
        prob: probability of the interval.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        A row for each value, such as "treat = yes", and for each pair, such as "yes - no" or
        "yes / no", with mean, sd, median and the ends of the interval.

    Raises:
        ValueError: if the column is unknown or a number without values, a value is of another type
            or no level, or the response has several classes or no expected value.

    Warns:
        UserWarning: if only the rows of some clients are here.
    """
    method = regression_of(fitted)
    design: Design = method.design
    _refuse_classes(design)
    check_name(column, list(design.needed), "column of the formula:")
    levels = design.clients.levels.get(column)
    if values is None and levels is None:
        raise ValueError(f"column {column} holds numbers; expected values, such as [0.0, 1.0]")
    chosen = list(levels or ()) if values is None else list(values)
    if len(chosen) < 2 or len(set(chosen)) < len(chosen):
        raise ValueError(f"values are {chosen!r}; expected two or more, all different")
    drawn = posterior_draws(fitted, draws)
    frames = _all_frames(design)
    count = sum(float(design.response_column("weights", f).sum()) for f in frames.values())
    means: dict[Any, Tensor] = {}
    for value in chosen:
        sums = []
        for name, frame in frames.items():
            rows = read_table(design, frame.assign(**{column: value}), name)
            weights = design.response_column("weights", frame)
            sums.append(_sum(method, drawn, rows, name, "client", weights))
        means[value] = torch.stack(sums).sum(0) / count  # [S]
    result = {f"{column} = {value}": mean for value, mean in means.items()}
    for first, second in combinations(chosen, 2):
        if comparison == "ratio":
            result[f"{second} / {first}"] = means[second] / means[first]
        else:
            result[f"{second} - {first}"] = means[second] - means[first]
    return interval_table(result, prob)


@checked
def r2(fitted: Any, *, prob: ProperShare = 0.95, draws: Count | None = None) -> pd.DataFrame:
    """Return Bayesian R2, the part of the responses' variance that the expected response explains.

    At each posterior draw it is the weighted variance of the expected responses of all rows,
    divided by this variance plus the mean variance of the responses' distributions (Gelman,
    Goodrich, Gabry and Vehtari, "R-squared for Bayesian Regression Models", The American
    Statistician 2019, with residual variances of the model).

    Args:
        fitted: a run of a regression, or several.
        prob: probability of the interval.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        One row, "R2", with mean, sd, median and the ends of the interval.

    Raises:
        ValueError: if the response has several classes or no expected value.

    Warns:
        UserWarning: if only the rows of some clients are here.
    """
    method = regression_of(fitted)
    design: Design = method.design
    _refuse_classes(design)
    drawn = posterior_draws(fitted, draws)
    zero = torch.zeros(len(next(iter(drawn.sites.values())))).double()
    count, first, square, residual = 0.0, zero, zero, zero
    for name, frame in _all_frames(design).items():
        weights = tensor(design.response_column("weights", frame))
        count += float(weights.sum())
        for rows, some in _pieces(method, drawn, frame, name, "client"):
            mean = _expected(rows)
            variance = rows.response.variance[:, 0]  # [S, N]
            weight = weights[some.start : some.stop]
            first = first + mean @ weight
            square = square + mean.square() @ weight
            residual = residual + variance @ weight
    explained = square / count - (first / count).square()
    return interval_table({"R2": explained / (explained + residual / count)}, prob)


@checked
def row_draws(
    fitted: Any, rows: Any = None, client: str | None = None, draws: Count | None = None
) -> Any:
    """Return draws of the linear predictor, the expected response and the response of rows.

    These are posterior_linpred, posterior_epred and posterior_predict of brms and rstanarm.

    Args:
        fitted: a run of a regression, or several.
        rows: data frame or dict of columns of new rows; None is the training rows of all clients.
        client: client of the new rows; None is a new one, whose effects are drawn from their
            distribution.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        ArviZ data with the group predictions: linpred, epred and the response by its name (or
        "response", if it has the name of one of these or of an axis), with the axes chain, draw
        and row, where draws of all runs are one chain; the coordinate row_client has the client of
        each row.

    Raises:
        ValueError: as of `predict`.
    """
    method = regression_of(fitted)
    design: Design = method.design
    _refuse_classes(design)
    drawn = posterior_draws(fitted, draws)
    if rows is None and client is not None:
        raise ValueError("client is given without rows; expected rows, or neither")
    if rows is None:
        frames = dict(_frames(design))
    else:
        if client is not None:
            check_name(client, drawn.clients, "client")
        frames = {client or NEW: read_table(design, rows, client or NEW)}
    name = design.formula.response
    name = "response" if name in RESERVED else name
    parts: dict[str, list[Tensor]] = {"linpred": [], "epred": [], name: []}
    for site, frame in frames.items():
        rng = stream(drawn.seed, Stream.ROWS, site)
        for piece, _ in _pieces(method, drawn, frame, site, "client"):
            parts["linpred"].append(piece.eta[:, 0])
            parts["epred"].append(_expected(piece))
            with lent(rng):
                parts[name].append(piece.response.sample()[:, 0])
    values = {n: torch.cat(value, -1)[None] for n, value in parts.items()}  # [1, S, N]
    owners = [site for site, frame in frames.items() for _ in range(len(frame))]
    axes = dict.fromkeys((f"predictions/{n}" for n in values), ("chain", "draw", "row"))
    return inference_data({"predictions": values}, axes, {}, {"row_client": ("row", owners)})


def _frames(design: Design) -> Mapping[str, pd.DataFrame]:
    """Return the rows of each client whose rows are here; raise ValueError if there are none."""
    if not design.clients.frames:
        raise ValueError(
            "no client has its rows here, as on a server; expected a call at the clients"
        )
    return design.clients.frames


def _all_frames(design: Design) -> Mapping[str, pd.DataFrame]:
    """Return the rows of each client; warn if those of other clients are elsewhere."""
    frames, every = _frames(design), design.clients.rows
    if (here := sum(map(len, frames.values()))) < every:
        warn_user(
            f"this is an average over {here} of {every} rows: those of other clients are not here"
        )
    return frames


def _refuse_classes(design: Design) -> None:
    """Raise ValueError if a response has several classes, or no expected value."""
    if design.family.kind in ("cox", "ordinal", "categorical"):
        raise ValueError(
            f"response {design.formula.response} has no expected value in this family; expected "
            "numbers, counts, or two classes"
        )


def _pieces(
    method: Any, drawn: RegressionDraws, frame: pd.DataFrame, client: str, effects: Effects
) -> Iterator[tuple[RowPredictors, range]]:
    """Yield the predictors of a client's rows, some rows at a time, and which these are."""
    for begin in range(0, len(frame), PIECE):
        some = frame.iloc[begin : begin + PIECE]
        yield (
            run_program(method, drawn, some, client, effects),
            range(begin, begin + len(some)),
        )


def _expected(rows: RowPredictors) -> Tensor:
    """Return expected responses [S, N], or probabilities of the second of two classes."""
    if isinstance(rows.response, AsymmetricLaplace):  # its location is a quantile
        expected: Tensor = rows.response.mean[:, 0]
        return expected
    mean = mean_of_rows(rows)
    return mean[..., 1] if mean.dim() > 2 else mean


def _sum(
    method: Any,
    drawn: RegressionDraws,
    frame: pd.DataFrame,
    client: str,
    effects: Effects,
    weights: np.ndarray | None = None,
) -> Tensor:
    """Return the sum of a client's expected responses, times row weights, at each draw [S]."""
    weights = method.design.response_column("weights", frame) if weights is None else weights
    total = torch.zeros(())
    for rows, some in _pieces(method, drawn, frame, client, effects):
        total = total + _expected(rows) @ tensor(weights[some.start : some.stop])
    return total
