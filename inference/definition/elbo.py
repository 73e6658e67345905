"""Evidence lower bound (ELBO) of each client, computed under Pyro's client plate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import reduce
from numbers import Real
from typing import Any, cast

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints, kl_divergence
from torch.distributions.utils import lazy_property

from pyrofl.arguments import Count, NotNegative, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.programs import Loss, Program
from pyrofl.inference.definition.rejection import (
    POINT_ERRORS,
    rejecting,
    without_rejected_gradients,
)
from pyrofl.inference.definition.spherical import Spherical, distances
from pyrofl.plates import DRAWS_PLATE, ONCE, KeptPlates, plate
from pyrofl.tensors import Tensors, add_trailing_axes, default_type


@dataclass(frozen=True)
class Elbo:
    """Loss function that computes the negative ELBO of each client; see `elbo`."""

    num_particles: int | None
    kl: float | Callable[[Tensors, Tensors, Batch], Tensor]
    mean: bool
    analytic: bool
    likelihood: bool = True  # False leaves the divergence of the guide from the prior alone

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the negative ELBO of each client, [C]."""
        q, p = traces(model, guide, received, local, batch, self.num_particles)
        clients, drawn, kl = len(batch), bool(self.num_particles), self.kl
        weight = _weights(kl(received, local, batch), clients)[:, None] if callable(kl) else kl
        costs = [torch.zeros_like(batch.size)[:, None]]
        if self.likelihood:
            costs = [-weighed(site, log_prob(name, site)) for name, site in observed(p)]
        scores = []
        bare = all(is_point(site["fn"]) for _, site in latent(q))
        pulls: list[tuple[Any, Tensor]] = []  # points with spherical priors
        for name, site in latent(q):
            reparametrized = site["fn"].has_rsample
            if reparametrized and not callable(kl) and kl == 0:
                continue
            partner = p.nodes.get(name)
            prior = partner["fn"] if bare and partner is not None else None
            # Without constants the cost is mu / 2 ||w - w_received||^2, which is easy to read.
            if isinstance(prior, Spherical) and not prior.scale.requires_grad:
                pulls.append((partner, site["value"]))
                partner = None
            log_q, log_ratio = log_densities(site, partner, self.analytic)
            costs.append(weight * log_ratio)
            if not reparametrized:
                scores.append(log_q)
        costs += [weight * distance for distance in prior_distances(pulls)]
        value: Tensor = reduce(
            torch.add, (per_draw(cost, clients, drawn) for cost in sum_by_shape(costs))
        )
        if p.rejects:
            value = without_rejected_draws(value)
        everything = value.detach().unsqueeze(-1) if scores else value
        for score in scores:  # REINFORCE: a gradient, but no value
            # A row's draw affects the costs of that row alone, and those of its client as a whole.
            blame = reduce(torch.add, costs).detach() if score.shape[-1] > 1 else everything
            signal = per_draw(blame * score, clients, drawn)
            value = value + signal - signal.detach()
        total = value.mean(0) if len(value) > 1 else value[0]  # [S, C] -> [C]
        return total / batch.size if self.mean else total


def without_rejected_draws(value: Tensor) -> Tensor:
    """Return losses [S, C] whose mean is that of the draws that are not rejected, which are NaN."""
    is_accepted = ~value.isnan()
    return torch.where(is_accepted, value, 0.0) * (len(value) / is_accepted.sum(0))


Look = Callable[[Tensors, Tensors], Tensors]
"""(received, local) -> tensors that the programs read instead of one of the two."""


@dataclass(frozen=True)
class TransformedLoss:
    """Loss function that transforms the tensors before the Pyro model and guide read them."""

    loss: Loss
    view: Look
    center: Look | None = None

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return each client's loss, [C], computed from transformed tensors."""
        center = self.center(received, local) if self.center else received
        return self.loss(model, guide, center, self.view(received, local), batch)


@dataclass(frozen=True)
class On:
    """Loss function that uses its own model and guide instead of those of the method."""

    loss: Loss
    model: Program
    guide: Program

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return each client's loss, [C], under the model and guide of this object."""
        return self.loss(self.model, self.guide, received, local, batch)


@dataclass(frozen=True)
class Directed:
    """Loss function with a constant direction added to its gradient, but not to its value.

    Attributes:
        loss: the loss.
        names: local tensors with a direction.
        direction: (name, received, local) -> direction [C, *p], the same during a phase.
    """

    loss: Loss
    names: tuple[str, ...]
    direction: Callable[[str, Tensors, Tensors], Tensor]

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return each client's loss, [C], whose gradient has the directions added."""
        value = self.loss(model, guide, received, local, batch)
        directions = [self.direction(n, received, local).detach() for n in self.names]
        directed: Tensor = AddDirections.apply(
            value, len(directions), *directions, *(local[n] for n in self.names)
        )
        return directed


