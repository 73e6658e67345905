"""Accelerated local training: groups of clients by size, recorded updates, space of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from pyrofl.data import Cohort
from pyrofl.inference.acceleration.groups import (
    CACHED_STEPS,
    ROW_SPACE_STEP_COST_ROWS,
    Axes,
    buckets,
    group_by_bounds,
    groups_of_wide,
    join_groups,
    narrow_rows,
    roomy,
)
from pyrofl.inference.acceleration.recording.recorder import may_record, recording
from pyrofl.inference.acceleration.row_space.alternatives import ShortPhase
from pyrofl.inference.acceleration.row_space.rewriting import MAX_CACHED_PHASES, alternatives
from pyrofl.inference.acceleration.steps import PhaseRun
from pyrofl.inference.definition.method import GradientStep, Phase
from pyrofl.inference.definition.optim import initial_state
from pyrofl.inference.definition.seeds import Streams
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.training.phases import Trained, TrainingContext
from pyrofl.inference.training.phases import run_phases as run_as_written
from pyrofl.inference.training.schedules import minibatches, same_batch
from pyrofl.tensors import Tensors, as_run, cut, generator, join_up, pick


def run_phases_accelerated(
    training: TrainingContext,
    phases: Sequence[Phase],
    received: Tensors,
    local: Tensors,
    cohort: Cohort,
) -> Trained:
    """Run training phases faster than as written: in groups by size, from recorded operations.

    It has the arguments and results of `training.phases.run_phases`.
    """
    method, data = training.method, training.data
    initial_names, sizes = local.keys(), data.sizes[cohort.ids.cpu()]
    names = local | created_before_steps(training, phases, received, local, cohort)
    each = [alternatives(method, phase, received, names, data) for phase in phases]
    groups = []
    with recording(training.record, training.rounds):
        for some in group_by_bounds(sizes, [way.most for way in each]):
            before, rows = cut(local, some), int(sizes[some[0]])
            group_phases = [phase for way in each for phase in way.of(rows)]
            whose = Cohort(cohort.ids[some], cohort.size[some])
            for part in GroupedTraining(*training).run(
                group_phases, cut(received, some), before, whose
            ):
                entries = part.after.local.items()
                local_state = {n: v for n, v in entries if n in initial_names or n[:5] != "rows/"}
                group_after = part.after._replace(local=local_state)
                groups.append(part._replace(places=some[part.places], after=group_after))
        after, _ = join_results(groups)
    return after._replace(local=local | after.local)


# By phases and names: see `created_before_steps`.
CREATED_CACHE: dict[object, tuple[object, Tensors]] = {}


def created_before_steps(
    training: TrainingContext,
    phases: Sequence[Phase],
    received: Tensors,
    local: Tensors,
    cohort: Cohort,
) -> Tensors:
    """Return local tensors [1, ...] that updates before the first gradient step create.

    Steps are rewritten by names and shapes of what they read. So these updates are run for one
    client, once for a method, if they are the library's: a user's may have side effects.
    """
    first = tuple(takewhile(has_no_gradient_step, phases))
    if not first or len(first) == len(phases):
        return {}
    key = *map(id, first), tuple(received), tuple(local), training.data.x.shape[1:]
    if key not in CREATED_CACHE:
        tensors: Tensors = {}
        if not users_code(first)[0]:
            trial = training._replace(noise=lambda _: generator(0), order=lambda _: generator(0))
            one = Cohort(cohort.ids[:1], cohort.size[:1])
            inputs = cut(received, slice(1)), cut(local, slice(1))
            after = run_as_written(trial, first, *inputs, one).local
            tensors = {n: v for n, v in after.items() if n not in local}
        if len(CREATED_CACHE) >= MAX_CACHED_PHASES:
            CREATED_CACHE.pop(next(iter(CREATED_CACHE)), None)
        CREATED_CACHE[key] = first, tensors  # stored phases keep their ids
    return CREATED_CACHE[key][1]


class ClientGroupResult(NamedTuple):
    """Clients that were trained together, with their tensors before and the changed ones after."""

    places: Tensor  # [G], among all
    before: Tensors  # [G, ...]
    width: int  # rows of the longest
    after: Trained


def join_results(groups: Sequence[ClientGroupResult]) -> tuple[Trained, Axes]:
    """Join training results of groups of clients; also return which tensor axes index rows."""
    places, before, widths, after = zip(*groups, strict=True)
    changed, losses, steps, first = zip(*after, strict=True)
    local, axes = join_groups(changed, before, widths, places)
    back = torch.cat(places).argsort()
    both = (cut(join_up(part), back) for part in (losses, first))
    return Trained(local, next(both), torch.cat(steps)[back], next(both)), axes


class GroupedTraining(TrainingContext):
    """Local training of clients in groups of similar numbers of rows."""

    def run(
        self, phases: Sequence[Phase], received: Tensors, local: Tensors, cohort: Cohort
    ) -> list[ClientGroupResult]:
        """Run training phases for clients, in groups of similar numbers of rows where needed.

        Groups are returned separately if all phases ran on the same groups.
        """
        sizes, axes = self.data.sizes[cohort.ids.cpu()], Axes()
        bound = int(self.data.sizes.max())
        short = any(isinstance(phase, ShortPhase) for phase in phases)
        trains = self._step_size(phases, local, cohort)
        few = buckets(sizes, ROW_SPACE_STEP_COST_ROWS) if short else groups_of_wide(sizes, *trains)
        parts = [(some, roomy(sizes[some], bound)) for some in few]
        longest = max(width for _, width in parts)
        by_batch = sizes.clamp(max=max((phase.batch or 1 for phase in phases), default=1))
        batched = [(some, longest) for some in groups_of_wide(by_batch, *trains)]
        trained = Trained.begin(local, cohort)
        # Full batches and the space of rows are padded: their clients run in groups.
        kinds = groupby(phases, lambda p: p.batch is None or isinstance(p, ShortPhase))
        turns = [(by_rows, list(turn)) for by_rows, turn in kinds]
        for by_rows, group in turns:
            turn = [(phase, phase.count_epochs(cohort.ids)) for phase in group]
            groups = []
            for some, width in parts if by_rows else batched:
                before = narrow_rows(cut(trained.local, some), axes, width)
                group_phases = [(phase, epochs[some]) for phase, epochs in turn]
                whose = Cohort(cohort.ids[some], cohort.size[some])
                after = self._run_group(group_phases, cut(received, some), before, whose, width)
                groups.append(ClientGroupResult(some, before, width, after))
            if len(turns) == 1:
                return groups
            after, group_axes = join_results(groups)
            axes = {n: at for n, at in axes.items() if n not in after.local} | group_axes
            trained = trained.then(after)
        after = changed_only(local, trained)
        return [ClientGroupResult(torch.arange(len(sizes)), local, longest, after)]

    def _step_size(
        self, phases: Sequence[Phase], local: Tensors, cohort: Cohort
    ) -> tuple[int, int]:
        """Return the numbers that a step of one client trains, and the bytes that it modifies.

        The bytes are 0 where groups that fit the cache would not be faster: on a GPU, or if a step
        of more groups is not recorded, or not soon.
        """
        sizes, entries, modified, most = self.data.sizes[cohort.ids.cpu()], 0, 0, 0
        for phase in phases:
            steps = [update for update in phase.updates if isinstance(update, GradientStep)]
            trained = [(s.optim, v[:1]) for s in steps for v in pick(local, s.names).values()]
            states = [(initial_state(optim, v) or {}).values() for optim, v in trained]
            tensors = [v for _, v in trained] + [v for each in states for v in each]
            entries = max(entries, sum(v.numel() for _, v in trained))
            modified = max(modified, sum(v.numel() * v.element_size() for v in tensors))
            in_epoch = -(-sizes // phase.batch) if phase.batch else 1
            most = max(most, int((phase.count_epochs(cohort.ids).cpu() * in_epoch).max()))
        values = self.method.model, self.method.guide, *(p.updates for p in phases)
        soon = most >= CACHED_STEPS and cohort.size.device.type == "cpu" and may_record(values)
        return entries, modified if soon else 0

    def _run_group(
        self,
        phases: Sequence[tuple[Phase, Tensor]],
        received: Tensors,
        local: Tensors,
        cohort: Cohort,
        width: int,
    ) -> Trained:
        """Run training phases one after the other, on batches padded to `width` rows per client."""
        names, trained = self.names(cohort), Trained.begin(local, cohort)
        full = any(phase.batch is None for phase, _ in phases)
        whole = self.data.batch(cohort.ids, width=width) if full else None
        for phase, steps in phases:
            if phase.batch:
                schedule = self.schedule(cohort, steps, phase.batch)
                steps = schedule.steps
            # Clients that finish early must be the last: stepping then means a shorter prefix.
            rank = as_run(steps.argsort(descending=True, stable=True))
            back = rank if isinstance(rank, slice) else rank.argsort()
            ranked = Cohort(cohort.ids[rank], cohort.size[rank])
            if whole and phase.batch is None:
                batches = same_batch(whole.select_clients(rank))
            else:
                blind = isinstance(phase, ShortPhase) and phase.blind
                batches = minibatches(self.data, ranked, schedule.of(rank), blind)
            noise = Streams(self.noise, [names[c] for c in torch.arange(len(names))[rank].tolist()])
            tensors = cut(received, rank), cut(trained.local, rank)
            run = PhaseRun(self.method, phase, *tensors, ranked, noise)
            run.go(steps[rank], batches)
            owned = {n: v for n, v in run.local.items() if n in run.owned}
            parts = (owned, run.losses(steps[rank]), run.first)
            changed, losses, first = (cut(part, back) for part in parts)
            each = sum(m.num_steps for m in phase.updates if isinstance(m, GradientStep))
            trained = trained.then(Trained(changed, losses, steps * each, first))
        return changed_only(local, trained)


def has_no_gradient_step(phase: Phase) -> bool:
    """Return whether a phase has no gradient step."""
    return not any(isinstance(update, GradientStep) for update in phase.updates)


def changed_only(local: Tensors, trained: Trained) -> Trained:
    """Return the results of training with only the tensors that have changed."""
    new = {n: v for n, v in trained.local.items() if v is not local.get(n)}
    return trained._replace(local=new)
