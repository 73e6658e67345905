"""Validation of gradients: detects tensors that affect a loss but receive no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrofl.data import Batch
from pyrofl.inference.definition.method import ClosedFormUpdate, GradientStep, Method, Phase
from pyrofl.inference.definition.optim import optimizer_of
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.inference.validation.independence import (
    TestRound,
    differs,
    refuse_changes,
    refuse_global_draws,
    rows_of,
    update_name,
)
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, matches

VALIDATION_ROWS = 3  # of a minibatch and of the largest client in the validation: a step for each
CURE = "tensors all the way, without detach, no_grad, .item(), NumPy or writing in place"


@dataclass
class WatchedStep:
    """Wrapper of a gradient step that records which tensors received a nonzero gradient.

    Attributes:
        step: the step of the method.
        names: names of the tensors that it trains.
        live: names of those that had a nonzero gradient.
        keep: whether to store the arguments of the loss.
        calls: received, local and batch of a call of the loss, if stored.
        moved: matching names in the last call.
    """

    step: GradientStep
    names: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    keep: bool = False
    calls: tuple[Tensors, Tensors, Batch] | None = None
    moved: list[str] = field(default_factory=list)

    def watched(self) -> GradientStep:
        """Return a copy of the gradient step that records its gradients in this object."""
        return replace(self.step, optim=self.optim, loss=self.loss)

    def optim(self, params: list[Tensor]) -> Optimizer:
        """Create the gradient step's optimizer, with a hook that records nonzero gradients."""
        optimizer = optimizer_of(self.step.optim, params)
        optimizer.register_step_pre_hook(partial(self._note, params))
        return optimizer

    def loss(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Compute the gradient step's loss; raise ValueError if it has no gradient."""
        if self.keep and (self.calls is None or len(batch) >= len(self.calls[2])):
            copies = {n: v.detach().clone() for n, v in local.items()}
            self.calls = dict(received), copies, batch
        value = self.step.loss(model, guide, received, local, batch)
        if isinstance(value, Tensor) and not value.requires_grad:
            raise ValueError(
                f"the loss of step {self.step.names!r} has no gradient; expected {CURE}"
            )
        self.moved = [
            n for n in local if matches(n, self.step.names)
        ]  # first those of the optimizer
        return value

    def _note(self, params: Sequence[Tensor], optimizer: Optimizer, *_: Any) -> None:
        for p, name in zip(params, self.moved, strict=False):
            if name not in self.names:
                self.names.append(name)
            if name not in self.live and p.grad is not None and bool(p.grad.any()):
                self.live.add(name)

    @property
    def still(self) -> list[str]:
        """Names of the trained tensors that never received a nonzero gradient."""
        return [n for n in self.names if n not in self.live]


@dataclass(frozen=True)
class CheckedUpdate:
    """Wrapper that runs a closed-form update and raises an error for forbidden side effects.

    An update must not draw random numbers or write in place. Names of changed tensors are recorded.
    """

    move: ClosedFormUpdate
    written: set[str]

    @property
    def __name__(self) -> str:
        """Name of the wrapped closed-form update."""
        return update_name(self.move)

    def __call__(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Run the wrapped update and return the changed tensors; raise ValueError if invalid."""
        name = self.__name__
        with (
            refuse_global_draws(name, batch.size.device),
            refuse_changes(name, local, received, rows_of(batch)),
            calling(f"update {name!r}"),
        ):
            changed = self.move(received, local, batch)
        self.written.update(as_tensors(f"what update {name!r} returns", changed))
        return changed


def watched_phase(phase: Phase, written: set[str], steps: list[WatchedStep]) -> Phase:
    """Return a shortened training phase with its updates wrapped for validation.

    It has at most two epochs, on small minibatches.

    After the first step clients differ, so that a loss that compares them is detected.
    """
    updates: list[GradientStep | ClosedFormUpdate] = []
    for move in phase.updates:
        if isinstance(move, GradientStep):
            steps.append(WatchedStep(move))
            updates.append(steps[-1].watched())
        else:
            updates.append(CheckedUpdate(move, written))
    epochs = 2 if callable(phase.epochs) else min(phase.epochs, 2)
    batch = min(phase.batch, VALIDATION_ROWS) if phase.batch else None
    return replace(phase, updates=tuple(updates), epochs=epochs, batch=batch)


def refuse_still(trial: TestRound, steps: Sequence[WatchedStep]) -> None:
    """Raise ValueError for a trained tensor that affects its loss but receives no gradient."""
    if not any(step.still for step in steps):
        return
    for step in steps:
        step.keep = True
    trial.run_round(trial.ids)
    moving = [step.step.names for step in steps]  # also of steps with 0 epochs
    for step in steps:
        for name in step.still:
            has_gradient = arrives(trial.method, step, name, moving)
            if has_gradient is False:
                raise ValueError(
                    f"no gradient reaches {name!r}, which step {step.step.names!r} trains, though "
                    f"its loss depends on it; expected {CURE}"
                )


def arrives(method: Method, step: WatchedStep, name: str, moving: Sequence[str]) -> bool | None:
    """Return whether a loss, at perturbed values, has a gradient for the tensor `name`.

    Its gradient may be zero at the initial values, as that of the factor of a zero tensor. None if
    the loss reads the tensor but does not depend on it, given the same noise.
    """
    assert step.calls is not None
    received, local, batch = step.calls
    source = stream(0, Stream.TEST)

    def loss(trained: Tensors, batch: Batch) -> Tensor:
        noise = [stream(0, Stream.TEST, 0, str(i)) for i in batch.ids.tolist()]
        with ClientNoise(noise), torch.enable_grad():
            return step.step.loss(method.model, method.guide, received, trained, batch)

    def near(value: Tensor, far: float) -> Tensor:
        off = torch.randn(value.shape, generator=source, dtype=value.dtype).to(value.device)
        return (value + far * (1 + value.abs()) * off).detach()

    scaled = batch.x.is_floating_point()
    # A layer may be inactive for these rows, or a feature constant: try other values and rows too.
    for far, x in (
        (0.01, batch.x),
        (1.0, near(batch.x, 1.0) if scaled else batch.x),
        (1.0, near(torch.zeros_like(batch.x), 1.0) if scaled else batch.x),
    ):
        rows = replace(batch, x=x)
        moved_by = [n for n in local if any(matches(n, names) for names in moving)]
        start = local | {n: near(local[n], far).requires_grad_() for n in moved_by}
        moved = near(start[name], 0.01).requires_grad_()
        first, moved = loss(start, rows), loss(start | {name: moved}, rows)
        if not bool((first.isfinite() & moved.isfinite()).all()):
            return True  # values that the method does not reach
        (grad,) = torch.autograd.grad(first.sum(), [start[name]], allow_unused=True)
        if grad is not None and bool(grad.any()):
            return True
        if differs(first.detach(), moved.detach()):
            return False
        if grad is None:
            return True  # no program reads it
    return None
