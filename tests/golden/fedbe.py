"""FedBE in plain torch: clients by SGD, p(w | D), teachers, pseudo labels, and a student."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import torch
from golden.plain import (
    FEATURES,
    REPORTS,
    Momentum,
    Tensors,
    batches,
    descend,
    loss_sum,
    mean_by,
    named,
    noise,
    of_client,
    outputs,
    sizes_of,
    start,
)
from torch import Tensor

COMMON = {"epochs": 2, "batch": 4, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "samples": 3}
COMMON |= {"distil_epochs": 4, "distil_batch": 5, "distil_lr": 0.05, "distil_lr_end": 0.02}
COMMON |= {"cycle": 2, "distil_momentum": 0.9, "teachers": "SAC"}
GAUSSIAN = COMMON | {"posterior": "gaussian", "distil": "swa", "sharpen": False}
DIRICHLET = COMMON | {"posterior": "dirichlet", "distil": "sgd", "sharpen": True}
SERVER_DATA = torch.from_numpy(np.random.default_rng(24).normal(size=(12, FEATURES)))


def begin() -> Tensors:
    """Return the server's first state."""
    return named("w", start())


def gammas(samples: int, clients: int) -> Tensor:
    """Return constant shares of the clients, in the place of draws: [M, C]."""
    found = noise(samples, clients).abs()
    return found / found.sum(-1, keepdim=True)


def sampled(models: list[Tensors], n: Tensor, how: dict[str, Any]) -> list[Tensors]:
    """Return M models of p(w | D), eq. 5 or eq. 7."""
    many = range(how["samples"])
    if how["posterior"] == "dirichlet":
        gamma = gammas(how["samples"], len(models))
        return [mean_by(gamma[m] * n, models) for m in many]
    mu = mean_by(n, models)
    var = mean_by(n, [{k: (v - mu[k]).square() for k, v in w.items()} for w in models])
    return [
        {k: v + var[k].sqrt() * noise(len(many), *v.shape)[m] for k, v in mu.items()} for m in many
    ]


def student(w: Tensors, teachers: list[Tensors], how: dict[str, Any]) -> Tensors:
    """Distil: SWA's mean of iterates at cycle ends, or the last iterate."""
    target = sum(outputs(t, SERVER_DATA).softmax(-1) for t in teachers) / len(teachers)
    if how["sharpen"]:
        target = target.square() / target.square().sum(-1, keepdim=True)
    cycle, swa, kept = how["cycle"], how["distil"] == "swa", []
    steps = how["distil_epochs"] * ceil(len(SERVER_DATA) / how["distil_batch"])
    optimizer = Momentum(how["distil_lr"], how["distil_momentum"])
    pairs = batches(how["distil_epochs"], how["distil_batch"], SERVER_DATA, target)
    for i, (x, p) in enumerate(pairs, 1):
        if swa:
            t = ((i - 1) % cycle + 1) / cycle
            optimizer.lr = (1 - t) * how["distil_lr"] + t * how["distil_lr_end"]

        def loss(at: Tensors, x: Tensor = x, p: Tensor = p) -> Tensor:
            return -(p * outputs(at, x).log_softmax(-1)).sum(-1).mean()

        w = descend(w, optimizer, loss)
        if i % cycle == 0 and i > int(steps * 250 / 1580):
            kept.append(w)
    return {n: sum(k[n] for k in kept) / len(kept) for n in w} if swa else w


def run(how: dict[str, Any]) -> list[tuple[Tensors, Tensors]]:
    """Return (server, private) after each round."""
    w, states = start(), []
    for cohort in REPORTS:
        models = []
        for j in cohort:
            x, y = of_client(j)
            optimizer, own = Momentum(how["lr"], how["momentum"], how["weight_decay"]), dict(w)
            for bx, by in batches(how["epochs"], how["batch"], x, y):

                def loss(at: Tensors, bx: Tensor = bx, by: Tensor = by) -> Tensor:
                    return loss_sum(at, bx, by) / len(by)

                own = descend(own, optimizer, loss)
            models.append(own)
        n = sizes_of(cohort)
        average = mean_by(n, models)
        w = student(average, [average, *models, *sampled(models, n, how)], how)
        states.append((named("w", w), {}))
    return states
