"""What the cases run on: images in unequal slices, and many clients with equally many rows."""

from __future__ import annotations

import torch

from pyrofl.data import Dataset, Federation
from pyrofl.data.datasets import per_class
from pyrofl.partitions.federations import split
from pyrofl.tensors import generator

SIDE, CLASSES, ROWS = 28, 10, 5000


def images(loaded: Dataset | None, flat: bool, clients: int = 100) -> Federation:
    """Deal 5,000 images to clients, each with five labels, the largest with fifty times the least.

    None for a data set makes rows up, which take as long; a flat row is one axis.
    """
    table = made_up() if loaded is None else per_class(loaded, ROWS // CLASSES)
    data = split(table, "slices:5", clients=clients, seed=0)
    x = data.x.flatten(1) if flat else data.x.reshape(len(data.x), -1, SIDE, SIDE)
    return Federation(x, data.y, data.train, data.test, data.names, data.classes)


def made_up(rows: int = ROWS) -> Dataset:
    """Make up images whose brightness tells their label."""
    g = generator(0)
    y = torch.arange(rows) % CLASSES
    x = torch.rand(rows, SIDE * SIDE, generator=g) + 0.1 * y[:, None]
    is_test = torch.rand(rows, generator=g) < 0.01
    return Dataset("made up", x, y, is_test, tuple(map(str, range(CLASSES))))


def equal(clients: int, rows: int, features: int = SIDE * SIDE) -> Federation:
    """Give every client this many rows out of one table of 5,000, which clients share."""
    g = generator(1)
    x, y = torch.rand(ROWS, features, generator=g), torch.arange(ROWS) % CLASSES
    train = tuple(torch.randperm(ROWS, generator=g)[:rows] for _ in range(clients))
    none = (torch.zeros(0, dtype=torch.long),) * clients
    return Federation(x, y, train, none, classes=tuple(map(str, range(CLASSES))))
