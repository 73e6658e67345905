"""The first layer of a network, trained in the space of a client's rows.

Gradients move a linear layer only along the rows X [n, in] that it sees. While a client trains,

    W_t    = W_0 + C_t' X                 one row of the coefficients C [n, out] per row of X
    x W_t' = x W_0' + (x X') C_t          for a row x of the client

With D the gradient of the loss by the layer's outputs, that by W is D' X, which SGD adds up with
factors of its own, momentum included. It makes the same steps if the gradient of C is D at the rows
of the minibatch and 0 at others. Where a client has few rows C is far smaller than W, and W is made
once, when the client has trained.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import Elbo
from pyrofl.inference.fast.short import ShortElbo, Way
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.optim import Optim, Sgd
from pyrofl.inference.programs import Supervised, flat
from pyrofl.nets import Forward, Network, stacked
from pyrofl.tensors import Tensors, matches

# Local tensors: X X' [C, n, n], X W_0' [C, n, out], W_0 [C, out, in].
GRAM, OUTPUTS, START = "rows/gram", "rows/outputs", "rows/start"
TRAFFIC = 30  # rows whose two products take as long as a step's reading and writing: fits timings


def with_few_rows(
    method: Method, phase: Phase, local: Tensors, data: Federation
) -> tuple[tuple[Phase, ...], float] | None:
    """Rewrite a phase that trains the first layer, for clients with few rows.

    It has one step on minibatches, by SGD without weight decay, on an ELBO that depends on the
    layer by nothing but the network's outputs.
    """
    model = method.model
    if not isinstance(model, Supervised) or model.forward is not None or len(phase.moves) != 1:
        return None
    (step,) = phase.moves
    if not isinstance(step, Step) or not isinstance(step.loss, Elbo) or not plain(step.optim):
        return None
    layer, homes = first_layer(model.net), model.homes(method.guide, local)
    weight = homes.get(layer.name, "") if layer else ""
    if layer is None or not matches(weight, step.names):
        return None
    if model.prior is not flat and not (model.points and weight.startswith(f"{model.points}/")):
        return None  # the prior depends on the weight itself
    most = most_rows(phase, model.net.shapes[layer.name])
    if not most or not layer.takes(data.x):
        return None
    rows = InRows(layer, weight)
    moves = (replace(step, loss=ShortElbo(step.loss, cast("Way", rows))),)
    return (Phase((rows.begin,)), replace(phase, moves=moves), Phase((rows.end,))), most


def plain(optim: Optim) -> bool:
    """Say whether an optimiser adds up gradients with factors of its own, and nothing else."""
    return isinstance(optim, Sgd) and not any(
        on for name, on in optim.options.items() if name not in ("fused", "foreach")
    )


def most_rows(phase: Phase, shape: Size) -> int:
    """Return the most rows of a client for which a phase takes less time in their space."""
    return bisect_left(range(1, shape.numel()), True, key=lambda rows: not pays(phase, shape, rows))


def pays(phase: Phase, shape: Size, rows: int) -> bool:
    """Say whether a phase takes less time in the space of so many rows of a client.

    Counted in products of one row with the layer [out, in]: two in every epoch, and what a step
    reads and writes; against those before and after, X W_0' and C' X, and X X', which may not be
    larger than the layer.
    """
    out, wide = shape
    if callable(phase.epochs) or phase.batch is None:
        return False
    saved = phase.epochs * (1 - rows / wide) * (2 + TRAFFIC / phase.batch)
    return saved > 2 + rows / out and max(2 * stacked.LARGE, rows**2) <= out * wide


@lru_cache(maxsize=64)
def first_layer(net: Network) -> FirstLayer | None:
    """Cut a sequential network around its first layer, if that is a plain linear one."""
    if type(net) is not Network:  # which may compute something else
        return None
    first = next(part for part in net.parts if part.names)
    if first.rule is not stacked.linear:
        return None
    cut = net.split(" ".join(n for n in net.shapes if n not in first.names))
    if cut is None:
        return None
    base, above = cut
    at, *again = (i for i, part in enumerate(base.parts) if part.names)
    if again:
        return None
    own = {leaf: name for name, (leaf, _) in first.names.items()}
    below, after = base.parts[:at], base.parts[at + 1 :]
    return FirstLayer(own["weight"], own.get("bias"), below, after, above)


class FirstLayer(NamedTuple):
    """A network cut around a linear layer."""

    name: str  # of the weight
    bias: str | None
    below: list[stacked.Part]  # have no parameters that train, as
    after: list[stacked.Part]
    above: Network

    def takes(self, x: Tensor) -> bool:
        """Say whether rows [N, *x] reach the layer as vectors, whose products fit their type."""
        row = stacked.run(self.below, {}, x[None, :1])
        return row.dim() == 3 and row.dtype in (torch.float32, torch.float64)


class InRows(NamedTuple):
    """A client in the space of its rows, between `begin` and `end`.

    The local tensor of the layer's weight holds C [C, n, out] then, by clients.
    """

    layer: FirstLayer
    weight: str  # its local tensor

    def begin(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute what no step changes; all coefficients are 0."""
        rows, old = stacked.run(self.layer.below, {}, batch.x), local[self.weight]
        gram = torch.bmm(rows, rows.mT).masked_fill_(~batch.mask[:, None], 0)
        outputs = rows @ (old.mT if old.stride(0) else old[0].T)
        none = rows.new_zeros(*rows.shape[:2], old.shape[1])
        return {self.weight: none, GRAM: gram, OUTPUTS: outputs, START: old}

    def end(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Make the weight."""
        rows, moved = stacked.run(self.layer.below, {}, batch.x), batch.of(local[self.weight])
        forgotten = {n: rows.new_zeros(len(rows), 0) for n in (GRAM, OUTPUTS, START)}
        return forgotten | {self.weight: torch.baddbmm(local[START], moved.mT, rows)}

    def __call__(self, local: Tensors, batch: Batch) -> tuple[Forward, Tensors]:
        """Return what runs the network by the coefficients, see `Way`."""
        layer, at = self.layer, cast("Tensor", batch.at)  # which is there in a minibatch
        first = torch.arange(len(at), device=at.device)[:, None] * local[GRAM].shape[1]
        rows = (at + first).flatten()
        gram, outputs = (
            local[n].flatten(0, 1).index_select(0, rows).view(*at.shape, -1)
            for n in (GRAM, OUTPUTS)
        )

        def run(w: Tensors, _: Tensor) -> Tensor:
            y = outputs if layer.bias is None else outputs + w[layer.bias]
            y = RowProducts.apply(y, gram, w[layer.name].squeeze(1), rows)
            return layer.above(w, stacked.run(layer.after, {}, y))

        return run, local


class RowProducts(torch.autograd.Function):
    """Add what rows make of coefficients, with the gradient by a weight instead of theirs."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gram: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        """Return y + gram @ coefficients: [C, B, out], [C, B, n], [C, n, out]; rows are [C * B]."""
        ctx.rows, ctx.shape = rows, coefficients.shape
        return torch.baddbmm(y, gram, coefficients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients by y and by the coefficients."""
        (grad,) = grads
        whole = grad.new_zeros(ctx.shape)
        whole.view(-1, ctx.shape[-1]).index_add_(0, ctx.rows, grad.flatten(0, 1))
        return grad, None, whole, None
