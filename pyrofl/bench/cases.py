"""The cases of `pyrofl bench`: our side and the other, and the ratio that we are after."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrofl import nets
from pyrofl.bench import floor, plain, svi
from pyrofl.bench.federations import equal, images
from pyrofl.bench.timing import Side
from pyrofl.data import Dataset, Federation
from pyrofl.inference.loop.participation import bernoulli, everyone, fraction
from pyrofl.inference.loop.rounds import federate
from pyrofl.inference.method import Method
from pyrofl.models import fedavg, guides, pfedvem
from pyrofl.models.priors import fixed
from pyrofl.tensors import generator

MANY = 1_000_000  # rounds, of which as many are made as are timed
FLOOR_CHUNK = 50  # clients side by side at which the hand-written loop is fastest, on two cores
MLP = "mlp:100"

Sides = tuple[Side, Side]


class Case(NamedTuple):
    """A comparison."""

    text: str
    target: float | None  # ratio that we are after
    sides: Callable[[Dataset | None], Sides]  # data set or None -> a round of ours and the other's


def turning(rounds: Iterator[Any]) -> Side:
    """Make one round of an endless run at every call."""
    return lambda: next(rounds)


def ours(method: Method, data: Federation, **what: Any) -> Side:
    """Run our loop, a round at every call."""
    return turning(federate(method, data, MANY, **what))


def without_shortcuts(method: Method) -> Method:
    """Hide what the model is, so that every phase runs as it is written."""
    model = method.model
    return replace(method, model=lambda *args: model(*args))


def network(data: Federation, spec: str = MLP) -> nets.Network:
    """Return a network for the rows of a federation."""
    return nets.build(spec, tuple(data.x.shape[1:]), len(data.classes))


def start(data: Federation) -> list[Tensor]:
    """Return weight [out, in] and bias of an MLP with one hidden layer, and of its head."""
    return list(network(data).init(generator(0)).values())


def pfedvem_plain(loaded: Dataset | None) -> Sides:
    """Put pFedVEM beside one client at a time."""
    data = images(loaded, flat=True)
    net = network(data)
    w1, b1, w2, b2 = start(data)
    base = torch.nn.Sequential(torch.nn.Linear(*w1.shape[::-1]), torch.nn.ReLU())
    base.load_state_dict({"0.weight": w1, "0.bias": b1})
    other = plain.pfedvem(data, base, [w2, b2])
    return ours(pfedvem.build(net), data, participation=bernoulli(0.1)), turning(other)


def pfedvem_floor(loaded: Dataset | None) -> Sides:
    """Put pFedVEM, with the products of every step, beside batched torch written by hand."""
    data = images(loaded, flat=True)
    method = without_shortcuts(pfedvem.build(network(data)))
    other = floor.pfedvem(data, start(data), FLOOR_CHUNK, 0.1)
    return ours(method, data, participation=bernoulli(0.1)), turning(other)


def few_rows(_: Dataset | None) -> Sides:
    """Put FedAvg of clients with few rows beside the same with the products of every step."""
    data = equal(clients=100, rows=50)
    method = fedavg.build(network(data))
    return ours(method, data), ours(without_shortcuts(method), data)


def fedavg_plain(loaded: Dataset | None, spec: str) -> Sides:
    """Put FedAvg beside one client at a time."""
    data = images(loaded, flat=spec == MLP)
    net = network(data, spec)
    return ours(fedavg.build(net, epochs=1), data), turning(
        plain.fedavg(data, net.fresh(generator(0)))
    )


def fedavg_floor(loaded: Dataset | None) -> Sides:
    """Put FedAvg, with the products of every step, beside batched torch written by hand."""
    data = images(loaded, flat=True)
    method = without_shortcuts(fedavg.build(network(data), epochs=1))
    other = floor.fedavg(data, start(data), FLOOR_CHUNK, 1, 10, 0.01, 0.9)
    return ours(method, data), turning(other)


def fedavg_alone(loaded: Dataset | None) -> Sides:
    """Put FedAvg beside the same code, one client at a time."""
    data = images(loaded, flat=True)
    method = fedavg.build(network(data), epochs=1)
    return ours(method, data), ours(method, data, chunk=1)


def pyro_svi(_: Dataset | None) -> Sides:
    """Put Bayesian softmax regression beside `pyro.infer.SVI` for every client."""
    data = equal(clients=100, rows=50, features=64)
    bayesian = {"prior": fixed(), "guide": guides.mean_field, "scale": 0.05, "draws": 1}
    training = {"epochs": 10, "batch": None, "momentum": 0.0}
    method = fedavg.build(network(data, "softmax"), **bayesian, **training)  # type: ignore[arg-type]
    return ours(method, data), turning(svi.federated(data, steps=10, lr=0.01, scale=0.05))


def importing(_: Dataset | None) -> Sides:
    """Put the import of this package beside that of Pyro alone."""
    mine, pyros = (
        [sys.executable, "-c", f"import {name}"] for name in ("pyrofl", "pyro, pyro.infer")
    )
    run = partial(subprocess.run, check=True)
    return lambda: run(mine), lambda: run(pyros)


def many_clients(clients: int, share: float = 0.1, rows: int = 50) -> tuple[Side, int]:
    """Return a round of FedAvg in which a share of the clients takes part, and their number."""
    data = equal(clients, rows)
    draw = everyone if share == 1 else fraction(share)
    method = fedavg.build(network(data), epochs=1)
    return ours(method, data, participation=draw), max(1, round(share * clients))


CASES: Mapping[str, Case] = {
    "pfedvem-plain": Case(
        "a round of pFedVEM, 100 clients, against one client at a time with a DataLoader",
        8.0,
        pfedvem_plain,
    ),
    "fedavg-plain": Case(
        "a round of FedAvg, 100 clients, MLP, against one client at a time with a DataLoader",
        3.0,
        partial(fedavg_plain, spec=MLP),
    ),
    "fedavg-cnn-plain": Case("the same with a CNN", 1.0, partial(fedavg_plain, spec="cnn-pfedvem")),
    "fedavg-alone": Case("the same code with chunk=1, MLP", None, fedavg_alone),
    "pfedvem-floor": Case("batched torch by hand, without Pyro: pFedVEM", 0.8, pfedvem_floor),
    "fedavg-floor": Case("batched torch by hand, without Pyro: FedAvg", 0.8, fedavg_floor),
    "few-rows": Case(
        "the same code without training in the space of rows: FedAvg, 100 clients of 50 rows",
        None,
        few_rows,
    ),
    "svi": Case("pyro.infer.SVI for each of 100 clients with 50 rows", 10.0, pyro_svi),
    "import": Case("import of pyro", 1 / 1.5, importing),
}