class AddDirections(torch.autograd.Function):
    """Autograd function that adds directions to the gradients of a loss [C] by some tensors."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, many: int, *tensors: Tensor) -> Tensor:
        """Return the loss, given `many` directions and then the tensors [C, *p]."""
        ctx.save_for_backward(*tensors[:many])
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients by the loss and, along the directions, by the tensors."""
        (grad,), directions = grads, ctx.saved_tensors
        none = (None for _ in (0, *directions))
        return grad, *none, *(v * add_trailing_axes(grad, v) for v in directions)


@dataclass(frozen=True)
class OfGradients:
    """Base class of losses whose gradient combines gradients of another loss.

    They combine gradients and products with its Hessian linearly, unless `is_linear` is false.
    """

    loss: Loss

    @property
    def is_linear(self) -> bool:
        """Whether gradients are combined linearly."""
        return True


@checked
def elbo(
    num_particles: Count | None = None,
    kl: NotNegative | Callable[[Tensors, Tensors, Batch], Tensor] = 1.0,
    mean: bool = False,
    analytic: bool = True,
) -> Elbo:
    """Create a loss function that returns the negative ELBO of each client.

    The loss of a client is the sum of -log p(y | w) over its rows, plus kl times the KL divergence.

    With the delta guide and a normal prior with one fixed scale, as that of `proximal`, the KL
    divergence is half the squared distance from the center in units of the scale, without
    constants.

    Args:
        num_particles: Monte Carlo draws of the guide; None draws once, without an axis for draws.
        kl: weight of the KL divergence from prior to guide, a number or (received, local, batch)
            -> [C]. 1 is exact Bayes.
        mean: divide by the client's number of rows (loss per row, as in most papers) instead of
            returning the client's total.
        analytic: use the closed form of the KL divergence of a site where PyTorch has one.

    Returns:
        A loss (model, guide, received, local, batch) -> [C]; it raises ValueError if guide and
        model have different latent sites.
    """
    return Elbo(num_particles, kl, mean, analytic)


def _weights(value: object, clients: int) -> Tensor:
    """Return weights of the divergence; raise ValueError unless there is one for each client."""
    if isinstance(value, Tensor) and value.shape == (clients,):
        return value
    kind = (
        f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
    raise ValueError(
        f"kl returns {kind}; expected a tensor of shape [{clients}], one number for each client"
    )


IN_EVERY_RUN = (
    "in every run: sample a site of one branch in the others too, and choose the value by "
    "torch.where"
)
"""Remedy for a program with sites that depend on data or values."""


def traces(
    model: Program,
    guide: Program,
    received: Tensors,
    local: Tensors,
    batch: Batch,
    num_particles: int | None = None,
) -> tuple[Any, Any]:
    """Run the Pyro guide, then the model with the guide's draws; return both execution traces.

    The one place that inserts the axis of the rows: tensors [C, *p] reach programs as [C, 1, *p].
    """
    received, local = with_rows(received, len(batch)), with_rows(local, len(batch))
    with (
        default_type(batch.size.dtype),
        KeptPlates(),
        plate(DRAWS_PLATE, num_particles, -3) if num_particles else nullcontext(),
    ):
        q = trace_program(guide, (received, local, batch))
        p = trace_program(model, (received, local, batch), q)
    guided = dict(latent(q))
    unguided = [n for n, _ in latent(p) if n not in guided]
    unmodelled = [
        n for n, s in guided.items() if n not in p.nodes and not s["infer"].get("is_auxiliary")
    ]
    if unguided or unmodelled:
        raise ValueError(
            f"the guide lacks {sorted(unguided)} and the model lacks {sorted(unmodelled)}; "
            f"both must have the same latent sites, {IN_EVERY_RUN}"
        )
    return q, p


def with_rows(tensors: Tensors, clients: int) -> Tensors:
    """Insert an axis for rows after the client axis: tensors [C, *p] -> [C, 1, *p]."""
    for name, value in tensors.items():
        if not value.dim() or len(value) != clients:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; expected length {clients}, the number of "
                "clients, in its first axis"
            )
    return {n: v.unsqueeze(1) for n, v in tensors.items()}


