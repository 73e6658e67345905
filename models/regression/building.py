"""Steps from a formula and tables to a regression's design, priors and method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from pyrofl.choices import HierarchicalMethod
from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.models.hierarchical import hierarchical
from pyrofl.models.regression.agreement import Agreement
from pyrofl.models.regression.category_order import check_order
from pyrofl.models.regression.data_checks import warn_of_design
from pyrofl.models.regression.design import Design, make_design
from pyrofl.models.regression.families import DOMAINS, FAMILIES, LINKS, family_of
from pyrofl.models.regression.formula import read_all, with_weights
from pyrofl.models.regression.method import Regression
from pyrofl.models.regression.priors import Priors, make_priors
from pyrofl.models.regression.program import compile_program, source
from pyrofl.models.regression.rows import frames_of
from pyrofl.models.regression.table_checks import warn_of_tables
from pyrofl.models.regression.truncated import check_counts


@dataclass(frozen=True)
class Settings:
    """Arguments of `pyrofl.regression` but the data."""

    formula: str | Mapping[str, str | float]
    family: str = "gaussian"
    link: str | None = None
    priors: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    center: bool = True
    client: str = "client"
    namespace: Mapping[str, Any] = field(default_factory=dict)
    method: HierarchicalMethod = "auto"

    @property
    def link_name(self) -> str:
        """Name of the link; raises ValueError if the family does not have it."""
        return family_of(self.family).link(self.link)


def agree(
    settings: Settings,
    data: Federation | Tables | None,
    agreement: Agreement,
    *,
    with_checks: bool = True,
) -> tuple[Design, Priors]:
    """Return the design and the priors that follow from the rows of all clients.

    Args:
        settings: the regression.
        data: rows of the clients that are here; None at a server.
        agreement: results of all clients' rows.
        with_checks: whether to warn of columns; a client that has all results does not.

    Raises:
        ValueError: see `pyrofl.regression`.
        ReportNeeded: if a result is lacking, and rows of some clients are elsewhere.
    """
    kind, link = family_of(settings.family), settings.link_name
    design = make_design(
        with_weights(read_all(settings.formula, kind.auxiliary), settings.weights),
        data,
        kind,
        client=settings.client,
        namespace=settings.namespace,
        agreement=agreement,
    )
    refuse_unsupported(design, settings.family)
    if data is not None and kind.kind == "ordinal":
        check_order(design.formula.response, frames_of(data, settings.client))
    design.check_columns()
    design.check_responses()
    chosen = make_priors(design, link, settings.priors)
    if with_checks:
        warn_of_tables(design, link)
        warn_of_design(design, link)
    return design, chosen


def make_method(settings: Settings, design: Design, chosen: Priors, data: Federation) -> Regression:
    """Return the method of a design.

    Args:
        settings: the regression.
        design: the design.
        chosen: priors.
        data: federation on which the structure of the program is found, which may be an outline.
    """
    link, center = settings.link_name, settings.center
    name = f"family {settings.family}, link {link}"
    text, shared = source(design, chosen, link, name, center=center)
    chosen_method = settings.method if design.family.is_smooth else "pvi"
    program, names = compile_program(text), " ".join(shared)
    method = hierarchical(program, data, shared=names, method=chosen_method)
    if method.metadata.alternative:
        other = partial(make_method, replace(settings, method="pvi"), design, chosen)
        method = replace(method, metadata=replace(method.metadata, alternative=other))
    more: dict[str, Any] = {"design": design, "chosen": chosen, "text": text}
    return Regression(**vars(method), **more, link=link, center=center)


def refuse_unsupported(design: Design, family: str) -> None:
    """Raise ValueError for combinations that have no program yet."""
    kind, formula = design.family.kind, design.formula
    if design.family.column == "trials" and "trials" not in formula.columns:
        raise ValueError(
            f"family {family} needs the number of trials; expected p({formula.response}, trials) "
            "as the response"
        )
    for role in (*formula.columns, *["trunc"] * bool(formula.truncation)):
        if role not in (design.family.column, "weights", *design.family.additions):
            reading = [n for n, one in FAMILIES.items() if role in (one.column, *one.additions)]
            raise ValueError(
                f"the response has a column of {role}, which family {family} does not read; "
                f"expected {formula.response} alone, or family {' or '.join(reading)}"
            )
    if formula.truncation and design.family.support == "count":
        check_counts(*formula.truncation)
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
        raise ValueError(
            f"family {family} has no group terms: each client has a baseline hazard of its own, in "
            "which its effect cancels; expected population terms, or family weibull with "
            f"(1 | {design.client}) for frailties"
        )
    for one in design.groups if kind == "categorical" else ():
        if one.is_correlated:
            text, name = one.group.text, one.group.name
            raise ValueError(
                f"family {family} has no correlations of effects; expected ({text} || {name})"
            )
    _refuse_blocks(design, family)
    if kind == "categorical" and design.population.offsets:
        raise ValueError(f"family {family} has no offsets; expected a formula without offset()")
    if kind in ("categorical", "ordinal") and not design.population.has_intercept:
        raise ValueError(f"family {family} needs an intercept; expected a formula without '0 +'")
    if kind == "ordinal" and not design.answers:
        raise ValueError(
            f"response {formula.response} is an expression; expected a column of ordered levels"
        )


def _refuse_blocks(design: Design, family: str) -> None:
    """Raise ValueError for terms such as s(x) and cs(x) that a family does not have."""
    for parameter, columns in design.predictors.items():
        for block in columns.blocks.values():
            name = block.transform.name
            if name == "cs" and (parameter or design.family.kind != "ordinal"):
                raise ValueError(
                    f"{block.labels[0]} has an effect at each threshold of ordered categories; "
                    f"family {family} has none: expected family sratio or acat"
                )
            if name == "cs" and design.family.is_ordered:
                raise ValueError(
                    f"{block.labels[0]} would let thresholds of family {family} cross, with "
                    "negative probabilities; expected family sratio or acat"
                )
            if name == "cs" and block.labels[0][3:-1] in columns.labels:
                raise ValueError(
                    f"{block.labels[0]} and {block.labels[0][3:-1]} are both terms, which only "
                    f"priors would separate; expected {block.labels[0]} alone"
                )
            if design.family.kind == "categorical":
                cure = "C(x)" if name == "mo" else "bs()"
                kind = "smooth functions" if name == "s" else f"{name}()"
                raise ValueError(
                    f"family {family} has no {kind}; expected {cure} instead of {name}()"
                )
