"""Proposal distributions of importance sampling, for shared and client-specific sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.tensors import Tensors

DEGREES_OF_FREEDOM = 5.0  # degrees of freedom of the t distribution
LIST_DEGREES_OF_FREEDOM = 3.0  # of one near a list, which has draws where this has few
MAX_MODE_STEP = 4.0  # maximum step to a mode, in the guide's standard deviations
WIDER_NORMAL_SCALE = 2.0  # scale of the wider normal of a mixture
ROWS_PER_COEFFICIENT = 4  # rows of a regression for each of its coefficients
BRIDGE_ITERATIONS = 50  # iterations of the ratio of normalizing constants
MODE_DISTANCE = 4.0  # least distance of two modes, in standard deviations of the draws
# Part of a line from which draws are near its end; least share of these.
LINE_PART_NEAR_END, MIN_SHARE_NEAR_END = 0.75, 0.01
# Log density of a second mode below the first, and of the middle below both.
MAX_MODE_DEPTH, MIN_VALLEY_DEPTH = 5.0, 2.0


def effective(log_w: Tensor) -> Tensor:
    """Return the effective sample size, given normalized log importance weights [S]."""
    return 1 / log_w.exp().square().sum()


def resample_indices(log_w: Tensor, draws: int, source: Generator) -> Tensor:
    """Return the indices of draws resampled systematically by their log weights [S]."""
    edges = log_w.exp().cumsum(0)
    at = (torch.arange(draws) + torch.rand((), generator=source)) / draws * edges[-1]
    order = torch.randperm(draws, generator=source)
    return torch.searchsorted(edges, at.to(edges)).clamp(max=len(edges) - 1)[order]


def refit_proposal(proposal: Any, e: Tensor, w: Tensor, freedom: float = DEGREES_OF_FREEDOM) -> Any:
    """Return a Student's t proposal with moments moved toward those of weighted draws.

    The draws are noise [S, d]; `freedom` are the degrees of freedom.
    """
    size, mean = e.shape[1], w @ e
    spread = ((e - mean) * w[:, None]).mT @ (e - mean)
    old_mean, old_root = torch.zeros_like(mean), torch.eye(size, dtype=e.dtype)
    if isinstance(proposal, dist.MultivariateStudentT):
        old_mean, old_root = proposal.loc, proposal.scale_tril
    # Shrink: few draws estimate a covariance poorly.
    share = float(effective(w.log()) / (effective(w.log()) + 3 * size))
    root = torch.linalg.cholesky(torch.lerp(old_root @ old_root.mT, spread, share))
    loc = torch.lerp(old_mean, mean, share)
    return dist.MultivariateStudentT(e.new_tensor(freedom), loc, root)


@dataclass(frozen=True)
class Listed:
    """Proposal of noise [S, 1] that selects each of `count` equally likely draws, or some, once."""

    count: int

    def sample(self, shape: tuple[int]) -> Tensor:
        """Return normal noise [S, 1], S at most the count, in the middles of equal intervals."""
        places = self.places(min(shape[0], self.count)).double()
        noise: Tensor = torch.special.ndtri((places + 0.5) / self.count)[:, None]
        return noise

    def places(self, size: int) -> Tensor:
        """Return the indices of `size` of the draws, evenly spaced."""
        places = torch.arange(size, dtype=torch.float64) * self.count / size
        return places.floor().long()

    def log_prob(self, noise: Tensor) -> Tensor:
        """Return the log density [S] of noise, up to a constant."""
        return -0.5 * (noise.square() + math.log(2 * math.pi)).sum(-1)


class ModeSearch(NamedTuple):
    """A draw, and points on paths that lead away from it, to where there may be another mode.

    Attributes:
        noise: of the draw, of the points path by path, each from its start, and, where their number
            is odd, of the draw once more, [S, d].
        paths: what changes along each path, such as "b has the other sign", and its number of
            points.
    """

    noise: Tensor
    paths: Sequence[tuple[str, int]]

    def missing_mode_warning(self, log_p: Tensor, draws: Tensor, weights: Tensor) -> str:
        """Return which path has reached another mode of the posterior, without draws, or "".

        A point is far from the draw, its density is not far below that of the draw, and a point
        before it has less than both.

        Args:
            log_p: log densities of the points up to a constant, [S].
            draws: noise of the draws of the posterior, [n, d].
            weights: of these draws, with sum 1, [n].
        """
        draw = log_p[0]
        far = (self.noise - self.noise[:1]).square().sum(-1) > MODE_DISTANCE**2
        ends = torch.tensor([1, *(count for _, count in self.paths)]).cumsum(0).tolist()
        for (change, _), start, end in zip(self.paths, ends, ends[1:], strict=False):
            level = log_p[start:end]
            valley = torch.cummin(level, 0).values < torch.minimum(level, draw) - MIN_VALLEY_DEPTH
            seen = far[start:end] & (level > draw - MAX_MODE_DEPTH) & valley
            if any(
                not self._is_reached(start + i, draws, weights)
                for i in seen.nonzero()[:, 0].tolist()
            ):
                return (
                    f"the posterior has another mode, without draws, where {change}: narrow the "
                    "prior, or check the model with pyrofl.reference.nuts"
                )
        return ""

    def _is_reached(self, point: int, draws: Tensor, weights: Tensor) -> bool:
        """Return whether draws lie near a point, as seen along the line from the draw to it."""
        line = self.noise[point] - self.noise[0]
        position = (draws - self.noise[0]) @ line / line.square().sum()
        return float(weights[position > LINE_PART_NEAR_END].sum()) > MIN_SHARE_NEAR_END


@dataclass(frozen=True)
class ServerDraws:
    """Draws that a server lists, as noise in which they have nearly mean 0 and covariance 1.

    Attributes:
        noise: [S, d].
        log_density: of the noise, up to a constant, [S].
        listed_at: noise [S, d] -> a server state that lists draws at this noise instead, and their
            log densities [S], with the same constant.
        elsewhere: points at which the posterior may have a mode that the list lacks.
    """

    noise: Tensor
    log_density: Tensor
    listed_at: Callable[[Tensor], tuple[Tensors, Tensor]]
    elsewhere: ModeSearch | None = None


@dataclass(frozen=True)
class ProposalMixture:
    """Weighted draws of a server's list and of t distributions, as draws of their mixture.

    The list has the density f / Z, of which the server knows f, and clients report p / f at each
    draw. With n_0 draws of the list and n_i of t_i, n in all, the weights are

        w = p / q,    q = (n_0 f / Z + sum_i n_i t_i) / n

    (the balance heuristic of Veach and Guibas, "Optimally Combining Sampling Techniques", 1995;
    Owen and Zhou, "Safe and effective importance sampling", JASA 2000; for adapted t_i: Cornuet,
    Marin, Mira and Robert, "Adaptive multiple importance sampling", 2012). The list keeps w below
    n Z / n_0 times p / f, and the tails of t_i bound it where those of f are too short. Z is that
    of bridge sampling between the list and the draws of the t_i.

    Attributes:
        listed: the server's list.
        noise: of the draws, those of the list first, [n, d].
        level: log f of them, [n].
        ratio: log p / f of them, up to a constant, [n].
        near: the t distributions, each with its number of draws.
    """

    listed: ServerDraws
    noise: Tensor
    level: Tensor
    ratio: Tensor
    near: tuple[tuple[Any, int], ...] = ()

    def extended(self, near: Any, noise: Tensor, level: Tensor, ratio: Tensor) -> ProposalMixture:
        """Return the mixture with the draws of one more t distribution."""
        pairs = (self.noise, noise), (self.level, level), (self.ratio, ratio)
        e, log_f, log_r = map(torch.cat, pairs)
        return ProposalMixture(self.listed, e, log_f, log_r, (*self.near, (near, len(noise))))

    def log_weights(self) -> Tensor:
        """Return the log weights [n], up to a constant."""
        if not self.near:
            return self.ratio
        count = sum(n for _, n in self.near)
        first = len(self.noise) - count
        near = self._near(self.noise)
        off = (self.level - near)[first:]
        list_ratio = self.listed.log_density - self._near(self.listed.noise)
        level = self.level - bridge(off[off.isfinite()], list_ratio)
        listed, other = (math.log(part / len(self.noise)) for part in (first, count))
        return self.ratio + self.level - torch.logaddexp(listed + level, other + near)

    def last(self) -> Tensor:
        """Return the log weights of the draws of the last t distribution, without the others."""
        near, count = self.near[-1]
        log_p: Tensor = (self.ratio + self.level)[-count:] - near.log_prob(self.noise[-count:])
        return log_p

    def _near(self, noise: Tensor) -> Tensor:
        """Return the log density of the mixture of the t distributions."""
        count = sum(n for _, n in self.near)
        each = [near.log_prob(noise) + math.log(n / count) for near, n in self.near]
        return torch.stack(each).logsumexp(0)


def bridge(first: Tensor, second: Tensor) -> Tensor:
    """Return the log ratio Z2 / Z1 of the normalizing constants of two densities.

    Meng and Wong, "Simulating Ratios of Normalizing Constants via a Simple Identity", Statistica
    Sinica 1996, eq. 4.1.

    Args:
        first: log of the second density over the first, at draws of the first [S].
        second: the same at draws of the second [T].
    """
    s, t = math.log(len(first)), math.log(len(second))
    more = t - s  # log ratio of the numbers of draws
    level = first.logsumexp(0) - s
    for _ in range(BRIDGE_ITERATIONS):
        above = (first - torch.logaddexp(first + more, level)).logsumexp(0) - s
        level = above - (-torch.logaddexp(second + more, level)).logsumexp(0) + t
    return level


@dataclass(frozen=True)
class ModeRegression:
    """Linear or quadratic regression that predicts modes of clients' noise from shared noise."""

    slopes: Tensor  # [features, C, n]
    squares: bool

    @classmethod
    def of(cls, noise: Tensor, modes: Tensor) -> ModeRegression:
        """Regress modes of clients' noise [S, C, n] on shared noise [S, d], by least squares."""
        squares = ROWS_PER_COEFFICIENT * _features(noise[:1], True).shape[1] <= len(noise)
        x = _features(noise, squares)
        # A ridge of a small part of the rows' weight, as features may be collinear.
        ridge = 1e-6 * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        slopes = torch.linalg.solve(x.mT @ x + ridge, x.mT @ modes.flatten(1))
        return cls(slopes.unflatten(1, modes.shape[1:]), squares)

    def __call__(self, noise: Tensor) -> Tensor:
        """Predict modes of noise [S, C, n] from shared noise [S, d], with bounded norms."""
        modes = _features(noise, self.squares) @ self.slopes.flatten(1)
        modes = modes.unflatten(1, self.slopes.shape[1:])
        length = torch.linalg.vector_norm(modes, dim=-1, keepdim=True)
        bounded: Tensor = modes * (MAX_MODE_STEP / length.clamp(min=MAX_MODE_STEP))
        return bounded


