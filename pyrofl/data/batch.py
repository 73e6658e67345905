"""Batches of rows, as programs see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyrofl.data.roster import Cohort
from pyrofl.plates import plate
from pyrofl.tensors import cut

ROWS = "x", "y", "mask", "at", "weights"  # what a batch has of each row


class RowScale(NamedTuple):
    """How many of its client's rows a row stands for, and what that was computed from."""

    mask: Tensor  # [C, B]
    size: Tensor  # [C]
    weights: Tensor | None  # [C, B]
    scale: Tensor  # [C, 1], or [C, B] with weights


@dataclass(frozen=True)
class Batch:
    """B rows of each of C clients, side by side; ragged clients are padded and masked.

    Padding repeats a row of the client's own, so that no mistake shows it another's.
    Several steps and phases may see the same batch: nobody writes into it.
    """

    x: Tensor  # [C, B, *x]
    y: Tensor  # [C, B, ...]
    mask: Tensor  # [C, B] bool, False where a row is padding
    size: Tensor  # [C] rows that the client has in all, or the sum of their weights
    ids: Tensor  # [C] int64
    at: Tensor | None = None  # [C, B] int64, which of its client's rows; -1: none; None: in order
    weights: Tensor | None = None  # [C, B] of rows, a client's mean being 1; None: all weigh 1
    known_scale: RowScale | None = None  # not used once what it was computed from is replaced

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.ids)

    @property
    def cohort(self) -> Cohort:
        """The clients of this batch."""
        return Cohort(self.ids, self.size)

    @cached_property
    def _share(self) -> Tensor:
        if (known := self.known_scale) and all(
            was is now
            for was, now in zip(known, (self.mask, self.size, self.weights), strict=False)
        ):
            return known.scale
        part = share(self.size, self.mask)
        return part if self.weights is None else part * self.weights

    @property
    def counts(self) -> Tensor:
        """How much each row counts of its client's total, [C, B]: its weight; padding 0.

        A row of a minibatch stands for those that are not in it, too.
        """
        return torch.where(self.mask, self._share.expand(self.mask.shape), 0.0)

    def clients(self) -> pyro.plate:
        """Return the Pyro plate over clients, dim -2."""
        return plate("clients", len(self.ids), -2)

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Enter the Pyro plate over rows, dim -1: hides padding, weighs, scales to the total."""
        with (
            plate("rows", self.mask.shape[1], -1),
            poutine.scale(scale=self._share),
            poutine.mask(mask=cast("torch.BoolTensor", self.mask)),
        ):
            yield

    def select_clients(self, clients: Tensor | slice) -> Batch:
        """Return the same rows of some clients, in that order."""
        if isinstance(clients, slice) and clients.indices(len(self)) == (0, len(self), 1):
            return self
        known = {n: v for n in (*ROWS, "size", "ids") if (v := getattr(self, n)) is not None}
        rows: dict[str, Any] = cut(known, clients)
        return replace(self, **rows)

    def by_step(self) -> Iterator[Batch]:
        """Yield what clients see at each step, of batches [T, C, B] of several steps."""
        known = {n: v.unbind() for n in ROWS if (v := getattr(self, n)) is not None}
        for scale, *rows in zip(self._share.unbind(), *known.values(), strict=True):
            one: dict[str, Any] = dict(zip(known, rows, strict=True))
            one["known_scale"] = RowScale(one["mask"], self.size, one.get("weights"), scale)
            yield Batch(**one, size=self.size, ids=self.ids)

    def split(self, k: int) -> list[Batch]:
        """Deal the rows into k batches (row i goes to batch i mod k): support and query.

        The rows of a client that has fewer than k serve again, so that no batch of it is empty.
        """
        count, width = self.mask.sum(1, keepdim=True), self.mask.shape[1]
        parts = []
        for i in range(k):
            at = torch.arange(i, max(width, i + 1), k, device=self.ids.device).expand(len(self), -1)
            mask = (at < count.clamp(min=i + 1)) & (count > 0)
            at = torch.where(at < count, at, i % count.clamp(min=1))
            x, y = _rows(self.x, at), _rows(self.y, at)
            place = at if self.at is None else _rows(self.at, at)
            weights = None if self.weights is None else _rows(self.weights, at)
            parts.append(replace(self, x=x, y=y, mask=mask, at=place, weights=weights))
        return parts

    def take_rows(self, known: Tensor) -> Tensor:
        """Pick the batch's rows of what is known of all rows: [C, n, *f] -> [C, B, *f]."""
        if self.at is None:
            return known[:, : self.mask.shape[1]]
        return _rows(known, self.at)


def _rows(values: Tensor, at: Tensor) -> Tensor:
    return values[torch.arange(len(values), device=values.device)[:, None], at]


def share(size: Tensor, mask: Tensor) -> Tensor:
    """Return how many of a client's rows [C] one row of a batch [..., C, B] is for: [..., C, 1]."""
    return (size / mask.sum(-1).clamp(min=1))[..., None]