def latent(trace: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and content of each latent sample site in a Pyro trace."""
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site):
            yield name, site


def observed(trace: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and content of each observed sample site in a trace, but no deterministic site."""
    for name, site in trace.nodes.items():
        seen = site["type"] == "sample" and site["is_observed"] and not site_is_subsample(site)
        if seen and not is_deterministic(site):
            yield name, site


def is_deterministic(site: Any) -> bool:
    """Return whether a Pyro site is deterministic, as created by `pyro.deterministic`."""
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    fn = site["fn"]
    hidden = isinstance(fn, dist.MaskedDistribution) and fn._mask is False
    return bool(site["infer"].get("_deterministic")) or (hidden and is_point(fn))


def log_densities(site: Any, partner: Any | None, analytic: bool) -> tuple[Tensor, Tensor]:
    """Return log q of a latent site, and its scaled, masked log q - log p or analytic KL.

    Auxiliary sites of automatic guides have no partner in the model: they count as log q alone. A
    Delta counts its log density (the Jacobian of a transformed site), never an analytic KL. The
    first value is what a score function needs: the costs that it multiplies are scaled already.
    """
    fn, value = site["fn"], site["value"]
    spread = fn.has_rsample and not is_point(fn)
    if analytic and spread and partner is not None and has_equal_scale_and_mask(site, partner):
        with suppress(NotImplementedError):
            # A distribution equal for all draws is used without their axis.
            exact = kl_divergence(*(s.get(ONCE, s["fn"]) for s in (site, partner)))
            exact = torch.as_tensor(exact)  # the number 0 of distributions masked by False
            return exact, weighed(site, exact)
    log_q = fn.log_density if isinstance(fn, dist.Delta) else fn.log_prob(value)
    paid = log_q if fn.has_rsample else log_q.detach()
    ratio = weighed(site, paid)
    if partner is None or partner["mask"] is False:
        return scale_and_mask(log_q, mask=site["mask"]), ratio
    if not isinstance(partner["fn"], dist.ImproperUniform):
        ratio = ratio - weighed(partner, partner["fn"].log_prob(value))
    return scale_and_mask(log_q, mask=site["mask"]), ratio


def prior_distances(pulls: Iterable[tuple[Any, Tensor]]) -> Iterator[Tensor]:
    """Yield the scaled squared distances between point estimates and the means of normal priors."""
    together: dict[tuple[object, float], list[tuple[Spherical, Tensor]]] = {}
    for site, value in pulls:
        fn = site["fn"]
        if fn.group is None or site["mask"] is not None or torch.is_tensor(site["scale"]):
            yield weighed(site, fn.distance(value))
        else:
            together.setdefault((fn.group, site["scale"]), []).append((fn, value))
    for (_, scale), some in together.items():
        priors, values = zip(*some, strict=True)
        yield scale_and_mask(distances(priors, values), scale)


def log_prob(name: str, site: Any) -> Tensor:
    """Return the log density of a Pyro site's value, without the site's scale and mask."""
    if not isinstance(site["value"], Tensor):
        value = site["value"]
        shown = repr(value) if isinstance(value, Real) else f"a {type(value).__name__}"
        raise ValueError(f"obs of site {name!r} is {shown}; expected a tensor, as batch.y is")
    if site["is_observed"] and not site["value"].dim():
        raise ValueError(
            f"obs of site {name!r} is one number, {site['value'].item():g}; expected one for each "
            "row, as batch.y has, such as torch.ones_like(batch.y)"
        )
    try:
        return cast("Tensor", site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"]))
    except ValueError as error:
        raise ValueError(f"site {name!r}: {error}") from error
    except RuntimeError as error:
        value, kind = site["value"], type(base_of(site["fn"])).__name__
        if "must match the size" in str(error):
            raise ValueError(
                f"site {name!r}: its values have shape {list(value.shape)}, and its {kind} has "
                f"shape {list(site['fn'].shape())}; expected shapes that broadcast, with the rows "
                "last, or after to_event(1) last but one"
            ) from error
        if "can't be cast" not in str(error) or value.is_floating_point():
            raise
        raise ValueError(
            f"site {name!r}: its values are {str(value.dtype).removeprefix('torch.')}, and its "
            f"{kind} needs numbers; use obs=batch.y.to(batch.x.dtype)"
        ) from error


def weighed(site: Any, value: Tensor) -> Tensor:
    """Apply the scale and the mask of a Pyro site to its log density."""
    return cast("Tensor", scale_and_mask(value, site["scale"], site["mask"]))


def has_equal_scale_and_mask(site: Any, partner: Any) -> bool:
    """Return whether two Pyro sites have the same scale and mask, as an analytic KL requires."""
    pairs = [(site[key], partner[key]) for key in ("scale", "mask")]
    return all(
        a is b or (not (torch.is_tensor(a) or torch.is_tensor(b)) and a == b) for a, b in pairs
    )


def is_point(fn: Any) -> bool:
    """Return whether a distribution is a Delta, possibly inside a wrapper such as Independent."""
    return isinstance(base_of(fn), dist.Delta)


def base_of(fn: Any) -> Any:
    """Return the base distribution inside wrappers such as `Independent`."""
    while isinstance(fn, (dist.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)):
        fn = fn.base_dist
    return fn


def normal_event_size(fn: Any) -> int:
    """Return the event size of a normal distribution; 0 for any other distribution."""
    is_normal = isinstance(base_of(fn), torch.distributions.Normal)
    return fn.event_shape.numel() if is_normal and fn.batch_shape[2:] in ((), (1,)) else 0


def parameters(fn: Any) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield name, value and constraint of each parameter of a distribution."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    for name, constraint in getattr(fn, "arg_constraints", {}).items():
        is_set = name in fn.__dict__ or not isinstance(getattr(type(fn), name, None), lazy_property)
        if is_set and not constraints.is_dependent(constraint):
            value = getattr(fn, name)
            if isinstance(value, Tensor):
                yield name, value, constraint


def sum_by_shape(costs: Iterable[Tensor]) -> Iterable[Tensor]:
    """Sum the loss terms that have the same shape; return one tensor for each shape."""
    totals: dict[torch.Size, Tensor] = {}
    for cost in costs:
        totals[cost.shape] = totals[cost.shape] + cost if cost.shape in totals else cost
    return totals.values()


def per_draw(value: Tensor, clients: int, num_particles: bool = True) -> Tensor:
    """Sum a log density over rows and other plates, to [S or 1, C] by posterior draw and client.

    Without draws there is no axis for them: [..., C, B or 1]; the result is [S or 1, C] or [1, C].
    """
    if value.dim() < 2 or value.shape[-2] != clients:
        # Not `torch.broadcast_shapes`, which imports SymPy.
        value = torch.broadcast_tensors(value, value.new_empty(clients, 1))[0]
    value = value.sum(-1)
    num_plates = value.dim() - (2 if num_particles else 1)
    if num_plates > 0:
        value = value.flatten(0, num_plates - 1).sum(0)
    return value.reshape(-1, clients)


class Recorded(Trace):
    """Trace of a program.

    Attributes:
        rejects: whether the program failed at some points, where log densities are NaN.
    """

    rejects = False


class _Recorder(Messenger):
    """Pyro messenger that records a trace, with latent sites fixed to known values."""

    def __init__(self, guide_sites: Any, rejects: bool) -> None:
        super().__init__()
        self.guide_sites, self.trace = guide_sites, Recorded()
        self.trace.rejects = rejects

    def _pyro_sample(self, msg: Any) -> None:
        site = None if msg["is_observed"] else self.guide_sites.get(msg["name"])
        if site is None:
            return
        if site["type"] != "sample" or site["is_observed"]:
            raise RuntimeError(f"site {msg['name']!r} must be sampled in the trace")
        msg["value"], msg["infer"], msg["done"] = site["value"], site["infer"], True
        if self.trace.rejects:
            msg["value"] = without_rejected_gradients(site["value"])

    def _pyro_post_sample(self, msg: Any) -> None:
        if not msg["infer"].get("_do_not_trace"):
            self._pyro_post_param(msg)

    def _pyro_post_param(self, msg: Any) -> None:
        sites, name = self.trace.nodes, msg["name"]
        if name in sites and {msg["type"], sites[name]["type"]} != {"param"}:
            raise RuntimeError(f"several sites are named {name!r}; rename all but one of them")
        sites[name] = msg


def trace_program(program: Program, args: tuple[Any, ...], guide_trace: Any = None) -> Recorded:
    """Run a Pyro program and return its trace; fix latent sites to those of a known trace.

    As `poutine.trace(poutine.replay(program, trace=known)).get_trace(*args)`, in less time, and
    without nodes of arguments and result. Where the program fails at some points, these are
    rejected. Errors of the program get a note with its sites so far.
    """
    sites = guide_trace.nodes if guide_trace else {}
    try:
        return _recorded(program, args, sites, False)
    except POINT_ERRORS:
        pass
    with rejecting():
        return _recorded(program, args, sites, True)


def _recorded(program: Program, args: tuple[Any, ...], guide_sites: Any, rejects: bool) -> Recorded:
    recorder = _Recorder(guide_sites, rejects)
    try:
        with recorder:
            program(*args)
    except Exception as error:
        error.add_note(recorder.trace.format_shapes())
        raise
    return recorder.trace


def with_guide(guide: Program, loss: Loss) -> Loss:
    """Return a copy of a loss function that uses a guide instead of the method's guide."""

    def with_another(
        model: Program, _: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        return loss(model, guide, received, local, batch)

    return with_another
