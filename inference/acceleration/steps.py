"""Training steps of one phase, for several clients in one vectorized batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from weakref import proxy

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.acceleration.recording.recorder import Recorder
from pyrofl.inference.definition.method import ClosedFormUpdate, GradientStep, Method, Phase
from pyrofl.inference.definition.optim import (
    initial_state,
    keep_first_clients,
    non_tensor_values,
    optimizer_of,
)
from pyrofl.inference.training.noise import NUMBERS_AHEAD, ClientNoise
from pyrofl.inference.training.schedules import Batches
from pyrofl.inference.training.updates import (
    absent_tensor,
    client_losses,
    closed_form_values,
    stepped_names,
)
from pyrofl.tensors import Tensors, cut, under

LAID_OUT_ENTRIES = 2**14  # of a client, from which copies of gradients are not cheap

TensorRoles = tuple[Tensors, Tensors, Tensors]
"""Tensors that an update modifies, those that other updates modify, and constant ones."""


class PhaseRun:
    """Execution of one training phase for clients sorted by decreasing number of steps.

    The active clients are a prefix, `now`: views of the first rows of `local`, which optimizers
    and updates overwrite in place. Clients that have finished are no longer in it.
    """

    def __init__(
        self,
        method: Method,
        phase: Phase,
        received: Tensors,
        local: Tensors,
        cohort: Cohort,
        noise: Sequence[Generator],
    ) -> None:
        """Create the phase's updates and optimizers, on a copy of the tensors `local`."""
        self.method, self.phase, self.received, self.cohort = method, phase, received, cohort
        self.noise = ClientNoise(noise, NUMBERS_AHEAD)
        steps = [move for move in phase.updates if isinstance(move, GradientStep)]
        moving = [stepped_names(step, local) for step in steps]
        self.owned = {n for names in moving for n in names}
        self.local = {
            n: v.clone(memory_format=torch.contiguous_format) if n in self.owned else v
            for n, v in local.items()
        }
        self.now = self.local
        self.once = False  # whether updates run only once, for all clients, and nothing in place
        self.ones = torch.ones_like(cohort.size)
        # Weak references: in a cycle, tensors would stay until the garbage is collected.
        self.steps = [
            AcceleratedStep(self, step, names) for step, names in zip(steps, moving, strict=True)
        ]
        stepping = iter(self.steps)
        self.updates = [
            next(stepping) if isinstance(move, GradientStep) else ClosedFormRun(self, move)
            for move in phase.updates
        ]

    def go(self, steps: Tensor, batches: Batches) -> None:
        """Run `steps` [C] training steps of each client, given in decreasing order."""
        self.once = not self.steps and bool((steps == 1).all())
        times = torch.arange(int(steps.max()))
        t, left = 0, (steps > times[:, None]).sum(1).tolist()
        for active, alike in Counter(left).items():
            if active < len(steps):
                self._narrow(active)
            for done, batch in enumerate(batches(t, active, alike)):
                self._moves(batch, t + done > 0, alike - done)
            t += alike

    def _moves(self, batch: Batch, begun: bool, ahead: int) -> None:
        """Run every update of the phase once, on one batch.

        The step is the first of `ahead` steps with these clients.
        """
        self.noise.mask = batch.mask
        for update in self.updates:
            update.make(batch, begun, ahead)

    def _narrow(self, active: int) -> None:
        """Restrict all following training steps to the first `active` clients."""
        self.now = cut(self.local, slice(active))
        self.received = cut(self.received, slice(active))
        self.noise.narrow(active)
        for step in self.steps:
            keep_first_clients(step.optimizer, active)
        self.forget()

    def forget(self) -> None:
        """Discard the recordings in use by all updates, as their tensors have been replaced."""
        for update in self.updates:
            update.forget()

    def tensor_roles(self, moving: Tensors, names: Collection[str], active: int) -> TensorRoles:
        """Return tensors that an update modifies, those that others modify, and constants."""
        others = {n: v for n, v in self.now.items() if n not in names}
        placed = {n: v for n, v in others.items() if n in self.owned}
        still = {n: v for n, v in others.items() if n not in self.owned}
        still |= under("received", self.received) | {"ones": self.ones[:active]}
        return moving, placed, still

    def write(self, name: str, value: Tensor) -> None:
        """Assign a value to the active clients' part of the local tensor `name`."""
        old, now = self.local.get(name), self.now.get(name)
        fits = now is not None and now.shape == value.shape and now.dtype == value.dtype
        if name in self.owned and fits and not self.once:
            self.now[name].copy_(value)
            return
        self.forget()  # as another tensor replaces this one
        stepped = any(name in step.params for step in self.steps)
        if len(value) == len(self.cohort.ids) and not stepped:
            self.local[name] = self.now[name] = value
            self.owned.add(name)
            return
        if old is None:
            raise absent_tensor(name)
        if name not in self.owned:
            self.local[name] = old.clone(memory_format=torch.contiguous_format)
            self.owned.add(name)
        self.local[name][: len(value)].copy_(value)
        self.now[name] = self.local[name][: len(value)]

    @property
    def first(self) -> Tensors:
        """First loss of each client in this phase, [C], by the name of the gradient step."""
        return {step.names: step.first for step in self.steps}

    def losses(self, steps: Tensor) -> Tensors:
        """Return each client's mean loss in this phase, [C], by the name of the gradient step."""
        return {one.names: one.total / steps.clamp(min=1).to(one.total) for one in self.steps}


