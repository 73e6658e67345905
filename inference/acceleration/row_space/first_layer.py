"""Training of a linear first layer with weights as linear combinations of a client's rows.

Gradients move a linear layer only along the rows X [n, in] that it sees, and a normal prior, or
weight decay, along the line to its center. While a client trains, each of its weights of the layer
is therefore

    W_t    = sum_k a_kt A_k + C_t' X                   coefficients C [n, out], one a for each A
    x W_t' = sum_k a_kt x A_k' + (x X') C_t            for a row x of the client

with the initial weights A: A_0, and the differences of other weights from it. With D the gradient
of the loss by the layer's outputs, that by W is D' X, which SGD sums with its own factors,
including momentum and decay. It takes the same steps on (C, X X' C, a) if the gradient
of C is D at the rows of the minibatch and 0 at others, that of X X' C is X X' times it, that of a
is 0, and a prior pulls all three towards those of its center. With X X' C at hand, products of the
minibatch's rows are all that a step takes, and for V = sum_k v_k A_k + C' X

    ||V||^2 = <C, X X' C> + 2 sum_k v_k <C, X A_k'> + sum_kl v_k v_l <A_k, A_l>

For a client with few rows this is far smaller than W, which is computed once, after training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.acceleration.row_space.priors import InRowsPrior, dot
from pyrofl.inference.definition.programs import Supervised
from pyrofl.nets import Network, stacked
from pyrofl.tensors import Tensors

# Local tensors: X X' beside X A' [C, n, n + k out], <A, A> [C, k, k] and A_0 [C, out, in].
PRODUCTS, INNER, START = "rows/products", "rows/inner", "rows/start"
DIFFERENCES = "rows/apart/"  # prefix of the differences of initial weights from A_0
DIRECTION = f"{DIFFERENCES}direction"  # constant part of the gradient by the weight
CENTER = "rows/center"  # A_0 in the space, for a prior with a received center


@lru_cache(maxsize=64)
def first_layer(net: Network) -> FirstLayer | None:
    """Split a network around its first trainable layer; None if that layer is not linear."""
    if type(net) is not Network:  # a subclass may compute something else
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
    name_by_leaf = {leaf: name for name, (leaf, _) in first.names.items()}
    below, after = base.parts[:at], base.parts[at + 1 :]
    return FirstLayer(
        name_by_leaf["weight"],
        net.shapes[name_by_leaf["weight"]],
        name_by_leaf.get("bias"),
        below,
        after,
        above,
    )


class FirstLayer(NamedTuple):
    """Network split into a linear first layer and the layers below and above it."""

    name: str  # of the weight
    shape: Size
    bias: str | None
    below: list[stacked.Part]  # without trainable parameters, like
    after: list[stacked.Part]
    above: Network

    def takes(self, x: Tensor) -> bool:
        """Return whether the layer's inputs are float32 or float64 vectors, for data x [N, *x]."""
        row = stacked.run(self.below, {}, x[None, :1])
        return row.dim() == 3 and row.dtype in (torch.float32, torch.float64)


