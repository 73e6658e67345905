"""Normal distributions in natural parameters.

A factor exp(s'u - u'Pu/2) of d variables u is a dict with its shift s [..., d] and precision P.
Factors are multiplied by adding both, and P may have eigenvalues that are not positive.
A full P travels as the entries of its lower triangle, row by row, [..., d (d + 1) / 2]; a diagonal
one as [..., d].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrofl.tensors import Tensors, times

PARAMETERS = ("shift", "precision")  # of a factor
MAX_FULL = 2_000  # variables that a full covariance is made for


@dataclass(frozen=True)
class Normals:
    """Operations on normal factors of `size` variables, in natural parameters.

    Their precisions are full or diagonal.

    Roots of covariances are lower triangular matrices [..., d, d], or standard deviations [..., d].
    """

    size: int
    full: bool

    def __post_init__(self) -> None:
        """Raise ValueError if a full precision would be too large."""
        if self.full and self.size > MAX_FULL:
            raise ValueError(
                f"a full covariance of {self.size} variables; expected at most {MAX_FULL}, or "
                "pvi.hierarchical(..., covariance='diagonal')"
            )

    def matrix(self, precision: Tensor) -> Tensor:
        """Unpack precision matrices [..., d, d] from vectors [..., d (d + 1) / 2]."""
        row, column = torch.tril_indices(self.size, self.size)
        whole = precision.new_zeros(*precision.shape[:-1], self.size, self.size)
        whole[..., row, column] = whole[..., column, row] = precision
        return whole

    def packed(self, matrix: Tensor) -> Tensor:
        """Return the lower triangle of a precision matrix as a vector; see `Normals.matrix`."""
        row, column = torch.tril_indices(self.size, self.size)
        return matrix[..., row, column]

    def proper(self, precision: Tensor) -> Tensor:
        """Return whether each normal factor has a positive definite precision, bool [...]."""
        if not self.full:
            return (precision > 0).all(-1)
        info: Tensor = torch.linalg.cholesky_ex(self.matrix(precision)).info
        return info == 0

    def moments(self, factor: Tensors) -> tuple[Tensor, Tensor]:
        """Return mean and covariance root of a normal factor; NaN if it cannot be normalized."""
        shift, precision = factor["shift"], factor["precision"]
        if not self.full:
            return shift / precision, precision.rsqrt()
        # The root is to be lower triangular, so the factors of P are taken from below.
        found, info = torch.linalg.cholesky_ex(self.matrix(precision).flip(-1, -2))
        upper = torch.where((info == 0)[..., None, None], found, torch.nan).flip(-1, -2)
        root = inverse(upper, upper=True).mT
        return times(root, times(root.mT, shift)), root

    def mean_and_sd(self, factor: Tensors) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviations of a normal factor's variables, [..., d] each."""
        mean, root = self.moments(factor)
        return mean, torch.linalg.vector_norm(root, dim=-1) if self.full else root

    def naturals(self, mean: Tensor, root: Tensor) -> Tensors:
        """Return natural parameters of the normal with the given mean and covariance root."""
        if not self.full:
            precision = root.square().reciprocal()
            return {"shift": mean * precision, "precision": precision}
        inner = inverse(root, upper=False)
        shift = times(inner.mT, times(inner, mean))
        return {"shift": shift, "precision": self.packed(inner.mT @ inner)}

    def independent(self, mean: Tensor, sd: Tensor) -> Tensors:
        """Return natural parameters of independent normals with the given mean and sd."""
        return self.naturals(mean, torch.diag_embed(sd) if self.full else sd)

    def leading(self, root: Tensor) -> Tensor:
        """Return the covariance root of the first `size` variables of a larger normal."""
        return root[..., : self.size, : self.size] if self.full else root[..., : self.size]

    def between(self, start: Tensors, end: Tensors, share: Tensor) -> Tensors:
        """Interpolate two normals at a fraction [C], linearly in mean and precision.

        Return mean and covariance root.
        """
        before, after = (self.naturals(v["mean"], v["root"])["precision"] for v in (start, end))
        precision = torch.lerp(before, after, share[:, None])
        _, root = self.moments({"shift": torch.zeros_like(end["mean"]), "precision": precision})
        return {"mean": torch.lerp(start["mean"], end["mean"], share[:, None]), "root": root}

    def log_det(self, root: Tensor) -> Tensor:
        """Return half the log determinant of a covariance, given its root."""
        # Not the diagonal alone: gradients are those of a matrix that may become any other.
        value: Tensor = (
            torch.linalg.slogdet(root).logabsdet if self.full else root.abs().log().sum(-1)
        )
        return value

    def measured(self, change: Tensors, mean: Tensor, root: Tensor) -> Tensor:
        """Return the change of a normal factor as a flat vector, scaled to the Fisher metric.

        Its length is that of the change in the Fisher metric of the normal with this mean and root.
        """
        shift, precision = change["shift"], change["precision"]
        if not self.full:
            pull, squeeze = root * (shift - precision * mean), root.square() * precision
        else:
            whole = self.matrix(precision)
            pull = times(root.mT, shift - times(whole, mean))
            squeeze = (root.mT @ whole @ root).flatten()
        return torch.cat([pull, squeeze / 2**0.5])

    def log_density(self, u: Tensor, factor: Tensors) -> Tensor:
        """Return a normal factor's log density at u [..., d]; up to a constant if improper."""
        shift, precision = factor["shift"], factor["precision"]
        if self.full:
            whole = self.matrix(precision)
            log_det = torch.linalg.slogdet(whole).logabsdet
            half = shift - 0.5 * times(whole, u)
            peak = (shift * torch.linalg.solve_ex(whole, shift[..., None]).result[..., 0]).sum(-1)
        else:
            log_det = precision.abs().log().sum(-1)
            half = torch.addcmul(shift, precision, u, value=-0.5)
            peak = (shift.square() / precision).sum(-1)
        constant = log_det - self.size * math.log(2 * math.pi) - peak
        value: Tensor = (u * half).sum(-1) + 0.5 * constant
        return value


