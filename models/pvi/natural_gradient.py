"""Natural-gradient optimization of normal distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyrofl.arguments import PositiveShare, checked
from pyrofl.inference.definition.optim import Optim, WithoutCompiler
from pyrofl.models.shared.gaussians import inverse
from pyrofl.tensors import Tensors, add_trailing_axes, times

MAX_VARIANCE_RATIO = 10.0  # by what a variance changes at most in a step
MAX_POWER_STEP = 0.1  # longest step of a power
MAX_MEAN_STEP = 0.5  # longest step of a server's mean, in standard deviations
MAX_HALVINGS = 10  # tries of a client's step, each half as long, before it stays where it is
MAX_ROUNDING_EPSILONS = 1000  # machine epsilons by which a free energy may rise


@checked
def natural(
    lr: PositiveShare,
    steady: int,
    reach: Tensor,
    within: Tensor | None = None,
    only_mean: bool = False,
    scales: Tensor | None = None,
) -> Optim:
    """Return an optimizer of natural-gradient steps for a normal's mean and covariance root.

    With the loss L, mean m, root R of the covariance R R', and G = (R' dL/dR + dL/dR' R) / 2,

        R <- R (I + lr G)^-1/2,    m <- m - lr R R' dL/dm

    which moves the precision by lr of the way to its optimum given the current draws (Khan and
    Rue, "The Bayesian Learning Rule", JMLR 2023, eq. 5, with Price's theorem); lr = 1 solves a
    normal model in one step. A variance grows at most tenfold in a step, and from the second step
    on it falls at most to a tenth: where the loss has heavy tails, as of powers of a positive
    variable, a single draw has unbounded noise.

    Later variables v may be scaled by powers of earlier ones g: z_i = v_i exp(c_i'(g - b)), c the
    third parameter [C, m, d]. Its steps are those of a diagonal Fisher matrix,

        c_ik <- c_ik - lr / 2 dL/dc_ik / (var g_k (1 + E[v_i^2] / var(v_i | all others)))

    Args:
        lr: of the first steps.
        steady: steps before it falls, as 1 / t from then on, which averages the noise away.
        reach: [n], the farthest that a step of lr = 1 may move the mean; longer ones are shortened.
        within: mask [n, n] of the entries of the precision that may differ from zero.
        only_mean: leave the covariance as it is.
        scales: [m, d], 1 for the powers that may differ from zero.
    """
    options = {"lr": lr, "steady": steady, "reach": reach, "within": within}
    options |= {"only_mean": only_mean, "scales": scales}
    return lambda params: Natural(params, options)


class Natural(WithoutCompiler):
    """Optimizer of a normal's mean, covariance root and scale exponents by natural gradients.

    Parameters are mean [C, n], root [C, n, n] or [C, n], and powers if there are any.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply one natural-gradient step to the normal's parameters, in place."""
        group = self.param_groups[0]
        mean, root, *power = group["params"]
        # Numbers of a tensor, so that steps are alike and can be recorded.
        done = self.state[mean].setdefault("step", torch.zeros((), dtype=torch.float64))
        done += 1
        full, lr = root.dim() > mean.dim(), group["lr"] / (done - group["steady"]).clamp(min=1)
        if group["scales"] is not None:
            d = power[0].shape[-1]
            second = mean[:, d:].square() + root[:, d:].square().sum(-1)  # [C, m]
            spread = root[:, :d].square().sum(-1)  # [C, d]
            rate = lr * group["scales"].to(mean) / 2
            _bend(power[0], power[0].grad, root[:, d:, d:], second, spread, rate)
        most = torch.where(done > 1, MAX_VARIANCE_RATIO, math.inf)
        if not group["only_mean"] and full:
            root.copy_(_turned(root, root.grad, lr, group["within"], most))
        elif not group["only_mean"]:
            root.mul_(_growth(root * root.grad, lr, most).rsqrt())
        slope = times(root, times(root.mT, mean.grad)) if full else root.square() * mean.grad
        far = (slope / group["reach"].to(slope)).abs().amax(-1, keepdim=True)  # [C, 1]
        mean.sub_(lr * slope / far.clamp(min=1))


def given_others(
    client_guide: Tensors,
    grad: Tensors,
    lr: Tensor,
    reach: Tensor,
    spread: Tensor,
    scales: Tensor | None,
) -> Tensors:
    """Update a conditional normal v = mean + slope x + root e by a natural-gradient step.

    As x has mean 0 and covariance 1, the Fisher matrix of mean and each column of slope is that of
    the mean alone, (root root')^-1; the root moves as in `natural`.

    Args:
        client_guide: mean [C, m], slope [C, m, d], root [C, m, m], and power [C, m, d] if there
            are scales.
        grad: of the loss, by the same names.
        lr: of natural gradients, [C, 1].
        reach: [m], the farthest that the mean may move.
        spread: var g [C, d], what the powers are of.
        scales: as of `natural`.
    """
    root, both = client_guide["root"], torch.cat([grad["mean"][..., None], grad["slope"]], -1)
    mean, slope = (lr[..., None] * (root @ (root.mT @ both))).tensor_split([1], -1)  # [C, m, 1 + d]
    far = (mean[..., 0] / reach.to(mean)).abs().amax(-1).clamp(min=1)  # [C]
    moved = {
        "mean": client_guide["mean"] - mean[..., 0] / add_trailing_axes(far, mean[..., 0]),
        "slope": client_guide["slope"] - slope / add_trailing_axes(far, slope),
        "root": _turned(root, grad["root"], lr, None),
    }
    if scales is not None:
        power, second = (
            client_guide["power"].clone(),
            client_guide["mean"].square() + client_guide["slope"].square().sum(-1),
        )
        second = second + root.square().sum(-1)
        _bend(power, grad["power"], root, second, spread, lr[..., None] * scales.to(power) / 2)
        moved["power"] = power
    return moved


def update_normal(mean: Tensor, root: Tensor, inner: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Update mean and covariance root of one normal by a bounded natural-gradient step.

    They are [d] and [d, d].

    As it is unknown whether it raised the loss, it goes no further than half a standard
    deviation, and a variance doubles at most. `inner` [d, 1 + d] is the transpose of the root times
    the gradients of mean and root.
    """
    way = lr * inner[:, 0]
    far = (torch.linalg.vector_norm(way) / MAX_MEAN_STEP).clamp(min=1)
    vectors, factors, _ = _stretch(inner[:, 1:], lr, None)
    factors = factors.clamp(0.5**0.5, 2**0.5)
    # Not turned, as only normal noise is the same from all sides.
    return mean - times(root, way / far), root @ (vectors * factors[..., None, :]) @ vectors.mT


def halve_until_descent(
    energy: Callable[[Tensors], Tensor],
    before: Tensors,
    after: Tensors,
    between: Callable[[Tensors, Tensors, Tensor], Tensors],
) -> Tensors:
    """Halve the steps of clients until their free energy [C] does not increase, or undo them.

    between: start, end, a share [C] of the way -> where that leads.
    """
    with torch.no_grad():
        start = energy(before)
        bound = start + MAX_ROUNDING_EPSILONS * torch.finfo(start.dtype).eps * (1 + start.abs())
        share, now = torch.ones_like(start), after
        for left in reversed(range(MAX_HALVINGS)):
            risen = ~(energy(now) <= bound)  # NaN has risen, too
            if not bool(risen.any()):
                break
            share = torch.where(risen, share / 2 if left else 0.0, share)
            now = between(before, after, share)
    return now


def _turned(
    root: Tensor,
    grad: Tensor,
    lr: float | Tensor,
    within: Tensor | None,
    most: float | Tensor = math.inf,
) -> Tensor:
    """Return lower triangular covariance roots after a natural-gradient step."""
    vectors, factors, good = _stretch(root.mT @ grad, lr, within, most)
    new = root @ (vectors * factors[..., None, :])  # [..., n, n]
    # A triangular root lets the first variables depend on the first noise alone; with a positive
    # diagonal there is one, so that a small step moves every draw a little.
    lower = torch.linalg.qr(torch.where(good, new, 1.0).mT).R.mT
    lower = lower * lower.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    return torch.where(good, lower, torch.nan)


def _stretch(
    inner: Tensor,
    lr: float | Tensor,
    within: Tensor | None,
    most: float | Tensor = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the eigenvectors along which a natural-gradient step rescales a covariance root.

    Also return the scale factors, and a mask of finite gradients.
    """
    inner = (inner + inner.mT) / 2
    if within is not None:
        inner = inner * within.to(inner)
    good = inner.isfinite().all(-1).all(-1)[..., None, None]  # [..., 1, 1]
    values, vectors = torch.linalg.eigh(torch.where(good, inner, 0.0))
    return vectors, _growth(values, lr, most).rsqrt(), good


def _growth(values: Tensor, lr: float | Tensor, most: float | Tensor = math.inf) -> Tensor:
    """Return the factors by which a natural-gradient step multiplies precisions.

    `values` are the eigenvalues of the gradient.
    """
    # Where the loss is not convex its curvature says how far to trust the slope, whatever its sign.
    return (1 + lr * ((1 + values).abs().clamp(max=most) - 1)).clamp(min=1 / MAX_VARIANCE_RATIO)


def _bend(
    power: Tensor, grad: Tensor, alone: Tensor, second: Tensor, spread: Tensor, lr: Tensor
) -> None:
    """Update scale exponents [C, m, d] in place by a bounded gradient step, see `natural`."""
    conditional_precision = (
        inverse(alone, upper=False).square().sum(-2)
    )  # 1 / var(v_i | all others)
    step = lr * grad / ((1 + conditional_precision * second)[..., None] * spread[:, None])
    power.sub_(step.clamp(-MAX_POWER_STEP, MAX_POWER_STEP)).clamp_(-1.0, 1.0)
