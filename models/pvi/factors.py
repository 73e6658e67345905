"""What the server holds in partitioned variational inference: q(g), and a factor of each client."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from pyrofl.data import Who
from pyrofl.inference.loop.messages import CannotMerge
from pyrofl.models.pvi.gaussians import Normals
from pyrofl.tensors import Tensors, role, spread_out, under

PARAMETERS = ("shift", "precision")  # of q and of every factor
FASTER, SLOWER = 1.3, 0.6  # what the damping is multiplied by
HALVINGS = 30  # of the server's step, before it stays where it is


@dataclass(frozen=True)
class Factors:
    """Normal factors of the shared variables, see `gaussians`.

    The server holds q as shift and precision, and the clients' factors as server/shift and
    server/precision [J, ...]. Without a fixed damping it remembers its last damping and proposal.

    Attributes:
        normals: of the d variables.
        damping: share of the way that factors go; None adapts it.
    """

    normals: Normals
    damping: float | None

    def __post_init__(self) -> None:
        """Check the damping.

        Raises:
            ValueError: if it is out of its range.
        """
        if self.damping is not None and not 0 < self.damping <= 1:
            raise ValueError(f"damping is {self.damping}; expected None or 0 < damping <= 1")

    def init(self, prior: Tensors, q: Tensors, clients: int) -> Tensors:
        """Start at q; every client has an equal factor."""
        each = {n: ((q[n] - prior[n]) / clients).repeat(clients, 1) for n in PARAMETERS}
        server = q | under("server", each)
        if self.damping is not None:
            return server
        memory = under("last", {n: torch.zeros_like(v) for n, v in q.items()})
        memory["damping"] = torch.tensor(1 / clients, dtype=torch.float64)
        return server | under("server", memory)

    def posterior(self, server: Tensors, who: Who) -> Tensors:
        """Send q."""
        public = {n: v for n, v in server.items() if not n.startswith("server/")}
        return spread_out(public, len(who.ids))

    def cavity(self, server: Tensors, who: Who) -> Tensors:
        """Send q without the client's own factor."""
        received = self.posterior(server, who)
        known = who.ids < len(server["server/shift"])
        at = torch.where(known, who.ids, 0)
        own = {n: server[f"server/{n}"][at] * known[:, None] for n in PARAMETERS}
        return received | {n: received[n] - own[n] for n in PARAMETERS}

    def merge(self, server: Tensors, message: Tensors, who: Who, _: Generator) -> Tensors:
        """Move factors part of the way, so that q remains a distribution.

        Every message is a factor of its own: the way that all of them permit is the same.

        Raises:
            CannotMerge: if it would not be one, however short the way.
        """
        # The new factor is q_j over the cavity, so it differs from the old one by q_j over q.
        change = {n: message[n] - server[n] for n in PARAMETERS}
        total = {n: v.sum(0) for n, v in change.items()}
        rate, memory = self.damping or 1.0, {}
        if self.damping is None:
            damping = self._adapted(server, total, len(who.ids))
            memory = under("server", {"damping": damping} | under("last", total))
            rate = float(damping)
        for _halving in range(HALVINGS):
            q = {n: server[n] + rate * v for n, v in total.items()}
            if bool(self.normals.proper(q["precision"])):
                own = {f"server/{n}": rate * v for n, v in change.items()}
                tables = {n: server[n].index_add(0, who.ids, v) for n, v in own.items()}
                return server | memory | q | tables
            rate /= 2
        raise CannotMerge(f"q is no distribution after {HALVINGS} halvings of the damping")

    def _adapted(self, server: Tensors, total: Tensors, clients: int) -> Tensor:
        """Return the damping of this round, at least 1 / M.

        It grows while the proposals of successive rounds point the same way, and falls when they
        turn back, as they do where factors overshoot, or nothing but noise is left to average.
        """
        moments = self.normals.moments(*(server[n] for n in PARAMETERS))
        now, last = (
            self.normals.measured(v["shift"], v["precision"], *moments)
            for v in (total, role("server/last", server))
        )
        turn = (now @ last).sign().to(server["server/damping"])
        factor = torch.where(turn > 0, FASTER, torch.where(turn < 0, SLOWER, 1.0))
        return (server["server/damping"] * factor).clamp(1 / clients, 1.0)
