"""pFedVEM in plain torch: tau by eq. 8, heads by the ELBO, the base by its likelihood, eq. 9."""

from __future__ import annotations

import torch
from golden.plain import (
    REPORTS,
    SIZES,
    Momentum,
    Tensors,
    batches,
    descend,
    features,
    leaves,
    loss_sum,
    mean_by,
    named,
    noise,
    of_client,
    sizes_of,
    slopes,
    stacked,
    start,
)
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

SETTINGS = {
    "num_particles": 2,
    "head_epochs": 3,
    "base_epochs": 2,
    "batch": 4,
    "lr_head": 0.01,
    "lr_base": 0.1,
    "momentum": 0.9,
    "init_scale": 0.5,
}
K, SD = SETTINGS["num_particles"], SETTINGS["init_scale"]


def begin() -> Tensors:
    """Return the server's first state."""
    net = start()
    base = {n: v for n, v in net.items() if not n.startswith("head")}
    return named("base", base) | named("loc", {n: v for n, v in net.items() if n not in base})


def drawn(mu: Tensors, pi: Tensors, k: int) -> Tensors:
    """Return the k-th draw of the head."""
    return {n: m + softplus(pi[n]) * noise(K, *m.shape)[k] for n, m in mu.items()}


def run() -> list[tuple[Tensors, Tensors]]:
    """Return (server, private) after each round."""
    server = begin()
    w = {n.removeprefix("loc/"): v for n, v in server.items() if n.startswith("loc/")}
    theta = {n.removeprefix("base/"): v for n, v in server.items() if n.startswith("base/")}
    d = sum(v.numel() for v in w.values())
    inverse = torch.log(torch.expm1(torch.tensor(SD)))
    mu = [dict(w) for _ in SIZES]
    pi = [{n: torch.full_like(v, float(inverse)) for n, v in w.items()} for _ in SIZES]
    states = []
    for cohort in REPORTS:
        taus, bases = [], []
        for j in range(len(SIZES)):
            x, y = of_client(j)
            variance = sum(softplus(v).square().sum() for v in pi[j].values())
            away = sum((v - w[n]).square().sum() for n, v in mu[j].items())
            tau = d / (variance + away)
            taus.append(tau)
            mu[j], pi[j] = heads(mu[j], pi[j], w, tau, features(theta, x), y)
            optimizer, base = Momentum(SETTINGS["lr_base"], SETTINGS["momentum"]), dict(theta)
            for bx, by in batches(SETTINGS["base_epochs"], SETTINGS["batch"], x, y):

                def loss(at: Tensors, bx: Tensor = bx, by: Tensor = by, j: int = j) -> Tensor:
                    each = (loss_sum(at | drawn(mu[j], pi[j], k), bx, by) for k in range(K))
                    return sum(each) / K / len(by)

                base = descend(base, optimizer, loss)
            bases.append(base)
        w = mean_by(torch.stack([taus[j] for j in cohort]), [mu[j] for j in cohort])
        theta = mean_by(sizes_of(cohort), [bases[j] for j in cohort])
        private = stacked("mu", mu) | stacked("pi", pi) | {"tau": torch.stack(taus)}
        states.append((named("base", theta) | named("loc", w), private))
    return states


def heads(
    mu: Tensors, pi: Tensors, w: Tensors, tau: Tensor, z: Tensor, y: Tensor
) -> tuple[Tensors, Tensors]:
    """Make full-batch steps on sum CE + KL[q || N(w, I / tau)]."""
    optimizer = Momentum(SETTINGS["lr_head"], SETTINGS["momentum"])
    for _ in range(SETTINGS["head_epochs"]):
        m, p = leaves(mu), leaves(pi)
        loss = torch.zeros(())
        for k in range(K):
            head = drawn(m, p, k)
            logits = z @ head["head.weight"].T + head["head.bias"]
            loss = loss + cross_entropy(logits, y, reduction="sum") / K
        for n in m:
            var = softplus(p[n]).square()
            gap = (m[n] - w[n]).square()
            loss = loss + 0.5 * (tau * (var + gap) - 1 - torch.log(tau * var)).sum()
        both = named("mu", m) | named("pi", p)
        after = optimizer.step(both, slopes(loss, both))
        mu = {n: after[f"mu/{n}"] for n in mu}
        pi = {n: after[f"pi/{n}"] for n in pi}
    return mu, pi