class ClosedFormRun:
    """Execution of a closed-form update within a training phase."""

    def __init__(self, run: PhaseRun, move: ClosedFormUpdate) -> None:
        self.run: PhaseRun = proxy(run)
        self.move, self.names = move, set[str]()
        self.name = getattr(move, "__name__", type(move).__name__)
        self.executor: Recorder | None = None  # from the second run on, as many run only once

    def make(self, batch: Batch, begun: bool, ahead: int) -> None:
        """Run the update on a batch, by replaying recorded operations if possible.

        The update is the first of `ahead` equal ones.
        """
        written = partial(self.written, batch)
        # An update without results has side effects, which a recording would omit.
        if begun and self.names and self.names <= self.run.owned:
            self.executor = self.executor or self._recorder()
            self.executor.make(written, self.tensor_roles, batch, ahead)
        else:
            written()

    def _recorder(self) -> Recorder:
        run = self.run
        values = (run.method.model, run.method.guide, self.move)
        return Recorder(self.name, values, run.phase.batch is None, run.noise)

    def forget(self) -> None:
        """Discard the recording in use, if any."""
        if self.executor:
            self.executor.forget()

    def tensor_roles(self) -> TensorRoles:
        """Return the tensors that this update modifies, those that others modify, and constants."""
        moving = {n: self.run.now[n].detach() for n in sorted(self.names)}
        return self.run.tensor_roles(moving, self.names, len(self.run.ones))

    def written(self, batch: Batch) -> None:
        """Run the update by calling its original function, without a recording."""
        run = self.run
        with run.noise:
            values = self.move(run.received, run.now, batch)
        changed = closed_form_values(self.name, values, run.now, len(batch))
        if not run.once:  # an update may return tensors that its other results overwrite
            changed = {n: v.clone() for n, v in changed.items()}
        self.names = {*changed}
        for name, value in changed.items():
            run.write(name, value.detach())


