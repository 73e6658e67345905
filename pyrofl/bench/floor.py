"""The floor: batched torch without Pyro, written by hand for one network and one method.

All clients of a chunk are stacked, those with fewer steps drop out at the end, and nothing is
checked, drawn per client or kept for later: what a loop of general programs can at best reach.
Kernels are those that the library uses, the fastest known; products are those of every step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import softplus

from pyrofl.bench.one_by_one import BASE_EPOCHS, BATCH, DRAWS, HEAD_EPOCHS, MOMENTUM
from pyrofl.data import Federation
from pyrofl.inference.loop.plans import Plan, plan
from pyrofl.models.likelihoods import normalised
from pyrofl.nets.stacked import products
from pyrofl.tensors import generator, like

Weights = list[Tensor]
"""Weight [out, in] and bias of an MLP's hidden layer, and of its head or the heads' centre."""
Rows = tuple[Tensor, Tensor, Tensor]  # x [C, B, in], y [C, B], mask [C, B]


def fedavg(
    data: Federation,
    start: Weights,
    chunk: int,
    epochs: int = 1,
    batch: int = BATCH,
    lr: float = 0.01,
) -> Iterator[Weights]:
    """Run FedAvg, yielding the weights after each round."""
    weights = start
    while True:
        total = [torch.zeros_like(w) for w in weights]
        for who in _chunks(data, chunk):
            own = [w.expand(len(who), *w.shape).clone() for w in weights]
            for (x, y, mask), params, optimiser in _steps(data, who, own, epochs, batch, lr):
                w1, b1, w2, b2 = params
                losses = _losses(products(products(x, w1, b1).relu(), w2, b2), y, mask)
                _descend((losses.sum(1) / mask.sum(1)).sum(), params, optimiser)
            size = data.sizes[who].to(data.dtype)
            for part, mine in zip(total, own, strict=True):
                part += torch.tensordot(size, mine, 1)
        weights = [part / data.sizes[: data.clients].sum() for part in total]
        yield weights


def pfedvem(
    data: Federation, start: Weights, chunk: int, share: float, lr: float = 1e-3
) -> Iterator[Weights]:
    """Run pFedVEM, of which a share reports, yielding base and centre after each round."""
    weights, source = start, generator(0)
    d = sum(w.numel() for w in start[2:])
    mean = [w.expand(data.clients, *w.shape).clone() for w in start[2:]]
    spread = [torch.full_like(m, 0.5413) for m in mean]  # softplus of it is 1
    while True:
        reporting = torch.rand(data.clients, generator=source) < share
        reporting[:2] = True
        bases, taus = [torch.zeros_like(w) for w in weights[:2]], torch.zeros(data.clients)
        for who in _chunks(data, chunk):
            base = [w.expand(len(who), *w.shape).clone() for w in weights[:2]]
            mu, pi = ([v[who].clone().requires_grad_() for v in part] for part in (mean, spread))
            with torch.no_grad():
                parts = zip(mu, pi, weights[2:], strict=True)
                around = [softplus(p).square() + (m - c).square() for m, p, c in parts]
                taus[who] = tau = d / torch.cat([v.flatten(1) for v in around], 1).sum(1)
                x, y, mask = _minibatch(data, _plan(data, who, 1, None), 0, len(who))
                features = products(x, *base).relu()
            on_heads = torch.optim.SGD(mu + pi, lr, MOMENTUM, fused=True)
            for _ in range(HEAD_EPOCHS):
                value = _losses(_head(features, mu, pi, source), y, mask).sum() / DRAWS
                _descend(value + _divergence(mu, pi, weights[2:], tau), mu + pi, on_heads)
            steps = _steps(data, who, base, BASE_EPOCHS, BATCH, lr)
            for (x, y, mask), params, optimiser in steps:
                hidden = products(x, *params).relu()
                known, width = ([v.detach()[: len(x)] for v in part] for part in (mu, pi))
                losses = _losses(_head(hidden, known, width, source), y, mask)
                scale = mask.sum(1) * DRAWS
                _descend((losses.sum((0, 2)) / scale).sum(), params, optimiser)
            for table, v in zip(mean + spread, mu + pi, strict=True):
                table[who] = v.detach()
            size = data.sizes[who] * reporting[who]
            for table, v in zip(bases, base, strict=True):
                table += torch.tensordot(size.to(v), v, 1)
        weight = taus * reporting
        centre = [torch.tensordot(weight / weight.sum(), m, 1) for m in mean]
        weights = [b / data.sizes[: data.clients][reporting].sum() for b in bases] + centre
        yield weights


def _chunks(data: Federation, chunk: int) -> Iterator[Tensor]:
    yield from data.sizes[: data.clients].argsort(descending=True).split(chunk)


def _plan(data: Federation, who: Tensor, epochs: int, batch: int | None) -> Plan:
    rows = [data.train[i] for i in who.tolist()]
    return plan(rows, [epochs] * len(rows), batch, [generator(0, int(i)) for i in who])


def _steps(
    data: Federation, who: Tensor, own: Weights, epochs: int, batch: int, lr: float
) -> Iterator[tuple[Rows, Weights, torch.optim.Optimizer]]:
    """Yield the rows of clients with a step left, their weights and the optimiser of these."""
    schedule = _plan(data, who, epochs, batch)
    left = (schedule.steps > torch.arange(len(schedule.rows))[:, None]).sum(1).tolist()
    params = [w.detach().requires_grad_() for w in own]
    optimiser = torch.optim.SGD(params, lr, MOMENTUM, fused=True)
    for t, active in enumerate(left):
        if active < len(params[0]):
            memory = [optimiser.state[p]["momentum_buffer"] for p in params]
            params = [w.detach()[:active].requires_grad_() for w in own]
            optimiser = torch.optim.SGD(params, lr, MOMENTUM, fused=True)
            for p, buffer in zip(params, memory, strict=True):
                optimiser.state[p]["momentum_buffer"] = buffer[:active]
        yield _minibatch(data, schedule, t, active), params, optimiser


def _minibatch(data: Federation, schedule: Plan, t: int, active: int) -> Rows:
    rows = schedule.rows[t, :active]
    x, y = (v.index_select(0, rows.flatten()).unflatten(0, rows.shape) for v in (data.x, data.y))
    return x.flatten(2), y, schedule.mask[t, :active]


def _losses(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the cross entropy of every row, 0 where it is padding."""
    truth = y.expand(logits.shape[:-1])
    return -normalised(logits).gather(-1, truth[..., None])[..., 0] * mask


def _descend(loss: Tensor, params: Weights, optimiser: torch.optim.Optimizer) -> None:
    for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = grad.contiguous()  # as fused optimisers take for granted
    optimiser.step()


def _head(x: Tensor, mu: Weights, pi: Weights, source: torch.Generator) -> Tensor:
    """Draw K heads for every client and run them as one of K times the outputs: [K, C, B, out]."""
    weight, bias = (
        m + softplus(p) * torch.randn(DRAWS, *m.shape, generator=source)
        for m, p in zip(mu, pi, strict=True)
    )
    wide = weight.transpose(0, 1).flatten(1, 2)
    y: Tensor = products(x, wide, bias.transpose(0, 1).flatten(1))
    return torch.unflatten(y, -1, (DRAWS, -1)).movedim(-2, 0)


def _divergence(mu: Weights, pi: Weights, centre: Weights, tau: Tensor) -> Tensor:
    """Return the KL divergence of all heads from Normal(centre, 1 / tau)."""
    total = torch.zeros(())
    for m, p, c in zip(mu, pi, centre, strict=True):
        t = like(tau, m)
        variance = softplus(p).square() * t
        total = total + 0.5 * (variance + (m - c).square() * t - 1 - variance.log()).sum()
    return total
