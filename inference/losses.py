"""Losses that wrap others, as values: what rewrites a phase looks into them.

A loss is an `Elbo`, perhaps `Seen` through views of the tensors, of another method's programs, `On`
them, or `WithoutRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.method import Method
from pyrofl.inference.programs import Loss, Program
from pyrofl.tensors import Tensors

Look = Callable[[Tensors, Tensors], Tensors]
"""(received, local) -> what programs are to read instead of one of the two."""


@dataclass(frozen=True)
class Seen:
    """A loss whose programs read views, as local and as received; None changes nothing."""

    loss: Loss
    view: Look
    centre: Look | None = None

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return one value per client, [C]."""
        centre = self.centre(received, local) if self.centre else received
        return self.loss(model, guide, centre, self.view(received, local), batch)


@dataclass(frozen=True)
class On:
    """A loss that runs programs of its own, in a method that was built for others."""

    loss: Loss
    model: Program
    guide: Program

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return one value per client, [C]."""
        return self.loss(self.model, self.guide, received, local, batch)


@dataclass(frozen=True)
class WithoutRows:
    """A loss of no rows. One masked row remains, on which the network's cost does not count."""

    loss: Loss

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return one value per client, [C]."""
        none, first = torch.zeros_like(batch.mask[:, :1]), torch.zeros_like(batch.ids)[:, None]
        row = replace(batch, x=batch.x[:, :1], y=batch.y[:, :1], mask=none, at=first)
        return self.loss(model, guide, received, local, row)


def seen_by(view: Look, loss: Loss, centre: Look | None = None) -> Loss:
    """Return a loss whose programs read a view as local, and `centre` as received."""
    return Seen(loss, view, centre)


def run_on(method: Method, loss: Loss) -> Loss:
    """Return a loss of the programs of another method."""
    return On(loss, method.model, method.guide)


def without_rows(loss: Loss) -> Loss:
    """Return a loss of no rows: the divergence of the guide from the prior, on the same scale."""
    return WithoutRows(loss)


def layers(loss: Loss) -> Iterator[Loss]:
    """Yield a loss and those that it wraps, to the innermost."""
    yield loss
    if isinstance(loss, (Seen, On, WithoutRows)):
        yield from layers(loss.loss)
