"""Losses after gradient steps, differentiated through the steps, as in MAML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pyrofl.arguments import NotNegative, Positive, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import AddDirections, OfGradients
from pyrofl.inference.definition.programs import Loss, Program
from pyrofl.tensors import Tensors, add_trailing_axes, pick, sum_per_client

Order = Literal["exact", "first", "hessian_free"]

BATCH_PARTS: dict[Order, int] = {"exact": 3, "first": 2, "hessian_free": 3}  # of a batch

Descent = Callable[[Program, Program, Tensors, Tensors, Batch], Tensors]
"""(model, guide, received, local, batch) -> local after some steps; gradients flow through."""


@checked
def make_descent(
    loss: Loss, names: str, lr: NotNegative, steps: Whole = 1, clip: Positive | None = None
) -> Descent:
    """Return a function that applies differentiable gradient steps to local tensors.

    Args:
        loss: per client, [C].
        names: patterns of the local tensors that move.
        lr: learning rate, on the scale of the loss.
        steps: how many, all on the same batch.
        clip: largest norm of a client's gradient; a longer one is scaled down.
    """

    def descend(
        model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensors:
        """Return the client's local tensors after the differentiable gradient steps."""
        for _ in range(steps):
            local, moving = _requiring_grad(local, names)
            slopes = _gradient([loss(model, guide, received, local, batch)], moving)
            if clip is not None:
                norm = (sum_per_client({n: v.square() for n, v in slopes.items()}) + 1e-12).sqrt()
                shrink = (clip / norm).clamp(max=1)
                slopes = {n: v * add_trailing_axes(shrink, v) for n, v in slopes.items()}
            local = local | {n: v - lr * slopes[n] for n, v in moving.items()}
        return local

    return descend


@checked
def maml(
    loss: Loss,
    names: str,
    lr: NotNegative,
    *,
    order: Order = "exact",
    clip: Positive | None = None,
) -> Loss:
    """Return the MAML loss: the loss on query rows after one step on support rows.

    A third of a batch's rows supports the step w' = w - lr grad L(w). "exact" (MAML) is the loss
    at w' of the other rows, whose gradient flows through the step. "hessian_free" (Per-FedAvg) is
    g - lr H g with g the gradient at w' on the second third and H the second derivative at w on the
    last third: three independent batches, as the analysis asks for. H g is an exact Hessian-vector
    product, by differentiating twice; no matrix H is computed. "first" is g alone, as if w' - w
    were constant, and has a half of the rows for each.

    Finn, Abbeel and Levine, "Model-Agnostic Meta-Learning", ICML 2017; Fallah, Mokhtari and
    Ozdaglar, "Personalized Federated Learning", NeurIPS 2020, whose difference quotient of two
    gradients is the exact product here: of Monte Carlo losses, which draw again, it would be noise.

    Where lr exceeds the inverse of the curvature, g - lr H g points uphill: exact products diverge
    there, unlike halved or clipped ones.

    Args:
        loss: per client, [C].
        names: patterns of the local tensors that make the inner step. Others that the outer step
            moves get their gradient too.
        lr: learning rate of the inner step.
        order: of the outer gradient.
        clip: largest norm of a client's inner gradient.
    """
    return Maml(loss, names, lr, order, clip)


@dataclass(frozen=True)
class Maml(OfGradients):
    """Loss function on query rows after one step on support rows; see `maml`."""

    names: str
    lr: float
    order: Order
    clip: float | None

    @property
    def is_linear(self) -> bool:
        """Whether gradients are combined linearly: they are not clipped."""
        return self.clip is None

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the MAML loss [C] after the inner step; its gradient is the outer gradient."""
        loss, order = self.loss, self.order
        step = make_descent(loss, self.names, self.lr, clip=self.clip)
        first, second, *last = batch.split(BATCH_PARTS[order])
        local, moving = _requiring_grad(local, self.names)
        after = step(model, guide, received, local, first)
        if order == "exact":
            return loss(model, guide, received, after, _concatenated(second, *last))
        near = local | {n: v + (after[n] - v).detach() for n, v in moving.items()}
        if order == "first":
            return loss(model, guide, received, near, second)
        value = loss(model, guide, received, near, second)
        free = {n: v for n, v in local.items() if v.requires_grad}
        g = {n: v.detach() for n, v in _gradient([value], free).items()}
        slopes = _gradient([loss(model, guide, received, local, *last)], moving)
        bent = [n for n, v in slopes.items() if v.requires_grad]  # others are constant
        curved = _gradient([slopes[n] for n in bent], free, [g[n] for n in bent])
        outer = [g[n] - self.lr * curved[n].detach() for n in free]
        directed: Tensor = AddDirections.apply(value.detach(), len(outer), *outer, *free.values())
        return directed


def _requiring_grad(local: Tensors, names: str) -> tuple[Tensors, Tensors]:
    """Enable gradients of the named local tensors; return the new local state and these tensors."""
    moving = {
        n: v if v.requires_grad else v.detach().requires_grad_()
        for n, v in pick(local, names).items()
    }
    if not moving:
        raise ValueError(f"no local tensor matches {names!r}; there are {sorted(local)}")
    return local | moving, moving


def _gradient(
    values: Sequence[Tensor], of: Tensors, along: Sequence[Tensor] | None = None
) -> Tensors:
    """Return the gradient of the sum of values, or of their inner product with constants."""
    # Not by `ones_like`, so that a recorded step has no operation for them.
    ones = [torch.ones(v.shape, dtype=v.dtype, device=v.device) for v in values]
    grads = torch.autograd.grad(
        values,
        list(of.values()),
        along or ones,
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(of, grads, strict=True))


def _concatenated(a: Batch, b: Batch) -> Batch:
    """Concatenate two parts of a batch, with all padding rows at the end.

    So padding does not change the noise of any row.
    """
    joined = {n: torch.cat([getattr(a, n), getattr(b, n)], 1) for n in ("x", "y", "mask", "at")}
    order = joined["mask"].int().argsort(dim=1, descending=True, stable=True)
    client = torch.arange(len(a), device=order.device)[:, None]
    rows: Any = {n: v[client, order] for n, v in joined.items()}
    return replace(a, **rows)
