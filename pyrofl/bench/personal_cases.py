"""Cases of methods with a model, or a posterior, of every client's own; see `cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pyrofl.bench import bayesian_floors, proximal
from pyrofl.bench.cases import Case, Sides, images, network, ours, start
from pyrofl.data import Dataset, Federation
from pyrofl.inference.method import Method
from pyrofl.models import apfl, ditto, fedpop, fedprox, pfedbayes, pfedme, pvi
from pyrofl.nets import Network

CHUNK = 10  # clients side by side at which the floors are fastest

Other = Callable[[Federation], Iterator[object]]
"""Makes the rounds of the other side."""


def beside(loaded: Dataset | None, build: Callable[[Network], Method], other: Other) -> Sides:
    """Put a method of 100 clients beside the same written by hand."""
    data = images(loaded, flat=True)
    return ours(build(network(data)), data), partial(next, other(data))


PLAIN = {"epochs": 1, "batch": 10, "lr": 0.01, "momentum": 0.0}
BY_METHOD: Mapping[str, tuple[Callable[[Network], Method], Other]] = {
    "fedprox-loop": (
        lambda net: fedprox.build(net, mu=0.1, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.fedprox(data, start(data), 10, 0.01, mu=0.1),
    ),
    "ditto-loop": (
        lambda net: ditto.build(net, strength=0.1, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.ditto(data, start(data), 10, 0.01, strength=0.1),
    ),
    "pfedme-loop": (
        lambda net: pfedme.build(net, strength=5.0, lr_centre=0.05, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.pfedme(data, start(data), 10, 0.01, 0.05, strength=5.0, steps=5),
    ),
    "apfl-loop": (
        lambda net: apfl.build(net, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.apfl(data, start(data), 10, 0.01, alpha=0.5, lr_alpha=0.03),
    ),
    "pvi-floor": (
        lambda net: pvi.build(net, epochs=2),
        lambda data: bayesian_floors.pvi(data, start(data), CHUNK, epochs=2),
    ),
    "pfedbayes-floor": (
        lambda net: pfedbayes.build(net, epochs=1),
        lambda data: bayesian_floors.pfedbayes(data, start(data), CHUNK, epochs=1),
    ),
    "fedpop-floor": (
        lambda net: fedpop.build(net, burn_in=1, epochs=2),
        lambda data: bayesian_floors.fedpop(data, start(data), CHUNK, burn_in=1, epochs=2),
    ),
}
PERSONAL: Mapping[str, Case] = {
    name: Case(0.5 if name.endswith("floor") else 1.0, partial(beside, build=build, other=other))
    for name, (build, other) in BY_METHOD.items()
}
