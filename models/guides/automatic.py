"""Conversion of Pyro guides and AutoGuides into guides with separate client parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Size, Tensor
from torch.distributions import transform_to
from torch.func import functional_call

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import latent, with_rows
from pyrofl.inference.definition.prior_conversion import nobody
from pyrofl.inference.definition.programs import Guide, Program
from pyrofl.inference.training.noise import LatentMeans
from pyrofl.tensors import Tensors, role, seeded, spread_out, under
from pyrofl.turns import synchronized


def from_pyro(
    guide: Callable[..., Any],
    data: Federation,
    *,
    model: Program | None = None,
    received: Tensors | None = None,
    local: Tensors | None = None,
    name: str = "auto",
) -> Guide:
    """Convert a Pyro guide or AutoGuide into a guide with separate parameters for each client.

    It is run once on the first client to see its parameters. Every client gets a copy of them,
    unconstrained, in its local state; the global parameter store stays as it was.

    Args:
        guide: a Pyro program (received, local, batch) whose `pyro.param` statements have the
            shapes of one client; or, with `model`, what makes an AutoGuide from it (the class).
            Automatic guides without an argument `create_plates` (AutoMultivariateNormal, flows)
            couple clients, so they need chunk_size=1.
        data: the federation, for a first batch.
        model: the model that an AutoGuide is made for.
        received: what the programs read of the server, [*p].
        local: what they read of the client besides the guide's own parameters, [*p].
        name: role of the parameters.

    Returns:
        A guide. A site whose mean is a parameter, such as `loc` of a normal, starts where a method
        starts it; all others start at the guide's own values.

    Raises:
        ValueError: if a program reads a tensor that is not given; when run, if a guide that couples
            clients meets several at once.
    """
    batch = data.batch(torch.tensor([0]))
    return converted(guide, batch, model, received or {}, local or {}, name)


def of_sites(guide: Callable[..., Any], shapes: Mapping[str, Size], automatic: bool) -> Guide:
    """Convert a Pyro guide or AutoGuide of real sites, which does not read the data's shapes."""

    def sites(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the sites; an AutoGuide needs nothing of a model but these."""
        with batch.clients():
            for n, shape in shapes.items():
                zero = batch.size.new_zeros(shape)
                pyro.sample(n, dist.Normal(zero, zero + 1).to_event(len(shape)))

    return converted(guide, nobody(), sites if automatic else None)


@synchronized
def converted(
    guide: Callable[..., Any],
    batch: Batch,
    model: Program | None = None,
    received: Mapping[str, Tensor] = MappingProxyType({}),
    local: Mapping[str, Tensor] = MappingProxyType({}),
    name: str = "auto",
) -> Guide:
    """Convert a Pyro guide, given the batch of one client; see `from_pyro`."""
    example = (
        with_rows(spread_out(dict(received), 1), 1),
        with_rows(spread_out(dict(local), 1), 1),
        batch,
    )
    bind = _function if model is None else partial(_automatic, model=model)
    try:
        values, run = bind(guide, example)
    except KeyError as error:
        raise ValueError(
            f"guide or model read the tensor {error}, which is not given; expected it among "
            "`received` or `local` of guides.from_pyro(guide, data, ...)"
        ) from error
    with seeded(0):
        one = with_rows(spread_out(values, 1), 1)
        sites = dict(latent(poutine.trace(run).get_trace(one, *example)))
        centers = _centers(run, example, values)

    def program(received: Tensors, local: Tensors, batch: Batch) -> Any:
        return run(role(name, local), received, local, batch)

    def start(center: Tensors, sd: Tensors | None = None) -> Tensors:
        """Return initial parameters; sites with a parameter for their center start as given."""
        if sd is not None:
            raise ValueError(
                "a guide of Pyro cannot start at given standard deviations, as this method needs; "
                "expected a family such as guides.mean_field"
            )
        if lacking := sorted(center.keys() - sites.keys()):
            raise ValueError(
                f"guide samples {', '.join(sorted(main))} and not {lacking[0]}; expected a guide "
                "with the sites of this model"
            )
        lead = Size()
        for site, value in center.items():
            lead = value.shape[: value.dim() - sites[site]["fn"].event_dim]
        spread = {n: v.expand((*lead, *v.shape)) for n, v in values.items()}
        at = {centers[site]: value for site, value in center.items() if site in centers}
        return under(name, spread | at)

    main = {n for n, site in sites.items() if not site["infer"].get("is_auxiliary")}
    moments = partial(site_moments, program)
    return Guide(program, start, moments, f"{name}/*", has_centers=main <= centers.keys())


def _centers(run: Callable[..., Any], example: Any, values: Tensors) -> dict[str, str]:
    """Return the parameters that sites have as their means: site -> parameter."""
    shifted = {n: v + torch.rand_like(v) for n, v in values.items()}
    try:
        with LatentMeans():
            one = with_rows(spread_out(shifted, 1), 1)
            trace = poutine.trace(run).get_trace(one, *example)
    except ValueError:  # a distribution without a mean, such as a flow
        return {}
    means = {n: site["value"] for n, site in latent(trace)}
    equal = {
        n: [p for p, v in shifted.items() if v.numel() and _same(mean, v)]
        for n, mean in means.items()
    }
    return {n: centers[0] for n, centers in equal.items() if centers}


def _same(mean: Tensor, value: Tensor) -> bool:
    """Return whether a site's mean of one client, [1, 1, *p], is a parameter [*p]."""
    return mean.shape[2:] == value.shape and torch.equal(mean[0, 0], value)


def log_density(site: Any) -> Tensor:
    """Return the log Jacobian of an AutoGuide site's transform; 0 for unconstrained sites."""
    return torch.as_tensor(getattr(site["fn"], "log_density", 0.0))


def _function(guide: Callable[..., Any], example: Any) -> tuple[Tensors, Callable[..., Any]]:
    """Return a guide's unconstrained parameters, and a function to run it with given values."""
    with pyro.get_param_store().scope(), seeded(0):
        trace = poutine.trace(guide, param_only=True).get_trace(*example)
        params = {n: s for n, s in trace.nodes.items() if s["type"] == "param"}
        free = {
            n: transform_to(s["kwargs"].get("constraint", dist.constraints.real))
            for n, s in params.items()
        }
        values = {n: free[n].inv(s["value"]).detach().clone() for n, s in params.items()}

    def run(own: Tensors, *arguments: Any) -> Any:
        bound = {n: transform(own[n]) for n, transform in free.items()}
        return poutine.substitute(guide, data=bound)(*arguments)

    return values, run


def _automatic(
    make: Callable[..., AutoGuide], example: Any, model: Program
) -> tuple[Tensors, Callable[..., Any]]:
    """Return an AutoGuide's parameters, and a function to run the guide with given values."""
    plated = "create_plates" in signature(make).parameters
    options = {"create_plates": lambda *arguments: arguments[-1].clients()} if plated else {}
    with pyro.settings.context(module_local_params=True), seeded(0):
        auto = make(model, **options)
        auto(*example)
    shapes = {n: p.shape for n, p in auto.named_parameters()}

    def run(own: Tensors, *arguments: Any) -> Any:
        """Run the AutoGuide with separate parameter values for each client."""
        clients = len(arguments[-1])
        if clients > 1 and not plated:
            raise ValueError(
                f"{type(auto).__name__} couples {clients} clients; run with chunk_size=1"
            )
        bound = {n: own[n] if plated else own[n].reshape(shapes[n]) for n in shapes}
        with pyro.settings.context(module_local_params=True):
            return functional_call(auto, bound, arguments)

    values = {n: p.detach().clone() for n, p in auto.named_parameters()}
    return {n: v.reshape(v.shape[2:]) if plated else v for n, v in values.items()}, run


def site_moments(
    program: Program, received: Tensors, local: Tensors, batch: Batch
) -> tuple[Tensors, Tensors]:
    """Return mean and variance of each guide site; raise ValueError if not in closed form.

    Each is [C, *p].
    """
    arguments = with_rows(received, len(batch)), with_rows(local, len(batch)), batch
    try:
        with LatentMeans():
            trace = poutine.trace(program).get_trace(*arguments)
    except ValueError as error:
        site, reason, _ = str(error).partition(" has no mean")
        if not reason:
            raise
        raise ValueError(
            f"the guide's {site} has no mean in closed form, and this method computes with the "
            "moments of its guide; expected a family of pyrofl, such as guides.flow()"
        ) from error
    mean, variance = {}, {}
    for n, site in latent(trace):
        if site["infer"].get("is_auxiliary"):
            if not n.endswith("_unconstrained"):
                raise ValueError(
                    f"the guide's site {n!r} joins others, whose variances have no closed form; "
                    "expected independent sites, such as of guides.mean_field"
                )
            continue
        source = trace.nodes.get(f"{n}_unconstrained", site)
        if source is not site and bool(log_density(site).any()):
            raise ValueError(f"site {n!r} is transformed; its variance has no closed form")
        mean[n], variance[n] = (v.squeeze(1) for v in (site["value"], source["fn"].variance))
    return mean, variance
