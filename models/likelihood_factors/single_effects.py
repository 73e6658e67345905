"""Sum of the log factors of many clients with one effect each, and its gradient in closed form.

With v = n^1/2 T the scale of the effect e, P_ee and P_eu parts of the precision of a client's
factor, and h_e of its shift (see `factors`), a client contributes

    A = 1 + v^2 P_ee,    g = h_e - P_eu u,    q = g / A,    f = v^2 n g q / 2 - log(A) / 2

    df / du = -v^2 n q P_eu,    df / dv = (v n g q - v^3 n P_ee q^2 - v P_ee / A)

and df / dn = v^2 g q / 2 given v. A server's chain evaluates these sums for every client at every
step; automatic differentiation takes several times as long, as it keeps all intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK_CELLS = 60_000  # draws and clients that are computed at once, in the processor's cache


class SingleEffects(torch.autograd.Function):
    """Differentiable function of u [S, p], v [S] and n [S]: the sum over clients of f, [S]."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, scale: Tensor, noise: Tensor, shift: Tensor, precision: Tensor
    ) -> Tensor:
        """Compute the sums and their gradients, in blocks of draws.

        Args:
            ctx: stores the gradients.
            u: the shared variables that likelihoods read, [S, p].
            scale: v, [S].
            noise: n, [S].
            shift: h_e of J clients, [J].
            precision: the row (P_eu, P_ee) of each client's precision, [J, p + 1].
        """
        across, own = precision[:, :-1], precision[:, -1]
        values, slopes = [], []
        step = max(1, BLOCK_CELLS // max(len(shift), 1))
        for at, v, n in zip(u.split(step), scale.split(step), noise.split(step), strict=True):
            inverse = torch.addcmul(own.new_ones(()), v[:, None].square(), own)  # A, [S, J]
            log_a = inverse.log().sum(-1)
            inverse.reciprocal_()
            pull = shift - at @ across.mT  # g
            q = pull * inverse
            energy = (pull * q).sum(-1)
            values.append(0.5 * (v.square() * n * energy - log_a))
            by_u = -(v.square() * n)[:, None] * (q @ across)
            by_v = v * n * energy - v**3 * n * (q.square() @ own) - v * (inverse @ own)
            slopes.append((by_u, by_v, 0.5 * v.square() * energy))
        ctx.save_for_backward(u, scale, noise, shift, precision)
        ctx.slopes = [torch.cat(parts) for parts in zip(*slopes, strict=True)]
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by u, v and n; those to be differentiated again are automatic."""
        (gradient,) = gradients
        if torch.is_grad_enabled():
            # Views, as the scale is a function of the noise: these are partial derivatives.
            inputs = [v.view_as(v) for v in ctx.saved_tensors]
            needed = [i for i, needs in enumerate(ctx.needs_input_grad) if needs]
            parts = torch.autograd.grad(
                automatic(*inputs), [inputs[i] for i in needed], gradient, create_graph=True
            )
            by_input = dict(zip(needed, parts, strict=True))
            return tuple(by_input.get(i) for i in range(len(inputs)))
        by_u, by_v, by_n = ctx.slopes
        return gradient[:, None] * by_u, gradient * by_v, gradient * by_n, None, None


def automatic(u: Tensor, scale: Tensor, noise: Tensor, shift: Tensor, precision: Tensor) -> Tensor:
    """Return the same sums [S] by operations that can be differentiated again."""
    a = 1 + scale[:, None].square() * precision[:, -1]
    pull = shift - u @ precision[:, :-1].mT
    value = (scale.square() * noise)[:, None] * pull.square() / a - a.log()
    return 0.5 * value.sum(-1)


sum_single_effects: Callable[..., Tensor] = SingleEffects.apply
