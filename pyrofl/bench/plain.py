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
from torch.utils.data import DataLoader, TensorDataset

from pyrofl.data import Federation


def fedavg(
    data: Federation,
    module: nn.Module,
    *,
    epochs: int = 1,
    batch: int = 10,
    lr: float = 0.01,
    momentum: float = 0.9,
) -> Iterator[nn.Module]:
    """Run FedAvg, yielding the global module after each round.

    All clients train; the momentum of SGD starts afresh each round.
    """
    tables = _tables(data)
    while True:
        total = {n: torch.zeros_like(v) for n, v in module.state_dict().items()}
        for table in tables:
            own = copy.deepcopy(module)
            optimiser = torch.optim.SGD(own.parameters(), lr, momentum)
            for _ in range(epochs):
                for x, y in DataLoader(table, batch, shuffle=True):
                    optimiser.zero_grad()
                    cross_entropy(own(x), y).backward()
                    optimiser.step()
            for n, v in own.state_dict().items():
                total[n] += len(table) * v
        rows = sum(len(table) for table in tables)
        module.load_state_dict({n: v / rows for n, v in total.items()})
        yield module


class Head(nn.Module):
    """A linear layer whose weights are independent normals."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        """Start around a point, with standard deviation 1."""
        super().__init__()
        self.mean = nn.ParameterList([weight.clone(), bias.clone()])
        first = math.log(math.e - 1)
        self.spread = nn.ParameterList([torch.full_like(v, first) for v in (weight, bias)])

    def draw(self) -> list[Tensor]:
        """Draw weight and bias."""
        pairs = zip(self.mean, self.spread, strict=True)
        return [m + softplus(s) * torch.randn_like(m) for m, s in pairs]

    def divergence(self, centre: list[Tensor], tau: float) -> Tensor:
        """Return the KL divergence from Normal(centre, 1 / tau)."""
        parts = zip(self.mean, self.spread, centre, strict=True)
        each = [
            kl_divergence(Normal(m, softplus(s)), Normal(c, torch.full_like(c, tau**-0.5))).sum()
            for m, s, c in parts
        ]
        return torch.stack(each).sum()

    def confidence(self, centre: list[Tensor]) -> float:
        """Return the confidence of eq. 8."""
        with torch.no_grad():
            variance = sum(float(softplus(s).square().sum()) for s in self.spread)
            pairs = zip(self.mean, centre, strict=True)
            gap = sum(float((m - c).square().sum()) for m, c in pairs)
        d: int = sum(m.numel() for m in self.mean)
        return d / (variance + gap)


class Personal(nn.Module):
    """A client's base and its head."""

    def __init__(self, base: nn.Module, head: Head) -> None:
        """Take both."""
        super().__init__()
        self.base, self.head = base, head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits with the head's mean."""
        logits: Tensor = linear(self.base(x), *self.head.mean)
        return logits


def pfedvem(
    data: Federation,
    base: nn.Module,
    centre: list[Tensor],
    share: float = 0.1,
    *,
    draws: int = 5,
    head_epochs: int = 10,
    base_epochs: int = 5,
    batch: int = 10,
    lr: float = 1e-3,
    momentum: float = 0.9,
) -> Iterator[list[Personal]]:
    """Run pFedVEM, yielding every client's model after each round.

    All clients train, and a share of them reports, at least two. The base is all but the last
    layer, the centre weight and bias of the server's head; an epoch on a head is a full-batch step.
    """
    tables = _tables(data)
    heads = [Head(*centre) for _ in tables]
    while True:
        models = [Personal(copy.deepcopy(base), head) for head in heads]
        taus = [head.confidence(centre) for head in heads]
        for model, table, tau in zip(models, tables, taus, strict=True):
            x, y = table.tensors
            with torch.no_grad():
                features = model.base(x)
            optimiser = torch.optim.SGD(model.head.parameters(), lr, momentum)
            for _ in range(head_epochs):
                optimiser.zero_grad()
                loss = _drawn(model.head, features, y, draws, "sum")
                (loss + model.head.divergence(centre, tau)).backward()
                optimiser.step()
            optimiser = torch.optim.SGD(model.base.parameters(), lr, momentum)
            for _ in range(base_epochs):
                for rows, labels in DataLoader(table, batch, shuffle=True):
                    optimiser.zero_grad()
                    _drawn(model.head, model.base(rows), labels, draws, "mean").backward()
                    optimiser.step()
        heard = [j for j in range(len(tables)) if torch.rand(()) < share]
        heard = heard if len(heard) > 1 else [0, 1]
        weight = sum(taus[j] for j in heard)
        means = [[taus[j] / weight * m.detach() for m in heads[j].mean] for j in heard]
        centre = [torch.stack(part).sum(0) for part in zip(*means, strict=True)]
        rows = sum(len(tables[j]) for j in heard)
        states = [(len(tables[j]) / rows, models[j].base.state_dict()) for j in heard]
        base.load_state_dict({n: _sum(w * s[n] for w, s in states) for n in base.state_dict()})
        yield models


def _drawn(head: Head, x: Tensor, y: Tensor, draws: int, reduction: str) -> Tensor:
    losses = [cross_entropy(linear(x, *head.draw()), y, reduction=reduction) for _ in range(draws)]
    return torch.stack(losses).mean()


def _tables(data: Federation) -> list[TensorDataset]:
    return [TensorDataset(data.x[rows], data.y[rows]) for rows in data.train[: data.clients]]


def _sum(values: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum(0)
