"""Server computations of PVI (partitioned variational inference).

The package docstring has the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import torch
from torch import Generator, Tensor

from pyrofl.data import Cohort
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.method import send_all
from pyrofl.models.pvi.centering import Centering
from pyrofl.models.shared.gaussians import PARAMETERS, Normals
from pyrofl.models.shared.sites import Layout
from pyrofl.tensors import Tensors, pick, role, under

Covariance = Literal["diagonal", "blocks", "full"]

# What the damping is multiplied or divided by at most.
MAX_DAMPING_INCREASE, MAX_DAMPING_DECREASE = 3.0, 6.0
RESTART_DAMPING = 0.5  # damping that adapts, after a change of the clients
MAX_HALVINGS = 30  # of the server's step, before it stays where it is
MAX_SENT_STEPS = 10  # of these, for the sake of what clients are sent


class FactorServer:
    """Server of PVI: the posterior of the shared variables, a product of one factor per client.

    The server holds q as shift and precision, see `gaussians`, and the factors as server/shift and
    server/precision [J, ...]; where the damping adapts, also the last one and the last proposal.
    """

    shared_sites: Layout  # g: sites that clients share, d entries
    covariance: Covariance
    damping: float | None
    start: Callable[[Generator], tuple[Tensor, Tensor]] | None  # mean, sd [d]; or the prior

    def init(self, generator: Generator, clients: int) -> Tensors:
        """Initialize the server's posterior, with equal factors for all clients.

        Its mean is that of the network or the prior.
        """
        q = self.prior if self.start is None else self.normals.independent(*self.start(generator))
        share = torch.tensor(1 / clients, dtype=torch.float64)
        each = {n: ((q[n] - self.prior[n]) / clients).repeat(clients, 1) for n in PARAMETERS}
        server = q | under("server", each)
        if self.centering:
            server |= self.centering.start(self.normals.moments(q)[0])
        if self.damping is None:
            last = {n: torch.zeros_like(v) for n, v in q.items()}
            # Half of the way, in decades, from where no overlap of factors can overshoot to 1.
            server |= under("server", under("last", last) | {"damping": share.sqrt()})
        return server if self.exact else server | {"share": share}

    def cavity(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client its cavity q / t_j, the posterior without the client's own factor."""
        received = send_all(server, cohort)
        is_reported = cohort.ids < len(server["server/shift"])
        at = torch.where(is_reported, cohort.ids, 0)
        # [C, d] or [C, d (d + 1) / 2] each
        client_factors = {n: server[f"server/{n}"][at] * is_reported[:, None] for n in PARAMETERS}
        return received | {n: received[n] - client_factors[n] for n in PARAMETERS}

    def regular_cavity(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Return the cavities of a round of PVI proper, after any warm start."""
        return {
            n: v for n, v in FactorServer.cavity(self, server, cohort).items() if n != "warm_rounds"
        }

    def result(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the posterior, and whether it contains the client's own factor."""
        return send_all(server, cohort) | {"counted": cohort.ids < len(server["server/shift"])}

    def densities(
        self, server: Tensors, cohort: Cohort, sites: Tensors, log_prior: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log densities [S] of shared draws by posterior, cavity, and cavity with prior."""
        u, growth = self.shared_sites.freed(sites)
        if self.centering:
            u, more = self.centering.variables(u, server)
            growth = growth + more
        factors = {n: v[0] for n, v in self.cavity(server, cohort).items() if n in PARAMETERS}
        every, others, prior = (
            self.normals.log_density(u, {n: v.to(u) for n, v in pick(q, "shift precision").items()})
            for q in (server, factors, self.prior)
        )
        share = server.get("share", torch.zeros(())).to(u)
        return every, others, others + share * (log_prior + growth - prior)

    def replace(self, server: Tensors, factors: Tensors, _: Generator) -> Tensors:
        """Return the server state with new factors; the number of clients may change."""
        totals = {
            n: factors[f"server/{n}"].sum(0) - server[f"server/{n}"].sum(0) for n in PARAMETERS
        }
        q = {n: server[n] + v for n, v in totals.items()}
        if not bool(self.normals.proper(q["precision"])):
            raise AggregationError("the posterior is no distribution yet")
        if "share" in server:  # of prior / p0, divided among the clients
            q["share"] = torch.full_like(server["share"], 1 / len(factors["server/shift"]))
        if self.damping is None:  # only noise may have been left, which lowers it
            q["server/damping"] = torch.full_like(server["server/damping"], RESTART_DAMPING)
            q |= {n: torch.zeros_like(v) for n, v in pick(server, "server/last/*").items()}
        return server | factors | q

    def aggregate(self, server: Tensors, message: Tensors, cohort: Cohort, _: Generator) -> Tensors:
        """Update client factors by all messages; AggregationError if the posterior is improper.

        The updates are damped; q is the product of all factors.
        """
        # The new factor is q_j over the cavity, so it differs from the old one by q_j over q.
        change = {n: message[n] - server[n] for n in PARAMETERS}
        total = {n: v.sum(0) for n, v in change.items()}  # over clients
        rate = self.damping or float(self._adapted(server, total, len(cohort.ids)))
        good = self.trainable(server)
        for halving in range(MAX_HALVINGS):
            client_factors = {f"server/{n}": rate * v for n, v in change.items()}
            q = {n: server[n] + rate * v for n, v in total.items()}
            q |= {n: server[n].index_add(0, cohort.ids, v) for n, v in client_factors.items()}
            # Nor shall a client that could train get what is no distribution, if that can be.
            lost = halving < MAX_SENT_STEPS and bool((good & ~self.trainable(q)).any())
            if not lost and bool(self.normals.proper(q["precision"])):
                if self.damping is None:
                    damping = torch.full_like(server["server/damping"], rate)
                    q |= under("server", {"damping": damping} | under("last", total))
                return self.centered(server | q)
            rate /= 2
        raise AggregationError(f"q is no distribution after {MAX_HALVINGS} halvings of the damping")

    def centered(self, server: Tensors) -> Tensors:
        """Update how far random effects are centered, unless a cavity would become improper."""
        if not self.centering:
            return server
        new = self.centering.moved(server, self.normals, self.prior)
        return server if bool((self.trainable(server) & ~self.trainable(new)).any()) else new

    def trainable(self, server: Tensors) -> Tensor:
        """Return whether each client's cavity q / t_j is a proper distribution, bool [J]."""
        return self.normals.proper(server["precision"] - server["server/precision"])

    def _adapted(self, server: Tensors, total: Tensors, clients: int) -> Tensor:
        """Return the damping of this round's factor updates; see `hierarchical`.

        It is adapted to the last two updates.
        """
        # Proposals turn back where factors overshoot, or nothing but noise is left to average.
        moments = self.normals.moments(server)
        last = self.normals.measured(role("server/last", server), *moments)
        now = self.normals.measured(total, *moments)
        lengths = torch.linalg.vector_norm(last) * torch.linalg.vector_norm(now)
        cosine = torch.where(lengths > 0, now @ last / lengths, 0.0)
        # Noise points anywhere; as it is to be averaged, what falls falls by more than what grows.
        factor = torch.where(cosine > 0, MAX_DAMPING_INCREASE, MAX_DAMPING_DECREASE) ** cosine
        return (server["server/damping"] * factor).clamp(1 / clients, 1.0)

    def moments(self, q: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each shared site in unconstrained space."""
        mean, sd = self.normals.mean_and_sd(q)
        return self.shared_sites.moments({"mean": mean, "sd": sd})

    @property
    def exact(self) -> bool:
        """Whether the shared variables' prior is exactly normal, so that it needs no correction."""
        return not self.centering and bool(self.shared_sites.each("exact").all())

    @property
    def full(self) -> bool:
        """Whether covariance roots and precisions are full matrices."""
        return self.covariance != "diagonal"

    @cached_property
    def normals(self) -> Normals:
        """Operations on normal factors of the shared variables."""
        return Normals(self.shared_sites.size, self.full)

    @cached_property
    def prior(self) -> Tensors:
        """Natural parameters of the normal p0 that approximates the shared variables' prior."""
        return self.normals.independent(*self.shared_sites.prior())

    @cached_property
    def centering(self) -> Centering | None:
        """Partial centering of shared random effects, or None if there are none."""
        none = torch.full_like
        each = [
            none(s.mean, -1).long() if s.scales is None else s.scales
            for s in self.shared_sites.sites
        ]
        is_centerable = self.covariance == "full" and any(
            s.scales is not None for s in self.shared_sites.sites
        )
        return Centering(torch.cat(each)) if is_centerable else None
