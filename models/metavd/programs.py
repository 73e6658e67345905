"""Pyro models and guides of networks with dropout posteriors over weights or activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Size, Tensor
from torch.distributions import kl_divergence

from pyrofl.data import Batch
from pyrofl.inference.elbo import elbo
from pyrofl.inference.prior_conversion import probed
from pyrofl.inference.programs import (
    Guide,
    Likelihood,
    Loss,
    PriorFunction,
    Program,
    flat,
    sample_noise,
)
from pyrofl.models.guides.dropout import Coordinates, hierarchical, normal
from pyrofl.nets import Network
from pyrofl.nets.reparametrised import Reparametrised
from pyrofl.tensors import Tensors, role, under

Sampling = Literal["activations", "weights"]

WARM_UP = 0.02  # of the rounds, in which the KL's factor grows


@dataclass(frozen=True)
class DropoutModel:
    """Pyro model of a network with a dropout posterior over some of its weights.

    The client's "loc/..." holds all parameters; those of `q` are random, the rest points.
    """

    net: Network
    q: Guide  # over the random weights, by roles "loc" and "spread"; or points with a flat prior
    shapes: Mapping[str, Size]  # of the random weights
    likelihood: Likelihood
    prior: PriorFunction | None = None  # on the random weights; None is the hierarchical one
    coordinates: Coordinates = "logvar"  # of q
    pruned: bool = False  # what comes down as zero has neither value nor noise nor slope
    pool_logits: bool = False  # average outputs over draws before the likelihood sees them

    def __call__(self, received: Tensors, local: Tensors, data: Batch) -> None:
        """Sample the network's weights from their prior, and observe the responses of all rows."""
        with data.clients():
            priors = self._priors(received, local, data)
            w = {n: pyro.sample(n, fn) for n, fn in priors.items()}
            with data.rows():
                weights = role("loc", local) | self._kept(received, w)
                self._observe(self.net(weights, data.x), data)

    def _priors(
        self,
        received: Tensors,
        local: Tensors,
        data: Batch,
        moments: tuple[Tensors, Tensors] | None = None,
    ) -> dict[str, TorchDistribution]:
        """Return the priors of the random weights, given the moments of their posterior.

        Only the hierarchical prior depends on these moments.
        """
        if self.prior is None and self.q.random:
            mean, variance = moments or self.q.moments(received, local, data)
            axes = {n: len(shape) for n, shape in self.shapes.items()}
            return {n: hierarchical(mean[n], variance[n], axes[n], self.coordinates) for n in axes}
        prior = self.prior or flat
        return {n: prior(n, shape, received, local, data) for n, shape in self.shapes.items()}

    def by_activations(self) -> tuple[Program, Program]:
        """Return a model and a guide that sample the outputs of layers instead of weights.

        The weights are integrated out: their site is a point that costs the whole divergence, and
        noise, the same in both programs, stands for the remaining ones.
        """
        noisy = Reparametrised(self.net, self.shapes)

        def model(received: Tensors, local: Tensors, data: Batch) -> None:
            """Sample the outputs of the network's layers, and observe the responses."""
            _, variance = self.q.moments(received, local, data)
            with data.clients():
                for n, shape in self.shapes.items():
                    pyro.sample(n, flat(n, shape, received, local, data))
                noise = sample_noise(noisy, data, of_rows=False)
                with data.rows():
                    noise |= sample_noise(noisy, data, of_rows=True)
                    own = role("loc", local)
                    means = own | self._kept(received, {n: own[n] for n in self.shapes})
                    outputs = noisy(means, self._kept(received, variance), noise, data.x)
                    self._observe(outputs, data)

        def guide(received: Tensors, local: Tensors, data: Batch) -> None:
            """Add the posterior's KL divergence from the prior as a log density of the guide."""
            theta = {n: local[f"loc/{n}"] for n in self.shapes}
            if self.prior is None:
                # The divergence has no slope in theta; so none of it is left to rounding.
                local = local | under("loc", {n: v.detach() for n, v in theta.items()})
            mean, variance = moments = self.q.moments(received, local, data)
            with data.clients():
                for n, prior in self._priors(received, local, data, moments).items():
                    axes = len(self.shapes[n])
                    paid = divergence(n, normal(mean[n], variance[n], axes), prior)
                    pyro.sample(n, dist.Delta(theta[n], log_density=paid, event_dim=axes))
                sample_noise(noisy, data, of_rows=False)
                with data.rows():
                    sample_noise(noisy, data, of_rows=True)

        return model, guide

    def refuse_no_divergence(self) -> None:
        """Raise ValueError if the KL divergence from the prior has no closed form."""
        for n, shape in self.shapes.items():
            own = getattr(self.prior, "of", lambda _: self.prior)(n)
            if own is not None and (prior := probed(own, n, shape)) is not None:
                one = torch.ones(1, 1, *shape, dtype=torch.float64)
                divergence(n, normal(0 * one, one, len(shape)), prior)

    def _kept(self, received: Tensors, values: Tensors) -> Tensors:
        if not self.pruned:
            return values
        return {n: v * (received[f"loc/{n}"] != 0) for n, v in values.items()}

    def _observe(self, outputs: Tensor, data: Batch) -> None:
        if self.pool_logits and outputs.dim() == 4:
            outputs = outputs.mean(0, keepdim=True)
        pyro.sample("y", self.likelihood(outputs, data.x), obs=data.y)


def objective(
    model: DropoutModel,
    sampling: Sampling,
    num_particles: int,
    pool_logits: bool,
    beta: float | None = None,
    done: float | None = None,
) -> Loss:
    """Return the loss function: mean -log p(y | w) per row plus beta times mean KL per weight.

    Without a beta it is exact Bayes: the KL by the client's number of rows.
    """
    weights, warmth = sum(shape.numel() for shape in model.shapes.values()), warm_up(done)

    def share(received: Tensors, local: Tensors, batch: Batch) -> Tensor:
        exact = torch.ones_like(batch.size)
        return warmth * (exact if beta is None else beta / weights * batch.size)

    loss = elbo(num_particles if model.q.random else None, kl=share, mean=True)
    if not model.q.random or (sampling == "weights" and not pool_logits):
        return loss
    trained = replace(model, pool_logits=pool_logits)
    pair = trained.by_activations() if sampling == "activations" else (trained, model.q)

    def of_pair(_: Program, __: Program, received: Tensors, local: Tensors, batch: Batch) -> Tensor:
        """Return the loss of a fixed model and guide, instead of the method's own programs."""
        return loss(*pair, received, local, batch)

    return of_pair


def divergence(name: str, q: TorchDistribution, prior: TorchDistribution) -> Tensor:
    """Return the KL divergence of a normal from a prior; ValueError if it has no closed form."""
    try:
        found: Tensor = kl_divergence(q, prior)
    except NotImplementedError as error:
        base = getattr(prior, "base_dist", prior)
        raise ValueError(
            f"prior of {name!r} is {type(base).__name__}, from which the divergence has no closed "
            "form; expected a normal or Laplace prior, or sampling='weights'"
        ) from error
    return found


def warm_up(done: float | None) -> float:
    """Return the weight of the KL term, which rises to 1 in the first 2% of the rounds.

    It is sigmoid(12 (t - 1/2)) at a fraction t of these rounds, and then 1.
    """
    if done is None or done > WARM_UP:
        return 1.0
    return 1 / (1 + math.exp(-12 * (done / WARM_UP - 0.5)))
