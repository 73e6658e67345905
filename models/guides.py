"""Guides: families of posteriors over a client's parameters, under the client plate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Size
from torch.distributions import transform_to
from torch.func import functional_call
from torch.nn.functional import softplus

from pyrofl.data import Batch, Federation
from pyrofl.inference.elbo import Program, latent, with_rows
from pyrofl.inference.noise import GuideMean
from pyrofl.tensors import Tensors, role, seeded, spread_out, under

Moments = Callable[[Tensors, Tensors, Batch], tuple[Tensors, Tensors]]
"""(received, local, batch), tensors [C, *p] -> mean and variance of every site, [C, *p]."""


@dataclass(frozen=True)
class Guide:
    """A family of posteriors q(w; local).

    Attributes:
        program: the Pyro guide.
        start: values [*p] or [C, *p] that the sites are centred at -> local parameters.
        moments: mean and variance of every site, for closed forms.
        names: patterns of its local parameters.
        random: whether it has any spread; a guide without needs no Monte Carlo draws.
    """

    program: Program
    start: Callable[[Tensors], Tensors]
    moments: Moments
    names: str
    random: bool = True


Family = Callable[..., Guide]
"""(shapes, scale=, loc=, spread=) -> Guide; `mean_field` and `delta` are two."""


def delta(
    shapes: Mapping[str, Size], *, scale: float = 0.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Put all mass on one point, local["mu/..."]: maximum likelihood, or MAP under a prior.

    Args:
        shapes: of the sites, by name.
        scale: ignored, as is `spread`; there so that guides can be exchanged.
        loc: role of the points, [C, *p].
        spread: ignored.
    """

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for n, shape in shapes.items():
                pyro.sample(n, dist.Delta(local[f"{loc}/{n}"], event_dim=len(shape)))

    def start(centre: Tensors) -> Tensors:
        return under(loc, {n: centre[n] for n in shapes})

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        return mean, {n: torch.zeros_like(v) for n, v in mean.items()}

    return Guide(program, start, moments, f"{loc}/*", random=False)


