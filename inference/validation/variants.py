"""Variants of a federation and of its batches, on which a method must give the same results."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Batch, Cohort, Federation


class Filled(Federation):
    """Federation with batches padded by unusual rows, to detect methods that read padding."""

    def gather(self, cohort: Cohort, rows: Tensor, mask: Tensor, *more: Any, **named: Any) -> Batch:
        """Return a batch that is padded with the last training row of the first client."""
        rows = torch.where(mask, rows, self.train[0][-1].to(rows))
        return super().gather(cohort, rows, mask, *more, **named)


class Wider(Filled):
    """Federation with batches that have two more rows of padding."""

    def gather(
        self,
        cohort: Cohort,
        rows: Tensor,
        mask: Tensor,
        at: Tensor | None = None,
        *more: Any,
        **n: Any,
    ) -> Batch:
        """Return a batch with two more rows for each client, which are padding."""
        none = torch.zeros_like(rows[..., :1]).repeat_interleave(2, -1)
        rows, mask = torch.cat([rows, none], -1), torch.cat([mask, none.bool().to(mask)], -1)
        at = None if at is None else torch.cat([at, none.to(at) - 1], -1)
        return super().gather(cohort, rows, mask, at, *more, **n)


def with_other_padding(data: Federation, kind: type[Filled] = Filled) -> Federation:
    """Return a copy of a federation whose batches have different padding rows."""
    return kind(**{f.name: getattr(data, f.name) for f in fields(Federation)})


def with_even_rows(data: Federation) -> Federation:
    """Return a copy of a federation with equal numbers of rows per client, at most two."""
    most = min(2, int(data.sizes[: data.clients].min()))
    return replace(data, train=tuple(rows[:most] for rows in data.train))


def narrow_batch(batch: Batch, rows: int | None) -> Batch:
    """Return a batch with only the first `rows` rows of each client, or with all if None."""
    names = ("x", "y", "mask", "at", "weights")
    parts = {n: v[:, :rows] for n in names if (v := getattr(batch, n)) is not None}
    return replace(batch, **parts)
