"""Optimisers for stacked clients: those of torch.optim that work element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrofl.arguments import NotNegative, Positive, ShareBelowOne, checked
from pyrofl.tensors import like

Optim = Callable[[list[Tensor]], Optimizer]
"""Makes an optimiser from torch.optim that works element by element, for stacked clients."""


class Light(Optimizer):
    """An optimiser that does not load torch's compiler, which takes more than a second, once."""

    add_param_group = unwrap(Optimizer.add_param_group)


def lightly(step: Callable[..., Any]) -> Callable[..., Any]:
    """Take what torch wraps around the step of an optimiser off, but for its use of gradients."""
    plain = unwrap(step)

    def go(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, closure)

    return go


class LightSgd(Light, torch.optim.SGD):
    """SGD of torch."""

    step = lightly(torch.optim.SGD.step)


class LightAdam(Light, torch.optim.Adam):
    """Adam of torch."""

    step = lightly(torch.optim.Adam.step)


@dataclass(frozen=True)
class Sgd:
    """Makes plain SGD; see `sgd`. A value, so that what trains may see how it steps."""

    lr: float
    momentum: float
    options: Mapping[str, Any]

    def __call__(self, params: list[Tensor]) -> Optimizer:
        """Make the optimiser of some tensors."""
        return LightSgd(params, **self.options, lr=self.lr, momentum=self.momentum)


@checked
def sgd(
    lr: NotNegative, momentum: ShareBelowOne = 0.0, clip: Positive | None = None, **options: Any
) -> Optim:
    """Make plain SGD, as the papers use it.

    Args:
        lr: learning rate, on the scale of the loss it is used with (sum or mean).
        momentum: heavy-ball momentum.
        clip: largest norm of a client's whole gradient; a longer one is scaled down.
        options: further arguments of `torch.optim.SGD`, which is the fused one if they permit.
    """
    fused = not (options.get("foreach") or options.get("differentiable"))
    make = Sgd(lr, momentum, {"fused": fused} | options)
    return make if clip is None else clipped(make, clip)


@checked
def adam(lr: NotNegative, **options: Any) -> Optim:
    """Make Adam; `options` are further arguments of `torch.optim.Adam`."""
    return lambda params: LightAdam(params, lr=lr, **options)


@checked
def clipped(make: Optim, norm: Positive) -> Optim:
    """Scale down the gradient of every client whose norm over all its parameters is too long."""

    def clip(optimiser: Optimizer, *_: Any) -> None:
        moving = [p for g in optimiser.param_groups for p in g["params"] if p.grad is not None]
        squares = torch.stack([p.grad.reshape(len(p), -1).square().sum(1) for p in moving]).sum(0)
        factor = (norm / (squares.sqrt() + 1e-6)).clamp(max=1)
        for p in moving:
            # Not in place: autograd may hand out one tensor as the gradient of several.
            p.grad = p.grad * like(factor, p)

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
