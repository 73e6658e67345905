"""Survival curves and restricted mean survival times of new rows, with bands.

Families of times have the survival function of their distribution. In a stratified Cox model each
client has a baseline hazard of its own: given the coefficients, its increment at an event time is
a gamma variable with the number of events as shape and the sum of the relative hazards of the rows
at risk as rate, whose mean is Breslow's estimate (Kalbfleisch, "Non-parametric Bayesian Analysis of
Survival Time Data", JRSS B 1978, for a gamma process of vanishing precision).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pyrofl.arguments import Count, ProperShare, checked
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.models.regression.design import Design
from pyrofl.models.regression.prediction import (
    RegressionDraws,
    new_rows,
    posterior_draws,
    regression_of,
    run_program,
)
from pyrofl.models.regression.result_tables import interval_table
from pyrofl.models.regression.rows import tensor
from pyrofl.tensors import lent

ROWS_AT_ONCE = 16  # whose curves are in memory


@checked
def survival(
    fitted: Any,
    rows: Any,
    times: Sequence[float] | np.ndarray,
    client: str | None = None,
    *,
    prob: ProperShare = 0.95,
    draws: Count | None = None,
) -> pd.DataFrame:
    """Return the survival probabilities S(t) of new rows, of known clients or new ones.

    Families are exponential, weibull, lognormal and gamma. With family cox, rows need a client
    whose rows are here, as each client has its own baseline hazard. `pyrofl.figures.survival` plots
    the result.

    Args:
        fitted: a run of a regression of times, or several.
        rows: data frame or dict of columns, with the columns of the formula's right-hand side.
        times: times of at least 0, in the unit of the response.
        client: name of a client; None is a new client, whose effects are drawn from their
            distribution, unless the rows name their clients.
        prob: probability of the band at each time.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        A row for each new row and time, with the columns row (its place, from 0), time, mean,
        median and the ends of the interval.

    Raises:
        ValueError: if the response is no time, a time is invalid, or a client has no baseline
            hazard here, or none at a time after its last one.

    Examples:
        >>> import pandas as pd
        >>> import pyrofl
        >>> from pyrofl import federations
        >>> bern = pd.DataFrame({"time": [1.0, 2.0, 4.0, 3.0], "died": [1, 0, 1, 1]})
        >>> basel = pd.DataFrame({"time": [2.0, 5.0, 1.5, 3.5], "died": [1, 1, 0, 1]})
        >>> tables = federations.from_frames({"bern": bern, "basel": basel})
        >>> method = pyrofl.regression("censored(time, died) ~ 1", tables, family="exponential")
        >>> run = pyrofl.fit(method, tables, rounds=2, progress=False)
        >>> survival(run, {"any": [0]}, [0.0, 2.0])["mean"].round(1).tolist()
        [1.0, 0.6]
    """
    wanted = _times("times", times)
    values = _values(fitted, rows, client, draws, lambda curve: curve.at(wanted))
    named = {(row, place): v for row, each in values.items() for place, v in enumerate(each.T)}
    table = interval_table(named, prob).drop(columns="sd")
    index = pd.DataFrame({"row": [row for row, _ in named]})
    index["time"] = [float(wanted[place]) for _, place in named]
    table = pd.concat([index, table.reset_index(drop=True)], axis=1)
    many = table["row"].nunique() > 1
    about = {"column": "time", "by": "row" if many else None, "response": "survival probability"}
    is_cox = regression_of(fitted).design.family.kind == "cox"
    table.attrs |= {**about, "steps": is_cox, "names": _row_names(rows)}
    return table


def _row_names(rows: Any) -> dict[int, str]:
    """Return the values of each row in the columns that differ, such as "treat = yes"."""
    frame = pd.DataFrame(rows).reset_index(drop=True)
    differing = [name for name in frame.columns if frame[name].nunique() > 1]
    return {
        row: ", ".join(f"{name} = {frame.loc[row, name]}" for name in differing)
        for row in (range(len(frame)) if differing else ())
    }


@checked
def restricted_mean(
    fitted: Any,
    rows: Any,
    until: float,
    client: str | None = None,
    *,
    prob: ProperShare = 0.95,
    draws: Count | None = None,
) -> pd.DataFrame:
    """Return the restricted mean survival time of new rows: the mean of min(time, until).

    It is the area under the survival curve up to that time (Royston and Parmar, "Restricted Mean
    Survival Time", BMC Medical Research Methodology 2013).

    Args:
        fitted: a run of a regression of times, or several.
        rows: as of `survival`.
        until: time up to which the mean is taken, in the unit of the response.
        client: as of `survival`.
        prob: probability of the interval.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        One row for each new row, with mean, sd, median and the ends of the interval.

    Raises:
        ValueError: as of `survival`.
    """
    tau = float(_times("until", [until])[0])
    values = _values(fitted, rows, client, draws, lambda curve: curve.mean_until(tau))
    return interval_table(values, prob).rename_axis("row")


class _Law:
    """Survival curves of rows from their distribution at posterior draws."""

    def __init__(self, law: Any) -> None:
        self.law = law

    def at(self, times: Tensor) -> Tensor:
        """Return survival probabilities [S, N, T]."""
        each = [1 - self.law.cdf(time)[:, 0] for time in times]
        return torch.stack(each, -1)

    def mean_until(self, tau: float) -> Tensor:
        """Return restricted means [S, N]."""
        law, end = self.law, torch.tensor(tau, dtype=torch.float64)
        rest = end * (1 - law.cdf(end))
        kind = type(law).__name__
        if kind == "Exponential":
            mean = -torch.expm1(-law.rate * end) / law.rate
        elif kind == "Weibull":
            power = 1 / law.concentration
            scale = law.scale * (1 + power).lgamma().exp()
            mean = scale * torch.special.gammainc(power, (end / law.scale) ** law.concentration)
        elif kind == "Gamma":
            part = torch.special.gammainc(law.concentration + 1, law.rate * end)
            mean = law.mean * part + rest
        else:
            top, s = law.loc + law.scale.square() / 2, law.scale
            below = torch.special.log_ndtr((end.log() - law.loc - s.square()) / s)
            mean = (top + below).exp() + rest
        restricted: Tensor = mean[:, 0]
        return restricted


class _CoxCurve:
    """Survival curves of rows from the cumulative baseline hazard of a client.

    Attributes:
        times: event times of the client, in order [K].
        baseline: cumulative baseline hazard after each of them, at each draw [S, K].
        risk: relative hazards of the rows [S, N].
    """

    def __init__(self, times: Tensor, baseline: Tensor, risk: Tensor, last: float) -> None:
        self.times, self.baseline, self.risk, self.last = times, baseline, risk, last

    def at(self, times: Tensor) -> Tensor:
        """Return survival probabilities [S, N, T]."""
        if float(times.max()) > self.last:
            raise ValueError(
                f"a time is {float(times.max()):g}, and the last time of the client {self.last:g}; "
                "expected times up to it, as the baseline hazard is unknown afterwards"
            )
        place = torch.searchsorted(self.times, times, right=True)
        whole = torch.nn.functional.pad(self.baseline, (1, 0))  # 0 before the first event
        return (-whole[:, None, place] * self.risk[..., None]).exp()

    def mean_until(self, tau: float) -> Tensor:
        """Return restricted means [S, N]."""
        end = torch.tensor([tau], dtype=torch.float64)
        inner = self.times[self.times < tau]
        knots = torch.cat([torch.zeros(1).to(end), inner, end])
        steps = knots.diff()
        self.at(end)
        return self.at(knots[:-1]) @ steps


def _values(
    fitted: Any,
    rows: Any,
    client: str | None,
    draws: int | None,
    value: Callable[[Any], Tensor],
) -> dict[int, Tensor]:
    """Return a value of the survival curve of each new row at each draw, by the row's place."""
    method = regression_of(fitted)
    design: Design = method.design
    if design.family.support != "positive":
        raise ValueError(
            f"response {design.formula.response} is no time; expected a run of family exponential, "
            "weibull, lognormal, gamma or cox"
        )
    drawn = posterior_draws(fitted, draws)
    frame, owners = new_rows(design, drawn, rows, client)
    values: dict[int, Tensor] = {}
    for name in dict.fromkeys(owners):
        places = [place for place, owner in enumerate(owners) if owner == name]
        some = frame.iloc[places]
        curves = (
            part for curve in _curves(method, drawn, some, name) for part in value(curve).unbind(1)
        )
        values |= zip(places, curves, strict=True)
    return dict(sorted(values.items()))


def _curves(
    method: Any, drawn: RegressionDraws, frame: pd.DataFrame, client: str
) -> Iterator[_Law | _CoxCurve]:
    """Yield the survival curves of a client's rows, some rows at a time."""
    is_cox = method.design.family.kind == "cox"
    baseline = _baseline(method, drawn, client) if is_cox else None
    for begin in range(0, len(frame), ROWS_AT_ONCE):
        some = frame.iloc[begin : begin + ROWS_AT_ONCE]
        rows = run_program(method, drawn, some, client)
        if baseline is None:
            yield _Law(rows.response)
        else:
            times, hazard, last = baseline
            yield _CoxCurve(times, hazard, rows.eta[:, 0].exp(), last)


def _baseline(method: Any, drawn: RegressionDraws, client: str) -> tuple[Tensor, Tensor, float]:
    """Return event times of a client [K], draws of its cumulative hazard [S, K] and last time."""
    design: Design = method.design
    if client not in drawn.clients:
        raise ValueError(
            "a Cox model has no baseline hazard of a new client; expected the name of a client, or "
            "family weibull"
        )
    frame = design.clients.frames.get(client)
    if frame is None:
        raise ValueError(
            f"the baseline hazard of {client} would disclose its event times and the relative "
            "hazards of the rows at risk, which are not sent; expected a call at the client, or "
            "family weibull"
        )
    if "weights" in design.formula.columns:
        raise ValueError(
            "baseline hazards have no row weights; expected a regression without weights"
        )
    y, event = design.y(frame), design.response_column("event", frame)
    begin = np.full(len(y), -np.inf)
    if "entry" in design.formula.columns:
        begin = design.response_column("entry", frame)
    times, counts = np.unique(y[event > 0], return_counts=True)
    at_risk = (y[None] >= times[:, None]) & (begin[None] < times[:, None])  # [K, N]
    risk = run_program(method, drawn, frame, client).eta[:, 0].exp()  # [S, N]
    rate = risk @ tensor(at_risk.T)
    shape = tensor(counts).expand(rate.shape)
    with lent(stream(drawn.seed, Stream.ROWS, client)):
        steps = torch._standard_gamma(shape) / rate
    return tensor(times), steps.cumsum(-1), float(y.max())


def _times(name: str, times: Sequence[float] | np.ndarray) -> Tensor:
    """Return times as a tensor; raise ValueError if they are invalid."""
    values = np.asarray(times, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{name} is {times!r:.60}; expected times of at least 0, such as 365.0")
    return tensor(values)
