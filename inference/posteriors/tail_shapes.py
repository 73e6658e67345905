"""Pareto shapes of estimates from weighted draws, and differences between two such estimates.

Of an estimate of E h the shape is the largest of those of the tails of h w and of w, as in Vehtari,
Simpson, Gelman, Yao and Gabry, "Pareto smoothed importance sampling", JMLR 2024. h is x - E x for a
mean (both tails), and (x - E x)^2 for a standard deviation. For the end of an interval h is an
indicator, which is bounded, so that the shape is that of w.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyrofl.inference.posteriors.export import MAX_TAIL_FRACTION, smooth_weights
from pyrofl.tensors import Tensors

ENDS = 0.025, 0.975  # probabilities below the ends of an interval
ESTIMATE = "estimate"  # axis of these, in sample_stats
ESTIMATES = ("mean", "sd", *(f"{100 * end:g}%" for end in ENDS))
MAX_STANDARD_ERRORS = 3.0  # standard errors by which two estimates differ more than they may
# Difference of means, in standard deviations, and ratio of these.
MAX_MEAN_DIFFERENCE, MAX_SD_RATIO = 0.1, 1.1
# Relative standard deviation of coordinates that do not vary but by rounding.
CONSTANT_TOLERANCE = 1e-9
# The largest value is below a third of its expectation with probability 3%.
LARGEST_VALUE_FACTOR = 3.0
MAX_CELLS = 10_000_000  # numbers in a tensor


class MomentEstimates(NamedTuple):
    """Means and standard deviations of coordinates, and their standard errors, [d] each."""

    mean: Tensor
    sd: Tensor
    error: Tensor  # of the mean
    sd_error: Tensor


def shapes(x: Tensor, log_w: Tensor, k: float) -> Tensor:
    """Return the Pareto shapes of the `ESTIMATES` of coordinates, [4, *p].

    Args:
        x: draws [S, *p].
        log_w: their normalized log weights [S].
        k: shape of the weights.
    """
    flat, w = x.double().reshape(len(x), -1), log_w.exp()
    step = max(1, MAX_CELLS // len(flat))
    parts = [_shapes(part, w).clamp(min=k) for part in flat.split(step, 1)]
    return torch.cat(parts, 1).view(len(ESTIMATES), *x.shape[1:])


def _shapes(x: Tensor, w: Tensor) -> Tensor:
    """Return the Pareto shapes of the tails of h w for each h, [4, d]; -inf where h is bounded."""
    off = x - w @ x
    mean = torch.maximum(_bounded(off * w[:, None]), _bounded(-off * w[:, None]))
    sd = _bounded(off.square() * w[:, None])
    bounded = torch.full_like(sd, -math.inf)
    return torch.stack([mean, sd, bounded, bounded])


def smooth_with_shape(log_weights: Tensor) -> tuple[Tensor, float]:
    """Return Pareto-smoothed, normalized log weights [S], and their shape, see `_bounded`."""
    log_w, k = smooth_weights(log_weights)
    if not math.isfinite(k):
        return log_w, k
    largest = log_weights.double().softmax(0).amax()
    return log_w, float(_limited(torch.tensor(k), largest, len(log_w)))


def _bounded(value: Tensor) -> Tensor:
    """Return the shape of the upper tails of values [S, d], with a bound from the largest, [d]."""
    largest = value.amax(0) / value.clamp(min=0).sum(0)
    return _limited(_shape(value), largest, len(value))


def _limited(shape: Tensor, largest: Tensor, count: int) -> Tensor:
    """Return shapes of tails, with a bound from the part of the largest of `count` values.

    With shape k below 1, the largest of S values has about S^(k - 1) of their sum. Where it has far
    less, no draw dominates, whatever shape a fit to bounded values has.
    """
    bound = 1 + (LARGEST_VALUE_FACTOR * largest).log() / math.log(count)
    return torch.where(bound < 1, torch.minimum(shape, bound), shape)


def _shape(value: Tensor) -> Tensor:
    """Return the shape of the upper tails of values [S, d], [d].

    Zhang and Stephens, "A new and efficient estimation method for the generalized Pareto
    distribution", Technometrics 2009, with the weak prior of Pareto smoothing.
    """
    count = int((value > 0).sum(0).min())
    size = int(min(MAX_TAIL_FRACTION * count, 3 * math.sqrt(count)))
    if size < 5:
        return value.new_full(value.shape[1:], -math.inf)
    top = value.topk(size + 1, 0).values.flip(0)
    tail = top[1:] - top[0]
    highest, quartile = tail[-1], tail[int(size / 4 + 0.5) - 1].clamp(min=1e-300)
    points = 30 + int(math.sqrt(size))
    grid = 1 - (points / (torch.arange(points).to(tail) + 0.5)).sqrt()
    theta = 1 / highest.clamp(min=1e-300) + grid[:, None] / 3 / quartile  # [points, d]
    k = torch.log1p(-theta[:, None] * tail).mean(1)  # [points, size, d] -> [points, d]
    level = size * ((-theta / k).log() - k - 1)
    weight = level.nan_to_num(nan=-math.inf).softmax(0)
    best = (weight * theta).sum(0)  # [d]
    shape = torch.log1p(-best * tail).mean(0)
    shape = (shape * size + 0.5 * 10) / (size + 10)
    return torch.where(highest > 0, shape, -math.inf).nan_to_num(nan=math.inf)


def estimates(x: Tensor, log_w: Tensor) -> MomentEstimates:
    """Return the estimates from draws [S, d] with normalized log weights [S]."""
    w = log_w.exp()
    mean = w @ x
    off = x - mean
    sd = (w @ off.square()).sqrt()
    error = (w.square() @ off.square()).sqrt()
    sd_error = (w.square() @ (off.square() - sd.square()).square()).sqrt() / (2 * sd)
    return MomentEstimates(mean, sd, error, sd_error)


def difference(values: Tensors, one: Tensor, other: Tensor) -> str:
    """Return which estimates of two weightings differ beyond their Monte Carlo errors, or "".

    Args:
        values: site -> draws [S + T, *p].
        one: normalized log weights [S] of the first draws.
        other: those [T] of the others.
    """
    differences = []
    for name, value in values.items():
        flat = value.double().reshape(len(value), -1)
        flat = flat[:, flat.std(0) > CONSTANT_TOLERANCE * flat.abs().amax(0)]
        if not flat.shape[1]:
            continue
        a, b = estimates(flat[: len(one)], one), estimates(flat[len(one) :], other)
        far = (a.mean - b.mean).abs() - MAX_STANDARD_ERRORS * torch.hypot(a.error, b.error)
        if bool((far > MAX_MEAN_DIFFERENCE * b.sd).any()):
            at = int((far / b.sd).argmax())
            differences.append(
                f"mean of {name} {float(a.mean[at]):.3g} and {float(b.mean[at]):.3g}"
            )
        error = torch.hypot(a.sd_error, a.sd / b.sd * b.sd_error)
        far = (a.sd - b.sd).abs() - MAX_STANDARD_ERRORS * error
        if bool((far > (MAX_SD_RATIO - 1) * b.sd).any()):
            at = int((far / b.sd).argmax())
            differences.append(f"sd of {name} {float(a.sd[at]):.3g} and {float(b.sd[at]):.3g}")
    return ", ".join(differences)
