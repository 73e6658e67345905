"""Prior of the shared variables without a run of the program at every step of a sampler.

The program is run at the first two evaluations of a number of points. The second run captures

- each shared site whose distribution has constant parameters, by this distribution;
- each normal site whose loc and scale are constants or entries of other sites, by these entries;
- the roots of the effects and the noise of a linear model, if they are constants or such entries.

A tensor consists of entries of sites if its autograd graph has operations that index, copy or
change the shape, and no others, so that this holds everywhere, not only where it was captured. It
is constant if no torch function computes it from a site, also none without a gradient, such as a
comparison. Any other program is run at every step, as is one whose captured density differs from
its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import base_of, per_draw, weighed
from pyrofl.models.likelihood_factors.structure import (
    ProgramDensities,
    Structure,
    response_of,
)
from pyrofl.tensors import Tensors

# Operations that index, copy or change the shape, as autograd names their backward nodes.
INDEXING_NODES = {
    *("Alias", "AsStrided", "Clone", "Expand", "Index", "IndexSelect", "Permute", "ReshapeAlias"),
    *("Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind"),
    *("UnsafeView", "Unsqueeze", "View"),
}
READS: set[Any] = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__}
READS |= {Tensor.__int__, Tensor.__float__, Tensor.__index__}
COMPARED_FIELDS = ("prior", "roots", "loc", "scale")
MATCH_POINTS = 64  # points at which entries of a tensor are those of sites
CAPTURE_TOLERANCE = 1e-9  # relative difference of the captured density from the program's


class CannotCapture(Exception):
    """A prior that has to be computed by its program."""


class DependencyTracker(TorchFunctionMode):
    """Torch mode that follows which tensors are computed from some tensors, with gradients or not.

    A read of such a tensor by Python, as a number or an array, raises CannotCapture.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.tensors = {id(tensor): tensor for tensor in tensors}

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self.tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(one in self for one in tensors_in((args, kwargs))):
            if func in READS:
                raise CannotCapture
            changed = args[:1] if func is Tensor.__setitem__ else result
            if func is torch.broadcast_tensors:  # each result is of one argument alone
                changed = [new for one, new in zip(args, result, strict=True) if one in self]
            self.tensors |= {id(one): one for one in tensors_in(changed)}
        return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value and in its lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in([*value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


@dataclass(frozen=True)
class Entries:
    """A constant tensor, or a tensor of entries of the shared sites' values.

    Attributes:
        shape: of the tensor; its first axis are the points.
        at: index of each entry among the values of all sites.
        constant: the tensor, if it depends on no site.
    """

    shape: torch.Size
    at: Tensor
    constant: Tensor | None = None

    @classmethod
    def of(
        cls, tensor: Tensor, shape: torch.Size, flat: Tensor, dependents: DependencyTracker
    ) -> Entries:
        """Find the entries of a tensor, expanded to [S, ...], among all sites' values [S, D]."""
        is_constant, tensor = tensor not in dependents, tensor.expand(shape)
        if is_constant:
            return cls(shape, torch.zeros(0, dtype=torch.long), tensor)
        if not tensor.requires_grad or not _is_indexing(tensor):
            raise CannotCapture
        entries = tensor.detach().reshape(len(flat), -1)[:MATCH_POINTS]
        same = (entries[:, :, None] == flat[:MATCH_POINTS, None]).all(0)
        if not bool(same.any(-1).all()):
            raise CannotCapture
        return cls(shape, same.int().argmax(-1))

    def __call__(self, flat: Tensor) -> Tensor:
        """Return the tensor at values [S, D] of all sites."""
        return flat[:, self.at].view(self.shape) if self.constant is None else self.constant


class NormalSite(NamedTuple):
    """Loc and scale of a normal site, [S, 1, 1, *p] each, and how its density counts."""

    loc: Entries
    scale: Entries
    site: Mapping[str, Any]

    def log_prob(self, value: Tensor, flat: Tensor) -> Tensor:
        """Return the log density [S, 1, 1] at values [S, 1, 1, *p]."""
        scale = self.scale(flat)
        off = (value - self.loc(flat)) / scale
        density = -0.5 * off.square() - scale.log() - 0.5 * math.log(2 * math.pi)
        return density.flatten(2).sum(-1, keepdim=True)


class ConstantSite(NamedTuple):
    """Distribution of a site with constant parameters, and how its density counts."""

    site: Mapping[str, Any]

    def log_prob(self, value: Tensor, flat: Tensor) -> Tensor:
        """Return the log density [S, 1, 1] at values [S, 1, 1, *p]."""
        density: Tensor = self.site["fn"].log_prob(value)
        return density


@dataclass(frozen=True)
class Capture:
    """Prior of a structure at S points, in terms of the values of its shared sites."""

    structure: Structure
    sites: Mapping[str, NormalSite | ConstantSite]
    roots: Mapping[str, tuple[Entries, bool]]
    noise: Entries | None  # sd of a normal response, [S, 1, 1]
    like: ProgramDensities

    def __call__(self, u: Tensor) -> ProgramDensities:
        """Evaluate the prior at u [S, d], differentiably."""
        values, growth = _values(self.structure, u)
        flat = torch.cat([v.reshape(len(u), -1) for v in values.values()], -1)
        prior = growth
        for layout in self.structure.shared_sites.sites:
            value = values[layout.name]
            if (captured := self.sites.get(layout.name)) is not None:
                density = weighed(captured.site, captured.log_prob(value, flat))
                prior = prior + per_draw(density, 1)
        roots = {name: (entries(flat), matrix) for name, (entries, matrix) in self.roots.items()}
        response = self.like.response
        if response is not None and self.noise is not None:
            response = response._replace(sd=self.noise(flat))
        return ProgramDensities(
            prior,
            self.like.likelihood,
            self.structure.roots(u[:, None], values, roots),
            response,
            *self._loc_and_scale(flat),
        )

    def loc_and_scale(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return `loc` and `scale` [S, 1, d] of the prior at u [S, d]."""
        values, _ = _values(self.structure, u)
        return self._loc_and_scale(torch.cat([v.reshape(len(u), -1) for v in values.values()], -1))

    def _loc_and_scale(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return `loc` and `scale` [S, 1, d] at values [S, D] of all sites."""
        locs, scales = [], []
        for layout in self.structure.shared_sites.sites:
            shape, captured = (len(flat), 1, len(layout.mean)), self.sites.get(layout.name)
            if layout.name in self.structure.scaled_sites and isinstance(captured, NormalSite):
                locs.append(captured.loc(flat).reshape(shape))
                scales.append(captured.scale(flat).reshape(shape))
            else:
                locs.append(flat.new_zeros(shape))
                scales.append(flat.new_ones(shape))
        return torch.cat(locs, -1), torch.cat(scales, -1)


class CapturedPrior:
    """Prior of a structure at points u [S, d], with one client; see the module docstring."""

    def __init__(self, structure: Structure, blank: Batch) -> None:
        self.structure, self.blank = structure, blank
        self.captures: dict[int, Capture | None] = {}
        self.sizes: set[int] = set()

    def __call__(self, u: Tensor) -> ProgramDensities:
        """Evaluate the prior, differentiably; the likelihood is that of another point."""
        capture = self._cached_capture(u)
        return self.program(u) if capture is None else capture(u)

    def loc_and_scale(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return `loc` and `scale` [S, 1, d] of the prior at u [S, d], differentiably."""
        if (capture := self._cached_capture(u)) is not None:
            return capture.loc_and_scale(u)
        densities = self.program(u)
        return densities.loc, densities.scale

    def _cached_capture(self, u: Tensor) -> Capture | None:
        """Return the captured prior at as many points as u [S, d] has, if there is one."""
        if len(u) not in self.sizes:
            self.sizes.add(len(u))
            return None
        if len(u) not in self.captures:
            self.captures[len(u)] = self._capture_checked_at(u.detach())
        return self.captures[len(u)]

    def program(self, u: Tensor) -> ProgramDensities:
        """Run the program's prior."""
        none = u.new_zeros(len(u), 1, self.structure.client_sites.size)  # [S, 1, m]
        return self.structure.evaluate(u[:, None], none, self.blank)

    def _capture_checked_at(self, u: Tensor) -> Capture | None:
        """Capture the prior at points u [S, d]; None if it has to be computed by its program."""
        with torch.no_grad():
            expected = self.program(u)
        try:
            with torch.enable_grad():
                capture = self._trace_program(u, expected)
            with torch.no_grad():
                captured = capture(u)
        except CannotCapture:
            return None
        pairs = [(getattr(expected, n), getattr(captured, n)) for n in COMPARED_FIELDS]
        if expected.response is not None and captured.response is not None:
            pairs.append((expected.response.sd, captured.response.sd))
        same = all(
            torch.allclose(a, b.expand_as(a), CAPTURE_TOLERANCE, 0.0, equal_nan=True)
            for a, b in pairs
        )
        return capture if same else None

    def _trace_program(self, u: Tensor, expected: ProgramDensities) -> Capture:
        """Run the program at values of its shared sites, and find what depends on them."""
        structure = self.structure
        if any(site.places != 1 for site in structure.shared_sites.sites):
            raise CannotCapture
        points = {n: v.detach() for n, v in _values(structure, u)[0].items()}
        flat = torch.cat([v.reshape(len(u), -1) for v in points.values()], -1)  # [S, D]
        values = {n: v.clone().requires_grad_() for n, v in points.items()}
        with DependencyTracker(values.values()) as dependents:
            trace, handler = structure.trace(values, self.blank, len(u))
            response = response_of(trace, self.blank) if expected.response is not None else None
        sites = {
            n: _capture_site(trace.nodes[n], points[n], flat, dependents)
            for n in values
            if not isinstance(base_of(trace.nodes[n]["fn"]), dist.ImproperUniform)
        }
        roots = {
            n: (Entries.of(v, v.shape, flat, dependents), matrix)
            for n, (v, matrix) in handler.roots.items()
        }
        noise = None
        if expected.response is not None:
            if response is None:
                raise CannotCapture
            noise = Entries.of(response.sd, expected.response.sd.shape, flat, dependents)
        return Capture(structure, sites, roots, noise, expected)


def _capture_site(
    site: Mapping[str, Any], point: Tensor, flat: Tensor, dependents: DependencyTracker
) -> NormalSite | ConstantSite:
    """Return a site of a trace; raise CannotCapture if it depends on others in another way.

    Args:
        site: the site, at a point.
        point: its value there, [S, 1, 1, *p], as a tensor of its own.
        flat: values of all sites there, [S, D].
        dependents: tensors that were computed from the sites' values.
    """
    counts = {"scale": site["scale"], "mask": site["mask"]}
    if any(one in dependents for one in tensors_in(counts)):
        raise CannotCapture
    with dependents:
        density = site["fn"].log_prob(point)
    if density not in dependents:
        return ConstantSite({**counts, "fn": site["fn"]})
    base = base_of(site["fn"])
    if not isinstance(base, torch.distributions.Normal):
        raise CannotCapture
    loc, scale = (Entries.of(v, point.shape, flat, dependents) for v in (base.loc, base.scale))
    return NormalSite(loc, scale, counts)


def _values(structure: Structure, u: Tensor) -> tuple[Tensors, Tensor]:
    """Return values [S, 1, 1, *p] of the shared sites at u [S, d], and the log Jacobian [S, 1]."""
    values, growth = {}, u.new_zeros(len(u), 1)
    for site, value, more in structure.shared_sites.constrained(u[:, None, None]):
        values[site.name], growth = value, growth + more.sum(-1)
    return values, growth


def _is_indexing(tensor: Tensor) -> bool:
    """Return whether a tensor is made from leaves by indexing, copies and changes of shape."""
    nodes: list[Any] = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        name = node.name()
        if "AccumulateGrad" not in name and name.rpartition("Backward")[0] not in INDEXING_NODES:
            return False
        nodes += [parent for parent, _ in node.next_functions]
    return True
