"""Models of a client's own beside the one that travels: what Ditto, pFedMe and their kin share.

A client holds parameters twice: those that came down, such as "w/fc1.weight", and its own under
"own/w/fc1.weight". Programs read the former; `own` puts the latter in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Who
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.programs import Loss, Program, built_for
from pyrofl.tensors import Tensors, role, under

Look = Callable[[Tensors, Tensors], Tensors]
"""(received, local) -> what programs are to read instead of one of the two."""


def own(received: Tensors, local: Tensors) -> Tensors:
    """Read the client's own parameters in the place of those that travel."""
    return local | role("own", local)


def start_own(received: Tensors, who: Who, generator: Generator) -> Tensors:
    """Let a client's own parameters start at what it receives when it is first seen."""
    return under("own", received)


def seen_by(view: Look, loss: Loss, centre: Look = lambda received, _: received) -> Loss:
    """Let a loss read a view as local, such as `own`, and `centre` as received, with slopes."""

    def seen(
        model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        return loss(model, guide, centre(received, local), view(received, local), batch)

    return seen


def run_on(method: Method, loss: Loss, within: Method) -> Loss:
    """Let a loss run a method's programs as part of another one."""

    @built_for(model=within.model, guide=within.guide)
    def on(
        model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        return loss(method.model, method.guide, received, local, batch)

    return on


def without_rows(loss: Loss) -> Loss:
    """Take a loss of no rows: what is left is the divergence of the guide from the prior.

    It keeps its scale. One masked row remains, on which the network's cost does not count.
    """

    def divergence(
        model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        none, first = torch.zeros_like(batch.mask[:, :1]), torch.zeros_like(batch.ids)[:, None]
        row = replace(batch, x=batch.x[:, :1], y=batch.y[:, :1], mask=none, at=first)
        return loss(model, guide, received, local, row)

    return divergence


def only_step(method: Method) -> tuple[Phase, Step]:
    """Return the phase and the step of a method that trains as FedAvg does."""
    (phase,) = method.phases
    (step,) = phase.moves
    assert isinstance(step, Step)
    return phase, step
