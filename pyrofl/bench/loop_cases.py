"""Cases of FedAvg and pFedVEM beside loops that train one client at a time; see `cases`.

One is what somebody writes who wants it fast (`good_loop`), one what authors write
(`one_by_one`): modules, a DataLoader, and nothing kept that could be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from pyrofl.bench import good_loop, one_by_one
from pyrofl.bench.cases import MLP, Case, Side, Sides, network, ours, start
from pyrofl.bench.federations import FEDERATIONS, images
from pyrofl.data import Dataset, Federation
from pyrofl.inference.fast.replay import forget
from pyrofl.inference.loop.participation import bernoulli, everyone
from pyrofl.models import fedavg, pfedvem
from pyrofl.tensors import generator


def good(loaded: Dataset | None, dealt: str, heads: bool, rounds: int = 0) -> Sides:
    """Put FedAvg, or pFedVEM, beside a good loop, one client at a time.

    A turn is the next round or, where there are `rounds`, so many of a run that begins anew.
    """
    make, draw, _ = FEDERATIONS[dealt]
    data = make(loaded)
    build, loop = (pfedvem.build, good_loop.pfedvem) if heads else (fedavg.build, good_loop.fedavg)
    method, begin = build(network(data)), start(data)

    def mine() -> Side:  # pFedVEM trains all if nobody is drawn
        return ours(method, data, trains=draw, check=not rounds)

    def other() -> Side:
        return partial(next, loop(data, begin, draw))

    return (
        (partial(first, mine, rounds), partial(first, other, rounds))
        if rounds
        else (mine(), other())
    )


def first(begin: Callable[[], Side], rounds: int) -> None:
    """Make the first rounds, of which nothing is known from earlier ones."""
    forget()
    side = begin()
    for _ in range(rounds):
        side()


def fedavg_authors(loaded: Dataset | None, dealt: str = "", spec: str = MLP) -> Sides:
    """Put FedAvg of 100 clients beside one client at a time with a DataLoader."""
    data = FEDERATIONS[dealt].make(loaded) if dealt else images(loaded, flat=False)
    net = network(data, spec)
    other = one_by_one.fedavg(data, net.fresh(generator(0)))
    return ours(fedavg.build(net, epochs=1), data), partial(next, other)


def pfedvem_authors(loaded: Dataset | None, dealt: str, share: float) -> Sides:
    """Put pFedVEM, of whose clients a share reports, beside one client at a time."""
    data: Federation = FEDERATIONS[dealt].make(loaded)
    w1, b1, w2, b2 = start(data)
    base = torch.nn.Sequential(torch.nn.Linear(*w1.shape[::-1]), torch.nn.ReLU())
    base.load_state_dict({"0.weight": w1, "0.bias": b1})
    other = one_by_one.pfedvem(data, base, [w2, b2], share)
    draw = everyone if share == 1 else bernoulli(share)
    return ours(pfedvem.build(network(data)), data, participation=draw), partial(next, other)


LOOPS: Mapping[str, Case] = {
    "pfedvem-authors-slices": Case(8.0, partial(pfedvem_authors, dealt="slices", share=0.1)),
    "pfedvem-authors-dirichlet": Case(3.0, partial(pfedvem_authors, dealt="dirichlet", share=1.0)),
    "pfedvem-authors-giant": Case(3.0, partial(pfedvem_authors, dealt="giant", share=1.0)),
    "fedavg-authors-slices": Case(3.0, partial(fedavg_authors, dealt="slices")),
    "fedavg-authors-dirichlet": Case(3.0, partial(fedavg_authors, dealt="dirichlet")),
    "fedavg-authors-giant": Case(3.0, partial(fedavg_authors, dealt="giant")),
    "cnn-authors-100": Case(1.0, partial(fedavg_authors, spec="cnn-pfedvem")),
    **{
        f"{method}-good-{dealt}": Case(1.5, partial(good, dealt=dealt, heads=heads), warm)
        for method, heads in (("fedavg", False), ("pfedvem", True))
        for dealt, (_, _, warm) in FEDERATIONS.items()
    },
    **{
        f"{method}-good-{dealt}-first": Case(
            1.0, partial(good, dealt=dealt, heads=heads, rounds=10)
        )
        for method, heads in (("fedavg", False), ("pfedvem", True))
        for dealt in ("two", "zipf-two")
    },
}