def _features(noise: Tensor, squares: bool) -> Tensor:
    """Return regression features of noise [S, d]: 1, entries and, if `squares`, their products."""
    one = noise.new_ones(len(noise), 1)
    row, column = torch.triu_indices(noise.shape[1], noise.shape[1])
    pairs = [noise[:, row] * noise[:, column]] if squares else []
    return torch.cat([one, noise, *pairs], 1)


def normal_lattices(s: int, draws: int, size: int, source: Generator) -> Tensor:
    """Draw S sets of standard normal quasi-Monte Carlo points, [S, draws, size]."""
    return normal_lattice(torch.rand(s, size, generator=source, dtype=torch.float64), draws)


def normal_lattice(shift: Tensor, draws: int) -> Tensor:
    """Return standard normal quasi-Monte Carlo points [*, draws, n] of uniform shifts [*, n].

    The points of a set are a lattice with a random shift (Cranley and Patterson, "Randomization of
    number theoretic methods for multiple integration", 1976). Each is standard normal, so that
    means over a set are unbiased; they vary less than those of independent draws.
    """
    size = shift.shape[-1]
    if not draws or not size:
        return shift.new_zeros(*shift.shape[:-1], draws, size)
    # The first entries are evenly spaced; others are an additive sequence, whose steps are powers
    # of the root of x^size = x + 1.
    ratio = 2.0
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / size) if size > 1 else 2.0
    powers = torch.arange(size, dtype=torch.float64)
    places = torch.arange(draws, dtype=torch.float64)[:, None] * ratio**-powers  # [draws, n]
    places[:, 0] /= draws
    uniform: Tensor = ((places + shift[..., None, :]) % 1.0).clamp(1e-15, 1 - 1e-15)
    noise: Tensor = torch.special.ndtri(uniform)
    return noise


