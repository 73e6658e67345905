"""Normal distributions by their natural parameters, and natural-gradient steps on them.

A factor exp(s'u - u'Pu/2) of d variables u has the shift s [..., d] and the precision P. Factors
are multiplied by adding both, and P may have eigenvalues that are not positive.
A full P travels as the entries of its lower triangle, row by row, [..., d (d + 1) / 2]; a diagonal
one as [..., d].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrofl.inference.method import Optim

LARGEST = 2_000  # variables that a full covariance is made for


@dataclass(frozen=True)
class Normals:
    """Normal factors of `size` variables, with a full or a diagonal precision.

    Roots of covariances are lower triangular matrices [..., d, d], or standard deviations [..., d].
    """

    size: int
    full: bool

    def __post_init__(self) -> None:
        """Check the size.

        Raises:
            ValueError: if a full precision would be too large.
        """
        if self.full and self.size > LARGEST:
            raise ValueError(
                f"a full covariance of {self.size} variables; expected at most {LARGEST}, or "
                "covariance='diagonal'"
            )

    def matrix(self, precision: Tensor) -> Tensor:
        """Return a full precision as a matrix."""
        row, column = torch.tril_indices(self.size, self.size)
        whole = precision.new_zeros(*precision.shape[:-1], self.size, self.size)
        whole[..., row, column] = precision
        whole[..., column, row] = precision
        return whole

    def packed(self, matrix: Tensor) -> Tensor:
        """Undo `matrix`."""
        row, column = torch.tril_indices(self.size, self.size)
        return matrix[..., row, column]

    def proper(self, precision: Tensor) -> Tensor:
        """Say which factors can be normalised: bool [...]."""
        if not self.full:
            return (precision > 0).all(-1)
        info: Tensor = torch.linalg.cholesky_ex(self.matrix(precision)).info
        return info == 0

    def moments(self, shift: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and root of the covariance; NaN where a factor cannot be normalised."""
        if not self.full:
            return shift / precision, precision.rsqrt()
        # The root is to be lower triangular, so the factors of P are taken from below.
        factor, info = torch.linalg.cholesky_ex(self.matrix(precision).flip(-1, -2))
        upper = torch.where((info == 0)[..., None, None], factor, torch.nan).flip(-1, -2)
        root = inverse(upper, upper=True).mT
        return times(root, times(root.mT, shift)), root

    def naturals(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Return shift and precision of the normal with this mean and lower triangular root."""
        if not self.full:
            precision = root.square().reciprocal()
            return mean * precision, precision
        inner = inverse(root, upper=False)
        return times(inner.mT, times(inner, mean)), self.packed(inner.mT @ inner)

    def log_density(self, u: Tensor, shift: Tensor, precision: Tensor) -> Tensor:
        """Return the log density of points [..., d]; an improper factor is shifted by a number."""
        if self.full:
            whole = self.matrix(precision)
            log_det = torch.linalg.slogdet(whole).logabsdet
            square = (u * times(whole, u)).sum(-1)
            peak = (shift * torch.linalg.solve_ex(whole, shift[..., None]).result[..., 0]).sum(-1)
        else:
            log_det = precision.abs().log().sum(-1)
            square, peak = (u.square() * precision).sum(-1), (shift.square() / precision).sum(-1)
        constant = log_det - self.size * math.log(2 * math.pi) - peak
        value: Tensor = (u * shift).sum(-1) + 0.5 * (constant - square)
        return value


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Multiply matrices [..., a, b] by vectors [..., b]."""
    product: Tensor = (matrix @ vector[..., None])[..., 0]
    return product


def inverse(triangle: Tensor, upper: bool) -> Tensor:
    """Invert triangular matrices [..., d, d]."""
    eye = torch.eye(triangle.shape[-1], dtype=triangle.dtype, device=triangle.device)
    found: Tensor = torch.linalg.solve_triangular(triangle, eye.expand_as(triangle), upper=upper)
    return found


def stacked(ours: Tensor, below: Tensor, mine: Tensor) -> Tensor:
    """Put together a lower triangular root [C, n, n] of three blocks."""
    top = torch.cat([ours, ours.new_zeros(*ours.shape[:-1], mine.shape[-1])], -1)
    return torch.cat([top, torch.cat([below, mine], -1)], -2)


def log_det(root: Tensor, full: bool) -> Tensor:
    """Return half the log determinant of a covariance, given a root."""
    if full:
        # Not the diagonal alone: gradients are those of a matrix that may become any other.
        value: Tensor = torch.linalg.slogdet(root).logabsdet
        return value
    return root.abs().log().sum(-1)


def balanced(noise: Tensor) -> Tensor:
    """Make draws of standard normal noise [S, ..., n] symmetric, and of unit covariance.

    The second half mirrors the first. With at least 2 n draws their second moments are the
    identity, so that the mean of a quadratic function, and of its gradients, is exact: gradients
    of a normal model have no noise. With fewer they are only mirrored.

    Raises:
        ValueError: if the number of draws is odd.
    """
    draws, n = len(noise), noise.shape[-1]
    if draws % 2:
        raise ValueError(f"draws is {draws}; expected an even number, half of them mirrored")
    half = noise[: draws // 2]
    if len(half) >= n:
        second = torch.einsum("s...i,s...j->...ij", half, half) / len(half)
        # Not raised where it fails: that client's noise is of no use, and the others' is.
        lower = torch.linalg.cholesky_ex(second).L
        half = torch.linalg.solve_triangular(lower, half[..., None], upper=False)[..., 0]
    return torch.cat([half, -half])


def natural(
    lr: float, steady: int, reach: Tensor, within: Tensor | None = None, only_mean: bool = False
) -> Optim:
    """Make steps along the natural gradient of a normal, given the gradients of mean and root.

    With the loss L, mean m, root R of the covariance R R', and G = (R' dL/dR + dL/dR' R) / 2,

        R <- R (I + lr G)^-1/2,    m <- m - lr R R' dL/dm

    which moves the precision by lr of the way to its optimum given the current draws (Khan and
    Rue, "The Bayesian Learning Rule", JMLR 2023, eq. 5, with Price's theorem); lr = 1 solves a
    normal model in one step. A variance grows at most tenfold in a step.

    Args:
        lr: of the first steps, in (0, 1].
        steady: steps before it falls, as 1 / t from then on, which averages the noise away.
        reach: [n], the farthest that a step may move the mean; longer ones are shortened.
        within: mask [n, n] of the entries of the precision that may differ from zero.
        only_mean: leave the covariance as it is.

    Raises:
        ValueError: if lr is out of its range.
    """
    if not 0 < lr <= 1:
        raise ValueError(f"lr of natural gradients is {lr}; expected 0 < lr <= 1")
    return lambda params: Natural(params, lr, steady, reach, within, only_mean)


class Natural(torch.optim.Optimizer):
    """Natural-gradient steps on [mean, root], stacked [C, n] and [C, n, n] or [C, n]."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        steady: int,
        reach: Tensor,
        within: Tensor | None,
        only_mean: bool,
    ) -> None:
        """Take mean and root, in this order."""
        super().__init__(params, {"lr": lr, "steps": 0})
        self.steady, self.reach = steady, reach
        self.within, self.only_mean = within, only_mean

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one step."""
        group = self.param_groups[0]
        mean, root = group["params"]
        group["steps"] += 1
        lr, full = group["lr"] / max(1, group["steps"] - self.steady), root.dim() > mean.dim()
        if not self.only_mean:
            change = _turned if full else _scaled
            root.copy_(change(root, root.grad, lr, self.within))
        slope = times(root, times(root.mT, mean.grad)) if full else root.square() * mean.grad
        far = (lr * slope / self.reach.to(slope)).abs().amax(-1, keepdim=True)
        mean.sub_(lr * slope / far.clamp(min=1))


def _scaled(root: Tensor, grad: Tensor, lr: float, within: Tensor | None) -> Tensor:
    """Return new standard deviations."""
    return root * _growth(root * grad, lr).rsqrt()


def _turned(root: Tensor, grad: Tensor, lr: float, within: Tensor | None) -> Tensor:
    """Return new lower triangular roots."""
    inner = root.mT @ grad
    inner = (inner + inner.mT) / 2
    if within is not None:
        inner = inner * within.to(inner)
    good = inner.isfinite().all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(good, inner, 0.0))
    new = root @ (vectors * _growth(values, lr).rsqrt()[..., None, :])
    # Any root will do; a triangular one lets the first variables depend on the first noise alone.
    lower = torch.linalg.qr(torch.where(good, new, 1.0).mT).R.mT
    return torch.where(good, lower, torch.nan)


def _growth(values: Tensor, lr: float) -> Tensor:
    """Return by what factor precisions grow on the way to 1 + values, or its opposite."""
    # Where the loss is not convex its curvature says how far to trust the slope, whatever its sign.
    return (1 + lr * ((1 + values).abs() - 1)).clamp(min=0.1)
