"""Products of rows and weights of many clients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGE = 2**14  # entries of a client's weight from which `Products` pays: measured


def products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows [N, B, in] by weights [N, out, in] and add biases [N, out]: [N, B, out]."""
    if weight[0].numel() < LARGE:
        return _product(x, weight, bias)
    y: Tensor = Products.apply(x, weight, bias)
    return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias[:, None], x, weight.mT)


class Products(torch.autograd.Function):
    """`products`, with gradients that lie in memory as the weights do.

    Those of torch's own product are transposed; products, optimisers and all that copies weights
    are faster without that.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return [N, B, out]."""
        return _product(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the gradients need."""
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Return how [N, B, out] changes with rows, weights and biases."""
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, tangents
        change = torch.zeros_like(torch.bmm(x, weight.mT))
        if of_x is not None:
            change = change + torch.bmm(of_x, weight.mT)
        if of_weight is not None:
            change = change + torch.bmm(x, of_weight.mT)
        return change if of_bias is None else change + of_bias[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weights and biases that are asked for."""
        (x, weight), (grad,) = ctx.saved_tensors, grads
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight) if of_x else None,
            torch.bmm(grad.mT, x) if of_weight else None,
            grad.sum(1) if of_bias else None,
        )
