"""A good loop: one client at a time in plain torch, written for speed.

The arithmetic is that of `research_loop`, without its modules and its DataLoader: the rows of an
epoch are selected at once, its minibatches are views of them, a frozen base runs once, all draws of
a head are one product, and the optimizer is torch's fused one. Participation is that of the
library, so that both sides train the same clients in each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from research_loop import BASE_EPOCHS, BATCH, DRAWS, HEAD_EPOCHS, MOMENTUM, WIDTH
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, softplus
from torch.optim import SGD

from pyrofl.data import Federation
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.participation import Draw

Weights = list[Tensor]
"""Weight [out, in] and bias of an MLP's hidden layer, and of its head or the heads' center."""


def fedavg(
    data: Federation, start: Weights, draw: Draw, epochs: int = 5, lr: float = 0.01
) -> Iterator[Weights]:
    """Run FedAvg, yielding the weights after each round."""
    weights = start
    for number in count():
        total, rows = [torch.zeros_like(w) for w in weights], 0
        for mine in _clients(data, draw, number):
            own = [w.clone().requires_grad_() for w in weights]
            optimizer = SGD(own, lr, MOMENTUM, fused=True)
            w1, b1, w2, b2 = own
            for x, y in _minibatches(data, mine, epochs):
                logits = linear(linear(x, w1, b1).relu(), w2, b2)
                _descend(cross_entropy(logits, y), own, optimizer)
            for part, w in zip(total, own, strict=True):
                part.add_(w.detach(), alpha=len(mine))
            rows += len(mine)
        weights = [part / rows for part in total]
        yield weights


def pfedvem(
    data: Federation, start: Weights, draw: Draw, lr: float = 1e-3
) -> Iterator[tuple[Weights, Tensor]]:
    """Run pFedVEM with those drawn, yielding base and center, and the confidences [J]."""
    base, center = start[:2], _head(*start[2:])
    classes, taus = len(start[3]), start[3].new_zeros(data.clients)
    mean = center.expand(data.clients, *center.shape).clone()
    spread = torch.full_like(mean, WIDTH)
    for number in count():
        bases, rows = [torch.zeros_like(w) for w in base], 0
        heads, weight = torch.zeros_like(center), 0.0
        ids = draw(stream(0, Stream.WHO, number), data.clients).tolist()
        for j in ids:
            mine = data.train[j]
            m, s = (table[j].requires_grad_() for table in (mean, spread))  # views: kept
            with torch.no_grad():
                x, y = data.x[mine], data.y[mine]
                around = softplus(s).square().sum() + (m - center).square().sum()
                taus[j] = tau = center.numel() / float(around)
                features = linear(x, *base).relu()
            optimizer = SGD([m, s], lr, MOMENTUM, fused=True)
            for _ in range(HEAD_EPOCHS):
                sd = softplus(s)
                value = _loss(features, y, m, sd, classes) / DRAWS
                ratio = sd.square() * tau
                kl = 0.5 * (ratio + (m - center).square() * tau - 1 - ratio.log()).sum()
                _descend(value + kl, [m, s], optimizer)
            own = [w.clone().requires_grad_() for w in base]
            known, width = m.detach(), softplus(s.detach())
            optimizer = SGD(own, lr, MOMENTUM, fused=True)
            for x, y in _minibatches(data, mine, BASE_EPOCHS):
                value = _loss(linear(x, *own).relu(), y, known, width, classes)
                _descend(value / (DRAWS * len(y)), own, optimizer)
            for part, w in zip(bases, own, strict=True):
                part.add_(w.detach(), alpha=len(mine))
            heads.add_(m.detach(), alpha=tau)
            rows, weight = rows + len(mine), weight + tau
        base, center = [part / rows for part in bases], heads / weight
        yield [*base, center], taus


def _head(weight: Tensor, bias: Tensor) -> Tensor:
    """Append the bias of a layer to its weight: [out, in + 1]."""
    return torch.cat([weight, bias[:, None]], 1)


def _loss(x: Tensor, y: Tensor, mean: Tensor, sd: Tensor, classes: int) -> Tensor:
    """Sum the cross entropy over rows and draws of a head, which run as one wide layer."""
    heads = torch.addcmul(mean, sd, torch.randn(DRAWS, *mean.shape, device=mean.device)).flatten(
        0, 1
    )
    logits = linear(x, heads[:, :-1], heads[:, -1]).view(len(x), DRAWS, classes)
    return cross_entropy(logits.flatten(0, 1), y.repeat_interleave(DRAWS), reduction="sum")


def _clients(data: Federation, draw: Draw, number: int) -> list[Tensor]:
    ids = draw(stream(0, Stream.WHO, number), data.clients)
    return [data.train[i] for i in ids.tolist()]


def _minibatches(
    data: Federation, rows: Tensor, epochs: int, batch: int = BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(epochs):
        order = rows[torch.randperm(len(rows), device=rows.device)]
        yield from zip(data.x[order].split(batch), data.y[order].split(batch), strict=True)


def _descend(loss: Tensor, params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = grad
    optimizer.step()


def images(
    data: Federation, module: nn.Module, batch: int = BATCH, lr: float = 0.01
) -> Iterator[Weights]:
    """Run FedAvg of a module with one epoch, yielding the weights after each round."""
    own = list(module.parameters())
    while True:
        start, total, rows = [w.detach().clone() for w in own], [0 * w.detach() for w in own], 0
        for mine in data.train:
            _copy(own, start)
            optimizer = SGD(own, lr, MOMENTUM, fused=True)
            for x, y in _minibatches(data, mine, 1, batch):
                _descend(cross_entropy(module(x), y), own, optimizer)
            for part, w in zip(total, own, strict=True):
                part.add_(w.detach(), alpha=len(mine))
            rows += len(mine)
        _copy(own, [part / rows for part in total])
        yield [w.detach().clone() for w in own]


@torch.no_grad()
def _copy(weights: Sequence[Tensor], values: Weights) -> None:
    for w, value in zip(weights, values, strict=True):
        w.copy_(value)
