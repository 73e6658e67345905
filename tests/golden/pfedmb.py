"""pFedMB in plain torch: alpha with the branches fixed, branches with alpha fixed, eq. 5."""

from __future__ import annotations

import torch
from golden.plain import (
    REPORTS,
    SIZES,
    Momentum,
    Tensors,
    batches,
    descend,
    loss_sum,
    named,
    of_client,
    start,
)
from torch import Tensor

SETTINGS = {"branches": 2, "epochs": 2, "batch": 4, "lr": 0.2, "lr_alpha": 0.7, "momentum": 0.5}
LAYER = {"fc1": 0, "fc2": 1, "head": 2}


def begin() -> Tensors:
    """Return the server's first state: two different networks."""
    each = [start(seed) for seed in (21, 22)]
    return named("branch", {n: torch.stack([one[n] for one in each]) for n in each[0]})


def mixed(branches: Tensors, alpha: Tensor) -> Tensors:
    """Return W_l = sum_b alpha_lb W_lb."""
    return {
        n: sum(alpha[LAYER[n.split(".")[0]], b] * v[b] for b in range(len(v)))
        for n, v in branches.items()
    }


def run() -> list[tuple[Tensors, Tensors]]:
    """Return (server, private) after each round."""
    w = {n.removeprefix("branch/"): v for n, v in begin().items()}
    a = [torch.full((3, SETTINGS["branches"]), 1 / SETTINGS["branches"]).log() for _ in SIZES]
    epochs, batch = SETTINGS["epochs"], SETTINGS["batch"]
    states = []
    for cohort in REPORTS:
        own = {}
        for j in cohort:
            x, y = of_client(j)
            optimizer = Momentum(SETTINGS["lr_alpha"], SETTINGS["momentum"])
            for bx, by in batches(epochs, batch, x, y):

                def of_alpha(
                    at: Tensors, bx: Tensor = bx, by: Tensor = by, w: Tensors = w
                ) -> Tensor:
                    return loss_sum(mixed(w, at["a"].softmax(-1)), bx, by) / len(by)

                a[j] = descend({"a": a[j]}, optimizer, of_alpha)["a"]
            optimizer, own[j] = Momentum(SETTINGS["lr"], SETTINGS["momentum"]), dict(w)
            for bx, by in batches(epochs, batch, x, y):

                def of_w(at: Tensors, bx: Tensor = bx, by: Tensor = by, j: int = j) -> Tensor:
                    return loss_sum(mixed(at, a[j].softmax(-1)), bx, by) / len(by)

                own[j] = descend(own[j], optimizer, of_w)
        new = {}
        for n, v in w.items():
            layer = LAYER[n.split(".")[0]]
            for b in range(len(v)):
                weight = {j: SIZES[j] * a[j].softmax(-1)[layer, b] for j in cohort}
                total = sum(weight.values())
                new[n, b] = sum(weight[j] * own[j][n][b] for j in cohort) / total
        w = {n: torch.stack([new[n, b] for b in range(len(v))]) for n, v in w.items()}
        states.append((named("branch", w), {"a/alpha": torch.stack(a)}))
    return states
