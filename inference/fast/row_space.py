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

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import Loss, Program
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.nets import Forward, Network, stacked
from pyrofl.tensors import Tensors

# Local tensors: X X' [C, n, n], X W_0' [C, n, out], W_0 [C, out, in].
GRAM, OUTPUTS, START = "rows/gram", "rows/outputs", "rows/start"
TRAFFIC = 30  # rows whose two products take as long as a step's reading and writing: fits timings


def with_few_rows(
    phase: Phase,
    net: Network,
    where: str,
    names: Collection[str],
    program: Callable[[Forward], Program],
    whole: Program,
    guide: Program,
) -> Phase:
    """Let a phase train the first layer in the space of rows, for clients with few of them.

    Args:
        phase: of one step on minibatches, by SGD without weight decay, on a loss that depends on
            the layer by nothing but the network's outputs.
        net: the network.
        where: role of parameters that are points, one set for each client, and that the step moves,
            and
        names: those parameters.
        program: how the network runs -> the model.
        whole: the model that runs the whole network, and
        guide: its guide. Where others take their places, or the phase gets other moves, as after
            `replace(method, model=...)`, it trains as it would without.
    """
    layer = first_layer(net, where)
    if layer is None or layer.name not in names:
        return phase
    (step,) = cast("tuple[Step]", phase.moves)
    moves = (replace(step, loss=layer.on_rows(step, program)),)

    def shortcut(method: Method, asked: Phase, data: Federation, longest: int) -> tuple[Phase, ...]:
        known = (method.model, method.guide, asked.moves) == (whole, guide, phase.moves)
        if known and layer.takes(data.x) and pays(asked, net.shapes[layer.name], longest):
            return Phase((layer.begin,)), replace(asked, moves=moves), Phase((layer.end,))
        return (asked,)

    return replace(phase, shortcut=shortcut)


def pays(phase: Phase, shape: Size, rows: int) -> bool:
    """Say whether a phase takes less time in the space of a client's rows.

    Counted in products of one row with the layer: two in every epoch, and what a step reads and
    writes; against those before and after, X W_0' and C' X, and X X', which may not be larger than
    the layer.

    Args:
        phase: the phase.
        shape: (out, in) of the layer.
        rows: of the longest client.
    """
    out, wide = shape
    if callable(phase.epochs) or phase.batch is None:
        return False
    saved = phase.epochs * (1 - rows / wide) * (2 + TRAFFIC / phase.batch)
    return saved > 2 + rows / out and max(2 * stacked.LARGE, rows**2) <= out * wide


def first_layer(net: Network, where: str) -> FirstLayer | None:
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
    return FirstLayer(where, own["weight"], own.get("bias"), below, after, above)


class FirstLayer(NamedTuple):
    """A network cut around a linear layer, in the space of rows between `begin` and `end`.

    The local tensor of its weight holds C [C, n, out] then, by clients.
    """

    where: str  # role of the parameters
    name: str  # of the weight
    bias: str | None
    below: list[stacked.Part]  # have no parameters that train, as
    after: list[stacked.Part]
    above: Network

    @property
    def weight(self) -> str:
        """Name of the local tensor."""
        return f"{self.where}/{self.name}"

    def takes(self, x: Tensor) -> bool:
        """Say whether rows [N, *x] reach the layer as vectors, whose products fit their type."""
        row = stacked.run(self.below, {}, x[None, :1])
        return row.dim() == 3 and row.dtype in (torch.float32, torch.float64)

    def begin(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute what no step changes; all coefficients are 0."""
        rows, old = stacked.run(self.below, {}, batch.x), local[self.weight]
        gram = torch.bmm(rows, rows.mT).masked_fill_(~batch.mask[:, None], 0)
        outputs = rows @ (old.mT if old.stride(0) else old[0].T)
        none = rows.new_zeros(*rows.shape[:2], old.shape[1])
        return {self.weight: none, GRAM: gram, OUTPUTS: outputs, START: old}

    def end(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Make the weight."""
        rows, moved = stacked.run(self.below, {}, batch.x), batch.of(local[self.weight])
        forgotten = {n: rows.new_zeros(len(rows), 0) for n in (GRAM, OUTPUTS, START)}
        return forgotten | {self.weight: torch.baddbmm(local[START], moved.mT, rows)}

    def on_rows(self, step: Step, program: Callable[[Forward], Program]) -> Loss:
        """Return the loss of a step, by the coefficients."""

        def loss(
            model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
        ) -> Tensor:
            at = cast("Tensor", batch.at)  # as it is a minibatch
            first = torch.arange(len(at), device=at.device)[:, None] * local[GRAM].shape[1]
            rows = (at + first).flatten()
            gram, outputs = (
                local[n].flatten(0, 1).index_select(0, rows).view(*at.shape, -1)
                for n in (GRAM, OUTPUTS)
            )

            def run(w: Tensors, _: Tensor) -> Tensor:
                y = outputs if self.bias is None else outputs + w[self.bias]
                y = RowProducts.apply(y, gram, w[self.name].squeeze(1), rows)
                return self.above(w, stacked.run(self.after, {}, y))

            return step.loss(program(run), guide, received, local, batch)

        return loss


class RowProducts(torch.autograd.Function):
    """Add what rows make of coefficients, with the gradient by a weight instead of theirs."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gram: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        """Return y + gram @ coefficients: [C, B, out], [C, B, n], [C, n, out].

        `rows` [C * B] tells which of all C * n rows those of the minibatch are.
        """
        ctx.rows, ctx.shape = rows, coefficients.shape
        return torch.baddbmm(y, gram, coefficients)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients by y and by the coefficients."""
        (grad,) = grads
        whole = grad.new_zeros(ctx.shape)
        whole.view(-1, ctx.shape[-1]).index_add_(0, ctx.rows, grad.flatten(0, 1))
        return grad, None, whole, None
