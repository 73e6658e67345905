"""Conjugate models: the exact posterior of shared sites from one exchange of sufficient statistics.

Diaconis and Ylvisaker, "Conjugate Priors for Exponential Families", Annals of Statistics 1979.

    p(g)        proportional to  exp(a' t(g))      a Beta, Gamma or Dirichlet distribution
    p(y_j | g)  = c_j exp(h_j' t(g))               the likelihood of client j, conjugate to it

    client   sends its sufficient statistics h_j, such as counts of successes and failures
    server   q(g) proportional to  exp((a + sum_j h_j)' t(g)),  in the family of the prior

The h_j need no table of likelihoods: where p(y_j | g) has this form, log p(y_j | g) is linear in
t(g), and its slopes follow from a few values of g. Elsewhere it is not linear, and the program is
refused. So binomial, Poisson (with exposures), exponential, categorical and multinomial responses
are accepted, normal ones with a Gamma prior on the precision, and masked and weighted rows of all.

A client sends the change of its statistics since its last message: 0 in later rounds. Rounds in
which only some clients take part are thus added up, and nothing counts twice. Statistics are sums,
so secure sums and fewer messages in memory are possible. The statistics of a client with one row
are its response.

For normal priors and normal responses with known variances, `pvi.hierarchical` with damping=1 sends
the statistics, and for unknown variances `likelihood_factors.hierarchical`; both are exact after
one round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.arguments import checked
from pyrofl.data import Batch, Cohort, Federation
from pyrofl.inference.definition.aggregator import Aggregator, WeightedSum, uniform
from pyrofl.inference.definition.elbo import (
    base_of,
    latent,
    log_prob,
    observed,
    per_draw,
    traces,
    weighed,
)
from pyrofl.inference.definition.metadata import (
    EXACT,
    MODERATE,
    SHARED,
    JointRule,
    Metadata,
    Moments,
    Monitor,
    Rule,
)
from pyrofl.inference.definition.method import Method, Phase, View, as_received
from pyrofl.inference.definition.programs import Program
from pyrofl.models.likelihood_factors.structure import NUM_CHECKED_CLIENTS, on_cpu
from pyrofl.models.shared.unconstrained import layouts, trace_prior
from pyrofl.tensors import Tensors, default_type, generator, role, under

__all__ = ["method"]

# Largest residual of a log likelihood that is linear, relative to its range.
LINEARITY_TOLERANCE = 1e-9
ROUNDING_TOLERANCE = 1e-6  # of a sum, relative to that of all clients and the prior
NEGATIVE = "its sums or counts are negative; expected those of rows, at least 0"
OTHERS = "use pvi.hierarchical or likelihood_factors.hierarchical for this program"


@dataclass(frozen=True)
class ConjugateFamily:
    """Conjugate family; parameters of the posterior are those of the prior plus statistics.

    Attributes:
        of: parameters of the prior -> distribution, of [..., k] or [..., 2] parameters.
        names: names of the parameters, stacked along the last axis; one name is a vector.
        statistics: values [..., *p] -> t [..., *q], of the shape of the parameters.
        near: numbers [..., *p] -> values, of the support.
    """

    of: Callable[[Tensor], Any]
    names: tuple[str, ...]
    statistics: Callable[[Tensor], Tensor]
    near: Callable[[Tensor], Tensor]

    def parameters(self, fn: Any) -> Tensor:
        """Return the stacked parameters of a distribution of the family."""
        values = [getattr(fn, name) for name in self.names]
        return values[0] if len(values) == 1 else torch.stack(torch.broadcast_tensors(*values), -1)


FAMILIES = {
    torch.distributions.Beta: ConjugateFamily(
        lambda v: dist.Beta(v[..., 0], v[..., 1]),
        ("concentration1", "concentration0"),
        lambda x: torch.stack([x.log(), (-x).log1p()], -1),
        torch.sigmoid,
    ),
    torch.distributions.Gamma: ConjugateFamily(
        lambda v: dist.Gamma(v[..., 0], v[..., 1]),
        ("concentration", "rate"),
        lambda x: torch.stack([x.log(), -x], -1),
        torch.exp,
    ),
    torch.distributions.Dirichlet: ConjugateFamily(
        dist.Dirichlet, ("concentration",), torch.log, lambda x: x.softmax(-1)
    ),
}


@dataclass(frozen=True)
class Conjugate:
    """Program with shared sites only; server tensors are NAME/parameters, [*q] for each site."""

    program: Program
    families: dict[str, ConjugateFamily]
    prior: Tensors

    def method(self) -> Method:
        """Return the federated method."""
        alone = "that many clients have not reported: the posterior lacks their rows"
        return Method(
            name="conjugate",
            init=self.init,
            model=self.program,
            guide=self.guide,
            phases=(Phase((self.count,)),),
            init_client=self.begin,
            upload=lambda received, local: under("change", role("change", local)),
            aggregate=Aggregator({"*": WeightedSum(uniform)}, self.add),
            views={"global": View(as_received, exact=lambda s: not bool(s["server/missing"]))},
            metadata=Metadata(
                {
                    " ".join(self.families): SHARED,
                    " ".join(f"{n}/parameters" for n in self.families): (
                        Moments(self.moments),
                        EXACT,
                    ),
                    "server/missing": Monitor(0.0, alone),
                    "change/clients": Rule("0 or 1", lambda value: (value == 0) | (value == 1)),
                    "change/*": (MODERATE, JointRule(NEGATIVE, self.counted)),
                },
                reset_clients=refuse_lost_statistics,
                reads={"model": self.program},
                sites=f"shared by all clients: {', '.join(self.families)}",
            ),
        )

    def init(self, source: Generator, clients: int) -> Tensors:
        """Initialize the posterior with the prior."""
        missing = torch.tensor(float(clients), dtype=torch.float64)
        return {f"{n}/parameters": v for n, v in self.prior.items()} | {"server/missing": missing}

    def begin(self, received: Tensors, cohort: Cohort, source: Generator) -> Tensors:
        """Begin with statistics of zero that the server knows."""
        zeros = {n: torch.zeros_like(received[f"{n}/parameters"]) for n in self.families}
        return under("sent", zeros | {"clients": torch.zeros_like(cohort.size).double()})

    def count(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute the client's sufficient statistics, and their change since the last message."""
        client_statistics = statistics(self.program, self.families, self.prior, on_cpu(batch))
        client_statistics = {n: v.to(batch.size.device) for n, v in client_statistics.items()}
        client_statistics["clients"] = torch.ones_like(local["sent/clients"])
        change = {n: v - local[f"sent/{n}"] for n, v in client_statistics.items()}
        q = {f"{n}/parameters": received[f"{n}/parameters"] + change[n] for n in self.families}
        return q | under("sent", client_statistics) | under("change", change)

    def add(self, server: Tensors, sums: Tensors) -> Tensors:
        """Add the statistics of the reporting clients to the parameters of the posterior."""
        names = ((f"{n}/parameters", f"change/{n}") for n in self.families)
        new_statistics = {n: server[n] + sums[change] for n, change in names}
        left = server["server/missing"] - sums["change/clients"].round()
        return new_statistics | {"server/missing": left}

    def counted(self, server: Tensors, message: Tensors, cohort: Cohort) -> Tensor:
        """Return whether each client's sums have grown, up to rounding of all sums, bool [C]."""
        grown = [
            (
                message[f"change/{n}"] >= -ROUNDING_TOLERANCE * server[f"{n}/parameters"].abs()
            ).flatten(1)
            for n in self.families
        ]
        return torch.cat(grown, 1).all(1)

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the shared sites from their posterior."""
        with batch.clients():
            for name, family in self.families.items():
                fn = family.of(local[f"{name}/parameters"])
                axes = len(fn.batch_shape) - (2 if len(fn.batch_shape) > 1 else 1)
                pyro.sample(name, fn.to_event(axes))

    def moments(self, server: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each site."""
        posteriors = {n: f.of(server[f"{n}/parameters"]) for n, f in self.families.items()}
        return {n: (fn.mean, fn.variance.sqrt()) for n, fn in posteriors.items()}


