"""One client at a time by `pyro.infer.SVI`: the same program, a parameter store for each client."""

from __future__ import annotations

from collections.abc import Iterator

import pyro
import pyro.distributions as dist
import pyro.optim
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from torch import Tensor

from pyrofl.data import Federation


def federated(data: Federation, steps: int, lr: float, scale: float) -> Iterator[Tensor]:
    """Fit Bayesian softmax regression, averaging the clients' parameters every round.

    Every client takes full-batch steps of SGD, whose lr is that of the mean loss; q(w) starts with
    standard deviation `scale`. What is yielded are means of the weights [classes, features].
    """
    features, classes = data.x[0].numel(), len(data.classes)
    shapes = {"weight": (classes, features), "bias": (classes,)}
    server = {f"loc {n}": torch.zeros(s) for n, s in shapes.items()}
    server |= {f"sd {n}": torch.full(s, scale) for n, s in shapes.items()}
    positive = dist.constraints.softplus_positive

    def model(x: Tensor, y: Tensor) -> None:
        w = {
            n: pyro.sample(n, dist.Normal(torch.zeros(s), 1.0).to_event(len(s)))
            for n, s in shapes.items()
        }
        with pyro.plate("rows", len(x)):
            logits = x.flatten(1) @ w["weight"].mT + w["bias"]
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
                optimiser = pyro.optim.SGD({"lr": lr / len(rows)})  # type: ignore[attr-defined]
                fit = SVI(model, guide, optimiser, TraceMeanField_ELBO())
                for _ in range(steps):
                    fit.step(data.x[rows], data.y[rows])
                for n, v in total.items():
                    v += len(rows) * pyro.param(n).detach()
        server = {n: v / data.sizes[: data.clients].sum() for n, v in total.items()}
        yield server["loc weight"]
