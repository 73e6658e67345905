"""Federations from data sets: who holds which rows, and who is tested on which."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyrofl import partitions
from pyrofl.data import Dataset, Federation
from pyrofl.dealing import Ints, Parts, collect, labels_global, same_shares
from pyrofl.recipes import PARTITIONS, RECIPES, Value, known, read

__all__ = ["PARTITIONS", "TEST_POLICIES", "class_counts", "split"]

TEST_POLICIES: dict[str, str] = {
    "same_shares": "test rows of each class in proportion to the client's training rows of it",
    "labels_global": "all test rows of the classes that the client trains on",
    "independent": "the same partition drawn anew for the test rows",
    "uniform": "test rows dealt at random",
}


def split(
    dataset: Dataset,
    partition: str,
    clients: int | None = None,
    *,
    seed: int = 0,
    test: str = "same_shares",
    held_out: int = 0,
) -> Federation:
    """Split a data set over clients.

    Args:
        dataset: its training rows are partitioned by `types`, or by class if it has none.
        partition: one of `PARTITIONS` with its numbers, such as "dirichlet:0.3,min=10".
        clients: how many train; None where the data set's groups decide.
        seed: of the partition; the training rows do not depend on the test policy.
        test: one of `TEST_POLICIES`. With natural groups "same_shares" means that test rows stay
            in their group.
        held_out: clients on top of `clients` (of the groups: the last ones) that never train.

    Raises:
        ValueError: if a name is unknown, a number is missing or malformed, the data set lacks the
            classes or groups that are asked for, or the partition cannot be made.
    """
    known(test, TEST_POLICIES, "test policy")
    name, options = read(partition)
    if seed < 0 or held_out < 0:
        raise ValueError(f"seed is {seed}, held_out is {held_out}; expected 0 or more")
    if name == "groups":
        return _by_group(dataset, str(options["column"]), clients, seed, test, held_out)
    if clients is None or clients < 1:
        raise ValueError(f"clients is {clients}; expected at least 1 for partition {partition}")
    train_rows, test_rows = _parts(dataset)
    total = clients + held_out
    train = _draw(dataset, train_rows, name, total, options, np.random.default_rng([seed, 0]))
    if test == "independent" and len(test_rows):
        rng = np.random.default_rng([seed, 1])
        try:
            tests = _draw(dataset, test_rows, name, total, options, rng)
        except ValueError as error:
            raise ValueError(f"test policy independent cannot be met: {error}") from error
    else:
        tests = _test(dataset, train, test_rows, test, seed)
    return _federation(dataset, train, tests, (), held_out)


def class_counts(federation: Federation, part: str = "train") -> Tensor:
    """Count the "train" or "test" rows of each class: int64 [J + held_out, K].

    Raises:
        ValueError: if the federation has no classes.
    """
    if not federation.classes:
        raise ValueError("the federation has no classes to count: its y is a number")
    y, kinds = federation.y.cpu(), len(federation.classes)
    table = federation.train if part == "train" else federation.test
    return torch.stack([torch.bincount(y[rows], minlength=kinds) for rows in table])


def _by_group(
    dataset: Dataset, column: str, clients: int | None, seed: int, test: str, held_out: int
) -> Federation:
    column = _column(dataset, column)
    codes = dataset.groups[column].numpy()
    names = dataset.group_names.get(column) or tuple(
        f"{column} {code}" for code in range(int(codes.max()) + 1)
    )
    if clients is not None and clients + held_out != len(names):
        raise ValueError(
            f"clients is {clients} with {held_out} held out; expected {len(names)} together, the "
            f"number of groups in column {column}"
        )
    if test == "independent":
        raise ValueError(
            "test policy is independent; natural groups are not drawn, so expected "
            "same_shares, labels_global or uniform"
        )
    train_rows, test_rows = _parts(dataset)
    empty = np.flatnonzero(np.bincount(codes[train_rows], minlength=len(names)) == 0)
    if len(empty):
        raise ValueError(f"group {names[empty[0]]} has no training row; expected at least one")
    train = [train_rows[part] for part in partitions.groups(codes[train_rows], len(names))]
    if test == "same_shares":
        tests = [test_rows[codes[test_rows] == j] for j in range(len(names))]
    else:
        tests = _test(dataset, train, test_rows, test, seed)
    return _federation(dataset, train, tests, names, held_out)


def _column(dataset: Dataset, column: str) -> str:
    """Return the column of groups that is meant: the named one, or the only one."""
    if not dataset.groups:
        raise ValueError(f"{dataset.name} has no natural groups; expected a column of groups")
    if column:
        known(column, dataset.groups, f"column of groups in {dataset.name}:")
        return column
    if len(dataset.groups) > 1:
        raise ValueError(
            f"{dataset.name} has groups in columns {', '.join(dataset.groups)}; expected one of "
            "them by name, as in groups:COLUMN"
        )
    return next(iter(dataset.groups))


def _draw(
    dataset: Dataset,
    rows: Ints,
    name: str,
    clients: int,
    options: dict[str, Value],
    rng: np.random.Generator,
) -> Parts:
    """Partition some rows of the data set by a recipe."""
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


def _test(dataset: Dataset, train: Parts, rows: Ints, policy: str, seed: int) -> Parts:
    """Deal the test rows by a policy that needs no second partition."""
    if not len(rows):
        return [rows for _ in train]
    types = _types(dataset)
    mine = [types[part] for part in train]
    rng = np.random.default_rng([seed, 1])
    if policy == "uniform":
        parts = collect(rng.permutation(np.arange(len(rows)) % len(train)), len(train))
    elif policy == "labels_global":
        if not dataset.classes:
            raise ValueError(f"test policy is labels_global, but {dataset.name} has no classes")
        parts = labels_global(mine, types[rows])
    else:
        parts = same_shares(mine, types[rows], rng)
    return [rows[part] for part in parts]


def _types(dataset: Dataset) -> Ints:
    """Return what rows are told apart by: all are of one type if y is a number."""
    if dataset.types is not None:
        return dataset.types.numpy()
    return dataset.y.numpy() if dataset.classes else np.zeros(len(dataset.y), dtype=np.int64)


def _parts(dataset: Dataset) -> tuple[Ints, Ints]:
    """Return the training rows and the test rows."""
    is_test = dataset.is_test.numpy()
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _federation(
    dataset: Dataset, train: Parts, tests: Parts, names: tuple[str, ...], held_out: int
) -> Federation:
    pooled = dataset.is_test.nonzero().flatten()
    return Federation(
        x=dataset.x,
        y=dataset.y,
        train=tuple(torch.from_numpy(part) for part in train),
        test=tuple(torch.from_numpy(part) for part in tests),
        names=names,
        classes=dataset.classes,
        held_out=held_out,
        pooled_test=pooled if len(pooled) else None,
    )
