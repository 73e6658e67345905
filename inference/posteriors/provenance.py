"""Provenance of posterior draws for ArviZ: method, seeds, status, losses, parameter changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pyrofl.inference.definition.seeds import Seed, separate
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors.axes import Groups, Variable
from pyrofl.inference.posteriors.export import EPOCH_VARIABLE, Fact


def facts(
    runs: Sequence[Any],
    groups: Groups,
    verdicts: Sequence[ConvergenceStatus],
    how: EvaluationSpec,
    begun: float,
) -> dict[str, Fact]:
    """Return ArviZ attributes that describe runs: method, model, seeds, rounds and status."""
    method = runs[0].method
    drawn = groups.get("posterior", {}).items()
    points = [n for n, v in drawn if len(v.value) > 1 and bool((v.value == v.value[:1]).all())]
    attributes: dict[str, Fact] = {
        "method": method.name or method.programs,
        "model": how.view_name(method),
        "adaptation": how.adaptation,
        "rounds": together([run.state.number for run in runs]),
        "seed": together([_seed(run.seed) for run in runs]),
        "status": "; ".join(map(str, verdicts)),
    }
    if budgets := [run.privacy for run in runs if run.privacy]:
        attributes |= {
            n: together([getattr(one, n) for one in budgets]) for n in ("epsilon", "delta")
        }
        attributes |= {"privacy": together([str(one) for one in budgets])}
    attributes |= {"points": ", ".join(points)} if points else {}
    if os.environ.get(EPOCH_VARIABLE):
        return attributes
    fitted = sum(record.seconds for run in runs for record in run.records)
    return attributes | {"fitting_time": fitted, "sampling_time": perf_counter() - begun}


def _seed(seed: Seed) -> Fact:
    """Return a run's seed, or a text with its three separate seeds if these differ."""
    each = separate(seed)
    return each.noise if each.init == each.participation == each.noise else str(each)


def together(values: Sequence[Fact]) -> Fact:
    """Return the value that all runs have, or else a text that lists each run's value.

    >>> together([20, 20]), together([0, 1])
    (20, '0; 1')
    """
    return values[0] if len(set(values)) == 1 else "; ".join(map(str, values))


def losses(runs: Sequence[Any]) -> tuple[Tensor, list[int], list[str]]:
    """Return training losses by run, round, client and gradient step, with labels of the axes."""
    records = [record for run in runs for record in run.records]
    steps = list(dict.fromkeys(name for record in records for name in record.loss))
    numbers = {record.number for record in records}
    rounds = range(min(numbers), max(numbers) + 1)
    shape = (len(runs), len(rounds), runs[0].data.clients, len(steps))
    values = torch.full(shape, torch.nan, dtype=torch.float64)
    for run, run_values in zip(runs, values, strict=True):
        for record in run.records:
            for name, value in record.loss.items():
                run_values[record.number - rounds[0], :, steps.index(name)] = value
    return values, list(rounds), steps


def movements(runs: Sequence[Any]) -> tuple[list[str], list[dict[str, Variable]]]:
    """Return site names, and how much each site's parameters changed in every round of each run."""
    records = [record for run in runs for record in run.records]
    numbers = {record.number for record in records}
    keys = {(n, part): None for r in records for n, of in (r.moved or {}).items() for part in of}
    sites = list(dict.fromkeys(name for name, _ in keys))
    shape, changes = (max(numbers) - min(numbers) + 1, len(sites)), []
    for run in runs:
        far = {p: torch.full(shape, torch.nan, dtype=torch.float64) for _, p in keys}
        for record in run.records:
            for name, parts in (record.moved or {}).items():
                for part, value in parts.items():
                    far[part][record.number - min(numbers), sites.index(name)] = value
        changes.append({f"moved_{p}": Variable(v, ("round", "site")) for p, v in far.items()})
    return sites, changes
