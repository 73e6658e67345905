"""Priors whose scale is learned from all clients, by empirical Bayes in closed form.

    p(w_jk)   = family(loc, s)                               one s for every parameter tensor
    client    m_j = mean over the entries k of E_q[(w_jk - loc)^2]
    server    s^2 = mean over clients of m_j / V             V the family's variance at s = 1

For a normal prior this is the M-step of the maximum of the evidence (type II maximum likelihood),
the E-step being the client's training; other families get the scale of the same second moment. A
point guide knows no variance, so s then shrinks more than it should. A scale with a posterior of
its own is a positive shared site of your own program, see `pvi.hierarchical`.

MacKay, "Bayesian Interpolation", Neural Computation 1992.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Generator, Size

from pyrofl.arguments import Positive, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregate, Aggregator, uniform
from pyrofl.inference.definition.averages import average
from pyrofl.inference.definition.metadata import NOT_NEGATIVE
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.definition.prior_conversion import PriorFamily, as_family, nobody
from pyrofl.inference.definition.programs import PriorFunction, around
from pyrofl.models.guides.automatic import site_moments
from pyrofl.tensors import Tensors, pick, role, spread_out, under

MIN_SCALE = 1e-6  # scale


def learned(family: PriorFamily = dist.Normal, loc: float = 0.0) -> PriorFunction:
    """Return a prior with one scale per parameter tensor, learned by the server; see `learning`."""
    distribution = as_family(family, "family")

    def prior(
        name: str, shape: Size, received: Tensors, local: Tensors, batch: Batch
    ) -> TorchDistribution:
        """Return a parameter's prior, with the scale that the client received."""
        if (scale := received.get(f"prior/{name}")) is None:
            raise ValueError(
                f"the prior of {name!r} is learned, and the server sends no scale of it; pass the "
                "method to learned_scales.learning(method, names)"
            )
        center = scale.new_full((*scale.shape, *shape), loc)
        return around(distribution, center, scale)

    return prior


@checked
def learning(
    method: Method,
    names: Iterable[str],
    *,
    family: PriorFamily = dist.Normal,
    loc: float = 0.0,
    init_scale: Positive = 1.0,
) -> Method:
    """Extend a federated method: its server learns the scales of the `learned` prior.

        learning(local.build(net, prior=learned(), guide=mean_field), net.shapes)

    Args:
        method: built with `learned(family, loc)` as the prior on these parameters.
        names: of the parameters, such as `net.matching("head.*")`; their sites need a mean and a
            variance in closed form under the guide.
        family: as of the prior, as is loc.
        loc: center.
        init_scale: before round one.

    Returns:
        The method, with a number per name that goes down and another that goes up.

    Raises:
        ValueError: if a name is no site of the method's guide, whose mean and variance have a
            closed form, or the family's variance is not finite.
    """
    learned_names, spread = tuple(names), as_family(family, "family")
    one, variance = torch.ones((), dtype=torch.float64), math.inf
    with suppress(NotImplementedError):
        variance = float(spread(0 * one, one).variance)
    if not math.isfinite(variance):
        raise ValueError(f"the family's variance is {variance}; expected a finite number")
    _refuse_other_sites(method, learned_names)

    def rest(tensors: Tensors) -> Tensors:
        return {n: v for n, v in tensors.items() if not n.startswith(("prior/", "second/"))}

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the server's state, with all prior scales at `init_scale`."""
        scales = {n: torch.tensor(init_scale, dtype=torch.float64) for n in learned_names}
        return method.init(generator, clients) | under("prior", scales)

    def download(server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the scales of its prior together with the model's parameters."""
        scales = spread_out(pick(server, "prior/*"), len(cohort.ids))
        return method.download(rest(server), cohort) | scales

    def measure(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute the second moment of each parameter tensor about the prior's location.

        That is one number m_j for each.
        """
        mean, spread = site_moments(method.guide, received, local, batch)
        second = {n: (mean[n] - loc).square() + spread[n] for n in learned_names}
        return under("second", {n: v.reshape(len(v), -1).mean(1) for n, v in second.items()})

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the parameters' second moments together with the client's message."""
        return method.upload(rest(received), rest(local)) | pick(local, "second/*")

    def scales(second: Tensors) -> Tensors:
        """Return updated prior scales, given the clients' mean second moments."""
        return under(
            "prior", {n: (v / variance).sqrt().clamp(MIN_SCALE) for n, v in second.items()}
        )

    aggregate_model = method.aggregate

    def aggregate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Aggregate all messages, and update the prior scales."""
        second = average(role("second", message), torch.ones_like(cohort.size))
        return aggregate_model(rest(server), rest(message), cohort, generator) | scales(second)

    both: Aggregate = aggregate
    if isinstance(aggregate_model, Aggregator) and aggregate_model.rule == "mean":
        both = Aggregator(
            {"second/*": uniform, **aggregate_model.weights},
            transform=lambda old, new: (
                aggregate_model.transform(rest(old), rest(new)) | pick(new, "second/*")
            ),
            server_step=lambda old, new: (
                aggregate_model.server_step(rest(old), rest(new)) | scales(role("second", new))
            ),
        )
    return replace(
        method,
        init=init,
        download=download,
        phases=(*method.phases, Phase((measure,))),
        upload=upload,
        metadata=method.metadata.extend(
            {"second/*": NOT_NEGATIVE}, reads={**method.metadata.reads, "guide": method.guide}
        ),
        aggregate=both,
    )


def _refuse_other_sites(method: Method, names: tuple[str, ...]) -> None:
    """Raise ValueError if a name is not a site of the guide."""
    batch = nobody()
    cohort = Cohort(0 * batch.ids, batch.size)
    try:
        received = method.download(method.init(Generator(), 1), cohort)
        local = method.init_client(received, cohort, Generator()) | received
        sites = site_moments(method.guide, received, local, batch)[0]
    except (LookupError, RuntimeError):  # it reads rows, or what only phases compute
        return
    for name in names:
        if name not in sites:
            raise ValueError(
                f"names has {name!r}, which is no latent parameter of the method; expected some of "
                f"{', '.join(sites)}"
            )
