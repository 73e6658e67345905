"""Importance sampling of shared and client-specific latent sites, to correct posterior draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Generator, Tensor

from pyrofl.inference.elbo import base_of, is_point, latent, traces
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.draws import JointNoise, Values, of_rows
from pyrofl.inference.posteriors.export import smoothed
from pyrofl.inference.posteriors.pointwise import CELLS, Client, densities
from pyrofl.inference.posteriors.proposals import (
    REACH,
    Listed,
    Predicted,
    effective,
    evenly,
    nearer,
)
from pyrofl.inference.training.noise import open_latent
from pyrofl.tensors import Tensors, matches, seeded, times

LARGEST = 2000  # maximum number of variables of a client
TURNS = 4  # maximum adaptations of the t distribution
PILOT, EVEN = 60, 0.9  # pilot values of g per entry; fraction of effective draws that suffices
HEAVY = 0.5  # Pareto k above which weights have no finite variance
GAIN = 1.25  # relative gain of the effective sample size below which adaptation stops
LEAST, MANY = 8, 64  # minimum and maximum draws of z
ENOUGH = 400  # required effective sample size
ORDER = 1.5  # noise of a mean over K evenly spaced points falls at least as K^-ORDER
MOST_TRIED = 4000  # maximum values of g, unless more draws are requested
WIDE = 20  # factor of the chunk size, as the densities are evaluated repeatedly
NOISE = 0.2  # variance of log w that the draws of z may add
STEPS, DONE = 5, 0.2  # of Newton's method, in the guide's standard deviations
MOST = 20  # maximum variables of a client for Newton's method
FLAT = 0.05  # minimum curvature, relative to the guide's
WIDER = 2.0  # scale of one draw of z in eight


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


class ClientTerms(NamedTuple):
    """One client's contribution to the importance weights of S draws of the shared sites."""

    log_l: Tensor  # log L_js, [S]
    noise: Tensor  # relative variance of L_js, [S]
    prior: Tensor  # log p(g) - log q(g), [S]
    mode: Tensor  # mode of the client's own noise given g, [S, n]
    sites: dict[str, Values]  # one draw of each latent site, [S, 1, B or 1, *p]


class Proposed(Messenger):
    """Pyro messenger that computes normal latent sites from given standard normal noise."""

    def __init__(self, shared: str, noise: Tensor, own: Tensor) -> None:
        super().__init__()
        self.shared, self.left = shared, {True: noise, False: own}

    def _pyro_sample(self, msg: Any) -> None:
        if open_latent(msg) and (size := width(msg["fn"])):
            fn, ours = msg["fn"], matches(msg["name"], self.shared)
            part, self.left[ours] = self.left[ours].tensor_split([size], -1)
            part = part.to(fn.mean).reshape(len(part), 1, 1, *fn.event_shape)
            msg["value"], msg["done"] = fn.mean + fn.stddev * part, True


def width(fn: Any) -> int:
    """Return the event size of a normal distribution; 0 for any other distribution."""
    normal = isinstance(base_of(fn), torch.distributions.Normal) and fn.batch_shape[2:] in (
        (),
        (1,),
    )
    return fn.event_shape.numel() if normal else 0


Weighed = tuple[dict[int, dict[str, Values]], list[Tensor], Weights]
"""Draws of clients, [S, 1, B or 1, *p]; log weights [S] of all together, or of each; quality."""


