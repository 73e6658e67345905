"""A normal prior that all clients share: how a client moves its copy, and the server makes one.

Entries have mean m and logarithm nu of the standard deviation; `fedabml` has the equations.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pyrofl.inference.servers.robust import Combine, mean
from pyrofl.tensors import Tensors, role, under

Average = Literal["mnu", "std", "moments"]


def gradient(m: Tensor, nu: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return dKL[q || p]/dm and dKL[q || p]/dnu of a normal prior (line 9), all [C, *p].

    Args:
        m: prior mean.
        nu: logarithm of the prior's standard deviation.
        mean: posterior mean.
        variance: posterior variance.
    """
    s2, gap = (2 * nu).exp(), mean - m
    return -gap / s2, 1 - (variance + gap.square()) / s2


def step_to(
    m: Tensor, nu: Tensor, mean: Tensor, variance: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Let first and second moments of the prior go a share of the way to the posterior's.

    This is a natural gradient step on KL[q || p] in the mean parameters of the normal (Amari,
    "Natural Gradient Works Efficiently in Learning", 1998): a variance stays positive at any
    share, and a share of 1 ends at the posterior.

    Args:
        m: prior mean.
        nu: logarithm of the prior's standard deviation.
        mean: posterior mean.
        variance: posterior variance.
        share: of the way, 0 to 1.

    Returns:
        New m and nu.
    """
    gap = mean - m
    s2 = (1 - share) * (2 * nu).exp() + share * (variance + (1 - share) * gap.square())
    return m + share * gap, s2.log() / 2


def pooled(
    server: Tensors, message: Tensors, weight: Tensor, average: Average, combine: Combine = mean
) -> Tensors:
    """Make one prior [*p] of the clients' priors, names "loc/" and "log_scale/" [C, *p].

    Args:
        server: the old prior, which robust ways to combine need.
        message: of the clients.
        weight: [C], 1 for each client that a message stands for.
        average: of what, see `fedabml`; "moments" gives the prior that minimises
            sum_i KL[p_i || p(. | theta)], if they are averaged.
        combine: how clients become one.
    """
    if average == "mnu":
        return combine(message, weight, server)
    loc = combine(role("loc", message), weight, role("loc", server))
    power = 1 if average == "std" else 2
    old, new = (
        {n: (power * v).exp() for n, v in role("log_scale", tensors).items()}
        for tensors in (server, message)
    )
    if average == "moments":
        new = {n: v + (message[f"loc/{n}"] - loc[n]).square() for n, v in new.items()}
    width = {n: v.log() / power for n, v in combine(new, weight, old).items()}
    return under("loc", loc) | under("log_scale", width)