def inverse(triangle: Tensor, upper: bool) -> Tensor:
    """Return the inverses of triangular matrices [..., d, d]."""
    eye = torch.eye(triangle.shape[-1], dtype=triangle.dtype, device=triangle.device)
    inverse_root: Tensor = torch.linalg.solve_triangular(
        triangle, eye.expand_as(triangle), upper=upper
    )
    return inverse_root


def assemble_root(shared_sites: Tensor, below: Tensor, client_sites: Tensor) -> Tensor:
    """Assemble a lower triangular covariance root [C, n, n] from three blocks."""
    top = torch.cat(
        [shared_sites, shared_sites.new_zeros(*shared_sites.shape[:-1], client_sites.shape[-1])], -1
    )
    return torch.cat([top, torch.cat([below, client_sites], -1)], -2)


def draw_count(draws: int, variables: int, covariance: str) -> int:
    """Return the number of Monte Carlo draws; at least twice the variables for covariances."""
    if draws % 2:
        raise ValueError(f"num_particles is {draws}; expected an even number")
    return draws if covariance == "diagonal" else max(draws, 2 * variables)


def balance_noise(noise: Tensor) -> Tensor:
    """Adjust standard normal noise [S, ..., n] to be symmetric, with identity covariance.

    The second half mirrors the first. With at least 2 n draws their second moments are the
    identity, so that the mean of a quadratic function, and of its gradients, is exact: gradients
    of a normal model have no noise. With fewer they are only mirrored.
    """
    if len(noise) % 2:
        raise ValueError(
            f"num_particles is {len(noise)}; expected an even number, half of them mirrored"
        )
    half = noise[: len(noise) // 2]
    if len(half) >= noise.shape[-1]:
        second = torch.einsum("s...i,s...j->...ij", half, half) / len(half)
        # Not raised where it fails: that client's noise is of no use, and the others' is.
        lower = torch.linalg.cholesky_ex(second).L
        # As columns of one product; else every draw would get a copy of the matrix.
        half = torch.linalg.solve_triangular(lower, half.movedim(0, -1), upper=False)
        half = half.movedim(-1, 0)
    return torch.cat([half, -half])
