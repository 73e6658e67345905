"""Cases of methods with a model, or a posterior, of every client's own; see `cases`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pyrofl.bench import bayesian_floors, proximal
from pyrofl.bench.cases import Case, Sides, network, ours, start
from pyrofl.bench.federations import FEDERATIONS
from pyrofl.data import Dataset, Federation
from pyrofl.inference.method import Method
from pyrofl.models import apfl, ditto, fedpop, fedprox, pfedbayes, pfedme, pvi
from pyrofl.nets import Network

CHUNK = 10  # clients side by side at which the floors are fastest

Build = Callable[[Network], Method]
Other = Callable[[Federation], Iterator[object]]
"""Makes the rounds of the other side."""


def beside(loaded: Dataset | None, dealt: str, build: Build, other: Other) -> Sides:
    """Put a method, of all clients of a federation, beside the same written by hand."""
    data = FEDERATIONS[dealt].make(loaded)
    return ours(build(network(data)), data), partial(next, other(data))


def case(target: float, build: Build, other: Other, dealt: str = "slices") -> Case:
    """Return the case of a method."""
    sides = partial(beside, dealt=dealt, build=build, other=other)
    return Case(target, sides, FEDERATIONS[dealt].warm)


PLAIN = {"epochs": 1, "batch": 10, "lr": 0.01, "momentum": 0.0}
LOOPS: Mapping[str, tuple[Build, Other]] = {
    "fedprox": (
        lambda net: fedprox.build(net, mu=0.1, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.fedprox(data, start(data), 10, 0.01, mu=0.1),
    ),
    "ditto": (
        lambda net: ditto.build(net, strength=0.1, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.ditto(data, start(data), 10, 0.01, strength=0.1),
    ),
    "pfedme": (
        lambda net: pfedme.build(net, strength=5.0, lr_centre=0.05, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.pfedme(data, start(data), 10, 0.01, 0.05, strength=5.0, steps=5),
    ),
    "apfl": (
        lambda net: apfl.build(net, **PLAIN),  # type: ignore[arg-type]
        lambda data: proximal.apfl(data, start(data), 10, 0.01, alpha=0.5, lr_alpha=0.03),
    ),
}
BAYESIAN: Mapping[str, tuple[Build, Callable[..., Iterator[object]]]] = {
    "pvi": (
        lambda net: pvi.build(net, epochs=2),
        lambda data, chunk: bayesian_floors.pvi(data, start(data), chunk, epochs=2),
    ),
    "pfedbayes": (
        lambda net: pfedbayes.build(net, epochs=1),
        lambda data, chunk: bayesian_floors.pfedbayes(data, start(data), chunk, epochs=1),
    ),
    "fedpop": (
        lambda net: fedpop.build(net, burn_in=1, epochs=2),
        lambda data, chunk: bayesian_floors.fedpop(data, start(data), chunk, burn_in=1, epochs=2),
    ),
}
HARD = ("dirichlet", "giant")  # federations of the methods with a proximal loss that take longest
PERSONAL: Mapping[str, Case] = {
    **{f"{name}-good-slices": case(1.0, *LOOPS[name]) for name in LOOPS},
    **{
        f"{name}-good-{dealt}": case(1.0, *LOOPS[name], dealt)
        for name in ("ditto", "pfedme")
        for dealt in HARD
    },
    **{
        f"{name}-{kind}-slices": case(target, build, partial(other, chunk=chunk))
        for name, (build, other) in BAYESIAN.items()
        for kind, target, chunk in (("good", 1.0, 1), ("floor", 0.5, CHUNK))
    },
}
