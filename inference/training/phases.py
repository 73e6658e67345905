"""Local training as it is written: the phases of a method, minibatch by minibatch.

All clients of a chunk train together, as one padded batch. The extension "executor" does the same
faster, see `train`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import pyro
import torch
from torch import Generator, Tensor
from torch import contiguous_format as contiguous

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.extensions import find_extension
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import keep_first_clients, optimizer_of
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.training.noise import NUMBERS_AHEAD, ClientNoise
from pyrofl.inference.training.schedules import Schedule, make_schedule, minibatches, same_batch
from pyrofl.inference.training.updates import (
    absent_tensor,
    client_losses,
    closed_form_values,
    stepped_names,
)
from pyrofl.tensors import Tensors, cut

Source = Callable[[str], Generator]
"""name of a client -> its random generator for a purpose, such as Monte Carlo noise."""


class TrainingContext(NamedTuple):
    """What all phases and clients have in common in the local training of a round.

    Attributes:
        method: the method.
        data: the federation.
        noise: random generators of noise, which continue from phase to phase.
        order: random generators of the order of rows, with which every phase begins.
        record: whether updates are replayed from recorded operations, see `federate`.
        rounds: number of rounds, including this one, in which the clients are expected to train;
            None if it is unknown.
    """

    method: Method
    data: Federation
    noise: Source
    order: Source
    record: bool | None = None
    rounds: float | None = None

    def names(self, cohort: Cohort) -> list[str]:
        """Return the names of the given clients."""
        return [self.data.names[i] for i in cohort.ids.tolist()]

    def schedule(self, cohort: Cohort, epochs: Tensor, size: int) -> Schedule:
        """Return the minibatches of a phase with this batch size."""
        rows = [self.data.train[i] for i in cohort.ids.tolist()]
        return make_schedule(rows, epochs.tolist(), size, [*map(self.order, self.names(cohort))])


class Trained(NamedTuple):
    """Results of local training of C clients.

    Attributes:
        local: tensors [C, ...].
        losses: mean loss of each gradient step, by its names, [C]; of several phases with equal
            names, that of the last. Closed-form updates have none.
        steps: number of gradient steps, [C] int64.
        first: loss of the first of each gradient step, [C].
    """

    local: Tensors
    losses: Tensors
    steps: Tensor
    first: Tensors

    @classmethod
    def begin(cls, local: Tensors, cohort: Cohort) -> Trained:
        """Return the results before the first phase."""
        return cls(local, {}, torch.zeros(len(cohort.ids), dtype=torch.long), {})

    def then(self, after: Trained) -> Trained:
        """Return the results of both, where `after` may have the changed tensors alone."""
        return Trained(
            self.local | after.local,
            self.losses | after.losses,
            self.steps + after.steps,
            after.first | self.first,
        )


def train(
    method: Method,
    received: Tensors,
    local: Tensors,
    data: Federation,
    cohort: Cohort,
    seed: Seed,
    number: int,
    *,
    phases: Sequence[Phase] | None = None,
    record: bool | None = None,
    rounds: float | None = None,
) -> Trained:
    """Train C clients together by phases, by default those of the method.

    With `record=False` the phases run as written, otherwise by the extension "executor" if any.
    """
    phases, initial_names = method.phases if phases is None else phases, local.keys()
    noise = cache(partial(stream, seed, Stream.NOISE, number))  # continues from phase to phase
    order = partial(stream, seed, Stream.ORDER, number)
    training = TrainingContext(method, data, noise, order, record, rounds)
    run = (find_extension("executor") if record is not False else None) or run_phases
    with pyro.validation_enabled(False), torch.enable_grad():
        trained: Trained = run(training, phases, received, local, cohort)
    # Statistics of rows only live while a client trains.
    local_state = {
        n: v for n, v in trained.local.items() if n in initial_names or not n.startswith("rows/")
    }
    return trained._replace(local=local_state)


def run_phases(
    training: TrainingContext,
    phases: Sequence[Phase],
    received: Tensors,
    local: Tensors,
    cohort: Cohort,
) -> Trained:
    """Run training phases one after the other, as they are written."""
    trained = Trained.begin(local, cohort)
    for phase in phases:
        trained = trained.then(run_phase(training, phase, received, trained.local, cohort))
    return trained


def run_phase(
    training: TrainingContext, phase: Phase, received: Tensors, local: Tensors, cohort: Cohort
) -> Trained:
    """Run one phase: its updates on each minibatch of the clients' rows, [C, B].

    Clients are sorted by their numbers of minibatches, so that those that still train are the first
    ones, [:active], of all tensors; updates write into these.
    """
    names, times = training.names(cohort), phase.count_epochs(cohort.ids)
    if phase.batch:
        schedule = training.schedule(cohort, times, phase.batch)
        times = schedule.steps
    rank = times.argsort(descending=True, stable=True)
    back = rank.argsort()
    cohort, received = Cohort(cohort.ids[rank], cohort.size[rank]), cut(received, rank)
    # A copy to write into.
    local = {n: v.clone(memory_format=contiguous) for n, v in cut(local, rank).items()}
    draws = ClientNoise([training.noise(names[c]) for c in rank.tolist()], NUMBERS_AHEAD)
    if phase.batch:
        batches = minibatches(training.data, cohort, schedule.of(rank), blind=False)
    else:
        batches = same_batch(training.data.batch(cohort.ids))
    run = [
        StepRun(update, local, cohort.size) if isinstance(update, GradientStep) else update
        for update in phase.updates
    ]
    steps = [update for update in run if isinstance(update, StepRun)]
    now, done, clients = dict(local), 0, len(names)
    left = (times > torch.arange(int(times.max()))[:, None]).sum(1).tolist()
    for active, count in Counter[int](left).items():
        now, received = cut(now, slice(active)), cut(received, slice(active))
        draws.narrow(active)
        for step in steps:
            keep_first_clients(step.optimizer, active)
        for batch in batches(done, active, count):
            draws.mask = batch.mask
            for update in run:
                if isinstance(update, StepRun):
                    update.make(training.method, received, now, batch, draws)
                    continue
                name = getattr(update, "__name__", type(update).__name__)
                with draws:
                    values = update(received, now, batch)
                values = closed_form_values(name, values, now, active)
                write(values, local, now, active == clients, {n for s in steps for n in s.names})
        done += count
    losses = {s.step.names: (s.total / times[rank].clamp(min=1).to(s.total))[back] for s in steps}
    first = {s.step.names: s.first[back] for s in steps}
    each = sum(s.step.num_steps for s in steps)
    return Trained(cut(local, back), losses, times * each, first)


class StepRun:
    """Gradient steps of one phase on the tensors with matching names."""

    def __init__(self, step: GradientStep, local: Tensors, size: Tensor) -> None:
        self.step, self.names = step, stepped_names(step, local)
        # The optimizer's tensors share the memory of the local ones.
        self.parameters = [local[n].detach().requires_grad_() for n in self.names]
        self.optimizer = optimizer_of(step.optim, self.parameters)
        self.total = torch.zeros_like(size)
        self.first = torch.full_like(self.total, torch.nan)
        self.begun = False

    def make(
        self, method: Method, received: Tensors, local: Tensors, batch: Batch, draws: ClientNoise
    ) -> None:
        """Take the gradient steps of one minibatch, and add up the losses."""
        for _ in range(self.step.num_steps):
            leaves = {n: local[n].detach().requires_grad_() for n in self.names}
            with draws:
                loss = self.step.loss(method.model, method.guide, received, local | leaves, batch)
            loss = client_losses(self.step, loss, batch)
            gradients = torch.autograd.grad(
                loss.sum(), [*leaves.values()], allow_unused=True, materialize_grads=True
            )
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient.contiguous()
            self.optimizer.step()
            for parameter in self.parameters:
                parameter.grad = None
            self.total[: len(loss)] += loss.detach() / self.step.num_steps
            if not self.begun:
                self.first[: len(loss)], self.begun = loss.detach(), True


def write(values: Tensors, local: Tensors, now: Tensors, everyone: bool, stepped: set[str]) -> None:
    """Write the values of a closed-form update into the tensors of the clients that still train."""
    values = {n: v.detach().clone() for n, v in values.items()}  # some may be views of others
    for name, value in values.items():
        old = now.get(name)
        if old is not None and old.shape == value.shape and old.dtype == value.dtype:
            old.copy_(value)
        elif everyone and name not in stepped:
            local[name] = now[name] = value
        else:
            raise absent_tensor(name)
