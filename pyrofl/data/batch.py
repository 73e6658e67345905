"""Minibatches of clients' rows, the data on which models and guides are evaluated."""

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

ROW_FIELDS = "x", "y", "mask", "at", "weights"  # fields with one value per row


class RowScale(NamedTuple):
    """Scale of minibatch rows (how many of a client's rows each one represents), and its inputs."""

    mask: Tensor  # [C, B]
    size: Tensor  # [C]
    weights: Tensor | None  # [C, B]
    scale: Tensor  # [C, 1], or [C, B] with weights


@dataclass(frozen=True)
class Batch:
    """Batch of B rows for each of C clients; clients with fewer rows are padded and masked.

    Padding repeats a row of the same client, so that padding never exposes another client's row.
    Several steps and phases may share a batch: do not modify it in place.
    """

    x: Tensor  # [C, B, *x]
    y: Tensor  # [C, B, ...]
    mask: Tensor  # [C, B] bool, False where a row is padding
    size: Tensor  # [C] number of the client's rows, or the sum of their weights
    ids: Tensor  # [C] int64
    at: Tensor | None = None  # [C, B] int64, index in its client's rows; -1: none; None: in order
    weights: Tensor | None = None  # [C, B] of rows, a client's mean being 1; None: all weigh 1
    known_scale: RowScale | None = None  # ignored once one of its inputs is replaced
    features: tuple[str, ...] = ()  # names of the columns of x; empty if they have none

    def __len__(self) -> int:
        """Return the number of clients in the batch."""
        return len(self.ids)

    @property
    def cohort(self) -> Cohort:
        """Ids and sizes of the clients of this batch."""
        return Cohort(self.ids, self.size)

    @cached_property
    def _share(self) -> Tensor:
        if (scale := self.known_scale) and all(
            was is now
            for was, now in zip(scale, (self.mask, self.size, self.weights), strict=False)
        ):
            return scale.scale
        part = share(self.size, self.mask)
        return part if self.weights is None else part * self.weights

    @property
    def counts(self) -> Tensor:
        """Number of the client's rows that each row of the batch represents: [C, B]; 0 for padding.

        This is the row's weight times its scale in the client's total.

        A row of a minibatch also represents the client's rows that are not in the minibatch.
        """
        return torch.where(self.mask, self._share.expand(self.mask.shape), 0.0)

    def clients(self) -> pyro.plate:
        """Return the Pyro plate over clients, dim -2."""
        return plate("clients", len(self.ids), -2)

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Enter the Pyro plate over rows (dim -1); padding is masked, rows are scaled.

        The scale of a row includes its weight.
        """
        with (
            plate("rows", self.mask.shape[1], -1),
            poutine.scale(scale=self._share),
            poutine.mask(mask=cast("torch.BoolTensor", self.mask)),
        ):
            yield

    def select_clients(self, clients: Tensor | slice) -> Batch:
        """Return the batch restricted to the given clients, in the given order."""
        if isinstance(clients, slice) and clients.indices(len(self)) == (0, len(self), 1):
            return self
        tensors = {
            n: v for n in (*ROW_FIELDS, "size", "ids") if (v := getattr(self, n)) is not None
        }
        rows: dict[str, Any] = cut(tensors, clients)
        return replace(self, **rows)

    def by_step(self) -> Iterator[Batch]:
        """Yield a batch [C, B] for each of T steps, from batches stacked over steps [T, C, B]."""
        tensors = {n: v.unbind() for n in ROW_FIELDS if (v := getattr(self, n)) is not None}
        for scale, *rows in zip(self._share.unbind(), *tensors.values(), strict=True):
            one: dict[str, Any] = dict(zip(tensors, rows, strict=True))
            one["known_scale"] = RowScale(one["mask"], self.size, one.get("weights"), scale)
            batch = Batch(**one, size=self.size, ids=self.ids, features=self.features)
            vars(batch)["_share"] = scale  # as if it had been asked for, which takes longer
            yield batch

    def split(self, k: int) -> list[Batch]:
        """Split the rows of each client into k batches, such as support and query rows.

        Rows of a client with fewer than k rows are repeated, so that none of its batches is empty.
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

    def column(self, column: str | int) -> Tensor:
        """Return a column of x: [C, B].

        Args:
            column: its name, if the data have names of columns, or its number, from 0 on.

        Raises:
            ValueError: if there is no such column, or the rows of x are not vectors.
        """
        if self.x.dim() != 3:
            raise ValueError(
                f"x has shape {list(self.x.shape)}; expected rows of numbers, [C, B, columns]"
            )
        last = self.x.shape[-1] - 1
        if isinstance(column, str):
            if column not in self.features:
                known = f"one of {', '.join(self.features)}" if self.features else ""
                raise ValueError(
                    f"the batch has no column {column!r}; expected {known}"
                    if known
                    else f"column is {column!r}, but columns have no names; expected a number from "
                    f"0 to {last}"
                )
            column = self.features.index(column)
        if not 0 <= column <= last:
            raise ValueError(f"column is {column}; expected 0 to {last}")
        return self.x[..., column]

    def gather(self, values: Tensor, column: str | int) -> Tensor:
        """Select an entry of a vector for each row, by the whole number in one of its columns.

        This is the effect of a row's item or ward, if `values` has an effect for each level::

            items = pyro.sample("items", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
            with batch.rows():
                pyro.sample("y", dist.Normal(batch.gather(items, "item"), 1.0), obs=batch.y)

        Args:
            values: vectors [..., C, 1, K] or [..., 1, 1, K], as of a site with `.to_event(1)`
                inside `batch.clients()`.
            column: name or number of the column of x with the levels, from 0 to K - 1.

        Returns:
            The entries: [..., C, B].

        Raises:
            ValueError: if there is no such column, `values` has another shape, or the column has
                other numbers.
        """
        clients, count = len(self), values.shape[-1]
        if values.dim() < 3 or values.shape[-3] not in (1, clients) or values.shape[-2] != 1:
            raise ValueError(
                f"values has shape {list(values.shape)}; expected [..., {clients}, 1, K], as of a "
                "site with .to_event(1) inside batch.clients()"
            )
        numbers = self.column(column)
        levels = numbers.long()
        if not bool(((levels == numbers) & (levels >= 0) & (levels < count)).all()):
            raise ValueError(
                f"column {column!r} has other numbers than the whole ones from 0 to {count - 1}, "
                f"for vectors of {count} entries; expected levels that are neither scaled nor text"
            )
        vectors = values.squeeze(-2)
        shape = (*vectors.shape[:-2], clients, -1)
        return vectors.expand(shape).gather(-1, levels.expand(shape))

    def take_rows(self, known: Tensor) -> Tensor:
        """Select the batch's rows from values of all client rows: [C, n, *f] -> [C, B, *f]."""
        if self.at is None:
            return known[:, : self.mask.shape[1]]
        return _rows(known, self.at)


def _rows(values: Tensor, at: Tensor) -> Tensor:
    return values[torch.arange(len(values), device=values.device)[:, None], at]


def share(size: Tensor, mask: Tensor) -> Tensor:
    """Return each client's size [C] divided by its number of rows in the batch: [..., C, 1]."""
    return (size / mask.sum(-1).clamp(min=1))[..., None]
