"""Optimisers for stacked clients: those of torch.optim that work element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Make = Callable[[list[Tensor]], Optimizer]


def sgd(lr: float, momentum: float = 0.0, clip: float | None = None, **options: Any) -> Make:
    """Make plain SGD, as the papers use it.

    Args:
        lr: learning rate, on the scale of the loss it is used with (sum or mean).
        momentum: heavy-ball momentum.
        clip: largest norm of a client's whole gradient; a longer one is scaled down.
        options: further arguments of `torch.optim.SGD`, which is the fused one if they permit.

    Raises:
        ValueError: if lr or momentum is negative, or clip is not positive.
    """
    if lr < 0 or not 0 <= momentum < 1:
        raise ValueError(f"lr is {lr}, momentum {momentum}; expected lr >= 0, 0 <= momentum < 1")

    chosen = {"fused": not (options.get("foreach") or options.get("differentiable"))} | options

    def make(params: list[Tensor]) -> Optimizer:
        return torch.optim.SGD(params, **chosen, lr=lr, momentum=momentum)

    return make if clip is None else clipped(make, clip)


def adam(lr: float, **options: Any) -> Make:
    """Make Adam; `options` are further arguments of `torch.optim.Adam`.

    Raises:
        ValueError: if lr is negative.
    """
    if lr < 0:
        raise ValueError(f"lr is {lr}; expected lr >= 0")
    return lambda params: torch.optim.Adam(params, lr=lr, **options)


def clipped(make: Make, norm: float) -> Make:
    """Scale down the gradient of every client whose norm over all its parameters is too long.

    Raises:
        ValueError: if norm is not positive.
    """
    if not norm > 0:
        raise ValueError(f"norm is {norm}; expected a positive number")

    def clip(optimiser: Optimizer, *_: Any) -> None:
        moving = [p for g in optimiser.param_groups for p in g["params"] if p.grad is not None]
        squares = torch.stack([p.grad.reshape(len(p), -1).square().sum(1) for p in moving]).sum(0)
        factor = (norm / (squares.sqrt() + 1e-6)).clamp(max=1)
        for p in moving:
            # Not in place: autograd may hand out one tensor as the gradient of several.
            p.grad = p.grad * factor.reshape(-1, *(1 for _ in p.shape[1:]))

    def make_clipped(params: list[Tensor]) -> Optimizer:
        optimiser = make(params)
        optimiser.register_step_pre_hook(clip)
        return optimiser

    return make_clipped


def narrow(optimiser: Optimizer, clients: int) -> None:
    """Let an optimiser go on with the first clients only; the others keep what they have."""
    for group in optimiser.param_groups:
        for p in group["params"]:
            p.data = p.data[:clients]
            p.grad = None
            for name, value in optimiser.state[p].items():
                if torch.is_tensor(value) and value.dim():
                    optimiser.state[p][name] = value[:clients]