def refuse_lost_statistics(server: Tensors, cohort: Cohort) -> Tensors:
    """Raise ValueError if clients lost what they have sent, which the server would add again."""
    if len(cohort.ids):
        raise ValueError(
            "conjugate: the sums of a client that has lost its state are part of the posterior and "
            "would be counted twice; expected clients that keep their state, or a new run"
        )
    return server


def statistics(
    program: Program, families: dict[str, ConjugateFamily], prior: Tensors, batch: Batch
) -> Tensors:
    """Return each client's statistics h_j [C, *q] by site; NaN where its likelihood has none.

    They solve log p(y_j | g) = h_j' t(g) + constant at twice as many points g as t has entries.
    """
    size = sum(v.numel() for v in prior.values())
    source, points = generator("conjugate"), 2 * size + 8
    values = {}
    for name, family in families.items():
        noise = torch.randn(points, *family.of(prior[name]).mean.shape, generator=source)
        values[name] = family.near(noise.double())

    def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
        with batch.clients():
            for name, value in values.items():
                # [S, C, 1, *p], equal for all clients.
                value = value[:, None, None].expand(points, len(batch), 1, *value.shape[1:])
                pyro.sample(name, dist.Delta(value, event_dim=value.dim() - 3))

    with torch.no_grad(), pyro.validation_enabled(False), default_type(torch.float64):
        _, trace = traces(program, guide, {}, {}, batch, points)
        total = torch.zeros(points, len(batch)).double()
        for name, site in observed(trace):
            total = total + per_draw(weighed(site, log_prob(name, site)), len(batch))
    parts = [f.statistics(values[n]).flatten(1) for n, f in families.items()]
    t = torch.cat(parts, 1)  # [S, q]
    t, total = t - t.mean(0), total - total.mean(0)
    h = torch.linalg.lstsq(t, total, driver="gelsd").solution  # [q, C]
    off = (t @ h - total).abs().amax(0)
    linear = off <= LINEARITY_TOLERANCE * (total.abs().amax(0) + 1)
    # Of each site, [C, q].
    solutions = torch.where(linear, h, torch.nan).mT.split([v.shape[1] for v in parts], 1)
    return {n: v.reshape(-1, *prior[n].shape) for n, v in zip(prior, solutions, strict=True)}


