"""One client at a time, as good research code does it, for methods with a model of one's own.

Minibatches are picked by an index, and the gradient of the proximal term is written down, not
differentiated, as PFLlib's optimizers do. The arithmetic is that of `pyrofl.models.fedprox`,
`ditto`, `pfedme` and `apfl`, step for step, for an MLP with one hidden layer. All clients train
and report, by SGD without momentum; clients weigh by size, in pFedMe evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from pyrofl.data import Federation

Weights = list[Tensor]
"""Weight [out, in] and bias of an MLP's hidden layer and of its head."""

Train = Callable[[int, Tensor, Tensor, Weights], Weights]
"""(client, its rows x, y, the weights that came down) -> those that it sends."""


def fedprox(
    data: Federation, start: Weights, batch: int, lr: float, mu: float
) -> Iterator[Weights]:
    """Run FedProx with one epoch, yielding the weights after each round."""

    def train(_: int, x: Tensor, y: Tensor, center: Weights) -> Weights:
        own = _copied(center)
        for rows in torch.randperm(len(y)).split(batch):
            _step(own, _pulled(_gradient(own, x[rows], y[rows]), own, center, mu), lr)
        return own

    return _rounds(data, start, train)


def ditto(
    data: Federation, start: Weights, batch: int, lr: float, strength: float
) -> Iterator[Weights]:
    """Run Ditto with one epoch on each model, yielding the global weights after each round."""
    models: dict[int, Weights] = {}

    def train(client: int, x: Tensor, y: Tensor, center: Weights) -> Weights:
        sent, own = _copied(center), models.setdefault(client, _copied(center))
        for rows in torch.randperm(len(y)).split(batch):
            _step(sent, _gradient(sent, x[rows], y[rows]), lr)
        for rows in torch.randperm(len(y)).split(batch):
            _step(own, _pulled(_gradient(own, x[rows], y[rows]), own, center, strength), lr)
        return sent

    return _rounds(data, start, train)


def pfedme(
    data: Federation,
    start: Weights,
    batch: int,
    lr: float,
    lr_center: float,
    strength: float,
    steps: int,
) -> Iterator[Weights]:
    """Run pFedMe with one epoch, yielding the global weights after each round."""
    models: dict[int, Weights] = {}

    def train(client: int, x: Tensor, y: Tensor, center: Weights) -> Weights:
        near, own = _copied(center), models.setdefault(client, _copied(center))
        for rows in torch.randperm(len(y)).split(batch):
            some, labels = x[rows], y[rows]
            for _ in range(steps):
                _step(own, _pulled(_gradient(own, some, labels), own, near, strength), lr)
            with torch.no_grad():
                torch._foreach_lerp_(near, own, lr_center * strength)
        return near

    return _rounds(data, start, train, by_size=False)


def apfl(
    data: Federation, start: Weights, batch: int, lr: float, alpha: float, lr_alpha: float
) -> Iterator[Weights]:
    """Run APFL with one epoch, yielding the global weights after each round."""
    models: dict[int, Weights] = {}
    shares = dict.fromkeys(range(data.clients), alpha)

    def train(client: int, x: Tensor, y: Tensor, center: Weights) -> Weights:
        sent, own = _copied(center), models.setdefault(client, _copied(center))
        grads = _gradient(_mixed(sent, own, shares[client]), x, y)
        slope = sum(
            float((g * (v - w).detach()).sum()) for g, v, w in zip(grads, own, sent, strict=True)
        )
        shares[client] = share = min(max(shares[client] - lr_alpha * slope, 0.0), 1.0)
        for rows in torch.randperm(len(y)).split(batch):
            some, labels = x[rows], y[rows]
            _step(sent, _gradient(sent, some, labels), lr)
            _step(own, _gradient(_mixed(sent, own, share), some, labels), lr)
        return sent

    return _rounds(data, start, train)


def _rounds(
    data: Federation, start: Weights, train: Train, by_size: bool = True
) -> Iterator[Weights]:
    tables = [(data.x[rows].flatten(1), data.y[rows]) for rows in data.train[: data.clients]]
    sizes = [len(y) if by_size else 1 for _, y in tables]
    weights = start
    while True:
        total = [torch.zeros_like(w) for w in weights]
        for client, (x, y) in enumerate(tables):
            sent = [w.detach() for w in train(client, x, y, weights)]
            torch._foreach_add_(total, sent, alpha=sizes[client] / sum(sizes))
        weights = total
        yield weights


def _copied(weights: Weights) -> Weights:
    return [w.clone().requires_grad_() for w in weights]


def _gradient(weights: Weights, x: Tensor, y: Tensor) -> Weights:
    w1, b1, w2, b2 = weights
    loss = cross_entropy(linear(linear(x, w1, b1).relu(), w2, b2), y)
    return list(torch.autograd.grad(loss, weights))


@torch.no_grad()
def _pulled(grads: Weights, weights: Weights, center: Weights, strength: float) -> Weights:
    """Add the gradient of strength / 2 ||weights - center||^2."""
    torch._foreach_add_(grads, weights, alpha=strength)
    torch._foreach_sub_(grads, center, alpha=strength)
    return grads


@torch.no_grad()
def _step(weights: Weights, grads: Weights, lr: float) -> None:
    torch._foreach_sub_(weights, grads, alpha=lr)


@torch.no_grad()
def _mixed(common: Weights, own: Weights, share: float) -> Weights:
    return [w.requires_grad_() for w in torch._foreach_lerp(common, own, share)]
