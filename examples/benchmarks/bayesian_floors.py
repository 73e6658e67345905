"""The floors, see `floors`, of methods with random weights in the whole network or its head.

The arithmetic is that of `pyrofl.models.pvi`, `pfedbayes` and `fedpop` on an MLP with one hidden
layer, at their defaults; PVI's server keeps its damping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf

import torch
from stacked_clients import (
    Rows,
    Weights,
    chunks,
    descend,
    divergence,
    losses,
    minibatch,
    narrowed,
    schedule,
    steps,
    wide,
)
from torch import Tensor
from torch.nn.functional import softplus

from pyrofl.data import Federation
from pyrofl.models.pvi.natural_gradient import (
    MAX_HALVINGS,
    MAX_ROUNDING_EPSILONS,
    MAX_VARIANCE_RATIO,
)
from pyrofl.models.pvi.partitioned import MAX_MEAN_STEP
from pyrofl.nets.stacked import products
from pyrofl.tensors import add_trailing_axes, generator

Pair = tuple[Tensor, Tensor]  # mean and root of clients, [C, d] each


def pvi(
    data: Federation,
    start: Weights,
    chunk_size: int,
    epochs: int = 20,
    draws: int = 8,
    lr: float = 0.3,
    scale: float = 0.5,
    damping: float = 0.1,
) -> Iterator[Tensor]:
    """Run PVI with a diagonal covariance, yielding the mean of q after each round."""
    shapes, source = [w.shape for w in start], generator(0)
    loc = torch.cat([w.flatten() for w in start])
    # Standard deviations are in units of the inverse root of the inputs of a weight's layer.
    fans = [float(w[0].numel()) for w in start if w.dim() > 1 for _ in ("weight", "bias")]
    first = torch.cat(
        [torch.full_like(w.flatten(), fan) for w, fan in zip(start, fans, strict=True)]
    )
    first = first / scale**2
    whole = [loc * first, first]  # shift and precision of q
    ahead = [whole[0], whole[1] - 1]
    factors = [(v / data.clients).repeat(data.clients, 1) for v in ahead]
    shift, precision = (v - factor for v, factor in zip(whole, factors, strict=True))
    means, roots = shift / precision, precision.rsqrt()  # where clients start: what comes down
    while True:
        total = [torch.zeros_like(v) for v in whole]
        for cohort in chunks(data, chunk_size):
            rows = minibatch(data, schedule(data, cohort, 1, None), 0, len(cohort))
            cavity = [v - factor[cohort] for v, factor in zip(whole, factors, strict=True)]
            mean, root = means[cohort].requires_grad_(), roots[cohort].requires_grad_()
            for step in range(epochs):
                half = torch.randn(draws // 2, *mean.shape, generator=source)
                noise = torch.cat([half, -half])
                before = mean.detach().clone(), root.detach().clone()
                value = _free_energy(mean, root, noise, cavity, rows, shapes)
                grads = torch.autograd.grad(value.sum(), [mean, root])
                with torch.no_grad():
                    _natural(mean, root, grads, lr, step, -(-epochs // 2))
                    energy = partial(
                        _free_energy, noise=noise, cavity=cavity, rows=rows, shapes=shapes
                    )
                    _shorten(energy, before, (mean, root))
            means[cohort], roots[cohort] = mean.detach(), root.detach()
            precision = roots[cohort].square().reciprocal()
            for i, v in enumerate((means[cohort] * precision, precision)):
                change = damping * (v - whole[i])
                factors[i][cohort] += change
                total[i] += change.sum(0)
        whole = [v + more for v, more in zip(whole, total, strict=True)]
        yield whole[0] / whole[1]


def _free_energy(
    mean: Tensor,
    root: Tensor,
    noise: Tensor,
    cavity: list[Tensor],
    rows: Rows,
    shapes: list[torch.Size],
) -> Tensor:
    u = mean + root * noise
    parts = u.split([s.numel() for s in shapes], -1)
    outputs = _network(rows[0], [v.unflatten(-1, s) for v, s in zip(parts, shapes, strict=True)])
    fit = losses(outputs, *rows[1:]).sum((0, 2)) / len(noise)
    others: Tensor = (u * torch.addcmul(cavity[0], cavity[1], u, value=-0.5)).sum(-1).mean(0)
    value: Tensor = fit - others - root.log().sum(-1)
    return value


def _natural(
    mean: Tensor, root: Tensor, grads: tuple[Tensor, ...], lr: float, step: int, steady: int
) -> None:
    lr = lr / max(1, step + 1 - steady)
    curved = (1 + root * grads[1]).abs().clamp(max=MAX_VARIANCE_RATIO if step else inf)
    root.mul_((1 + lr * (curved - 1)).clamp(min=1 / MAX_VARIANCE_RATIO).rsqrt())
    slope = root.square() * grads[0]
    mean.sub_(lr * slope / (slope / MAX_MEAN_STEP).abs().amax(-1, keepdim=True).clamp(min=1))


def _shorten(energy: Callable[..., Tensor], before: Pair, after: Pair) -> None:
    """Halve the steps that raised the energy, in place; precisions go straight, as means do."""
    known = energy(*before)
    known = known + MAX_ROUNDING_EPSILONS * torch.finfo(known.dtype).eps * (1 + known.abs())
    share, ends = torch.ones_like(known), [v.clone() for v in after]
    old, new = (v[1].square().reciprocal() for v in (before, ends))
    for left in reversed(range(MAX_HALVINGS)):
        risen = ~(energy(*after) <= known)
        if not risen.any():
            break
        share = torch.where(risen, share / 2 if left else 0.0, share)
        after[0].copy_(torch.lerp(before[0], ends[0], share[:, None]))
        after[1].copy_(torch.lerp(old, new, share[:, None]).rsqrt())


def _network(x: Tensor, weights: Weights) -> Tensor:
    """Run K draws [K, C, *p] for every client on its rows [C, B, in]: [K, C, B, out]."""
    w1, b1, w2, b2 = weights
    hidden = wide(x, w1, b1).relu().flatten(0, 1)
    outputs: Tensor = products(hidden, w2.flatten(0, 1), b2.flatten(0, 1))
    return torch.unflatten(outputs, 0, w1.shape[:2])


def pfedbayes(
    data: Federation,
    start: Weights,
    chunk_size: int,
    epochs: int = 5,
    batch: int = 50,
    draws: int = 2,
    repeat: int = 5,
    lr: float = 0.01,
    kl: float = 0.1,
    scale: float = 0.05,
) -> Iterator[Weights]:
    """Run pFedBayes, yielding means and spreads of the prior after each round."""
    source, width = generator(0), torch.tensor(scale).expm1().log().item()
    server = [*start, *(torch.full_like(w, width) for w in start)]
    own = [w.expand(data.clients, *w.shape).clone() for w in server]
    middle = len(start)
    while True:
        total = [torch.zeros_like(w) for w in server]
        for cohort in chunks(data, chunk_size):
            plan = schedule(data, cohort, epochs, batch)
            near = [w.expand(len(cohort), *w.shape).clone().requires_grad_() for w in server]
            mine = [v[cohort].requires_grad_() for v in own]
            results = [[v.detach() for v in part] for part in (mine, near)]  # the same memory
            on_mine: torch.optim.Optimizer
            on_near: torch.optim.Optimizer
            on_mine, on_near = (torch.optim.Adam(v, lr) for v in (mine, near))
            for t in range(len(plan.rows)):
                if (active := int((plan.steps > t).sum())) < len(mine[0]):
                    mine, on_mine = narrowed(mine, on_mine, active)
                    near, on_near = narrowed(near, on_near, active)
                x, y, mask = minibatch(data, plan, t, active)
                weight, size = kl / data.sizes[cohort[:active]], mask.sum(1) * draws
                for _ in range(repeat):
                    w = [
                        m + softplus(s) * torch.randn(draws, *m.shape, generator=source)
                        for m, s in zip(mine[:middle], mine[middle:], strict=True)
                    ]
                    fit = losses(_network(x, w), y, mask).sum((0, 2)) / size
                    descend((fit + weight * _apart(mine, near)).sum(), mine, on_mine)
                descend((weight * _apart(mine, near)).sum(), near, on_near)
            for table, v in zip(own, results[0], strict=True):
                table[cohort] = v
            for table, v in zip(total, results[1], strict=True):
                table += v.sum(0) / data.clients
        server = total
        yield server


def _apart(q: Weights, p: Weights) -> Tensor:
    """Return KL[q || p], [C], of two lists of means, then of what softplus makes widths of."""
    middle = len(q) // 2
    widths, scales = ([softplus(v) for v in some[middle:]] for some in (q, p))
    return divergence(q[:middle], widths, p[:middle], scales)


def fedpop(
    data: Federation,
    start: Weights,
    chunk_size: int,
    burn_in: int = 2,
    epochs: int = 5,
    batch: int = 10,
    lr_head: float = 0.1,
    lr: float = 0.01,
    memory: float = 0.8,
    scale: float = 0.2,
) -> Iterator[Weights]:
    """Run FedPop, yielding base and the heads' center after each round."""
    source, weights = generator(0), start
    deviation = [torch.full_like(w, scale) for w in start[2:]]
    heads = [w.expand(data.clients, *w.shape).clone() for w in start[2:]]
    sums, squares = ([torch.zeros_like(h) for h in heads] for _ in range(2))
    count = torch.zeros(data.clients)
    while True:
        bases, center, spread = (
            [torch.zeros_like(w) for w in part] for part in (start[:2], start[2:], start[2:])
        )
        for cohort in chunks(data, chunk_size):
            base, z = (
                [w.expand(len(cohort), *w.shape).clone() for w in weights[:2]],
                [h[cohort] for h in heads],
            )
            first, second = ([memory * v[cohort] for v in part] for part in (sums, squares))
            draws, size = memory * count[cohort], data.sizes[cohort].to(data.dtype)
            least = (lr_head / size).sqrt()  # wide enough for the chain's steps
            population = (
                weights[2:],
                [d.maximum(add_trailing_axes(least, d[None])) for d in deviation],
            )
            early = schedule(data, cohort, burn_in, batch)
            for t in range(len(early.rows)):
                active = int((early.steps > t).sum())
                rows = minibatch(data, early, t, active)
                _shake(z, rows, [w[:active] for w in base], population, size, lr_head, source)
            for (x, y, mask), params, optimizer in steps(data, cohort, base, epochs, batch, lr):
                n = len(x)
                still = [p.detach() for p in params]
                _shake(z, (x, y, mask), still, population, size, lr_head, source)
                for v, a, b in zip(z, first, second, strict=True):
                    a[:n] += v[:n]
                    b[:n] += v[:n].square()
                draws[:n] += 1
                fit = losses(_mlp(x, [*params, *(v[:n] for v in z)]), y, mask).sum(1) / mask.sum(1)
                descend(fit.sum(), params, optimizer)
            count[cohort] = draws
            for i, v in enumerate(z):
                heads[i][cohort], sums[i][cohort], squares[i][cohort] = v, first[i], second[i]
                center[i] += (first[i] / add_trailing_axes(draws, v)).sum(0) / data.clients
                spread[i] += (second[i] / add_trailing_axes(draws, v)).sum(0) / data.clients
            for table, v in zip(bases, base, strict=True):
                table += torch.tensordot(size / data.sizes[: data.clients].sum(), v, 1)
        deviation = [
            (s - c.square()).clamp(min=1e-8).sqrt() for s, c in zip(spread, center, strict=True)
        ]
        weights = bases + center
        yield weights


def _shake(
    z: Weights,
    rows: Rows,
    base: Weights,
    population: tuple[Weights, Weights],
    size: Tensor,
    lr: float,
    source: torch.Generator,
) -> None:
    """Make a Langevin step of the heads of the first clients, in place."""
    x, y, mask = rows
    n = len(x)
    at = [v[:n].clone().requires_grad_() for v in z]
    value = (losses(_mlp(x, [*base, *at]), y, mask).sum(1) / mask.sum(1)).sum()
    for v, center, width in zip(at, *population, strict=True):
        value = (
            value + (((v - center) / width[:n]).square().flatten(1).sum(1) / (2 * size[:n])).sum()
        )
    for v, grad in zip(z, torch.autograd.grad(value, at), strict=True):
        gain = add_trailing_axes((2 * lr / size[:n]).sqrt(), grad)
        v[:n] += gain * torch.randn(grad.shape, generator=source) - lr * grad


def _mlp(x: Tensor, weights: Weights) -> Tensor:
    w1, b1, w2, b2 = weights
    return products(products(x, w1, b1).relu(), w2, b2)
