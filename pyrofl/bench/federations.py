"""Who holds how many rows in the cases of `pyrofl bench`, and who of them takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pyrofl.data import Dataset, Federation
from pyrofl.data.datasets import per_class
from pyrofl.inference.loop.participation import Draw, everyone, fixed
from pyrofl.partitions.federations import split
from pyrofl.tensors import generator

SIDE, CLASSES, ROWS = 28, 10, 5000  # of the images


def table(loaded: Dataset | None) -> Dataset:
    """Return 5,000 of the images, or rows made up."""
    return made_up() if loaded is None else per_class(loaded, ROWS // CLASSES)


def images(loaded: Dataset | None, flat: bool, clients: int = 100) -> Federation:
    """Deal images to unequal clients that each have five labels."""
    data = split(table(loaded), "slices:5", clients=clients, seed=0)
    x = data.x.flatten(1) if flat else data.x.reshape(len(data.x), -1, SIDE, SIDE)
    return replace(data, x=x)


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


def dirichlet(loaded: Dataset | None, clients: int = 100) -> Federation:
    """Deal images, a Dirichlet(0.3) for every label."""
    data = split(table(loaded), "dirichlet:0.3", clients=clients, seed=0)
    return replace(data, x=data.x.flatten(1))


def zipf(clients: int = 100) -> Federation:
    """Give the k-th client 1 / k of what the first one has, 5,000 rows in all."""
    first = ROWS / sum(1 / k for k in range(1, clients + 1))
    return uneven([max(1, round(first / k)) for k in range(1, clients + 1)])


class Dealt(NamedTuple):
    """A federation of a case."""

    make: Callable[[Dataset | None], Federation]
    draw: Draw = everyone
    warm: int = 3  # turns that do not count, as steps are still recorded in them


FEDERATIONS: Mapping[str, Dealt] = {
    "even": Dealt(lambda _: equal(100, 50)),
    "slices": Dealt(lambda loaded: images(loaded, flat=True)),
    "dirichlet": Dealt(dirichlet),
    "zipf": Dealt(lambda _: zipf()),
    "giant": Dealt(lambda _: uneven([4000, *(50,) * 99])),
    "ten": Dealt(lambda loaded: dirichlet(loaded, clients=10)),
    "two": Dealt(dirichlet, fixed(2), warm=10),  # of 100, new ones in every round
    "zipf-two": Dealt(lambda _: zipf(), fixed(2), warm=10),
}