def mean_field(
    shapes: Mapping[str, Size], *, scale: float = 1.0, loc: str = "mu", spread: str = "pi"
) -> Guide:
    """Let parameters be independent normals, N(mu, softplus(pi)^2).

    Args:
        shapes: of the sites, by name.
        scale: standard deviation at the start.
        loc: role of the means, [C, *p].
        spread: role of the standard deviations before softplus, [C, *p].

    Raises:
        ValueError: if scale is not positive.
    """
    first = inverse_softplus(scale)

    def program(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for n, shape in shapes.items():
                sd = softplus(local[f"{spread}/{n}"])
                pyro.sample(n, dist.Normal(local[f"{loc}/{n}"], sd).to_event(len(shape)))

    def start(centre: Tensors) -> Tensors:
        means = {n: centre[n] for n in shapes}
        return under(loc, means) | under(
            spread, {n: torch.full_like(v, first) for n, v in means.items()}
        )

    def moments(received: Tensors, local: Tensors, batch: Batch) -> tuple[Tensors, Tensors]:
        mean = {n: local[f"{loc}/{n}"] for n in shapes}
        return mean, {n: softplus(local[f"{spread}/{n}"]).square() for n in shapes}

    return Guide(program, start, moments, f"{loc}/* {spread}/*")


def inverse_softplus(value: float) -> float:
    """Return the number whose softplus is `value`.

    Raises:
        ValueError: if value is not positive.

    >>> round(inverse_softplus(1.0), 6)
    0.541325
    """
    if not value > 0:
        raise ValueError(f"scale of the guide is {value}; expected a positive number")
    return value + math.log(-math.expm1(-value))


def from_pyro(
    guide: Callable[..., Any],
    data: Federation,
    *,
    model: Program | None = None,
    received: Tensors | None = None,
    local: Tensors | None = None,
    name: str = "auto",
) -> Guide:
    """Turn an ordinary Pyro guide, or an automatic one, into one per client.

    It is run once on the first client to see its parameters. Every client gets a copy of them,
    unconstrained, in its local state; the global parameter store stays as it was.

    Args:
        guide: a Pyro program (received, local, batch) whose `pyro.param` statements have the
            shapes of one client; or, with `model`, what makes an AutoGuide from it (the class).
            Automatic guides without an argument `create_plates` (AutoMultivariateNormal, flows)
            couple clients, so they need chunk=1.
        data: the federation, for a first batch.
        model: the model that an AutoGuide is made for.
        received: what the programs read of the server, [*p].
        local: what they read of the client besides the guide's own parameters, [*p].
        name: role of the parameters.

    Raises:
        ValueError: when run, if a guide that couples clients meets several at once.
    """
    example = (
        with_rows(spread_out(received or {}, 1), 1),
        with_rows(spread_out(local or {}, 1), 1),
        data.batch(torch.tensor([0])),
    )
    bind = _function if model is None else partial(_automatic, model=model)
    values, run = bind(guide, example)
    with seeded(0):
        one = under(name, {n: v.unsqueeze(0) for n, v in values.items()})
        sites = dict(latent(poutine.trace(run).get_trace(role(name, with_rows(one, 1)), *example)))

    def program(received: Tensors, local: Tensors, batch: Batch) -> Any:
        return run(role(name, local), received, local, batch)

    def start(centre: Tensors) -> Tensors:
        lead = Size()
        for site, value in centre.items():
            if site in sites:
                lead = value.shape[: value.dim() - sites[site]["fn"].event_dim]
        return under(name, {n: v.expand((*lead, *v.shape)) for n, v in values.items()})

    return Guide(program, start, partial(site_moments, program), f"{name}/*")


def _function(guide: Callable[..., Any], example: Any) -> tuple[Tensors, Callable[..., Any]]:
    """Return the unconstrained parameters of a Pyro program, and the program as their function."""
    with pyro.get_param_store().scope(), seeded(0):
        trace = poutine.trace(guide, param_only=True).get_trace(*example)
        constraints = {
            n: s["kwargs"].get("constraint", dist.constraints.real)
            for n, s in trace.nodes.items()
            if s["type"] == "param"
        }
        values = {
            n: transform_to(c).inv(trace.nodes[n]["value"]).detach().clone()
            for n, c in constraints.items()
        }

    def run(own: Tensors, *arguments: Any) -> Any:
        bound = {n: transform_to(c)(own[n]) for n, c in constraints.items()}
        return poutine.substitute(guide, data=bound)(*arguments)

    return values, run


def _automatic(
    make: Callable[..., AutoGuide], example: Any, model: Program
) -> tuple[Tensors, Callable[..., Any]]:
    """Return the parameters of an AutoGuide, and the guide as their function."""
    plated = "create_plates" in inspect.signature(make).parameters
    options = {"create_plates": lambda *arguments: arguments[-1].clients()} if plated else {}
    with pyro.settings.context(module_local_params=True), seeded(0):
        auto = make(model, **options)
        auto(*example)
    shapes = {n: p.shape for n, p in auto.named_parameters()}

    def run(own: Tensors, *arguments: Any) -> Any:
        clients = len(arguments[-1])
        if clients > 1 and not plated:
            raise ValueError(f"{type(auto).__name__} couples {clients} clients; run with chunk=1")
        bound = {n: own[n] if plated else own[n].reshape(shapes[n]) for n in shapes}
        with pyro.settings.context(module_local_params=True):
            return functional_call(auto, bound, arguments)

    values = {n: p.detach().clone() for n, p in auto.named_parameters()}
    return {n: v.reshape(v.shape[2:]) if plated else v for n, v in values.items()}, run


def site_moments(
    program: Program, received: Tensors, local: Tensors, batch: Batch
) -> tuple[Tensors, Tensors]:
    """Read mean and variance [C, *p] of every site off a guide.

    Raises:
        ValueError: if a site has no mean or variance in closed form.
    """
    clients = len(batch)
    with GuideMean():
        trace = poutine.trace(program).get_trace(
            with_rows(received, clients), with_rows(local, clients), batch
        )
    mean, variance = {}, {}
    for n, site in latent(trace):
        if site["infer"].get("is_auxiliary"):
            if not n.endswith("_unconstrained"):
                raise ValueError(f"site {n!r} joins others; their variances have no closed form")
            continue
        source = trace.nodes.get(f"{n}_unconstrained", site)
        if source is not site and bool(site["fn"].log_density.any()):
            raise ValueError(f"site {n!r} is transformed; its variance has no closed form")
        mean[n], variance[n] = (v.squeeze(1) for v in (site["value"], source["fn"].variance))
    return mean, variance
