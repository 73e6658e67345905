"""Posterior of the shared variables given all clients but one, whose factor is known.

Draws from the product of all factors are resampled with weights 1 / t_j, or, where few of them have
most of the weight, the server draws from the product of the others' factors. Neither needs an
exchange with clients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from pyrofl.data import Cohort
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.membership import leave
from pyrofl.inference.posteriors.proposals import bridge
from pyrofl.tensors import Tensors, times

MIN_EFFECTIVE_SHARE = 0.8  # effective part of the draws that are resampled, as few have heavy tails
MIN_ESS_PER_VARIABLE = 10  # draws for each variable, for the moments of a cavity
MIN_RELATIVE_PRECISION = 1e-3  # of a cavity in closed form, relative to that of the draws
MIN_RELATIVE_VARIANCE = 1e-9  # variance of a cavity, relative to that of the draws


class Factored(Protocol):
    """Methods of likelihood factors that `without_client` calls."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the server's tables of factors."""

    def factors_at(self, u: Tensor, server: Tensors, cohort: Cohort) -> Tensor:
        """Return the log [S] of one client's factor at draws [S, d]."""

    def replace(self, server: Tensors, factors: Tensors, source: Generator) -> Tensors:
        """Draw the shared variables again, with other factors of clients."""


def truncated_weights(log_weight: Tensor) -> Tensor:
    """Return normalized weights [S, ...], truncated, as weights of few draws have heavy tails."""
    weight = log_weight.softmax(0).clamp(max=len(log_weight) ** -0.5)
    normalized: Tensor = weight / weight.sum(0)
    return normalized


def blended_weights(weight: Tensor, size: int) -> Tensor:
    """Return weights [S, ...], blended with equal ones where few draws are effective.

    Moments of few effective draws would not have a covariance of `size` variables.
    """
    enough = (1 / weight.square().sum(0) / (MIN_ESS_PER_VARIABLE * size)).clamp(max=1.0)
    return enough * weight + (1 - enough) / len(weight)


class NormalCavity(NamedTuple):
    """Normal approximation of the posterior given all clients but one, for each of C clients."""

    mean: Tensor  # of all d variables, [C, d]
    precision: Tensor  # of those that likelihoods read, [C, p, p]
    valid: Tensor  # where the precision is positive definite, [C]


def normal_cavity(u: Tensor, reads: Tensor, shift: Tensor, precision: Tensor) -> NormalCavity:
    """Divide the normal distribution with the moments of draws by each client's factor.

    With mean m and precision Q of the variables that likelihoods read, the quotient is normal with
    precision Q - P and mean (Q - P)^-1 (Q m - h); see Minka, "Expectation propagation for
    approximate Bayesian inference", UAI 2001, section 3. Weighted draws are more accurate, but too
    few of them are effective where a client has much of the information on a variable.

    Args:
        u: draws of the shared variables, [S, d].
        reads: positions of the p variables that likelihoods read.
        shift: h of the factors exp(-v' P v / 2 + h' v), [C, p].
        precision: P, [C, p, p].
    """
    middle, sd = u.mean(0), u.std(0).clamp(min=1e-150)
    scaled = (u - middle) / sd
    covariance = scaled.mT @ scaled[:, reads] / len(u)  # [d, p]
    one, scale = torch.eye(len(reads), dtype=u.dtype), sd[reads]
    whole = inverse(positive(covariance[reads] + MIN_RELATIVE_VARIANCE * one))
    others = whole - precision * (scale[:, None] * scale)
    values, vectors = torch.linalg.eigh((others + others.mT) / 2)
    valid = values[:, 0] > MIN_RELATIVE_PRECISION * torch.linalg.eigvalsh(whole)[0]
    slope = times(precision, middle[reads]) - shift  # of log 1 / t_j at m
    inverted = (vectors / values.clamp(min=1e-12)[:, None]) @ vectors.mT
    off = times(inverted, slope * scale)  # of the mean from m, in standard deviations
    mean = middle + sd * times(covariance @ whole, off)  # others by linear regression on these
    return NormalCavity(mean, others / (scale[:, None] * scale), valid)


def positive(covariance: Tensor, least: float = MIN_RELATIVE_VARIANCE) -> Tensor:
    """Return covariances [..., p, p], those that are not positive definite made so.

    Moments of draws that are nearly equal, or nearly dependent, may be so by rounding.
    """
    bad = torch.linalg.cholesky_ex(covariance).info != 0
    if not bool(bad.any()):
        return covariance
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    near = (vectors * values.clamp(min=least)[..., None, :]) @ vectors.mT
    return torch.where(bad[..., None, None], near, covariance)


def inverse(covariance: Tensor) -> Tensor:
    """Return inverses [..., p, p] of positive definite matrices, which are positive definite too.

    The usual inverse of nearly dependent variables may not be so by rounding.
    """
    inverted: Tensor = torch.linalg.inv(covariance)
    bad = torch.linalg.cholesky_ex(inverted).info != 0
    if not bool(bad.any()):
        return inverted
    stable = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    mended: Tensor = torch.where(bad[..., None, None], stable, inverted)
    return mended


def without_client(method: Factored, run: Run, client: str, rounds: int) -> RoundState:
    """Return a run's state with draws given all other clients, after rounds without the client.

    The state has these draws as server/others [S, d], and as server/level the log of the ratio of
    the normalizing constants of the products of the others' and of all factors.
    """
    server, at = run.state.server, run.data.names.index(client)
    left = _refitted(run, client, rounds) if rounds else None
    if left is not None:
        rows = ((n, left[n], server[n][at, None]) for n in method.tables)
        tables = {n: torch.cat([v[:at], factor_values, v[at:]]) for n, v, factor_values in rows}
        server = method.replace(server, tables, stream(run.seed, Stream.MERGE, run.state.number))
    u, cohort = server["server/draws"], run.data.cohort(torch.tensor([at]))
    factor_values = method.factors_at(u, server, cohort)
    weight = (-factor_values).softmax(0)
    if left is None and float(1 / weight.square().sum()) > MIN_EFFECTIVE_SHARE * len(u):
        places = (torch.arange(len(u), dtype=factor_values.dtype) + 0.5) / len(u)
        others = u[torch.searchsorted(weight.cumsum(0), places).clamp(max=len(u) - 1)]
    else:
        left = leave(run, client).state.server if left is None else left
        others = left["server/draws"]
    level = bridge(-factor_values, -method.factors_at(others, server, cohort))
    return replace(run.state, server=server | {"server/others": others, "server/level": level})


def _refitted(run: Run, client: str, rounds: int) -> Tensors:
    """Return the server's state after further rounds without a client."""
    left, end = leave(run, client), run.state.number + rounds
    return fit(run.method, left.data, end, resume_from=left, progress=False).state.server
