"""The floor: batched torch without Pyro, written for one network and one method.

All clients of a chunk are stacked, those with fewer steps drop out at the end, and nothing is
checked, drawn per client or kept for later: the best that a loop of general programs can reach.
Kernels are those of the library; products are those of every step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from research_loop import BASE_EPOCHS, BATCH, DRAWS, HEAD_EPOCHS, MOMENTUM, WIDTH
from stacked_clients import (
    Weights,
    chunks,
    descend,
    divergence,
    losses,
    minibatch,
    schedule,
    steps,
    wide,
)
from torch import Tensor
from torch.nn.functional import softplus

from pyrofl.data import Federation
from pyrofl.nets.stacked import products
from pyrofl.tensors import add_trailing_axes, generator


def fedavg(
    data: Federation,
    start: Weights,
    chunk_size: int,
    epochs: int = 1,
    batch: int = BATCH,
    lr: float = 0.01,
) -> Iterator[Weights]:
    """Run FedAvg, yielding the weights after each round."""
    weights = start
    while True:
        total = [torch.zeros_like(w) for w in weights]
        for cohort in chunks(data, chunk_size):
            own = [w.expand(len(cohort), *w.shape).clone() for w in weights]
            for (x, y, mask), params, optimizer in steps(data, cohort, own, epochs, batch, lr):
                w1, b1, w2, b2 = params
                each = losses(products(products(x, w1, b1).relu(), w2, b2), y, mask)
                descend((each.sum(1) / mask.sum(1)).sum(), params, optimizer)
            size = data.sizes[cohort].to(data.dtype)
            for part, mine in zip(total, own, strict=True):
                part += torch.tensordot(size, mine, 1)
        weights = [part / data.sizes[: data.clients].sum() for part in total]
        yield weights


def pfedvem(
    data: Federation, start: Weights, chunk_size: int, share: float, lr: float = 1e-3
) -> Iterator[Weights]:
    """Run pFedVEM, of which a share reports, yielding base and center after each round."""
    weights, source = start, generator(0)
    d = sum(w.numel() for w in start[2:])
    mean = [w.expand(data.clients, *w.shape).clone() for w in start[2:]]
    spread = [torch.full_like(m, WIDTH) for m in mean]
    while True:
        reporting = torch.rand(data.clients, generator=source) < share
        reporting[:2] = True
        bases, taus = [torch.zeros_like(w) for w in weights[:2]], torch.zeros(data.clients)
        for cohort in chunks(data, chunk_size):
            base = [w.expand(len(cohort), *w.shape).clone() for w in weights[:2]]
            mu, pi = ([v[cohort].clone().requires_grad_() for v in part] for part in (mean, spread))
            with torch.no_grad():
                parts = zip(mu, pi, weights[2:], strict=True)
                around = [softplus(p).square() + (m - c).square() for m, p, c in parts]
                taus[cohort] = tau = d / torch.cat([v.flatten(1) for v in around], 1).sum(1)
                x, y, mask = minibatch(data, schedule(data, cohort, 1, None), 0, len(cohort))
                features = products(x, *base).relu()
            on_heads = torch.optim.SGD(mu + pi, lr, MOMENTUM, fused=True)
            for _ in range(HEAD_EPOCHS):
                value = losses(_head(features, mu, pi, source), y, mask).sum() / DRAWS
                descend(value + _from_center(mu, pi, weights[2:], tau), mu + pi, on_heads)
            left = steps(data, cohort, base, BASE_EPOCHS, BATCH, lr)
            for (x, y, mask), params, optimizer in left:
                hidden = products(x, *params).relu()
                known, width = ([v.detach()[: len(x)] for v in part] for part in (mu, pi))
                each = losses(_head(hidden, known, width, source), y, mask)
                scale = mask.sum(1) * DRAWS
                descend((each.sum((0, 2)) / scale).sum(), params, optimizer)
            for table, v in zip(mean + spread, mu + pi, strict=True):
                table[cohort] = v.detach()
            size = data.sizes[cohort] * reporting[cohort]
            for table, v in zip(bases, base, strict=True):
                table += torch.tensordot(size.to(v), v, 1)
        weight = taus * reporting
        center = [torch.tensordot(weight / weight.sum(), m, 1) for m in mean]
        weights = [b / data.sizes[: data.clients][reporting].sum() for b in bases] + center
        yield weights


def _head(x: Tensor, mu: Weights, pi: Weights, source: torch.Generator) -> Tensor:
    """Draw K heads for every client and run them: [K, C, B, out]."""
    weight, bias = (
        m + softplus(p) * torch.randn(DRAWS, *m.shape, generator=source)
        for m, p in zip(mu, pi, strict=True)
    )
    return wide(x, weight, bias)


def _from_center(mu: Weights, pi: Weights, center: Weights, tau: Tensor) -> Tensor:
    """Return the KL divergence of all heads from Normal(center, 1 / tau)."""
    scales = [add_trailing_axes(tau.rsqrt(), m) for m in mu]
    return divergence(mu, [softplus(p) for p in pi], center, scales).sum()