class RowSpaceWeights(NamedTuple):
    """Representation of a layer's weights in training, as linear combinations of a client's rows.

    The local tensors of the layer's weights hold (C, X X' C, a) by clients then, [C, 2 n + k, out],
    with the same a for every output.
    """

    layer: FirstLayer
    moving: tuple[str, ...]  # local tensors
    center: str  # the received tensor that is the center of priors, or ""
    decays: bool  # weight decay: a_0 may differ from 1
    # (received, local) -> constant part [C, out, in] of the gradient by the only weight that moves.
    # It counts among A, with a = 0 at first and 1 as the gradient of a.
    direction: Callable[[Tensors, Tensors], Tensor] | None = None

    def begin(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Return inner products of the rows, and coefficients that represent the weights."""
        rows, hidden = stacked.run(self.layer.below, {}, batch.x), ~batch.mask
        start = received[self.center] if self.center else local[self.moving[0]]
        differing = {n: local[n] for n in self.moving if not is_same_view(local[n], start)}
        apart = {f"{DIFFERENCES}{n}": v - start for n, v in differing.items()}
        if self.direction:
            apart[DIRECTION] = self.direction(received, local)
        weights = [start, *apart.values()]
        (many, wide), k, out = rows.shape[:2], len(weights), start.shape[1]
        gram = torch.bmm(rows, rows.mT).masked_fill_(hidden[:, None], 0)  # [C, n, n]
        products = torch.cat([gram, *(layer_outputs(rows, v) for v in weights)], 2)
        products[:, :, wide:].masked_fill_(hidden[:, :, None], 0)
        inner = rows.new_zeros(many, k, k)
        for i, j in self._crossed(k):
            inner[:, i, j] = dot(weights[i], weights[j])
        coefficients = {PRODUCTS: products, START: start, INNER: inner}
        if self.center:
            at_start = rows.new_tensor([1] + [0] * len(apart))
            coefficients[CENTER] = at_start[None, :, None].expand(many, k, out)  # [C, k, out]
        for name in self.moving:
            coefficients[name] = rows.new_zeros(many, 2 * wide + k, out)
            coefficients[name][:, 2 * wide] = 1
            if name in differing:
                coefficients[name][:, 2 * wide + 1 + [*differing].index(name)] = 1
        return coefficients | apart

    def end(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute the layer's weights after training from the data rows and their coefficients."""
        rows, start = stacked.run(self.layer.below, {}, batch.x), local[START]
        wide = batch.mask.shape[1]
        names = *(f"{DIFFERENCES}{m}" for m in self.moving), DIRECTION
        differences = [local[n] for n in names if n in local]
        weights = {n: rows.new_zeros(len(batch), 0) for n in local if is_temporary(n)}
        for name in self.moving:
            moved, shares = local[name][:, :wide], local[name][:, 2 * wide :, :, None]
            weight = start * shares[:, 0] if self.decays else start  # shares [C, k, out, 1]
            for k, other in enumerate(differences, 1):
                weight = torch.addcmul(weight, other, shares[:, k])
            home = weight if differences else None  # then it is not a view of the start
            weights[name] = torch.baddbmm(weight, moved.mT, rows, out=home)  # [C, out, in]
        return weights

    def _crossed(self, many: int) -> list[tuple[int, int]]:
        """Return index pairs of initial weight matrices whose inner products the prior needs."""
        along = range(0 if self.decays else 1, many) if self.center else ()
        return list(product(along, along))

    def __call__(
        self, model: Supervised, received: Tensors, local: Tensors, batch: Batch
    ) -> tuple[Supervised, Tensors, Tensors, InRowsPrior]:
        """Return a copy of the model that computes the layer from row coefficients, and tensors.

        The returned tensors are the received and local ones that this model reads. Priors come
        last.
        """
        layer, at = self.layer, cast("Tensor", batch.at)  # not None in a minibatch
        client = torch.arange(len(at), device=at.device)[:, None]
        _, wide, width = local[PRODUCTS].shape
        many = (width - wide) // layer.shape[0]
        prior = InRowsPrior(
            layer.name,
            layer.shape,
            local[INNER],
            tuple(self._crossed(many)),
            is_directed=self.direction is not None,
        )

        def run(w: Tensors, _: Tensor) -> Tensor:
            operands = prior.center, prior, local[PRODUCTS], at, client
            y, prior.half, prior.along = RowLayer.apply(w[layer.name].squeeze(1), *operands)
            y = y if layer.bias is None else y + w[layer.bias]
            return layer.above(w, stacked.run(layer.after, {}, y))

        persistent = {n: v for n, v in local.items() if not is_temporary(n)}
        if not self.center:
            return replace(model, forward=run), received, persistent, prior
        received = received | {self.center: local[CENTER]}
        return replace(model, forward=run, change_site=prior), received, persistent, prior


def is_temporary(name: str) -> bool:
    """Return whether a name is that of a temporary tensor, used to train by row coefficients."""
    return name in (PRODUCTS, INNER, START, CENTER) or name.startswith(DIFFERENCES)


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are identical views: the same memory and strides."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def pick_rows(table: Tensor, at: Tensor, client: Tensor) -> Tensor:
    """Return the entries of a tensor [C, n, ...] at row indices [C, B] of each client."""
    rows = (at + client * table.shape[1]).flatten()
    entries: Tensor = table.flatten(0, 1).index_select(0, rows).unflatten(0, at.shape)
    return entries


def layer_outputs(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the layer's outputs [C, n, out] for rows [C, n, in] and its weight.

    An expanded weight is used once for all clients.
    """
    return rows @ (weight.mT if weight.stride(0) else weight[0].T)


class RowLayer(torch.autograd.Function):
    """Autograd function for a layer's outputs, and two numbers that its weight contributes.

    These are half the squared distance to its prior mean, and zero, which has the constant
    direction as its gradient. The gradient is by a weight instead of the coefficients: D at the
    rows, X X' D, the distance and the direction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        center: Tensor | None,
        prior: InRowsPrior,
        products: Tensor,
        at: Tensor,
        client: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute a layer's outputs [C, B, out], half a squared distance, and zero, [C].

        They are those of the rows `at` [C, B] of clients [C, 1], given the products of every row
        [C, n, n + k out]. A center that has not moved along rows is given by its a alone.
        """
        n, out, ctx.shape = products.shape[1], whole.shape[2], whole.shape
        rows = pick_rows(products, at, client)
        ctx.gram, outputs = rows[..., :n], rows[..., n:].split(out, 2)
        ctx.rows = (at + client * whole.shape[1]).flatten()
        moved = whole.view(-1, out)[n:].index_select(0, ctx.rows)  # of X X' C
        y = moved.view(*at.shape, -1)
        for k, output in enumerate(outputs):
            y = torch.addcmul(y, output, whole[:, None, 2 * n + k])
        along = whole.new_zeros(len(whole)) if prior.is_directed else None
        ctx.difference = None
        if center is None:
            return y, None, along
        is_centered = center.shape[1] == whole.shape[1]
        ctx.difference = whole - center if is_centered else whole
        ctx.along = ctx.difference[:, 2 * n :] if is_centered else whole[:, 2 * n :] - center
        half, coefficients = (
            dot(ctx.difference[:, :n], ctx.difference[:, n : 2 * n]),
            ctx.along[..., 0],
        )
        for k in {i for i, _ in prior.crossed}:
            output = products[:, :, n + k * out : n + k * out + out]
            half = half + 2 * coefficients[:, k] * dot(ctx.difference[:, :n], output)
        for i, j in prior.crossed:
            half = half + coefficients[:, i] * coefficients[:, j] * prior.inner[:, i, j]
        return y, half / 2, along

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to the row coefficients and the prior mean."""
        (grad, scale, along), n, center = grads, ctx.gram.shape[2], None  # [C, B, out], [C], [C]
        if torch.is_grad_enabled():  # without a prior or a direction, see `with_few_rows`
            whole = RowGradient.apply(grad, ctx.gram, ctx.rows, ctx.shape)
            return whole, *(None for _ in range(5))
        if ctx.difference is None:
            whole = grad.new_empty(ctx.shape)
            whole[:, :n], whole[:, 2 * n :] = 0, 0
            torch.bmm(ctx.gram.mT, grad, out=whole[:, n : 2 * n])
        else:
            whole = scale[:, None, None] * ctx.difference  # [C, 2 n + k, out]
            whole[:, 2 * n :] = scale[:, None, None] * ctx.along
            center = -whole if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            whole.view(-1, ctx.shape[2]).index_add_(0, ctx.rows, grad.reshape(-1, ctx.shape[2]))
            if ctx.difference is not None:
                whole[:, n : 2 * n].baddbmm_(ctx.gram.mT, grad)
        if along is not None:  # the direction is the last A
            whole[:, -1].add_(along[:, None])  # `+=` would also copy it to itself
        return whole, center, *(None for _ in range(4))


class RowGradient(torch.autograd.Function):
    """Autograd function for the gradient by a weight, (D at the rows, X X' D, 0), from that by y.

    Its own gradient is that of the inner product of two weights, D' X and the incoming one: the
    layer's outputs for the latter. So products with second derivatives are those by the weight.
    """

    @staticmethod
    def forward(ctx: Any, grad: Tensor, gram: Tensor, rows: Tensor, shape: Size) -> Tensor:
        """Compute the gradient [C, 2 n + k, out] from that by the outputs, [C, B, out]."""
        ctx.rows, ctx.n, n = rows, gram.shape[2], gram.shape[2]
        whole = grad.new_zeros(shape)
        torch.bmm(gram.mT, grad, out=whole[:, n : 2 * n])
        whole.view(-1, shape[2]).index_add_(0, rows, grad.reshape(-1, shape[2]))
        ctx.batch = grad.shape
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the outputs [C, B, out] of the weight that moves along rows alone."""
        (whole,) = grads
        entries = whole.reshape(-1, whole.shape[2])[ctx.n :].index_select(0, ctx.rows)
        return entries.view(ctx.batch), None, None, None
