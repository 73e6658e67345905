"""Weakly informative priors, scaled by sums over clients, and their replacement by name.

The defaults are those of rstanarm (Gabry and Goodrich, "Prior Distributions for rstanarm Models"),
with the scales of groups as in Bambi (Capretto et al., Journal of Statistical Software 2022). S is
the standard deviation of the response, or 1 for families with other links, and s_j that of column
j, over the rows of all clients:

    b_j                 Normal(0, 2.5 S / s_j)
    Intercept           Normal(m, 2.5 S), at the mean of all columns; m is the link of the mean
                        response, or 0 for logit links
    sd of a group       HalfNormal(2.5 S / s_j), with 1 for s_j of the intercept
    sd of a smooth      HalfNormal(2.5 S), of the part of s(x) that is no line
    sd of gp(x)         HalfNormal(2.5 S); its length scale InverseGamma(3, 8.4 times the smallest
                        one that its sines represent), of which 1% is below the smallest one
    zeta of mo(x)       Dirichlet(1, ..., 1)
    cs(x)               Normal(0, 2.5 / s_j) at each threshold
    correlations        LKJ(1)
    sigma               Exponential(1 / S)
    Intercept           of log hazards: Normal(-k log u, 2.5), where u is the mean time and k the
                        shape, which is 1 for exponential; for weibull mean and variance are those
                        over the prior of k: Normal(-2 log u, sqrt(2.5^2 + 2 log^2 u))
    nu, shape, phi      Gamma(2, 0.1); shape of weibull Gamma(2, 1)
    zi, hu, zoi, coi    Beta(1, 1)
    alpha               Normal(0, 4)
    cutpoints           first Normal(0, 5), and differences HalfNormal(2.5); of sratio and acat,
                        whose cut points have no order, Normal(0, 5) each

Where a parameter has a formula, its linear predictor (of log sigma, log nu, log shape, log phi,
logit zi, hu, zoi, coi and quantile, and of alpha) has the priors of the location with S = 1, and
m = log S for sigma and 0 for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch

from pyrofl.arguments import check_name
from pyrofl.models.regression.columns import Columns
from pyrofl.models.regression.design import Design, GroupTerm
from pyrofl.models.regression.families import Family
from pyrofl.models.regression.rows import moments_of
from pyrofl.models.regression.smooths import Block, CategorySpecific, Monotonic, Process

COEFFICIENT_SCALE = 2.5  # in standard deviations of the response per deviation of the column
LENGTH_RATE = 8.4  # quantile .99 of Gamma(3, 1)
POSITIVE = tuple(f"dist.{n}(" for n in ("HalfNormal", "Exponential", "Gamma", "InverseGamma"))
MEANS_LABEL = "means and spreads"  # of the reports on the columns of the design
Given = Mapping[str, Any]
"""Name of a parameter -> Pyro distribution of single numbers, or concentration of an LKJ prior."""


@dataclass(frozen=True)
class Coefficients:
    """Priors of the population coefficients of one linear predictor, without the intercept.

    Attributes:
        means: column -> its mean over all rows.
        priors: column -> prior, as Pyro code.
    """

    means: dict[str, float]
    priors: dict[str, str]

    @property
    def normal(self) -> list[str]:
        """Columns with normal priors."""
        return [n for n, code in self.priors.items() if code.startswith("dist.Normal(")]


@dataclass(frozen=True)
class Priors:
    """Priors of a regression, as Pyro code.

    Attributes:
        predictors: parameter of the family, or "" for the location -> priors of coefficients.
        others: name of a site -> prior, in the program's order.
    """

    predictors: dict[str, Coefficients]
    others: dict[str, str]
    scales: dict[str, list[float]] = field(default_factory=dict)

    def text(self) -> str:
        """Return all priors, one per line."""
        prior_texts = {
            printed(parameter, name): code
            for parameter, coefficients in self.predictors.items()
            for name, code in coefficients.priors.items()
        }
        prior_texts |= self.others
        return "\n".join(
            f"{name} ~ {code.replace('dist.', '')}" for name, code in prior_texts.items()
        )


def make_priors(design: Design, link: str, user_priors: Given) -> Priors:
    """Return the priors of a design; those in `user_priors` replace the defaults.

    Raises:
        ValueError: if a name is unknown, or a prior is not a distribution of single numbers.
    """
    family = design.family
    user_priors = _by_name(design, user_priors)
    moments = design_moments(design, link)
    y_mean, y_scale = _response(design, link, moments)
    y_spread = _spread_of_unit(design, moments)
    predictors: dict[str, Coefficients] = {}
    others: dict[str, str] = {}
    for parameter, columns in design.predictors.items():
        scale = 1.0 if parameter else y_scale
        predictors[parameter] = _coefficients(
            parameter, columns, moments[predictor_of(parameter)], scale, user_priors
        )
        for name, block in columns.blocks.items():
            others |= _of_block(name, block, parameter, scale, moments, columns, user_priors)
        if not columns.has_intercept or family.kind in ("ordinal", "cox"):
            continue
        middle, width = y_mean, float(np.hypot(COEFFICIENT_SCALE * scale, y_spread))
        if parameter:
            middle = float(np.log(y_scale)) if parameter == "sigma" else 0.0
            width = COEFFICIENT_SCALE
        usual, site = (
            f"dist.Normal({_short(middle)}, {_short(width)})",
            of("Intercept", parameter),
        )
        others[site] = _chosen(usual, user_priors, site)
    if family.kind == "ordinal":
        for site in cut_sites(family):
            usual = "dist.HalfNormal(2.5)" if site == "cut_gaps" else "dist.Normal(0.0, 5.0)"
            others[site] = _chosen(usual, user_priors, site)
    scales = {}
    for one in design.groups:
        _, square = moments[term_of(one)]
        spread = [1.0] * one.columns.has_intercept + np.sqrt(square).tolist()
        spread = np.repeat(spread, len(one.entries) // len(spread)).tolist()
        size = 1.0 if one.parameter else y_scale
        scales[one.name] = [float(_short(COEFFICIENT_SCALE * size / (s or 1.0))) for s in spread]
        values = scales[one.name][0] if len(spread) == 1 else scales[one.name]
        site = f"sd_{one.name}"
        if site in others:
            raise ValueError(
                f"there are two parameters named {site}; expected another name for {one.name}"
            )
        others[site] = _chosen(f"dist.HalfNormal({values})", user_priors, site, "sd")
        if one.is_correlated:
            at = _concentration(user_priors, f"corr_{one.name}", "corr", kind="an LKJ")
            others[f"corr_{one.name}"] = f"dist.LKJCholesky({len(spread)}, {at})"
    for name, code in design.auxiliary.items():
        if not code:
            raise ValueError(
                f"parameter {name} has no value; expected a number or a formula: "
                f"{{'{design.formula.response}': 'formula', '{name}': 0.5}}"
            )
        others[name] = _chosen(code.replace("1 / S", _short(1 / y_scale)), user_priors, name)
    return Priors(predictors, others, scales)


def of(site: str, parameter: str) -> str:
    """Return the name of a site of a linear predictor, such as "b" or "b_sigma"."""
    return f"{site}_{parameter}" if parameter else site


def printed(parameter: str, term: str) -> str:
    """Return the name of a coefficient in tables, such as "b[x]" or "b_sigma[x]"."""
    return f"{of('b', parameter)}[{term}]"


def _coefficients(
    parameter: str, columns: Columns, moments: tuple[Any, Any], scale: float, user_priors: Given
) -> Coefficients:
    """Return the priors of the coefficients of one linear predictor, of the given scale."""
    means, deviations = moments[0], np.sqrt(moments[1])
    priors = {}
    for name, deviation in zip(columns.labels, deviations.tolist(), strict=True):
        if name in columns.curves:
            continue  # its coefficient has the scale of the smooth function
        usual = f"dist.Normal(0.0, {_short(COEFFICIENT_SCALE * scale / (deviation or 1.0))})"
        priors[name] = _chosen(usual, user_priors, printed(parameter, name), of("b", parameter))
    return Coefficients(dict(zip(columns.labels, means.tolist(), strict=True)), priors)


def _of_block(
    name: str,
    block: Block,
    parameter: str,
    scale: float,
    moments: Mapping[str, Any],
    columns: Columns,
    user_priors: Given,
) -> dict[str, str]:
    """Return the priors of the scales, or so, of a term whose columns have one prior, by site."""
    transform = block.transform
    if isinstance(transform, Monotonic):
        site = of(f"zeta_{name}", parameter)
        at = _concentration(user_priors, site, kind="a Dirichlet")
        return {site: f"dist.Dirichlet({[at] * transform.steps})"}
    if isinstance(transform, CategorySpecific):
        site, place = of(name, parameter), columns.labels.index(block.labels[0])
        deviation = float(np.sqrt(moments[predictor_of(parameter)][1][place])) or 1.0
        usual = f"dist.Normal(0.0, {_short(COEFFICIENT_SCALE * scale / deviation)})"
        return {site: _chosen(usual, user_priors, site, of("b", parameter))}
    site = of(f"sd_{name}", parameter)
    usual = f"dist.HalfNormal({_short(COEFFICIENT_SCALE * scale)})"
    priors = {site: _chosen(usual, user_priors, site, "sd")}
    if isinstance(transform, Process):
        site = of(f"lscale_{name}", parameter)
        usual = f"dist.InverseGamma(3.0, {_short(LENGTH_RATE * transform.shortest)})"
        priors[site] = _chosen(usual, user_priors, site)
    return priors


def block_sites(name: str, block: Block, parameter: str) -> list[str]:
    """Return the names of the parameters of a term whose columns have one prior."""
    prefixes = {"s": ["sd_"], "gp": ["sd_", "lscale_"], "mo": ["zeta_"], "cs": [""]}
    return [of(f"{prefix}{name}", parameter) for prefix in prefixes[block.transform.name]]


def cut_sites(family: Family) -> list[str]:
    """Return the names of the sites of the cut points of a family with ordered categories."""
    return ["cut_first", "cut_gaps"] if family.is_ordered else ["cuts"]


def _concentration(user_priors: Given, *names: str, kind: str) -> float:
    """Return the given concentration of a prior by the first of its names, or 1."""
    at = next((user_priors[name] for name in names if name in user_priors), 1.0)
    if isinstance(at, bool) or not isinstance(at, int | float) or not at > 0:
        raise ValueError(
            f"prior of {names[0]} is {at!r}; expected the concentration of {kind} prior, a number "
            "above 0"
        )
    return float(at)


def _by_name(design: Design, user_priors: Given) -> dict[str, Any]:
    """Return priors by known names; x is another name of b[x], as tables of results print it.

    Raises:
        ValueError: if a name is unknown, or both names of a coefficient are given.
    """
    names = _names(design)
    terms = {name: term for term in design.terms if (name := printed("", term)) in names}
    of_term = {term: name for name, term in terms.items()}
    priors_by_name: dict[str, Any] = {}
    for name, prior in user_priors.items():
        check_name(name, [*of_term, *names], "prior")
        full = name if name in names else of_term[name]
        if full in priors_by_name:
            raise ValueError(f"{terms[full]} and {full} are one coefficient; expected one prior")
        priors_by_name[full] = prior
    return priors_by_name


def _names(design: Design) -> list[str]:
    """Return the names of all parameters that have a prior."""
    names = [*design.auxiliary]
    for parameter, columns in design.predictors.items():
        terms = [term for term in columns.labels if term not in columns.curves]
        names += [printed(parameter, term) for term in terms]
        names += [of("b", parameter), of("Intercept", parameter)]
        for name, block in columns.blocks.items():
            names += ["sd", *block_sites(name, block, parameter)]
    names += cut_sites(design.family) if design.family.kind == "ordinal" else []
    for one in design.groups:
        names += ["sd", f"sd_{one.name}", "corr", f"corr_{one.name}"]
    return names


def predictor_of(parameter: str) -> str:
    """Return the name of the columns of a linear predictor in `design_moments`."""
    return f"columns of {parameter or 'the location'}"


def term_of(one: GroupTerm) -> str:
    """Return the name of the columns of a group term in `design_moments`."""
    text = f"({one.group.text} | {one.group.name})"
    return f"{text} of {one.parameter}" if one.parameter else text


def design_moments(design: Design, link: str) -> dict[str, tuple[Any, Any]]:
    """Return means and mean square deviations of the columns, by their term, and of the response.

    They are of the rows of all clients, by one exchange.
    """
    is_log = design.family.support == "positive" and link == "identity"

    def arrays(frame: pd.DataFrame) -> dict[str, Any]:
        """Return the design's columns [N, p] of a table by term, and its response [N]."""
        predictors = design.predictors.items()
        columns = {predictor_of(name): part.evaluate(frame) for name, part in predictors}
        columns |= {term_of(one): one.columns.evaluate(frame) for one in design.groups}
        if design.family.center != "zero":
            y = design.y(frame)
            if "upper" in design.formula.columns:  # of events from time 0 on, half of the bound
                y = np.where(y > 0, y, design.response_column("upper", frame) / 2)
            columns["response"] = np.log(y) if is_log else y
        return columns

    return moments_of(design.clients, MEANS_LABEL, arrays)


