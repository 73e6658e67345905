"""The rows that clients see at each step of a phase."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from pyrofl.data import Batch, Federation, Who
from pyrofl.data.batch import share
from pyrofl.inference.loop.plans import Plan

FETCHED = 2**18  # bytes of rows that are fetched at once, which stay in the cache: measured
BESIDE = 32  # bytes of a row without its x

Feed = Callable[[int, int], Batch]
"""(step, clients that have it) -> its rows."""


def again(whole: Batch) -> Feed:
    """Let every step see the same rows."""
    shorter = cache(lambda active: whole.some(slice(active)))
    return lambda _, active: shorter(active)


def minibatches(data: Federation, who: Who, schedule: Plan, blind: bool) -> Feed:
    """Let steps see minibatches of clients, of which those with the most steps are the first.

    Rows of several steps are fetched at once; those of a `blind` phase have no x.
    """
    rows, mask, at = (v.to(data.x.device) for v in (schedule.rows, schedule.mask, schedule.at))
    part, steps = share(who.size, mask), schedule.steps.tolist()
    each = BESIDE + (0 if blind else data.x[:1].numel() * data.x.element_size())
    begun, clients, batches = 0, 0, list[Batch]()

    def feed(t: int, active: int) -> Batch:
        nonlocal begun, clients, batches
        if active != clients or t >= begun + len(batches):
            many = max(1, FETCHED // (active * rows.shape[2] * each))
            now = slice(t, min(t + many, steps[active - 1])), slice(active)
            first = Who(who.ids[:active], who.size[:active])
            found = data.gather(first, rows[now], mask[now], at[now], part[now], blind)
            begun, clients, batches = t, active, found.by_step()
        return batches[t - begun]

    return feed
