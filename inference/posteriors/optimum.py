"""Test, after training, of whether a normal posterior approximation maximizes the ELBO.

A normal with mean m and covariance R R' is at the optimum of the ELBO if a natural-gradient step
stays where it is. With the gradients dm and dR of the negative ELBO of all clients together,

    m_i moves by -(R R' dm)_i,    log sd_i by -(R G R')_ii / (2 sd_i^2),    G symmetric part of R'dR

the first in standard deviations (Khan and Rue, "The Bayesian Learning Rule", JMLR 2023, eq. 5, with
Price's theorem). Every gradient is a mean over antithetic pairs of draws; its standard error
measures the noise. The test does not depend on learning rates or damping.

Draws g of the shared sites are also weighted by importance,

    w_s = p(g_s) / q(g_s) prod_j 1/K sum_k p(y_j, z_jsk | g_s) / q_j(z_jsk | g_s)

which estimates the width of the exact posterior relative to q, unless the Pareto shape k of w is
too high. For this g is drawn with twice the scale of q, so that a wider posterior can be detected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.definition.elbo import (
    latent,
    log_densities,
    normal_event_size,
    observed,
    per_draw,
    traces,
    weighed,
)
from pyrofl.inference.definition.metadata import Moments, metadata_of_class
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, Stream, stream
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.posteriors.export import smooth_weights
from pyrofl.inference.posteriors.pointwise import Client
from pyrofl.inference.posteriors.proposals import effective
from pyrofl.inference.training.noise import is_unset_latent
from pyrofl.tensors import Tensors, generator, matches, times
from pyrofl.turns import synchronized

# Antithetic pairs; weighted draws of g, and of z for each.
NUM_PAIRS, NUM_DRAWS, NUM_CLIENT_DRAWS = 400, 500, 8
# Scale of the weighted draws of g, and its maximum number of variables.
PROPOSAL_SCALE, MAX_WEIGHTED_VARIABLES = 2.0, 5
MAX_ADDED_VARIANCE = 0.5  # variance of log w that the draws of z may add
# Tolerated step, in standard deviations, and its standard errors.
MAX_STEP, MAX_STEP_ERRORS = 0.1, 4
MAX_RELIABLE_K = 0.7  # Pareto k above which weights are unreliable
MAX_SHARED_VARIABLES = 200  # maximum number of shared variables
MAX_CELLS = 1_000_000  # maximum copies of rows in one run of the programs


class Normal(NamedTuple):
    """Normal posterior of the shared sites, with the names of its local tensors."""

    mean: str  # [C, n]
    root: str  # of the covariance, [C, n, n], or [C, n] of standard deviations
    sites: dict[str, int]  # number of unconstrained entries, d in total; they come first


class OptimumGap(NamedTuple):
    """Result of the test of whether a posterior maximizes the ELBO, as two texts."""

    off: str  # step to the optimum
    note: str  # width of the guide relative to the posterior


@synchronized
def optimum(method: Method, data: Federation, state: RoundState, seed: Seed) -> OptimumGap | None:
    """Test whether the posterior of the shared sites maximizes the ELBO; None if not testable.

    It costs about as much as five gradient steps of every client on all its rows.
    """
    facts = (fact for _, fact in metadata_of_class(method.metadata.tensors, Moments))
    moments = next((fact for fact in facts if fact.optimal), None)
    rows = int(data.sizes[: data.clients].max())
    if moments is None or moments.optimal is None or 2 * NUM_PAIRS * rows > MAX_CELLS:
        return None
    sites = {n: mean.numel() for n, (mean, _) in moments.compute(state.server).items()}
    if (d := sum(sites.values())) > MAX_SHARED_VARIABLES:
        return None
    normal = Normal(*moments.optimal, sites)
    spec = EvaluationSpec(seed=seed, model=method.main_view, chunk_size=1)
    some = single(method, data, state, torch.arange(data.clients), spec)
    clients = {data.names[int(i)]: (r, local, data.batch(i)) for i, r, local, _ in some}
    key = int(torch.randint(2**62, (), generator=stream(seed, Stream.TEST, state.number)))
    off = _off(method, normal, clients, key)
    is_small = (
        d <= MAX_WEIGHTED_VARIABLES and NUM_DRAWS * NUM_CLIENT_DRAWS * rows <= MAX_CELLS and not off
    )
    return OptimumGap(off, _note(method, normal, clients, key + 1) if is_small else "")


class AntitheticNoise(Messenger):
    """Messenger that draws antithetic noise of normal sites, shared by clients at shared sites."""

    def __init__(
        self, shared: str, key: int, client: str, again: int = 1, wider: float = 1.0
    ) -> None:
        """Create the random generators; set the repetitions and the scale of shared noise."""
        super().__init__()
        self.shared, self.again, self.wider = shared, again, wider
        self.log_w: Tensor | float = 0.0  # log density of standard noise over that of the wider
        self.common, self.local = generator("shared", key), generator("own", key, client)

    def _pyro_sample(self, msg: Any) -> None:
        if not is_unset_latent(msg) or not (size := normal_event_size(msg["fn"])):
            return
        fn, is_shared = msg["fn"], matches(msg["name"], self.shared)
        again, source = (self.again, self.common) if is_shared else (1, self.local)
        half = torch.randn(len(fn.mean) // again // 2, size, generator=source).to(fn.mean)
        if is_shared:
            gain = (1 - self.wider**2) / 2 * half.square().sum(-1) + size * math.log(self.wider)
            self.log_w, half = self.log_w + gain.repeat(2), self.wider * half
        noise = torch.cat([half, -half]).repeat_interleave(again, 0)  # [copies, size]
        msg["value"], msg["done"] = fn.mean + fn.stddev * noise.reshape(fn.mean.shape), True


def _said(
    method: Method, client: Client, local: Tensors, copies: int, noise: AntitheticNoise
) -> tuple[Tensor, Tensor, Any]:
    """Return log p - log q (model, guide) of client-specific and of shared sites, and a trace.

    The former are [copies].
    """
    received, _, batch = client

    def many(tensors: Mapping[str, Tensor]) -> Tensors:
        return {n: v.expand(copies, *v.shape[1:]) for n, v in tensors.items()}

    rows: Any = many({n: v for n, v in vars(batch).items() if isinstance(v, Tensor)})
    with pyro.validation_enabled(False), noise:
        q, p = traces(method.model, method.guide, many(received), local, replace(batch, **rows))
    parts = {True: batch.size.new_zeros(copies), False: batch.size.new_zeros(copies)}
    for name, site in latent(q):
        ratio = log_densities(site, p.nodes.get(name), False)[1]
        is_shared = matches(name, method.shared)
        parts[is_shared] = parts[is_shared] - per_draw(ratio, copies, False)[0]
    for _, site in observed(p):
        value = weighed(site, site["fn"].log_prob(site["value"]))
        parts[False] = parts[False] + per_draw(value, copies, False)[0]
    return parts[False], parts[True], q


def _off(method: Method, normal: Normal, clients: Mapping[str, Client], key: int) -> str:
    """Describe the site that a natural-gradient step would change most; "" for small steps."""
    total: tuple[Tensor, Tensor] | None = None
    for name, client in clients.items():
        # As many equal clients as draws, [2 PAIRS, *p].
        local = {n: v.expand(2 * NUM_PAIRS, *v.shape[1:]) for n, v in client[1].items()}
        moving = [local[n].detach().clone().requires_grad_() for n in (normal.mean, normal.root)]
        local |= dict(zip((normal.mean, normal.root), moving, strict=True))
        with torch.enable_grad():
            local_ratio, shared, _ = _said(
                method, client, local, 2 * NUM_PAIRS, AntitheticNoise(method.shared, key, name)
            )
            loss = -(local_ratio + shared / len(clients)).sum()
            grads = torch.autograd.grad(loss, moving)
        # Gradients by mean [PAIRS, n] and root, averaged over antithetic pairs.
        pairs = [v.unflatten(0, (2, NUM_PAIRS)).mean(0) for v in grads]
        total = (
            (pairs[0], pairs[1]) if total is None else (total[0] + pairs[0], total[1] + pairs[1])
        )
    assert total is not None
    d, root = sum(normal.sites.values()), next(iter(clients.values()))[1][normal.root][0]
    mean, spread = total[0][:, :d], total[1]
    if root.dim() > 1:
        root, spread = root[:d, :d], spread[:, :d, :d]
        sd = torch.linalg.vector_norm(root, dim=-1)
        inner = root.mT @ spread
        inner = (inner + inner.mT) / 2
        step = -times(root, times(root.mT, mean)) / sd  # [PAIRS, d]
        growth = -torch.einsum("ij,sjk,ik->si", root, inner, root) / (2 * sd.square())
    else:
        root, spread = root[:d], spread[:, :d]
        step, growth = -root * mean, -root * spread / 2
    changes = []
    for what, way in (("mean", step), ("sd", growth)):
        value, error = way.mean(0), way.std(0) / NUM_PAIRS**0.5
        surely = value.abs() - MAX_STEP_ERRORS * error
        at = int(surely.argmax())
        changes.append((float(surely[at]), what, float(value[at]), float(error[at]), at))
    most, what, value, error, at = max(changes)
    if not most > MAX_STEP:
        return ""
    return f"the {what} of {_site(normal, at)} by {abs(value):.2g} (+- {error:.1g}) sd"


def _note(method: Method, normal: Normal, clients: Mapping[str, Client], key: int) -> str:
    """Describe by importance weights if the guide is too narrow or too wide, else return ""."""
    copies, values = NUM_DRAWS * NUM_CLIENT_DRAWS, {}
    log_w = doubt = guide_log_w = torch.zeros(NUM_DRAWS, dtype=torch.float64)
    for i, (name, client) in enumerate(clients.items()):
        local = {n: v.expand(copies, *v.shape[1:]) for n, v in client[1].items()}  # [copies, *p]
        with torch.no_grad():
            noise = AntitheticNoise(method.shared, key, name, NUM_CLIENT_DRAWS, PROPOSAL_SCALE)
            local_ratio, shared, q = _said(method, client, local, copies, noise)
        each = local_ratio.reshape(NUM_DRAWS, NUM_CLIENT_DRAWS).double()  # [DRAWS, CLIENT_DRAWS]
        log_w = log_w + each.logsumexp(1) - math.log(NUM_CLIENT_DRAWS)  # [DRAWS]
        doubt = doubt + each.softmax(1).var(1) * NUM_CLIENT_DRAWS
        if not i:
            guide_log_w = torch.as_tensor(noise.log_w).double()
            log_w = log_w + shared.reshape(NUM_DRAWS, NUM_CLIENT_DRAWS)[:, 0].double() + guide_log_w
            values = {n: s["value"] for n, s in latent(q) if n in normal.sites}
    if not bool(log_w.isfinite().all()) or not (log_w.softmax(0) @ doubt) < MAX_ADDED_VARIANCE:
        return ""
    try:
        weights, k = smooth_weights(log_w)
    except ImportError:  # ArviZ is not installed
        return ""
    if k > MAX_RELIABLE_K:
        return f"draws of the guide miss part of the posterior, as their Pareto k is {k:.2f}"
    share, ess, odd = weights.exp(), float(effective(weights)), []
    guide = guide_log_w.softmax(0)
    for n, v in values.items():
        flat = v.reshape(NUM_DRAWS, NUM_CLIENT_DRAWS, -1)[:, 0].double()  # [DRAWS, p]
        wide, guide_sd = ((w @ (flat - w @ flat).square()).sqrt() for w in (share, guide))
        ratio = guide_sd / wide
        surely = ratio.log().abs() - 2 / (2 * ess) ** 0.5
        at = int(surely.argmax())
        if surely[at] > MAX_STEP:
            odd.append((float(surely[at]), n, float(ratio[at])))
    if not odd:
        return ""
    _, n, ratio = max(odd)
    how = "narrow" if ratio < 1 else "wide"
    return f"the guide's sd of {n} is about {abs(1 - ratio):.0%} too {how}"


def _site(normal: Normal, at: int) -> str:
    """Return the name of the site that contains a given entry of the flat mean vector."""
    for name, size in normal.sites.items():
        if at < size:
            return name
        at -= size
    raise IndexError(at)
