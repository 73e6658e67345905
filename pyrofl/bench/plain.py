"""One client at a time in plain torch with a DataLoader, as research code does it.

The arithmetic is that of `pyrofl.models.fedavg` and `pyrofl.models.pfedvem`, step for step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, linear, softplus
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from pyrofl.data import Federation

BATCH, MOMENTUM = 10, 0.9
DRAWS, HEAD_EPOCHS, BASE_EPOCHS = 5, 10, 5  # of pFedVEM


def fedavg(
    data: Federation, module: nn.Module, *, epochs: int = 1, batch: int = BATCH, lr: float = 0.01
) -> Iterator[nn.Module]:
    """Run FedAvg with all clients and fresh momentum, yielding the global module of each round."""
    tables = _tables(data)
    rows = sum(map(len, tables))
    while True:
        total = {n: torch.zeros_like(v) for n, v in module.state_dict().items()}
        for table in tables:
            own = copy.deepcopy(module)
            optimiser = SGD(own.parameters(), lr, MOMENTUM)
            for _ in range(epochs):
                for x, y in DataLoader(table, batch, shuffle=True):
                    _descend(cross_entropy(own(x), y), optimiser)
            for n, v in own.state_dict().items():
                total[n] += len(table) * v
        module.load_state_dict({n: v / rows for n, v in total.items()})
        yield module


class Personal(nn.Module):
    """A client's base, and its linear head whose weights are independent normals."""

    def __init__(self, base: nn.Module, centre: list[Tensor]) -> None:
        """Start the head around weight and bias, with standard deviation 1."""
        super().__init__()
        self.base = base
        self.mean = nn.ParameterList([v.clone() for v in centre])
        self.spread = nn.ParameterList([torch.full_like(v, math.log(math.e - 1)) for v in centre])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits with the head's mean."""
        logits: Tensor = linear(self.base(x), *self.mean)
        return logits

    def loss(self, features: Tensor, y: Tensor, reduction: str) -> Tensor:
        """Return the mean cross entropy over draws of the head."""
        losses = []
        for _ in range(DRAWS):
            pairs = zip(self.mean, self.spread, strict=True)
            head = [m + softplus(s) * torch.randn_like(m) for m, s in pairs]
            losses.append(cross_entropy(linear(features, *head), y, reduction=reduction))
        return torch.stack(losses).mean()

    def divergence(self, centre: list[Tensor], tau: float) -> Tensor:
        """Return the KL divergence of the head from Normal(centre, 1 / tau)."""
        parts = zip(self.mean, self.spread, centre, strict=True)
        each = [
            kl_divergence(Normal(m, softplus(s)), Normal(c, torch.full_like(c, tau**-0.5))).sum()
            for m, s, c in parts
        ]
        return torch.stack(each).sum()

    @torch.no_grad()
    def confidence(self, centre: list[Tensor]) -> float:
        """Return the confidence of eq. 8."""
        variance = sum(float(softplus(s).square().sum()) for s in self.spread)
        pairs = zip(self.mean, centre, strict=True)
        gap = sum(float((m - c).square().sum()) for m, c in pairs)
        d: int = sum(m.numel() for m in self.mean)
        return d / (variance + gap)


def pfedvem(
    data: Federation, base: nn.Module, centre: list[Tensor], share: float = 0.1, lr: float = 1e-3
) -> Iterator[list[Personal]]:
    """Run pFedVEM, yielding every client's model after each round.

    All clients train, and a share of them reports, at least two. The base is all but the last
    layer, the centre weight and bias of the server's head; an epoch on a head is a full-batch step.
    """
    tables = _tables(data)
    models = [Personal(base, centre) for _ in tables]
    while True:
        taus = [model.confidence(centre) for model in models]
        for model, table, tau in zip(models, tables, taus, strict=True):
            model.base = copy.deepcopy(base)
            x, y = table.tensors
            with torch.no_grad():
                features = model.base(x)
            optimiser = SGD([*model.mean, *model.spread], lr, MOMENTUM)
            for _ in range(HEAD_EPOCHS):
                loss = model.loss(features, y, "sum") + model.divergence(centre, tau)
                _descend(loss, optimiser)
            optimiser = SGD(model.base.parameters(), lr, MOMENTUM)
            for _ in range(BASE_EPOCHS):
                for rows, labels in DataLoader(table, BATCH, shuffle=True):
                    _descend(model.loss(model.base(rows), labels, "mean"), optimiser)
        heard = [j for j in range(len(tables)) if torch.rand(()) < share]
        heard = heard if len(heard) > 1 else [0, 1]
        weight = sum(taus[j] for j in heard)
        means = [[taus[j] / weight * m.detach() for m in models[j].mean] for j in heard]
        centre = [torch.stack(part).sum(0) for part in zip(*means, strict=True)]
        size = sum(len(tables[j]) for j in heard)
        states = [(len(tables[j]) / size, models[j].base.state_dict()) for j in heard]
        base.load_state_dict({n: sum(w * s[n] for w, s in states) for n in base.state_dict()})
        yield models


def _descend(loss: Tensor, optimiser: Optimizer) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def _tables(data: Federation) -> list[TensorDataset]:
    return [TensorDataset(data.x[rows], data.y[rows]) for rows in data.train[: data.clients]]
