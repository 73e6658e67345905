"""Bayesian multilevel regression from a formula over federated clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyrofl.arguments import checked
from pyrofl.choices import HierarchicalMethod
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.models.regression.agreement import Agreement
from pyrofl.models.regression.building import Settings, agree, make_method
from pyrofl.models.regression.method import Regression

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
    method: HierarchicalMethod = "auto",
) -> Regression:
    """Build a Bayesian multilevel regression from a formula, as of lme4, brms and Bambi.

    Contrasts, centering, scaling, polynomials and splines are those of the pooled rows, which
    clients agree on by sums, unions of levels and counts. The generated program is fitted by
    `pyrofl.hierarchical`: likelihood factors where they can, otherwise PVI; `fit` also continues
    with PVI, and warns, where likelihood factors fail.

    Args:
        formula: such as "y ~ age * treat + bs(dose, df=4) + (1 + age | client)", in the syntax of
            the library formulae. A response may be p(successes, trials) or censored(time, event),
            with event 1 for an event and 0 for a censored time; with `upper=bound`, an event may
            be between time (0 for left-censored ones) and the bound, and is at the time where both
            are equal, and `entry=start` is delayed entry. `(x || g)` has no correlations, and
            `(1 | a/b)` is `(1 | a) + (1 | a:b)`. offset(x) adds a known column.
            `y | se(error)` has known standard errors (with `sigma=True`, further variance),
            `y | weights(w)` row weights, `y | trials(n)` is p(y, n), and `y | trunc(lb=0, ub=9)`
            has only values within the bounds. A dict of formulas, such as
            {"y": "y ~ x + (1 | client)", "sigma": "~ x"}, also has one for parameters of the
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
        method: "likelihood_factors" or "pvi" to have this method and no other.

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
    more = (weights, center, client, dict(namespace or {}), method)
    settings = Settings(formula, family, link, dict(priors or {}), *more)
    design, chosen = agree(settings, data, Agreement())
    return make_method(settings, design, chosen, design.federation())
