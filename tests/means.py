"""A small method whose model and guide are written by hand: a normal mean for each client."""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from torch import Generator
from torch.nn.functional import softplus

from pyrofl.data import Batch, Federation
from pyrofl.inference.aggregation import Aggregator, by_size
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Program
from pyrofl.tensors import Tensors


def numbers() -> Federation:
    """Return three clients of 20, 7 and 1 rows, y around 1 + client."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.arange(28).split([20, 7, 1])
    y = torch.cat([j + 1 + torch.randn(len(r), generator=rng).double() for j, r in enumerate(rows)])
    return Federation(y[:, None] * 0 + 1, y, rows, rows)


def normal(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Model each client's rows as Normal(theta, 1)."""
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(0.0, 10.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Guess a normal."""
    with batch.clients():
        pyro.sample("theta", dist.Normal(local["q/mu"], softplus(local["q/pi"])))


def method(model: Program = normal, guide: Program = guide, **changes: object) -> Method:
    def init(generator: Generator, clients: int) -> Tensors:
        zero = torch.zeros((), dtype=torch.float64)
        return {"q/mu": zero, "q/pi": zero}

    step = GradientStep("q/*", sgd(0.01), elbo(8))
    made = Method(init, model, guide, (Phase((step,), 5, 2),), Aggregator({"*": by_size}))
    return replace(made, **changes)
