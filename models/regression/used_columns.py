"""Columns of tables that a formula uses."""

from __future__ import annotations

import re

from pyrofl.models.regression.columns import variables
from pyrofl.models.regression.families import family_of
from pyrofl.models.regression.formula import read_all

NON_FUNCTION_NAMES = re.compile(r"[A-Za-z_][\w.]*(?![\w.]*\()")  # but of functions


def number_columns(formula: str, family: str) -> list[str]:
    """Return the columns of a formula's response that must hold numbers.

    >>> number_columns("score ~ age", "gaussian")
    ['score']
    """
    if family_of(family).support in ("binary", "levels"):
        return []
    parts = read_all(formula, family_of(family).auxiliary)
    return NON_FUNCTION_NAMES.findall(parts.response)


def formula_columns(formula: str, family: str, client: str = "client") -> list[str]:
    """Return the columns of the tables that a formula uses, without that of the clients.

    >>> formula_columns("censored(time, died) ~ log(age) + sex + (1 | client/ward)", "weibull")
    ['age', 'died', 'sex', 'time', 'ward']
    """
    parts = read_all(formula, family_of(family).auxiliary)
    right = [parts.population, *(group.text for group in parts.groups)]
    names = set().union(*(variables(text)[0] for text in right))
    left = " ".join([parts.response, *parts.columns.values()])
    names |= {*NON_FUNCTION_NAMES.findall(left)}
    groups = {name for group in parts.groups for name in group.factors}
    return sorted(names - groups - {client}) + sorted(groups - {client})
