"""Partitioned variational inference of a network: mean-field, by local reparametrization.

The loss of a client is the expected negative log likelihood, with the outputs of linear layers and
convolutions drawn for every row, plus the divergence from its cavity in closed form. In the first
`warm_start` rounds, which are rounds of federated averaging, clients move the means alone; then
all factors start equal, from the standard deviations of the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.autograd.function import once_differentiable

from pyrofl.arguments import Count, Positive, PositiveShare, Whole, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.method import GradientStep, Phase, send_all
from pyrofl.inference.definition.optim import adam
from pyrofl.inference.definition.programs import Likelihood, Program, Supervised
from pyrofl.models.pvi.partitioned import Partitioned
from pyrofl.models.pvi.server import Covariance
from pyrofl.models.shared.activations import Activations, Sampling, is_chosen, reason_against
from pyrofl.models.shared.gaussians import Normals, draw_count
from pyrofl.models.shared.sites import LatentSite, Layout
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, add_trailing_axes, pick

# Factors of networks are far from normal: with larger steps the accuracy on digits collapses after
# some ten rounds, with 1 to 1.5 times 1 / clients it is steady.
MAX_TOTAL_DAMPING = 2.0
# Weights with a full covariance. With 383 a round of 5 clients takes 14 seconds of one core;
# work grows with their cube.
MAX_COUNT = 1_000
Optimizer = Literal["adam", "natural"]


@dataclass(frozen=True)
class MeanField(Partitioned):
    """Partitioned variational inference (PVI) whose clients maximize their local ELBO by Adam.

    That is the ELBO of their tilted distributions.

    Clients keep mean and log_root [C, n], the log standard deviations of their own normals. In warm
    rounds, of which "warm_rounds" are left, both are those of q before a client trains.
    """

    net: Network = field(kw_only=True)
    likelihood: Likelihood = field(kw_only=True)
    own_sd: Tensor = field(kw_only=True)  # of the client's own variables at the start, [n - d]
    warm_start: int = field(kw_only=True)
    optimizer: Optimizer = field(kw_only=True)

    def phases(self, steps: int, batch: int | None, lr: float) -> tuple[Phase, ...]:
        """Return the training phases of a round, given steps, batch size and learning rate."""
        if self.optimizer == "natural":
            step = GradientStep(self.moving, self.natural(steps, lr), self.loss)
            return Phase((self.begin_round,)), Phase((step,), steps, batch)
        step = GradientStep(self.moving, adam(lr), self.loss)
        return Phase((self.begin_round,)), Phase((step,), steps, batch), Phase((root_from_log,))

    # The server

    def init(self, generator: Generator, clients: int) -> Tensors:
        """Initialize the server: posterior, equal client factors, remaining warm-start rounds."""
        server = super().init(generator, clients)
        left = torch.tensor(self.warm_start, dtype=torch.int32)
        return server | ({"warm_rounds": left} if self.warm_start else {})

    def cavity(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send the posterior without the client's own factor, or whole during the warm start."""
        others = super().cavity(server, cohort)
        if "warm_rounds" not in server:
            return others
        warm = others["warm_rounds"][:, None] > 0  # [C, 1]
        q = pick(send_all(server, cohort), "shift precision")
        return others | {n: torch.where(warm, v, others[n]) for n, v in q.items()}

    def aggregate(
        self, server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Update the clients' factors by all messages; in the warm start, average the means."""
        left = server.get("warm_rounds")
        if left is None or left <= 0:
            return super().aggregate(server, message, cohort, generator)
        means, weight = message["shift"] / message["precision"], cohort.size / cohort.size.sum()
        mean = (add_trailing_axes(weight, means).to(means) * means).sum(0)  # [d]
        q = {"shift": mean * server["precision"], "precision": server["precision"]}
        each = {f"server/{n}": server[f"server/{n}"] for n in q}
        each = {f"server/{n}": (q[n] - self.prior[n]) / len(each[f"server/{n}"]) for n in q}
        each = {n: v.expand_as(server[n]).clone() for n, v in each.items()}  # [J, d]
        return server | q | each | {"warm_rounds": left - 1}

    def _adapted(self, server: Tensors, total: Tensors, clients: int) -> Tensor:
        """Return this round's adaptive damping of factor updates, bounded for networks."""
        return (
            super()
            ._adapted(server, total, clients)
            .clamp(max=min(1.0, MAX_TOTAL_DAMPING / clients))
        )

    # A client

    def init_client(self, received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's posterior; own variables get their initial standard deviation."""
        local = super().init_client(received, cohort, generator)
        root, sd = local["root"][:, : self.shared_sites.size], self.own_sd.to(local["root"])
        root = torch.cat([root, sd.expand(len(root), -1)], -1)  # [C, d + m]
        return local | {"root": root} | self.with_logs(root)

    def restart(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Reset the client's normal to the received one, unless it has trained a factor."""
        mean, root = self.normals.moments(received)
        own, moved = local["mean"].shape[-1] - mean.shape[-1], local["moved"]
        start = {"mean": mean, "root": root} | self.with_logs(root)
        at = {n: torch.cat([v, local[n][:, -own:]], -1) if own else v for n, v in start.items()}
        restarted = {n: torch.where(moved[:, None], local[n], v) for n, v in at.items()}
        return restarted | {"moved": moved | (self.regular_mask(received, batch) > 0)}

    def begin_round(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Begin a round: reset the client's normal, and compute what is constant in the loss."""
        center, _, log_det = self.cavity_normal(received, local)
        constant = {"rows/center": center, "rows/log_det": log_det}
        return self.restart(received, local, batch) | constant

    def begun(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Return the local tensors from which clients start in a regular round."""
        return local | self.restart(received, local, batch)

    def regular_mask(self, received: Tensors, batch: Batch) -> Tensor:
        """Return 1 for clients in a regular round of PVI, and 0 in a warm-start round, [C]."""
        left = received.get("warm_rounds", torch.zeros_like(batch.size))
        return (left <= 0).to(batch.size)

    def loss(
        self, _: Program, __: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the negative ELBO [C], or the negative log likelihood in the warm start."""
        bayes, cavity = self.regular_mask(received, batch), self.cavity_normal(received, local)
        log_root = local["log_root"] if "log_root" in local else local["root"].log()
        mean, variance, pull = self.divergence(local["mean"], log_root, *cavity)
        return self.activations.expected(mean, variance, batch, scale=bayes) + bayes * pull

    def divergence(
        self, mean: Tensor, log_root: Tensor, center: Tensor, precision: Tensor, log_det: Tensor
    ) -> tuple[Tensors, Tensors, Tensor]:
        """Return means and variances [C, *p], and divergences [C] of clients from their cavities.

        Of a cavity that is no distribution only the constant is unknown.
        """
        sizes = self.site_sizes
        half, *parts = MomentsAndDivergence.apply(mean, log_root, center, precision, sizes)
        means, variances = parts[: len(sizes)], parts[len(sizes) :]
        return self.named(means), self.named(variances), half - (mean.shape[-1] + log_det) / 2

    def cavity_normal(self, received: Tensors, local: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and precision of the cavity and prior, [C, n], and its log determinant."""
        shift, precision = received["shift"], received["precision"]
        if self.client_sites.size:
            shift, precision = (
                torch.cat([v, self.own_prior[n].to(v).expand(len(v), -1)], -1)
                for n, v in (("shift", shift), ("precision", precision))
            )
        if "rows/center" in local:  # computed once in a round
            return local["rows/center"], precision, local["rows/log_det"]
        return shift / precision, precision, precision.abs().log().sum(-1)

    @property
    def sites(self) -> tuple[LatentSite, ...]:
        """The network's parameters, shared ones first, as parts of a client's vectors."""
        return *self.shared_sites.sites, *self.client_sites.sites

    @cached_property
    def site_sizes(self) -> list[int]:
        """Numbers of entries of the sites."""
        return [len(site.mean) for site in self.sites]

    def named(self, parts: Sequence[Tensor]) -> Tensors:
        """Name parts of vectors, [C, len] each, by the network's parameters, [C, *p] each."""
        return {
            site.name: part.reshape((*part.shape[:-1], *site.shape))
            for site, part in zip(self.sites, parts, strict=True)
        }

    @property
    def lr(self) -> float:
        """Default learning rate of the clients' optimizer."""
        return 0.01 if self.optimizer == "adam" else super().lr

    def with_logs(self, root: Tensor) -> Tensors:
        """Return the log standard deviations if Adam trains them, else an empty dict."""
        return {"log_root": root.log()} if self.optimizer == "adam" else {}

    @property
    def moving(self) -> str:
        """Names of the local tensors that optimization steps change."""
        return "mean log_root" if self.optimizer == "adam" else "mean root"

    @cached_property
    def activations(self) -> Activations:
        """Expected log likelihood by draws of the layers' outputs."""
        assert self.draws is not None
        return Activations(self.net, self.likelihood, self.draws)

    @cached_property
    def own_prior(self) -> Tensors:
        """Natural parameters of the prior on the client's own variables."""
        return Normals(self.client_sites.size, full=False).independent(*self.client_sites.prior())


class MomentsAndDivergence(torch.autograd.Function):
    """Autograd function for the divergence of a normal from another, and for its moments.

    The divergence is 1/2 sum p (v + (mean - center)^2) - log_root, up to a constant, with
    v = exp(2 log_root). Moments are split into parts, whose gradients backward joins with those of
    the divergence. An operation on many weights takes as long as its access to memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        log_root: Tensor,
        center: Tensor,
        precision: Tensor,
        sizes: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Compute divergences [C], and parts of means and variances, of given sizes."""
        variance = (2 * log_root).exp_()
        slope = (mean - center).mul_(precision)
        squares = (mean - center).mul_(slope).addcmul_(variance, precision)
        ctx.save_for_backward(slope, variance, precision)
        ctx.sizes = sizes
        half = squares.sum(-1) / 2 - log_root.sum(-1)
        return half, *mean.split(sizes, -1), *variance.split(sizes, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients by mean and log_root."""
        (slope, variance, precision), (scale, *parts) = ctx.saved_tensors, grads
        scale, sizes, many = scale[:, None], ctx.sizes, len(ctx.sizes)
        of_mean = joined_gradient(parts[:many], slope, scale, sizes)
        by_variance = joined_gradient(parts[many:], precision, scale / 2, sizes)
        of_log = torch.addcmul(-scale, by_variance, variance, value=2, out=by_variance)
        return of_mean, of_log, None, None, None


def joined_gradient(
    parts: Sequence[Tensor], more: Tensor, scale: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Return gradients of parts [C, len], joined, plus scale [C, 1] times a vector [C, n]."""
    whole = torch.empty_like(more)
    pieces = (v.split(sizes, -1) for v in (more, whole))
    for part, piece, out in zip(parts, *pieces, strict=True):
        torch.addcmul(part, piece, scale, out=out)
    return whole


def root_from_log(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
    """Return the standard deviations, computed from their trained logarithms."""
    return {"root": local["log_root"].exp()}


@checked
def network_pvi(
    model: Supervised,
    sites: tuple[Layout, Layout],
    *,
    covariance: Covariance,
    is_random: bool,
    sampling: Sampling,
    warm_start: Whole | None,
    damping: PositiveShare | None,
    init_scale: Positive,
    num_particles: Count | None,
    optimizer: Optimizer | None,
) -> Partitioned:
    """Return PVI of a network in which some parameters are shared and others are the clients' own.

    The model is one of a network, and other args are those of `pvi.build`; without `is_random`
    clients move the means alone.

    Raises:
        ValueError: if num_particles is odd, or sampling, warm_start or optimizer do not suit the
            rest.
    """
    net, (shared_sites, client_sites) = model.net, sites
    fan_in = {n: net.fan_in(n) for n in net.shapes}
    width = [
        init_scale * torch.full_like(s.mean, fan_in[s.name]).rsqrt()
        for s in (*shared_sites.sites, *client_sites.sites)
    ]
    shared, own = torch.cat([torch.zeros(0), *width]).split([shared_sites.size, client_sites.size])

    def start(generator: Generator) -> tuple[Tensor, Tensor]:
        center = shared_sites.joined(net.init(generator))
        return center, shared.to(center)

    if covariance == "full" and shared_sites.size + client_sites.size > MAX_COUNT:
        raise ValueError(
            f"a full covariance of {shared_sites.size + client_sites.size} weights; expected at "
            f"most {MAX_COUNT}, as work grows with their cube, or covariance='diagonal' "
            "(of virtual: guide mean_field)"
        )
    why = ""
    if not is_random:
        why = "the guide is delta"
    elif covariance != "diagonal":
        why = f"covariance is {covariance!r}"
    elif not all(bool(side.each("exact").all()) for side in sites):
        why = "prior is not a normal with fixed moments, such as dist.Normal(0.0, 1.0)"
    why = why or reason_against(net)
    if is_chosen(sampling, why):
        draws = draw_count(num_particles or 2, shared_sites.size + client_sites.size, covariance)
        rounds = 5 if warm_start is None else warm_start
        return MeanField(
            model,
            *sites,
            covariance,
            draws,
            damping,
            start,
            net=net,
            likelihood=model.likelihood,
            own_sd=own,
            warm_start=rounds,
            optimizer=optimizer or "adam",
        )
    why = why or "sampling is 'weights'"
    if optimizer == "adam":
        raise ValueError(f"optimizer is 'adam', but {why}; use optimizer='natural'")
    if warm_start:
        raise ValueError(f"warm_start is {warm_start}, but {why}; use warm_start=0")
    size = shared_sites.size + client_sites.size
    num_draws = draw_count(num_particles or 8, size, covariance) if is_random else None
    return Partitioned(model, *sites, covariance, num_draws, damping, start)
