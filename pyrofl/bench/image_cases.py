"""Cases of convolutions: images side by side beside a good loop, one client at a time; see `cases`.

The loop is what somebody writes in plain torch who wants it fast: an epoch's rows are picked at
once, its minibatches are views of them, and the optimiser is torch's fused one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from pyrofl.bench.cases import Case, Sides, network, ours
from pyrofl.bench.federations import CLASSES
from pyrofl.bench.one_by_one import BATCH, MOMENTUM
from pyrofl.data import Dataset, Federation
from pyrofl.models import fedavg
from pyrofl.tensors import generator

SHAPE, ROWS = (3, 32, 32), 1000  # of CIFAR's images; in a table that clients share


def made_up(clients: int, rows: int) -> Federation:
    """Give every client this many images out of one table, as large as those of CIFAR."""
    g = generator(2)
    x, y = torch.rand(ROWS, *SHAPE, generator=g), torch.arange(ROWS) % CLASSES
    train = tuple(torch.randperm(ROWS, generator=g)[:rows] for _ in range(clients))
    none = (torch.zeros(0, dtype=torch.long),) * clients
    return Federation(x, y, train, none, classes=tuple(map(str, range(CLASSES))))


def loop(
    data: Federation, module: nn.Module, batch: int = BATCH, lr: float = 0.01
) -> Iterator[list[Tensor]]:
    """Run FedAvg of one epoch, one client at a time, yielding the weights after each round."""
    own = list(module.parameters())
    while True:
        start, total, rows = [w.detach().clone() for w in own], [0 * w.detach() for w in own], 0
        for mine in data.train:
            _set(own, start)
            optimiser = SGD(own, lr, MOMENTUM, fused=True)
            order = mine[torch.randperm(len(mine))]
            for x, y in zip(data.x[order].split(batch), data.y[order].split(batch), strict=True):
                grads = torch.autograd.grad(cross_entropy(module(x), y), own)
                for w, grad in zip(own, grads, strict=True):
                    w.grad = grad
                optimiser.step()
            for part, w in zip(total, own, strict=True):
                part.add_(w.detach(), alpha=len(mine))
            rows += len(mine)
        _set(own, [part / rows for part in total])
        yield [w.detach().clone() for w in own]


def _set(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for w, value in zip(weights, values, strict=True):
            w.copy_(value)


def beside(_: Dataset | None, spec: str, clients: int, rows: int) -> Sides:
    """Put FedAvg of a network of images beside the loop."""
    data = made_up(clients, rows)
    net = network(data, spec)
    other = loop(data, net.fresh(generator(0)))
    return ours(fedavg.build(net, epochs=1, batch=BATCH), data), partial(next, other)


IMAGES: Mapping[str, Case] = {
    "cnn-good-20": Case(1.5, partial(beside, spec="cnn-pfedvem", clients=20, rows=50)),
    "cnn-good-100": Case(1.5, partial(beside, spec="cnn-pfedvem", clients=100, rows=50)),
    "resnet-good-20": Case(1.5, partial(beside, spec="resnet20", clients=20, rows=20)),
}
