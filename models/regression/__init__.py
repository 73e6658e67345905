"""Bayesian multilevel regression from a formula over federated clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyrofl.arguments import checked
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.inference.method import Method
from pyrofl.models.hierarchical import hierarchical
from pyrofl.models.regression.data_checks import warn_of_design
from pyrofl.models.regression.design import Design, make_design
from pyrofl.models.regression.families import family_of
from pyrofl.models.regression.formula import read
from pyrofl.models.regression.priors import Priors, make_priors
from pyrofl.models.regression.program import compile_program, source

__all__ = ["Regression", "regression"]


@dataclass(frozen=True, repr=False)
class Regression(Method):
    """Regression from a formula: a method with its formula, family and data.

    Attributes:
        design: agreed columns, levels and rows.
        chosen: priors.
        text: source of the program.
    """

    design: Design | None = None
    chosen: Priors | None = None
    text: str = ""

    def program(self) -> str:
        """Return the Pyro source of the model, which reads `prepare(data)`."""
        return self.text

    def priors(self) -> str:
        """Return all priors, one per line."""
        assert self.chosen is not None
        return self.chosen.text()

    def prepare(self, data: Federation | Tables) -> Federation:
        """Return the federation that the program reads, of the clients that the design is of.

        Raises:
            ValueError: if data has other clients than the regression was made of.
        """
        assert self.design is not None
        made = self.design.federation()
        if isinstance(data, Federation):
            if data.source is not None and data.source.features == tuple(self.design.places):
                return data
            names = data.names[: data.clients]
        else:
            names = tuple(data.frames)
        if not set(made.names) <= set(names):
            raise ValueError(
                "data has other clients than the regression was made of; call "
                "pyrofl.regression(formula, data) with these data"
            )
        return made

    def axes(self) -> tuple[dict[str, tuple[str, ...]], dict[str, list[Any]]]:
        """Return names of the axes of sites, and labels of the axes, for ArviZ."""
        assert self.design is not None
        assert self.chosen is not None
        return _axes(self.design, self.chosen)


@checked
def regression(
    formula: str,
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
        data: `federations.from_frames({client: frame})`, or a federation with named numeric
            features.
        family: name of the family, one of `families.FAMILIES`.
        link: name of the link; None is the usual one.
        priors: parameter -> distribution of single numbers that replaces the default; see
            `Regression.priors` for the names. "b" and "sd" replace those of all coefficients and
            of all groups, "corr" the concentration of LKJ priors.
        weights: column of row weights, the exponents of their likelihoods.
        center: whether the prior of the intercept is that at the mean of all columns, as in brms
            and rstanarm, rather than at 0.
        client: name of the column that identifies the client; tables need not have it.
        namespace: name -> function or value that the formula may use, such as knots of bs();
            np is numpy.

    Returns:
        A method for `pyrofl.fit(method, data, rounds=4)`; with normal responses, one round.

    Raises:
        ValueError: if the formula cannot be read, a column or name is unknown, or a response is
            not in the family's support.

    Warns:
        UserWarning: if rows are dropped because of missing values, only one client has a level,
            or a column is constant, aliased or separates the responses.

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
    design = make_design(
        read(formula), data, kind, client=client, weights=weights, namespace=namespace or {}
    )
    _refuse_unsupported(design, family)
    design.check_responses()
    warn_of_design(design)
    chosen = make_priors(design, named, priors or {})
    text, shared = source(design, chosen, named, f"family {family}, link {named}", center=center)
    prepared = design.federation()
    method = hierarchical(compile_program(text), prepared, shared=" ".join(shared))
    return Regression(**vars(method), design=design, chosen=chosen, text=text)


def _refuse_unsupported(design: Design, family: str) -> None:
    """Raise ValueError for combinations that have no program yet."""
    kind, formula = design.family.kind, design.formula
    if design.family.column == "trials" and not formula.second:
        raise ValueError(
            f"family {family} needs the number of trials; expected p({formula.response}, trials) "
            "as the response"
        )
    if formula.kind and formula.kind != design.family.column:
        raise ValueError(
            f"the response has a column of {formula.kind}, which family {family} does not read; "
            f"expected {formula.response} alone, or another family"
        )
    if kind in ("categorical", "cox") and design.groups:
        raise ValueError(f"family {family} has no group terms; expected population terms only")
    if kind == "categorical" and design.population.offsets:
        raise ValueError(f"family {family} has no offsets; expected a formula without offset()")
    if kind in ("categorical", "ordinal") and not design.population.has_intercept:
        raise ValueError(f"family {family} needs an intercept; expected a formula without '0 +'")
    if kind == "ordinal" and not design.answers:
        raise ValueError(
            f"response {formula.response} is an expression; expected a column of ordered levels"
        )


def _axes(design: Design, priors: Priors) -> tuple[Any, Any]:
    """Return names of the axes of sites, and labels of the axes."""
    dims: dict[str, tuple[str, ...]] = {}
    coords: dict[str, list[Any]] = {}
    normal = [n for n, c in priors.coefficients.items() if c.startswith("dist.Normal(")]
    if normal:
        is_many = design.family.kind == "categorical"
        dims["b"] = ("answer", "term") if is_many else ("term",)
        coords["term"] = normal
        if is_many:
            dims["Intercept"] = dims["Intercept_centered"] = ("answer",)
            coords["answer"] = list(design.answers[1:])
    for one in design.groups:
        name, k, axis = one.name, len(one.labels), f"{one.name}_term"
        single = k == 1 and one.kind != "shared"
        if k > 1:
            dims[f"sd_{name}"] = (axis,)
        if not single:
            coords[axis] = one.labels
        effect = () if single else (axis,)
        if one.kind == "shared":
            levels = [":".join(map(str, v)) if isinstance(v, tuple) else v for v in one.levels[""]]
            dims[f"r_{name}"] = (name, axis)
            coords[name] = levels
        else:
            dims[f"r_{name}"] = effect
    return {n: axes for n, axes in dims.items() if axes}, coords
