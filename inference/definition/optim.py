"""Elementwise optimizers of torch.optim, for the stacked tensors of several clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrofl.arguments import NotNegative, Positive, ShareBelowOne, checked
from pyrofl.tensors import add_trailing_axes

Optim = Callable[[list[Tensor]], Optimizer]
"""Function that creates an elementwise optimizer of torch.optim for stacked clients."""


class WithoutCompiler(Optimizer):
    """Base class of optimizers that avoids the slow import of torch's compiler."""

    add_param_group = unwrap(Optimizer.add_param_group)


def without_compiler_import(step: Callable[..., Any]) -> Callable[..., Any]:
    """Remove torch's wrapper, which imports the compiler, from an optimizer's `step` method.

    The gradient mode that the wrapper sets is kept.
    """
    plain = unwrap(step)

    def go(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, closure)

    return go


class SgdWithoutCompiler(WithoutCompiler, torch.optim.SGD):
    """SGD optimizer of torch, without the slow import of torch's compiler."""

    step = without_compiler_import(torch.optim.SGD.step)


class AdamWithoutCompiler(WithoutCompiler, torch.optim.Adam):
    """Adam optimizer of torch, without the slow import of torch's compiler."""

    step = without_compiler_import(torch.optim.Adam.step)


@dataclass(frozen=True)
class Sgd:
    """Factory of SGD optimizers with the given settings; see `sgd`."""

    lr: float
    momentum: float
    options: Mapping[str, Any]

    def __call__(self, params: list[Tensor]) -> Optimizer:
        """Create an SGD optimizer for the given tensors."""
        return SgdWithoutCompiler(params, **self.options, lr=self.lr, momentum=self.momentum)

    def initial_state(self, param: Tensor) -> dict[str, Tensor] | None:
        """Return a tensor's momentum buffer before the first step; None if dampening is used."""
        if self.options.get("dampening"):
            return None
        return {"momentum_buffer": torch.zeros_like(param)} if self.momentum else {}


@dataclass(frozen=True)
class Adam:
    """Factory of Adam optimizers with the given settings; see `adam`."""

    lr: float
    options: Mapping[str, Any]

    def __call__(self, params: list[Tensor]) -> Optimizer:
        """Create an Adam optimizer for the given tensors."""
        return AdamWithoutCompiler(params, **self.options, lr=self.lr)

    def initial_state(self, param: Tensor) -> dict[str, Tensor] | None:
        """Return a tensor's Adam state before the first step; None for AMSGrad or unfused Adam."""
        if self.options.get("amsgrad") or not self.options["fused"]:
            return None
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        return {"step": step, **{n: torch.zeros_like(param) for n in ("exp_avg", "exp_avg_sq")}}


@checked
def sgd(
    lr: NotNegative, momentum: ShareBelowOne = 0.0, clip: Positive | None = None, **options: Any
) -> Optim:
    """Return a factory of SGD optimizers, with optional momentum and gradient clipping.

    Args:
        lr: learning rate, on the scale of the loss it is used with (sum or mean).
        momentum: heavy-ball momentum.
        clip: largest norm of a client's whole gradient; a longer one is scaled down.
        options: further arguments of `torch.optim.SGD`; fused unless they exclude it.

    Returns:
        A function: list of tensors [C, *p] -> optimizer.
    """
    fused = not (options.get("foreach") or options.get("differentiable"))
    make = Sgd(lr, momentum, {"fused": fused} | options)
    return make if clip is None else clipped(make, clip)


@checked
def adam(lr: NotNegative, **options: Any) -> Optim:
    """Return a factory of Adam optimizers; `options` are arguments of `torch.optim.Adam`."""
    other = ("foreach", "differentiable", "capturable")
    return Adam(lr, {"fused": not any(options.get(n) for n in other)} | options)


@dataclass(frozen=True)
class Clipped:
    """Factory of optimizers that clip each client's gradient norm; see `clipped`."""

    make: Optim
    norm: float

    def __call__(self, params: list[Tensor]) -> Optimizer:
        """Create an optimizer with gradient clipping for the given tensors."""
        optimizer = self.make(params)
        optimizer.register_step_pre_hook(self.clip_gradients)
        return optimizer

    def clip_gradients(self, optimizer: Optimizer, *_: Any) -> None:
        """Scale each client's gradient down to the maximum norm, before an optimizer step."""
        moving = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        # The norms of each tensor, [C].
        norms = [torch.linalg.vector_norm(p.grad.reshape(len(p), -1), dim=1) for p in moving]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        factor = (self.norm / (norm + 1e-6)).clamp(max=1)
        for p in moving:
            # Not in place: several parameters may share one gradient tensor.
            p.grad = p.grad * add_trailing_axes(factor, p)

    def initial_state(self, param: Tensor) -> dict[str, Tensor] | None:
        """Return a tensor's optimizer state before the first step; None if it is unknown."""
        return initial_state(self.make, param)


@checked
def clipped(make: Optim, norm: Positive) -> Optim:
    """Return an optimizer factory that clips the norm of each client's whole gradient."""
    return Clipped(make, norm)


def optimizer_of(make: Optim, params: list[Tensor]) -> Optimizer:
    """Create an optimizer; raise ValueError if it is none of torch, or needs a closure."""
    optimizer = make(params)
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"optim returns a {type(optimizer).__name__}; expected an optimizer of torch whose "
            "step needs no closure: sgd(0.01), adam(0.01), or a function such as "
            "lambda tensors: torch.optim.AdamW(tensors, lr=0.01)"
        )
    return optimizer


def initial_state(make: Optim, param: Tensor) -> dict[str, Tensor] | None:
    """Return a tensor's optimizer state before the first step; None if it is unknown."""
    return make.initial_state(param) if isinstance(make, (Sgd, Adam, Clipped)) else None


def non_tensor_values(optimizer: Optimizer) -> list[Any]:
    """Return all values in an optimizer's state and options that are not tensors."""
    values = [v for state in optimizer.state.values() for v in state.values()]
    values += [v for g in optimizer.param_groups for n, v in g.items() if n != "params"]
    return [v for v in values if not torch.is_tensor(v)]


def keep_first_clients(optimizer: Optimizer, clients: int) -> None:
    """Restrict an optimizer's stacked tensors and state to the first `clients` clients."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data = p.data[:clients]
            p.grad = None
            for name, value in optimizer.state[p].items():
                if torch.is_tensor(value) and value.dim():
                    optimizer.state[p][name] = value[:clients]
