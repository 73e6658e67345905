"""Minibatches of clients' rows for each step of a training phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.data.batch import share
from pyrofl.inference.training.schedules import Schedule

FETCHED = 2**18  # bytes of rows that are fetched at once, which stay in the cache: measured
BESIDE = 32  # bytes of a row except its x

Batches = Callable[[int, int, int], Iterator[Batch]]
"""(step, clients with this step, number of steps with these clients) -> batch of each step."""


def same_batch(whole: Batch) -> Batches:
    """Return a function that yields the same full batch in every step."""
    return lambda _, active, many: repeat(whole.select_clients(slice(0, active)), many)


def minibatches(data: Federation, cohort: Cohort, schedule: Schedule, blind: bool) -> Batches:
    """Return a function that yields the scheduled minibatches of all clients, step by step.

    Clients are sorted by decreasing number of steps.

    Rows of several steps are fetched at once; those of a `blind` phase have no x.
    """
    rows, mask, at = (v.to(data.x.device) for v in (schedule.rows, schedule.mask, schedule.at))
    part = share(cohort.size, mask)
    each = BESIDE + (0 if blind else data.x[:1].numel() * data.x.element_size())

    def batches(t: int, active: int, many: int) -> Iterator[Batch]:
        first = Cohort(cohort.ids[:active], cohort.size[:active])
        ahead, end = max(1, FETCHED // (active * rows.shape[2] * each)), t + many
        for begin in range(t, end, ahead):
            now = slice(begin, min(begin + ahead, end)), slice(active)
            found = data.gather(first, rows[now], mask[now], at[now], part[now], blind)
            yield from found.by_step()

    return batches
