"""Stacked clients of a chunk and their steps, of which `floors` consist."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from research_loop import MOMENTUM
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.training.schedules import Schedule, make_schedule
from pyrofl.models.likelihoods import normalized
from pyrofl.nets.stacked import products
from pyrofl.tensors import generator

Weights = list[Tensor]
"""Weight [out, in] and bias of an MLP's hidden layer, and of its head or the heads' center."""
Rows = tuple[Tensor, Tensor, Tensor]  # x [C, B, in], y [C, B], mask [C, B]


def chunks(data: Federation, chunk_size: int) -> Iterator[Tensor]:
    """Yield the ids of clients that are trained side by side, those with the most rows first."""
    yield from data.sizes[: data.clients].argsort(descending=True).split(chunk_size)


def schedule(data: Federation, cohort: Tensor, epochs: int, batch: int | None) -> Schedule:
    """Schedule the minibatches of some clients."""
    rows = [data.train[i] for i in cohort.tolist()]
    return make_schedule(rows, [epochs] * len(rows), batch, [generator(0, int(i)) for i in cohort])


def steps(
    data: Federation, cohort: Tensor, own: Weights, epochs: int, batch: int, lr: float
) -> Iterator[tuple[Rows, Weights, torch.optim.Optimizer]]:
    """Yield the rows of clients with a step left, their weights and the optimizer of these."""
    planned = schedule(data, cohort, epochs, batch)
    left = (planned.steps > torch.arange(len(planned.rows))[:, None]).sum(1).tolist()
    params = [w.detach().requires_grad_() for w in own]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr, MOMENTUM, fused=True)
    for t, active in enumerate(left):
        if active < len(params[0]):
            params, optimizer = narrowed(params, optimizer, active)
        yield minibatch(data, planned, t, active), params, optimizer


def narrowed(
    params: Weights, optimizer: torch.optim.Optimizer, active: int
) -> tuple[Weights, torch.optim.Optimizer]:
    """Return the first clients' weights, in the same memory, and an optimizer that goes on."""
    left = [w.detach()[:active].requires_grad_() for w in params]
    new = type(optimizer)(left, **optimizer.defaults)
    for before, after in zip(params, left, strict=True):
        state = optimizer.state[before]
        new.state[after] = {n: v[:active] if v.dim() else v for n, v in state.items()}
    return left, new


def minibatch(data: Federation, planned: Schedule, t: int, active: int) -> Rows:
    """Pick the rows of step t of the first clients."""
    rows = planned.rows[t, :active]
    x, y = (v.index_select(0, rows.flatten()).unflatten(0, rows.shape) for v in (data.x, data.y))
    return x.flatten(2), y, planned.mask[t, :active]


def losses(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the cross entropy of every row, 0 where it is padding."""
    truth = y.expand(logits.shape[:-1])
    return -normalized(logits).gather(-1, truth[..., None])[..., 0] * mask


def descend(loss: Tensor, params: Weights, optimizer: torch.optim.Optimizer) -> None:
    """Make a step down a loss."""
    for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = grad.contiguous()  # as fused optimizers take for granted
    optimizer.step()


def wide(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run K draws [K, C, out, in] of a layer as one with K times the outputs: [K, C, B, out]."""
    y = products(x, weight.transpose(0, 1).flatten(1, 2), bias.transpose(0, 1).flatten(1))
    return torch.unflatten(y, -1, (len(weight), -1)).movedim(-2, 0)


def divergence(means: Weights, widths: Weights, centers: Weights, scales: Weights) -> Tensor:
    """Return KL[q || p] of independent normals, [C]; q has means and widths [C, *p]."""
    found = torch.zeros(())
    for m, s, center, scale in zip(means, widths, centers, scales, strict=True):
        ratio = (s / scale).square()
        each = ratio + ((m - center) / scale).square() - 1 - ratio.log()
        found = found + 0.5 * each.flatten(1).sum(1)
    return found