@dataclass(frozen=True)
class Weighing:
    """Importance sampler of the clients' posterior, with a given number of draws.

    `sources` are the clients' own random generators, `common` is that of the shared draws.
    """

    method: Method
    clients: dict[int, Client]
    sources: dict[int, Generator]
    common: Generator
    count: int
    shown: Callable[[Mapping[int, Client], int], Iterable[int]] = lambda clients, _: clients

    def apart(self) -> Weighed:
        """Return corrected posterior draws and importance weights, separately for each client."""
        drawn, made = {}, []
        for i in self.shown(self.clients, self.count):
            noise = torch.zeros(1, self.sizes[0]).double()
            mode, root = self._mode(i, noise, None)
            ratio, _, sites = self._ratios(i, noise, mode, root, self.count)
            drawn[i] = sites
            made.append(smoothed(ratio[0]))
        k, log_w = torch.tensor([k for _, k in made]), [w for w, _ in made]
        return drawn, log_w, Weights(k, torch.stack([effective(w) for w in log_w]), self.count)

    def together(self) -> Weighed:
        """Return joint posterior draws of all clients, with their importance weights.

        The draws are of shared and client-specific sites.
        """
        size, draws = self.sizes[0], dict.fromkeys(self.clients, LEAST)
        proposal, worth, count, listed = self._first_proposal, 0.0, self.count, bool(self._listed)
        modes: dict[int, Predicted] = {}
        for _ in range(TURNS if size else 0):
            # Pilot runs locate the posterior and determine the number of draws of z.
            e, terms, log_w, _ = self._tried(proposal, PILOT * (size + 2), draws, modes, sets=2)
            w, before, worth = log_w.exp(), worth, float(effective(log_w))
            draws = {i: self._enough(w @ terms[i].noise, draws[i]) for i in self.clients}
            count = max(self.count, min(MOST_TRIED, int(1.5 * ENOUGH * len(w) / worth)))
            modes = {i: Predicted.of(e, terms[i].mode) for i in self.clients}
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
            modes = {i: Predicted.of(e, terms[i].mode) for i in self.clients}
        drawn = {i: one.sites for i, one in terms.items()}
        return drawn, [log_w], Weights(torch.tensor([k]), effective(log_w)[None], count)

    def _tried(
        self,
        proposal: Any,
        count: int,
        draws: Mapping[int, int],
        modes: Mapping[int, Predicted],
        sets: int = 1,
    ) -> tuple[Tensor, dict[int, ClientTerms], Tensor, float]:
        """Draw noise of the shared sites from a proposal, and compute its importance weights."""
        with seeded(int(torch.randint(2**62, (), generator=self.common))):
            e = proposal.sample((count,))
        terms = {
            i: self.terms(i, e, draws[i], modes.get(i), sets)
            for i in self.shown(self.clients, count)
        }
        said = next(iter(terms.values())).prior + sum(one.log_l for one in terms.values())
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

    @cached_property
    def _guided(self) -> list[tuple[str, Any]]:
        """Return the guide's latent sites with their distributions, traced for one client."""
        i, client = next(iter(self.clients.items()))
        with self._alone(i):
            q, _ = traces(self.method.guide, self.method.guide, *client, 2)
        return list(latent(q))

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
        self, i: int, noise: Tensor, draws: int, near: Predicted | None = None, sets: int = 1
    ) -> ClientTerms:
        """Return a client's contribution to the importance weights of shared draws.

        There are S draws of shared sites, given as noise.
        """
        draws, sets = (draws, sets) if self.sizes[1] or self._others else (1, 1)
        step = max(1, WIDE * CELLS // (self.clients[i][2].mask.shape[1] * draws * sets))
        parts = [self._terms_of_part(i, some, near, draws, sets) for some in noise.split(step)]
        sites = [part.sites for part in parts]
        joined = {
            n: Values(torch.cat([one[n].value for one in sites]), v.rows)
            for n, v in sites[0].items()
        }
        log_l, spread, prior, modes = (torch.cat(v) for v in list(zip(*parts, strict=True))[:4])
        return ClientTerms(log_l, spread, prior, modes, joined)

    def _terms_of_part(
        self, i: int, noise: Tensor, near: Predicted | None, draws: int, sets: int
    ) -> ClientTerms:
        s = len(noise)
        mode, root = self._mode(i, noise, near)
        ratio, prior, found = self._ratios(i, noise, mode, root, draws, sets)
        highest = ratio.amax(1, keepdim=True).clamp(min=torch.finfo(ratio.dtype).min)
        weight = (ratio - highest).exp()
        mean = weight.mean(1)
        each = weight.unflatten(1, (sets, draws)).mean(2)
        spread = (each[:, 0] - each[:, -1]).square() / 2 / mean.square()
        chosen = torch.multinomial(weight.clamp(min=1e-300), 1, generator=self.sources[i])[:, 0]
        at = torch.arange(s) * draws * sets + chosen
        sites = {n: Values(v.value[at], v.rows) for n, v in found.items()}
        return ClientTerms(mean.log() + highest[:, 0], spread.nan_to_num(1.0), prior, mode, sites)

    def _ratios(
        self, i: int, noise: Tensor, mode: Tensor, root: Tensor, draws: int, sets: int = 1
    ) -> tuple[Tensor, Tensor, dict[str, Values]]:
        """Return a client's log importance weights, and all its draws of latent sites.

        In between is log p - log q of the shared sites.
        """
        s, size = len(noise), len(noise) * draws * sets
        own, wider = self._own(mode, root, draws, sets, self.sources[i])
        with torch.no_grad():
            found, q = self._densities(i, noise.repeat_interleave(draws * sets, 0), own)
        ratio = (found["log_p"] - found["log_q"]).reshape(s, -1) - wider
        sites = {
            n: Values(site["value"].expand(size, *site["value"].shape[1:]), of_rows(site))
            for n, site in latent(q)
            if not site["infer"].get("is_auxiliary")
        }
        prior = (found["shared log_p"] - found["shared log_q"]).reshape(s, -1)[:, 0]
        return ratio.nan_to_num(nan=-torch.inf), prior, sites

    def _mode(self, i: int, noise: Tensor, near: Predicted | None) -> tuple[Tensor, Tensor]:
        """Return the posterior mode of a client's noise for each shared draw, [S, n].

        Also return a root of the covariance there.
        """
        size = self.sizes[1]
        at, root = noise.new_zeros(len(noise), size), torch.eye(size).double()
        root = root.repeat(len(noise), 1, 1)
        if not 0 < size <= MOST or self._listed:
            return at, root
        at = at if near is None else near(noise)
        left = torch.arange(len(noise))
        for _ in range(STEPS if near is None else 1):
            slope, curvature = self._slopes(i, noise[left], at[left])
            values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
            root[left] = vectors * values.abs().clamp(min=FLAT).rsqrt()[:, None]
            way = times(root[left], times(root[left].mT, slope))
            length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
            at[left] += way * (REACH / length.clamp(min=REACH))
            left = left[length[:, 0] >= DONE]
            if not len(left):
                break
        return at, root

    def _slopes(self, i: int, noise: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient [S, n] and negative Hessian [S, n, n] of log p with respect to noise."""
        at = at.detach().requires_grad_()
        with torch.enable_grad():
            found, _ = self._densities(i, noise, at)
            log_p = found["log_p"] - found["log_q"] - at.square().sum(-1) / 2
            (slope,) = torch.autograd.grad(log_p.sum(), at, create_graph=True)
            rows = [
                torch.autograd.grad(one.sum(), at, retain_graph=True)[0] for one in slope.unbind(1)
            ]
        curvature = -torch.stack(rows, 1).nan_to_num(0.0, 0.0, 0.0)
        return slope.detach().nan_to_num(0.0, 0.0, 0.0), curvature

    def _own(
        self, mode: Tensor, root: Tensor, draws: int, sets: int, source: Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw a client's noise from a proposal around its mode; also return its log weight.

        The proposal is r, and the log weight log r - log q.

        Noise is [S * sets * draws, n].
        """
        s, n = mode.shape
        wide = (torch.arange(draws) % 8 == 7).repeat(sets)
        inner = torch.empty(s, sets * draws, n, dtype=torch.float64)
        for one in range(sets):
            for kind in (wide, ~wide):
                some = kind & (torch.arange(sets * draws) // draws == one)
                inner[:, some] = evenly(s, int(some.sum()), n, source)
        inner[:, wide] *= WIDER
        noise = mode[:, None] + times(root[:, None], inner)
        near = -inner.square().sum(-1) / 2
        far = near / WIDER**2 - n * math.log(WIDER)
        share = wide.double().mean()
        log_r = torch.logaddexp((1 - share).log() + near, share.log() + far)
        log_det = torch.linalg.slogdet(root).logabsdet
        return noise.flatten(0, 1), log_r - log_det[:, None] + noise.square().sum(-1) / 2

    def _densities(self, i: int, noise: Tensor, own: Tensor) -> tuple[Tensors, Any]:
        """Return log densities of a client's sites for given noise, and the guide's trace.

        The densities are [S].
        """
        method, client = self.method, self.clients[i]
        with self._alone(i), Proposed(method.shared, noise, own):
            q, p = traces(method.model, method.guide, *client, len(noise))
        zero = client[2].size.new_zeros(len(noise), 1)
        found = densities(method.shared, q, p, zero)
        return {n: v.expand(len(noise), 1)[:, 0].double() for n, v in found.items()}, q

    @contextmanager
    def _alone(self, i: int) -> Iterator[None]:
        """Sample all sites without given noise by one client's generator, as a context manager."""
        source = self.sources[i]
        others = JointNoise([source], self.method.shared, lambda: source)
        with pyro.validation_enabled(False), others:
            yield

    def _enough(self, noise: Tensor, draws: int) -> int:
        """Return the number of client draws needed to limit the variance of importance weights."""
        excess = float(noise) * len(self.clients) / NOISE
        many: float = draws * excess ** (1 / ORDER)
        return math.ceil(min(max(many, LEAST), MANY))

    def resampled(self, log_w: Tensor, draws: int) -> Tensor:
        """Return the indices of draws resampled systematically by their log weights [S]."""
        edges = log_w.exp().cumsum(0)
        at = (torch.arange(draws) + torch.rand((), generator=self.common)) / draws * edges[-1]
        order = torch.randperm(draws, generator=self.common)
        return torch.searchsorted(edges, at.to(edges)).clamp(max=len(edges) - 1)[order]
