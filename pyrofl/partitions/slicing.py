"""Partitions that cut every class for equally many owners (pFedVEM's experiments)."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pyrofl.partitions.allocation import (
    Ints,
    Parts,
    check_clients,
    check_multiple,
    check_per_client,
    check_rows,
    classes_of,
    deal,
    portion,
)

Cuts = Literal["equal", "shared", "independent"]


def label_groups(
    types: Ints, clients: int, per_client: int, rng: np.random.Generator, *, cuts: Cuts = "shared"
) -> Parts:
    """Give each client exactly `per_client` of the K classes; groups of clients cover all.

    Consecutive groups of K / per_client clients deal the K classes among themselves at random, so
    each class has J * per_client / K owners (pFedVEM: pairs with five of ten labels each).

    Args:
        types: [N], class of each row.
        clients: J, divisible by K / per_client.
        per_client: classes of a client; divides K.
        rng: draws classes, cuts and rows.
        cuts: how a class is cut for its owners. "equal": the same size up to one row. "shared":
            distinct uniform cut points, drawn once for all classes, so that all classes of a
            client are equally large and client sizes have a coefficient of variation near 1.
            "independent": the same, drawn for each class.

    Raises:
        ValueError: if per_client does not divide K, clients is no multiple of K / per_client, a
            class has fewer rows than owners, or cuts is unknown.
    """
    check_clients(clients, len(types))
    kinds, codes, sizes = classes_of(types)
    check_per_client(per_client, len(kinds))
    if len(kinds) % per_client:
        raise ValueError(
            f"labels per client is {per_client}; expected a divisor of the {len(kinds)} classes"
        )
    group = len(kinds) // per_client
    check_multiple(clients, group)
    hands = [
        rng.permutation(len(kinds)).reshape(group, per_client) for _ in range(clients // group)
    ]
    owned = np.zeros((clients, len(kinds)), dtype=np.bool_)
    np.put_along_axis(owned, np.concatenate(hands), True, axis=1)
    check_rows(kinds, sizes, owned.sum(0))
    return deal(codes, _cut(sizes, owned, cuts, rng), rng)


def drift(
    types: Ints, coarse: Ints, clients: int, rng: np.random.Generator, *, cuts: Cuts = "shared"
) -> Parts:
    """Give each client one fine class of every superclass: the concept drifts between clients.

    With F fine classes in every superclass, consecutive groups of F clients deal them among
    themselves at random (pFedVEM on CIFAR-100: 20 superclasses of 5).

    Args:
        types: [N], fine class of each row.
        coarse: [N], superclass of each row.
        clients: J, divisible by F.
        rng: draws classes, cuts and rows.
        cuts: as in `label_groups`.

    Raises:
        ValueError: if superclasses differ in their number of fine classes, a fine class lies in
            two of them, clients is no multiple of F, a class has fewer rows than owners, or cuts
            is unknown.
    """
    check_clients(clients, len(types))
    kinds, codes, sizes = classes_of(types)
    pairs = np.unique(np.stack([coarse, codes]), axis=1)
    _, per_super = np.unique(pairs[0], return_counts=True)
    if pairs.shape[1] != len(kinds) or len(set(per_super)) != 1:
        raise ValueError(
            f"superclasses hold {sorted(set(per_super.tolist()))} fine classes each, "
            f"{pairs.shape[1]} pairs for {len(kinds)} fine classes; expected every superclass to "
            "hold equally many and every fine class to lie in one"
        )
    group = int(per_super[0])
    check_multiple(clients, group)
    fine = pairs[1].reshape(-1, group)
    hands = [rng.permuted(fine, axis=1).T for _ in range(clients // group)]
    owned = np.zeros((clients, len(kinds)), dtype=np.bool_)
    np.put_along_axis(owned, np.concatenate(hands), True, axis=1)
    check_rows(kinds, sizes, owned.sum(0))
    return deal(codes, _cut(sizes, owned, cuts, rng), rng)


def random_slices(rows: int, parts: int, rng: np.random.Generator) -> Ints:
    """Draw the sizes [parts] of consecutive slices between distinct uniform cut points.

    Every slice has at least one row; sizes are nearly geometric (pFedVEM's random slicing).
    """
    cuts = np.sort(rng.choice(rows - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=rows).astype(np.int64)


def _cut(sizes: Ints, owned: NDArray[np.bool_], cuts: Cuts, rng: np.random.Generator) -> Ints:
    """Return counts [J, K]: each class cut for its owners, who are as many for every class."""
    if cuts not in get_args(Cuts):
        raise ValueError(f"cuts is {cuts!r}; expected one of {', '.join(get_args(Cuts))}")
    if cuts == "equal":
        return portion(sizes, owned, rng)
    owners = int(owned[:, 0].sum())
    common = random_slices(int(sizes.max()), owners, rng)
    extra = np.zeros(owned.shape)
    for k, size in enumerate(sizes):
        slices = common if cuts == "shared" else random_slices(int(size), owners, rng)
        # The authors hand out parts from the end, in the order of clients.
        extra[owned[:, k], k] = slices[::-1] - 1
    # Shared cuts are scaled to each class; where classes are equally large they stay as drawn.
    return owned + portion(sizes - owners, extra, rng)