@checked
def method(model: Program, data: Federation) -> Method:
    """Build the exact posterior of a conjugate Pyro program; one round suffices.

    Args:
        model: a program (received, local, batch), all of whose sites are in `batch.clients()` and
            shared by all clients; it reads neither of the first two. Priors are Beta, Gamma or
            Dirichlet distributions with fixed parameters, and given all other sites than one the
            likelihood is conjugate: its log is linear in the logs of probabilities, or in log g
            and g for a Gamma prior.
        data: the federation; the model is run on its first clients to validate it.

    Returns:
        A method whose server has the exact posterior of the clients that have reported.

    Raises:
        ValueError: if a prior is of another family or not fixed, a site is inside `batch.rows()` or
            a plate, or the likelihood is not conjugate.

    Examples:
        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyrofl.data import Federation
        >>> from pyrofl.inference.fit import fit
        >>> data = Federation.from_arrays({
        ...     "A": (torch.zeros(3, 1), [1.0, 0.0, 1.0]), "B": (torch.zeros(1, 1), [1.0])})
        >>> def coin(received, local, batch):
        ...     with batch.clients():
        ...         p = pyro.sample("p", dist.Beta(1.0, 1.0))
        ...         with batch.rows():
        ...             pyro.sample("y", dist.Bernoulli(p), obs=batch.y)
        >>> run = fit(method(coin, data), data, rounds=1, progress=False)
        >>> run.state.server["p/parameters"].tolist()  # 1 + 3 successes, 1 + 1 failure
        [4.0, 2.0]
    """
    one = on_cpu(data.batch(torch.tensor([0])))
    sites, _ = layouts(model, one, "*", 1.0)
    both = on_cpu(data.batch(torch.tensor([0, data.clients - 1])))
    seen = dict(latent(trace_prior(model, both, 2)))
    families, prior = {}, {}
    for site in sites.sites:
        base, name = base_of(seen[site.name]["fn"]), site.name
        family = next((f for kind, f in FAMILIES.items() if isinstance(base, kind)), None)
        if family is None or site.plate:
            kind = f"inside plate {site.plate!r}" if site.plate else f"a {type(base).__name__}"
            raise ValueError(
                f"site {name!r} is {kind}; expected a Beta, Gamma or Dirichlet prior; {OTHERS}"
            )
        value = family.parameters(base).double()
        value = value.expand(*seen[name]["value"].shape[:3], *value.shape[3:])
        if bool((value != value[:1, :1]).any()):
            raise ValueError(
                f"the parameters of site {name!r} depend on other sites or on a client's data; "
                f"expected fixed numbers; {OTHERS}"
            )
        families[name], prior[name] = family, value[0, 0, 0].clone()
    some = on_cpu(data.batch(torch.arange(min(NUM_CHECKED_CLIENTS, data.clients))))
    first_statistics = statistics(model, families, prior, some)
    if any(bool(v.isnan().any()) for v in first_statistics.values()):
        names = ", ".join(families)
        raise ValueError(f"the likelihood is not conjugate to the prior of {names}; {OTHERS}")
    return Conjugate(model, families, prior).method()
