"""Pyro programs that sample the outputs of layers with dropout posteriors, and their loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor
from torch.distributions import kl_divergence

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.prior_conversion import probe_prior
from pyrofl.inference.definition.programs import (
    Guide,
    Likelihood,
    Loss,
    PriorFunction,
    Program,
    flat,
    sample_noise,
)
from pyrofl.models.guides.dropout import Coordinates, HierarchicalKL, normal_event
from pyrofl.nets import Network
from pyrofl.nets.reparametrized import Reparametrized
from pyrofl.tensors import Tensors, role, under

Sampling = Literal["activations", "weights"]

WARM_UP_FRACTION = 0.02  # of the rounds, in which the KL's factor grows


@dataclass(frozen=True)
class DropoutLayers:
    """Pyro model and guide that sample the outputs of layers instead of their weights.

    They have the divergence and the distribution of outputs of a network with a dropout posterior
    over some of its weights. The client's "loc/..." holds all parameters; those of `q` are random.
    """

    net: Network
    q: Guide  # over the random weights, by roles "loc" and "spread"
    shapes: Mapping[str, Size]  # of the random weights
    likelihood: Likelihood
    prior: PriorFunction | None = None  # on the random weights; None is the hierarchical one
    coordinates: Coordinates = "logvar"  # of q
    pruned: bool = False  # what comes down as zero has neither value nor noise nor slope

    def programs(self) -> tuple[Program, Program]:
        """Return the model and the guide.

        The weights are integrated out: their site is a point that costs the whole divergence, and
        noise, the same in both programs, stands for the remaining ones.
        """
        noisy = Reparametrized(self.net, self.shapes)

        def model(received: Tensors, local: Tensors, data: Batch) -> None:
            """Sample the outputs of the network's layers, and observe the responses."""
            variance = role("variance", local) or self.q.moments(received, local, data)[1]
            with data.clients():
                for n, shape in self.shapes.items():
                    pyro.sample(n, flat(n, shape, received, local, data))
                noise = sample_noise(noisy, data, of_rows=False)
                with data.rows():
                    noise |= sample_noise(noisy, data, of_rows=True)
                    own = role("loc", local)
                    mean, sd2 = {n: own[n] for n in self.shapes}, variance
                    if self.pruned:
                        mean, sd2 = zero_pruned(received, mean), zero_pruned(received, sd2)
                    outputs = noisy(own | mean, sd2, noise, data.x)
                    pyro.sample("y", self.likelihood(outputs, data.x), obs=data.y)

        def guide(received: Tensors, local: Tensors, data: Batch) -> None:
            """Add the posterior's KL divergence from the prior as a log density of the guide."""
            paid = role("divergence", local) or self.divergences(received, local, data)
            with data.clients():
                for n, shape in self.shapes.items():
                    theta, axes = local[f"loc/{n}"], len(shape)
                    pyro.sample(n, dist.Delta(theta, log_density=paid[n], event_dim=axes))
                sample_noise(noisy, data, of_rows=False)
                with data.rows():
                    sample_noise(noisy, data, of_rows=True)

        return model, guide

    def variance_and_divergence(self, received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Return the variance and divergence that both programs read, to compute them once."""
        variance = self.q.moments(received, local, data)[1]
        known = variance if self.prior is not None or self.coordinates == "logvar" else None
        paid = self.divergences(received, local, data, known)
        return under("variance", variance) | under("divergence", paid)

    def divergences(
        self, received: Tensors, local: Tensors, data: Batch, variance: Tensors | None = None
    ) -> Tensors:
        """Return the divergence of each site from its prior, [C] or [C, 1] like the tensors.

        From the hierarchical prior it has no slope in theta; so none of it is left to rounding.
        The variance, if given, does not depend on theta then.
        """
        if self.prior is None:
            theta = {f"loc/{n}": local[f"loc/{n}"].detach() for n in self.shapes}
            variance = variance or self.q.moments(received, local | theta, data)[1]
            return {
                n: HierarchicalKL.apply(theta[f"loc/{n}"], variance[n], len(shape))
                for n, shape in self.shapes.items()
            }
        variance = variance or self.q.moments(received, local, data)[1]
        return {
            n: divergence(
                n,
                normal_event(local[f"loc/{n}"], variance[n], len(shape)),
                self.prior(n, shape, received, local, data),
            )
            for n, shape in self.shapes.items()
        }

    def refuse_no_divergence(self) -> None:
        """Raise ValueError if the KL divergence from the prior has no closed form."""
        for n, shape in self.shapes.items():
            own = getattr(self.prior, "of", lambda _: self.prior)(n)
            if own is not None and (prior := probe_prior(own, n, shape)) is not None:
                one = torch.ones(1, 1, *shape, dtype=torch.float64)
                divergence(n, normal_event(0 * one, one, len(shape)), prior)


def zero_pruned(received: Tensors, values: Tensors) -> Tensors:
    """Set values to zero where the received weights are zero, as they were pruned."""
    return {n: v * (received[f"loc/{n}"] != 0) for n, v in values.items()}


def likelihood_of_mean(likelihood: Likelihood) -> Likelihood:
    """Return a likelihood of the outputs' mean over draws, as in the authors' code."""

    def of_mean(outputs: Tensor, x: Tensor) -> TorchDistribution:
        # Outputs [S, C, B, K] have draws, whose logits are averaged.
        return likelihood(outputs.mean(0, keepdim=True) if outputs.dim() == 4 else outputs, x)

    return of_mean


def objective(
    pair: tuple[Program, Program] | None,
    num_weights: int,
    num_particles: int | None,
    beta: float | None = None,
    elapsed: float | None = None,
    precompute: Callable[[Tensors, Tensors, Batch], Tensors] | None = None,
) -> Loss:
    """Return the loss function: mean -log p(y | w) per row plus beta times mean KL per weight.

    Without a beta it is exact Bayes: the KL by the client's number of rows.

    Args:
        pair: programs to train instead of the method's own; None is these.
        num_weights: number of random weights.
        num_particles: Monte Carlo draws; None for points.
        beta: weight of the mean divergence per weight.
        elapsed: fraction of the rounds that are over.
        precompute: (received, local, batch) -> further local tensors that the programs read.
    """
    warmth = warm_up(elapsed)

    def share(received: Tensors, local: Tensors, batch: Batch) -> Tensor:
        exact = torch.ones_like(batch.size)
        return warmth * (exact if beta is None else beta / num_weights * batch.size)

    loss = elbo(num_particles, kl=share, mean=True)
    if pair is None:
        return loss

    def of_pair(_: Program, __: Program, received: Tensors, local: Tensors, batch: Batch) -> Tensor:
        """Return the loss of a fixed model and guide, instead of the method's own programs."""
        more = precompute(received, local, batch) if precompute else {}
        return loss(*pair, received, local | more, batch)

    return of_pair


def divergence(name: str, q: TorchDistribution, prior: TorchDistribution) -> Tensor:
    """Return the KL divergence of a normal from a prior; ValueError if it has no closed form."""
    try:
        divergence_of_q: Tensor = kl_divergence(q, prior)
    except NotImplementedError as error:
        base = getattr(prior, "base_dist", prior)
        raise ValueError(
            f"prior of {name!r} is {type(base).__name__}, from which the divergence has no closed "
            "form; expected a normal or Laplace prior, or sampling='weights'"
        ) from error
    return divergence_of_q


def warm_up(elapsed: float | None) -> float:
    """Return the weight of the KL term, which rises to 1 in the first 2% of the rounds.

    It is sigmoid(12 (t - 1/2)) at a fraction t of these rounds, and then 1.
    """
    if elapsed is None or elapsed > WARM_UP_FRACTION:
        return 1.0
    return 1 / (1 + math.exp(-12 * (elapsed / WARM_UP_FRACTION - 0.5)))
