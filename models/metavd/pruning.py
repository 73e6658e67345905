"""Pruning of weights in messages: by dropout rate, or by SNIP's sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pyrofl.models.guides.dropout import dropout_rate, log_noise_to_signal
from pyrofl.tensors import Tensors, role, under

KEEP = "server/keep"
DROPPED_RATE = 0.9  # rate above which a weight is as good as gone; the authors drop it

Moments = Callable[[Tensors], tuple[Tensors, Tensors]]
"""Tensors [C, *p] under "loc/" and "spread/" -> mean and variance of the random weights."""


def drop(tensors: Tensors, moments: Moments, limit: float | None) -> Tensors:
    """Set weights and dropout parameters to zero where the dropout rate exceeds a limit.

    A rate of more than 0.9 is a variance of more than 9 theta^2; None drops nothing.
    """
    if limit is None:
        return tensors
    mean, variance = moments(tensors)
    keep = {n: dropout_rate(v, variance[n]) <= limit for n, v in mean.items()}
    return tensors | {
        f"{part}/{n}": tensors[f"{part}/{n}"] * keep[n] for part in ("loc", "spread") for n in keep
    }


def saturated_fraction(mean: Tensors, variance: Tensors) -> Tensor:
    """Return the fraction of each client's dropout rates above 0.9, [C].

    The rates follow from the given means and variances of the weights.
    """
    rates = [dropout_rate(v, variance[n]).flatten(1) for n, v in mean.items()]
    return (torch.cat(rates, 1) > DROPPED_RATE).to(rates[0]).mean(1)


def fill(message: Tensors, values: Tensors) -> Tensors:
    """Replace entries of a message by given values where weights were pruned to zero."""
    dropped = {n: message[f"loc/{n.partition('/')[2]}"] == 0 for n in values}
    return message | {n: torch.where(dropped[n], v, message[n]) for n, v in values.items()}


def report(
    tensors: Tensors, moments: Moments, limit: float | None, names: Iterable[str]
) -> Tensors:
    """Return "sparsity" (fraction of dropped weights) and mean "dropout_rate" per client, [C].

    Besides "rates_above_0.9", the share of those, [C]; and of every weight "dropout_rate/NAME" and
    "log_alpha/NAME", [C, *p].
    """
    sent, statistics = drop(tensors, moments, limit), {}
    if role("spread", tensors):
        mean, spread = moments(tensors)
        rates = {n: dropout_rate(tensors[f"loc/{n}"], v) for n, v in spread.items()}
        statistics["dropout_rate"] = torch.cat([v.flatten(1) for v in rates.values()], 1).mean(1)
        statistics[f"rates_above_{DROPPED_RATE}"] = saturated_fraction(mean, spread)
        statistics |= under("dropout_rate", rates)
        statistics |= {
            f"log_alpha/{n}": log_noise_to_signal(tensors[f"loc/{n}"], v) for n, v in spread.items()
        }
    theta = torch.cat([sent[f"loc/{n}"].flatten(1) for n in names], 1)
    return {**statistics, "sparsity": (theta == 0).to(theta).mean(1)}


def snip(
    server: Tensors, gradient: Tensors, moved: Tensors, names: Iterable[str], sparsity: float
) -> Tensors:
    """Prune a fraction `sparsity` of the weights after round one, by SNIP's sensitivity score.

    Sensitivity is |theta_k g_k|, with g_k the pseudo-gradient of round one (Lee, Ajanthan and Torr,
    "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019; a round in the
    place of its minibatch). `moved` holds the values after it. Masks go to "server/keep/".
    """
    keep = role(KEEP, server)
    if not keep:
        keep = {
            n: top((server[f"loc/{n}"] * gradient[f"loc/{n}"]).abs(), 1 - sparsity) for n in names
        }
    return under("loc", {n: moved[f"loc/{n}"] * k for n, k in keep.items()}) | under(KEEP, keep)


def top(value: Tensor, share: float) -> Tensor:
    """Return a bool mask [*p] of a tensor's largest entries: a given fraction, at least one."""
    count = max(1, round(share * value.numel()))
    at = value.flatten().topk(count).indices
    return value.new_zeros(value.numel(), dtype=torch.bool).index_fill(0, at, True).view_as(value)
