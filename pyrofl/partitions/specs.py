"""Partitions by their one-line names, such as "dirichlet:0.3,min=10"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from pyrofl.arguments import known
from pyrofl.partitions import by_label
from pyrofl.partitions.allocation import Parts

Value = int | float | str | bool


class Recipe(NamedTuple):
    """How the words of a partition's name become the arguments of its function."""

    about: str
    draw: Callable[..., Parts]
    main: tuple[str, type[int] | type[float]] | None = None  # what the number after ":" is
    numbers: Mapping[str, str] = {}  # option=number: the argument it sets
    flags: Mapping[str, tuple[str, Value]] = {}  # option: the argument it sets, and to what


def _cuts(*words: str) -> dict[str, tuple[str, Value]]:
    return {word: ("cuts", word) for word in words}


RECIPES = {
    "iid": Recipe("iid: all rows dealt at random, equal sizes", by_label.iid),
    "dirichlet": Recipe(
        "dirichlet:A[,min=M][,balance]: class shares from Dirichlet(A), at least M rows each",
        by_label.dirichlet,
        ("alpha", float),
        {"min": "minimum"},
        {"balance": ("balance", True)},
    ),
    "labels": Recipe(
        "labels:S: at most S labels per client, in equal shards",
        by_label.labels,
        ("per_client", int),
    ),
    "label-groups": Recipe(
        "label-groups:S: exactly S labels per client, groups of clients cover all, equal cuts",
        partial(by_label.label_groups, cuts="equal"),
        ("per_client", int),
    ),
    "slices": Recipe(
        "slices:S[,independent]: label groups cut at random points, so that sizes differ widely",
        by_label.label_groups,
        ("per_client", int),
        flags=_cuts("shared", "independent"),
    ),
    "drift": Recipe(
        "drift[,independent][,equal]: one fine class of every superclass, cut at random points",
        by_label.drift,
        flags=_cuts("shared", "independent", "equal"),
    ),
    "step": Recipe(
        "step:M[,minor=R]: M large classes per client and R rows of every other",
        by_label.step,
        ("majors", int),
        {"minor": "minor"},
    ),
    "shares": Recipe(
        "shares:S: S random classes per client, in U(0.3, 0.7) shares",
        by_label.shares,
        ("per_client", int),
    ),
}

PARTITIONS: dict[str, str] = {name: recipe.about for name, recipe in RECIPES.items()} | {
    "groups": "groups[:COLUMN]: the natural groups of the data set, one client each",
    "domains": "domains:PARTITION: one domain per client, in turn; PARTITION within each domain",
}


def read(partition: str) -> tuple[str, dict[str, Value]]:
    """Read a partition's name and the arguments that it gives to its function.

    Raises:
        ValueError: if the name is unknown, a number is missing or malformed, or an option is
            unknown.

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
    recipe = RECIPES[name]
    options: dict[str, Value] = {}
    words = rest.split(",") if colon else []
    if recipe.main:
        argument, kind = recipe.main
        if colon != ":":
            raise ValueError(f"partition {partition!r} lacks its number; expected {recipe.about}")
        options[argument] = _number(words.pop(0), kind, partition)
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in recipe.numbers:
            options[recipe.numbers[key]] = _number(value, int, partition)
        elif word in recipe.flags:
            argument, options[argument] = recipe.flags[word]
        else:
            raise ValueError(f"partition {partition!r} has {word!r}; expected {recipe.about}")
    return name, options


def _number(word: str, kind: type[int] | type[float], partition: str) -> int | float:
    try:
        return kind(word)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"partition {partition!r} has {word!r}; expected {what}") from None