class AcceleratedStep:
    """Execution of a training phase's gradient steps on the tensors with matching names.

    Attributes:
        names: patterns of the tensors.
        params: tensors of the active clients.
        total: sum of the losses of all clients, [C].
        first: loss of the first step, [C].
    """

    def __init__(self, run: PhaseRun, step: GradientStep, moving: Sequence[str]) -> None:
        self.run: PhaseRun = proxy(run)
        self.step, self.names = step, step.names
        self.params = {n: run.local[n].detach().requires_grad_() for n in moving}
        self.optimizer = optimizer_of(step.optim, [*self.params.values()])
        self.total = torch.zeros_like(run.cohort.size)
        self.first = torch.full_like(self.total, torch.nan)
        self.waiting = True  # for the first step
        programs = run.method.model, run.method.guide
        values, whole = (*programs, step.loss, step.optim, step.num_steps), run.phase.batch is None
        self.executor = Recorder(self.names, values, whole, run.noise)
        self.executor.numbers = partial(non_tensor_values, self.optimizer)
        self.plain = self._begins()

    def _begins(self) -> bool:
        """Initialize the optimizer's state before the first step; return whether that succeeded."""
        if not self.executor.is_plain(self.params):
            return False
        states = {n: initial_state(self.step.optim, p) for n, p in self.params.items()}
        for name, state in states.items():
            if state:
                self.optimizer.state[self.params[name]] = state
        return None not in states.values()

    def make(self, batch: Batch, begun: bool, ahead: int) -> None:
        """Run the gradient steps on a batch, by replaying recorded operations if possible.

        The first step is the first of `ahead` equal ones.
        """
        written, repeat = partial(self.written, batch), self.step.num_steps
        for i in range(repeat):
            if begun or (self.plain and (i > 0 or repeat == 1)):
                self.executor.make(written, self.tensor_roles, batch, ahead * repeat - i)
                if self.waiting:  # a slice in every step takes two microseconds
                    self._note(self.total[: len(batch)])
            else:
                self.executor.begin(written, self.params)

    def forget(self) -> None:
        """Discard the recording in use, if any."""
        self.executor.forget()

    def tensor_roles(self) -> TensorRoles:
        """Return the tensors that this step modifies, those that others modify, and constants."""
        active = len(next(iter(self.params.values())))
        state = self.optimizer.state
        states = {f"{m} of {n}": v for n, p in self.params.items() for m, v in state[p].items()}
        moving = {n: p.detach() for n, p in self.params.items()}
        moving |= {n: v for n, v in states.items() if torch.is_tensor(v)}
        moving |= {"total": self.total[:active]}
        return self.run.tensor_roles(moving, self.params, active)

    def written(self, batch: Batch) -> None:
        """Run one gradient step by autograd and the optimizer, without a recording."""
        run, step, params = self.run, self.step, self.params
        # New leaves: autograd stores a leaf's shape as long as any of its graphs exists, and `vmap`
        # leaves graphs to the garbage collector, while `_narrow` shortens the parameters.
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        with run.noise:
            local = run.now | leaves
            losses = step.loss(run.method.model, run.method.guide, run.received, local, batch)
        loss = client_losses(step, losses, batch)
        moving, ones = list(leaves.values()), run.ones[: len(loss)]
        grads = torch.autograd.grad(loss, moving, ones, allow_unused=True, materialize_grads=True)
        for (name, p), grad in zip(params.items(), grads, strict=True):
            if p.dim() and not self.optimizer.state.get(p):
                self._lay_out(name, p, grad)
            # Fused optimizers of torch require the same memory layout of both.
            p.grad = grad if same_layout(grad, p) else torch.empty_like(p).copy_(grad)
        self.optimizer.step()
        for p in params.values():
            p.grad = None  # so that the next gradients reuse this memory, still in the cache
        self._note(loss.detach())
        self.total[: len(loss)].add_(loss.detach(), alpha=1 / step.num_steps)

    def _note(self, loss: Tensor) -> None:
        """Store the clients' losses if this is the first step; do nothing otherwise."""
        if self.waiting:
            self.waiting = False
            self.first[: len(loss)] = loss

    def _lay_out(self, name: str, p: Tensor, grad: Tensor) -> None:
        """Change a large parameter's memory layout to its gradient's, for fused optimizers."""
        run = self.run
        others = [step for step in run.steps if name in step.params]
        if any(step.optimizer.state.get(step.params[name]) for step in others):
            return  # another optimizer's state has the current layout
        strides = (p[0].numel(), *torch.empty_like(grad[0]).stride())
        if (
            strides != p.stride() and p[0].numel() >= LAID_OUT_ENTRIES
        ):  # or a copy of the gradient is cheap
            whole = run.local[name]
            run.local[name] = torch.empty_strided(
                whole.shape, strides, dtype=whole.dtype, device=whole.device
            ).copy_(whole)
            run.now[name] = run.local[name][: len(p)]
            for step in others:
                step.params[name].data = run.now[name]


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of equal shape have the same memory layout."""
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(a == b for n, a, b in strides if n > 1)
