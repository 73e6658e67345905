"""FedWBA: particles by Stein variational gradient descent, and their Wasserstein barycenter.

Wei, Mei, Lyu, Zhang, Zhou and Sun, "Personalized Bayesian Federated Learning with Wasserstein
Barycenter Aggregation", NeurIPS 2025; Liu and Wang, "Stein Variational Gradient Descent", NeurIPS
2016; Cuturi and Doucet, "Fast Computation of Wasserstein Barycenters", ICML 2014. Posteriors are
sets of M particles, each a whole network, without a family of distributions:

    p(w_j)        = mean_m Normal(v_m, bandwidth^2 I)         kernel density of the server's v_m
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = mean_m Delta(w_jm)                        kept by the client

    client   w_jm = w_jm + step phi_m, on every minibatch, with k(u, w) = exp(-|u - w|^2 / (2 h^2))
             phi_m = mean_l [k(w_jl, w_jm) grad log p(D_j, w_jl) + grad_(w_jl) k(w_jl, w_jm)]
    server   v_m   = mean_j w_j,T_j(m), where T_j assigns the particles of client j to those of the
             server at the smallest sum of squared distances; again until no T_j changes

h^2 is the median of the squared distances over 2 log(M + 1). The last line has as its fixed points
the stationary points of the sum of squared 2-Wasserstein distances: in one dimension it averages
quantiles, so that of normal posteriors the barycenter has the mean of the means and of the standard
deviations. With M = 1 the client climbs to the mode of its posterior, and the server averages.

Use it where posteriors of clients may have several modes and M networks are not too many to send.
It assumes that M particles can cover a posterior: in many dimensions they cannot, and variances are
too small.

Departures from the paper: Adam, which starts again in every round, divides the steps, where theirs
is divided by a moving mean of squares alone; particles start near one network, at a distance of
`init_scale`, so that assignments match like with like; bandwidths of the prior are for its log
density as printed, where the authors' code adds constants against underflow. Of the paper's text we
read the first pages, and the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor
from torch.distributions import constraints

from pyrofl.arguments import Count, NotNegative, Positive, Whole, checked, described
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import Combine, get_rule
from pyrofl.inference.definition.elbo import OfGradients, elbo
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import GradientStep, Method, Phase, as_trained
from pyrofl.inference.definition.optim import adam
from pyrofl.inference.definition.programs import Likelihood, Program
from pyrofl.models import guides
from pyrofl.models.guides.correlated import split_vectors
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors

PLACE = "_place"  # auxiliary site: which particle
MAX_ITERATIONS = 100  # of the barycenter at most, as in the authors' code
SEARCH_GRID = {"lr": (0.0003, 0.001, 0.003, 0.01), "bandwidth": (0.1, 0.55, 2.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: PriorFamily = dist.Normal,
    guide: guides.Family = guides.delta,
    particles: Count = 10,
    bandwidth: Positive = 0.55,
    init_scale: Positive = 0.05,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: NotNegative = 0.003,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build FedWBA (particles of every client, aggregated by their Wasserstein barycenter).

    Args:
        net: Network; all its parameters are random, as one site "network" of D numbers, in the
            order of `net.shapes`. A posterior also has each tensor by its name.
        likelihood: Likelihood of a row, given the network's outputs.
        prior: Kernel of the prior's density; `dist.Normal` alone.
        guide: Distribution of a particle; `guides.delta` alone, as q(w_j) is a set of points.
        particles: M, of each client and of the server; a message has M D numbers.
        bandwidth: Standard deviation of the kernels of the prior; the authors' code has 0.55.
        init_scale: Standard deviation of the particles around one network before round one; equal
            particles would stay equal.
        epochs: Local epochs.
        batch: Rows in a step; None takes all.
        lr: Learning rate of Adam, which starts again in every round.
        aggregation: As in `fedavg.build`, of the particles that are assigned to one of the server;
            "mean" is the barycenter.

    Raises:
        ValueError: If `prior` or `guide` is another one.
    """
    if prior is not dist.Normal:
        raise ValueError(
            f"prior is {described(prior)}; expected dist.Normal, the kernel around the particles"
        )
    if guide is not guides.delta:
        raise ValueError(
            f"guide is {described(guide)}; expected guides.delta, as q is a set of particles"
        )
    size, combine = sum(s.numel() for s in net.shapes.values()), get_rule(aggregation)

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample a client's network from the kernel density of the server's particles."""
        with batch.clients():
            density = KernelDensity(received["v"], bandwidth)
            w = pyro.sample("network", density)  # p(w_j), [..., C, 1, D]
            weights = {
                name: pyro.deterministic(name, value, event_dim=len(net.shapes[name]))
                for name, value in split_vectors(w, net.shapes).items()
            }
            with batch.rows():
                outputs = net(weights, batch.x)
                pyro.sample("y", likelihood(outputs, batch.x), obs=batch.y)

    def select(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Select one of the client's particles; the mean of the guide is their mean."""
        cloud = local["w"].squeeze(1)  # [C, M, D]
        clients, count, _ = cloud.shape
        with batch.clients():
            listed: Any = {"is_auxiliary": True, "listed": count}
            standard = dist.Normal(cloud.new_zeros(clients, 1), 1.0)
            place = pyro.sample(PLACE, standard.mask(False), infer=listed)  # [..., C, 1]
            at = (torch.special.ndtr(place) * count).long().clamp(0, count - 1)
            client = torch.arange(clients, device=at.device)[:, None].expand_as(at)
            middle = (place == 0)[..., None]  # as of the mean of the guide
            w = torch.where(middle, cloud.mean(1)[:, None], cloud[client, at])
            pyro.sample("network", dist.Delta(w, event_dim=1))

    def every_particle(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Set the network to each of the client's particles, along the axis of draws."""
        with batch.clients():
            every = local["w"].movedim(-2, 0)  # [M, C, 1, D]
            pyro.sample("network", dist.Delta(every, event_dim=1))

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the server's particles around the network's own random draw."""
        first = torch.cat([v.flatten() for v in net.init(generator).values()])
        noise = torch.randn(particles, size, generator=generator, dtype=first.dtype)
        return {"v": first + init_scale * noise}

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's particles with those of the server."""
        return {"w": received["v"]}

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Replace the server's particles by the barycenter of those of all messages."""
        matched = match(server["v"], message["w"])
        even = torch.ones_like(cohort.size)
        return server | combine({"v": matched}, even, {"v": server["v"]})

    step = GradientStep("w", adam(lr), Stein(elbo(particles), every_particle))
    return Method(
        name="fedwba",
        init=init,
        init_client=init_client,
        model=model,
        guide=select,
        phases=(Phase((step,), epochs, batch),),
        upload=lambda received, local: {"w": local["w"]},
        aggregate=aggregate,
        views={
            "personal": as_trained,
            "global": lambda received, local: local | {"w": received["v"]},
            "ensemble": lambda received, local: [
                local | {"w": one.unsqueeze(1)} for one in local["w"].unbind(1)
            ],
        },
        metadata=Metadata(reads={"model": model, "guide": select}),
    )


class KernelDensity(TorchDistribution):
    """Mixture of normal distributions around points, with equal weights."""

    arg_constraints: ClassVar[dict[str, Any]] = {
        "loc": constraints.independent(constraints.real, 2)
    }
    support = constraints.real_vector
    has_rsample = False

    def __init__(self, loc: Tensor, scale: float, validate_args: bool | None = None) -> None:
        """Store points [..., M, D] and the standard deviation of the kernels."""
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape[:-2], loc.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> KernelDensity:
        """Return the distribution expanded to another batch shape."""
        return KernelDensity(self.loc.expand(*batch_shape, *self.loc.shape[-2:]), self.scale, False)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw a point, and a value from its kernel."""
        shape = (*sample_shape, *self.batch_shape)
        at = torch.randint(self.loc.shape[-2], shape, device=self.loc.device)
        each = self.loc.expand(*shape, *self.loc.shape[-2:])
        point = each.gather(-2, at[..., None, None].expand(*shape, 1, each.shape[-1])).squeeze(-2)
        return point + self.scale * torch.randn_like(point)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of values [..., D]."""
        count, size = self.loc.shape[-2:]
        middle = self.loc.mean(-2, keepdim=True)  # so that squares are small
        points, at = self.loc - middle, value.unsqueeze(-2) - middle
        apart = at.square().sum(-1) + points.square().sum(-1)  # [..., M]
        apart = (apart - 2 * (points @ at.mT).squeeze(-1)).clamp(min=0.0)
        constant = 0.5 * size * math.log(2 * math.pi * self.scale**2) + math.log(count)
        return (-apart / (2 * self.scale**2)).logsumexp(-1) - constant

    @property
    def mean(self) -> Tensor:
        """Mean of the points."""
        return self.loc.mean(-2)


@dataclass(frozen=True)
class Stein(OfGradients):
    """Loss whose gradient is the Stein direction -phi of all particles, divided by the rows.

    Attributes:
        loss: mean over particles of the negative log posterior density, [C].
        guide: program that sets "network" to each particle along the axis of draws.
    """

    guide: Program

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the negative log posterior per row, mean of the particles, [C]."""
        w = local["w"]
        with torch.enable_grad():
            fixed = w.detach().requires_grad_()
            value = self.loss(model, self.guide, received, local | {"w": fixed}, batch)
            (slope,) = torch.autograd.grad(value.sum(), fixed)
        value = value.detach() / batch.size
        phi = direction(fixed.detach(), -w.shape[1] * slope)
        term = -(phi * w).flatten(1).sum(1) / batch.size
        return value + term - term.detach()


def direction(w: Tensor, score: Tensor) -> Tensor:
    """Return the direction phi [C, M, D] of Stein variational gradient descent.

    Args:
        w: particles, [C, M, D].
        score: slopes of the log density at the particles.
    """
    count = w.shape[1]
    centered = w - w.mean(1, keepdim=True)
    apart = torch.cdist(centered, centered, compute_mode="donot_use_mm_for_euclid_dist").square()
    # Of equal particles every width is right: k is 1, and they do not repel each other.
    width = apart.flatten(1).median(1).values / (2 * math.log(count + 1))
    width = torch.where(width > 0, width, 1.0)[:, None, None]  # h^2
    k = (-apart / (2 * width)).exp()
    repulsion = (k.sum(2, keepdim=True) * centered - k @ centered) / width
    return (k @ score + repulsion) / count


def match(start: Tensor, particles: Tensor) -> Tensor:
    """Return the clients' particles [C, M, D], in the order of those of their barycenter.

    Their mean over clients is the barycenter, found by the fixed-point iteration from `start`.

    Args:
        start: particles from which it begins, [M, D].
        particles: of C clients, [C, M, D].

    >>> start, two = torch.tensor([[0.0], [1.0]]), torch.tensor([[[5.0], [3.0]], [[7.0], [8.0]]])
    >>> match(start, two).mean(0)
    tensor([[5.0000],
            [6.5000]])
    """
    center, order = start, None
    for _ in range(MAX_ITERATIONS):
        cost = torch.stack([torch.cdist(center.double(), one.double()) for one in particles])
        each = [linear_sum_assignment(c.square().cpu().numpy())[1] for c in cost]
        new = torch.stack([torch.from_numpy(columns) for columns in each]).to(particles.device)
        if order is not None and torch.equal(new, order):
            break
        order = new  # [C, M]
        matched = particles.gather(1, order[..., None].expand_as(particles))
        center = matched.mean(0)
    return matched
