"""Gradients that do not arrive: tensors that a loss depends on and that no step would move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrofl.data import Batch
from pyrofl.inference.method import ClosedFormUpdate, GradientStep, Method, Phase
from pyrofl.inference.programs import Program
from pyrofl.inference.seeds import Stream, stream
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.inference.validation.independence import (
    Trial,
    named,
    rows_of,
    unchanged,
    undrawn,
    unlike,
)
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, matches

ROWS = 3  # of a minibatch, as of the largest client that is looked at: a step for each
CURE = "tensors all the way, without detach, no_grad, .item(), NumPy or writing in place"


@dataclass
class WatchedStep:
    """A gradient step, and which of its tensors have had a gradient.

    Attributes:
        step: as the method has it.
        names: of the tensors that it moves.
        live: those that had a gradient which is not exactly zero.
        calls: what the loss was given, where that is kept.
        moved: names that match in the last call.
    """

    step: GradientStep
    names: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    keep: bool = False
    calls: tuple[Tensors, Tensors, Batch] | None = None
    moved: list[str] = field(default_factory=list)

    def watched(self) -> GradientStep:
        """Return a step that does the same and is watched."""
        return replace(self.step, optim=self.optim, loss=self.loss)

    def optim(self, params: list[Tensor]) -> Optimizer:
        """Make the optimiser, whose steps are looked at."""
        optimiser = self.step.optim(params)
        optimiser.register_step_pre_hook(partial(self._note, params))
        return optimiser

    def loss(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the loss, and refuse one without a gradient."""
        if self.keep and (self.calls is None or len(batch) >= len(self.calls[2])):
            own = {n: v.detach().clone() for n, v in local.items()}
            self.calls = dict(received), own, batch
        value = self.step.loss(model, guide, received, local, batch)
        if isinstance(value, Tensor) and not value.requires_grad:
            raise ValueError(
                f"the loss of step {self.step.names!r} has no gradient; expected {CURE}"
            )
        self.moved = [
            n for n in local if matches(n, self.step.names)
        ]  # first those of the optimiser
        return value

    def _note(self, params: Sequence[Tensor], optimiser: Optimizer, *_: Any) -> None:
        for p, name in zip(params, self.moved, strict=False):
            if name not in self.names:
                self.names.append(name)
            if name not in self.live and p.grad is not None and bool(p.grad.any()):
                self.live.add(name)

    @property
    def still(self) -> list[str]:
        """Names of the tensors that never had a gradient."""
        return [n for n in self.names if n not in self.live]


@dataclass(frozen=True)
class CheckedUpdate:
    """A closed form whose names are noted, and that may neither draw by itself nor write."""

    move: ClosedFormUpdate
    written: set[str]

    @property
    def __name__(self) -> str:
        """The name of the closed form."""
        return named(self.move)

    def __call__(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Return what changes."""
        name = self.__name__
        with (
            undrawn(name, batch.size.device),
            unchanged(name, local, received, rows_of(batch)),
            calling(f"update {name!r}"),
        ):
            changed = self.move(received, local, batch)
        self.written.update(as_tensors(f"what update {name!r} returns", changed))
        return changed


def watched(phase: Phase, written: set[str], steps: list[WatchedStep]) -> Phase:
    """Return a phase of two epochs at most, on small minibatches, whose moves are watched.

    After the first step clients differ, so that a loss which compares them is seen.
    """
    updates: list[GradientStep | ClosedFormUpdate] = []
    for move in phase.updates:
        if isinstance(move, GradientStep):
            steps.append(WatchedStep(move))
            updates.append(steps[-1].watched())
        else:
            updates.append(CheckedUpdate(move, written))
    epochs = 2 if callable(phase.epochs) else min(phase.epochs, 2)
    batch = min(phase.batch, ROWS) if phase.batch else None
    return replace(phase, updates=tuple(updates), epochs=epochs, batch=batch)


def refuse_still(trial: Trial, steps: Sequence[WatchedStep]) -> None:
    """Refuse tensors on which the loss of their step depends without a gradient; see `CURE`."""
    if not any(step.still for step in steps):
        return
    for step in steps:
        step.keep = True
    trial.made(trial.ids)
    moving = [step.step.names for step in steps]  # also of steps whose epochs are 0
    for step in steps:
        for name in step.still:
            found = arrives(trial.method, step, name, moving)
            if found is False:
                raise ValueError(
                    f"no gradient reaches {name!r}, which step {step.step.names!r} moves, though "
                    f"its loss depends on it; expected {CURE}"
                )


def arrives(method: Method, step: WatchedStep, name: str, moving: Sequence[str]) -> bool | None:
    """Say whether a gradient reaches a tensor where others that move are elsewhere.

    At the start it may be zero, as of the factor of another that is zero. None if the loss reads
    the tensor and does not depend on it, given the same noise.
    """
    assert step.calls is not None
    received, local, batch = step.calls
    source = stream(0, Stream.TEST)

    def loss(own: Tensors, batch: Batch) -> Tensor:
        noise = [stream(0, Stream.TEST, 0, str(i)) for i in batch.ids.tolist()]
        with ClientNoise(noise), torch.enable_grad():
            return step.step.loss(method.model, method.guide, received, own, batch)

    def near(value: Tensor, far: float) -> Tensor:
        off = torch.randn(value.shape, generator=source, dtype=value.dtype).to(value.device)
        return (value + far * (1 + value.abs()) * off).detach()

    scaled = batch.x.is_floating_point()
    # A layer may be off for these rows, a feature constant, or large rows leave no doubt.
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
            return True  # where the method does not get to
        (grad,) = torch.autograd.grad(first.sum(), [start[name]], allow_unused=True)
        if grad is not None and bool(grad.any()):
            return True
        if unlike(first.detach(), moved.detach()):
            return False
        if grad is None:
            return True  # no program reads it
    return None
