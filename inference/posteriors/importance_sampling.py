"""Importance sampling of the shared latent sites, from terms that clients report.

The server draws the shared sites; each exchange with the clients returns their `GroupTerms`. In one
process the clients are groups of rows, in a deployment they answer messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.inference.posteriors.export import smoothed
from pyrofl.inference.posteriors.group_weights import GroupTerms
from pyrofl.inference.posteriors.guided_sites import CannotCorrect, GuidedSites
from pyrofl.inference.posteriors.proposals import Listed, effective, nearer
from pyrofl.tensors import seeded

TURNS = 4  # maximum adaptations of the t distribution
PILOT, EVEN = 60, 0.9  # pilot values of g per entry; fraction of effective draws that suffices
HEAVY = 0.5  # Pareto k above which weights have no finite variance
GAIN = 1.25  # relative gain of the effective sample size below which adaptation stops
MANY = 64  # maximum draws of z
ENOUGH = 400  # required effective sample size
ORDER = 1.5  # noise of a mean over K evenly spaced points falls at least as K^-ORDER
MOST_TRIED = 4000  # maximum values of g, unless more draws are requested
NOISE = 0.2  # variance of log w that the draws of z may add

Exchange = Callable[[Tensor, Sequence[int], int], Sequence[GroupTerms]]
"""Noise of shared draws [S, d], draws of z of each group, and sets of these -> terms of groups."""


class Weights(NamedTuple):
    """Diagnostics of importance weights: Pareto shape, effective sample size, number of draws.

    Tensors are [1] for all clients together, or [C] for each client.
    """

    k: Tensor  # Pareto shape
    ess: Tensor  # effective sample size
    tried: int  # number of weighted draws


@dataclass(frozen=True)
class Weighing:
    """Importance sampler of the shared sites.

    Attributes:
        guided: latent sites of the guide.
        rows: rows of each group of clients, with padding, [G].
        exchange: returns the terms of all groups at draws of the shared sites.
        common: random generator of the shared draws.
        count: minimum number of weighted draws.
    """

    guided: GuidedSites
    rows: Tensor
    exchange: Exchange
    common: Generator
    count: int

    def together(self) -> tuple[Tensor, Tensor, Weights]:
        """Return noise of weighted draws of the shared sites [S, d], log weights [S], diagnostics.

        The draws of the clients' own sites that belong to these are those of the last exchange.
        """
        size, listed = self.guided.sizes[0], bool(self.guided.listed)
        draws = [self.guided.least] * len(self.rows)
        proposal, worth, count = self._first_proposal, 0.0, self.count
        for _ in range(TURNS if size else 0):
            # Pilot runs locate the posterior and determine the number of draws of z.
            pilot = PILOT * (1 if listed else size + 2)
            e, terms, log_w, _ = self._tried(proposal, pilot, draws, sets=2)
            w, before, worth = log_w.exp(), worth, float(effective(log_w))
            draws = self._enough(torch.stack([(w @ one.noise).sum() for one in terms]), draws)
            count = max(self.count, min(MOST_TRIED, int(1.5 * ENOUGH * len(w) / worth)))
            if worth > EVEN * len(w) or listed:
                break
            proposal = nearer(proposal, e, w)
            if worth < GAIN * before:
                break
        for _ in range(TURNS):
            e, terms, log_w, k = self._tried(proposal, count, draws)
            if k < HEAVY or not size or listed or effective(log_w) > EVEN * count:
                break
            proposal = nearer(proposal, e, log_w.exp())  # few draws may have missed a tail
        return e, log_w, Weights(torch.tensor([k]), effective(log_w)[None], count)

    def _tried(
        self, proposal: Any, count: int, draws: Sequence[int], sets: int = 1
    ) -> tuple[Tensor, Sequence[GroupTerms], Tensor, float]:
        """Draw noise of the shared sites from a proposal, and compute its importance weights."""
        with seeded(int(torch.randint(2**62, (), generator=self.common))):
            e = proposal.sample((count,))
        terms = self.exchange(e, draws, sets)
        said = terms[0].prior + sum(one.log_l.sum(1) for one in terms)
        known = -0.5 * (e.square() + math.log(2 * math.pi)).sum(-1)
        ratio = (said + known - proposal.log_prob(e)).nan_to_num(nan=-torch.inf)
        if not bool(ratio.isfinite().any()):
            raise CannotCorrect(
                "no draw of the guide has a density under the model",
                "fit more rounds to bring the guide closer to the posterior",
            )
        return e, terms, *smoothed(ratio)

    @property
    def _first_proposal(self) -> Any:
        """Distribution of the shared noise: normal, or a list of draws that the guide selects."""
        if self.guided.listed:
            return Listed(self.guided.listed)
        zero = torch.zeros(self.guided.sizes[0], dtype=torch.float64)
        return dist.Normal(zero, 1.0).to_event(1)

    def _enough(self, noise: Tensor, draws: Sequence[int]) -> list[int]:
        """Return the numbers of draws of z that limit the variance of log importance weights.

        Given are the variance that each group's clients add together, and their draws. The numbers
        K minimize the sum of rows * K, where the variance falls as K^-ORDER.
        """
        part = 1 / (1 + ORDER)
        one = noise.double() * torch.tensor(draws).double() ** ORDER  # the variance of a draw
        total = (one**part * self.rows ** (1 - part)).sum()
        many = (one / self.rows) ** part * (total / NOISE) ** (1 / ORDER)
        enough: list[int] = many.clamp(self.guided.least, MANY).ceil().int().tolist()
        return enough
