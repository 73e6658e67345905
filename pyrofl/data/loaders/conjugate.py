"""Gaussian tasks with a known exact posterior, for testing approximations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrofl.arguments import Count, NotNegative, Positive, Whole, checked
from pyrofl.data.federation import Federation
from pyrofl.tensors import generator, times


@dataclass(frozen=True)
class ConjugateTask:
    """Linear regressions y_j = X_j w_j + Normal(0, I), one per client, in float64.

    Rows are whitened: divided by the standard deviation of their noise, so that the noise has
    standard deviation 1 and `precision` and `mean` are sufficient statistics of w_j.
    """

    federation: Federation  # x [N, d], y [N]
    precision: Tensor  # [J, d, d], X_j' X_j
    mean: Tensor  # [J, d], least-squares solution; the shortest where it is not unique

    def posterior(self, loc: Tensor, prior_precision: Tensor) -> tuple[Tensor, Tensor]:
        """Return the posterior of each client's weights w_j: mean [J, d], covariance [J, d, d].

        The prior is Normal(loc, I / prior_precision), with prior_precision [J].
        """
        prior = prior_precision.to(self.mean)[:, None].expand_as(self.mean)  # [J, d]
        covariance = torch.linalg.inv(self.precision + torch.diag_embed(prior))
        pull = times(self.precision, self.mean) + prior * loc.to(self.mean)
        return times(covariance, pull), covariance

    def evidence(self, loc: Tensor, prior_precision: Tensor) -> Tensor:
        """Return each client's log marginal likelihood log p(y_j | loc, prior_precision): [J].

        It is log Normal(y_j | X_j loc, I + X_j X_j' / prior_precision[j]).

        This is the density of the whitened rows; with noise variance s2, that of the n_j rows
        before whitening is smaller by n_j / 2 log s2.
        """
        loc, prior_precision = loc.to(self.mean).expand_as(self.mean), prior_precision.to(self.mean)
        rows = self.federation.batch(torch.arange(len(self.mean)))
        x = rows.x * rows.mask[..., None]
        residual = rows.y * rows.mask - times(x, loc)
        eye = torch.eye(x.shape[1], dtype=x.dtype)
        root = torch.linalg.cholesky(eye + x @ x.mT / prior_precision[:, None, None])
        white = torch.linalg.solve_triangular(root, residual[..., None], upper=False)
        log_det = 2 * root.diagonal(dim1=1, dim2=2).log().sum(1)
        log_evidence: Tensor = (
            rows.size * math.log(2 * math.pi) + log_det + white.square().sum((1, 2))
        )
        return -0.5 * log_evidence

    def pooled(self, loc: Tensor, prior_precision: Tensor) -> tuple[Tensor, Tensor]:
        """Return the posterior of weights w shared by all clients: mean [d], covariance [d, d].

        The prior is Normal(loc, prior_precision^-1).
        """
        loc, prior_precision = loc.to(self.mean), prior_precision.to(self.mean)
        covariance = torch.linalg.inv(prior_precision + self.precision.sum(0))
        pull = prior_precision @ loc + times(self.precision, self.mean).sum(0)
        return covariance @ pull, covariance


def conjugate(x: Sequence[Tensor], y: Sequence[Tensor]) -> ConjugateTask:
    """Build a regression task from the clients' whitened rows, X_j [n_j, d] and y_j [n_j].

    Raises:
        ValueError: if there is no client, a client has no row, or lengths differ.
    """
    x, y = [v.double() for v in x], [v.double() for v in y]
    if not x or [len(v) for v in x] != [len(v) for v in y]:
        raise ValueError(
            f"x has clients of {[len(v) for v in x]} rows and y of {[len(v) for v in y]}; expected "
            "the same number of rows for each of at least one client"
        )
    rows = torch.arange(sum(map(len, x))).split([len(v) for v in x])
    none = torch.empty(0, dtype=torch.long)
    return ConjugateTask(
        Federation(torch.cat(x), torch.cat(y), rows, tuple(none for _ in rows)),
        torch.stack([v.T @ v for v in x]),
        torch.stack([torch.linalg.pinv(v) @ r for v, r in zip(x, y, strict=True)]),
    )


def gaussian_means(
    means: Tensor | Sequence[Sequence[float]], variances: Tensor | Sequence[float]
) -> ConjugateTask:
    """Build a Gaussian task in which client j has the likelihood Normal(w_j | b_j, v_j I).

    It has d rows, X_j = I / sqrt(v_j).

    The b_j are the means [J, d], the v_j the variances [J].

    Raises:
        ValueError: if the shapes differ from these or a variance is not positive.
    """
    b = torch.as_tensor(means, dtype=torch.float64)
    v = torch.as_tensor(variances, dtype=torch.float64)
    if b.ndim != 2 or v.shape != b.shape[:1]:
        shapes = f"{list(b.shape)} and {list(v.shape)}"
        raise ValueError(f"means and variances have shapes {shapes}; expected [J, d] and [J]")
    if not bool((v > 0).all()):
        raise ValueError(f"the smallest variance is {float(v.min())}; expected positive numbers")
    eye, root = torch.eye(b.shape[1], dtype=torch.float64), v.sqrt()
    return conjugate([eye / r for r in root], list(b / root[:, None]))


@checked
def linear_regression(
    clients: Count,
    d: Count,
    rows: Count | Sequence[int],
    noise: Positive = 1.0,
    between: NotNegative = 1.0,
    seed: Whole = 0,
) -> ConjugateTask:
    """Simulate a linear regression per client, with coefficients around a common mean.

    Covariates and the common weights are Normal(0, 1), w_j = common + between * Normal(0, I).

    Args:
        clients: J.
        d: number of covariates.
        rows: number of rows of every client, or a sequence with one number per client.
        noise: standard deviation of y given x, before rows are whitened.
        between: standard deviation of the clients' weights.
        seed: seed of all random draws.

    Raises:
        ValueError: if `rows` does not have one number per client.
    """
    sizes = [rows] * clients if isinstance(rows, int) else list(rows)
    if len(sizes) != clients or min(sizes) < 1:
        raise ValueError(
            f"rows is {rows}; expected a count >= 1, or one for each of {clients} clients"
        )
    rng = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    weights = normal(d) + between * normal(clients, d)
    x = [normal(n, d) for n in sizes]
    y = [v @ w + noise * normal(len(v)) for v, w in zip(x, weights, strict=True)]
    return conjugate([v / noise for v in x], [v / noise for v in y])
