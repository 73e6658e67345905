"""Plans: in which order clients go through their rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor


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


def plan(rows: list[Tensor], epochs: list[int], batch: int | None, order: list[Generator]) -> Plan:
    """Lay out the epochs of every client back to back, as one stream of minibatches.

    Args:
        rows: of each client, its rows.
        epochs: of each client, how many times it goes through them.
        batch: rows of a minibatch; the last of an epoch may be shorter. None: all rows, in order.
        order: of each client, the generator that shuffles every epoch.
    """
    longest = max(len(r) for r in rows)
    width = min(batch or longest, longest)
    per_epoch = [-(-len(r) // width) for r in rows]
    steps = torch.tensor([e * n for e, n in zip(epochs, per_epoch, strict=True)])
    at = torch.zeros(int(steps.max()), len(rows), width, dtype=torch.long)
    index, mask = torch.zeros_like(at), torch.zeros(at.shape, dtype=torch.bool)
    for c, (mine, n, e, g) in enumerate(zip(rows, per_epoch, epochs, order, strict=True)):
        if not e:
            continue
        stream = torch.zeros(e, n * width, dtype=torch.long)
        for own in stream:
            own[: len(mine)] = _order(len(mine), g if batch else None)
        at[: e * n, c] = stream.view(e * n, width)
        index[: e * n, c] = mine[at[: e * n, c]]
        mask[: e * n, c] = (torch.arange(n * width) < len(mine)).view(n, width).repeat(e, 1)
    return Plan(index, mask, steps, at)


def _order(rows: int, shuffled: Generator | None) -> Tensor:
    return torch.arange(rows) if shuffled is None else torch.randperm(rows, generator=shuffled)
