"""The cases of `pyrofl bench`: what they run on, our side and the other, and what we are after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from pyrofl import nets
from pyrofl.bench import floor, one_by_one
from pyrofl.bench.children import child
from pyrofl.bench.federations import equal, images
from pyrofl.data import Dataset, Federation
from pyrofl.inference import fast
from pyrofl.inference.fast.frozen_base import on_frozen_base
from pyrofl.inference.loop.participation import bernoulli, everyone, fraction
from pyrofl.inference.loop.rounds import federate
from pyrofl.inference.method import Method
from pyrofl.models import fedavg, guides, pfedvem
from pyrofl.models.priors import fixed
from pyrofl.tensors import generator

MANY = 1_000_000  # rounds, of which as many are made as are timed
FLOOR_CHUNK = 50  # clients side by side at which the hand-written loop is fastest, on two cores
MLP = "mlp:100"

Side = Callable[[], object]
"""Does the work once."""
Sides = tuple[Side, Side]


class Case(NamedTuple):
    """A comparison."""

    target: float | None  # ratio that we are after
    sides: Callable[[Dataset | None], Sides]  # data set or None -> a round of ours and the other's
    warm: int = 1  # turns that do not count


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
    "fedavg-alone": Case(None, fedavg_alone),
    "pfedvem-floor": Case(0.8, pfedvem_floor),
    "fedavg-floor": Case(0.8, fedavg_floor),
    "few-rows": Case(None, few_rows),
    "svi": Case(10.0, pyro_svi),
    "import": Case(1 / 1.5, importing),
}
