"""Normal factors of a network's posterior that the clients keep, and the server's sum of them.

The server's posterior is q(w) = p(w) prod_j t_j(w). Unlike in PVI the server does not keep the
factors t_j: client j has "own/shift" and "own/precision", and the server "server/total/...".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from pyrofl.data import Cohort
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.models.shared.gaussians import PARAMETERS
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.tensors import Tensors, pick, role, under


@dataclass(frozen=True)
class ClientFactors:
    """Factors t_j(w) = exp(s_j'w - w'P_j w / 2) that clients keep; of a point estimate, P_j = 0."""

    core: LaplaceCore
    is_point: bool = False
    init_scale: float | None = None  # sd of q at the start times sqrt(fan_in); None: the prior's

    def first(self, generator: Generator) -> Tensors:
        """Return the product of all factors at the start, so that q's mean is a random draw."""
        net, prior = self.core.net, self.core.factor_of_prior
        mean = self.core.layout.joined(net.init(generator)).to(prior["shift"])
        precision = prior["precision"]
        if self.init_scale is not None:
            each = {
                n: torch.full(s, net.fan_in(n)) / self.init_scale**2 for n, s in net.shapes.items()
            }
            precision = self.core.layout.joined(each).to(precision)
        q = self.core.factor(precision, mean)
        return {n: q[n] - prior[n] for n in self.names}

    def posterior(self, total: Tensors) -> Tensors:
        """Return the server's q and the product of the factors, given this product."""
        prior = self.core.factor_of_prior
        q = self.core.posterior(prior | {n: prior[n].to(v) + v for n, v in total.items()})
        return (pick(q, "w/*") if self.is_point else q) | under("server/total", total)

    def init(self, generator: Generator, clients: int) -> Tensors:
        """Initialize q with the network's random draw as mean."""
        return self.posterior(self.first(generator)) | {"share": torch.tensor(1.0 / clients)}

    def init_client(self, received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's factor; at the start those of all clients are equal."""
        share = received["share"][:, None]  # [C, 1]
        return under("own", {n: v.to(share) * share for n, v in self.first(generator).items()})

    def received(self, received: Tensors) -> Tensors:
        """Return natural parameters of the received q, [C, ...]."""
        mean = flatten_clients(role("w", received))
        if self.is_point:
            precision = self.core.factor_of_prior["precision"].expand(len(mean), -1).to(mean)
        else:
            precision = self.core.precision(received)
        return self.core.factor(precision, mean)

    def changed(self, local: Tensors, change: Tensors) -> Tensors:
        """Return the client's changed factor, and the change that it sends."""
        own = {n: local[f"own/{n}"] + change[n] for n in self.names}
        return under("own", own) | under("change", pick(change, " ".join(self.names)))

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send the change of the client's factor."""
        return {f"change/{n}": local[f"change/{n}"] for n in self.names}

    def applied(self, server: Tensors, changes: Tensors) -> Tensors:
        """Return the server's state after the sums of the factors' changes are applied."""
        total = role("server/total", server)
        return server | self.posterior({n: v + changes[f"change/{n}"] for n, v in total.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a factor's natural parameters."""
        return PARAMETERS[:1] if self.is_point else PARAMETERS

    @property
    def metadata(self) -> Metadata:
        """Metadata of the method's tensors."""
        unknown = ("precision", "w/* spread/*") if self.is_point else ("precision",)
        tensor_metadata = {n: v for n, v in self.core.metadata.tensors.items() if n not in unknown}
        guide = self.core.point_guide if self.is_point else self.core.q
        return Metadata(
            tensor_metadata,
            reset_clients=refuse_lost_factors,
            reads={"model": self.core.model, "guide": guide},
        )


def refuse_lost_factors(server: Tensors, cohort: Cohort) -> Tensors:
    """Raise ValueError if clients lost their factors, which the server's posterior contains."""
    if len(cohort.ids):
        raise ValueError(
            "the factor that a client has lost is still part of the server's posterior; expected "
            "clients that keep their state, or pvi, whose server keeps the factors"
        )
    return server
