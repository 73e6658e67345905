"""Metrics of predictions for each client: accuracy, proper scores and calibration.

Every function is pure and takes clients side by side, C clients of B rows: y [C, B], the truth;
mask [C, B] bool, False where a row does not count, such as padding, whatever it holds. A client
without rows, or with a prediction that is NaN, gets NaN.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyrofl.arguments import checked
from pyrofl.tensors import Tensors

Weighting = Literal["client", "row"]
RANGES = {
    **dict.fromkeys(("accuracy", "ece", "mce", "ece_classwise", "mce_classwise"), (0.0, 1.0)),
    "brier": (0.0, 2.0),
    **dict.fromkeys(("entropy", "rmse", "crps"), (0.0, float("inf"))),
}
"""Metric -> smallest and largest possible value."""
MIN_LOG_DENSITY = -1e30  # log density that stands for all below


class Bins(NamedTuple):
    """Statistics of predictions in bins of confidence: row counts, mean confidence, accuracy."""

    rows: Tensor  # [..., bins] how many
    confidence: Tensor  # [..., bins] mean of a bin
    accuracy: Tensor  # [..., bins] share of a bin that is right


def classification(probs: Tensor, y: Tensor, mask: Tensor) -> Tensors:
    """Return classification scores of each client, given probabilities [C, B, K] and labels y.

    Probabilities are averaged over draws; y is int64.

    Returns:
        Means over a client's rows, [C] each: `accuracy` of the most probable class; `nll` in nats,
        from probabilities of at least the smallest normal number; `brier`, summed over classes, 0
        to 2; `ece` and `mce` of the most probable class in 15 bins (Guo et al., "On Calibration
        of Modern Neural Networks", 2017); `entropy` of the prediction in nats, 0 to log K;
        `ece_classwise` and `mce_classwise`, see there.

    Raises:
        ValueError: if shapes do not fit, a label is not below K, or rows are not probabilities.
    """
    _check_shapes("probs", probs[..., 0], y, mask)
    _check_probabilities(probs, y, mask)
    y = y.where(mask, 0)[..., None]
    confidence, top = probs.max(-1)
    right = (top == y[..., 0]).to(probs).where(confidence.isfinite(), torch.nan)
    ece, mce = calibration_error(calibration_bins(confidence, right, mask))
    ece_classwise, mce_classwise = classwise_ece(probs, y[..., 0], mask)
    one_hot = torch.zeros_like(probs).scatter(-1, y, 1)
    likelihood = probs.gather(-1, y)[..., 0].clamp(min=torch.finfo(probs.dtype).tiny)
    return {
        "accuracy": mean(right, mask),
        "nll": mean(-likelihood.log(), mask),
        "brier": mean((probs - one_hot).square().sum(-1), mask),
        "ece": ece,
        "mce": mce,
        "entropy": mean(torch.special.entr(probs).sum(-1), mask),
        "ece_classwise": ece_classwise,
        "mce_classwise": mce_classwise,
    }


def regression(
    prediction: Tensor, log_density: Tensor, crps: Tensor, y: Tensor, mask: Tensor
) -> Tensors:
    """Return regression scores of each client: RMSE, negative log-likelihood and CRPS.

    Predictions [C, B] are predictive means, in the units of y; log_density [C, B] is the log of the
    predictive density (or mass) at y; crps [C, B] is `crps_of_normals` or `crps_of_draws`.

    Returns:
        [C] each: `rmse` in the units of y; `nll` in nats per row, of log densities of at least
        -1e30: what a model holds for impossible; and the mean `crps` in the units of y, which is
        the absolute error of a prediction without spread. They are finite wherever the predictions
        are.
    """
    for name, value in (("prediction", prediction), ("log_density", log_density), ("crps", crps)):
        _check_shapes(name, value, y, mask)
    error = (prediction - y).where(mask, 0)
    # The square of a number may be none.
    largest = error.abs().amax(1, keepdim=True).clamp(min=torch.finfo(error.dtype).tiny)
    return {
        "rmse": mean((error / largest).square(), mask).sqrt() * largest[:, 0],
        "nll": mean(-log_density.clamp(min=MIN_LOG_DENSITY), mask),
        "crps": mean(crps, mask),
    }


def crps_of_normals(loc: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Return the CRPS of equal mixtures of K normals, loc and scale [K, *rows], at y [*rows].

    CRPS = E|X - y| - E|X - X'| / 2, the integral of the squared error of the distribution function
    (Gneiting and Raftery, JASA 2007; of mixtures Grimit et al., 2006). It takes K² terms per row.

    >>> crps_of_normals(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1))  # (√2 - 1) / √π
    tensor([0.2337])
    """
    off = _mean_distance(y - loc, scale).mean(0)
    pairs = (
        _mean_distance(loc - m, torch.hypot(scale, s)) for m, s in zip(loc, scale, strict=True)
    )
    apart = sum(pair.mean(0) for pair in pairs)
    return off - apart / (2 * len(loc))


def crps_of_draws(draws: Tensor, y: Tensor) -> Tensor:
    """Estimate the CRPS from predictive draws [S, *rows] at y [*rows], without bias.

    It is mean |x - y| - mean |x - x'| / 2, the latter over pairs of different draws; see
    `crps_of_normals`. It needs S of at least 2, and is NaN otherwise.
    """
    count, ordered = len(draws), draws.sort(0).values
    # In order, draw i is above i others and below count - 1 - i.
    ranks = torch.arange(1.0 - count, count, 2).to(draws).view(-1, *(1,) * y.dim())
    apart = (ranks * ordered).sum(0) / (count * (count - 1)) if count > 1 else torch.nan
    return (draws - y).abs().mean(0) - apart


def _mean_distance(loc: Tensor, scale: Tensor) -> Tensor:
    """Return E|X| for a normal variable X with the given loc and scale."""
    scale = scale.clamp(min=torch.finfo(loc.dtype).tiny)
    z = loc / scale
    distance: Tensor = (
        loc * torch.erf(z / 2**0.5) + scale * (-z.square() / 2).exp() * (2 / torch.pi) ** 0.5
    )
    return distance


def calibration_bins(
    confidence: Tensor, correct: Tensor, mask: Tensor | None = None, bins: int = 15
) -> Bins:
    """Bin predictions by confidence: return row count, mean confidence and accuracy per bin.

    The confidence [..., N] is binned into bins of equal width.

    Bins are (l, u]; a confidence of 0 falls in the first. `correct` is 1 or 0. Without a
    mask [..., N] all rows count.
    """
    edges = torch.arange(1, bins).to(confidence) / bins
    return _gather(torch.bucketize(confidence, edges), confidence, correct, mask, bins)


def calibration_error(bins: Bins) -> tuple[Tensor, Tensor]:
    """Return expected and maximum calibration error [...] (ECE, MCE); NaN without rows."""
    gap = (bins.accuracy - bins.confidence).abs().where(bins.rows > 0, 0)
    rows = bins.rows.sum(-1)
    return (gap * bins.rows).sum(-1) / rows, gap.amax(-1).where(rows > 0, torch.nan)


def classwise_ece(
    probs: Tensor, y: Tensor, mask: Tensor | None = None, bins: int = 10
) -> tuple[Tensor, Tensor]:
    """Return class-wise ECE and MCE [...], over the probabilities of all classes (MetaVD).

    Each of the N x K probabilities is a prediction "the class is k", in bins [l, u); entries
    equal to 1 fall in none and do not count. Most entries are near 0 and right, so these numbers
    are far below those of the most probable class. Args are probs [..., N, K], y and mask [..., N].
    """
    edges = torch.arange(1, bins).to(probs) / bins
    right = torch.zeros_like(probs).scatter(-1, y[..., None], 1)
    counts = ~(probs >= 1)  # NaN counts, so that it is not lost
    if mask is not None:
        counts &= mask[..., None]
    entries, right, counts = (value.flatten(-2) for value in (probs, right, counts))
    place = torch.bucketize(entries, edges, right=True)
    return calibration_error(_gather(place, entries, right, counts, bins))


def auroc(inside: Tensor, outside: Tensor) -> Tensor:
    """Return the area under the ROC curve of a score, such as entropy, for two data sets.

    It is the probability that a row from outside [M] scores higher than one from inside [N], like
    those of training; ties count half. 0.5: the score is uninformative; 1: it separates the two;
    NaN: there is a NaN or no row.
    """
    ranked, outside = inside.sort().values, outside.contiguous()
    lower, upper = (torch.searchsorted(ranked, outside, right=r) for r in (False, True))
    area = (lower + upper).double().mean() / (2 * len(inside))
    return area.where(~(inside.isnan().any() | outside.isnan().any()), torch.nan)


def entropies(probs: Tensor) -> Tensors:
    """Split the predictive entropy into an epistemic (reducible) and an aleatoric part.

    From probs [S, ..., K] of S draws of a posterior, in nats [...]: `total`, of the mean over S;
    `aleatoric`, the mean of the draws' own; `epistemic`, the difference: the mutual information of
    the class and the draw.
    """
    total = torch.special.entr(probs.mean(0)).sum(-1)
    aleatoric = torch.special.entr(probs).sum(-1).mean(0)
    epistemic = (total - aleatoric).clamp(min=0)  # it is no less, but for rounding
    return {"total": total, "aleatoric": aleatoric, "epistemic": epistemic}


@checked
def pool(values: Tensor, size: Tensor, weighting: Weighting = "client") -> Tensor:
    """Return a metric's mean over clients, ignoring NaN; NaN if all values are NaN.

    >>> pool(torch.tensor([1.0, 0.0]), torch.tensor([3, 1]), "row")
    tensor(0.7500)

    Args:
        values: [C].
        size: [C], rows that each value is a mean of.
        weighting: "client" counts every client once, "row" every row.
    """
    is_known = ~values.isnan()
    weight = is_known * (size.double() if weighting == "row" else torch.ones_like(size).double())
    return ((values.where(is_known, 0) * weight).sum() / weight.sum()).to(values)


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of values [C, B] over each client's unmasked rows: [C]."""
    return values.where(mask, 0).sum(1) / mask.sum(1)


def _gather(
    place: Tensor, confidence: Tensor, correct: Tensor, mask: Tensor | None, bins: int
) -> Bins:
    """Return row count, mean confidence and accuracy of each bin, given bin indices [..., N]."""
    counted = torch.ones_like(confidence) if mask is None else mask.to(confidence)
    empty = confidence.new_zeros(*confidence.shape[:-1], bins)
    count, sure, right = (
        empty.scatter_add(-1, place, value.where(counted > 0, 0))
        for value in (counted, confidence, correct.to(confidence))
    )
    return Bins(count, sure / count, right / count)


def _check_shapes(name: str, rows: Tensor, y: Tensor, mask: Tensor) -> None:
    if not rows.shape == y.shape == mask.shape or rows.dim() != 2:
        raise ValueError(
            f"{name}, y and mask cover rows {tuple(rows.shape)}, {tuple(y.shape)} and "
            f"{tuple(mask.shape)}; expected three times (clients, rows)"
        )
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}; expected torch.bool")


def _check_probabilities(probs: Tensor, y: Tensor, mask: Tensor) -> None:
    """Raise ValueError for invalid probabilities (such as logits) or labels; NaN is allowed."""
    real = probs[mask]
    off = (real.sum(-1) - 1).abs()
    if bool((real < 0).any()) or bool((off > 1e-2).any()):
        raise ValueError(
            f"probs has entries from {float(real.min()):.4g} and sums up to {float(off.max()):.4g} "
            "away from 1; expected probabilities"
        )
    labels = y[mask]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < probs.shape[-1]:
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}; "
            f"expected 0 to {probs.shape[-1] - 1}"
        )
