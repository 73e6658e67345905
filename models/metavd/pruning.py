"""Pruning of messages: by dropout rate, or by SNIP's sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pyrofl.models.guides.dropout import dropout_rate
from pyrofl.tensors import Tensors, role, under

KEEP = "server/keep"

Moments = Callable[[Tensors], tuple[Tensors, Tensors]]
"""Tensors [C, *p] under "loc/" and "spread/" -> mean and variance of the random weights."""


def limit(prune: float | str | None, random: bool, *, started: bool) -> float | None:
    """Return the largest dropout rate that is kept now; None keeps all.

    Args:
        prune: that rate, or "snip", or None.
        random: whether there are dropout rates.
        started: whether it is time.

    Raises:
        ValueError: if a number is out of its range, or there is nothing to prune by.
    """
    if prune is None or prune == "snip":
        return None
    if isinstance(prune, str) or not 0 < prune < 1 or not random:
        raise ValueError(
            f"prune is {prune!r}; expected None, 'snip', or a dropout rate between 0 and 1 where "
            "weights are random"
        )
    return prune if started else None


def drop(tensors: Tensors, moments: Moments, limit: float) -> Tensors:
    """Set weights, and their spreads, to zero where the dropout rate exceeds a limit.

    A rate of more than 0.9 is a variance of more than 9 theta^2.

    Args:
        tensors: "loc/..." and "spread/...", [C, *p].
        moments: tensors -> mean and variance of the weights.
        limit: largest rate that is kept.
    """
    mean, variance = moments(tensors)
    keep = {n: dropout_rate(v, variance[n]) <= limit for n, v in mean.items()}
    return tensors | {
        f"{part}/{n}": tensors[f"{part}/{n}"] * keep[n] for part in ("loc", "spread") for n in keep
    }


def fill(message: Tensors, spreads: Tensors) -> Tensors:
    """Give weights that came as zeros the spreads [C, *p] they were sent with."""
    return message | {
        f"spread/{n}": torch.where(message[f"loc/{n}"] == 0, v, message[f"spread/{n}"])
        for n, v in spreads.items()
    }


def as_sent(message: Tensors, server: Tensors, names: Iterable[str]) -> Tensors:
    """Give weights that came as zeros the server's values, for what depends on theta's size."""
    kept = {f"loc/{n}": message[f"loc/{n}"] for n in names}
    return message | {n: torch.where(v == 0, server[n], v) for n, v in kept.items()}


def report(
    tensors: Tensors, moments: Moments, limit: float | None, names: Iterable[str]
) -> Tensors:
    """Return a client's "sparsity", the share of its weights that are dropped, and more, [C].

    Args:
        tensors: "loc/..." and "spread/...", [C, *p].
        moments: tensors -> mean and variance of the weights.
        limit: largest dropout rate that is kept; None drops none by its rate.
        names: of the weights.

    Returns:
        "sparsity" and, where weights are random, their mean "dropout_rate".
    """
    theta = torch.cat([tensors[f"loc/{n}"].flatten(1) for n in names], 1)
    dropped, found = theta == 0, {}
    if any(n.startswith("spread/") for n in tensors):
        variance = torch.cat([v.flatten(1) for v in moments(tensors)[1].values()], 1)
        rate = dropout_rate(theta, variance)
        found["dropout_rate"] = rate.mean(1)
        dropped = dropped if limit is None else dropped | (rate > limit)
    return {**found, "sparsity": dropped.to(theta).mean(1)}


def snip(
    server: Tensors, gradient: Tensors, moved: Tensors, names: Iterable[str], sparsity: float
) -> Tensors:
    """Drop the least sensitive weights once, in the first merge, and keep them dropped.

    Sensitivity is |theta_k g_k|, with g_k the pseudo-gradient of round one (Lee, Ajanthan and Torr,
    "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019; a round in the
    place of its minibatch).

    Args:
        server: before the merge.
        gradient: theta - mean theta_m, [*p].
        moved: values after it, [*p].
        names: of the weights to prune, each on its own.
        sparsity: share that is dropped.

    Returns:
        Pruned values, and the masks under "server/keep/".
    """
    keep = role(KEEP, server)
    if not keep:
        keep = {
            n: top((server[f"loc/{n}"] * gradient[f"loc/{n}"]).abs(), 1 - sparsity) for n in names
        }
    return under("loc", {n: moved[f"loc/{n}"] * k for n, k in keep.items()}) | under(KEEP, keep)


def top(value: Tensor, share: float) -> Tensor:
    """Return bool [*p]: which entries are among the largest; at least one is."""
    count = max(1, round(share * value.numel()))
    chosen = value.new_zeros(value.numel()).bool()
    chosen[value.flatten().topk(count).indices] = True
    return chosen.reshape(value.shape)
