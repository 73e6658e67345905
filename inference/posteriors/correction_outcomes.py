"""Outcome of an importance correction: whether weights are reliable, warnings, and advice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrofl.inference.definition.programs import FREED, NONCENTERED
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors.importance_sampling import MAX_RELIABLE_K, MIN_ESS, Weights
from pyrofl.inference.posteriors.tail_shapes import ESTIMATES
from pyrofl.user_warnings import warn_user

CORRECTED = "yes"
RICHER_GUIDE = (
    "use a richer guide, such as pvi.hierarchical(..., guide=guides.flow(3)), reparametrize the "
    "model, or check it with pyrofl.reference.nuts"
)


def is_heavy(weights: Weights) -> Tensor:
    """Return whether Pareto k is too large: [1] for all clients, or [C] for each."""
    return weights.k > MAX_RELIABLE_K


def heavy_tail_reason(weights: Weights) -> str:
    """Return that Pareto k is too large, with what helps, or ""."""
    if not bool(is_heavy(weights).any()):
        return ""
    k = float(weights.k.nan_to_num(torch.inf, torch.inf).max())
    why = f"Pareto k of the correction is {k:.2f} (at most {MAX_RELIABLE_K} is reliable)"
    return f"{why}, and more rounds will not help: {RICHER_GUIDE}"


def describe_heavy_estimates(weights: Weights) -> str:
    """Return which means and standard deviations of a program's sites have too large a Pareto k."""
    texts = []
    for site, value in weights.shapes.items():
        if site.endswith((NONCENTERED, FREED)):
            continue
        for name, k in zip(ESTIMATES, value, strict=True):
            if k.numel() and float(k.max()) > MAX_RELIABLE_K:
                texts.append(f"{float(k.max()):.2f} for the {name} of {site}")
    return ", ".join(texts)


def reliable_draw_warnings(weights: Weights, verdict: ConvergenceStatus) -> list[str]:
    """Return warnings about corrected draws with reliable weights; none if they are unreliable."""
    if bool(is_unreliable(weights).any()):
        return []
    texts = []
    if weights.missing_mode:
        texts.append(f"corrected draws are of one mode: {weights.missing_mode}")
    if weights.doubt:
        texts.append(f"corrected draws may be unreliable: {weights.doubt}; {advice(verdict)}")
    if weights.at_bound:
        texts.append(f"corrected draws may be unreliable: {weights.at_bound}")
    texts.append(heavy_tail_warning(weights, "corrected"))
    return [text for text in texts if text]


def heavy_tail_warning(weights: Weights, kind: str) -> str:
    """Return a warning about means and sds of a kind of draws with too large a Pareto k, or ""."""
    if not (heavy := describe_heavy_estimates(weights)):
        return ""
    return (
        f"estimates of {kind} draws are unreliable: Pareto k is {heavy} (at most {MAX_RELIABLE_K} "
        "is reliable), as draws in a heavy tail are few; report the median and the interval, or "
        "compare with pyrofl.reference.nuts"
    )


def is_unreliable(weights: Weights) -> Tensor:
    """Return whether importance weights are unreliable: [1] for all clients, or [C] for each."""
    return is_heavy(weights) | (weights.ess < MIN_ESS)


def report_outcome(
    weights: Weights, names: Sequence[str], strict: bool, verdict: ConvergenceStatus
) -> str:
    """Return the outcome of an importance correction: "yes", or "no" and the reason.

    A warning is issued if weights are unreliable.

    Args:
        weights: of all clients together, or of each of these.
        names: names of the clients that are weighted separately; empty for all together.
        strict: whether corrected draws are used even if they are unreliable.
        verdict: status of the run.
    """
    bad = is_unreliable(weights)
    if not bool(bad.any()):
        for text in reliable_draw_warnings(weights, verdict):
            warn_user(text)
        return CORRECTED
    whose = ", ".join(name for name, b in zip(names, bad.tolist(), strict=False) if b)
    why = _reason(weights, "up to " if names else "")
    state = "corrected draws are unreliable" if strict else "draws are not corrected"
    state += f" of {whose}" if names else ""
    more = "" if strict else ": draws of the guide are used, which may be too narrow or shifted"
    if not strict and not bool((weights.ess < MIN_ESS).any()):
        more += "; corrected=True returns the weighted draws all the same"
    warn_user(f"{state}{more}; {why}; {advice(verdict)}")
    return CORRECTED if strict else f"no: {why}"


def _reason(weights: Weights, up_to: str) -> str:
    """Return which diagnostics of unreliable importance weights are bad."""
    k, ess = float(weights.k.nan_to_num(torch.inf, torch.inf).max()), float(weights.ess.min())
    size = f"the effective sample size of {weights.tried:,} weighted draws is {ess:,.0f}"
    if few := ess < MIN_ESS:
        size += f" (at least {MIN_ESS} are needed)"
    if not bool(is_heavy(weights).any()):
        return size
    shape = f"Pareto k is {up_to}{k:.2f} (at most {MAX_RELIABLE_K} is reliable)"
    return f"{shape}, {'and' if few else 'although'} {size}"


def advice(verdict: ConvergenceStatus) -> str:
    """Return advice for a better guide or a longer fit, given the run's convergence status."""
    if verdict.kind in ("stuck", "diverged"):
        return f"the run is {verdict.kind}, see Run.status"
    if verdict.ended:
        return f"the run has not converged: {verdict.why}"
    if verdict.kind == "not converged":
        return "the run has not converged: fit more rounds"
    return f"more rounds will not help, as the fit itself has converged: {RICHER_GUIDE}"
