"""Bayesian multilevel regression from a formula over federated clients."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from pyrofl.arguments import checked
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.models import pvi
from pyrofl.models.hierarchical import hierarchical
from pyrofl.models.regression.data_checks import warn_of_design
from pyrofl.models.regression.design import Design, make_design
from pyrofl.models.regression.families import DOMAINS, LINKS, family_of
from pyrofl.models.regression.formula import read_all, with_weights
from pyrofl.models.regression.method import Regression
from pyrofl.models.regression.ordinal import check_order
from pyrofl.models.regression.priors import make_priors
from pyrofl.models.regression.program import compile_program, source
from pyrofl.models.regression.rows import frames_of
from pyrofl.models.regression.table_checks import warn_of_tables

__all__ = ["Regression", "regression"]


@checked
def regression(
    formula: str | Mapping[str, str | float],
    data: Federation | Tables,
    *,
    family: str = "gaussian",
    link: str | None = None,
    priors: Mapping[str, Any] | None = None,
    weights: str | None = None,
    center: bool = True,
    client: str = "client",
    namespace: Mapping[str, Any] | None = None,
) -> Regression:
    """Build a Bayesian multilevel regression from a formula, as of lme4, brms and Bambi.

    Contrasts, centering, scaling, polynomials and splines are those of the pooled rows, which
    clients agree on by sums, unions of levels and counts. The generated program is fitted by
    `pyrofl.hierarchical`: likelihood factors where they can, otherwise PVI.

    Args:
        formula: such as "y ~ age * treat + bs(dose, df=4) + (1 + age | client)", in the syntax of
            the library formulae. A response may be p(successes, trials) or censored(time, event),
            with event 1 for an event and 0 for a censored time. `(x || g)` has no correlations,
            and `(1 | a/b)` is `(1 | a) + (1 | a:b)`. offset(x) adds a known column.
            `y | se(error)` has known standard errors (with `sigma=True`, further variance),
            `y | weights(w)` row weights, and `y | trials(n)` is p(y, n). A dict of formulas, such
            as {"y": "y ~ x + (1 | client)", "sigma": "~ x"}, also has one for parameters of the
            family, on the scale of the logarithm (sigma, nu, shape, phi), the logit (zi, hu, zoi,
            coi, quantile) or its own (alpha). A number fixes a parameter:
            {"y": "y ~ x", "quantile": 0.9} with family="asym_laplace" is a quantile regression.
        data: `federations.from_frames({client: frame})`, or a federation with named numeric
            features.
        family: name of the family, one of `families.FAMILIES`.
        link: name of the link; None is the usual one.
        priors: parameter -> distribution of single numbers that replaces the default, by the
            names that `Regression.priors` prints, such as "b[age]" (or "age") and "sd_client".
            "b" and "sd" replace those of all coefficients and of all groups, "corr" the
            concentration of LKJ priors.
        weights: column of row weights, the exponents of their likelihoods.
        center: whether the prior of the intercept is that at the mean of all columns, as in brms
            and rstanarm, rather than at 0.
        client: name of the column that identifies the client; tables need not have it.
        namespace: name -> function or value that the formula may use, such as knots of bs();
            np is numpy.

    Returns:
        A method for `pyrofl.fit(method, data, rounds=4)`; with normal responses, one round.

    Raises:
        ValueError: if the formula cannot be read, a column or name is unknown, a response is not
            in the family's support, or an ordinal response is text without a declared order.

    Warns:
        UserWarning: if rows are dropped because of missing values, only one client has a level,
            a column is constant, aliased or separates the responses, or ordinal responses have
            gaps; if clients seem to use different units or spellings, numbers seem to stand for
            missing values, or a predictor determines the response.

    Examples:
        >>> import pandas as pd
        >>> from pyrofl import federations
        >>> frames = {
        ...     name: pd.DataFrame({"y": [1.0 + k, 2.5 + k, 2.0 + k], "x": [0.0, 1.0, 2.0]})
        ...     for k, name in enumerate(["bern", "basel", "chur"])
        ... }
        >>> data = federations.from_frames(frames)
        >>> method = regression("y ~ x + (1 | client)", data)
        >>> print(method.priors())
        b[x] ~ Normal(0.0, 3.146)
        Intercept ~ Normal(2.833, 2.569)
        sd_client ~ HalfNormal(2.569)
        sigma ~ Exponential(0.9733)
    """
    kind = family_of(family)
    named = kind.link(link)
    parts = with_weights(read_all(formula, kind.auxiliary), weights)
    design = make_design(parts, data, kind, client=client, namespace=namespace or {})
    _refuse_unsupported(design, family)
    if kind.kind == "ordinal":
        check_order(design.formula.response, frames_of(data, client))
    design.check_columns()
    design.check_responses()
    warn_of_tables(design, frames_of(data, client))
    warn_of_design(design)
    chosen = make_priors(design, named, priors or {})
    text, shared = source(design, chosen, named, f"family {family}, link {named}", center=center)
    prepared = design.federation()
    build = hierarchical if kind.is_smooth else pvi.hierarchical
    method = build(compile_program(text), prepared, shared=" ".join(shared))
    regression_fields: dict[str, Any] = {
        "design": design,
        "chosen": chosen,
        "text": text,
        "link": named,
        "center": center,
    }
    return Regression(**vars(method), **regression_fields)


def _refuse_unsupported(design: Design, family: str) -> None:
    """Raise ValueError for combinations that have no program yet."""
    kind, formula = design.family.kind, design.formula
    if design.family.column == "trials" and "trials" not in formula.columns:
        raise ValueError(
            f"family {family} needs the number of trials; expected p({formula.response}, trials) "
            "as the response"
        )
    for role in formula.columns:
        if role not in (design.family.column, "weights", *design.family.additions):
            raise ValueError(
                f"the response has a column of {role}, which family {family} does not read; "
                f"expected {formula.response} alone, or another family"
            )
    for name, value in formula.values.items():
        domain = DOMAINS[LINKS[name]]
        low, high = {"numbers": (-inf, inf), "positive numbers": (0, inf)}.get(domain, (0, 1))
        if not low < value < high:
            raise ValueError(f"{name} is {value:g}; expected {domain}")
    if (
        "sigma" in {*formula.parameters, *formula.values}
        and "se" in formula.columns
        and not formula.adds_sigma
    ):
        raise ValueError(
            f"sigma is given, but the standard errors are known; expected "
            f"se({formula.columns['se']}, sigma=True), or no sigma"
        )
    if kind == "cox" and not design.terms:
        raise ValueError(
            f"family {family} needs a predictor, as it leaves the baseline hazard open"
        )
    if kind == "cox" and design.groups:
        raise ValueError(f"family {family} has no group terms; expected population terms only")
    for one in design.groups if kind == "categorical" else ():
        if one.is_correlated:
            text, name = one.group.text, one.group.name
            raise ValueError(
                f"family {family} has no correlations of effects; expected ({text} || {name})"
            )
    if kind == "categorical" and design.population.offsets:
        raise ValueError(f"family {family} has no offsets; expected a formula without offset()")
    if kind in ("categorical", "ordinal") and not design.population.has_intercept:
        raise ValueError(f"family {family} needs an intercept; expected a formula without '0 +'")
    if kind == "ordinal" and not design.answers:
        raise ValueError(
            f"response {formula.response} is an expression; expected a column of ordered levels"
        )