def _response(design: Design, link: str, moments: Mapping[str, Any]) -> tuple[float, float]:
    """Return location and scale of the linear predictor's prior, by sums over clients."""
    family = design.family
    if family.center == "zero":
        return 0.0, 1.0
    mean, square = moments["response"]
    if family.center == "time":
        return float(-_shape(design)[0] * np.log(mean)), 1.0
    middle = float(np.log(max(mean, 0.1))) if link == "log" else float(mean)
    if link == "identity":
        return middle, float(np.sqrt(square)) or 1.0
    return middle, 1.0


def _spread_of_unit(design: Design, moments: Mapping[str, Any]) -> float:
    """Return the sd of a log hazard's intercept that follows from the unit of time; else 0."""
    if design.family.center != "time":
        return 0.0
    return float(_shape(design)[1] * abs(np.log(moments["response"][0])))


def _shape(design: Design) -> tuple[float, float]:
    """Return mean and sd of the shape of times, by its prior Gamma(2, 1) if it is not fixed."""
    if "shape" not in design.family.auxiliary:
        return 1.0, 0.0
    value = design.formula.values.get("shape")
    return (2.0, 2.0**0.5) if value is None else (value, 0.0)


def _chosen(usual: str, user_priors: Given, *names: str) -> str:
    """Return the code of a given prior by the first of its names, or the usual one."""
    for name in names:
        if name in user_priors:
            code = code_of(user_priors[name], name)
            _refuse_support(user_priors[name], usual, name)
            return code
    return usual


