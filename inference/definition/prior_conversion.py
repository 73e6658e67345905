"""Conversion of what users pass as `prior` to functions, with one-line errors for the rest.

A `Prior` is the complete prior of every parameter: a Pyro distribution, which each entry gets, a
family of location 0 and scale 1, or a function (name, shape, received, local, batch). Of a
`PriorFamily` the method provides location and scale: a class with these arguments, a function (loc,
scale), or a distribution of location 0 and scale 1. `as_prior` and `as_family` convert them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro.distributions import MaskedDistribution, TorchDistribution, constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Size, Tensor

from pyrofl.arguments import accepts, described
from pyrofl.data import Batch
from pyrofl.inference.definition.prior_by_name import ByName
from pyrofl.tensors import Tensors

PriorFunction = Callable[[str, Size, Tensors, Tensors, Batch], TorchDistribution]
"""(name, shape, received, local, batch) -> distribution with event shape `shape`."""

LocationScale = Callable[[Tensor, Tensor], TorchDistribution]
"""(loc, scale) -> distribution: family of a prior; the method provides center and scale."""

PriorFamily = LocationScale | TorchDistribution | ByName
"""Family of a prior whose location and scale the method provides; see `as_family`."""

Prior = PriorFunction | TorchDistribution | LocationScale
"""Complete prior of every parameter: a distribution, a family or a function; see `as_prior`."""

SUCH_AS = {
    constraints.real: "dist.Normal(0.0, 1.0), dist.Laplace or priors.student_t(4.0)",
    constraints.simplex: "dist.Dirichlet(torch.ones(K))",
}
FAMILIES = "dist.Normal, dist.Laplace, priors.student_t(4.0), priors.mixture() or priors.Horseshoe"
REALS = (-1e3, -1.0, 0.0, 1.0, 1e3)


@dataclass(frozen=True)
class SameForAll:
    """Prior with the same distribution for each entry of a parameter.

    A distribution over vectors is that of the parameter's last axes.
    """

    fn: TorchDistribution

    def __call__(
        self, name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        """Return the prior distribution of the parameter `name`."""
        fn = _moved(self.fn, batch.size)
        return cast("TorchDistribution", _over(fn, shape))


def as_prior(
    prior: object,
    shapes: Mapping[str, Size] | None = None,
    support: Any = constraints.real,
    *,
    may_be_learned: bool = True,
) -> PriorFunction:
    """Return a prior as a function (name, shape, received, local, batch) -> distribution.

    Args:
        prior: a Pyro distribution such as dist.Normal(0.0, 1.0), for each entry of a parameter; a
            family such as dist.Laplace or `priors.mixture()`, of location 0 and scale 1; or a
            function of five arguments such as `priors.fixed()`, which is returned unchanged.
        shapes: of the parameters that have this prior, by name. It is called for each of them to
            see that distributions fit, unless it reads what the server sends.
        support: of the parameters, real or simplex.
        may_be_learned: whether the server may learn its scale, see `learned_scales`.

    Raises:
        ValueError: if the prior is something else, or does not fit a parameter.
    """
    _refuse_torch(prior, "prior")
    if _is_distribution(prior):
        function: PriorFunction = SameForAll(cast("TorchDistribution", prior))
    elif _is_family(prior):
        zero = torch.zeros((), dtype=torch.float64)
        function = SameForAll(as_family(prior)(zero, zero + 1))
    elif _takes(prior, 5):
        function = cast("PriorFunction", prior)
    else:
        raise ValueError(
            f"prior is {described(prior)}; expected a distribution, a family (loc, scale), or a "
            "function (name, shape, received, local, batch) -> distribution: such as "
            f"{SUCH_AS[support]}"
        )
    if isinstance(function, ByName) and shapes:
        function.refuse_unused(shapes)
    for name, shape in (shapes or {}).items():
        site_prior = function.of(name) if isinstance(function, ByName) else function
        if not may_be_learned and _is_learned(site_prior, name, shape):
            raise ValueError(
                f"prior of {name!r} has a scale that the server learns, which this method cannot "
                f"use; expected a prior such as {SUCH_AS[support]}"
            )
        if support is constraints.real and _is_of_library(site_prior):
            continue  # it fits any shape
        if (fn := probe_prior(site_prior, name, shape)) is not None:
            _refuse_unfit(fn, name, shape, support)
    return function


def as_families(prior: object, names: Iterable[str]) -> dict[str, LocationScale]:
    """Return the location-scale family of each parameter's prior, by the parameter's name.

    Args:
        prior: a family for all parameters, see `as_family`, or families by `priors.by_name`.
        names: of the parameters that have this prior.

    Raises:
        ValueError: if a prior is no family, a parameter has none, or a pattern matches none.
    """
    names = list(names)
    if not isinstance(prior, ByName):
        return dict.fromkeys(names, as_family(prior))
    prior.refuse_unused(names)
    each = {p: as_family(one, f"prior of {p!r}") for p, one in prior.families.items()}
    return {name: each[prior.pattern_of(name)] for name in names}


def as_family(family: object, name: str = "prior") -> LocationScale:
    """Return a location-scale family as a function (loc, scale) -> distribution.

    Args:
        family: a class of Pyro whose first arguments are loc and scale, such as dist.Laplace; a
            function such as `priors.student_t(4.0)`; or a distribution of location 0 and scale 1,
            such as dist.StudentT(4.0).
        name: of the argument, for errors.

    Raises:
        ValueError: if it is something else, or not over all real numbers.
    """
    expected = f"expected a family whose location and scale are set elsewhere, such as {FAMILIES}"
    _refuse_torch(family, name)
    if _is_distribution(family):
        family = _standard(cast("TorchDistribution", family), name, expected)
    if isinstance(family, type) and not _starts_with_loc_and_scale(family):
        raise ValueError(
            f"{name} is {described(family)}, whose arguments are not (loc, scale) but "
            f"({', '.join(inspect.signature(family).parameters)}); {expected}"
        )
    if not _takes(family, 2):
        whole = _takes(family, 5)
        what = (
            "a complete prior, with a location and scale of its own" if whole else described(family)
        )
        raise ValueError(f"{name} is {what}; {expected}")
    function = cast("LocationScale", family)
    loc = torch.zeros(2, 3, dtype=torch.float64)
    try:
        fn = function(loc, loc + 1)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} {described(family)} fails at loc 0 and scale 1: {type(error).__name__}: {why}"
            f"; {expected}"
        ) from error
    _refuse_bad_support(fn, name, constraints.real, expected)
    if (fn.batch_shape, fn.event_shape) != (loc.shape, Size()):
        raise ValueError(
            f"{name} {described(family)} has batch shape {tuple(fn.batch_shape)} and event shape "
            f"{tuple(fn.event_shape)} for loc and scale of shape (2, 3); expected (2, 3) and ()"
        )
    return function


def probe_prior(
    prior: PriorFunction, name: str, shape: Size, received: Tensors | None = None
) -> TorchDistribution | None:
    """Return the prior distribution of a parameter; None if it needs other tensors or rows."""
    try:
        return prior(name, shape, received or {}, {}, nobody())
    except Exception:
        return None


def _is_learned(prior: PriorFunction, name: str, shape: Size) -> bool:
    """Return whether a prior needs a scale from the server, "prior/NAME" [C, 1], and no more."""
    scale = {f"prior/{name}": torch.ones(1, 1, dtype=torch.float64)}
    return (
        probe_prior(prior, name, shape) is None
        and probe_prior(prior, name, shape, scale) is not None
    )


def nobody() -> Batch:
    """Return a batch of one client with one row of one number, in double precision."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return Batch(one, one, one.bool(), one[0], one[0].long())


