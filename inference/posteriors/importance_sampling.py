"""Importance sampling of shared and client-specific latent sites, to correct posterior draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.inference.elbo import is_made, is_point, latent, traces
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.client_groups import (
    ClientGroup,
    Proposed,
    evaluated,
    total_rows,
    unproposed,
    width,
)
from pyrofl.inference.posteriors.draws import Values, in_plate, of_rows, placed
from pyrofl.inference.posteriors.export import smoothed
from pyrofl.inference.posteriors.pointwise import CELLS
from pyrofl.inference.posteriors.proposals import (
    REACH,
    Listed,
    Predicted,
    around,
    effective,
    nearer,
)
from pyrofl.tensors import Tensors, matches, seeded, times

LARGEST = 2000  # maximum number of variables of a client
TURNS = 4  # maximum adaptations of the t distribution
PILOT, EVEN = 60, 0.9  # pilot values of g per entry; fraction of effective draws that suffices
HEAVY = 0.5  # Pareto k above which weights have no finite variance
GAIN = 1.25  # relative gain of the effective sample size below which adaptation stops
FEW, LEAST, MANY = 3, 8, 64  # minimum draws of z, for listed draws or others; maximum
ENOUGH = 400  # required effective sample size
ORDER = 1.5  # noise of a mean over K evenly spaced points falls at least as K^-ORDER
MOST_TRIED = 4000  # maximum values of g, unless more draws are requested
WIDE = 40  # factor of the chunk size, as the densities are evaluated repeatedly
NOISE = 0.2  # variance of log w that the draws of z may add
STEPS, DONE = 5, 0.2  # of Newton's method, in the guide's standard deviations
MOST = 20  # maximum variables of a client for Newton's method
FLAT = 0.05  # minimum curvature, relative to the guide's
SHARE = 1 / 32  # probability of the wider normal of the proposal of z


class CannotCorrect(ValueError):
    """Error raised if importance sampling cannot correct the posterior draws.

    Attributes:
        reason: the reason, without the remedy.
        quiet: whether this is no error, as for point estimates.
    """

    def __init__(self, reason: str, remedy: str, quiet: bool = False) -> None:
        super().__init__(f"corrected=True is not possible: {reason}; {remedy}")
        self.reason, self.quiet = reason, quiet


class Weights(NamedTuple):
    """Diagnostics of importance weights: Pareto shape, effective sample size, number of draws.

    Tensors are [1] for all clients together, or [C] for each client.
    """

    k: Tensor  # Pareto shape
    ess: Tensor  # effective sample size
    tried: int  # number of weighted draws


class GroupTerms(NamedTuple):
    """Contribution of C clients to the importance weights of S draws of the shared sites."""

    log_l: Tensor  # log L_js, [S, C]
    noise: Tensor  # relative variance of L_js, [S, C]
    prior: Tensor  # log p(g) - log q(g), [S]
    mode: Tensor  # modes of the clients' own noise given g, [S, C, n]
    sites: dict[str, Values]  # one draw of each site, [S, C, B or 1, *p]


Weighed = tuple[list[dict[str, Values]], list[Tensor], Weights]
"""Draws of each group, [S, C, B or 1, *p]; log weights [S] of all together, or of each; quality."""


@dataclass(frozen=True)
class Weighing:
    """Importance sampler of the clients' posterior, with a given number of draws.

    `common` is the random generator of the shared draws.
    """

    method: Method
    groups: Sequence[ClientGroup]
    common: Generator
    count: int
    shown: Callable[[Sequence[ClientGroup], int], Iterable[ClientGroup]] = lambda groups, _: groups

    def apart(self) -> Weighed:
        """Return corrected draws and importance weights of each client; groups have one client."""
        drawn, made = [], []
        for group in self.shown(self.groups, self.count):
            noise = torch.zeros(1, self.sizes[0]).double()
            mode, root = self._mode(group, noise, None)
            shifts, _ = self._numbers(group, 1, 1)
            share = SHARE if self.sizes[1] else 1.0
            ratio, _, sites = self._ratios(group, noise, mode, root, shifts, self.count, share)
            drawn.append(sites)
            made.append(smoothed(ratio[0, 0]))
        k, log_w = torch.tensor([k for _, k in made]), [w for w, _ in made]
        return drawn, log_w, Weights(k, torch.stack([effective(w) for w in log_w]), self.count)

    def together(self) -> Weighed:
        """Return joint draws of shared and client-specific sites, with their importance weights."""
        size, draws = self.sizes[0], [self._least] * len(self.groups)
        proposal, worth, count, listed = self._first_proposal, 0.0, self.count, bool(self._listed)
        modes: list[Predicted | None] = [None] * len(self.groups)
        for _ in range(TURNS if size else 0):
            # Pilot runs locate the posterior and determine the number of draws of z.
            pilot = PILOT * (1 if listed else size + 2)
            e, terms, log_w, _ = self._tried(proposal, pilot, draws, modes, sets=2)
            w, before, worth = log_w.exp(), worth, float(effective(log_w))
            draws = self._enough(torch.stack([(w @ one.noise).sum() for one in terms]), draws)
            count = max(self.count, min(MOST_TRIED, int(1.5 * ENOUGH * len(w) / worth)))
            modes = [Predicted.of(e, one.mode) for one in terms]
            if worth > EVEN * len(w) or listed:
                break
            proposal = nearer(proposal, e, w)
            if worth < GAIN * before:
                break
        for _ in range(TURNS):
            e, terms, log_w, k = self._tried(proposal, count, draws, modes)
            if k < HEAVY or not size or listed or effective(log_w) > EVEN * count:
                break
            proposal = nearer(proposal, e, log_w.exp())  # few draws may have missed a tail
            modes = [Predicted.of(e, one.mode) for one in terms]
        found = Weights(torch.tensor([k]), effective(log_w)[None], count)
        return [one.sites for one in terms], [log_w], found

    def _tried(
        self,
        proposal: Any,
        count: int,
        draws: Sequence[int],
        modes: Sequence[Predicted | None],
        sets: int = 1,
    ) -> tuple[Tensor, list[GroupTerms], Tensor, float]:
        """Draw noise of the shared sites from a proposal, and compute its importance weights."""
        with seeded(int(torch.randint(2**62, (), generator=self.common))):
            e = proposal.sample((count,))
        groups = zip(self.shown(self.groups, count), draws, modes, strict=True)
        terms = [self.terms(group, e, k, near, sets) for group, k, near in groups]
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
        if self._listed:
            return Listed(self._listed)
        zero = torch.zeros(self.sizes[0], dtype=torch.float64)
        return dist.Normal(zero, 1.0).to_event(1)

    @cached_property
    def _listed(self) -> int:
        """Number of the server's draws if the guide selects one of these, else 0."""
        # A client's own noise is around 0 given such a draw, and no other proposal is near.
        counts = [site["infer"].get("listed") for _, site in self._guided]
        return next(filter(None, counts), 0)

    @property
    def _least(self) -> int:
        """Minimum number of draws of z; few if the guide draws z near its mode."""
        return FEW if self._listed else LEAST

    @cached_property
    def _guided(self) -> list[tuple[str, Any]]:
        """Return the guide's latent sites with their distributions, traced for one group."""
        group = self.groups[0]
        other = group._replace(sources=[Generator() for _ in group.ids])
        with unproposed(self.method, other):
            q, _ = traces(self.method.guide, self.method.guide, *group.client, 2)
        return list(latent(q))

    @cached_property
    def latent(self) -> dict[str, bool]:
        """Return for each latent site of the model whether it is in a plate of the program."""
        own = ((n, s) for n, s in self._guided if not s["infer"].get("is_auxiliary"))
        return {name: in_plate(site) for name, site in own}

    @cached_property
    def _normal(self) -> frozenset[str]:
        """Names of the sites that are drawn from normal distributions."""
        return frozenset(name for name, site in self._guided if width(site["fn"]))

    @cached_property
    def _others(self) -> bool:
        """Return whether any client-specific latent site has a distribution that is not normal."""
        own = (s["fn"] for n, s in self._guided if not matches(n, self.method.shared))
        return any(not is_point(fn) and not width(fn) for fn in own)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Return the numbers of normal variables: in shared and in client-specific sites."""
        sites = {n: s for n, s in self._guided if not s["infer"].get("is_auxiliary")}
        if all(is_point(s["fn"]) for _, s in self._guided):
            raise CannotCorrect(
                "the guide is a point",
                "use a guide with some spread, such as guide='mean_field'",
                quiet=True,
            )
        if all(is_point(s["fn"]) or s["infer"].get("listed") for _, s in self._guided):
            raise CannotCorrect(
                "the guide selects among draws of the server, which have no density",
                "use the draws as they are, with corrected=False",
            )
        if (variables := sum(s["value"][0, 0].numel() for s in sites.values())) > LARGEST:
            raise CannotCorrect(
                f"a client has {variables:,} variables",
                f"at most {LARGEST:,} can be weighted; reduce the model or use corrected=False",
            )
        common = {n: s["fn"] for n, s in self._guided if matches(n, self.method.shared)}
        for name, fn in common.items():
            if not is_point(fn) and not width(fn):
                raise CannotCorrect(
                    f"the guide draws the shared {name!r} from a {type(fn).__name__}",
                    "use a normal distribution or a transformed one for it",
                )
        ours = sum(map(width, common.values()))
        return ours, sum(width(s["fn"]) for _, s in self._guided) - ours

    def terms(
        self, group: ClientGroup, noise: Tensor, draws: int, near: Predicted | None, sets: int
    ) -> GroupTerms:
        """Return the contribution of a group of clients to the importance weights of shared draws.

        There are S draws of shared sites, given as noise. A client's random numbers do not depend
        on the others of its group.
        """
        draws, sets = (draws, sets) if self.sizes[1] or self._others else (1, 1)
        step = max(1, WIDE * CELLS // (group.client[2].mask.numel() * draws * sets))
        numbers = (v.split(step) for v in (noise, *self._numbers(group, len(noise), sets)))
        parts = [
            self._terms_of_part(group, e, shifts, choices, near, draws, sets)
            for e, shifts, choices in zip(*numbers, strict=True)
        ]
        sites = [part.sites for part in parts]
        joined = {
            n: Values(torch.cat([one[n].value for one in sites]), v.rows)
            for n, v in sites[0].items()
        }
        log_l, spread, prior, modes = (torch.cat(v) for v in list(zip(*parts, strict=True))[:4])
        return GroupTerms(log_l, spread, prior, modes, joined)

    def _numbers(self, group: ClientGroup, s: int, sets: int) -> tuple[Tensor, Tensor]:
        """Draw uniform numbers of clients: shifts of points [S, C, sets, 2, n], and choices [S, C].

        The points are those of `around`.
        """
        shape, exact = (s, sets, 2, self.sizes[1]), torch.float64
        shifts = [torch.rand(shape, generator=own, dtype=exact) for own in group.sources]
        choices = [torch.rand(s, generator=own, dtype=exact) for own in group.sources]
        return torch.stack(shifts, 1), torch.stack(choices, 1)

    def _terms_of_part(
        self,
        group: ClientGroup,
        noise: Tensor,
        shifts: Tensor,
        choices: Tensor,
        near: Predicted | None,
        draws: int,
        sets: int,
    ) -> GroupTerms:
        mode, root = self._mode(group, noise, near)
        # Of a single variable, evenly spaced points of a wide normal have the most exact mean.
        share = SHARE if self.sizes[1] > 1 else 1.0
        ratio, prior, found = self._ratios(group, noise, mode, root, shifts, draws, share)
        highest = ratio.amax(2, keepdim=True).clamp(min=torch.finfo(ratio.dtype).min)
        weight = (ratio - highest).exp()
        mean = weight.mean(2)
        each = weight.unflatten(2, (sets, draws)).mean(3)
        spread = (each[..., 0] - each[..., -1]).square() / 2 / mean.square()
        edges = weight.clamp(min=1e-300).cumsum(2)
        chosen = torch.searchsorted(edges, (choices * edges[..., -1])[..., None])[..., 0]
        at = torch.arange(len(noise))[:, None] * sets * draws + chosen
        client = torch.arange(len(group.ids))
        sites = {n: Values(v.value[at, client], v.rows) for n, v in found.items()}
        log_l = mean.log() + highest[..., 0]
        return GroupTerms(log_l, spread.nan_to_num(1.0), prior, mode, sites)

    def _ratios(
        self,
        group: ClientGroup,
        noise: Tensor,
        mode: Tensor,
        root: Tensor,
        shifts: Tensor,
        draws: int,
        share: float,
    ) -> tuple[Tensor, Tensor, dict[str, Values]]:
        """Return clients' log importance weights [S, C, sets * draws], and all their draws.

        In between is log p - log q of the shared sites. The draws are of latent sites and of
        deterministic ones that have no rows.
        """
        own, wider = around(mode, root, shifts, draws, share)
        s, clients, k = wider.shape
        size = s * k
        with torch.no_grad():
            every = noise.repeat_interleave(k, 0)
            found, q, p = self._evaluated(group, every, own.transpose(1, 2).flatten(0, 1))
        ratio = (found["log_p"] - found["log_q"]).unflatten(0, (s, k)).transpose(1, 2) - wider
        sites = {
            n: Values(site["value"].expand(size, clients, *site["value"].shape[2:]), of_rows(site))
            for n, site in latent(q)
            if not site["infer"].get("is_auxiliary")
        }
        sites |= {
            n: placed(n, site, size, clients)
            for n, site in p.nodes.items()
            if is_made(site) and not of_rows(site)
        }
        prior = (found["shared log_p"] - found["shared log_q"])[::k, 0]
        return ratio.nan_to_num(nan=-torch.inf), prior, sites

    def _mode(
        self, group: ClientGroup, noise: Tensor, near: Predicted | None
    ) -> tuple[Tensor, Tensor]:
        """Return modes of clients' noise at shared draws, [S, C, n], and roots of covariances."""
        size, shape = self.sizes[1], (len(noise), len(group.ids))
        at = noise.new_zeros(*shape, size)
        root = torch.eye(size).double().repeat(*shape, 1, 1)
        if not 0 < size <= MOST or self._listed:
            return at, root
        at = at if near is None else near(noise)
        left, going = torch.arange(len(noise)), torch.ones(shape, dtype=torch.bool)
        for _ in range(STEPS if near is None else 1):
            slope, curvature = self._slopes(group, noise[left], at[left])
            values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
            new = vectors * values.abs().clamp(min=FLAT).rsqrt()[..., None, :]
            now = going[left][..., None]
            root[left] = torch.where(now[..., None], new, root[left])
            way = times(new, times(new.mT, slope))
            length = torch.linalg.vector_norm(way, dim=-1, keepdim=True)
            at[left] += torch.where(now, way * (REACH / length.clamp(min=REACH)), 0.0)
            going[left] = (now & (length >= DONE))[..., 0]
            left = going.any(1).nonzero()[:, 0]
            if not len(left):
                break
        return at, root

    def _slopes(self, group: ClientGroup, noise: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient [S, C, n] and negative Hessian [S, C, n, n] of log p by the noise."""
        at = at.detach().requires_grad_()
        with torch.enable_grad():
            found, _, _ = self._evaluated(group, noise, at)
            log_p = found["log_p"] - found["log_q"] - at.square().sum(-1) / 2
            (slope,) = torch.autograd.grad(log_p.sum(), at, create_graph=True)
            rows = [
                torch.autograd.grad(one.sum(), at, retain_graph=True)[0] for one in slope.unbind(-1)
            ]
        curvature = -torch.stack(rows, -2).nan_to_num(0.0, 0.0, 0.0)
        return slope.detach().nan_to_num(0.0, 0.0, 0.0), curvature

    def _evaluated(
        self, group: ClientGroup, noise: Tensor, own: Tensor
    ) -> tuple[Tensors, Any, Any]:
        """Return log densities [S, C] at noise [S, d] and [S, C, n], with both traces."""
        return evaluated(self.method, group, Proposed(self.method.shared, self._normal, noise, own))

    def _enough(self, noise: Tensor, draws: Sequence[int]) -> list[int]:
        """Return the numbers of draws of z that limit the variance of log importance weights.

        Given are the variance that each group's clients add together, and their draws. The numbers
        K minimize the sum of rows * K, where the variance falls as K^-ORDER.
        """
        rows, part = total_rows(self.groups), 1 / (1 + ORDER)
        one = noise.double() * torch.tensor(draws).double() ** ORDER  # the variance of a draw
        total = (one**part * rows ** (1 - part)).sum()
        many = (one / rows) ** part * (total / NOISE) ** (1 / ORDER)
        enough: list[int] = many.clamp(self._least, MANY).ceil().int().tolist()
        return enough
