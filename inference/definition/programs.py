"""Types and dataclasses of Pyro programs: models of networks, priors and guides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.infer.inspect import TrackProvenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.definition.prior_by_name import ByName
from pyrofl.inference.definition.prior_conversion import (
    LocationScale,
    Prior,
    PriorFunction,
    as_prior,
)
from pyrofl.inference.definition.spherical import spherical
from pyrofl.nets import Forward, Network
from pyrofl.nets.reparametrized import Reparametrized
from pyrofl.tensors import Tensors, role

__all__ = [
    "ByName",
    "Flat",
    "Guide",
    "Likelihood",
    "LocationScale",
    "Loss",
    "MomentsFunction",
    "Prior",
    "PriorFunction",
    "Program",
    "Proximal",
    "Supervised",
    "around",
    "as_event",
    "as_prior",
    "flat",
    "of_network",
    "sample_noise",
    "without_parameters",
]

NONCENTERED = "_noncentered"  # ends the name of the standard normal of a site that was centered
FREED = "_unconstrained"  # ends the name of a site whose support depended on other sites or data

Program = Callable[[Tensors, Tensors, Batch], object]
"""A Pyro model or guide: (received, local, batch), both dicts with tensors [C, 1, *p]."""

Loss = Callable[[Program, Program, Tensors, Tensors, Batch], Tensor]
"""(model, guide, received, local, batch) -> one value per client, [C]."""

Likelihood = Callable[[Tensor, Tensor], TorchDistribution]
"""(outputs [..., C, B, out], x [C, B, *x]) -> distribution with batch shape [..., C, B]."""

MomentsFunction = Callable[[Tensors, Tensors, Batch], tuple[Tensors, Tensors]]
"""(received, local, batch), tensors [C, *p] -> mean and variance of every site, [C, *p]."""


def flat(
    name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
) -> TorchDistribution:
    """Return an improper uniform prior; with a delta guide this gives maximum likelihood."""
    return _improper(len(batch), shape)


class Flat(dist.ImproperUniform):
    """Improper uniform prior that `pyro.render_model` can process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error, as a flat prior cannot be sampled; return zeros for model diagrams."""
        if any(isinstance(handler, TrackProvenance) for handler in _PYRO_STACK):
            return torch.zeros(self.batch_shape + self.event_shape)
        return super().__call__(*args, **kwargs)


@lru_cache
def _improper(clients: int, shape: Size) -> TorchDistribution:
    prior: TorchDistribution = Flat(constraints.real, (clients, 1), shape)  # type: ignore[no-untyped-call]
    return prior


def around(
    family: LocationScale, center: Tensor, scale: Tensor, group: object = None
) -> TorchDistribution:
    """Return a prior of a location-scale family, centered at [C, 1, *p], with scales [C, 1].

    Parameters of one `group` have the same scale.
    """
    axes = center.dim() - scale.dim()
    fn = family(center, scale.reshape(*scale.shape, *(1,) * axes))
    return spherical(fn, axes, group) if type(fn) is dist.Normal and axes else as_event(fn, axes)


@dataclass(frozen=True)
class Proximal:
    """Prior centered at received parameters with variance 1 / (strength * rows of the client).

    See `priors.proximal`.
    """

    strength: float
    family: LocationScale
    loc: str

    def __call__(
        self, name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        """Return the prior distribution of the network parameter `name`."""
        scale = (self.strength * batch.size).rsqrt()[:, None]  # [C, 1]
        if (center := received.get(f"{self.loc}/{name}")) is None:
            raise ValueError(
                f"parameter {name} has no center for its proximal prior, as it is not received; "
                "use priors.by_name with another prior for parameters that stay on the client"
            )
        return around(self.family, center, scale, group=self)


def as_event(fn: TorchDistribution, axes: int) -> TorchDistribution:
    """Return a distribution with its last `axes` batch dimensions as event dimensions."""
    return cast("TorchDistribution", fn.to_event(axes))


class ChangedSites(Messenger):
    """Pyro handler that replaces the distributions of sample sites."""

    def __init__(self, change: Callable[[str, TorchDistribution], TorchDistribution]) -> None:
        super().__init__()
        self.change = change

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        """Replace the distribution of a site."""
        msg["fn"] = self.change(msg["name"], msg["fn"])


@dataclass(frozen=True)
class Supervised:
    """Pyro model of a network: prior of its parameters and likelihood of every row's response.

    Reports, predictions and accelerations recognize such a model by its class. `of_network` makes
    one from a model that is written out.

    Attributes:
        net: the network.
        likelihood: distribution of a row's response, given the network's outputs.
        prior: prior of every latent parameter, see `as_prior`; one set of parameters per client.
            None if the program's prior is not known.
        points: prefix of local tensors that are point parameters: "base" for "base/NAME". All
            other parameters are latent sites.
        program: the Pyro model. Default: independent priors and the likelihood.
        forward: function used instead of the network inside the program.
        change_site: function used on the distribution of every site inside the program.
    """

    net: Network
    likelihood: Likelihood
    prior: Prior | None = flat
    points: str = ""
    program: Program | None = None
    forward: Forward | None = None
    change_site: Callable[[str, TorchDistribution], TorchDistribution] | None = None
    written_for: tuple[object, ...] = ()  # net, likelihood, prior, points that the program reads

    def __post_init__(self) -> None:
        """Convert the prior to a function.

        Raises:
            ValueError: if the prior does not fit a parameter, or if a field was replaced that a
                written program reads from elsewhere.
        """
        names = ("net", "likelihood", "prior", "points")
        for name, value in zip(names, self.written_for, strict=False):
            if getattr(self, name) is not value:
                raise ValueError(
                    f"{name} of the model was replaced, but its program reads the original; build "
                    f"the method again, as by method.swap({name}=...)"
                )
        if self.prior is not None:
            prior = as_prior(self.prior, {} if self.points else self.net.shapes)
            object.__setattr__(self, "prior", prior)

    def __call__(self, received: Tensors, local: Tensors, data: Batch) -> None:
        """Sample the network's parameters, then the responses of all rows."""
        program = self.program or self.sample
        if self.forward is None:
            program(received, local, data)
            return
        sites = ChangedSites(self.change_site) if self.change_site else nullcontext()
        with self.net.computed_by(self.forward), sites:
            program(received, local, data)

    def sample(self, received: Tensors, local: Tensors, data: Batch) -> None:
        """Sample parameters from independent priors, then the responses of all rows."""
        with data.clients():
            w = self.weights(received, local, data)
            with data.rows():
                pyro.sample("y", self.likelihood(self.net(w, data.x), data.x), obs=data.y)

    def weights(self, received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Sample the latent parameters, inside `data.clients()`; return all parameters."""
        points = role(self.points, local) if self.points else {}
        return points | {
            n: pyro.sample(n, self.prior_of(n)(n, shape, received, local, data))
            for n, shape in self.net.shapes.items()
            if n not in points
        }

    def prior_of(self, name: str) -> PriorFunction:
        """Return the prior of the network parameter `name`."""
        prior = cast("PriorFunction", self.prior)
        return prior.of(name) if isinstance(prior, ByName) else prior

    def homes(self, guide: Program, local: Tensors) -> dict[str, str]:
        """Return a dict that maps each point-estimated parameter to the tensor with its value."""
        roles = [r for r in (self.points, getattr(guide, "points", "")) if r]
        at = {n: [f"{r}/{n}" for r in roles if f"{r}/{n}" in local] for n in self.net.shapes}
        return {n: names[0] for n, names in at.items() if names}


def of_network(
    net: Network, likelihood: Likelihood, prior: Prior | None = None, points: str = ""
) -> Callable[[Program], Supervised]:
    """Mark a Pyro model as one of a network, so that the library can accelerate and explain it.

    The model samples parameters of the network under their names, reads the others as
    `local["POINTS/NAME"]`, calls the network once, and observes "y".

    Args:
        net: the network that the model calls.
        likelihood: that of the model.
        prior: that of every parameter, where it decides whether the first layer can be trained by
            coefficients of rows; None leaves it unknown.
        points: prefix of local tensors that are parameters without a distribution.
    """
    if prior is not None:
        prior = as_prior(prior, {} if points else net.shapes)
    parts = net, likelihood, prior, points
    return lambda program: Supervised(*parts, program, written_for=parts)


def sample_noise(noisy: Reparametrized, data: Batch, of_rows: bool) -> Tensors:
    """Sample the noise of a network with random layers, without adding to the log density.

    Args:
        noisy: the network.
        data: the batch whose rows the network reads.
        of_rows: sample the noise of outputs, inside `data.rows()`; otherwise that of parameters
            that are drawn themselves, outside of it.

    Returns:
        Standard normal noise, by some names of `noisy.noise_shapes`.
    """
    noise: Tensors = {}
    for name, shape in noisy.noise_shapes(data.x).items():
        if noisy.of_rows(name) == of_rows:
            zero = data.size.new_zeros(shape)
            # Model and guide have the same density of it, which cancels.
            standard = as_event(dist.Normal(zero, zero + 1), len(shape)).mask(False)
            noise[name] = pyro.sample(f"noise/{name}", standard)
    return noise


@dataclass(frozen=True)
class Guide:
    """Variational family q(w; local) of a model's latent sites, as a Pyro guide.

    Attributes:
        program: the Pyro guide.
        start: values [*p] or [C, *p] of the sites' centers -> local parameters. The basic and
            correlated families accept standard deviations as second argument.
        moments: mean and variance of every site, for closed forms.
        names: patterns of its local parameters.
        random: whether it has any spread; a point guide needs no Monte Carlo draws.
        points: prefix of the local tensors that the sites are equal to, if they are points.
        is_simplex: whether its sites are weights that sum to one over their last axis.
        has_centers: whether `start` can set the mean of every site.
    """

    program: Program
    start: Callable[..., Tensors]
    moments: MomentsFunction
    names: str
    random: bool = True
    points: str = ""
    is_simplex: bool = False
    has_centers: bool = True

    def __call__(self, received: Tensors, local: Tensors, batch: Batch) -> object:
        """Sample all latent sites from the variational distribution.

        Raises:
            ValueError: inside SVI, whose optimizer would train nothing.
        """
        refuse_svi()
        return self.program(received, local, batch)


def refuse_subsampling(name: str, site: Any) -> None:
    """Raise ValueError for a site inside a Pyro plate with subsampling."""
    for frame in site.get("cond_indep_stack", ()):
        if frame.full_size is not None and frame.full_size != frame.size:
            raise ValueError(
                f"site {name!r} is in plate {frame.name!r}, which subsamples {frame.size} of "
                f"{frame.full_size} entries; use batch.rows() for rows, and batch= of the method "
                "for minibatches"
            )


def refuse_svi() -> None:
    """Raise ValueError inside SVI, as its optimizer would train none of a guide's tensors."""
    if any(isinstance(h, TraceMessenger) and h.param_only for h in _PYRO_STACK):
        raise ValueError(
            "this guide has no pyro.param, so SVI would train nothing; use the programs of "
            "method.to_pyro(data), which have"
        )


def without_parameters(guide: Program) -> Program:
    """Mark a guide as one that reads the tensors of its arguments alone, so SVI refuses it."""

    @wraps(guide)
    def refusing(received: Tensors, local: Tensors, batch: Batch) -> object:
        refuse_svi()
        return guide(received, local, batch)

    return refusing
