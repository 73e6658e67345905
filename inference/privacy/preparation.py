"""Refusal of data that were prepared by numbers of the clients' rows, which privacy does not bound.

Clipping and noise bound what clients send in rounds. What they send before, such as the sums that
standardize a column, is neither clipped nor noised: one cell could move every feature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.data.tables.wording import listed
from pyrofl.data.weights import class_weights
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.table_method import TableMethod


def refuse_preparation(method: Method, data: Federation) -> None:
    """Raise ValueError if a method is private and its data were prepared by the clients' rows."""
    if method.metadata.privacy is None:
        return
    for check in CHECKS:
        if reason := check(method, data):
            raise ValueError(f"privacy bounds and adds noise to messages of rounds alone; {reason}")


def _standardized(method: Method, data: Federation) -> str:
    """Return which columns were standardized, and what to do instead."""
    source = data.source
    preparation = source.preparation if source else None
    names = (
        [column.name for column in preparation.columns if column.is_standardized]
        if preparation
        else []
    )
    if names:
        return (
            f"{listed(names)} of x were standardized by sums over the clients' rows; expected "
            "scaling='none' (--scaling none) and columns scaled by constants known beforehand"
        )
    if source and source.is_standardized:
        return (
            f"the target {source.target} was standardized by sums over the clients' rows; expected "
            "a likelihood with known noise (--likelihood normal:SD), and a target scaled by "
            "constants known beforehand"
        )
    return ""


def _filled(method: Method, data: Federation) -> str:
    """Return which columns have gaps filled by means, and what to do instead."""
    preparation = data.source.preparation if data.source else None
    names = (
        [column.name for column in preparation.columns if column.filler is not None]
        if preparation
        else []
    )
    return (
        f"gaps of {listed(names)} were filled by means over the clients' rows; expected "
        "missing='error' or 'drop' (--missing drop), or gaps filled by constants"
        if names
        else ""
    )


def _categories(method: Method, data: Federation) -> str:
    """Return which columns have categories found in rows, and what to do instead."""
    preparation = data.source.preparation if data.source else None
    names = (
        [column.name for column in preparation.columns if column.levels is not None]
        if preparation
        else []
    )
    return (
        f"the categories of {listed(names)} were collected from the clients' rows; expected a "
        "column of 0 and 1 for each category of a list known beforehand"
        if names
        else ""
    )


def _balanced(method: Method, data: Federation) -> str:
    """Return that class weights were computed from rows, and what to do instead."""
    if data.weights is None or not data.classes:
        return ""
    y, ones = data.y.cpu(), torch.ones(len(data.y), dtype=torch.float64)
    train = data.train[: data.clients]
    balanced = class_weights("balanced", data.classes, y, train, ones)[y]
    used = torch.cat(train)
    return (
        "class weights are balanced by counts over the clients' rows; expected weights known "
        "beforehand: with_class_weights({'NAME': 2.0}) (--class-weights NAME=2)"
        if _alike(data.weights[used], balanced[used])
        else ""
    )


def _alike(weights: Tensor, balanced: Tensor) -> bool:
    """Return whether weights are balanced ones, and not all 1."""
    differ = bool((weights != weights[:1]).any())
    return differ and torch.allclose(weights.double(), balanced, rtol=1e-6)


def _designed(method: Method, data: Federation) -> str:
    """Return that a formula made columns and priors of rows, and what to do instead."""
    return (
        "the levels, columns and priors of a regression are made of the clients' rows; expected "
        "pvi.hierarchical with a program of your own"
        if isinstance(method, TableMethod)
        else ""
    )


CHECKS: tuple[Callable[[Method, Federation], str], ...] = (
    _designed,
    _standardized,
    _filled,
    _categories,
    _balanced,
)
