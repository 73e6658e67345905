"""Test, after training, of whether a guide's standard deviations are still those of its start.

If a guide's scales are learned by gradient steps, those of up to 8 clients are compared with their
values before round one. They are reported as unlearned if

    median |log(sd / sd at the start)| < 0.1    and    max |mean - mean at the start| > 0.1 sd

over all coordinates. Point guides and scales that are fixed or computed in closed form are not
tested, nor scales of programs without closed-form moments.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pyrofl.data import Federation
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.programs import Guide
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.engine.start import first
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.tensors import Tensors, matches, pick
from pyrofl.turns import synchronized

MAX_CLIENTS = 8  # at most
MIN_CHANGE = 0.1  # median |log| of learned scales; change of a mean, in standard deviations


@synchronized
def unlearned_widths(method: Method, data: Federation, state: RoundState, seed: Seed) -> str:
    """Return a warning if the guide's standard deviations are those of its start; "" otherwise."""
    guide = method.guide
    if not (isinstance(guide, Guide) and guide.random):
        return ""
    ids = state.seen.cpu().nonzero()[:, 0][:MAX_CLIENTS]
    steps = (u for phase in method.phases for u in phase.updates if isinstance(u, GradientStep))
    learned = " ".join(step.names for step in steps)

    def moments(at: RoundState) -> Iterator[tuple[Tensors, Tensors]]:
        spec = EvaluationSpec(seed=seed, model=method.main_view, chunk_size=1)
        for i, received, local, _ in single(method, data, at, ids, spec):
            if all(matches(n, learned) for n in pick(local, guide.names)):
                yield guide.moments(received, local, data.batch(i))

    changes: dict[str, list[torch.Tensor]] = {}
    moved = 0.0
    for (mean, variance), (old, start) in zip(
        moments(state), moments(first(method, data, seed)), strict=True
    ):
        for n, v in variance.items():
            changes.setdefault(n, []).append((v / start[n]).log().abs().flatten() / 2)
            moved = max(moved, float(((mean[n] - old[n]).square() / start[n]).max().sqrt()))
    median = {n: float(torch.cat(some).median()) for n, some in changes.items()}
    if not median or moved <= MIN_CHANGE:
        return ""
    whole = torch.cat([change for some in changes.values() for change in some])
    typical = float(whole.median())
    if not (float(whole.max()) > 0 and typical < MIN_CHANGE):
        return ""
    sites = ", ".join(n for n, change in median.items() if change < MIN_CHANGE)
    return (
        f"standard deviations of {sites} are still those of the start (median change "
        f"{typical:.1%}): they reflect init_scale, not the data; run more rounds, raise the "
        "learning rate of the guide's scales or, in pfedvem, set prior_scale=1, which has a "
        "closed form"
    )
