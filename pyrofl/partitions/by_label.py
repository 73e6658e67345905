"""Partitions: which rows go to which client.

Each function takes the class of every row (int [N], any codes) and returns the rows of every
client. A partition is exact (every row has exactly one client) unless its docstring says
otherwise, no client is empty, and all chance comes from the generator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pyrofl.partitions.allocation import (
    Ints,
    Parts,
    check_clients,
    check_per_client,
    check_rows,
    classes_of,
    collect,
    deal,
    portion,
    repair,
)
from pyrofl.partitions.slicing import drift, label_groups

__all__ = [
    "dirichlet",
    "drift",
    "groups",
    "iid",
    "label_groups",
    "labels",
    "shares",
    "step",
]


def iid(types: Ints, clients: int, rng: np.random.Generator) -> Parts:
    """Deal all rows at random; sizes differ by at most one.

    Raises:
        ValueError: if there are more clients than rows.
    """
    check_clients(clients, len(types))
    return collect(rng.permutation(np.arange(len(types)) % clients), clients)


def dirichlet(
    types: Ints,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    minimum: int = 1,
    balance: bool = False,
) -> Parts:
    """Cut each class over the clients by shares drawn from a symmetric Dirichlet.

    Papers draw again until every client is large enough, which for small alpha never ends; here
    the largest clients give random rows to those that are too small.

    Args:
        types: [N], class of each row.
        clients: J.
        alpha: concentration; the smaller, the fewer clients share a class.
        rng: draws shares and rows.
        minimum: rows that every client has at least.
        balance: give no more classes to a client that already holds N / J rows (FedBE's code).

    Raises:
        ValueError: if alpha is not positive and finite, or there are fewer than J * minimum rows.
    """
    check_clients(clients, len(types))
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha is {alpha}; expected a positive number")
    if not 1 <= minimum <= len(types) // clients:
        raise ValueError(
            f"minimum size is {minimum}; expected 1 to {len(types) // clients}, "
            f"as {clients} clients share {len(types)} rows"
        )
    _, codes, sizes = classes_of(types)
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    for k, size in enumerate(sizes):
        log_shares = _log_gammas(alpha, clients, rng)
        if balance:
            log_shares[counts.sum(1) * clients >= len(types)] = -np.inf
        # Dividing by the last sum, not by the sum, leaves nothing to clients with share zero.
        up_to = np.cumsum(np.exp(log_shares - log_shares.max()))
        ends = np.floor(up_to / up_to[-1] * size).astype(np.int64)
        counts[:, k] = np.diff(ends, prepend=0)
    return deal(codes, repair(counts, minimum, rng), rng)


def labels(types: Ints, clients: int, per_client: int, rng: np.random.Generator) -> Parts:
    """Give each client at most `per_client` classes, as in FedRep's experiments.

    Every class is cut in equally many shards, give or take one, and each client is dealt
    `per_client` shards from the shuffled pack; two may be of one class, hence "at most".

    Raises:
        ValueError: if per_client is not 1 to K, J * per_client shards do not reach all K classes,
            or a class has fewer rows than shards.
    """
    check_clients(clients, len(types))
    kinds, codes, sizes = classes_of(types)
    check_per_client(per_client, len(kinds))
    if clients * per_client < len(kinds):
        raise ValueError(
            f"{clients} clients with {per_client} labels each cannot hold {len(kinds)} classes; "
            f"expected clients x labels to be at least {len(kinds)}"
        )
    whole, rest = divmod(clients * per_client, len(kinds))
    pack = np.concatenate(
        [np.tile(np.arange(len(kinds)), whole), rng.permutation(len(kinds))[:rest]]
    )
    hands = rng.permutation(pack).reshape(clients, per_client)
    shards = (hands[:, :, None] == np.arange(len(kinds))).sum(1)
    check_rows(kinds, sizes, shards.sum(0))
    return deal(codes, portion(sizes, shards, rng), rng)


def step(
    types: Ints, clients: int, majors: int, rng: np.random.Generator, *, minor: int = 10
) -> Parts:
    """Give each client `majors` large classes and exactly `minor` rows of every other (FedBE).

    Every class is major for the same number of clients, which share equally what the others
    leave. FedBE on CIFAR-10, 10 clients, 40,000 rows: 2 x 1,960 + 8 x 10 rows each.

    Raises:
        ValueError: if majors is not 1 to K, J * majors is no multiple of K, minor is negative, or
            a class is too small.
    """
    check_clients(clients, len(types))
    kinds, codes, sizes = classes_of(types)
    check_per_client(majors, len(kinds))
    owners, rest = divmod(clients * majors, len(kinds))
    if rest:
        raise ValueError(
            f"{clients} clients with {majors} major classes each; expected clients x majors to be "
            f"a multiple of the {len(kinds)} classes"
        )
    if minor < 0:
        raise ValueError(f"minor is {minor}; expected 0 rows or more")
    needed = owners + minor * (clients - owners)
    check_rows(kinds, sizes, np.full(len(kinds), needed))
    major = np.zeros((clients, len(kinds)), dtype=np.bool_)
    for mine in major:
        # The classes that were major for the fewest so far; chance decides between equals.
        mine[np.lexsort((rng.random(len(kinds)), major.sum(0)))[:majors]] = True
    large = portion(sizes - minor * (clients - owners), major, rng)
    return deal(codes, np.where(major, large, minor), rng)


def shares(types: Ints, clients: int, per_client: int, rng: np.random.Generator) -> Parts:
    """Give each client random classes and U(0.3, 0.7) parts of them (pFedMB).

    Client j gets the share u_jc / sum_i u_ic of class c, over the owners i of that class.

    Not exact: rows of a class that no client drew go to nobody.

    Raises:
        ValueError: if per_client is not 1 to K, or a class is too small to give every owner a row.
    """
    check_clients(clients, len(types))
    kinds, codes, sizes = classes_of(types)
    check_per_client(per_client, len(kinds))
    hands = np.stack([rng.permutation(len(kinds))[:per_client] for _ in range(clients)])
    weights = np.zeros((clients, len(kinds)))
    np.put_along_axis(weights, hands, rng.uniform(0.3, 0.7, hands.shape), axis=1)
    counts = portion(sizes, weights, rng)
    owners = (weights > 0).sum(0)
    short = np.flatnonzero(((weights > 0) & (counts == 0)).any(0))
    if len(short):
        raise ValueError(
            f"class {kinds[short[0]]} has {sizes[short[0]]} rows for {owners[short[0]]} clients; "
            "expected enough to give each at least one"
        )
    return deal(codes, counts, rng)


def groups(codes: Ints, clients: int) -> Parts:
    """Give each client the rows of one natural group.

    Args:
        codes: [N], group of each row, 0 to J - 1.
        clients: J, the number of groups.

    Raises:
        ValueError: if a group has no row.
    """
    empty = np.flatnonzero(np.bincount(codes, minlength=clients) == 0)
    if len(empty):
        raise ValueError(f"group {empty[0]} of {clients} has no row; expected at least one")
    return collect(codes, clients)


def _log_gammas(alpha: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw logarithms of Gamma(alpha) variables, up to a shared constant.

    Gamma(a) = Gamma(a + 1) U^(1/a); in logs nothing vanishes, however small alpha is.
    """
    exponent = rng.standard_exponential(count)
    with np.errstate(over="ignore"):
        power: NDArray[np.float64] = (exponent.min() - exponent) / alpha
    return power + np.log(rng.standard_gamma(alpha + 1, count))
