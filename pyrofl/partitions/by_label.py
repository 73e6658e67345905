"""Partitions by class label; each function returns the row numbers of every client.

Each function takes the class of every row (int [N], any codes) and returns the rows of every
client. Every row has exactly one client unless the docstring states otherwise, no client is
empty, and all randomness comes from the generator. A ValueError reports partitions that are
impossible.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Annotated, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from pyrofl.arguments import Range, Whole, checked
from pyrofl.partitions import allocation
from pyrofl.partitions.allocation import Classes, Ints, Parts, deal, in_proportion

Concentration = Annotated[float, Range(0, inf, open_low=True, open_high=True)]
Cuts = Literal["equal", "shared", "independent"]


def iid(types: Ints, clients: int, rng: Generator) -> Parts:
    """Partition all rows at random into clients whose sizes differ by at most one."""
    _classes(types, clients)
    return allocation.deal_evenly(len(types), clients, rng)


@checked
def dirichlet(
    types: Ints,
    clients: int,
    alpha: Concentration,
    rng: Generator,
    *,
    minimum: int = 1,
    balance: bool = False,
) -> Parts:
    """Split each class among clients by fractions from a symmetric Dirichlet distribution.

    Papers repeat the draw until every client is large enough, which for small alpha never ends;
    here random rows move from the largest clients to those that are too small. With `balance` a
    client that already holds N / J rows gets no more classes (FedBE's code).
    """
    _, codes, sizes = _classes(types, clients)
    most = len(types) // clients
    if not 1 <= minimum <= most:
        raise ValueError(f"minimum size is {minimum}; expected 1 to {most} for {clients} clients")
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    for k, size in enumerate(sizes):
        log_shares = _log_gammas(alpha, clients, rng)
        if balance:
            log_shares[counts.sum(1) * clients >= len(types)] = -np.inf
        # Dividing by the last sum, not by the sum, leaves nothing to clients with share zero.
        up_to = np.cumsum(np.exp(log_shares - log_shares.max()))
        ends = np.floor(up_to / up_to[-1] * size).astype(np.int64)
        counts[:, k] = np.diff(ends, prepend=0)
    return deal(codes, allocation.top_up(counts, minimum, rng), rng)


def labels(types: Ints, clients: int, per_client: int, rng: Generator) -> Parts:
    """Assign at most `per_client` classes to each client, as in FedRep's experiments.

    Every class is cut into shards, equally many up to one, and each client receives
    `per_client` shards at random; two may be of one class, hence "at most".
    """
    kinds, codes, sizes = _classes(types, clients, per_client)
    if clients * per_client < len(kinds):
        held = f"{clients} clients with {per_client} labels each"
        raise ValueError(f"{held} cannot hold {len(kinds)} classes; expected more of either")
    whole, rest = divmod(clients * per_client, len(kinds))
    every = np.arange(len(kinds))
    pack = np.concatenate([np.tile(every, whole), rng.permutation(len(kinds))[:rest]])
    hands = rng.permutation(pack).reshape(clients, per_client)
    shards = (hands[:, :, None] == every).sum(1)
    _refuse_small(kinds, sizes, shards.sum(0))
    return deal(codes, in_proportion(sizes, shards, rng), rng)


@checked
def label_groups(
    types: Ints, clients: int, per_client: int, rng: Generator, *, cuts: Cuts = "shared"
) -> Parts:
    """Assign `per_client` classes to each client; each group of clients covers all classes.

    Consecutive groups of K / per_client clients partition the K classes at random, so
    each class has J * per_client / K owners (pFedVEM: pairs with five of ten labels each).

    They cut it "equal": the same size up to one row; "shared": at distinct uniform points, drawn
    once for all classes, so that all classes of a client are equally large and client sizes have
    a coefficient of variation near 1; "independent": the same, drawn for each class.
    """
    classes = _classes(types, clients, per_client)
    kinds = len(classes.kinds)
    if kinds % per_client:
        raise ValueError(f"per_client is {per_client}; expected a divisor of the {kinds} classes")
    shape = (kinds // per_client, per_client)
    hands = _of_groups(clients, shape[0], lambda: rng.permutation(kinds).reshape(shape))
    return _deal_cut(classes, hands, cuts, rng)


@checked
def drift(
    types: Ints, coarse: Ints, clients: int, rng: Generator, *, cuts: Cuts = "shared"
) -> Parts:
    """Assign each client one fine class of every superclass, to simulate concept drift.

    With F fine classes per superclass, consecutive groups of F clients partition them at random
    (pFedVEM on CIFAR-100: 20 superclasses of 5), cut as by `label_groups`.
    """
    classes = _classes(types, clients)
    pairs = np.unique(np.stack([coarse, classes.codes]), axis=1)
    _, per_super = np.unique(pairs[0], return_counts=True)
    if pairs.shape[1] != len(classes.kinds) or len(set(per_super)) != 1:
        raise ValueError(
            f"superclasses hold {sorted(set(per_super.tolist()))} fine classes each, "
            f"{pairs.shape[1]} pairs for {len(classes.kinds)} fine classes; expected every "
            "superclass to have the same number of fine classes, each in one superclass"
        )
    fine = pairs[1].reshape(-1, per_super[0])
    hands = _of_groups(clients, per_super[0], lambda: rng.permuted(fine, axis=1).T)
    return _deal_cut(classes, hands, cuts, rng)


@checked
def step(types: Ints, clients: int, majors: int, rng: Generator, *, minor: Whole = 10) -> Parts:
    """Assign each client `majors` major classes, and `minor` rows of every other class (FedBE).

    Every class is major for the same number of clients, which share the remaining rows equally.
    FedBE on CIFAR-10, 10 clients, 40,000 rows: 2 x 1,960 + 8 x 10 rows each.
    """
    kinds, codes, sizes = _classes(types, clients, majors)
    owners, rest = divmod(clients * majors, len(kinds))
    if rest:
        total = f"{clients} clients x {majors} major classes"
        raise ValueError(f"{total}; expected a multiple of the {len(kinds)} classes")
    needed = owners + minor * (clients - owners)
    _refuse_small(kinds, sizes, np.full(len(kinds), needed))
    major = np.zeros((clients, len(kinds)), dtype=np.bool_)
    for mine in major:
        # The classes that were major for the fewest clients so far; ties are broken at random.
        mine[np.lexsort((rng.random(len(kinds)), major.sum(0)))[:majors]] = True
    large = in_proportion(sizes - minor * (clients - owners), major, rng)
    return deal(codes, np.where(major, large, minor), rng)


def shares(types: Ints, clients: int, per_client: int, rng: Generator) -> Parts:
    """Assign each client random classes, split in proportion to U(0.3, 0.7) weights (pFedMB).

    Client j gets the fraction u_jc / sum_i u_ic of class c, over the owners i of that class.

    Rows of a class that no client drew have no client.
    """
    kinds, codes, sizes = _classes(types, clients, per_client)
    hands = np.stack([rng.permutation(len(kinds))[:per_client] for _ in range(clients)])
    weights = np.zeros((clients, len(kinds)))
    np.put_along_axis(weights, hands, rng.uniform(0.3, 0.7, hands.shape), axis=1)
    counts = in_proportion(sizes, weights, rng)
    owners = (weights > 0).sum(0)
    for k in np.flatnonzero(((weights > 0) & (counts == 0)).any(0)):
        owned = f"{sizes[k]} rows for {owners[k]} clients"
        raise ValueError(f"class {kinds[k]} has {owned}; expected at least one for each")
    return deal(codes, counts, rng)


def _deal_cut(classes: Classes, hands: Ints, cuts: Cuts, rng: Generator) -> Parts:
    """Split the rows of each class among its clients, given each client's classes [J, S]."""
    kinds, codes, sizes = classes
    owned = np.zeros((len(hands), len(kinds)), dtype=np.bool_)
    np.put_along_axis(owned, hands, True, axis=1)
    _refuse_small(kinds, sizes, owned.sum(0))
    if cuts == "equal":
        return deal(codes, in_proportion(sizes, owned, rng), rng)
    owners = int(owned[:, 0].sum())
    common = _random_slices(int(sizes.max()), owners, rng)
    extra = np.zeros(owned.shape)
    for k, size in enumerate(sizes):
        slices = common if cuts == "shared" else _random_slices(int(size), owners, rng)
        # The authors' code assigns parts from the end, in the order of clients.
        extra[owned[:, k], k] = slices[::-1] - 1
    # Shared cuts are scaled to each class; where classes are equally large they stay as drawn.
    return deal(codes, owned + in_proportion(sizes - owners, extra, rng), rng)


def _random_slices(rows: int, parts: int, rng: Generator) -> Ints:
    """Draw positive integers that add up to `rows`, by cuts at random points (pFedVEM)."""
    cuts = np.sort(rng.choice(rows - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=rows).astype(np.int64)


def _log_gammas(alpha: float, count: int, rng: Generator) -> NDArray[np.float64]:
    """Draw logarithms of Gamma(alpha) variables, up to a common additive constant.

    Gamma(a) = Gamma(a + 1) U^(1/a); logarithms do not underflow for small alpha.
    """
    exponent = rng.standard_exponential(count)
    with np.errstate(over="ignore"):
        power: NDArray[np.float64] = (exponent.min() - exponent) / alpha
    return power + np.log(rng.standard_gamma(alpha + 1, count))


def _classes(types: Ints, clients: int, per_client: int = 1) -> Classes:
    """Encode the class labels of rows as codes; raise ValueError if there are too few classes."""
    if not 1 <= clients <= len(types):
        raise ValueError(f"clients is {clients}; expected 1 to {len(types)}, the number of rows")
    classes = allocation.classes_of(types)
    if not 1 <= per_client <= len(classes.kinds):
        raise ValueError(f"classes per client is {per_client}; expected 1 to {len(classes.kinds)}")
    return classes


def _of_groups(clients: int, group: int, draw: Callable[[], Ints]) -> Ints:
    """Draw the classes of each client [J, S], one group of clients after the other."""
    if clients % group:
        raise ValueError(
            f"clients is {clients}; expected a multiple of {group}, the size of a group of clients"
        )
    return np.concatenate([draw() for _ in range(clients // group)])


def _refuse_small(kinds: Ints, sizes: Ints, needed: Ints) -> None:
    for kind, size, least in zip(kinds, sizes, needed, strict=True):
        if size < least:
            raise ValueError(f"class {kind} has {size} rows; expected at least {least}")
