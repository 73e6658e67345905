"""Expected log likelihoods of networks with normal weights, by draws of the layers' outputs.

Kingma, Salimans and Welling, "Variational Dropout and the Local Reparameterization Trick",
NeurIPS 2015; see `pyrofl.nets.reparametrized`. Where q(w) and p(w) are independent normals, the
rest of the ELBO has a closed form, and no weight is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyrofl.arguments import described
from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import On, elbo
from pyrofl.inference.definition.programs import Guide, Likelihood, Loss, Program, sample_noise
from pyrofl.inference.training.noise import is_unset_latent
from pyrofl.models.guides import log_mean_field, mean_field
from pyrofl.models.priors import PriorFamily, as_families
from pyrofl.nets import Network
from pyrofl.nets.reparametrized import Reparametrized
from pyrofl.tensors import Tensors, role, under

Sampling = Literal["auto", "activations", "weights"]


@dataclass(frozen=True)
class Activations:
    """Losses of a network with independent normal weights, by draws of its layers' outputs."""

    net: Network
    likelihood: Likelihood
    num_particles: int

    def expected(
        self, mean: Tensors, variance: Tensors, batch: Batch, scale: Tensor | None = None
    ) -> Tensor:
        """Return the expected negative log likelihood of each client's rows, [C].

        Args:
            mean: of the weights, [C, *p].
            variance: of the weights, [C, *p].
            batch: the rows; a minibatch stands for all rows of its clients.
            scale: factor of the noise, [C]; the default is 1.
        """
        local = under("mean", mean) | under("variance", variance)
        local |= {} if scale is None else {"scale": scale}
        return elbo(self.num_particles)(self._rows, self._noise, {}, local, batch)

    def negative_elbo(self, q: Guide, weights: Program, kl: float, noise: float = 1.0) -> Loss:
        """Return a loss: the negative ELBO of each client divided by its number of rows.

        Args:
            q: guide of independent normals.
            weights: model of the weights alone, with normal priors; see `divergence`.
            kl: weight of the divergence.
            noise: factor of the standard deviations that the likelihood sees.
        """
        exact = divergence(q, weights, kl)

        def loss(
            model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
        ) -> Tensor:
            """Return the negative ELBO per row [C], by draws of the layers' outputs."""
            mean, variance = q.moments(received, local, batch)
            seen = {n: noise**2 * v for n, v in variance.items()} if noise != 1 else variance
            with AtMeans():
                pull = exact(model, guide, received, local, batch)
            return self.expected(mean, seen, batch) / batch.size + pull

        return loss

    def _rows(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Observe the responses of all rows, given sampled noise of the layers' outputs."""
        mean, variance, scale = role("mean", local), role("variance", local), local.get("scale")
        with batch.clients():
            noise = sample_noise(self.noisy, batch, of_rows=False)
            with batch.rows():
                noise |= sample_noise(self.noisy, batch, of_rows=True)
                if scale is not None:
                    shapes = self.noisy.noise_shapes(batch.x)
                    noise = {  # scale [C, 1, ...]
                        n: scale.view(-1, *(1,) * (1 + len(shapes[n]))) * v
                        for n, v in noise.items()
                    }
                # The second half of the draws mirrors the first: gradients of means have no noise
                # where the likelihood is normal.
                half = {n: v[: (len(v) + 1) // 2] for n, v in noise.items()}
                mirrored = {n: torch.cat([v, -v])[: self.num_particles] for n, v in half.items()}
                outputs = self.noisy(mean, variance, mirrored, batch.x)
                pyro.sample("y", self.likelihood(outputs, batch.x), obs=batch.y)

    def _noise(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the noise of the layers' outputs that replaces sampling of weights."""
        with batch.clients():
            sample_noise(self.noisy, batch, of_rows=False)
            with batch.rows():
                sample_noise(self.noisy, batch, of_rows=True)

    @cached_property
    def noisy(self) -> Reparametrized:
        """Network that samples its layers' outputs instead of its weights."""
        return Reparametrized(self.net, self.net.shapes)


def divergence(q: Guide, weights: Program, kl: float) -> Loss:
    """Return a loss: kl times the divergence of q from a prior, divided by the number of rows.

    Args:
        q: guide of the weights.
        weights: samples the weights from their prior, inside `batch.clients()`.
        kl: weight of the divergence.
    """

    def prior(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the weights of all clients from their prior."""
        with batch.clients():
            weights(received, local, batch)

    return On(replace(elbo(kl=kl, mean=True), likelihood=False), prior, q)


class AtMeans(Messenger):
    """Pyro messenger that sets latent sites to their means, where only densities are needed."""

    def _pyro_sample(self, msg: Any) -> None:
        if is_unset_latent(msg):
            msg["value"], msg["done"] = msg["fn"].mean, True


def is_chosen(sampling: Sampling, why: str) -> bool:
    """Return whether to draw activations; raise ValueError if they are requested in vain.

    Args:
        sampling: the setting of a method.
        why: the reason against activations, or an empty string.
    """
    if sampling == "activations" and why:
        raise ValueError(f"sampling is 'activations', but {why}; use sampling='weights'")
    return sampling != "weights" and not why


def reason_against(
    net: Network, guide: object = mean_field, prior: PriorFamily = dist.Normal
) -> str:
    """Return why the outputs of layers cannot be drawn, or an empty string if they can.

    Args:
        net: the network, all of whose parameters are random.
        guide: family of the parameters' posterior.
        prior: location-scale family of their prior.
    """
    if guide not in (mean_field, log_mean_field):
        return f"guide is {described(guide)}, not independent normals such as mean_field"
    if {*as_families(prior, net.shapes).values()} != {dist.Normal}:
        return f"prior is {described(prior)}, not dist.Normal"
    if not Reparametrized(net, net.shapes).has_outputs:
        return "the network has neither linear layers nor convolutions with weights that train"
    return ""
