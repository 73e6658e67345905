"""Server and clients of likelihood factors; the package docstring has the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.metadata import PER_CLIENT, SHARED, Metadata, Moments, Monitor
from pyrofl.inference.method import Method, Phase, View
from pyrofl.models.guides.correlated import standard_noise
from pyrofl.models.likelihood_factors.factors import Factor, integrate
from pyrofl.models.likelihood_factors.sampler import CHAINS, KEPT, hmc
from pyrofl.models.likelihood_factors.structure import Structure, in_double
from pyrofl.tensors import Tensors, spread_out

PLACE, OWN = "_place", "_own"  # auxiliary sites: which draw of the server, and a client's noise
CELLS = 4_000_000  # numbers in a tensor
MIXED = 1.2  # R-hat above which the server's chains have not mixed


@dataclass(frozen=True)
class LikelihoodFactors:
    """Likelihood factors of a hierarchical program.

    The server holds the factors as server/shift [J, n] and server/precision [J, n, n], 0 for
    clients that have not reported; draws of the shared variables u as server/draws [S, d], with
    their log density server/log_density [S]; and their mean and sd [d].
    """

    structure: Structure
    blank: Batch  # one client with one row of zeros, to evaluate the prior

    def method(self, text: str) -> Method:
        """Return the federated method, with a description of the program's sites."""
        names = f"{self.structure.ours.names} {PLACE}"
        return Method(
            name="likelihood_factors",
            init=self.init,
            model=self.structure,
            guide=self.guide,
            phases=(Phase((self.factor,)),),
            aggregate=self.aggregate,
            download=self.cavity,
            upload=self.upload,
            views={"personal": View(self.read, self.posterior)},
            metadata=Metadata(
                {
                    names: SHARED,
                    "server/shift server/precision": PER_CLIENT,
                    "mean sd": Moments(self.moments),
                    "server/r_hat": Monitor(
                        MIXED, "the server's chains have not mixed: its draws are unreliable"
                    ),
                    "server/missing": Monitor(
                        0.0, "that many clients have not reported: the posterior lacks their rows"
                    ),
                },
                reads={"model": self.structure},
                sites=text,
            ),
        )

    # The server

    def init(self, source: Generator, clients: int) -> Tensors:
        """Initialize the factors with 1, and the draws with a normal that stands for the prior."""
        mean, sd = (v.double() for v in self.structure.ours.prior())
        noise = torch.randn(CHAINS * KEPT, len(mean), generator=source, dtype=torch.float64)
        n = len(self.structure.reads) + self.structure.mine.size
        return self._drawn(mean + sd * noise, noise.square().sum(-1) / -2, 1.0) | {
            "server/shift": mean.new_zeros(clients, n),
            "server/precision": mean.new_zeros(clients, n, n),
            "server/missing": torch.tensor(float(clients), dtype=torch.float64),
        }

    def cavity(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the moments of all draws, weighted by the inverse of its own factor."""
        u, reads = server["server/draws"].double(), self.structure.reads
        value, *_ = self._integrals(u, *self._own(server, cohort))
        weight = (-value).softmax(0)  # truncated, as the weights of few draws have heavy tails
        weight = weight.clamp(max=len(u) ** -0.5)
        weight = weight / weight.sum(0)
        mean = weight.mT @ u
        off = u[:, None] - mean
        covariance = torch.einsum("sj,sjk,sjl->jkl", weight, off[..., reads], off[..., reads])
        eye = 1e-12 * covariance.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300)
        roots = self._roots(mean)
        precision = torch.linalg.inv(covariance + torch.diag_embed(eye))
        return {"mean": mean, "cavity": precision, "root": roots}

    def aggregate(
        self, server: Tensors, message: Tensors, cohort: Cohort, source: Generator
    ) -> Tensors:
        """Replace the factors of reporting clients, and draw the shared variables again."""
        ids = cohort.ids.cpu()
        factors = {
            n: server[f"server/{n}"].double().index_copy(0, ids, message[n].double().cpu())
            for n in ("shift", "precision")
        }
        begun = bool(server["server/precision"].any())
        start = self._start(server, factors, begun, source)
        found = hmc(lambda u: self.log_density(u, **factors), start, source)
        missing = (~factors["precision"].flatten(1).any(1)).sum().double()
        return (
            self._drawn(*found)
            | {f"server/{n}": v for n, v in factors.items()}
            | {"server/missing": missing}
        )

    def log_density(self, u: Tensor, shift: Tensor, precision: Tensor) -> Tensor:
        """Return the log density [S] of shared variables [S, d], up to a constant."""
        found = self.structure.evaluate(u[:, None], self._no_noise(u), self.blank)
        values, *_ = integrate(u[:, self.structure.reads], found.roots[:, 0], shift, precision)
        total: Tensor = found.prior[:, 0] + values.sum(-1)
        return total

    def _start(self, server: Tensors, factors: Tensors, begun: bool, source: Generator) -> Tensor:
        """Return starts of the chains [K, d]: draws resampled by the new factors."""
        u, log_q = server["server/draws"].double(), server["server/log_density"].double()
        if not begun:  # as the prior may be wide, from its product with factors at its middle
            u, log_q = self._normal(factors, u, source)
        with torch.no_grad():
            ratio = self.log_density(u, **factors) - log_q
        weight = ratio.nan_to_num(nan=-torch.inf).softmax(0).clamp(max=4 / CHAINS)
        return u[torch.multinomial(weight + 1e-300, CHAINS, True, generator=source)]

    def _normal(self, factors: Tensors, u: Tensor, source: Generator) -> tuple[Tensor, Tensor]:
        """Return draws [S, d] of a normal approximation of the posterior, and log densities."""
        mean, sd = (v.double() for v in self.structure.ours.prior())
        reads, root = self.structure.reads, self._roots(mean[None])[0]
        p = len(reads)
        shift, precision = factors["shift"], factors["precision"]
        one = torch.eye(len(root), dtype=root.dtype)
        given = root @ torch.linalg.inv(one + root.mT @ precision[:, p:, p:] @ root) @ root.mT
        gain = precision[:, :p, p:] @ given
        total = torch.diag(sd**-2)
        total[reads[:, None], reads] += (precision[:, :p, :p] - gain @ precision[:, p:, :p]).sum(0)
        pull = mean * sd**-2
        pull[reads] += (shift[:, :p] - (gain @ shift[:, p:, None])[..., 0]).sum(0)
        values, vectors = torch.linalg.eigh(total)
        values = torch.maximum(values, sd.max() ** -2)
        half = vectors * values.rsqrt()
        noise = torch.randn(u.shape, generator=source, dtype=u.dtype)
        log_q = -noise.square().sum(-1) / 2
        return half @ half.mT @ pull + noise @ half.mT, log_q

    def _drawn(self, u: Tensor, log_density: Tensor, r_hat: float) -> Tensors:
        """Return the part of the server's state that describes the draws."""
        return {
            "mean": u.mean(0),
            "sd": u.std(0),
            "server/draws": u,
            "server/log_density": log_density,
            "server/r_hat": torch.tensor(r_hat, dtype=torch.float64),
        }

    def _own(self, server: Tensors, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Return shift and precision of the given clients' factors; 0 of new clients."""
        shift, precision = (server[f"server/{n}"].double() for n in ("shift", "precision"))
        ids = cohort.ids.to(shift.device)
        known = (ids < len(shift)).to(shift)
        at = ids.clamp(max=len(shift) - 1)
        return shift[at] * known[:, None], precision[at] * known[:, None, None]

    def _integrals(
        self, u: Tensor, shift: Tensor, precision: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `integrate` at draws [S, d], in parts."""
        reads, m = self.structure.reads, self.structure.mine.size
        roots = self._roots(u)
        step = max(1, CELLS // (len(shift) * (m + 1) ** 2))
        parts = [
            integrate(some, root, shift, precision)
            for some, root in zip(u[:, reads].split(step), roots.split(step), strict=True)
        ]
        value, b, lower = (torch.cat(one) for one in zip(*parts, strict=True))
        return value, b, lower

    def _roots(self, u: Tensor) -> Tensor:
        """Return T [S, m, m] at shared variables [S, d]."""
        with torch.no_grad():
            return self.structure.evaluate(u[:, None], self._no_noise(u), self.blank).roots[:, 0]

    def _no_noise(self, u: Tensor) -> Tensor:
        return u.new_zeros(len(u), 1, self.structure.mine.size)

    def moments(self, server: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each unconstrained shared site."""
        sites = self.structure.ours.sites
        sizes = [len(site.mean) for site in sites]
        parts = zip(server["mean"].split(sizes), server["sd"].split(sizes), strict=True)
        return {site.name: part for site, part in zip(sites, parts, strict=True)}

    # A client

    def factor(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute the client's likelihood factor under the received cavity."""
        mean, cavity, root = (received[n].double() for n in ("mean", "cavity", "root"))
        return Factor(self.structure, mean, cavity, root, in_double(batch)).update()

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send shift and precision of the client's likelihood factor."""
        return {n: local[n] for n in ("shift", "precision")}

    # Predictions and posterior draws

    def posterior(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the server's draws, and its own effects given each of them."""
        u = server["server/draws"].double()
        _, b, lower = self._integrals(u, *self._own(server, cohort))
        one = torch.eye(lower.shape[-1], dtype=lower.dtype)
        root = torch.linalg.solve_triangular(lower.mT, one.expand_as(lower), upper=True)
        mean = (root @ (root.mT @ b[..., None]))[..., 0]
        shared = {"draws": u, "log_density": server["server/log_density"]}
        return spread_out(shared, len(cohort.ids)) | {
            "own_mean": mean.movedim(1, 0),
            "own_root": root.movedim(1, 0),
        }

    def read(self, received: Tensors, local: Tensors) -> Tensors:
        """Return the received draws, which the guide reads."""
        return received

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Select one of the server's draws, and draw the client's own noise given it."""
        if "draws" in local:
            names = ("draws", "log_density", "own_mean", "own_root")
            u, log_density, mean, root = (local[n] for n in names)
        else:  # while clients train: the middle of the cavity, and the prior of the effects
            u = local["mean"][..., None, :]
            root = torch.eye(self.structure.mine.size).to(u).expand(*u.shape[:-1], -1, -1)
            log_density, mean = torch.zeros_like(u[..., 0]), torch.zeros_like(root[..., 0])
        count = u.shape[-2]
        with batch.clients():
            listed: Any = {"is_auxiliary": True, "listed": count}
            standard = dist.Normal(u.new_zeros(len(batch), 1), 1.0)
            place = pyro.sample(PLACE, standard.mask(False), infer=listed)
            noise = standard_noise(OWN, mean[..., 0, :])
            at = (torch.special.ndtr(place) * count).long().clamp(0, count - 1)
            client = torch.arange(len(batch), device=u.device)[:, None].expand_as(at)
            middle = (place == 0)[..., None]  # as of the mean of the guide
            ours = torch.where(middle, u.mean(-2), u[client, 0, at])
            own = torch.where(middle, mean.mean(-2), mean[client, 0, at])
            scale = root[client, 0, at]
            log_q = torch.where(place == 0, 0.0, log_density[client, 0, at])
            log_own = -scale.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            self.structure.ours.sample(ours, log_q, 1.0)
            eta = own + (scale @ noise[..., None])[..., 0]
            self.structure.mine.sample(eta, log_own, 1.0)
