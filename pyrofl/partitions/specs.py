"""Partitions by their one-line names, such as "dirichlet:0.3,min=10"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pyrofl.arguments import known
from pyrofl.partitions import by_label
from pyrofl.partitions.allocation import Parts

_LINES = (
    "iid: all rows dealt at random, equal sizes",
    "dirichlet:A[,min=M][,balance]: class shares from Dirichlet(A), at least M rows each",
    "labels:S: at most S labels per client, in equal shards",
    "label-groups:S: exactly S labels per client, groups of clients cover all, equal cuts",
    "slices:S[,independent]: label groups cut at random points, so that sizes differ widely",
    "drift[,independent][,equal]: one fine class of every superclass, cut at random points",
    "step:M[,minor=R]: M large classes per client and R rows of every other",
    "shares:S: S random classes per client, in U(0.3, 0.7) shares",
    "groups[:COLUMN]: the natural groups of the data set, one client each",
    "domains:PARTITION: one domain per client, in turn; PARTITION within each domain",
)
PARTITIONS: dict[str, str] = {re.split(r"[:\[]", line)[0]: line for line in _LINES}


class Recipe(NamedTuple):
    """How the words of a partition's name become the arguments of its function."""

    draw: Callable[..., Parts]
    main: tuple[str, type[int] | type[float]] | None = None  # what the number after ":" is
    options: Mapping[str, tuple[str, Any]] = {}  # word: an argument and its value; word=: its type


PER_CLIENT = ("per_client", int)
CUTS = {word: ("cuts", word) for word in ("shared", "independent")}
DIRICHLET = {"min=": ("minimum", int), "balance": ("balance", True)}
RECIPES = {
    "iid": Recipe(by_label.iid),
    "dirichlet": Recipe(by_label.dirichlet, ("alpha", float), DIRICHLET),
    "labels": Recipe(by_label.labels, PER_CLIENT),
    "label-groups": Recipe(partial(by_label.label_groups, cuts="equal"), PER_CLIENT),
    "slices": Recipe(by_label.label_groups, PER_CLIENT, CUTS),
    "drift": Recipe(by_label.drift, options=CUTS | {"equal": ("cuts", "equal")}),
    "step": Recipe(by_label.step, ("majors", int), {"minor=": ("minor", int)}),
    "shares": Recipe(by_label.shares, PER_CLIENT),
}


def read(partition: str) -> tuple[str, dict[str, Any]]:
    """Read a partition's name and the arguments that it gives to its function.

    >>> read("dirichlet:0.3,min=10")
    ('dirichlet', {'alpha': 0.3, 'minimum': 10})
    >>> read("groups:county")
    ('groups', {'column': 'county'})
    >>> read("domains:dirichlet:0.3")
    ('domains', {'within': 'dirichlet:0.3'})
    """
    name, colon, rest = re.fullmatch(r"([^:,]*)([:,]?)(.*)", partition, re.DOTALL).groups()  # type: ignore[union-attr]
    known(name, PARTITIONS, "partition")
    if name == "groups":
        return name, {"column": rest}
    if name == "domains":
        if read(rest)[0] in ("groups", "domains"):
            raise ValueError(f"partition {partition!r} has {rest!r}; expected one that is drawn")
        return name, {"within": rest}
    recipe, about = RECIPES[name], PARTITIONS[name]
    options: dict[str, Any] = {}
    words = rest.split(",") if colon else []
    if recipe.main:
        argument, kind = recipe.main
        if colon != ":":
            raise ValueError(f"partition {partition!r} lacks its number; expected {about}")
        options[argument] = _number(words.pop(0), kind, partition)
    for word in words:
        key, equals, value = word.partition("=")
        if key + equals not in recipe.options:
            raise ValueError(f"partition {partition!r} has {word!r}; expected {about}")
        argument, found = recipe.options[key + equals]
        options[argument] = _number(value, found, partition) if equals else found
    return name, options


def _number(word: str, kind: type[int] | type[float], partition: str) -> int | float:
    try:
        return kind(word)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"partition {partition!r} has {word!r}; expected {what}") from None
