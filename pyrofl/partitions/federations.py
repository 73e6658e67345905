"""Build federations from data sets: partitions of training rows, and test policies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from numbers import Integral
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator, default_rng
from torch import Tensor

from pyrofl.arguments import Count, Whole, check_name, checked
from pyrofl.choices import PARTITIONS, TEST_POLICIES
from pyrofl.data import Dataset, Federation, Source
from pyrofl.data.frames import Tables
from pyrofl.data.roster import names_of
from pyrofl.data.tables.column_summary import summarize_values
from pyrofl.data.tables.source import LEARNED
from pyrofl.data.tables.wording import listed
from pyrofl.partitions import allocation, by_label
from pyrofl.partitions.allocation import Ints, Parts

__all__ = ["PARTITIONS", "TEST_POLICIES", "class_counts", "from_frames", "split"]


class Recipe(NamedTuple):
    """Partition function, and how a text such as "dirichlet:0.1" specifies its arguments."""

    draw: Callable[..., Parts]
    main: tuple[str, type[int] | type[float]] | None = None  # argument and type of the number
    options: Mapping[str, tuple[str, Any]] = {}  # word: (argument, value); word=: (argument, type)


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

Own = Callable[[Ints, int, Generator], Sequence[Any]]
"""(classes of rows [N], clients, NumPy generator) -> for each client, row numbers 0 to N - 1."""


def from_frames(frames: Mapping[str, Any]) -> Tables:
    """Return tables of named columns, one for each client, for `pyrofl.regression`.

    Args:
        frames: name of the client -> data frame of pandas, with equal columns at all clients.

    Raises:
        ValueError: if there is no client, or a client has no data frame or no row.

    Examples:
        >>> import pandas as pd
        >>> bern = pd.DataFrame({"age": [50, 61], "died": [0, 1]})
        >>> from_frames({"bern": bern, "basel": bern[:1]})
        Tables of 2 clients with 3 rows: age, died
    """
    return Tables(frames)


@checked
def split(
    dataset: Dataset,
    partition: str | Own,
    clients: Count | None = None,
    *,
    seed: Whole = 0,
    test: str = "same_shares",
    held_out: Whole | Sequence[str] = 0,
    server_data: int | float | Dataset | Tensor | None = None,
) -> Federation:
    """Partition a data set among clients, and return the federation.

    Args:
        dataset: its training rows are partitioned by `types`, or by class if it has none.
        partition: one of `PARTITIONS` with its numbers, such as "dirichlet:0.3,min=10"; or a
            function (classes of the training rows [N], clients, NumPy generator) -> for each
            client, some of the numbers 0 to N - 1. Rows without a client are left out.
        clients: number of training clients; None if the groups of the data set determine it.
        seed: seed of the partition; the training rows do not depend on the test policy.
        test: one of `TEST_POLICIES`. With natural groups "same_shares" keeps test rows in their
            group.
        held_out: number of clients in addition to `clients` (of groups: the last ones) that never
            train; or names of groups, which then come last.
        server_data: unlabeled rows of the server. A count, or a fraction below 1, of the training
            rows is withheld from all clients, each class in proportion (FedBE: 10,000 of CIFAR-10).
            A data set contributes its training rows, see `datasets.resized` where images differ in
            shape; a tensor [U, *x] its rows.

    Raises:
        ValueError: if a name or number is invalid, the data set lacks the required classes or
            groups, the partition is impossible, or the server's rows do not match.

    Examples:
        >>> from pyrofl import datasets
        >>> data = split(datasets.load("digits"), "dirichlet:0.5", clients=10, seed=1)
        >>> data.clients, len(data.test)
        (10, 10)
    """
    check_name(test, TEST_POLICIES, "test policy")
    name, options = read(partition) if isinstance(partition, str) else ("", {})
    is_test = dataset.is_test.numpy()
    train_rows, test_rows = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    withheld = None
    if isinstance(server_data, int | float):
        train_rows, withheld = _withhold(dataset, train_rows, server_data, seed)
    groups = name == "groups"
    names: tuple[str, ...] = ()
    out = () if isinstance(held_out, int | Integral) else names_of("held_out", held_out)
    held_out = int(held_out) if isinstance(held_out, int | Integral) else len(out)
    if out and not groups:
        message = f"held_out is {listed(out)}, and partition {partition} has no names"
        raise ValueError(f"{message}; expected a number, or partition groups")
    if groups:
        column = _column(dataset, options["column"])
        names, train = _by_group(dataset, column, clients, train_rows, held_out)
        order = _last(out, names)
        names, train = tuple(names[j] for j in order), [train[j] for j in order]
    elif clients is None:
        raise ValueError(f"clients is {clients}; expected at least 1 for partition {partition}")
    else:
        rng = default_rng([seed, 0])
        train = _draw(dataset, train_rows, partition, clients + held_out, rng)
    rng = default_rng([seed, 1])
    if groups and test == "independent":
        raise ValueError("test policy is independent; expected another, as groups are not drawn")
    if groups and test == "same_shares":
        owners = dataset.groups[column].numpy()[test_rows]
        parts = allocation.rows_of_owners(owners, len(names))
        tests = [test_rows[parts[j]] for j in order]
    elif not len(test_rows):
        tests = [test_rows for _ in train]
    elif test == "independent":
        try:
            tests = _draw(dataset, test_rows, partition, len(train), rng)
        except ValueError as error:
            raise ValueError(f"test policy independent cannot be met: {error}") from error
    else:
        tests = _test(dataset, train, test_rows, test, rng)
    x, source = _prepared(dataset, train[: len(train) - held_out], names)
    if groups and source:
        source = replace(source, client_column=column)
    if withheld is not None:
        server_data = x[torch.from_numpy(withheld)]
    elif isinstance(server_data, Dataset):
        server_data = server_data.x[~server_data.is_test]
    return Federation(
        x=x,
        y=dataset.y,
        train=tuple(torch.from_numpy(part) for part in train),
        test=tuple(torch.from_numpy(part) for part in tests),
        names=names,
        classes=dataset.classes,
        held_out=held_out,
        pooled_test=torch.from_numpy(test_rows) if len(test_rows) else None,
        server_data=server_data,  # type: ignore[arg-type]
        source=source,
        weights=dataset.weights,
    )


def _prepared(dataset: Dataset, train: Parts, names: Sequence[str]) -> tuple[Tensor, Source | None]:
    """Return the preprocessed features, and the data's origin with the fitted preprocessing.

    The target itself keeps its unit: the likelihood reads its mean and scale.
    """
    names = names[: len(train)]
    x, options = dataset.x, dict[str, Any]()
    if dataset.recipe is not None:
        x, preprocessor, unseen = dataset.recipe.follow(dataset.x, train, names)
        options = {"features": preprocessor.features, "preparation": preprocessor, "unseen": unseen}
    if dataset.likelihood == LEARNED:
        y = dataset.y.double().numpy()
        sums = [summarize_values(y[rows]) for rows in train]
        options["center"], options["scale"] = reduce(add, sums).moments
    return x, replace(dataset.source, **options) if dataset.source else None


def class_counts(federation: Federation, part: str = "train") -> Tensor:
    """Return the number of rows of each client and class: int64 [J + held_out, K].

    Raises:
        ValueError: if the federation has no classes.
    """
    if not federation.classes:
        raise ValueError("y is a number; expected data with classes for class counts")
    y, kinds = federation.y.cpu(), len(federation.classes)
    table = federation.train if part == "train" else federation.test
    return torch.stack([torch.bincount(y[rows], minlength=kinds) for rows in table])


def _withhold(dataset: Dataset, rows: Ints, amount: float, seed: int) -> tuple[Ints, Ints]:
    """Split training rows into those for clients and unlabeled rows for the server."""
    share = amount if isinstance(amount, float) else amount / len(rows)
    count = round(share * len(rows)) if 0 < share < 1 else 0
    if isinstance(amount, bool) or not 0 < count < len(rows):
        raise ValueError(
            f"server_data is {amount}; expected a number of rows from 1 to {len(rows) - 1}, or a "
            f"share of the {len(rows)} training rows above 0 and below 1"
        )
    kept_places, withheld = allocation.set_aside(
        _types(dataset)[rows], count, default_rng([seed, 2])
    )
    return rows[kept_places], rows[withheld]


def _by_group(
    dataset: Dataset, column: str, clients: int | None, rows: Ints, held_out: int
) -> tuple[tuple[str, ...], Parts]:
    """Partition rows by a group column, one client per group; return names and row numbers."""
    codes = dataset.groups[column].numpy()
    default = (f"{column} {code}" for code in range(int(codes.max()) + 1))
    names = dataset.group_names.get(column) or tuple(default)
    if clients is not None and clients + held_out != len(names):
        raise ValueError(
            f"clients is {clients} with {held_out} held out; expected {len(names)} together, the "
            f"number of groups in column {column}"
        )
    for empty in np.flatnonzero(np.bincount(codes[rows], minlength=len(names)) == 0):
        taken = np.count_nonzero(~dataset.is_test.numpy()) - len(rows)
        left = f", as the server took {taken}" if taken else ""
        raise ValueError(f"group {names[empty]} has no training row{left}; expected at least one")
    return names, [rows[part] for part in allocation.rows_of_owners(codes[rows], len(names))]


def _last(out: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the indices of all groups, ordered so that held-out groups come last."""
    for name in out:
        check_name(name, names, "group to hold out:")
    if len(set(out)) == len(names):
        raise ValueError("held_out names all groups; expected at least one that trains")
    training = [j for j, name in enumerate(names) if name not in out]
    return [*training, *(list(names).index(name) for name in out)]


