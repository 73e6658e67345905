"""Log density of a joint model at many points at once, in variables that are easy to sample.

A normal site z ~ N(loc, s), whose location and scale may depend on other sites, becomes

    w = (z - loc) / s^(1 - c)

with c of each coordinate between 0 (non-centered) and 1 (centered, up to a shift), as in Gorinova,
Moore and Hoffman, "Automatic Reparameterization of Probabilistic Programs", ICML 2020. If the rows
determine z with the precision h, the variance of the non-centered w given all other sites is
1 / (1 + h s^2) = 1 - c, which is estimated from draws. Other sites are unconstrained by the
transform of their support.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyrofl.inference.definition.elbo import base_of, is_deterministic, latent
from pyrofl.inference.definition.rejection import rejecting
from pyrofl.inference.reference.joint import Joint, OnePrior
from pyrofl.inference.training.noise import Message, is_unset_latent
from pyrofl.tensors import Tensors

DENSITY_TOLERANCE = 1e-4  # relative error of log densities that count as equal
NUM_POINTS = 3  # points at which batched densities are compared with those of single points
LOW_PROBABILITY = 0.1  # probability of a scale below that at which the exponents are chosen


class Coordinates(NamedTuple):
    """Coordinates w of a site, and their transform to its values; None for normal sites."""

    shape: tuple[int, ...]  # [clients or 1, places, *unconstrained event]
    transform: Transform | None

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return torch.Size(self.shape).numel()


class DensityValues(NamedTuple):
    """Log density and values of sites at K points.

    Attributes:
        log_density: of the coordinates, [K].
        values: of the latent sites, [K, clients or 1, places, *event].
        moments: location and log scale of the normal sites, like their values.
        free: unconstrained values of the other sites.
    """

    log_density: Tensor
    values: Tensors
    moments: dict[str, tuple[Tensor, Tensor]]
    free: Tensors


@dataclass(frozen=True)
class JointDensity:
    """Log density of a joint model of all clients at many points.

    Attributes:
        joint: the model.
        sites: coordinates of each latent site.
        power: exponents c of all coordinates, [D].
    """

    joint: Joint
    sites: dict[str, Coordinates]
    power: Tensor

    @classmethod
    def of(cls, joint: Joint) -> JointDensity:
        """Return the density, in non-centered coordinates.

        Raises:
            ValueError: if the program cannot be evaluated at several points at once.
        """
        trace, joint_sites = poutine.trace(joint).get_trace(), joint.sites()
        sites = {}
        for name, site in latent(trace):
            fn, places = site["fn"], joint_sites[name]
            if fn.support.is_discrete:
                raise ValueError(f"site {name!r} is discrete; {REMEDY}")
            value = places.laid(site["value"].reshape(1, -1), len(joint.batch))
            transform = None if _normal(fn) else biject_to(fn.support)
            free = value if transform is None else transform.inv(value)[:, : value.shape[1]]
            sites[name] = Coordinates(tuple(free.shape[1:]), transform)
        size = sum(one.size for one in sites.values())
        density = cls(joint, sites, joint.batch.size.new_zeros(size))
        density.validate(trace)
        return density

    def __call__(self, w: Tensor) -> Tensor:
        """Return log densities [K] of coordinates w [K, D], up to a constant."""
        return self.evaluate(w).log_density

    def evaluate(self, w: Tensor) -> DensityValues:
        """Return log densities and values of sites at coordinates w [K, D]."""
        parts = self._split(w)
        run = _Run(self.sites, parts, self._split(self.power[None]))
        with run, rejecting():
            self.joint()
        free = {name: part for name, part in parts.items() if self.sites[name].transform}
        return DensityValues(run.total.expand(len(w)), run.values, run.moments, free)

    def coordinates(self, evaluated: DensityValues) -> Tensor:
        """Return the coordinates w [K, D] of values of sites, as `evaluate` returns them."""
        columns, powers = [], self._split(self.power[None])
        for name, one in self.sites.items():
            if one.transform is None:
                loc, log_scale = evaluated.moments[name]
                free = (evaluated.values[name] - loc) * (-(1 - powers[name]) * log_scale).exp()
            else:
                free = evaluated.free[name]
            columns.append(free.flatten(1))
        return torch.cat(columns, 1)

    def centered(self, w: Tensor) -> tuple[JointDensity, Tensor]:
        """Choose the exponents by draws w [S, D].

        Return the density with these, and its coordinates of the draws.
        """
        with torch.no_grad():
            evaluated = self.evaluate(w)
        bare, powers = replace(self, power=torch.zeros_like(self.power)), []
        free = bare._split(bare.coordinates(evaluated))
        for name, one in self.sites.items():
            if one.transform is None:
                powers.append(_power(free[name], *evaluated.moments[name]))
            else:
                powers.append(w.new_zeros(one.size))
        new = replace(self, power=torch.cat(powers))
        return new, new.coordinates(evaluated)

    def validate(self, trace: Any) -> None:
        """Compare densities of several points at once with those of single points."""
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(NUM_POINTS, len(self.power), generator=generator, dtype=torch.float64)
        w = 0.5 * w.to(self.power)
        with torch.no_grad():
            each = torch.cat([self(one[None]) for one in w])
            try:
                together = self(w)
            except (RuntimeError, ValueError, IndexError) as error:
                first = (str(error).splitlines() or [""])[0]
                raise ValueError(
                    f"the program cannot run at several points at once ({first}); {REMEDY}"
                ) from error
        if not torch.allclose(each, together, rtol=DENSITY_TOLERANCE, equal_nan=True):
            raise ValueError(
                f"the program has other log densities at several points at once; {REMEDY}"
            )

    def _split(self, w: Tensor) -> Tensors:
        """Return coordinates [K, D] by site, [K, clients or 1, places, *event]."""
        parts = w.split([one.size for one in self.sites.values()], -1)
        named = zip(self.sites.items(), parts, strict=True)
        return {name: part.reshape(len(w), *one.shape) for (name, one), part in named}


REMEDY = "write it with batch axes from the right, as with posterior draws, or use reference.nuts"


class _Run(Messenger):
    """Pyro messenger that sets latent sites by their coordinates, and adds the log densities."""

    def __init__(self, sites: dict[str, Coordinates], parts: Tensors, powers: Tensors) -> None:
        super().__init__()
        self.sites, self.parts, self.powers = sites, parts, powers
        self.total = next(iter(parts.values())).new_zeros(1)
        self.values: Tensors = {}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def _pyro_sample(self, msg: Message) -> None:
        if not is_unset_latent(msg):
            return
        name = msg["name"]
        w, transform = self.parts[name], self.sites[name].transform
        if transform is None:
            loc, scale = cast("tuple[Tensor, Tensor]", _normal(msg["fn"]))
            log_scale = scale.log()
            growth = (1 - self.powers[name]) * log_scale
            value, jacobian = loc + growth.exp() * w, growth.expand_as(w)
            self.moments[name] = (loc.expand_as(w), log_scale.expand_as(w))
        else:
            transform = biject_to(msg["fn"].support)  # which may depend on other sites
            value = transform(w)
            each = w.expand(-1, value.shape[1], *[-1] * (w.dim() - 2))  # [K, C, places, *event]
            jacobian = transform.log_abs_det_jacobian(each, value)
            # Bounds of a shared site, which other sites set, are repeated for all clients.
            value, jacobian = (v[:, : w.shape[1]] for v in (value, jacobian))
        self.values[name] = value
        self.total = self.total + _by_point(jacobian)
        msg["value"], msg["done"] = value, True

    def _pyro_post_sample(self, msg: Message) -> None:
        # Before the client plate repeats the value of a shared site for all clients.
        if not is_deterministic(msg) and not site_is_subsample(msg):
            log_p = msg["fn"].log_prob(msg["value"], *msg["args"], **msg["kwargs"])
            self.total = self.total + _by_point(scale_and_mask(log_p, msg["scale"], msg["mask"]))


def _by_point(value: Tensor) -> Tensor:
    """Sum log densities [K or 1, clients, places, ...] by point, [K or 1]."""
    return value.flatten(1).sum(1) if value.dim() > 2 else value.sum()


def _normal(fn: Any) -> tuple[Tensor, Tensor] | None:
    """Return location and scale of a normal distribution, with one client if it is shared."""
    shared, inner = isinstance(fn, OnePrior), fn.fn if isinstance(fn, OnePrior) else fn
    base = base_of(inner)
    if not isinstance(base, torch.distributions.Normal):
        return None
    axis = -2 - inner.event_dim
    loc, scale = (
        v.narrow(axis, 0, 1) if shared and v.dim() >= -axis else v for v in (base.loc, base.scale)
    )
    return loc, scale


def _power(w: Tensor, loc: Tensor, log_scale: Tensor) -> Tensor:
    """Return exponents c [size], 1 minus the variance of w [S, ...] given its loc and scale."""
    y, *inputs = ((v - v.mean(0)).flatten(1) for v in (w, loc, log_scale))
    x = torch.stack(inputs, -1)  # [S, size, 2]
    square = torch.einsum("sdi,sdj->dij", x, x)  # [size, 2, 2]
    one = torch.eye(2).to(x)
    unit = square.diagonal(dim1=1, dim2=2).clamp(min=1e-30).rsqrt()
    square = square * unit[:, :, None] * unit[:, None] + 1e-6 * one
    slopes = torch.linalg.solve(square, unit * torch.einsum("sdi,sd->di", x, y))
    left = y - torch.einsum("sdi,di->sd", x, unit * slopes)  # [S, size]
    constant = inputs[0].abs().amax(0) + inputs[1].abs().amax(0) == 0
    part = torch.where(constant, 0.0, 1 - left.square().mean(0)).clamp(0.0, 1.0)
    # The exponent that suits small scales, where the centered form is narrow.
    ratio = (2 * inputs[1].quantile(LOW_PROBABILITY, 0)).exp()
    return part * ratio / (1 - part + part * ratio)
