"""Latent sites of a Pyro program, flattened into one unconstrained vector.

A site inside `batch.rows()`, or in one plate of the program's own, has as many places. Rows that a
client does not have, or that the program hides at such a site, keep the normal that stands for the
prior: they depend on nothing, and count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.nn.functional import pad

from pyrofl.plates import plate
from pyrofl.tensors import Tensors


@dataclass(frozen=True)
class LatentSite:
    """Latent site of a Pyro program, with a normal approximation of its prior."""

    name: str
    shape: Size  # without constraints, of m entries
    transform: Any  # from there to the site's values
    mean: Tensor  # [m]
    sd: Tensor  # [m]
    exact: bool  # whether the prior is this normal
    plate: str = ""  # "rows", or a plate of the program's own, of m entries in all
    places: int = 1  # in that plate
    scales: Tensor | None = None  # [m], where the log of its scale is in the Layout; or -1

    @property
    def of_rows(self) -> bool:
        """Whether the latent site has a separate value for every row."""
        return self.plate == "rows"

    def stand_in(self, free: Tensor) -> Tensor:
        """Return the log density of unconstrained values, by the prior's normal approximation.

        That is the normal one; the result is [..., B].
        """
        mean, sd = (v.view(self.places, *self.shape)[0].to(free) for v in (self.mean, self.sd))
        return _summed(dist.Normal(mean, sd).log_prob(free), len(self.shape))

    def stand_in_at(self, value: Tensor) -> Tensor:
        """Return the log density of a site's values under its prior's normal approximation.

        The result is [..., B].
        """
        free = self.transform.inv(value)
        axes = free.dim() - len(self.shape)
        return self.stand_in(free) - self.growth(free, value, axes)

    def growth(self, free: Tensor, value: Tensor, axes: int) -> Tensor:
        """Return the log Jacobian of the transform, summed over all but the first `axes` axes."""
        growth: Tensor = self.transform.log_abs_det_jacobian(free, value)
        return _summed(growth, growth.dim() - axes)

    @property
    def positive(self) -> bool:
        """Whether the site's values are the exponential of its unconstrained values."""
        before, after = (self.transform(torch.full(self.shape, v)) for v in (-1.0, 1.0))
        return before.shape == self.shape and torch.allclose(after, before * math.e**2)


