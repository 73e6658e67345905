"""Importance weights of what clients share, and of what each has for itself; see `corrected`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Generator, Tensor

from pyrofl.inference.elbo import is_point, latent, traces
from pyrofl.inference.loop.noise import open_latent
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.draws import JointNoise, Values, of_rows
from pyrofl.inference.posteriors.export import smoothed
from pyrofl.inference.posteriors.pointwise import CELLS, Client, densities
from pyrofl.tensors import Tensors, matches, seeded, times

LARGEST = 2000  # variables of a client that are weighted
TURNS, FREEDOM = 4, 5.0  # of the t distribution: times that it is adapted, degrees of freedom
PILOT, EVEN = 100, 0.9  # values of g tried for each entry; share that is good enough
FEW, MANY = 16, 64  # draws of z to begin with, and most of them
WIDE = 20  # times as many as other draws, as they are looked at over and over
NOISE = 0.2  # variance of log w that the draws of z may add
STEPS, REACH, DONE = 5, 4.0, 0.05  # of Newton's method, in the guide's standard deviations
MOST = 20  # variables of a client that it is tried with
FLAT = 0.05  # least curvature, beside the guide's
SHARE, WIDER = 0.25, 2.0  # of the draws of z, so much farther from the mode


class Weights(NamedTuple):
    """How far weighted draws can be trusted: all together, [1], or those of each client, [C]."""

    k: Tensor  # Pareto shape
    ess: Tensor  # as many draws of the posterior they are worth
    tried: int  # of so many


class Told(NamedTuple):
    """What a client says of S values of g."""

    log_l: Tensor  # log L_js, [S]
    noise: Tensor  # relative variance of the ratio of one z, [S]
    prior: Tensor  # log p(g) - log q(g), [S]
    sites: dict[str, Values]  # one draw of each latent site, [S, 1, B or 1, *p]


class Proposed(Messenger):
    """Give normal sites their noise, in the order of the sites: shared ones [S, d], all others."""

    def __init__(self, shared: str, noise: Tensor, own: Tensor) -> None:
        """Take the patterns of shared sites."""
        super().__init__()
        self.shared, self.left = shared, {True: noise, False: own}

    def _pyro_sample(self, msg: Any) -> None:
        if open_latent(msg) and (size := width(msg["fn"])):
            fn, ours = msg["fn"], matches(msg["name"], self.shared)
            part, self.left[ours] = self.left[ours].tensor_split([size], -1)
            part = part.to(fn.mean).reshape(len(part), 1, 1, *fn.event_shape)
            msg["value"], msg["done"] = fn.mean + fn.stddev * part, True


def width(fn: Any) -> int:
    """Return the number of entries of a normal distribution of a client; 0 of any other."""
    base = fn
    while isinstance(base, (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)):
        base = base.base_dist
    normal = isinstance(base, torch.distributions.Normal) and fn.batch_shape[2:] in ((), (1,))
    return fn.event_shape.numel() if normal else 0


Weighed = tuple[dict[int, dict[str, Values]], list[Tensor], Weights]
"""What clients drew, [S, 1, B or 1, *p]; log weights [S] of all together, or of each; how good."""


@dataclass(frozen=True)
class Weighing:
    """Weigh `count` draws of clients, each with random numbers of its own, and common ones."""

    method: Method
    clients: dict[int, Client]
    sources: dict[int, Generator]
    common: Generator
    count: int

    def apart(self) -> Weighed:
        """Weigh the draws of each client by themselves."""
        drawn, made = {}, []
        for i in self.clients:
            ratio, _, sites = self._ratios(i, torch.zeros(1, self.sizes[0]).double(), self.count)
            drawn[i] = sites
            made.append(smoothed(ratio[0]))
        k, log_w = torch.tensor([k for _, k in made]), [w for w, _ in made]
        return drawn, log_w, Weights(k, torch.stack([effective(w) for w in log_w]), self.count)

    def together(self) -> Weighed:
        """Weigh what all clients share."""
        size, draws = self.sizes[0], dict.fromkeys(self.clients, FEW)
        normal = dist.Normal(torch.zeros(size, dtype=torch.float64), 1.0).to_event(1)
        proposal = normal
        for _ in range(TURNS if size else 0):
            # To see where to look, and how many draws of z are needed; then in earnest.
            e, told, log_w, _ = self._tried(proposal, PILOT * (size + 2), draws)
            w = log_w.exp()
            draws = {i: self._enough(w @ told[i].noise) for i in self.clients}
            if effective(log_w) > EVEN * len(w):
                break
            proposal = _nearer(proposal, e, w)
        _, told, log_w, k = self._tried(proposal, self.count, draws)
        drawn = {i: one.sites for i, one in told.items()}
        return drawn, [log_w], Weights(torch.tensor([k]), effective(log_w)[None], self.count)

    def _tried(
        self, proposal: Any, count: int, draws: dict[int, int]
    ) -> tuple[Tensor, dict[int, Told], Tensor, float]:
        """Return noise of a proposal, what clients say of it, its log weights and their shape."""
        with seeded(int(torch.randint(2**62, (), generator=self.common))):
            e = proposal.sample((count,))
        told = {i: self.told(i, e, draws[i]) for i in self.clients}
        said = next(iter(told.values())).prior + sum(one.log_l for one in told.values())
        known = -0.5 * (e.square() + math.log(2 * math.pi)).sum(-1)
        ratio = (said + known - proposal.log_prob(e)).nan_to_num(nan=-torch.inf)
        if not bool(ratio.isfinite().any()):
            raise ValueError(
                "no draw of the guide is possible under the model, so none can be corrected; "
                "expected a run of more rounds"
            )
        return e, told, *smoothed(ratio)

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Numbers of entries of normal sites: those that clients share, and a client's own.

        Raises:
            ValueError: if a client has too many variables, the guide is a point, or shared sites
                are not normal.
        """
        i, client = next(iter(self.clients.items()))
        with self._alone(i):
            q, _ = traces(self.method.guide, self.method.guide, *client, 2)
        sites = {n: s for n, s in latent(q) if not s["infer"].get("is_auxiliary")}
        if all(is_point(s["fn"]) for _, s in latent(q)):
            raise ValueError(
                "corrected=True, and the guide is a point; expected one with some spread, such as "
                "guide='mean_field', whose draws can be weighted"
            )
        if (variables := sum(s["value"][0, 0].numel() for s in sites.values())) > LARGEST:
            raise ValueError(
                f"corrected=True, and a client has {variables:,} variables; expected at most "
                f"{LARGEST:,}, as draws of more are never close enough to be weighted"
            )
        common = {n: s["fn"] for n, s in latent(q) if matches(n, self.method.shared)}
        for name, fn in common.items():
            if not is_point(fn) and not width(fn):
                raise ValueError(
                    f"corrected=True, and the guide draws the shared {name!r} from a "
                    f"{type(fn).__name__}; expected a normal distribution, or what is made of one"
                )
        ours = sum(map(width, common.values()))
        return ours, sum(width(s["fn"]) for _, s in latent(q)) - ours

    def told(self, i: int, noise: Tensor, draws: int) -> Told:
        """Ask a client about values of g that come of noise [S, d], by so many draws of z each."""
        step = max(1, WIDE * CELLS // (self.clients[i][2].mask.shape[1] * draws))
        parts = [self._told(i, some, draws) for some in noise.split(step)]
        log_l, spread, prior, sites = zip(*parts, strict=True)
        joined = {
            n: Values(torch.cat([one[n].value for one in sites]), v.rows)
            for n, v in sites[0].items()
        }
        return Told(torch.cat(log_l), torch.cat(spread), torch.cat(prior), joined)

    def _told(self, i: int, noise: Tensor, draws: int) -> Told:
        s = len(noise)
        ratio, prior, found = self._ratios(i, noise, draws)
        highest = ratio.amax(1, keepdim=True).clamp(min=torch.finfo(ratio.dtype).min)
        weight = (ratio - highest).exp()
        mean = weight.mean(1)
        spread = (weight.square().mean(1) / mean.square() - 1) * draws / max(draws - 1, 1)
        chosen = torch.multinomial(weight.clamp(min=1e-300), 1, generator=self.sources[i])[:, 0]
        at = torch.arange(s) * draws + chosen
        sites = {n: Values(v.value[at], v.rows) for n, v in found.items()}
        spread = spread.nan_to_num(0.0, draws, 0.0)  # its most, where one draw has all the weight
        return Told(mean.log() + highest[:, 0], spread, prior, sites)

    def _ratios(
        self, i: int, noise: Tensor, draws: int
    ) -> tuple[Tensor, Tensor, dict[str, Values]]:
        """Return log weights [S, draws] of z, log p(g) - log q(g) [S], and all that was drawn."""
        s, size = len(noise), len(noise) * draws
        own, wider = self._own(*self._mode(i, noise), draws, self.sources[i])
        with torch.no_grad():
            found, q = self._densities(i, noise.repeat_interleave(draws, 0), own)
        ratio = (found["log_p"] - found["log_q"]).reshape(s, draws) - wider
        sites = {
            n: Values(site["value"].expand(size, *site["value"].shape[1:]), of_rows(site))
            for n, site in latent(q)
            if not site["infer"].get("is_auxiliary")
        }
        prior = (found["shared log_p"] - found["shared log_q"]).reshape(s, draws)[:, 0]
        return ratio.nan_to_num(nan=-torch.inf), prior, sites

    def _mode(self, i: int, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mode of a client's own noise given g, [S, n], and a root of its variance."""
        size = self.sizes[1]
        at, root = noise.new_zeros(len(noise), size), torch.eye(size).double()
        if not 0 < size <= MOST:
            return at, root.expand(len(noise), -1, -1)
        for _ in range(STEPS):
            at = at.detach().requires_grad_()
            with torch.enable_grad():
                found, _ = self._densities(i, noise, at)
                log_p = found["log_p"] - found["log_q"] - at.square().sum(-1) / 2
                (slope,) = torch.autograd.grad(log_p.sum(), at, create_graph=True)
                rows = [
                    torch.autograd.grad(one.sum(), at, retain_graph=True)[0]
                    for one in slope.unbind(1)
                ]
            curvature = -torch.stack(rows, 1).nan_to_num(0.0, 0.0, 0.0)
            values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
            root = vectors * values.abs().clamp(min=FLAT).rsqrt()[:, None]
            way = times(root, times(root.mT, slope.detach().nan_to_num(0.0, 0.0, 0.0)))
            length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
            at = at.detach() + way * (REACH / length.clamp(min=REACH))
            if bool((length < DONE).all()):
                break
        return at, root

    def _own(
        self, mode: Tensor, root: Tensor, draws: int, source: Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw a client's own noise, [S * draws, n], and its log density beside the guide's."""
        s, n = mode.shape
        wide = int(draws * SHARE)
        inner = torch.randn(s, draws, n, generator=source).double()
        inner[:, :wide] *= WIDER
        noise = mode[:, None] + times(root[:, None], inner)
        near = -inner.square().sum(-1) / 2
        far = near / WIDER**2 - n * math.log(WIDER)
        shares = torch.tensor([1 - wide / draws, wide / draws]).double().log()
        log_r = torch.logaddexp(shares[0] + near, shares[1] + far)
        log_det = torch.linalg.slogdet(root).logabsdet
        return noise.flatten(0, 1), log_r - log_det[:, None] + noise.square().sum(-1) / 2

    def _densities(self, i: int, noise: Tensor, own: Tensor) -> tuple[Tensors, Any]:
        """Return log densities [S] of a client's draws that come of noise, and their trace."""
        method, client = self.method, self.clients[i]
        with self._alone(i), Proposed(method.shared, noise, own):
            q, p = traces(method.model, method.guide, *client, len(noise))
        zero = client[2].size.new_zeros(len(noise), 1)
        found = densities(method.shared, q, p, zero)
        return {n: v.expand(len(noise), 1)[:, 0].double() for n, v in found.items()}, q

    @contextmanager
    def _alone(self, i: int) -> Iterator[None]:
        """Let a client draw what is not given."""
        source = self.sources[i]
        others = JointNoise([source], self.method.shared, lambda: source)
        with pyro.validation_enabled(False), others:
            yield

    def _enough(self, noise: Tensor) -> int:
        """Return how many draws of z make a client's part of the variance small enough."""
        return int((noise * len(self.clients) / NOISE).ceil().clamp(4, MANY))

    def resampled(self, log_w: Tensor, draws: int) -> Tensor:
        """Draw places by their weights [S], evenly: each as often as it counts, up to one."""
        edges = log_w.exp().cumsum(0)
        at = (torch.arange(draws) + torch.rand((), generator=self.common)) / draws * edges[-1]
        order = torch.randperm(draws, generator=self.common)
        return torch.searchsorted(edges, at.to(edges)).clamp(max=len(edges) - 1)[order]


def effective(log_w: Tensor) -> Tensor:
    """Return how many draws normalised log weights [S] are worth."""
    return 1 / log_w.exp().square().sum()


def _nearer(proposal: Any, e: Tensor, w: Tensor) -> Any:
    """Return a t distribution whose moments are nearer to those of weighted noise [S, d]."""
    size, mean = e.shape[1], w @ e
    spread = ((e - mean) * w[:, None]).mT @ (e - mean)
    old_mean, old_root = torch.zeros_like(mean), torch.eye(size, dtype=e.dtype)
    if isinstance(proposal, dist.MultivariateStudentT):
        old_mean, old_root = proposal.loc, proposal.scale_tril
    # Few draws know little of a covariance.
    share = float(effective(w.log()) / (effective(w.log()) + 3 * size))
    root = torch.linalg.cholesky(torch.lerp(old_root @ old_root.mT, spread, share))
    loc = torch.lerp(old_mean, mean, share)
    return dist.MultivariateStudentT(e.new_tensor(FREEDOM), loc, root)