def _column(dataset: Dataset, column: str) -> str:
    """Return the name of the column that defines groups: the requested one, or the only one."""
    if not dataset.groups:
        raise ValueError(f"{dataset.name} has no natural groups; expected a column of groups")
    if column:
        check_name(column, dataset.groups, f"column of groups in {dataset.name}:")
        return column
    if len(dataset.groups) > 1:
        raise ValueError(
            f"{dataset.name} has groups in columns {', '.join(dataset.groups)}; expected one of "
            "them by name, as in groups:COLUMN"
        )
    return next(iter(dataset.groups))


def _draw(
    dataset: Dataset, rows: Ints, partition: str | Own, clients: int, rng: Generator
) -> Parts:
    """Partition the given rows by a named partition or by a user's function."""
    if not isinstance(partition, str):
        parts = partition(_types(dataset)[rows].copy(), clients, rng)
        return [
            rows[part] for part in allocation.checked_parts(partition, parts, clients, len(rows))
        ]
    name, options = read(partition)
    if name == "domains":
        return _by_domain(dataset, rows, options["within"], clients, rng)
    if name != "iid" and not dataset.classes:
        raise ValueError(f"{dataset.name} has no classes for {name}; expected iid or groups")
    columns = [_types(dataset)[rows]]
    if name == "drift":
        if dataset.types is None:
            raise ValueError(
                f"{dataset.name} has no classes finer than its labels, which drift needs; expected "
                "a data set with superclasses, such as cifar100-coarse"
            )
        columns.append(dataset.y.numpy()[rows])
    parts = RECIPES[name].draw(*columns, clients=clients, rng=rng, **options)
    return [rows[part] for part in parts]