def draw_around_modes(
    mode: Tensor, root: Tensor, shifts: Tensor, draws: int, share: float
) -> tuple[Tensor, Tensor]:
    """Return draws of clients' noise around its modes, in sets, and their log weights.

    A set has `draws` points of a mixture of two normals, of which one in eight, or at least one,
    is of the wider. The weight of a point is the density of the mixture relative to that of the
    standard normal, divided by the probability of the point relative to 1 / draws.

    Args:
        mode: [S, C, n].
        root: root of the covariance of the narrower normal, [S, C, n, n].
        shifts: uniform numbers [S, C, sets, 2, n].
        draws: points of a set.
        share: probability of the wider normal; 1 draws all points of it.

    Returns:
        Noise [S, C, sets * draws, n] and log weights [S, C, sets * draws].
    """
    n = mode.shape[-1]
    wide = draws if share == 1 else max(1, draws // 8)
    narrow, wider = (
        normal_lattice(shifts[..., 0, :], draws - wide),
        normal_lattice(shifts[..., 1, :], wide),
    )
    inner = torch.cat([narrow, WIDER_NORMAL_SCALE * wider], -2).flatten(
        2, 3
    )  # [S, C, sets * draws, n]
    noise = mode[:, :, None] + inner @ root.mT
    near = -inner.square().sum(-1) / 2
    far = near / WIDER_NORMAL_SCALE**2 - n * math.log(WIDER_NORMAL_SCALE)
    parts = near.new_tensor([1 - share, share])
    log_r = torch.logaddexp(parts[0].log() + near, parts[1].log() + far)
    points = torch.tensor([draws - wide, wide])
    of_point = (draws * parts / points).repeat_interleave(points).log().repeat(shifts.shape[2])
    log_det = torch.linalg.slogdet(root).logabsdet[..., None]
    return noise, log_r - of_point - log_det + noise.square().sum(-1) / 2