@dataclass(frozen=True)
class Layout:
    """Layout of several latent sites in one flat vector [..., n]."""

    sites: tuple[LatentSite, ...]

    @property
    def size(self) -> int:
        """Number n of entries of the flat vector."""
        return sum(len(site.mean) for site in self.sites)

    @property
    def names(self) -> str:
        """Names of the latent sites, as one space-separated text."""
        return " ".join(site.name for site in self.sites)

    @property
    def of_rows(self) -> list[str]:
        """Names of the latent sites with a separate value for every row."""
        return [site.name for site in self.sites if site.of_rows]

    def each(self, what: str) -> Tensor:
        """Return one attribute of the sites, such as "mean", for every entry of the flat vector.

        Attributes are "mean", "sd", "exact" and "positive"; the result is [n].
        """
        parts = (getattr(s, what) + torch.zeros_like(s.mean) for s in self.sites)
        return torch.cat([torch.zeros(0), *parts])

    def prior(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [n] of the prior's normal approximation."""
        return self.each("mean"), self.each("sd")

    def moments(self, flat: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each site, given "mean" and "sd" of all [n]."""
        sizes = [len(site.mean) for site in self.sites]
        parts = zip(flat["mean"].split(sizes), flat["sd"].split(sizes), strict=True)
        return {site.name: part for site, part in zip(self.sites, parts, strict=True)}

    def joined(self, values: Tensors) -> Tensor:
        """Return the latent sites' values [*p] as one unconstrained vector [n]."""
        return torch.cat([s.transform.inv(values[s.name]).reshape(-1) for s in self.sites])

    def sample(
        self, u: Tensor, log_density: Tensor, share: Tensor | float, rows: int = 0
    ) -> Tensors:
        """Record a point u [..., C, 1, n] as Pyro sample sites, and return the sites' values.

        The log density [..., C, 1] counts at the first site; the Jacobians, which turn it into a
        density of the sites, count in part. Of rows there are the first, and their sites are left
        out where there is none.
        """
        values, axes = {}, u.dim() - 1
        plates: dict[str, Any] = {"": nullcontext()}  # one of each name, as in any Pyro program
        sizes = [len(site.mean) for site in self.sites]
        for site, part in zip(self.sites, u.split(sizes, -1), strict=True):
            free = part.reshape(*u.shape[:-2], site.places, *site.shape)
            if site.of_rows:
                free, absent = _parted(site, free, axes - 1, rows)
                log_density = log_density - site.stand_in(absent).sum(-1, keepdim=True)
                if not rows:
                    continue
            value = site.transform(free)
            growth = site.growth(free, value, axes).sum(-1, keepdim=True)
            density = pad(log_density - share * growth, (0, value.shape[axes - 1] - 1))
            fn = dist.Delta(value, log_density=density, event_dim=value.dim() - axes)
            if site.plate not in plates:
                plates[site.plate] = plate(site.plate, density.shape[-1], -1)
            with plates[site.plate]:
                values[site.name] = pyro.sample(site.name, fn)
            log_density = torch.zeros_like(log_density)
        return values

    def constrained(self, u: Tensor) -> Iterator[tuple[LatentSite, Tensor, Tensor]]:
        """Yield each site, its values and their log Jacobian at a point u [..., C, 1, n].

        Values are [..., C, 1, *p], and Jacobians [..., C, 1]; sites are of clients, not of rows.
        """
        for site, part in zip(
            self.sites, u.split([len(s.mean) for s in self.sites], -1), strict=True
        ):
            free = part.reshape(*u.shape[:-1], *site.shape)
            value = site.transform(free)
            yield site, value, site.growth(free, value, u.dim() - 1)

    def unconstrained(self, values: Tensors) -> tuple[Tensor, Tensor]:
        """Return values [..., C, B, *p] as one vector [..., C, 1, n], and their log Jacobian.

        B is 1, or the number of places of a site in a plate of the program's own.
        """
        parts, growth = [], torch.zeros(())
        for site in self.sites:
            free = site.transform.inv(values[site.name])
            axes = free.dim() - len(site.shape)
            parts.append(free.reshape(*free.shape[: axes - 1], 1, -1))
            growth = growth + site.growth(free, values[site.name], axes).sum(-1, keepdim=True)
        return torch.cat(parts, -1), growth

    def freed(self, values: Tensors) -> tuple[Tensor, Tensor]:
        """Return draws of latent sites as unconstrained vectors [S, n], and log Jacobians."""
        free = {s.name: s.transform.inv(values[s.name]) for s in self.sites}
        growth = sum(s.growth(free[s.name], values[s.name], 1) for s in self.sites)
        u = torch.cat([v.reshape(len(v), -1) for v in free.values()], -1)
        return u, torch.as_tensor(growth).to(u)


def _parted(site: LatentSite, free: Tensor, axis: int, rows: int) -> tuple[Tensor, Tensor]:
    """Split a latent site's per-row values into those of existing rows and of padding."""
    if rows > site.places:
        raise ValueError(
            f"a client has {rows} rows, and the method was built for {site.places} at most, as "
            f"site {site.name!r} is inside batch.rows(); build the method "
            "from all clients, or from an outline with the largest number of rows of a client"
        )
    part, rest = free.split([rows, site.places - rows], axis)
    return part, rest


def _summed(value: Tensor, axes: int) -> Tensor:
    """Sum a tensor over its last `axes` axes."""
    return value.flatten(value.dim() - axes).sum(-1) if axes > 0 else value
