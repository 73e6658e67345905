"""Batched Gaussian processes of several clients with Laplace approximations.

K functions share a kernel, P [C, N, N] between a client's rows. The information of a row on f(x_i)
is held as a normal site: `shift` [C, N, K], precision times mean, and `root` [C, N, K, K], with
precision root root'. Sites of zeros carry no information, so that clients may have different
numbers of rows.

Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, sections 3.4 and 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyrofl.user_warnings import warn_user

MAX_NEWTON_STEPS = 50  # steps to the peak of the posterior at most; a normal likelihood takes two
MIN_STEP_SHARE = 1e-4  # the share of a step that is not tried if it goes down
MAX_ROUNDINGS = 4096  # roundings that a matrix may lack to be positive


@dataclass(frozen=True)
class Kernel:
    """Covariance kernel s^2 k(z / l, z' / l), given log l and log s, [C, 1] each."""

    kind: Literal["rbf", "linear"]

    def __call__(self, a: Tensor, b: Tensor, log_length: Tensor, log_scale: Tensor) -> Tensor:
        """Return kernel matrices [C, A, B] between features a [C, A, d] and b [C, B, d]."""
        length, square = log_length.exp()[..., None], (2 * log_scale).exp()[..., None]
        a, b = a / length, b / length
        if self.kind == "linear":
            return square * (a @ b.mT)
        sizes = (v.square().sum(2) for v in (a, b))
        apart = next(sizes).unsqueeze(2) + next(sizes).unsqueeze(1) - 2 * a @ b.mT
        return square * (-0.5 * apart.clamp(min=0)).exp()

    def diagonal(self, z: Tensor, log_length: Tensor, log_scale: Tensor) -> Tensor:
        """Return the diagonal [C, B] of the kernel matrix of features [C, B, d]."""
        square = (2 * log_scale).exp()
        if self.kind == "linear":
            squares = (z / log_length.exp()[..., None]).square().sum(2)
            # Features of zeros, as of units that are all off, would have no density and no slope.
            return square * (squares + torch.finfo(z.dtype).eps)
        return square.expand(z.shape[:2])


def sites(
    log_prob: Callable[[Tensor], Tensor], among: Tensor, count: Tensor, outputs: int
) -> tuple[Tensor, Tensor]:
    """Return normal approximations of a Gaussian process's likelihood at the posterior mode.

    They are (shift, root), at the mode of the function values f.

    Args:
        log_prob: f [C, N, K] -> log p(y | f), [C, N].
        among: P, [C, N, N].
        count: [C, N], how much each row counts; 0 where there is none.
        outputs: K.
    """
    hill = Hill(log_prob, among, count)
    here = hill.at(among.new_zeros(*count.shape, outputs))
    share, moving = torch.ones_like(here.height), torch.ones_like(here.height, dtype=torch.bool)
    for _ in range(MAX_NEWTON_STEPS):
        aim = weights(among, *taylor_expansion(log_prob, here.f, count))[0]
        new = hill.at(here.pull + share[:, None, None] * (aim - here.pull))
        # A whole step from far away may go down, and further down at every one, if s is large.
        up = new.height >= here.height - hill.slack(here)
        share = torch.where(up, 2 * share, share / 2).clamp(max=1.0)
        far = (new.f - here.f).abs() > torch.finfo(new.f.dtype).eps ** (1 / 2) * (1 + new.f.abs())
        here = new.where(moving & up, here)  # who is there changes nobody's steps
        # A client of no numbers never goes up, and must not keep others going.
        moving = moving & torch.where(up, far.flatten(1).any(1), share > MIN_STEP_SHARE)
        if not bool(moving.any()):
            break
    else:
        warn_user(
            f"the peak of a process's posterior was not found in {MAX_NEWTON_STEPS} steps; "
            "expected a likelihood that is log-concave in f, or a smaller scale"
        )
    return taylor_expansion(log_prob, here.f, count)


@dataclass(frozen=True)
class Point:
    """State of Newton's iterations: function values f, P^-1 f, and their log posterior.

    Shapes are [C, N, K] twice, and [C]; the log posterior is log p(y | f) + log p(f).
    """

    f: Tensor
    pull: Tensor
    height: Tensor

    def where(self, chosen: Tensor, other: Point) -> Point:
        """Combine two Newton states: this one for chosen clients, the other for the rest.

        The chosen clients are a bool mask [C].
        """
        row = chosen[:, None, None]
        f, pull = torch.where(row, self.f, other.f), torch.where(row, self.pull, other.pull)
        return Point(f, pull, torch.where(chosen, self.height, other.height))


@dataclass(frozen=True)
class Hill:
    """Unnormalized log posterior of a Gaussian process's values f at the training rows.

    See Rasmussen and Williams, "Gaussian Processes for Machine Learning", equation 3.12.
    """

    log_prob: Callable[[Tensor], Tensor]  # f [C, N, K] -> [C, N]
    among: Tensor  # P, [C, N, N]
    count: Tensor  # [C, N]

    def at(self, pull: Tensor) -> Point:
        """Evaluate a Gaussian process's log posterior at function values f = P `pull`.

        P is the kernel matrix.
        """
        f = self.among @ pull
        likely = self.log_prob(f).masked_fill(self.count == 0, 0.0)
        return Point(f, pull, (self.count * likely).sum(1) - 0.5 * (pull * f).sum((1, 2)))

    def slack(self, point: Point) -> Tensor:
        """Return a tolerance [C] for rounding errors of the log posterior at a Newton state."""
        return MAX_ROUNDINGS * torch.finfo(point.height.dtype).eps * (1 + point.height.abs())


def taylor_expansion(
    log_prob: Callable[[Tensor], Tensor], f: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the second-order Taylor expansion of the log likelihood at f, as (shift, root)."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        slope = torch.autograd.grad(log_prob(f).sum(), f, create_graph=True)[0]
        rows = [
            torch.autograd.grad(s.sum(), f, retain_graph=True, allow_unused=True)[0]
            if s.requires_grad
            else None
            for s in slope.unbind(2)
        ]
    # Minus the Hessians of the rows, [C, N, K, K].
    curve = torch.stack([torch.zeros_like(f) if r is None else -r for r in rows], 2)
    root = singular_cholesky(curve) * count.sqrt()[..., None, None]
    f, slope = f.detach(), slope.detach() * count.unsqueeze(2)
    return (root @ (root.mT @ f.unsqueeze(3))).squeeze(3) + slope, root


def lower(matrix: Tensor) -> Tensor:
    """Return Cholesky factors of matrices [..., K, K], or of their diagonals where that fails."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    root, bad = torch.linalg.cholesky_ex(
        matrix + torch.diag_embed(rounding_tolerance(matrix).expand_as(diagonal))
    )
    alone = torch.diag_embed(diagonal.clamp(min=0).sqrt())
    return torch.where((bad > 0)[..., None, None], alone, root)


def singular_cholesky(matrix: Tensor) -> Tensor:
    """Return Cholesky factors, with columns of zeros where a matrix is singular.

    A root of what is rounding alone is another one in every batch.
    """
    root = lower(matrix)
    pivots = root.diagonal(dim1=-2, dim2=-1).square()  # [..., K]
    return root * (pivots > 2 * matrix.shape[-1] * rounding_tolerance(matrix)).unsqueeze(-2)


def rounding_tolerance(matrix: Tensor) -> Tensor:
    """Return a tolerance for rounding errors of a matrix, from its largest diagonal entry."""
    most = matrix.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True).clamp(min=0)
    return MAX_ROUNDINGS * torch.finfo(matrix.dtype).eps * most


def weights(among: Tensor, shift: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kernel weights of a Gaussian process's posterior mean, and a Cholesky factor.

    These are P^-1 E[f], [C, N, K], and the factor of B.

    The weights are (P + precision^-1)^-1 times the sites' means.

    B = I + root' P root, [C, N K, N K]; the mean of f at the rows is P times the former.
    """
    clients, n, k = shift.shape
    inner = torch.einsum("cij,cikl,cjkm->ciljm", among, root, root).reshape(clients, n * k, n * k)
    eye = torch.eye(n * k, dtype=among.dtype, device=among.device)
    half, bad = torch.linalg.cholesky_ex(eye + inner)
    half = half.masked_fill((bad > 0)[:, None, None], torch.nan)
    pulled = torch.einsum("cikl,cik->cil", root, among @ shift).reshape(clients, n * k, 1)
    solved = torch.cholesky_solve(pulled, half).reshape(clients, n, k)
    return shift - torch.einsum("cikl,cil->cik", root, solved), half


def predicted(
    among: Tensor, across: Tensor, alone: Tensor, shift: Tensor, root: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a Gaussian process's predictive mean and covariance at new rows.

    These are [C, B, K] and [C, B, K, K].

    Args:
        among: the kernel between the rows with sites, [C, N, N].
        across: between these and the other rows, [C, N, B].
        alone: of the other rows with themselves, [C, B].
        shift: of the sites.
        root: of the sites.
    """
    (clients, n, k), num_queries = shift.shape, across.shape[2]
    pull, half = weights(among, shift, root)
    met = torch.einsum("cikl,cib->cilbk", root, across).reshape(clients, n * k, num_queries * k)
    projected = torch.linalg.solve_triangular(half, met, upper=False).reshape(
        clients, -1, num_queries, k
    )
    eye = torch.eye(k, dtype=among.dtype, device=among.device)
    spread = alone[..., None, None] * eye - torch.einsum("cabk,cabl->cbkl", projected, projected)
    return across.mT @ pull, spread
