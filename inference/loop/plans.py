"""Plans: in which order clients go through their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

WORTH = 2000  # rows of padding in a step that cost more time than a step more: measured


class Plan(NamedTuple):
    """The minibatches of some clients: at step t, client c takes rows[t, c] if t < steps[c]."""

    rows: Tensor  # [T, C, B] int64
    mask: Tensor  # [T, C, B] bool
    steps: Tensor  # [C] int64
    at: Tensor  # [T, C, B] int64, which of the client's rows they are

    def of(self, clients: Tensor) -> Plan:
        """Return the plan of some clients, or of all in another order."""
        rows, mask, steps, at = self
        return Plan(rows[:, clients], mask[:, clients], steps[clients], at[:, clients])


def buckets(sizes: Tensor) -> list[Tensor]:
    """Group clients by numbers of rows [C], the largest first, so that padding wastes few.

    Returns:
        positions of the clients of each group, all in one of them.
    """
    order = sizes.argsort(descending=True, stable=True)
    return list(order.split(_runs(sizes[order])))


def _runs(sizes: Tensor) -> list[int]:
    """Cut sizes that fall wherever that saves more rows of padding than a group is worth."""
    spared = (sizes[0] - sizes) * torch.arange(len(sizes), 0, -1)
    first = int(spared.argmax())
    if spared[first] <= WORTH:
        return [len(sizes)]
    return [*_runs(sizes[:first]), *_runs(sizes[first:])]


def plan(rows: list[Tensor], epochs: list[int], batch: int | None, order: list[Generator]) -> Plan:
    """Lay out the epochs of every client back to back, as one stream of minibatches.

    Args:
        rows: of each client, its rows.
        epochs: of each client, how many times it goes through them.
        batch: rows of a minibatch; the last of an epoch may be shorter. None: all rows, in order.
        order: of each client, the generator that shuffles every epoch.
    """
    sizes, many = torch.tensor([len(r) for r in rows]), torch.tensor(epochs)
    longest = int(sizes.max())
    width = min(batch or longest, longest)
    per_epoch = -(-sizes // width)
    steps, slots = many * per_epoch, int(per_epoch.max()) * width
    streams = torch.arange(slots).repeat(len(rows), int(many.max()), 1)  # [C, epochs, slots]
    if batch:
        for own, size, e, g in zip(streams, sizes.tolist(), epochs, order, strict=True):
            for epoch in own[:e]:
                epoch[:size] = torch.randperm(size, generator=g)
    step = torch.arange(int(steps.max()))[:, None]
    begin = step % per_epoch * width  # [T, C], of a minibatch in its epoch
    slot = begin[..., None] + torch.arange(width)
    mask = (slot < sizes[:, None]) & (step < steps)[..., None]
    at = _picked(streams.flatten(1), (step // per_epoch)[..., None] * slots + slot, mask)
    return Plan(_picked(pad_sequence(rows, batch_first=True), at, mask), mask, steps, at)


def _picked(table: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Pick from every client's row of a table [C, N] by an index [T, C, B]; 0 where masked."""
    index = (index * mask).transpose(0, 1)
    found = table.gather(1, index.flatten(1)).view(index.shape)
    return found.transpose(0, 1) * mask
