"""The cases: a round of the library, and the same work by other code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import bayesian_floors
import floors
import good_loop
import method_loops
import proximal_loop
import research_loop
import torch
from clients import SETTINGS, partitioned, sized
from torch import Tensor

from pyrofl import nets
from pyrofl.data import Federation
from pyrofl.data.loaders import datasets
from pyrofl.inference.acceleration.recording.recorder import forget
from pyrofl.inference.acceleration.row_space import rewriting
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import bernoulli, everyone, fraction
from pyrofl.models import (
    apfl,
    ditto,
    fedavg,
    fedem,
    fedpop,
    fedprox,
    guides,
    ifca,
    metavd,
    perfedavg,
    pfedbayes,
    pfedme,
    pfedvem,
    pvi,
    scaffold,
)
from pyrofl.models.priors import fixed
from pyrofl.partitions.federations import split
from pyrofl.tensors import generator

MANY = 1_000_000  # rounds; only those that are timed are run
FLOOR_CHUNK = 50  # clients trained together at which the floors of FedAvg and pFedVEM are fastest
CHUNK = 10  # the same for the floors of the Bayesian methods
LIMIT = 300.0  # seconds for an import

Side = Callable[[], object]
"""Does the work once."""
Sides = tuple[Side, Side]


class Case(NamedTuple):
    """A comparison: what makes both sides, and how many turns do not count."""

    sides: Callable[[], Sides]
    warm: int = 1


def ours(method: Method, data: Federation, **options: Any) -> Side:
    """Return a function that runs the next round of the library."""
    return partial(next, federate(method, data, MANY, **options))


def with_all_products(side: Side) -> Side:
    """Return the side without the row space."""

    def run() -> object:
        rewriting.ENABLED = False
        try:
            return side()
        finally:
            rewriting.ENABLED = True

    return run


def network(data: Federation, spec: str = "mlp:100") -> nets.Network:
    """Return a network for the rows of a federation."""
    return nets.build(spec, tuple(data.x.shape[1:]), len(data.classes))


def start(data: Federation) -> list[Tensor]:
    """Return weight [out, in] and bias of an MLP with one hidden layer, and of its head."""
    return list(network(data).init(generator(0)).values())


def good(setting: str, heads: bool, rounds: int = 0) -> Sides:
    """Compare FedAvg, or pFedVEM, with a good loop over clients.

    A turn is the next round or, with `rounds`, that many first rounds of a new run.
    """
    make, draw, _ = SETTINGS[setting]
    data = make()
    build, loop = (pfedvem.build, good_loop.pfedvem) if heads else (fedavg.build, good_loop.fedavg)
    method, begin = build(network(data)), start(data)

    def mine() -> Side:  # pFedVEM trains all clients unless `training_clients` is given
        return ours(method, data, training_clients=draw, check=not rounds)

    def other() -> Side:
        return partial(next, loop(data, begin, draw))

    if not rounds:
        return mine(), other()
    return partial(first_rounds, mine, rounds), partial(first_rounds, other, rounds)


def first_rounds(begin: Callable[[], Side], rounds: int) -> None:
    """Run the first rounds without steps that were recorded earlier."""
    forget()
    side = begin()
    for _ in range(rounds):
        side()


def fedavg_authors(setting: str) -> Sides:
    """Compare FedAvg with a loop over clients that has a DataLoader."""
    data = SETTINGS[setting].make()
    net = network(data)
    other = research_loop.fedavg(data, net.init_module(generator(0)))
    return ours(fedavg.build(net, epochs=1), data), partial(next, other)


def pfedvem_authors(setting: str, share: float) -> Sides:
    """Compare pFedVEM, with this share of reporters, with a loop that has a DataLoader."""
    data = SETTINGS[setting].make()
    w1, b1, w2, b2 = start(data)
    base = torch.nn.Sequential(torch.nn.Linear(*w1.shape[::-1]), torch.nn.ReLU())
    base.load_state_dict({"0.weight": w1, "0.bias": b1})
    other = research_loop.pfedvem(data, base, [w2, b2], share)
    draw = everyone if share == 1 else bernoulli(share)
    return ours(pfedvem.build(network(data)), data, participation=draw), partial(next, other)


def fedavg_floor() -> Sides:
    """Compare FedAvg, without the row space, with stacked clients in plain torch."""
    data = partitioned("slices:5")
    mine = ours(fedavg.build(network(data), epochs=1), data)
    return with_all_products(mine), partial(next, floors.fedavg(data, start(data), FLOOR_CHUNK))


def pfedvem_floor() -> Sides:
    """Compare pFedVEM, without the row space, with stacked clients in plain torch."""
    data = partitioned("slices:5")
    mine = ours(pfedvem.build(network(data)), data, participation=bernoulli(0.1))
    other = floors.pfedvem(data, start(data), FLOOR_CHUNK, 0.1)
    return with_all_products(mine), partial(next, other)


Build = Callable[[nets.Network], Method]
Other = Callable[[Federation, list[Tensor]], Iterator[object]]
"""(data, first weights) -> the rounds of the other side."""


def compared(setting: str, build: Build, other: Other) -> Sides:
    """Compare a method with code written for it."""
    data = SETTINGS[setting].make()
    return ours(build(network(data)), data), partial(next, other(data, start(data)))


def images(spec: str, clients: int, rows: int) -> Sides:
    """Compare FedAvg of a convolutional network with a good loop over clients."""
    data = sized([rows] * clients, (3, 32, 32), table=1000, seed=2)  # as large as those of CIFAR
    net = network(data, spec)
    method = fedavg.build(net, epochs=1, batch=good_loop.BATCH)
    return ours(method, data), partial(next, good_loop.images(data, net.init_module(generator(0))))


def pyro_svi() -> Sides:
    """Compare Bayesian softmax regression of 100 clients with `pyro.infer.SVI` for each client."""
    data = sized([50] * 100, (64,))
    bayesian = {
        "prior": fixed(),
        "guide": guides.mean_field,
        "init_scale": 0.05,
        "num_particles": 1,
    }
    training = {"epochs": 10, "batch": None, "momentum": 0.0}
    method = fedavg.build(network(data, "softmax"), **bayesian, **training)
    return ours(method, data), partial(next, research_loop.svi(data, 10, lr=0.01, scale=0.05))


def importing() -> Sides:
    """Compare the import of the package with the import of Pyro."""

    def of(names: str) -> Side:
        words = [sys.executable, "-c", f"import {names}"]
        return partial(subprocess.run, words, check=True, timeout=LIMIT)

    return of("pyrofl"), of("pyro, pyro.infer")


def many_clients(clients: int, base: int = 1000) -> Sides:
    """Compare a tenth of the clients with a tenth of 1,000, each in a round of FedAvg."""

    def of(count: int) -> Side:
        data = sized([50] * count)
        method = fedavg.build(network(data), epochs=1)
        return ours(method, data, participation=fraction(0.1))

    return of(clients), of(base)


def two_of_many() -> Sides:
    """Compare pFedVEM with 2 of 10,000 clients per round with 2 of 100."""

    def of(count: int) -> Side:
        data = sized([50] * count)
        draw = SETTINGS["two"].draw
        method = pfedvem.build(network(data))
        return ours(method, data, training_clients=draw)

    return of(10_000), of(100)


def variant(change: Callable[[Method], Method]) -> Sides:
    """Compare FedAvg with a small change of the method with FedAvg as it is."""
    data = split(datasets.load("digits"), "slices:5", clients=20, seed=0)
    data = replace(data, x=data.x.flatten(1))
    method = fedavg.build(network(data, "mlp:50"))
    return ours(change(method), data, record=True), ours(method, data)


def with_step(method: Method, **changes: Any) -> Method:
    """Replace fields of the gradient step of FedAvg."""
    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    return replace(method, phases=(replace(phase, updates=(replace(step, **changes),)),))


def with_one_more_update(method: Method) -> Method:
    """Shrink the weights a little after each gradient step of FedAvg."""

    def shrink(received: Any, local: Any, batch: Any) -> Any:
        return {n: 0.9999 * local[n] for n in received}

    (phase,) = method.phases
    return replace(method, phases=(Phase((*phase.updates, shrink), phase.epochs, phase.batch),))


def with_own_model(method: Method) -> Method:
    """Wrap the model of FedAvg in a function, so that nothing is known about it."""

    def model(received: Any, local: Any, batch: Any) -> None:
        method.model(received, local, batch)

    return replace(method, model=model)


PLAIN: Mapping[str, Any] = {"epochs": 1, "batch": 10, "lr": 0.01, "momentum": 0.0}
PROXIMAL: Mapping[str, tuple[Build, Other]] = {
    "fedprox": (
        lambda net: fedprox.build(net, mu=0.1, **PLAIN),
        lambda data, w: proximal_loop.fedprox(data, w, 10, 0.01, mu=0.1),
    ),
    "ditto": (
        lambda net: ditto.build(net, strength=0.1, **PLAIN),
        lambda data, w: proximal_loop.ditto(data, w, 10, 0.01, strength=0.1),
    ),
    "pfedme": (
        lambda net: pfedme.build(net, strength=5.0, lr_center=0.05, **PLAIN),
        lambda data, w: proximal_loop.pfedme(data, w, 10, 0.01, 0.05, strength=5.0, steps=5),
    ),
    "apfl": (
        lambda net: apfl.build(net, **PLAIN),
        lambda data, w: proximal_loop.apfl(data, w, 10, 0.01, alpha=0.5, lr_alpha=0.03),
    ),
}
BAYESIAN: Mapping[str, tuple[Build, Other]] = {
    "pvi": (
        lambda net: pvi.build(net, epochs=2, sampling="weights"),
        lambda data, w: bayesian_floors.pvi(data, w, CHUNK, epochs=2),
    ),
    "pfedbayes": (
        lambda net: pfedbayes.build(net, epochs=1),
        lambda data, w: bayesian_floors.pfedbayes(data, w, CHUNK, epochs=1),
    ),
    "fedpop": (
        lambda net: fedpop.build(net, burn_in=1, epochs=2),
        lambda data, w: bayesian_floors.fedpop(data, w, CHUNK, burn_in=1, epochs=2),
    ),
}


def several(data: Federation, count: int) -> list[list[Tensor]]:
    """Return weights of several networks."""
    return [list(network(data).init(generator(k)).values()) for k in range(count)]


def metavd_loop(data: Federation, weights: list[Tensor]) -> Iterator[object]:
    """Run the loop of MetaVD."""
    learned = method_loops.hypernetwork(data.clients, weights[0].numel())
    return method_loops.metavd(data, weights, *learned)


METHODS: Mapping[str, tuple[Build, Other]] = {
    "scaffold": (scaffold.build, method_loops.scaffold),
    "ifca": (ifca.build, lambda data, _: method_loops.ifca(data, several(data, 2))),
    "perfedavg": (perfedavg.build, method_loops.perfedavg),
    "fedem": (fedem.build, lambda data, _: method_loops.fedem(data, several(data, 3))),
    "pvi": (lambda net: pvi.build(net, warm_start=0, damping=0.1), method_loops.pvi),
    "metavd": (metavd.build, metavd_loop),
}
HEADS = {"fedavg": False, "pfedvem": True}

CASES: Mapping[str, Case] = {
    **{
        f"{name}-good-{setting}": Case(partial(good, setting, heads), SETTINGS[setting].warm)
        for name, heads in HEADS.items()
        for setting in SETTINGS
    },
    **{
        f"{name}-good-{setting}-first": Case(partial(good, setting, heads, rounds=10))
        for name, heads in HEADS.items()
        for setting in ("two", "zipf-two")
    },
    **{
        f"{name}-good-{setting}": Case(partial(compared, setting, *PROXIMAL[name]), 3)
        for name in PROXIMAL
        for setting in ("slices", "dirichlet", "giant")
        if setting == "slices" or name in ("ditto", "pfedme")
    },
    **{
        f"{name}-good-{setting}": Case(partial(compared, setting, *METHODS[name]), 3)
        for name in METHODS
        for setting in ("slices", "slices-20", "digits", "digits-20")
    },
    **{
        f"{name}-floor-slices": Case(partial(compared, "slices", *BAYESIAN[name]), 3)
        for name in BAYESIAN
    },
    "fedavg-floor": Case(fedavg_floor),
    "pfedvem-floor": Case(pfedvem_floor),
    "cnn-good-20": Case(partial(images, "cnn-pfedvem", clients=20, rows=50)),
    "cnn-good-100": Case(partial(images, "cnn-pfedvem", clients=100, rows=50)),
    "resnet-good-20": Case(partial(images, "resnet20", clients=20, rows=20)),
    "pfedvem-authors-slices": Case(partial(pfedvem_authors, "slices", 0.1)),
    "pfedvem-authors-dirichlet": Case(partial(pfedvem_authors, "dirichlet", 1.0)),
    "pfedvem-authors-giant": Case(partial(pfedvem_authors, "giant", 1.0)),
    **{
        f"fedavg-authors-{setting}": Case(partial(fedavg_authors, setting))
        for setting in ("slices", "dirichlet", "giant")
    },
    "svi": Case(pyro_svi),
    "import": Case(importing),
    "clip-plain": Case(
        lambda: variant(partial(with_step, optim=sgd(0.01, 0.9, clip=10.0))), warm=3
    ),
    "adam-plain": Case(lambda: variant(partial(with_step, optim=adam(0.001))), warm=3),
    "own-model-plain": Case(lambda: variant(with_own_model), warm=3),
    "one-more-update-plain": Case(lambda: variant(with_one_more_update), warm=3),
    "clients-100": Case(partial(many_clients, 100)),
    "clients-10000": Case(partial(many_clients, 10_000)),
    "two-of-10000": Case(two_of_many, warm=10),
}