def _by_domain(dataset: Dataset, rows: Ints, within: str, clients: int, rng: Generator) -> Parts:
    """Assign clients to domains alternately, and partition each domain among its clients."""
    if "domain" not in dataset.groups:
        raise ValueError(f"{dataset.name} has no domains; expected data sets joined by a plus sign")
    every = dataset.groups["domain"].numpy()
    domains = int(every.max()) + 1
    if clients < domains:
        raise ValueError(f"clients is {clients}; expected one for each of {domains} domains")
    parts: Parts = [rows] * clients
    for d in range(domains):
        client_types, share = rows[every[rows] == d], len(parts[d::domains])
        parts[d::domains] = _draw(dataset, client_types, within, share, rng)
    return parts


def _test(dataset: Dataset, train: Parts, rows: Ints, policy: str, rng: Generator) -> Parts:
    """Allocate the test rows to clients by the policy uniform, same_shares or same_classes."""
    types = _types(dataset)
    client_types = [types[part] for part in train]
    if policy == "uniform":
        parts = allocation.deal_evenly(len(rows), len(train), rng)
    elif policy == "same_shares":
        parts = allocation.same_shares(client_types, types[rows], rng)
    elif dataset.classes:
        parts = allocation.rows_of_classes(client_types, types[rows])
    else:
        raise ValueError(f"test policy is same_classes, but {dataset.name} has no classes")
    return [rows[part] for part in parts]


def _types(dataset: Dataset) -> Ints:
    """Return the label of each row for partitioning; 0 for all rows in regression."""
    if dataset.types is not None:
        return dataset.types.numpy()
    return dataset.y.numpy() if dataset.classes else np.zeros(len(dataset.y), dtype=np.int64)


def read(partition: str) -> tuple[str, dict[str, Any]]:
    """Parse a partition such as "dirichlet:0.1" into its name and its function's arguments.

    >>> read("dirichlet:0.3,min=10")
    ('dirichlet', {'alpha': 0.3, 'minimum': 10})
    >>> read("groups:county")
    ('groups', {'column': 'county'})
    >>> read("domains:dirichlet:0.3")
    ('domains', {'within': 'dirichlet:0.3'})
    """
    name, colon, rest = re.fullmatch(r"([^:,]*)([:,]?)(.*)", partition, re.DOTALL).groups()  # type: ignore[union-attr]
    check_name(name, PARTITIONS, "partition")
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
        if argument in options:
            raise ValueError(
                f"partition {partition!r} gives {key} more than once; expected {about}"
            )
        options[argument] = _number(value, found, partition) if equals else found
    return name, options


def _number(word: str, kind: type[int] | type[float], partition: str) -> int | float:
    try:
        return kind(word)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"partition {partition!r} has {word!r}; expected {what}") from None
