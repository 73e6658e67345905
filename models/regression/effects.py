"""Results of a regression: ratios, effects of groups, predictions and conditional effects.

All functions take a run of `pyrofl.regression`, or several with different seeds, and use posterior
draws that `to_arviz` has corrected by importance sampling. Effects are from the same draws as
`Run.summary`, which has the parameters that all clients share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pyrofl.arguments import Count, ProperShare, check_name, checked
from pyrofl.inference.evaluation.predictions import Predictions
from pyrofl.models.regression.averages import marginal, r2, row_draws, standardize
from pyrofl.models.regression.design import Design, GroupTerm, level_text
from pyrofl.models.regression.prediction import (
    NEW,
    RegressionDraws,
    mean_of_rows,
    posterior_draws,
    predict_rows,
    read_table,
    regression_of,
    run_program,
)
from pyrofl.models.regression.priors import of
from pyrofl.models.regression.program import coefficients
from pyrofl.models.regression.ratio_figures import caterpillar, funnel
from pyrofl.models.regression.result_tables import interval_table, ratio_table
from pyrofl.models.regression.smooths import CategorySpecific, Monotonic
from pyrofl.models.regression.survival_curves import restricted_mean, survival

__all__ = [
    "caterpillar",
    "conditional",
    "forest",
    "funnel",
    "groups",
    "marginal",
    "predict",
    "r2",
    "ratios",
    "restricted_mean",
    "row_draws",
    "standardize",
    "survival",
]

# Standard deviations around the mean, over which a conditional effect is shown.
EFFECT_RANGE_SDS = 2.0


@checked
def ratios(fitted: Any, prob: ProperShare = 0.95, draws: Count | None = None) -> pd.DataFrame:
    """Return odds, rate or hazard ratios: the posterior of exp(b) for each coefficient.

    Args:
        fitted: a run of a regression, or several.
        prob: probability of the central interval.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        A row for each coefficient but the intercept, with the columns median, the ends of the
        interval, and p_above_1, the posterior probability of a ratio above 1. The name of the
        index is that of the ratio, such as "odds ratio".

    Raises:
        ValueError: if exp(b) has no meaning for the family and the link.

    Examples:
        >>> import pandas as pd
        >>> import pyrofl
        >>> from pyrofl import federations
        >>> bern = pd.DataFrame({"died": [0, 0, 1, 1], "age": [50.0, 60.0, 55.0, 70.0]})
        >>> basel = pd.DataFrame({"died": [0, 1, 0, 1], "age": [45.0, 65.0, 60.0, 75.0]})
        >>> tables = federations.from_frames({"bern": bern, "basel": basel})
        >>> method = pyrofl.regression("died ~ age", tables, family="bernoulli")
        >>> run = pyrofl.fit(method, tables, progress=False)
        >>> table = ratios(run)
        >>> table.index.name, table.index.tolist()
        ('odds ratio', ['age'])
    """
    method = regression_of(fitted)
    name = _ratio_name(method)
    drawn = posterior_draws(fitted, draws)
    every = coefficient_draws(method, drawn).items()
    values = {term: value for term, value in every if term.partition(" (")[0] != "Intercept"}
    table = ratio_table(values, prob)
    table.index.name = name
    return table


def _ratio_name(method: Any) -> str:
    """Return the name of exp of a coefficient, such as "odds ratio"; raise ValueError if none."""
    name: str | None = method.design.family.ratio.get(method.link)
    if name is None:
        raise ValueError(
            f"link {method.link} of this family has no ratios; expected a log or logit link, or "
            "use Run.summary for differences"
        )
    return name


@checked
def groups(
    fitted: Any,
    group: str | None = None,
    *,
    total: bool = False,
    ratio: bool = False,
    prob: ProperShare = 0.95,
    draws: Count | None = None,
) -> pd.DataFrame:
    """Return effects of groups, as ranef() of lme4, or with total=True coefficients, as coef().

    With ratio=True they are on the scale of `ratios`: an odds ratio of 1.5 of a client's intercept
    means that its odds are 1.5 times those of a client whose effect is 0.

    Args:
        fitted: a run of a regression, or several.
        group: grouping factor, such as "client" or "client:ward"; None is all.
        total: whether to add the population's coefficient of the same term, if there is one.
        ratio: whether to return ratios, exp of the effects; those of parameters are left out.
        prob: probability of the central interval.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        A row for each factor, level and term, with mean, sd, median and the ends of the interval;
        of ratios median, interval and p_above_1, as `ratios` returns them.

    Raises:
        ValueError: if the regression has no group terms, or not this one, or exp of an effect has
            no meaning for the family and the link.
    """
    method = regression_of(fitted)
    name = _ratio_name(method) if ratio else ""
    design: Design = method.design
    names = [one.group.name for one in design.groups]
    if not names:
        raise ValueError("the formula has no group terms; expected one, such as (1 | client)")
    if group is not None:
        check_name(group, names, "grouping factor")
    drawn = posterior_draws(fitted, draws)
    values = {}
    for one in design.groups:
        if group not in (None, one.group.name) or (ratio and one.parameter):
            continue
        for level, term, effect in _effects(one, drawn, design.client):
            more = _population(method, drawn, term, one.parameter) if total else 0.0
            values[one.group.name, level, term_label(one, term)] = effect + more
    table = ratio_table(values, prob) if ratio else interval_table(values, prob)
    table.index = pd.MultiIndex.from_tuples(values, names=["group", "level", "term"])
    table.attrs["ratio"] = name
    return table


@checked
def forest(
    fitted: Any,
    term: str = "Intercept",
    group: str | None = None,
    *,
    total: bool = True,
    prob: ProperShare = 0.95,
    draws: Count | None = None,
) -> Any:
    """Plot a coefficient of every client or level with its interval, and that of the population.

    Args:
        fitted: a run of a regression, or several.
        term: coefficient, such as "Intercept" or "age".
        group: grouping factor; None is the first with this term.
        total: whether to show coefficients of the levels rather than deviations from the
            population.
        prob: probability of the intervals.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: if no group has this term.
    """
    from pyrofl import figures

    method = regression_of(fitted)
    terms = [
        (one, term_label(one, entry), entry)
        for one in method.design.groups
        for entry in one.entries
    ]
    having = {one.group.name: (one, entry) for one, label, entry in terms if label == term}
    if not having:
        labels = dict.fromkeys(label for _, label, _ in terms)
        raise ValueError(
            f"no group has the term {term!r}; expected one of {', '.join(labels) or 'none'}"
        )
    name = next(iter(having)) if group is None else group
    check_name(name, having, f"grouping factor of {term}:")
    table = groups(fitted, name, total=total, prob=prob, draws=draws).xs(term, level="term")
    rows = [table.iloc[:, [0, 3, 4]].set_axis(table.index.get_level_values("level"))]
    if total:
        one, entry = having[name]
        value = _population(method, posterior_draws(fitted, draws), entry, one.parameter)
        if torch.is_tensor(value):
            rows.append(interval_table({"population": value}, prob).iloc[:, [0, 3, 4]])
    every = pd.concat(rows)
    summary = tuple(every.to_numpy().T)
    title = f"{term} of {name}" if total else f"{term}: deviation of {name}"
    return figures.forest({f"{prob:.0%} interval": summary}, list(map(str, every.index)), title)


@checked
def predict(
    fitted: Any, rows: Any, client: str | None = None, draws: Count | None = None
) -> Predictions:
    """Predict responses of new rows, of known clients or new ones; `Run.predict` calls it.

    A column of the rows that identifies the client, as in training, gives each row's client.

    Rows may have levels of grouping factors without a training row. Effects of these levels, and of
    a new client, are drawn from the distribution of their group, which makes intervals wider.

    Args:
        fitted: a run of a regression, or several.
        rows: data frame or dict of columns, with the columns of the formula's right-hand side.
        client: name of a client; None is a new client, unless the rows name their clients.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        Means, standard deviations and quantiles of the responses, or probabilities of classes.

    Raises:
        ValueError: if a column is missing or of another type, a population term has an unknown
            level, the client is unknown or the rows name another one, or the family is cox.
    """
    return predict_rows(fitted, rows, client, draws)


@checked
def conditional(
    fitted: Any,
    column: str,
    by: str | None = None,
    *,
    at: Mapping[str, Any] | None = None,
    client: str | None = None,
    points: Count = 50,
    prob: ProperShare = 0.95,
    draws: Count | None = None,
) -> pd.DataFrame:
    """Return the expected response as a column varies, with other columns fixed.

    Other numbers have their mean over the rows of all clients, rounded if they are levels of mo(x),
    other categories their first level, and a number of trials is 1. Effects of groups are 0, unless
    a client is named. For a Cox model, the response is the log relative hazard.
    `pyrofl.figures.conditional` plots the result.

    Args:
        fitted: a run of a regression, or several.
        column: column of the formula: all levels of a category or of mo(x), or numbers from two
            standard deviations below to two above the mean, within the range of all rows.
        by: second column: all levels, or a number's mean and one standard deviation around it.
        at: column -> value for other columns, or a list of values for the two. Grouping factors
            have an effect only if a client is named.
        client: client whose effects are used, with the first level of further groups; None for
            effects of 0.
        points: number of values of a numeric column.
        prob: probability of the band.
        draws: posterior draws of each run; None is 2,000 in all.

    Returns:
        A row for each value of `column` (and of `by`), and for each class of categorical
        responses, with mean, median and the ends of the interval. Attributes: column, by, response.

    Raises:
        ValueError: if a column is unknown, or a value is of another type.

    Examples:
        >>> import pandas as pd
        >>> import pyrofl
        >>> from pyrofl import federations
        >>> bern = pd.DataFrame({"y": [1.0, 2.0, 2.5, 4.0], "x": [0.0, 1.0, 2.0, 3.0]})
        >>> tables = federations.from_frames({"bern": bern, "basel": bern + 0.5})
        >>> run = pyrofl.fit(pyrofl.regression("y ~ x", tables), tables, progress=False)
        >>> conditional(run, "x", points=3)["x"].round(2).tolist()
        [0.0, 1.75, 3.5]
    """
    method = regression_of(fitted)
    design: Design = method.design
    drawn = posterior_draws(fitted, draws)
    if client is not None:
        check_name(client, drawn.clients, "client")
    fixed_values = dict(at or {})
    shown = [column, *([by] if by else [])]
    factors = {n for one in design.groups for n in one.group.factors} - {*design.clients.levels}
    for name in [*shown, *fixed_values]:
        some = [n for n in design.needed if n not in factors or (client and name not in shown)]
        check_name(name, some, "column of the formula:")
    values = {}
    ranges = (np.linspace(-EFFECT_RANGE_SDS, EFFECT_RANGE_SDS, points), np.arange(-1, 2))
    for steps, name in zip(ranges, shown, strict=False):
        some = fixed_values.pop(name) if name in fixed_values else _values(design, name, steps)
        values[name] = [some] if np.ndim(some) == 0 else list(some)
    for name, value in fixed_values.items():
        if np.ndim(value):
            raise ValueError(f"at has {value!r} for {name}, which is fixed; expected one value")
    fixed = {
        n: fixed_values.get(n, _middle(design, n, client)) for n in design.needed if n not in values
    }
    grid = pd.MultiIndex.from_product(values.values(), names=shown).to_frame(index=False)
    frame = read_table(design, grid.assign(**fixed), client or NEW)
    rows = run_program(method, drawn, frame, client or NEW, "client" if client else "none")
    mean = mean_of_rows(rows)  # [S, N] or [S, N, K]
    response = design.formula.response
    if mean.dim() > 2 and mean.shape[-1] == 2:
        mean = mean[..., 1]
        response = f"P({response} = {design.answers[1] if design.answers else 1})"
    if mean.dim() > 2:
        classes = list(map(str, design.answers))
        grid = grid.loc[grid.index.repeat(len(classes))].reset_index(drop=True)
        grid["class"] = classes * (len(grid) // len(classes))
        response = f"probability of {response}"
    table = interval_table(dict(enumerate(mean.flatten(1).T)), prob).drop(columns="sd")
    table_of_rows = pd.concat([grid, table], axis=1)
    if design.family.kind == "cox":
        response = "log relative hazard"
    table_of_rows.attrs |= {"column": column, "by": by, "response": response}
    return table_of_rows


def _values(design: Design, name: str, steps: Sequence[float] | np.ndarray) -> list[Any]:
    """Return the levels of a column, or numbers by steps in standard deviations from the mean."""
    if name in design.clients.levels:
        return list(design.clients.levels[name])
    if design.clients.template[name].dtype.kind == "b":
        return [False, True]
    number = design.clients.numbers[name]
    if term := _monotonic(design).get(name):
        levels = list(range(low := round(term.low), low + term.steps + 1))
        return levels if len(steps) > 1 else [round(number["mean"])]
    values = np.array([float(number["mean"] + step * number["square"] ** 0.5) for step in steps])
    inside = np.clip(
        values, number["low"], number["high"]
    )  # beyond them, a logarithm may not be defined
    if steps[0] == -EFFECT_RANGE_SDS and not np.array_equal(inside, values):
        inside = np.linspace(inside[0], inside[-1], len(values))
    return [float(value) for value in inside]


def _monotonic(design: Design) -> dict[str, Monotonic]:
    """Return the monotonic effects by their columns."""
    blocks = [one for part in design.predictors.values() for one in part.blocks.values()]
    effects = ((one.line[3:-1], one.transform) for one in blocks)
    return {name: effect for name, effect in effects if isinstance(effect, Monotonic)}


def _middle(design: Design, name: str, client: str | None) -> Any:
    """Return the value of a column that does not vary."""
    if any(name in columns for columns in design.further.values()):
        return 1.0
    for one in design.groups:
        factors = one.factors(design.client)
        if one.kind != "client" and name in factors and name not in design.clients.levels:
            levels = one.levels.get("" if one.kind == "shared" else client or "", ("",))
            return levels[0][factors.index(name)] if len(factors) > 1 else levels[0]
    return _values(design, name, [0.0])[0]


def coefficient_draws(
    method: Any, drawn: RegressionDraws, parameter: str = ""
) -> dict[str, Tensor]:
    """Return draws [S] of the population's coefficients by name, with the intercept's first.

    Args:
        method: the regression.
        drawn: posterior draws.
        parameter: parameter of the family with a formula; "" is the location.
    """
    design: Design = method.design
    coefs, sites = method.chosen.predictors[parameter], coefficients(method.chosen, parameter)
    answers = [f" ({level})" for level in design.answers[1:]]
    many = design.family.kind == "categorical"

    def each(term: str, value: Tensor) -> dict[str, Tensor]:
        if not many:
            return {term: value}
        return {f"{term}{a}": v for a, v in zip(answers, value.unbind(-1), strict=True)}

    draws_by_name: dict[str, Tensor] = {}
    if (intercept := of("Intercept", parameter)) in drawn.sites:
        draws_by_name |= each("Intercept", drawn.sites[intercept])
    for term in coefs.priors:
        if term in sites:
            draws_by_name |= each(term, drawn.sites[sites[term]])
        else:
            value = drawn.sites[of("b", parameter)]
            draws_by_name |= each(term, value[..., coefs.normal.index(term)])
    for name, block in design.predictors[parameter].blocks.items():
        if isinstance(block.transform, CategorySpecific):
            steps = enumerate(drawn.sites[name].unbind(-1))
            draws_by_name |= {f"{name}[{step}]": value for step, value in steps}
    return draws_by_name


def _population(
    method: Any, drawn: RegressionDraws, term: str, parameter: str = ""
) -> Tensor | float:
    """Return draws [S] of the population's coefficient of a term; 0 if there is none."""
    return coefficient_draws(method, drawn, parameter).get(term, 0.0)


def term_label(one: GroupTerm, term: str) -> str:
    """Return the name of a term of a group in tables, such as "x" or, of sigma, "sigma_x"."""
    return f"{one.parameter}_{term}" if one.parameter else term


def _effects(
    one: GroupTerm, drawn: RegressionDraws, client: str
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield level, term and draws [S] of each effect of a group."""
    value, k = drawn.sites[f"r_{one.name}"], len(one.entries)
    if k == 1 and one.kind != "shared":
        value = value[..., None]
    if one.kind == "client":
        levels = [(name, value[:, place]) for place, name in enumerate(drawn.clients)]
    elif one.kind == "shared":
        levels = [(level_text(level), value[:, j]) for j, level in enumerate(one.levels[""])]
    else:
        levels = [
            (f"{name}:{level_text(level)}", value[:, place, j])
            for place, name in enumerate(drawn.clients)
            for j, level in enumerate(one.levels[name])
        ]
    for level, effect in levels:
        for term, draws in zip(one.entries, effect.unbind(-1), strict=True):
            yield level, term, draws
