"""The clients of the benchmarks: how many rows each has, and who takes part in a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pyrofl.data import Dataset, Federation
from pyrofl.data.loaders import datasets
from pyrofl.inference.engine.participation import Draw, everyone, fixed
from pyrofl.partitions.federations import split
from pyrofl.tensors import generator

SIDE, CLASSES, ROWS = 28, 10, 5000  # of the synthetic images
LABELS = tuple(map(str, range(CLASSES)))


def synthetic_images(rows: int = ROWS) -> Dataset:
    """Return images [rows, 784]; the brightness of an image depends on its label."""
    g, y = generator(0), torch.arange(rows) % CLASSES
    x = torch.rand(rows, SIDE * SIDE, generator=g) + 0.1 * y[:, None]
    is_test = torch.rand(rows, generator=g) < 0.01
    return Dataset("synthetic", x, y, is_test, LABELS)


def partitioned(spec: str, clients: int = 100, rows: int = ROWS) -> Federation:
    """Return the images, partitioned among clients."""
    data = split(synthetic_images(rows), spec, clients=clients, seed=0)
    return replace(data, x=data.x.flatten(1))


def digits(clients: int) -> Federation:
    """Return the digits, images [1797, 64], partitioned among clients with five classes each."""
    data = split(datasets.load("digits"), "slices:5", clients=clients, seed=0)
    return replace(data, x=data.x.flatten(1))


def sized(
    sizes: Sequence[int],
    shape: tuple[int, ...] = (SIDE * SIDE,),
    table: int = ROWS,
    seed: int = 1,
) -> Federation:
    """Return clients with these numbers of rows, drawn from one table of random rows."""
    g = generator(seed)
    x, y = torch.rand(table, *shape, generator=g), torch.arange(table) % CLASSES
    train = tuple(torch.randperm(table, generator=g)[:size] for size in sizes)
    none = (torch.zeros(0, dtype=torch.long),) * len(sizes)
    return Federation(x, y, train, none, classes=LABELS)


def zipf(clients: int = 100) -> Federation:
    """Return clients of which the k-th has 1 / k of the rows of the first; 5,000 rows in all."""
    first = ROWS / sum(1 / k for k in range(1, clients + 1))
    return sized([max(1, round(first / k)) for k in range(1, clients + 1)])


class Setting(NamedTuple):
    """A federation and its participation."""

    make: Callable[[], Federation]
    draw: Draw = everyone
    warm: int = 3  # turns that do not count, as steps are still recorded in them


SETTINGS: Mapping[str, Setting] = {
    "even": Setting(lambda: sized([50] * 100)),
    "slices": Setting(lambda: partitioned("slices:5")),
    "slices-20": Setting(lambda: partitioned("slices:5", clients=20, rows=1000)),
    "digits": Setting(lambda: digits(100)),
    "digits-20": Setting(lambda: digits(20)),
    "dirichlet": Setting(lambda: partitioned("dirichlet:0.3")),
    "zipf": Setting(zipf),
    "giant": Setting(lambda: sized([4000, *(50,) * 99])),
    "ten": Setting(lambda: partitioned("dirichlet:0.3", clients=10)),
    "two": Setting(lambda: partitioned("dirichlet:0.3"), fixed(2), warm=10),  # new ones each round
    "zipf-two": Setting(zipf, fixed(2), warm=10),
}
