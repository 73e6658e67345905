"""Importance weights at clients: their marginal likelihoods at draws of the shared sites."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrofl.inference.definition.elbo import is_deterministic, latent
from pyrofl.inference.definition.method import Method
from pyrofl.inference.posteriors.client_groups import ClientGroup, GivenNoise, log_densities_at
from pyrofl.inference.posteriors.draws import Values, is_per_row, with_draw_axes
from pyrofl.inference.posteriors.guided_sites import GuidedSites
from pyrofl.inference.posteriors.pointwise import MAX_CELLS
from pyrofl.inference.posteriors.proposals import MAX_MODE_STEP, ModeRegression, draw_around_modes
from pyrofl.tensors import Tensors, matches, times

CHUNK_FACTOR = 40  # factor of the chunk size, as the densities are evaluated repeatedly
NEWTON_STEPS, NEWTON_TOLERANCE = 5, 0.2  # of Newton's method, in the guide's standard deviations
MAX_NEWTON_VARIABLES = 20  # maximum variables of a client for Newton's method
MIN_RELATIVE_CURVATURE = 0.05  # minimum curvature, relative to the guide's
# Least fall of log p at `MAX_MODE_STEP` sds, where a normal one falls by 8; doublings.
MIN_LOG_DENSITY_DROP, MAX_DOUBLINGS = 2.0, 4
WIDER_NORMAL_PROBABILITY = 1 / 32  # probability of the wider normal of the proposal of z


class GroupTerms(NamedTuple):
    """Contribution of C clients to the importance weights of S draws of the shared sites."""

    log_l: Tensor  # log L_js, [S, C]
    noise: Tensor  # relative variance of L_js, [S, C]
    prior: Tensor  # log p(g) - log q(g), [S]


@dataclass
class GroupImportanceSampler:
    """Importance sampler of the own sites of a group of clients, given draws of the shared ones.

    A client's random numbers do not depend on the others of its group.

    Attributes:
        method: as trained.
        group: the clients, with their rows.
        guided: latent sites of the guide.
        near: predicts modes of the clients' noise from those of the last exchange, if any.
        sites: one draw of each site for each shared draw, of the last exchange and of those that it
            adds to, [S, C, B or 1, *p].
    """

    method: Method
    group: ClientGroup
    guided: GuidedSites
    near: ModeRegression | None = None
    sites: dict[str, Values] = field(default_factory=dict)

    def weigh_single_client(self, count: int) -> Tensor:
        """Draw all sites of a single client that shares none, and return log weights [S]."""
        noise = torch.zeros(1, self.guided.normal_counts[0]).double()
        mode, root = self._mode(noise)
        shifts, _ = self._uniform_numbers(1, 1)
        share = WIDER_NORMAL_PROBABILITY if self.guided.normal_counts[1] else 1.0
        ratio, _, self.sites = self._log_importance_weights(noise, mode, root, shifts, count, share)
        return ratio[0, 0]

    def together(self, noise: Tensor, draws: int, sets: int, more: bool = False) -> GroupTerms:
        """Return the group's contribution to the importance weights of shared draws.

        Args:
            noise: S draws of the shared sites, as noise, [S, d].
            draws: draws of the own sites for each of these, in each set.
            sets: sets of draws; of two, the relative variance of each L_js is known.
            more: whether the draws of the sites are added to those of the exchange before.
        """
        guided = self.guided
        draws, sets = (
            (draws, sets) if guided.normal_counts[1] or guided.has_nonnormal_sites else (1, 1)
        )
        step = max(
            1, CHUNK_FACTOR * MAX_CELLS // (self.group.client[2].mask.numel() * draws * sets)
        )
        numbers = (v.split(step) for v in (noise, *self._uniform_numbers(len(noise), sets)))
        each = [
            self._terms_at_draws(e, shifts, choices, draws, sets)
            for e, shifts, choices in zip(*numbers, strict=True)
        ]
        parts, modes, sites = zip(*each, strict=True)
        sites = (self.sites, *sites) if more else sites
        self.sites = {
            n: Values(torch.cat([one[n].value for one in sites]), v.rows)
            for n, v in sites[0].items()
        }
        if not guided.num_server_draws:
            self.near = ModeRegression.of(noise, torch.cat(modes))
        return GroupTerms(*(torch.cat(v) for v in zip(*parts, strict=True)))

    def shared_values(self) -> Tensors:
        """Return the draws of the shared sites, [S, *p]; of a plate, all places."""
        return {
            n: v.value[:, 0] if self.guided.in_plate_by_site.get(n) else v.value[:, 0, 0]
            for n, v in self.sites.items()
            if matches(n, self.method.shared)
        }

    def _uniform_numbers(self, s: int, sets: int) -> tuple[Tensor, Tensor]:
        """Draw uniform numbers of clients: shifts of points [S, C, sets, 2, n], and choices [S, C].

        The points are those of `draw_around_modes`.
        """
        shape, exact = (s, sets, 2, self.guided.normal_counts[1]), torch.float64
        shifts = [
            torch.rand(shape, generator=generator, dtype=exact)
            for generator in self.group.generators
        ]
        choices = [
            torch.rand(s, generator=generator, dtype=exact) for generator in self.group.generators
        ]
        return torch.stack(shifts, 1), torch.stack(choices, 1)

    def _terms_at_draws(
        self, noise: Tensor, shifts: Tensor, choices: Tensor, draws: int, sets: int
    ) -> tuple[GroupTerms, Tensor, dict[str, Values]]:
        """Return terms, modes [S, C, n] and one draw of each site, at some of the shared draws."""
        mode, root = self._mode(noise)
        # Of a single variable, evenly spaced points of a wide normal have the most exact mean.
        share = WIDER_NORMAL_PROBABILITY if self.guided.normal_counts[1] > 1 else 1.0
        ratio, prior, site_draws = self._log_importance_weights(
            noise, mode, root, shifts, draws, share
        )
        highest = ratio.amax(2, keepdim=True).clamp(min=torch.finfo(ratio.dtype).min)
        weight = (ratio - highest).exp()
        mean = weight.mean(2)  # [S, C]
        each = weight.unflatten(2, (sets, draws)).mean(3)  # [S, C, sets]
        spread = (each[..., 0] - each[..., -1]).square() / 2 / mean.square()
        edges = weight.clamp(min=1e-300).cumsum(2)
        chosen = torch.searchsorted(edges, (choices * edges[..., -1])[..., None])[..., 0]  # [S, C]
        at = torch.arange(len(noise))[:, None] * sets * draws + chosen  # [S, C]
        client = torch.arange(len(self.group.ids))
        sites = {n: Values(v.value[at, client], v.rows) for n, v in site_draws.items()}
        log_l = mean.log() + highest[..., 0]
        return GroupTerms(log_l, spread.nan_to_num(1.0), prior), mode, sites

    def _log_importance_weights(
        self, noise: Tensor, mode: Tensor, root: Tensor, shifts: Tensor, draws: int, share: float
    ) -> tuple[Tensor, Tensor, dict[str, Values]]:
        """Return clients' log importance weights [S, C, sets * draws], and all their draws.

        In between is log p - log q of the shared sites. The draws are of latent sites and of
        deterministic ones that have no rows.
        """
        proposals, wider = draw_around_modes(mode, root, shifts, draws, share)
        s, clients, k = wider.shape
        size = s * k
        with torch.no_grad():
            every = noise.repeat_interleave(k, 0)  # [S k, d], for proposals [S k, C, n]
            log_densities, q, p = self._log_densities(
                every, proposals.transpose(1, 2).flatten(0, 1)
            )
        ratio = (log_densities["log_p"] - log_densities["log_q"]).unflatten(0, (s, k)).transpose(
            1, 2
        ) - wider
        prior = (log_densities["shared log_p"] - log_densities["shared log_q"])[::k, 0]
        return (
            ratio.nan_to_num(nan=-torch.inf, posinf=-torch.inf),
            prior,
            site_draws_of_traces(q, p, size, clients),
        )

    def _mode(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return modes of clients' noise at shared draws, [S, C, n], and roots of covariances.

        A step to a point without a density is halved, and one that was not tried is not made then.
        """
        size, shape = self.guided.normal_counts[1], (len(noise), len(self.group.ids))
        at = noise.new_zeros(*shape, size)
        root = torch.eye(size).double().repeat(*shape, 1, 1)
        if not 0 < size <= MAX_NEWTON_VARIABLES:
            return at, root
        at = at if self.near is None else self.near(noise).nan_to_num(0.0, 0.0, 0.0)
        last, is_step_halved = at.clone(), torch.zeros(shape, dtype=torch.bool)
        left, is_unconverged = torch.arange(len(noise)), torch.ones(shape, dtype=torch.bool)
        for _ in range(NEWTON_STEPS if self.near is None else 1):
            slope, curvature, has_density = self._gradient_and_hessian(noise[left], at[left])
            values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
            new = vectors * values.abs().clamp(min=MIN_RELATIVE_CURVATURE).rsqrt()[..., None, :]
            now = (is_unconverged[left] & has_density)[..., None]
            back = (is_unconverged[left] & ~has_density)[..., None]
            root[left] = torch.where(now[..., None], new, root[left])
            way = times(new, times(new.mT, slope))
            length = torch.linalg.vector_norm(way, dim=-1, keepdim=True)
            step = torch.where(now, way * (MAX_MODE_STEP / length.clamp(min=MAX_MODE_STEP)), 0.0)
            step = torch.where(back, (last[left] - at[left]) / 2, step)
            last[left] = torch.where(now, at[left], last[left])
            at[left] += step.nan_to_num(0.0, 0.0, 0.0)
            is_step_halved[left] |= back[..., 0]
            is_unconverged[left] = (back | (now & (length >= NEWTON_TOLERANCE)))[..., 0]
            left = is_unconverged.any(1).nonzero()[:, 0]
            if not len(left):
                break
        at = torch.where((is_unconverged & is_step_halved)[..., None], last, at)
        return at, root if self.guided.num_server_draws else self._widen_roots(noise, at, root)

    def _widen_roots(self, noise: Tensor, mode: Tensor, root: Tensor) -> Tensor:
        """Return roots [S, C, n, n] whose columns reach where the density is much lower.

        The curvature at a mode does not show long tails, as those of a U-shaped density.
        """
        root = root.clone()
        with torch.no_grad():
            height = self._log_p(noise, mode)
            for i in range(mode.shape[-1]):
                left = torch.arange(len(noise))
                for _ in range(MAX_DOUBLINGS):
                    off = MAX_MODE_STEP * root[left, :, :, i]
                    ends = (self._log_p(noise[left], mode[left] + s * off) for s in (-1, 1))
                    highest = torch.maximum(*ends).nan_to_num(nan=-torch.inf)
                    short = highest > height[left] - MIN_LOG_DENSITY_DROP
                    if not bool(short.any()):
                        break
                    root[left, :, :, i] *= torch.where(short, 2.0, 1.0)[..., None]
                    left = left[short.any(1)]
        return root

    def _log_p(self, noise: Tensor, at: Tensor) -> Tensor:
        """Return the clients' log density [S, C] at noise [S, d] and [S, C, n]."""
        log_densities, _, _ = self._log_densities(noise, at)
        return log_densities["log_p"] - log_densities["log_q"] - at.square().sum(-1) / 2

    def _gradient_and_hessian(self, noise: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradient [S, C, n] and negative Hessian [S, C, n, n] of log p by the noise.

        The third result is whether log p is finite, bool [S, C].
        """
        at = at.detach().requires_grad_()
        with torch.enable_grad():
            log_p = self._log_p(noise, at)
            (slope,) = torch.autograd.grad(log_p.sum(), at, create_graph=True)
            rows = [
                torch.autograd.grad(one.sum(), at, retain_graph=True)[0] for one in slope.unbind(-1)
            ]
        curvature = -torch.stack(rows, -2).nan_to_num(0.0, 0.0, 0.0)
        return slope.detach().nan_to_num(0.0, 0.0, 0.0), curvature, log_p.detach().isfinite()

    def _log_densities(self, noise: Tensor, client_noise: Tensor) -> tuple[Tensors, Any, Any]:
        """Return log densities [S, C] at noise [S, d] and [S, C, n], with both traces."""
        proposed = GivenNoise(self.method.shared, self.guided.normal_sites, noise, client_noise)
        return log_densities_at(self.method, self.group, proposed)


def site_draws_of_traces(q: Any, p: Any, size: int, clients: int) -> dict[str, Values]:
    """Return draws of latent sites and of deterministic ones without rows, from both traces."""
    sites = {
        n: Values(site["value"].expand(size, clients, *site["value"].shape[2:]), is_per_row(site))
        for n, site in latent(q)
        if not site["infer"].get("is_auxiliary")
    }
    deterministic = {
        n: site for n, site in p.nodes.items() if is_deterministic(site) and not is_per_row(site)
    }
    return sites | {n: with_draw_axes(n, site, size, clients) for n, site in deterministic.items()}
