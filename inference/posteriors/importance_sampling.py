"""Importance sampling of the shared latent sites, from terms that clients report.

The server draws the shared sites; each exchange with the clients returns their `GroupTerms`. In one
process the clients are groups of rows, in a deployment they answer messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.inference.definition.rejection import SINGULAR
from pyrofl.inference.posteriors.group_weights import GroupTerms
from pyrofl.inference.posteriors.guided_sites import MIN_DRAWS, GuidedSites, NoUsableDraws
from pyrofl.inference.posteriors.proposals import (
    LIST_DEGREES_OF_FREEDOM,
    Listed,
    ProposalMixture,
    ServerDraws,
    effective,
    refit_proposal,
)
from pyrofl.inference.posteriors.tail_shapes import difference, smooth_with_shape
from pyrofl.tensors import Tensors, seeded

MAX_ADAPTATIONS = 4  # maximum adaptations of the t distribution
# Pilot values of g per entry; fraction of effective draws that suffices.
PILOT_DRAWS_PER_ENTRY, SUFFICIENT_ESS_FRACTION = 60, 0.9
INFINITE_VARIANCE_K = 0.5  # Pareto k above which weights have no finite variance
MAX_LIST_PROPOSALS = 2  # maximum t distributions near a list of draws
MIN_ESS_GAIN = 1.25  # relative gain of the effective sample size below which adaptation stops
MAX_CLIENT_DRAWS = 64  # maximum draws of z
MIN_ESS = 400  # required effective sample size
CONVERGENCE_ORDER = 1.5  # noise of a mean over K evenly spaced points falls at least as K^-ORDER
MAX_TRIED = 4000  # maximum values of g, unless more draws are requested
MAX_RELIABLE_K = 0.7  # Pareto k above which weights are unreliable
MIN_ESS_OF_ERROR = 100  # effective sample size from which the error of an estimate is known
FINITE_MEAN_K = 1.0  # Pareto k below which an estimate has a mean
DIFFER = "two sets of draws differ beyond their Monte Carlo errors"
UNCHECKED = "no t distribution is near enough to show whether the server's draws lack a tail"
MIN_LOG_WEIGHT = -1e300  # log weight of draws that have no density
MAX_ADDED_VARIANCE = 0.2  # variance of log w that the draws of z may add


class Request(NamedTuple):
    """Draws of the shared sites at which clients report their marginal likelihoods.

    Attributes:
        noise: of the draws, [S, d]; of a list, the noise that selects each of them, [S, 1].
        draws: numbers of draws of z, of each group of clients.
        sets: sets of these.
        server: server state with the list; None is that of the run.
        more: whether draws of the own sites are added to those of the exchange before.
    """

    noise: Tensor
    draws: Sequence[int]
    sets: int = 1
    server: Tensors | None = None
    more: bool = False


class TermsReply(NamedTuple):
    """Terms of all groups of clients at requested draws, and the values of the shared sites."""

    terms: Sequence[GroupTerms]
    values: Tensors  # site -> [S, *p]


Exchange = Callable[[Request], TermsReply]


class Weights(NamedTuple):
    """Diagnostics of importance weights: Pareto shape, effective sample size, number of draws.

    Tensors are [1] for all clients together, or [C] for each client.
    """

    k: Tensor  # Pareto shape
    ess: Tensor  # effective sample size
    tried: int  # number of weighted draws
    doubt: str = ""  # why the draws may be wrong, although k and ess are good
    shapes: Mapping[str, Tensor] = MappingProxyType(
        {}
    )  # site -> Pareto shapes of its estimates, see `tail_shapes`
    missing_mode: str = ""  # which mode of the posterior has no draws
    at_bound: str = ""  # which site's draws lose digits near a bound


class WeightedDraws(NamedTuple):
    """Weighted draws of the shared sites."""

    values: Tensors  # site -> draws [S, *p]
    log_w: Tensor  # normalized log weights, [S]
    weights: Weights


@dataclass
class Weighing:
    """Importance sampler of the shared sites.

    Attributes:
        guided: latent sites of the guide.
        rows: rows of each group of clients, with padding, [G].
        exchange: returns the terms of all groups at draws of the shared sites.
        common: random generator of the shared draws.
        count: minimum number of weighted draws.
        listed: draws that the server lists, near which others can be drawn, if any.
    """

    guided: GuidedSites
    rows: Tensor
    exchange: Exchange
    common: Generator
    count: int
    listed: ServerDraws | None = None

    def together(self) -> WeightedDraws:
        """Weigh draws of the shared sites; draws of own sites are those of the last exchanges."""
        try:
            return self._of_list() if self.guided.num_server_draws else self._of_noise()
        except SINGULAR as error:
            raise NoUsableDraws(
                "the weighted draws do not vary in some direction",
                "check the model: its posterior may be improper",
            ) from error

    def _of_noise(self) -> WeightedDraws:
        """Weigh draws of a normal guide, or of t distributions nearer to the posterior."""
        size = self.guided.normal_counts[0]
        draws = [self.guided.min_draws] * len(self.rows)
        zero = torch.zeros(size, dtype=torch.float64)
        proposal: Any = dist.Normal(zero, 1.0).to_event(1)
        worth, count = 0.0, self.count
        for _ in range(MAX_ADAPTATIONS if size else 0):
            # Pilot runs locate the posterior and determine the number of draws of z.
            e, reply, ratio = self._tried(
                proposal, PILOT_DRAWS_PER_ENTRY * (size + 2), draws, sets=2
            )
            log_w, _ = smooth_with_shape(ratio)
            w, before, worth = log_w.exp(), worth, float(effective(log_w))
            draws, count = self._enough(reply, w, draws), self._needed(log_w)
            if worth > SUFFICIENT_ESS_FRACTION * len(w):
                break
            proposal = refit_proposal(proposal, e, w)
            if worth < MIN_ESS_GAIN * before:
                break
        for _ in range(MAX_ADAPTATIONS):
            e, reply, ratio = self._tried(proposal, count, draws)
            log_w, k = smooth_with_shape(ratio)
            if (
                k < INFINITE_VARIANCE_K
                or not size
                or effective(log_w) > SUFFICIENT_ESS_FRACTION * count
            ):
                break
            proposal = refit_proposal(proposal, e, log_w.exp())  # few draws may have missed a tail
        return _weighed(reply.values, log_w, k)

    def _of_list(self) -> WeightedDraws:
        """Weigh draws of the server's list, and of t distributions with their weighted moments.

        Where the list has no draws in a tail of the posterior, no weight shows it, so that further
        draws are needed. They end once they agree with those before; see `ProposalMixture`. Where
        the list lacks a mode, neither shows it, so that points elsewhere follow; see `ModeSearch`.
        """
        source, draws = (
            Listed(self.guided.num_server_draws),
            [self.guided.min_draws] * len(self.rows),
        )
        _, reply, ratio = self._tried(source, PILOT_DRAWS_PER_ENTRY, draws, sets=2)
        log_w, _ = smooth_with_shape(ratio)
        draws, count = self._enough(reply, log_w.exp(), draws), self._needed(log_w)
        e, reply, ratio = self._tried(source, count, draws)
        log_w, k = smooth_with_shape(ratio)
        if self.listed is None:
            return _weighed(reply.values, log_w, k)
        draws = [max(k, MIN_DRAWS) for k in draws]  # for the tails, where the guide of z is worst
        at = source.places(len(e))
        mixture = ProposalMixture(
            self.listed, self.listed.noise[at], self.listed.log_density[at], ratio
        )
        even = float(effective(log_w)) > SUFFICIENT_ESS_FRACTION * len(e)
        values, near, doubt = reply.values, None, ""
        for _ in range(MAX_LIST_PROPOSALS):
            near, before = (
                refit_proposal(near, mixture.noise, log_w.exp(), LIST_DEGREES_OF_FREEDOM),
                log_w,
            )
            noise = self._sampled(near, len(e) + len(e) % 2)  # the middle of a list is its mean
            server, level = self._listed_at(noise)
            places = Listed(len(noise)).sample((len(noise),))
            reply = self.exchange(Request(places, draws, server=server, more=True))
            mixture = mixture.extended(near, noise, level, _ratio(reply))
            values = {n: torch.cat([v, reply.values[n]]) for n, v in values.items()}
            (log_w, k), (last, last_k) = (
                smooth_with_shape(mixture.log_weights()),
                smooth_with_shape(mixture.last()),
            )
            if last_k < FINITE_MEAN_K and float(effective(last)) > MIN_ESS_OF_ERROR:
                which = difference(values, before, last)
                doubt = f"{DIFFER} ({which})" if which else ""
            else:
                doubt = "" if even else UNCHECKED
            if k < INFINITE_VARIANCE_K and not doubt:
                break
        elsewhere = self.listed.elsewhere
        if elsewhere is None:
            return _weighed(values, log_w, k, doubt)
        # Their terms and values are the last of the exchange; as draws they have no weight.
        server, level = self._listed_at(elsewhere.noise)
        places = Listed(len(level)).sample((len(level),))
        reply = self.exchange(Request(places, draws, server=server, more=True))
        missing_mode = elsewhere.missing_mode_warning(
            _ratio(reply) + level, mixture.noise, log_w.exp()
        )
        values = {n: torch.cat([v, reply.values[n]]) for n, v in values.items()}
        none = torch.full_like(level, -torch.inf)
        return _weighed(values, torch.cat([log_w, none]), k, doubt, missing_mode)

    def _listed_at(self, noise: Tensor) -> tuple[Tensors, Tensor]:
        """Return a server state that lists draws at this noise, and their finite log densities.

        The density of extreme draws may be undefined, such as cut points equal in floating point.
        """
        assert self.listed is not None
        server, level = self.listed.listed_at(noise)
        return server, level.nan_to_num(
            nan=MIN_LOG_WEIGHT, posinf=MIN_LOG_WEIGHT, neginf=MIN_LOG_WEIGHT
        )

    def _needed(self, log_w: Tensor) -> int:
        """Return the number of draws to weigh, given log weights of few."""
        count = int(1.5 * MIN_ESS * len(log_w) / float(effective(log_w)))
        return max(self.count, min(MAX_TRIED, count))

    def _sampled(self, proposal: Any, count: int) -> Tensor:
        """Draw noise of the shared sites from a proposal."""
        with seeded(int(torch.randint(2**62, (), generator=self.common))):
            noise: Tensor = proposal.sample((count,))
        return noise

    def _tried(
        self, proposal: Any, count: int, draws: Sequence[int], sets: int = 1
    ) -> tuple[Tensor, TermsReply, Tensor]:
        """Draw noise of the shared sites from a proposal, and compute its log weights."""
        e = self._sampled(proposal, count)
        reply = self.exchange(Request(e, draws, sets))
        standard = -0.5 * (e.square() + math.log(2 * math.pi)).sum(-1)
        return e, reply, _ratio(reply) + standard - proposal.log_prob(e)

    def _enough(self, reply: TermsReply, w: Tensor, draws: Sequence[int]) -> list[int]:
        """Return the numbers of draws of z that limit the variance of log importance weights.

        Given are a reply with the variance that each client adds, weights of its draws [S], and
        numbers of draws of z. The numbers K minimize the sum of rows * K, where the variance falls
        as K^-ORDER.
        """
        noise = torch.stack([(w @ one.noise).sum() for one in reply.terms])
        part = 1 / (1 + CONVERGENCE_ORDER)
        one = (
            noise.double() * torch.tensor(draws).double() ** CONVERGENCE_ORDER
        )  # the variance of a draw
        total = (one**part * self.rows ** (1 - part)).sum()
        many = (one / self.rows) ** part * (total / MAX_ADDED_VARIANCE) ** (1 / CONVERGENCE_ORDER)
        enough: list[int] = (
            many.clamp(self.guided.min_draws, MAX_CLIENT_DRAWS).ceil().int().tolist()
        )
        return enough


def _ratio(reply: TermsReply) -> Tensor:
    """Return the log ratio of the posterior to the guide [S], up to a constant.

    Raises:
        NoUsableDraws: if no draw has a density under the posterior.
    """
    ratio = reply.terms[0].prior + sum(one.log_l.sum(1) for one in reply.terms)
    if not bool(ratio.isfinite().any()):
        raise NoUsableDraws(
            "no draw of the guide has a density under the model",
            "fit more rounds to bring the guide closer to the posterior",
        )
    return ratio.nan_to_num(nan=MIN_LOG_WEIGHT, posinf=MIN_LOG_WEIGHT, neginf=MIN_LOG_WEIGHT)


def _weighed(
    values: Tensors, log_w: Tensor, k: float, doubt: str = "", missing_mode: str = ""
) -> WeightedDraws:
    """Return weighted draws with the diagnostics of their weights."""
    weights = Weights(
        torch.tensor([k]), effective(log_w)[None], len(log_w), doubt, missing_mode=missing_mode
    )
    return WeightedDraws(values, log_w, weights)
