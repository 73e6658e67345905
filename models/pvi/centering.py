"""Partial centering of shared random effects, between their non-centered and centered form.

An effect a ~ N(mu, tau) is stated as mu + tau * eta with eta ~ N(0, 1), and the normal q is of

    w = eta (tau / b)^c,    b = exp(E log tau),  0 <= c <= 1

which is eta where c = 0 and, up to mu and b, a where c = 1. Where rows carry little information on
a, they bound eta whatever tau is; where they carry much, they bound a, and no normal of eta and log
tau fits. With rows of precision h the standard deviation of eta given tau is (1 + h tau^2)^-1/2, a
power of tau with the exponent -(1 - var(eta | tau)). So the server takes c = 1 - var(eta | tau) of
its present q, as often as this differs (Gorinova, Moore and Hoffman, "Automatic Reparameterization
of Probabilistic Programs", ICML 2020, learn c by gradients).

The variables change with c, and are not linear in each other. The factors are changed linearly
about the mean of q, which is where the next rounds begin, not where they end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyrofl.models.shared.gaussians import Normals
from pyrofl.tensors import Tensors, role, times, under

MIN_EXPONENT_CHANGE = 0.05  # change of an exponent c that is worth a change of variables


@dataclass(frozen=True)
class Centering:
    """Partial centering of shared random effects, given the index of each effect's log scale.

    The server holds "centered", c [d], and "log_scale", log b [d]; both are 0 where w is no effect.
    """

    scales: Tensor  # [d], index of the log scale; -1 where a variable is no effect

    def start(self, mean: Tensor) -> Tensors:
        """Return initial centering exponents (zero), and the log scales at the posterior mean.

        These are c and log b, at the mean [d] of q.
        """
        return {"centered": torch.zeros_like(mean), "log_scale": self._log_scales(mean)}

    def effects(self, w: Tensor, held: Tensors) -> tuple[Tensor, Tensor]:
        """Transform partially centered variables w [..., d] to standardized random effects eta.

        Also return the log Jacobian.
        """
        power = -held["centered"].to(w) * (self._log_scales(w) - held["log_scale"].to(w))
        return w * power.exp(), power.sum(-1)

    def variables(self, u: Tensor, held: Tensors) -> tuple[Tensor, Tensor]:
        """Transform standardized random effects eta back to partially centered variables w.

        Also return the log Jacobian of `effects`.
        """
        power = -held["centered"].to(u) * (self._log_scales(u) - held["log_scale"].to(u))
        return u * (-power).exp(), power.sum(-1)

    def moved(self, server: Tensors, normals: Normals, prior: Tensors) -> Tensors:
        """Return the server's state with updated centering exponents and transformed factors."""
        mean, root = normals.moments(server)
        cov = root @ root.mT  # [d, d]
        at, effect = self.scales.clamp(min=0), self.scales >= 0
        log_scale, before = self._log_scales(mean), server["centered"]
        # At its mean log tau says by what eta is more than w.
        growth = (-before * (log_scale - server["log_scale"])).exp()
        explained = cov.diagonal() - cov[torch.arange(len(at)), at].square() / cov.diagonal()[at]
        after = torch.where(effect, 1 - explained * growth.square(), 0.0).clamp(0.0, 1.0)
        if float((after - before).abs().max()) < MIN_EXPONENT_CHANGE:
            return server
        change = torch.diag(growth)
        rows = effect.nonzero()[:, 0]
        change[rows, at[rows]] += (mean * growth * (after - before))[rows]
        back = torch.linalg.inv_ex(change).inverse
        offset = growth * mean - times(change, mean)

        def changed(factor: Tensors) -> Tensors:
            """Return a normal factor's natural parameters after the change of variables."""
            precision = back.mT @ normals.matrix(factor["precision"]) @ back
            shift = times(back.mT, factor["shift"]) + times(precision, offset)
            return {"shift": shift, "precision": normals.packed(precision)}

        # p0 stays the normal that it is, so the factors take what it would have become.
        p0 = changed({n: v.to(mean) for n, v in prior.items()})
        clients = len(server["server/shift"])
        client_factors = changed(role("server", server))
        client_factors = {
            n: v + (p0[n] - prior[n].to(mean)) / clients for n, v in client_factors.items()
        }
        new = server | {"centered": after, "log_scale": log_scale} | changed(server)
        # The last proposal was of other variables.
        last = {n: torch.zeros_like(v) for n, v in server.items() if n.startswith("server/last/")}
        return new | under("server", client_factors) | last

    def _log_scales(self, u: Tensor) -> Tensor:
        """Return the log scale of each variable [..., d]; 0 if it is no random effect."""
        scales = self.scales.to(u.device)
        return torch.where(scales >= 0, u[..., scales.clamp(min=0)], 0.0)