def _refuse_unfit(fn: object, name: str, shape: Size, support: Any) -> None:
    """Raise ValueError if a distribution is not one of a parameter of this shape and support."""
    expected = f"expected a prior such as {SUCH_AS[support]}"
    _refuse_bad_support(fn, "prior", support, expected)
    prior = cast("TorchDistribution", fn)
    over = Size((*prior.batch_shape, *prior.event_shape))
    if prior.event_shape != shape or over[: -len(shape) or None] not in ((), (1,), (1, 1)):
        each = "a distribution of one number, which each entry gets, or an event of that shape"
        each = (
            f"dist.Dirichlet(torch.ones({shape[-1]}))" if support is constraints.simplex else each
        )
        raise ValueError(
            f"prior is {described(_bare(prior))} of batch shape {tuple(prior.batch_shape)} and "
            f"event shape {tuple(prior.event_shape)} for parameter {name!r} of shape "
            f"{tuple(shape)}; expected {each}, see priors.by_name"
        )


def _refuse_bad_support(fn: object, what: str, support: Any, expected: str) -> None:
    """Raise ValueError unless an object is a distribution of all real numbers or a simplex."""
    if not _is_distribution(fn):
        raise ValueError(f"{what} returns {described(fn)}; {expected}")
    prior = cast("TorchDistribution", fn)
    prior_support: Any = prior.support
    shown = _bare(prior)
    if prior_support.is_discrete:
        raise ValueError(f"{what} is {described(shown)}, which is discrete; {expected}")
    if isinstance(shown, dist.Delta):
        raise ValueError(f"{what} is {described(shown)}, a point without a density; {expected}")
    if isinstance(shown, MaskedDistribution):
        raise ValueError(f"{what} is masked; {expected}, or priors.flat for a density of 1")
    numbers = [v for n in shown.arg_constraints if isinstance(v := getattr(shown, n, None), Tensor)]
    if not all(bool(v.isfinite().all()) for v in numbers):
        raise ValueError(
            f"{what} is {described(shown)}, with a parameter that is not finite; {expected}"
        )
    whole = Size((*prior.batch_shape, *prior.event_shape))
    size = whole[-1] if whole else 1
    if support is constraints.simplex:
        inside, outside = [torch.full(whole, 1.0 / size)], [torch.full(whole, 0.5 / size)]
    else:
        inside, outside = [torch.full(whole, v) for v in REALS], []
    fits = all(bool(prior_support.check(v).all()) for v in inside) and not any(
        bool(prior_support.check(v).all()) for v in outside
    )
    if not fits:
        kind = "weights that sum to one" if support is constraints.simplex else "any real number"
        raise ValueError(
            f"{what} is {described(shown)}, whose support is {shown.support!s}, and parameters "
            f"are {kind}; "
            f"{expected}"
        )


