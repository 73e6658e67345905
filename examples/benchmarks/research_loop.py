"""One client at a time, as research code does it: in plain torch with a DataLoader, and by SVI.

The arithmetic is that of `pyrofl.models.fedavg` and `pyrofl.models.pfedvem`, step for step. All
clients train, with new momentum in each round; of pFedVEM's a share reports, at least
two, and an epoch on a head is a full-batch step. SVI is Pyro's, with a parameter store for each
client and full-batch steps of SGD with the learning rate of the mean loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pyro
import pyro.distributions as dist
import pyro.optim
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, linear, softplus
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from pyrofl.data import Federation

BATCH, MOMENTUM = 10, 0.9
DRAWS, HEAD_EPOCHS, BASE_EPOCHS = 5, 10, 5  # of pFedVEM
WIDTH = math.log(math.e - 1)  # softplus of it is 1


def fedavg(
    data: Federation, module: nn.Module, *, epochs: int = 1, batch: int = BATCH, lr: float = 0.01
) -> Iterator[nn.Module]:
    """Run FedAvg, yielding the global module after each round."""
    tables = _tables(data)
    rows = sum(map(len, tables))
    while True:
        total = {n: torch.zeros_like(v) for n, v in module.state_dict().items()}
        for table in tables:
            own = copy.deepcopy(module)
            optimizer = SGD(own.parameters(), lr, MOMENTUM)
            for _ in range(epochs):
                for x, y in DataLoader(table, batch, shuffle=True):
                    _descend(cross_entropy(own(x), y), optimizer)
            for n, v in own.state_dict().items():
                total[n] += len(table) * v
        module.load_state_dict({n: v / rows for n, v in total.items()})
        yield module


class Personal(nn.Module):
    """A client's base, and its linear head with independent normal weights."""

    def __init__(self, base: nn.Module, center: list[Tensor]) -> None:
        """Start the head around weight and bias, with standard deviation 1."""
        super().__init__()
        self.base = base
        self.mean = nn.ParameterList([v.clone() for v in center])
        self.spread = nn.ParameterList([torch.full_like(v, WIDTH) for v in center])

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

    def divergence(self, center: list[Tensor], tau: float) -> Tensor:
        """Return the KL divergence of the head from Normal(center, 1 / tau)."""
        parts = zip(self.mean, self.spread, center, strict=True)
        each = [
            kl_divergence(Normal(m, softplus(s)), Normal(c, torch.full_like(c, tau**-0.5))).sum()
            for m, s, c in parts
        ]
        return torch.stack(each).sum()

    @torch.no_grad()
    def confidence(self, center: list[Tensor]) -> float:
        """Return the confidence of eq. 8."""
        variance = sum(float(softplus(s).square().sum()) for s in self.spread)
        pairs = zip(self.mean, center, strict=True)
        gap = sum(float((m - c).square().sum()) for m, c in pairs)
        d: int = sum(m.numel() for m in self.mean)
        return d / (variance + gap)


def pfedvem(
    data: Federation, base: nn.Module, center: list[Tensor], share: float = 0.1, lr: float = 1e-3
) -> Iterator[list[Personal]]:
    """Run pFedVEM from a base and a head's weight and bias, yielding every client's model."""
    tables = _tables(data)
    models = [Personal(base, center) for _ in tables]
    while True:
        taus = [model.confidence(center) for model in models]
        for model, table, tau in zip(models, tables, taus, strict=True):
            model.base = copy.deepcopy(base)
            x, y = table.tensors
            with torch.no_grad():
                features = model.base(x)
            optimizer = SGD([*model.mean, *model.spread], lr, MOMENTUM)
            for _ in range(HEAD_EPOCHS):
                loss = model.loss(features, y, "sum") + model.divergence(center, tau)
                _descend(loss, optimizer)
            optimizer = SGD(model.base.parameters(), lr, MOMENTUM)
            for _ in range(BASE_EPOCHS):
                for rows, labels in DataLoader(table, BATCH, shuffle=True):
                    _descend(model.loss(model.base(rows), labels, "mean"), optimizer)
        reporters = [j for j in range(len(tables)) if torch.rand(()) < share]
        reporters = reporters if len(reporters) > 1 else [0, 1]
        weight = sum(taus[j] for j in reporters)
        means = [[taus[j] / weight * m.detach() for m in models[j].mean] for j in reporters]
        center = [torch.stack(part).sum(0) for part in zip(*means, strict=True)]
        size = sum(len(tables[j]) for j in reporters)
        states = [(len(tables[j]) / size, models[j].base.state_dict()) for j in reporters]
        base.load_state_dict({n: sum(w * s[n] for w, s in states) for n in base.state_dict()})
        yield models


def svi(data: Federation, steps: int, lr: float, scale: float) -> Iterator[Tensor]:
    """Average clients' Bayesian softmax regressions, yielding means of weights [class, feature]."""
    features, classes = data.x[0].numel(), len(data.classes)
    shapes = {"weight": (classes, features), "bias": (classes,)}
    server = {f"loc {n}": torch.zeros(s) for n, s in shapes.items()}
    server |= {f"sd {n}": torch.full(s, scale) for n, s in shapes.items()}
    positive = dist.constraints.softplus_positive

    def model(x: Tensor, y: Tensor) -> None:
        start = {n: dist.Normal(torch.zeros(s), 1.0).to_event(len(s)) for n, s in shapes.items()}
        weight, bias = (pyro.sample(n, prior) for n, prior in start.items())
        with pyro.plate("rows", len(x)):
            logits = x.flatten(1) @ weight.mT + bias
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    def guide(x: Tensor, y: Tensor) -> None:
        for n, s in shapes.items():
            loc = pyro.param(f"loc {n}", server[f"loc {n}"].clone)
            sd = pyro.param(f"sd {n}", server[f"sd {n}"].clone, constraint=positive)
            pyro.sample(n, dist.Normal(loc, sd).to_event(len(s)))

    while True:
        total = {n: torch.zeros_like(v) for n, v in server.items()}
        for rows in data.train[: data.clients]:
            with pyro.get_param_store().scope():
                optimizer = pyro.optim.SGD({"lr": lr / len(rows)})
                fit = SVI(model, guide, optimizer, TraceMeanField_ELBO())
                for _ in range(steps):
                    fit.step(data.x[rows], data.y[rows])
                for n, v in total.items():
                    v += len(rows) * pyro.param(n).detach()
        server = {n: v / data.sizes[: data.clients].sum() for n, v in total.items()}
        yield server["loc weight"]


def _descend(loss: Tensor, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _tables(data: Federation) -> list[TensorDataset]:
    return [TensorDataset(data.x[rows], data.y[rows]) for rows in data.train[: data.clients]]