def _refuse_support(prior: Any, usual: str, name: str) -> None:
    """Raise ValueError if a prior admits values that the parameter cannot have."""
    support: Any = dist.constraints.real
    kind = "numbers"
    if usual.startswith(POSITIVE):
        support, kind = dist.constraints.positive, "positive numbers"
    if usual.startswith("dist.Beta"):
        support, kind = dist.constraints.unit_interval, "numbers from 0 to 1"
    drawn = torch.tensor([-1.0]) if isinstance(prior, dist.ImproperUniform) else prior.sample((99,))
    if prior.support.is_discrete or not bool(support.check(drawn).all()):
        raise ValueError(
            f"prior of {name} is a {type(prior).__name__}; expected a continuous distribution of "
            f"{kind}"
        )


def code_of(prior: Any, name: str) -> str:
    """Return Pyro code of a distribution of single numbers."""
    kinds = getattr(prior, "arg_constraints", None)
    kind = type(prior).__name__
    if isinstance(prior, dist.ImproperUniform):
        return "dist.ImproperUniform(dist.constraints.real, (), ())"
    if kinds is None or not hasattr(dist, kind) or not hasattr(prior, "log_prob"):
        raise ValueError(
            f"prior of {name} is {prior!r}; expected a distribution such as dist.Normal(0.0, 1.0)"
        )
    if tuple(prior.batch_shape) or tuple(prior.event_shape):
        raise ValueError(
            f"prior of {name} is of shape {list(prior.batch_shape + prior.event_shape)}; expected "
            "a distribution of single numbers, such as dist.Normal(0.0, 1.0)"
        )
    parts = [f"{n}={_number(getattr(prior, n))}" for n in kinds if n not in ("logits",)]
    return f"dist.{kind}({', '.join(parts)})"


def _number(value: Any) -> str:
    digits = 7 if torch.is_tensor(value) and value.dtype == torch.float32 else 15
    return repr(float(f"{float(value):.{digits}g}"))


def _short(value: float) -> str:
    """Return a number as code, with the digits that a prior needs."""
    return repr(float(f"{value:.4g}"))