def _refuse_torch(value: object, name: str) -> None:
    """Raise ValueError for a distribution of PyTorch, which Pyro cannot sample."""
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, torch.distributions.Distribution) and not issubclass(
        kind, TorchDistributionMixin
    ):
        raise ValueError(
            f"{name} is {kind.__module__}.{kind.__name__}; expected a distribution of Pyro: "
            f"pyro.distributions.{kind.__name__}"
        )


def _standard(fn: TorchDistribution, name: str, expected: str) -> object:
    """Return the family of a distribution of location 0 and scale 1; else raise ValueError."""
    parameters = {
        n: v for n in getattr(fn, "arg_constraints", {}) if (v := getattr(fn, n, None)) is not None
    }
    if not {"loc", "scale"} <= parameters.keys() or not _starts_with_loc_and_scale(type(fn), 3):
        raise ValueError(f"{name} is {described(fn)}, which has no location and scale; {expected}")
    loc, scale = parameters.pop("loc"), parameters.pop("scale")
    if fn.batch_shape or fn.event_shape or float(loc) != 0 or float(scale) != 1:
        raise ValueError(
            f"{name} is {described(fn)}, with a location and scale of its own; {expected}, or "
            f"{type(fn).__name__} of location 0 and scale 1"
        )
    return partial(_of_family, type(fn), parameters) if parameters else type(fn)


def _of_family(kind: Any, parameters: Tensors, loc: Tensor, scale: Tensor) -> TorchDistribution:
    """Return a distribution of a class with further parameters than location and scale."""
    distribution: TorchDistribution = kind(
        **{n: v.to(loc) for n, v in parameters.items()}, loc=loc, scale=scale
    )
    return distribution


def _over(fn: Any, shape: Size) -> Any:
    """Return a distribution over the entries of a parameter of this shape, as one event."""
    event_dims = len(fn.event_shape)
    if tuple(shape[len(shape) - event_dims :]) != tuple(fn.event_shape) or event_dims > len(shape):
        return fn  # of another shape, which as_prior refuses
    lead = shape[: len(shape) - event_dims]
    fn = fn.expand(lead) if not fn.batch_shape or fn.batch_shape == lead else fn
    return fn.to_event(len(fn.batch_shape))


def _moved(value: Any, to: Tensor) -> Any:
    """Return a distribution with the floating-point type and device of a tensor."""
    if isinstance(value, Tensor):
        return value.to(to) if value.is_floating_point() else value.to(to.device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(v, to) for v in value)
    if isinstance(value, TorchDistributionMixin | torch.distributions.Distribution):
        moved = {n: _moved(v, to) for n, v in vars(value).items()}
        if any(moved[n] is not v for n, v in vars(value).items()):
            value = copy.copy(value)
            vars(value).update(moved)
    return value


def _bare(fn: Any) -> Any:
    """Return the distribution whose batch axes are event axes of the given one."""
    while isinstance(fn, torch.distributions.Independent):
        fn = fn.base_dist
    return fn


def _is_distribution(value: object) -> bool:
    return isinstance(value, TorchDistributionMixin)


def _is_family(value: object) -> bool:
    return isinstance(value, type) or (_takes(value, 2) and not _takes(value, 5))


def _starts_with_loc_and_scale(kind: type, among: int = 2) -> bool:
    """Return whether loc and scale are among the first arguments of a class."""
    return {"loc", "scale"} <= {*list(inspect.signature(kind).parameters)[:among]}


def _takes(function: object, count: int) -> bool:
    return accepts(function, *range(count))


def _is_of_library(prior: object) -> bool:
    """Return whether a prior is one of the library's own functions, which fit any shape."""
    where = prior if inspect.isfunction(prior) else type(prior)
    return where.__module__.startswith("pyrofl.") and not isinstance(prior, SameForAll)
