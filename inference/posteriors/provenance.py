"""Provenance of posterior draws: method, model, seeds and status, as attributes for ArviZ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors.axes import Groups
from pyrofl.inference.posteriors.export import STOPPED, Fact
from pyrofl.inference.seeds import Seed, separate


def facts(
    runs: Sequence[Any],
    made: Groups,
    verdicts: Sequence[ConvergenceStatus],
    how: EvaluationSpec,
    begun: float,
) -> dict[str, Fact]:
    """Return ArviZ attributes that describe runs: method, model, seeds, rounds and status."""
    method = runs[0].method
    drawn = made.get("posterior", {}).items()
    points = [n for n, v in drawn if len(v.value) > 1 and bool((v.value == v.value[:1]).all())]
    told: dict[str, Fact] = {
        "method": method.name or method.programs,
        "model": how.view(method),
        "adaptation": how.adaptation,
        "rounds": together([run.state.number for run in runs]),
        "seed": together([_seed(run.seed) for run in runs]),
        "status": "; ".join(map(str, verdicts)),
    }
    if known := [run.privacy for run in runs if run.privacy]:
        told |= {n: together([getattr(one, n) for one in known]) for n in ("epsilon", "delta")}
        told |= {"privacy": together([str(one) for one in known])}
    told |= {"points": ", ".join(points)} if points else {}
    if os.environ.get(STOPPED):
        return told
    fitted = sum(record.seconds for run in runs for record in run.records)
    return told | {"fitting_time": fitted, "sampling_time": perf_counter() - begun}


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
