"""Quantiles of all clients' conformity scores, computed from one message of each client.

A client with n scores sends n and at most B of its order statistics, those of the ranks
ceil(b n / B), b = 1..B, each with the sum of the weights of its scores above the previous rank and
up to this one. The server treats these scores as equal to that order statistic, which is the
largest of them. Its quantile is therefore never below the exact one, and coverage is kept. It is at
most as large as the order statistic `rank_error` ranks above the exact one, where the rank errors
of all clients add up. With n <= B the message has all scores, and the quantile is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

RANK_TOLERANCE = 1e-9  # relative: rounding of (1 - alpha)(n + 1) must not raise a rank


class ScoreSummary(NamedTuple):
    """Message that summarizes a client's conformity scores by order statistics.

    Attributes:
        num_scores: [], number n of scores.
        upper: [B], order statistics, ascending; at most n.
        mass: [B], sum of the weights of the scores that each represents.
    """

    num_scores: Tensor
    upper: Tensor
    mass: Tensor

    @property
    def num_bytes(self) -> int:
        """Size of a client's message of conformity scores, in bytes."""
        return sum(v.numel() * v.element_size() for v in self)

    @property
    def rank_error(self) -> int:
        """Largest number of scores strictly between neighboring order statistics in the message."""
        return max(-(-int(self.num_scores) // max(len(self.upper), 1)) - 1, 0)

    @property
    def counts(self) -> Tensor:
        """Number of conformity scores that each order statistic in the message represents: [B]."""
        return _ranks(int(self.num_scores), len(self.upper)).diff(prepend=torch.zeros(1).long())


def summarize(scores: Tensor, num_quantiles: int, weights: Tensor | None = None) -> ScoreSummary:
    """Summarize a client's conformity scores [n] and their weights [n] as a message."""
    ordered, order = scores.sort()
    mass = torch.ones_like(scores) if weights is None else weights[order].to(scores)
    at = _ranks(len(scores), min(len(scores), num_quantiles)) - 1
    sums = mass.cumsum(0)[at]
    return ScoreSummary(
        torch.tensor(len(scores)), ordered[at], sums.diff(prepend=sums.new_zeros(1))
    )


def _ranks(count: int, bins: int) -> Tensor:
    """Return the ranks of the order statistics that a client sends: ceil(b count / bins)."""
    return -(-torch.arange(1, bins + 1) * count // max(bins, 1))


def quantile(scores: Tensor, mass: Tensor, alpha: float, atom: Tensor) -> Tensor:
    """Return the upper (1 - alpha) quantile of weighted scores with extra mass at infinity.

    It is the smallest score t such that scores up to t have a mass of at least
    (1 - alpha) (total + atom), or infinity if there is none. With mass 1 and atom 1 it is
    the order statistic of rank ceil((1 - alpha)(n + 1)) of split conformal prediction.

    Args:
        scores: [n].
        mass: [n], not negative.
        alpha: error rate.
        atom: [...], mass of the new row.

    Returns:
        [...], a quantile for each atom.
    """
    ordered, order = scores.sort()
    sums = mass[order].double().cumsum(0)
    total = sums[-1] if len(sums) else sums.new_zeros(())
    level = (1 - alpha) * (total + atom.double()) * (1 - RANK_TOLERANCE)
    with_end = torch.cat([ordered, ordered.new_full((1,), inf)])
    return with_end[torch.searchsorted(sums, level.reshape(-1))].reshape(atom.shape)


def pooled_quantile(
    parts: Sequence[ScoreSummary], alpha: float, weight: Tensor | None = None
) -> Tensor:
    """Return the (1 - alpha) quantile of all clients' scores, for a new row of a known client.

    The row belongs to client k with probability (n_k + 1) / (n + K) (Lu et al. 2023), so that the
    atom is K. With weights the atom is K times the weight of the new row, by the same argument from
    the weighted exchangeability within each client (Tibshirani et al. 2019).

    Args:
        parts: the messages of clients with scores.
        alpha: error rate.
        weight: [...], weight of the new row; None: 1.
    """
    upper = torch.cat([part.upper for part in parts])
    mass = torch.cat([part.mass for part in parts])
    atom = torch.ones((), dtype=torch.float64) if weight is None else weight
    return quantile(upper, mass, alpha, len(parts) * atom)


def new_client_quantile(parts: Sequence[ScoreSummary], alpha: float) -> Tensor:
    """Return the (1 - alpha) quantile of all clients' scores, for a row of a new client.

    Each client has mass 1, divided among its scores, and the new client has mass 1 at infinity
    (Lee, Barber and Willett 2023).
    """
    upper = torch.cat([part.upper for part in parts])
    mass = torch.cat([part.mass / part.num_scores for part in parts])
    return quantile(upper, mass, alpha, torch.ones((), dtype=torch.float64))
