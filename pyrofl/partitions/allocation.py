"""Allocation of rows to clients, given the numbers of rows per client and class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Parts = list[Ints]  # row numbers of each client, ascending


class Classes(NamedTuple):
    """Class code of every row, the labels of the classes that occur, and their numbers of rows."""

    kinds: Ints  # [K], those that occur, ascending
    codes: Ints  # [N], position of each row's class among them
    sizes: Ints  # [K], their rows


def classes_of(types: Ints) -> Classes:
    """Encode the class labels of rows [N] as class codes, with their labels and class sizes."""
    return Classes(*np.unique(types, return_inverse=True, return_counts=True))


def rows_of_owners(owner: Ints, clients: int) -> Parts:
    """Return each client's row numbers, given the client that owns each row [N]; -1: no owner.

    >>> [part.tolist() for part in rows_of_owners(np.array([1, -1, 0, 1]), 2)]
    [[2], [0, 3]]
    """
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]


def deal_evenly(rows: int, clients: int, rng: Generator) -> Parts:
    """Allocate rows to clients at random, with client sizes that differ by at most one."""
    return rows_of_owners(rng.permutation(np.arange(rows) % clients), clients)


def deal(codes: Ints, counts: Ints, rng: Generator) -> Parts:
    """Allocate random rows to clients, given the number of rows per client and class [J, K].

    Other rows stay unused.
    """
    owner = np.full(len(codes), -1, dtype=np.int64)
    for k, column in enumerate(counts.T):
        rows = rng.permutation(np.flatnonzero(codes == k))
        owner[rows[: column.sum()]] = np.repeat(np.arange(len(column)), column)
    return rows_of_owners(owner, len(counts))


def in_proportion(
    sizes: Ints, weights: NDArray[np.bool_ | np.integer[Any] | np.floating[Any]], rng: Generator
) -> Ints:
    """Split class sizes [K] among clients in proportion to weights [J, K], as integers.

    Counts are rounded by the largest remainder. Ties are broken at random. A class
    with all weights zero is allocated to no client.

    >>> in_proportion(np.array([10]), np.array([[1], [2], [1]]), np.random.default_rng(1)).sum(0)
    array([10])
    """
    scale = weights.astype(np.float64)
    total = scale.sum(0)
    quota = sizes * scale / np.where(total > 0, total, 1)
    counts = np.floor(quota).astype(np.int64)
    rest = np.where(total > 0, sizes - counts.sum(0), 0)
    remainder = np.where(scale > 0, quota - counts, -1)
    order = np.lexsort((rng.random(scale.shape), -remainder), axis=0)
    rank = np.argsort(order, axis=0)
    return counts + (rank < rest)


def top_up(counts: Ints, minimum: int, rng: Generator) -> Ints:
    """Move rows from the largest clients until all have `minimum` rows; return counts [J, K]."""
    counts = counts.copy()
    sizes = counts.sum(1)
    for j in np.flatnonzero(sizes < minimum):
        while sizes[j] < minimum:
            giver = sizes.argmax()
            moved = min(minimum - sizes[j], sizes[giver] - minimum)
            rows = rng.multivariate_hypergeometric(counts[giver], moved)
            counts[giver] -= rows
            counts[j] += rows
            sizes[[giver, j]] += -moved, moved
    return counts


def same_shares(train: Sequence[Ints], test: Ints, rng: Generator) -> Parts:
    """Allocate each class's test rows in proportion to the clients' training rows of it.

    Test rows of a class without training rows are unused. A client of small shares may get none.
    """
    kinds, codes, sizes = classes_of(test)
    counts = np.array(
        [[np.count_nonzero(client_types == kind) for kind in kinds] for client_types in train]
    )
    return deal(codes, in_proportion(sizes, counts.reshape(len(train), -1), rng), rng)


def set_aside(types: Ints, count: int, rng: Generator) -> tuple[Ints, Ints]:
    """Split off `count` random rows, stratified by class; return remaining and split-off rows.

    >>> kept, aside = set_aside(np.array([0, 0, 1, 1, 1, 1]), 3, np.random.default_rng(0))
    >>> len(kept), np.bincount(np.array([0, 0, 1, 1, 1, 1])[aside])
    (3, array([1, 2]))
    """
    _, codes, sizes = classes_of(types)
    counts = in_proportion(np.array([count]), sizes[:, None], rng)
    (aside,) = deal(codes, counts.T, rng)
    return np.delete(np.arange(len(types)), aside), aside


def rows_of_classes(train: Sequence[Ints], test: Ints) -> Parts:
    """Return for each client all test rows of its training classes; clients may share rows."""
    return [np.flatnonzero(np.isin(test, client_types)) for client_types in train]


def checked_parts(partition: object, parts: Any, clients: int, rows: int) -> Parts:
    """Validate the row numbers that a user's partition function returned for each client."""
    message = f"partition {getattr(partition, '__name__', type(partition).__name__)}"
    if isinstance(parts, str | Mapping) or not hasattr(parts, "__len__") or len(parts) != clients:
        what = f"a {type(parts).__name__}"
        what += f" of {len(parts)}" if hasattr(parts, "__len__") else ""
        raise ValueError(
            f"{message} returns {what}; expected row numbers of each of {clients} clients"
        )
    checked, owner = [], np.full(rows, -1)
    for client, part in enumerate(parts):
        where = f"{message}: client {client}"
        rows_of_client = np.asarray(part)
        if rows_of_client.ndim != 1 or (
            rows_of_client.size and rows_of_client.dtype.kind not in "iu"
        ):
            kind = f"{rows_of_client.dtype} of shape {list(rows_of_client.shape)}"
            raise ValueError(f"{where} gets {kind}; expected integer row numbers")
        if not len(rows_of_client):
            raise ValueError(f"{where} gets no row; expected at least one")
        if (bad := rows_of_client[(rows_of_client < 0) | (rows_of_client >= rows)]).size:
            raise ValueError(f"{where} gets row {bad[0]}; expected 0 to {rows - 1}")
        if (had := rows_of_client[owner[rows_of_client] >= 0]).size or len(
            np.unique(rows_of_client)
        ) < len(rows_of_client):
            again = f"row {had[0]}, as client {owner[had[0]]}" if had.size else "a row twice"
            raise ValueError(f"{where} gets {again}; expected each row at most once")
        owner[rows_of_client] = client
        checked.append(rows_of_client.astype(np.int64))
    return checked
