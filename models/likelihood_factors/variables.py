"""Variables of the server's sampler: shared effects between their centered and non-centered form.

The joint density of a shared effect u ~ N(loc, s) and its shared scale s is a funnel if the rows
carry little information on u; that of u / s and s is one if they carry much. The server samples

    w = (u - loc) / s^(1 - c),    c = h s^2 / (1 + h s^2),    h: precision of u in the factors

(Gorinova, Moore and Hoffman, "Automatic Reparameterisation of Probabilistic Programs", ICML 2020),
with the median of s. Factors stay normal in u, in which the likelihoods are nearly normal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrofl.inference.hmc import LogDensity, covariance_root
from pyrofl.inference.posteriors.proposals import ServerDraws
from pyrofl.models.likelihood_factors.structure import Evaluated, Structure
from pyrofl.tensors import Tensors

STEPS = 200  # of the search for the first mode


def find_mode(log_density: LogDensity, start: Tensor) -> Tensor:
    """Return the mode [1, d] of a log density from a start [d], with gradients."""
    mode = start.clone()[None].requires_grad_()
    search = torch.optim.LBFGS([mode], max_iter=STEPS, line_search_fn="strong_wolfe")
    least, best = torch.inf, mode.detach().clone()

    def cost() -> Tensor:
        """Return the negative log density, with its gradient for the search."""
        nonlocal least, best
        search.zero_grad()
        value = -log_density(mode).sum()
        value.backward()
        if value.item() < least:
            least, best = value.item(), mode.detach().clone()
        return value

    with torch.enable_grad():
        search.step(cost)
    with torch.no_grad():  # a line search may end where there is no density
        ended = bool(log_density(mode).isfinite().all())
    return (mode if ended else best).detach().requires_grad_()


def curvature(log_density: LogDensity, at: Tensor) -> Tensor:
    """Return minus the Hessian [d, d] of a log density at a point [1, d]; 0 where it has none."""
    at = at.detach().requires_grad_()
    with torch.enable_grad():
        value = log_density(at).sum() + 0 * at.square().sum()  # it may be linear
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
        rows = [torch.autograd.grad(v, at, retain_graph=True)[0] for v in slope[0]]
    return -torch.cat(rows).nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Variables:
    """Change of variables between shared variables u [S, d] and those that are sampled, w [S, d].

    Attributes:
        structure: the hierarchical program.
        prior: the program's prior at points u [S, d], with one client.
        power: exponents c, [d].
    """

    structure: Structure
    prior: Callable[[Tensor], Evaluated]
    power: Tensor

    @classmethod
    def of(
        cls, structure: Structure, prior: Callable[[Tensor], Evaluated], u: Tensor, h: Tensor
    ) -> Variables:
        """Choose the exponents, given draws u [S, d] and the precision h [d] of the factors."""
        with torch.no_grad():
            rows = h.clamp(min=0.0) * prior(u).scale[:, 0].median(0).values.square()
        return cls(structure, prior, rows / (1 + rows))

    def start(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation [d] of the variables w under the prior."""
        mean, sd = (v.double() for v in self.structure.ours.prior())
        effects = self.structure.effects
        return torch.where(effects, 0.0, mean), torch.where(effects, 1.0, sd)

    def sampled(self, u: Tensor) -> Tensor:
        """Return the variables w [S, d] at u."""
        with torch.no_grad():
            found = self.prior(u)
            w: Tensor = (u - found.loc[:, 0]) / found.scale[:, 0] ** (1 - self.power)
        return w

    def shared(self, w: Tensor) -> tuple[Tensor, Evaluated, Tensor]:
        """Return u at w [S, d], the prior there, and the log Jacobian [S]."""
        u = w
        for _ in range(len(self.structure.spread) + 1):  # scales may be effects themselves
            found = self.prior(u)
            growth = found.scale[:, 0] ** (1 - self.power)
            before, u = u, found.loc[:, 0] + growth * w
            if torch.equal(before, u):
                break
        return u, found, growth.log().sum(-1)

    def standardized(
        self,
        u: Tensor,
        log_density: Tensor,
        listed_at: Callable[[Tensor, Evaluated], tuple[Tensors, Tensor]],
    ) -> ServerDraws:
        """Return draws u [S, d] and their log density [S] as noise of the variables w.

        `listed_at` returns a server state with other draws u [S, d], where the prior is as given,
        and their log density.
        """
        w = self.sampled(u)
        mean, root = w.mean(0), covariance_root(w)

        def at(noise: Tensor) -> tuple[Tensors, Tensor]:
            with torch.no_grad():
                u, found, growth = self.shared(mean + noise @ root.mT)
                server, value = listed_at(u, found)
            return server, value + growth

        with torch.no_grad():
            growth = self.shared(w)[2]
        noise = torch.linalg.solve_triangular(root, (w - mean).mT, upper=False).mT
        return ServerDraws(noise, log_density + growth, at)
