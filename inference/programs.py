"""Pyro programs as values: they can be called, and also looked into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.infer.inspect import TrackProvenance
from pyro.poutine.runtime import _PYRO_STACK
from torch import Size, Tensor

from pyrofl.data import Batch
from pyrofl.inference.spherical import spherical
from pyrofl.nets import Forward, Network
from pyrofl.tensors import Tensors, matches, role

Program = Callable[[Tensors, Tensors, Batch], object]
"""A Pyro model or guide: (received, local, batch), both dicts with tensors [C, 1, *p]."""

Loss = Callable[[Program, Program, Tensors, Tensors, Batch], Tensor]
"""(model, guide, received, local, batch) -> one value per client, [C]."""

Likelihood = Callable[[Tensor, Tensor], TorchDistribution]
"""(outputs [..., C, B, out], x [C, B, *x]) -> distribution with batch shape [..., C, B]."""

Prior = Callable[[str, Size, Tensors, Tensors, Batch], TorchDistribution]
"""(name, shape, received, local, batch) -> distribution with event shape `shape`."""

LocationScale = Callable[[Tensor, Tensor], TorchDistribution]
"""(loc, scale) -> distribution: the shape of a prior whose centre and width the method supplies."""

Moments = Callable[[Tensors, Tensors, Batch], tuple[Tensors, Tensors]]
"""(received, local, batch), tensors [C, *p] -> mean and variance of every site, [C, *p]."""


def flat(
    name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
) -> TorchDistribution:
    """Say nothing about the parameter: with a delta guide, maximum likelihood."""
    return _improper(len(batch), shape)


class Flat(dist.ImproperUniform):
    """An improper prior, of which `pyro.render_model` can draw a picture all the same."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Draw, which is impossible; give zeros to who only follows what depends on what."""
        if any(isinstance(handler, TrackProvenance) for handler in _PYRO_STACK):
            return torch.zeros(self.batch_shape + self.event_shape)
        return super().__call__(*args, **kwargs)


@lru_cache
def _improper(clients: int, shape: Size) -> TorchDistribution:
    prior: TorchDistribution = Flat(constraints.real, (clients, 1), shape)  # type: ignore[no-untyped-call]
    return prior


def around(
    family: LocationScale, centre: Tensor, scale: Tensor, group: object = None
) -> TorchDistribution:
    """Center a family at parameters [C, 1, *p] with one scale per client, [C, 1].

    Parameters of one `group` have the same scale.
    """
    axes = centre.dim() - scale.dim()
    fn = family(centre, scale.reshape(*scale.shape, *(1,) * axes))
    return spherical(fn, axes, group) if type(fn) is dist.Normal and axes else as_event(fn, axes)


@dataclass(frozen=True)
class Proximal:
    """A prior around what came down, of variance 1 / (strength n_j); see `priors.proximal`."""

    strength: float
    family: LocationScale
    loc: str

    def __call__(
        self, name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        """Return the prior of a parameter."""
        scale = (self.strength * batch.size).rsqrt()[:, None]
        if (centre := received.get(f"{self.loc}/{name}")) is None:
            raise ValueError(
                f"parameter {name} has no centre for its proximal prior, as it does not come down; "
                "expected by_name with another prior for what stays at home"
            )
        return around(self.family, centre, scale, group=self)


@dataclass(frozen=True)
class ByName:
    """Priors by patterns of names, of which the first that match count; see `priors.by_name`."""

    priors: Mapping[str, Prior]

    def __call__(
        self, name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        """Return the prior of a parameter."""
        return self.of(name)(name, shape, received, local, batch)

    def of(self, name: str) -> Prior:
        """Return the prior that a parameter has."""
        for patterns, chosen in self.priors.items():
            if matches(name, patterns):
                return chosen
        known = ", ".join(self.priors)
        raise ValueError(f"parameter {name} has no prior; expected a match of {known}")


def as_event(fn: TorchDistribution, axes: int) -> TorchDistribution:
    """Make one event of the last axes, so that no plate counts a parameter's entries as rows."""
    return cast("TorchDistribution", fn.to_event(axes))


@dataclass(frozen=True)
class Supervised:
    """The model of a network: p(w | received) times the likelihood of every row.

    Attributes:
        net: the network.
        likelihood: of a row, given the network's outputs.
        prior: on every latent parameter; one set of them per client.
        points: role of local tensors that are parameters too, but points: "base" for "base/NAME".
            All other parameters are latent sites.
        forward: runs instead of the network.
    """

    net: Network
    likelihood: Likelihood
    prior: Prior = flat
    points: str = ""
    forward: Forward | None = None

    def __call__(self, received: Tensors, local: Tensors, data: Batch) -> None:
        """Draw the parameters, then the rows."""
        known = role(self.points, local) if self.points else {}
        run = self.forward or self.net
        with data.clients():
            w = {
                n: pyro.sample(n, self.prior(n, shape, received, local, data))
                for n, shape in self.net.shapes.items()
                if n not in known
            }
            with data.rows():
                pyro.sample("y", self.likelihood(run(known | w, data.x), data.x), obs=data.y)

    def prior_of(self, name: str) -> Prior:
        """Return the prior of a parameter."""
        return self.prior.of(name) if isinstance(self.prior, ByName) else self.prior

    def homes(self, guide: Program, local: Tensors) -> dict[str, str]:
        """Return the local tensor that a parameter is equal to, of those that are points."""
        roles = [r for r in (self.points, getattr(guide, "points", "")) if r]
        at = {n: [f"{r}/{n}" for r in roles if f"{r}/{n}" in local] for n in self.net.shapes}
        return {n: found[0] for n, found in at.items() if found}


@dataclass(frozen=True)
class Guide:
    """A family of posteriors q(w; local); a Pyro guide.

    Attributes:
        program: the Pyro guide.
        start: values [*p] or [C, *p] that the sites are centred at -> local parameters. The
            basic and correlated families also take standard deviations, as second argument.
        moments: mean and variance of every site, for closed forms.
        names: patterns of its local parameters.
        random: whether it has any spread; a guide without needs no Monte Carlo draws.
        points: role of the local tensors that the sites are equal to, if each is such a point.
    """

    program: Program
    start: Callable[..., Tensors]
    moments: Moments
    names: str
    random: bool = True
    points: str = ""

    def __call__(self, received: Tensors, local: Tensors, batch: Batch) -> object:
        """Draw all sites."""
        return self.program(received, local, batch)
