"""The cases of `pyrofl bench`: what they run on, our side and the other, and what we are after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrofl import nets
from pyrofl.bench import floor, good_loop, one_by_one
from pyrofl.bench.children import child
from pyrofl.data import Dataset, Federation
from pyrofl.data.datasets import per_class
from pyrofl.inference import fast
from pyrofl.inference.fast.frozen_base import on_frozen_base
from pyrofl.inference.loop.participation import bernoulli, everyone, fraction
from pyrofl.inference.loop.rounds import federate
from pyrofl.inference.method import Method
from pyrofl.models import fedavg, guides, pfedvem
from pyrofl.models.priors import fixed
from pyrofl.partitions.federations import split
from pyrofl.tensors import generator

MANY = 1_000_000  # rounds, of which as many are made as are timed
FLOOR_CHUNK = 50  # clients side by side at which the hand-written loop is fastest, on two cores
MLP = "mlp:100"
SIDE, CLASSES, ROWS = 28, 10, 5000  # of the images

Side = Callable[[], object]
"""Does the work once."""
Sides = tuple[Side, Side]


class Case(NamedTuple):
    """A comparison."""

    target: float | None  # ratio that we are after
    sides: Callable[[Dataset | None], Sides]  # data set or None -> a round of ours and the other's


def images(loaded: Dataset | None, flat: bool, clients: int = 100) -> Federation:
    """Deal 5,000 images, or rows made up, to unequal clients that each have five labels."""
    table = made_up() if loaded is None else per_class(loaded, ROWS // CLASSES)
    data = split(table, "slices:5", clients=clients, seed=0)
    x = data.x.flatten(1) if flat else data.x.reshape(len(data.x), -1, SIDE, SIDE)
    return Federation(x, data.y, data.train, data.test, data.names, data.classes)


def made_up() -> Dataset:
    """Make up images whose brightness tells their label."""
    g, y = generator(0), torch.arange(ROWS) % CLASSES
    x = torch.rand(ROWS, SIDE * SIDE, generator=g) + 0.1 * y[:, None]
    is_test = torch.rand(ROWS, generator=g) < 0.01
    return Dataset("made up", x, y, is_test, tuple(map(str, range(CLASSES))))


def equal(clients: int, rows: int, features: int = SIDE * SIDE) -> Federation:
    """Give every client this many rows out of one table of 5,000, which clients share."""
    g = generator(1)
    x, y = torch.rand(ROWS, features, generator=g), torch.arange(ROWS) % CLASSES
    train = tuple(torch.randperm(ROWS, generator=g)[:rows] for _ in range(clients))
    none = (torch.zeros(0, dtype=torch.long),) * clients
    return Federation(x, y, train, none, classes=tuple(map(str, range(CLASSES))))


def uneven(sizes: Sequence[int]) -> Federation:
    """Give clients these many rows out of one table of 5,000, which clients share."""
    many = equal(len(sizes), ROWS)
    train = tuple(rows[:size] for rows, size in zip(many.train, sizes, strict=True))
    return replace(many, train=train)


def dirichlet() -> Federation:
    """Deal rows made up to 100 clients, a Dirichlet(0.3) for every label."""
    return split(made_up(), "dirichlet:0.3", clients=100, seed=0)


def zipf(clients: int = 100) -> Federation:
    """Give the k-th client 1 / k of what the first one has, 5,000 rows in all."""
    first = ROWS / sum(1 / k for k in range(1, clients + 1))
    return uneven([max(1, round(first / k)) for k in range(1, clients + 1)])


def giant() -> Federation:
    """Give 99 clients 50 rows each, and one 4,000."""
    return uneven([4000, *(50,) * 99])


def good(loaded: Dataset | None, make: Callable[[], Federation], heads: bool) -> Sides:
    """Put FedAvg, or pFedVEM, of uneven clients beside a good loop, one client at a time."""
    data = make()
    build, loop = (pfedvem.build, good_loop.pfedvem) if heads else (fedavg.build, good_loop.fedavg)
    return ours(build(network(data)), data), partial(next, loop(data, start(data), everyone))


def ours(method: Method, data: Federation, **what: Any) -> Side:
    """Run our loop, a round at every call."""
    return partial(next, federate(method, data, MANY, **what))


def by_every_product(side: Side) -> Side:
    """Run a side with the products of every step; features of a frozen base are still made once."""

    def run() -> object:
        before, fast.REWRITES = fast.REWRITES, (on_frozen_base,)
        try:
            return side()
        finally:
            fast.REWRITES = before

    return run


def network(data: Federation, spec: str = MLP) -> nets.Network:
    """Return a network for the rows of a federation."""
    return nets.build(spec, tuple(data.x.shape[1:]), len(data.classes))


def start(data: Federation) -> list[Tensor]:
    """Return weight [out, in] and bias of an MLP with one hidden layer, and of its head."""
    return list(network(data).init(generator(0)).values())


def pfedvem_plain(loaded: Dataset | None) -> Sides:
    """Put pFedVEM of 100 clients beside one client at a time with a DataLoader."""
    data = images(loaded, flat=True)
    w1, b1, w2, b2 = start(data)
    base = torch.nn.Sequential(torch.nn.Linear(*w1.shape[::-1]), torch.nn.ReLU())
    base.load_state_dict({"0.weight": w1, "0.bias": b1})
    other = one_by_one.pfedvem(data, base, [w2, b2])
    mine = ours(pfedvem.build(network(data)), data, participation=bernoulli(0.1))
    return mine, partial(next, other)


def pfedvem_floor(loaded: Dataset | None) -> Sides:
    """Put pFedVEM, with the products of every step, beside batched torch written by hand."""
    data = images(loaded, flat=True)
    mine = ours(pfedvem.build(network(data)), data, participation=bernoulli(0.1))
    other = floor.pfedvem(data, start(data), FLOOR_CHUNK, 0.1)
    return by_every_product(mine), partial(next, other)


def few_rows(_: Dataset | None) -> Sides:
    """Put FedAvg of 100 clients with 50 rows beside the same with the products of every step."""
    data = equal(clients=100, rows=50)
    method = fedavg.build(network(data))
    return ours(method, data), by_every_product(ours(method, data))


def fedavg_plain(loaded: Dataset | None, spec: str = MLP) -> Sides:
    """Put FedAvg of 100 clients beside one client at a time with a DataLoader."""
    data = images(loaded, flat=spec == MLP)
    net = network(data, spec)
    other = one_by_one.fedavg(data, net.fresh(generator(0)))
    return ours(fedavg.build(net, epochs=1), data), partial(next, other)


def fedavg_floor(loaded: Dataset | None) -> Sides:
    """Put FedAvg, with the products of every step, beside batched torch written by hand."""
    data = images(loaded, flat=True)
    mine = ours(fedavg.build(network(data), epochs=1), data)
    return by_every_product(mine), partial(next, floor.fedavg(data, start(data), FLOOR_CHUNK))


def fedavg_alone(loaded: Dataset | None) -> Sides:
    """Put FedAvg beside the same code, one client at a time."""
    data = images(loaded, flat=True)
    method = fedavg.build(network(data), epochs=1)
    return ours(method, data), ours(method, data, chunk=1)


def pyro_svi(_: Dataset | None) -> Sides:
    """Put Bayesian softmax regression of 100 clients beside `pyro.infer.SVI` for every client."""
    data = equal(clients=100, rows=50, features=64)
    bayesian = {"prior": fixed(), "guide": guides.mean_field, "scale": 0.05, "draws": 1}
    training = {"epochs": 10, "batch": None, "momentum": 0.0}
    method = fedavg.build(network(data, "softmax"), **bayesian, **training)  # type: ignore[arg-type]
    return ours(method, data), partial(next, one_by_one.svi(data, 10, lr=0.01, scale=0.05))


def importing(_: Dataset | None) -> Sides:
    """Put the import of this package beside that of Pyro alone."""
    words = [[sys.executable, "-c", f"import {name}"] for name in ("pyrofl", "pyro, pyro.infer")]
    mine, other = (partial(child, one[-1], one) for one in words)
    return mine, other


def many_clients(clients: int, share: float = 0.1, rows: int = 50) -> tuple[Side, int]:
    """Return a round of FedAvg in which a share of the clients takes part, and their number."""
    data = equal(clients, rows)
    draw = everyone if share == 1 else fraction(share)
    method = fedavg.build(network(data), epochs=1)
    return ours(method, data, participation=draw), max(1, round(share * clients))


CASES: Mapping[str, Case] = {
    "pfedvem-plain": Case(8.0, pfedvem_plain),
    "fedavg-plain": Case(3.0, fedavg_plain),
    "fedavg-cnn-plain": Case(1.0, partial(fedavg_plain, spec="cnn-pfedvem")),
    "fedavg-alone": Case(None, fedavg_alone),
    "pfedvem-floor": Case(0.8, pfedvem_floor),
    "fedavg-floor": Case(0.8, fedavg_floor),
    "few-rows": Case(None, few_rows),
    **{
        f"{method}-good-{make.__name__}": Case(1.5, partial(good, make=make, heads=heads))
        for make in (dirichlet, zipf, giant)
        for method, heads in (("fedavg", False), ("pfedvem", True))
    },
    "svi": Case(10.0, pyro_svi),
    "import": Case(1 / 1.5, importing),
}
