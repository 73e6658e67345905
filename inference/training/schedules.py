"""Schedules of local training: minibatches of clients with different numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from pyrofl.data import Batch, Cohort, Federation
from pyrofl.data.batch import share

FETCH_BYTES = 2**18  # bytes of rows that are fetched at once, which stay in the cache: measured
INDEX_BYTES = 32  # bytes of a row except its x

Batches = Callable[[int, int, int], Iterator[Batch]]
"""(step, clients with this step, number of steps with these clients) -> batch of each step."""


class Schedule(NamedTuple):
    """Row indices of the minibatches of several clients, by step.

    At step t, client c has the minibatch rows[t, c] if t < steps[c].
    """

    rows: Tensor  # [T, C, B] int64; padding is the client's first row
    mask: Tensor  # [T, C, B] bool
    steps: Tensor  # [C] int64
    at: Tensor  # [T, C, B] int64, which of the client's rows they are

    def of(self, clients: Tensor | slice) -> Schedule:
        """Return the schedule restricted to the given clients, in their order."""
        rows, mask, steps, at = self
        return Schedule(rows[:, clients], mask[:, clients], steps[clients], at[:, clients])


def make_schedule(
    rows: list[Tensor], epochs: list[int], batch: int | None, order: list[Generator]
) -> Schedule:
    """Return the shuffled minibatches of all clients for all their epochs.

    Every epoch is shuffled by the client's `order`; its last minibatch may be shorter than `batch`.
    None uses all rows, in order.
    """
    # By NumPy, which takes a fifth of torch's time for so few numbers.
    sizes, many = np.array([len(r) for r in rows]), np.array(epochs)
    longest = int(sizes.max())
    width = min(batch or longest, longest)
    per_epoch = -(-sizes // width)
    steps, slots = many * per_epoch, int(per_epoch.max()) * width
    streams = np.tile(np.arange(slots), (len(rows), int(many.max()), 1))  # [C, epochs, slots]
    if batch:
        for client_order, size, e, g in zip(streams, sizes.tolist(), epochs, order, strict=True):
            for epoch in client_order[:e]:
                epoch[:size] = torch.randperm(size, generator=g).numpy()
    step = np.arange(int(steps.max()))[:, None]
    begin = step % per_epoch * width  # [T, C], of a minibatch in its epoch
    slot = begin[..., None] + np.arange(width)
    mask = (slot < sizes[:, None]) & (step < steps)[..., None]
    place = (step // per_epoch)[..., None] * slots + slot  # [T, C, B]
    client = np.arange(len(rows))[:, None]
    at = streams.reshape(len(rows), -1)[client, place * mask] * mask  # padding is the first row
    table = pad_sequence(rows, batch_first=True).numpy()
    arrays = (np.ascontiguousarray(part) for part in (table[client, at], mask, steps, at))
    return Schedule(*map(torch.from_numpy, arrays))  # a step lies alike in short and long plans


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
    each = INDEX_BYTES + (0 if blind else data.x[:1].numel() * data.x.element_size())

    def batches(t: int, active: int, many: int) -> Iterator[Batch]:
        first = Cohort(cohort.ids[:active], cohort.size[:active])
        ahead, end = max(1, FETCH_BYTES // (active * rows.shape[2] * each)), t + many
        for begin in range(t, end, ahead):
            now = slice(begin, min(begin + ahead, end)), slice(active)
            fetched = data.gather(first, rows[now], mask[now], at[now], part[now], blind)
            yield from fetched.by_step()

    return batches
