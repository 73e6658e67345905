"""Aggregation rules: weighted means, and robust rules that limit the effect of bad messages.

clip     Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019
median, trimmed   Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning:
         Towards Optimal Statistical Rates", ICML 2018, definitions 1 and 2
krum     Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine
         Tolerant Gradient Descent", NeurIPS 2017, section 4 and, of several, section 6
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from pyrofl.tensors import Tensors, add_trailing_axes, cut, sum_per_client

Combine = Callable[[Tensors, Tensor, Tensors], Tensors]
"""(message [C, *p], weight [C], server [*p]) -> one value [*p] for every name of the message."""


class AggregationError(ValueError):
    """Error raised if valid client messages cannot be aggregated into a new server state.

    The server keeps its previous state.
    """


def weighted_mean(value: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean over clients: sum_c weight_c value_c / sum_c weight_c.

    Args:
        value: [C, *p].
        weight: [C], non-negative and not all zero; sizes, confidences or responsibilities.

    Raises:
        ValueError: if the weights do not fit.
        AggregationError: if one is negative or their sum is not finite, or all are zero.

    >>> weighted_mean(torch.tensor([[1.0], [4.0]]), torch.tensor([2.0, 1.0]))
    tensor([2.])
    """
    return average({"value": value}, weight)["value"]


def average(message: Tensors, weight: Tensor) -> Tensors:
    """Return the weighted mean over clients of every tensor [C, *p] in their messages.

    See `weighted_mean`.
    """
    for value in message.values():
        if weight.shape != value.shape[:1]:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}; expected one per client of "
                f"{tuple(value.shape)}"
            )
    total = weight.sum()
    if not bool((weight >= 0).all()) or not 0 < float(total) < float("inf"):
        raise AggregationError(
            f"weights are {weight.tolist()}; expected finite numbers >= 0 with a positive sum"
        )
    shares = weight / total
    return {n: torch.tensordot(shares.to(v), v, 1) for n, v in message.items()}


def blend(old: Tensors, new: Tensors, keep: float) -> Tensors:
    """Interpolate tensors: return keep * old + (1 - keep) * new for each name in `new`."""
    return {n: keep * old[n] + (1 - keep) * v for n, v in new.items()} if keep else new


def get_rule(rule: str | Combine) -> Combine:
    """Return the aggregation rule with the given name, such as "median" or "trimmed:0.1".

    Args:
        rule: "mean" weights clients by size; "median" is the coordinatewise median and
            "trimmed:0.1" the mean without the 10% largest and 10% smallest values; "krum:2" is the
            message closest to its neighbors, robust to 2 bad messages, and "krum:2:5" the mean of
            5 such; "clip:1.0" clips the change of every client to a norm of at most 1. Or a
            function (message, weights, server) -> aggregated tensors.

    Returns:
        The rule as a function.

    Raises:
        ValueError: if the name is unknown, or a number is out of its range.
    """
    if callable(rule):
        return rule
    name, *words = rule.split(":")
    with suppress(ValueError):
        match name, [float(word) for word in words]:
            case "mean", []:
                return mean
            case "median", []:
                return ignoring_zero_weights(median)
            case "trimmed", [share] if 0 <= share < 0.5:
                return ignoring_zero_weights(
                    lambda message, weight, _: trimmed(message, weight, share)
                )
            case "clip", [norm] if norm > 0:
                return ignoring_zero_weights(
                    lambda message, weight, old: clipped(message, weight, old, norm)
                )
        match name, [int(word) for word in words]:
            case "krum", [bad] if bad >= 0:
                return ignoring_zero_weights(lambda message, weight, _: krum(message, weight, bad))
            case "krum", [bad, best] if bad >= 0 and best >= 1:
                return ignoring_zero_weights(
                    lambda message, weight, _: krum(message, weight, bad, best)
                )
    raise ValueError(
        f"aggregation is {rule!r}; expected mean, median, trimmed:SHARE below 0.5, krum:BAD, "
        "krum:BAD:BEST or clip:NORM"
    )


def ignoring_zero_weights(rule: Combine) -> Combine:
    """Wrap an aggregation rule so that it ignores messages with weight 0."""

    def some(message: Tensors, weight: Tensor, server: Tensors) -> Tensors:
        at = weight.nonzero().flatten()
        if not len(at):
            raise AggregationError(f"weights are {weight.tolist()}; expected at least one above 0")
        return rule(cut(message, at), weight[at], server) if message else {}

    return some


def mean(message: Tensors, weight: Tensor, server: Tensors) -> Tensors:
    """Return the weighted mean of the clients' messages, which is not robust to bad messages."""
    return average(message, weight)


def median(message: Tensors, weight: Tensor, server: Tensors) -> Tensors:
    """Return the coordinatewise median of the clients' messages, with equal weights."""
    return {n: middle(v, torch.ones_like(weight), (len(v) - 1) // 2) for n, v in message.items()}


def trimmed(message: Tensors, weight: Tensor, share: float) -> Tensors:
    """Return the weighted trimmed mean: drop a fraction of values at both ends of a coordinate."""
    each = math.floor(share * len(weight) + 1e-9)  # 0.29 of 100 is 28.999...
    return {n: middle(v, weight, each) for n, v in message.items()}


def middle(value: Tensor, weight: Tensor, each: int) -> Tensor:
    """Return each entry's mean over clients, without its `each` smallest and largest values."""
    if not each:
        return weighted_mean(value, weight)
    order = value.sort(0)
    central = slice(each, len(value) - each)
    share = weight.to(value)[order.indices[central]]
    return (share / share.sum(0) * order.values[central]).sum(0)


def krum(message: Tensors, weight: Tensor, bad: int, best: int = 1) -> Tensors:
    """Aggregate by Krum: the weighted mean of the `best` messages that are closest to the others.

    The result is robust to at most `bad` bad messages.

    A message's score is the sum of its squared distances, over all its tensors [C, *p], to the
    C - bad - 2 nearest others.
    """
    clients, least = len(weight), max(2 * bad + 3, best)
    if clients < least:
        raise AggregationError(
            f"krum received {clients} messages, to choose {best} with up to {bad} bad; expected at "
            f"least {least} messages in every round"
        )
    flat = torch.cat([v.reshape(clients, -1) for v in message.values()], 1)  # [C, d]
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances.sort(1).values[:, 1 : clients - bad - 1]  # the first is the message itself
    chosen = nearest.sum(1).argsort(stable=True)[:best].sort().values
    return average({n: v[chosen] for n, v in message.items()}, weight[chosen])


def clipped(message: Tensors, weight: Tensor, server: Tensors, norm: float) -> Tensors:
    """Clip each client's change of the server state, and return the weighted mean of messages."""
    change = {n: v - server[n] for n, v in message.items()}
    factor = norm / sum_per_client({n: v.square() for n, v in change.items()}).sqrt()
    near = {n: server[n] + add_trailing_axes(factor, v) * v for n, v in change.items()}
    # Messages within the norm stay bitwise unchanged.
    clipped_message = {
        n: torch.where(add_trailing_axes(factor < 1, v), near[n], v) for n, v in message.items()
    }
    return average(clipped_message, weight)
