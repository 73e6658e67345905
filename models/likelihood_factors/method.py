"""Server and clients of likelihood factors; the package docstring has the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.aggregation.averages import AggregationError
from pyrofl.inference.metadata import PER_CLIENT, SHARED, Metadata, Moments, Monitor
from pyrofl.inference.method import Method, Phase, View
from pyrofl.models.guides.correlated import standard_noise
from pyrofl.models.likelihood_factors.factors import Factor, integrate
from pyrofl.models.likelihood_factors.linear import statistics
from pyrofl.models.likelihood_factors.sampler import CHAINS, KEPT, hmc
from pyrofl.models.likelihood_factors.structure import Structure, on_cpu, precise
from pyrofl.tensors import Tensors, like, spread_out, under

PLACE, OWN = "_place", "_own"  # auxiliary sites: which draw of the server, and a client's noise
LEAST = 1e-9  # variance of a cavity, relative to that of the draws
CELLS = 4_000_000  # numbers in a tensor
STEPS = 200  # of the search for the first mode
FEW = 0.1  # effective part of the old draws, from which changes can be seen
MIXED = 1.1  # R-hat above which the server's chains have not mixed


@dataclass(frozen=True)
class LikelihoodFactors:
    """Likelihood factors of a hierarchical program.

    The server holds the factors as server/shift [J, n] and server/precision [J, n, n], 0 for
    clients that have not reported; draws of the shared variables u as server/draws [S, d], with
    their log density server/log_density [S]; and mean and sd [d], whose changes show convergence.
    """

    structure: Structure
    blank: Batch  # one client with one row of zeros, to evaluate the prior

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors of a factor."""
        linear = ("square", "count") if self.structure.linear is not None else ()
        return ("shift", "precision", *linear)

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
            views={"personal": View(self.read, self.posterior, exact=self.is_exact)},
            metadata=Metadata(
                {
                    names: SHARED,
                    " ".join(f"server/{part}" for part in self.parts): PER_CLIENT,
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
        shapes = {"shift": (n,), "precision": (n, n)}
        none = {name: mean.new_zeros(clients, *shapes.get(name, ())) for name in self.parts}
        drawn = self._drawn(mean + sd * noise, noise.square().sum(-1) / -2, 1.0)
        missing = torch.tensor(float(clients), dtype=torch.float64)
        return drawn | under("server", none) | {"server/missing": missing}

    def cavity(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the moments of all draws, weighted by the inverse of its own factor."""
        u, reads = precise(server["server/draws"]), self.structure.reads
        value, *_ = self._integrals(u, self._own(server, cohort))
        weight = (-value).softmax(0)  # truncated, as the weights of few draws have heavy tails
        weight = weight.clamp(max=len(u) ** -0.5)
        weight = weight / weight.sum(0)
        mean = weight.mT @ u
        center, sd = u.mean(0)[reads], u.std(0)[reads].clamp(min=1e-150)
        scaled, middle = (u[:, reads] - center) / sd, (mean[:, reads] - center) / sd
        squares = (scaled[:, :, None] * scaled[:, None]).flatten(1)
        spread = (weight.mT @ squares).unflatten(1, (len(reads), -1))
        spread = spread - middle[:, :, None] * middle[:, None]
        one = torch.eye(len(reads), dtype=u.dtype)
        precision = torch.linalg.inv(spread + LEAST * one) / (sd[:, None] * sd)
        with torch.no_grad():
            _, roots, _ = self._evaluated(mean)
        found = {"mean": mean, "cavity": precision, "root": roots}
        return {n: v.to(cohort.size.device) for n, v in found.items()}

    def aggregate(
        self, server: Tensors, message: Tensors, cohort: Cohort, source: Generator
    ) -> Tensors:
        """Replace the factors of reporting clients, and draw the shared variables again."""
        ids = cohort.ids.cpu()
        factors = {
            n: precise(server[f"server/{n}"]).index_copy(0, ids, precise(message[n]))
            for n in self.parts
        }
        u, old = (precise(server[f"server/{n}"]) for n in ("draws", "log_density"))
        begun = bool(server["server/precision"].any())
        if not begun:  # the prior may be wide: start from its product with factors at its middle
            u, old = self._normal(factors, len(u), source)
        with torch.no_grad():
            change = (self.log_density(u, factors) - old).nan_to_num(nan=-torch.inf)
        if not bool(change.isfinite().any()):
            raise AggregationError(
                "the product of prior and factors has no point of finite density"
            )
        weight = change.softmax(0)
        starts = weight.clamp(max=4 / CHAINS) + 1e-300
        start = u[torch.multinomial(starts, CHAINS, True, generator=source)]
        found = hmc(lambda u: self.log_density(u, factors), start, source)
        new = self._drawn(*found)
        if begun and float(1 / weight.square().sum()) > FEW * len(u):
            new |= self._moved(server, u, weight)
        missing = (~factors["precision"].flatten(1).any(1)).sum().double()
        return new | under("server", factors) | {"server/missing": missing}

    def _moved(self, server: Tensors, u: Tensor, weight: Tensor) -> Tensors:
        """Return mean and sd, changed as those of the old draws under new weights.

        Unlike differences of two sets of draws, this has no noise where no factor changes.
        """
        mean = weight @ u
        sd = (weight @ (u - mean).square()).sqrt()
        return {
            "mean": precise(server["mean"]) + mean - u.mean(0),
            "sd": precise(server["sd"]) * sd / u.std(0, correction=0),
        }

    def log_density(self, u: Tensor, factors: Tensors) -> Tensor:
        """Return the log density [S] of shared variables [S, d], up to a constant."""
        prior, roots, noise = self._evaluated(u)
        values, *_ = integrate(u[:, self.structure.reads], roots, noise, factors)
        total: Tensor = prior + values.sum(-1)
        return total

    def _normal(self, factors: Tensors, count: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Return draws [S, d] of a normal around the mode of the posterior, and log densities."""
        mean, sd = (v.double() for v in self.structure.ours.prior())
        mode = mean.clone()[None].requires_grad_()
        search = torch.optim.LBFGS([mode], max_iter=STEPS, line_search_fn="strong_wolfe")

        def cost() -> Tensor:
            """Return the negative log density, with its gradient for the search."""
            search.zero_grad()
            value = -self.log_density(mode, factors).sum()
            value.backward()
            return value

        with torch.enable_grad():
            search.step(cost)
            at = torch.where(mode.isfinite(), mode, mean).detach().requires_grad_()
            value = self.log_density(at, factors).sum()
            (slope,) = torch.autograd.grad(value, at, create_graph=True)
            rows = [torch.autograd.grad(v, at, retain_graph=True)[0] for v in slope[0]]
        values, vectors = torch.linalg.eigh(-torch.cat(rows).nan_to_num(0.0, 0.0, 0.0))
        half = vectors * torch.maximum(values, sd.max() ** -2).rsqrt()
        noise = torch.randn(count, len(mean), generator=source, dtype=mean.dtype)
        return at.detach() + noise @ half.mT, -noise.square().sum(-1) / 2

    def _drawn(self, u: Tensor, log_density: Tensor, r_hat: float) -> Tensors:
        """Return the part of the server's state that describes the draws."""
        return {
            "mean": u.mean(0),
            "sd": u.std(0),
            "server/draws": u,
            "server/log_density": log_density,
            "server/r_hat": torch.tensor(r_hat, dtype=torch.float64),
        }

    def _own(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Return the given clients' factors; 0 of new clients."""
        found = {n: precise(server[f"server/{n}"]) for n in self.parts}
        ids, clients = cohort.ids.cpu(), len(found["shift"])
        at, known = ids.clamp(max=clients - 1), (ids < clients).double()
        return {n: v[at] * like(known, v) for n, v in found.items()}

    def _integrals(self, u: Tensor, factors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return `integrate` at draws [S, d], in parts."""
        with torch.no_grad():
            _, roots, noise = self._evaluated(u)
        step = max(1, CELLS // (len(factors["shift"]) * (roots.shape[-1] + 1) ** 2))
        each = (v.split(step) for v in (u[:, self.structure.reads], roots, noise))
        parts = [integrate(v, root, one, factors) for v, root, one in zip(*each, strict=True)]
        value, b, lower = (torch.cat(one) for one in zip(*parts, strict=True))
        return value, b, lower

    def _evaluated(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p(u) [S], T [S, m, m] and the inverse noise variance [S], or 1."""
        none = u.new_zeros(len(u), 1, self.structure.mine.size)
        found = self.structure.evaluate(u[:, None], none, self.blank)
        noise = u.new_ones(len(u))
        if self.structure.linear is not None and found.response is not None:
            noise = found.response.sd.expand(len(u), 1, 1)[:, 0, 0] ** -2
        return found.prior[:, 0], found.roots[:, 0], noise

    def moments(self, server: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and standard deviation of each unconstrained shared site."""
        sites = self.structure.ours.sites
        sizes = [len(site.mean) for site in sites]
        parts = zip(server["mean"].split(sizes), server["sd"].split(sizes), strict=True)
        return {site.name: part for site, part in zip(sites, parts, strict=True)}

    # A client

    def factor(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute the client's likelihood factor under the received cavity."""
        rows = on_cpu(batch)
        if self.structure.linear is not None:
            found = statistics(self.structure, rows) | {"mean": received["mean"]}
        else:
            mean, cavity, root = (precise(received[n]) for n in ("mean", "cavity", "root"))
            found = Factor(self.structure, mean, cavity, root, rows).update()
        return {n: v.to(batch.size.device) for n, v in found.items()}

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send the client's likelihood factor."""
        return {n: local[n] for n in self.parts}

    # Predictions and posterior draws

    def posterior(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the server's draws, and its own effects given each of them."""
        u = precise(server["server/draws"])
        _, b, lower = self._integrals(u, self._own(server, cohort))
        one = torch.eye(lower.shape[-1], dtype=lower.dtype)
        root = torch.linalg.solve_triangular(lower.mT, one.expand_as(lower), upper=True)
        mean = (root @ (root.mT @ b[..., None]))[..., 0]
        shared = {"draws": u, "log_density": server["server/log_density"]}
        own = {"own_mean": mean.movedim(1, 0), "own_root": root.movedim(1, 0)}
        shared, own = ({n: v.to(cohort.size) for n, v in part.items()} for part in (shared, own))
        return spread_out(shared, len(cohort.ids)) | own

    def is_exact(self, server: Tensors) -> bool:
        """Return whether the server's draws are of the exact posterior of all clients."""
        precise = server["server/shift"].dtype == torch.float64  # sums of squares cancel
        mixed = float(server["server/r_hat"]) <= MIXED
        complete = not bool(server["server/missing"])
        return self.structure.linear is not None and precise and mixed and complete

    def read(self, received: Tensors, local: Tensors) -> Tensors:
        """Return the received draws, which the guide reads."""
        return received

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Select one of the server's draws, and draw the client's own noise given it."""
        if "draws" in local:
            of_draws = ("draws", "log_density", "own_mean", "own_root")
            u, log_density, mean, root = (local[n] for n in of_draws)
        else:  # while clients train: the middle of the cavity, and the prior of the effects
            u = local["mean"][..., None, :]
            root = torch.eye(self.structure.mine.size).to(u).expand(*u.shape[:-1], -1, -1)
            log_density, mean = torch.zeros_like(u[..., 0]), root.diagonal(dim1=-2, dim2=-1) * 0.0
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
            values = self.structure.ours.sample(ours, log_q, 1.0)
            eta = own + (scale @ noise[..., None])[..., 0]
            # Of rows that nobody has trained on there is nothing but the model.
            rows = batch.mask.shape[1] if batch.at is None else 0
            values |= self.structure.mine.sample(eta, log_own, 1.0, rows)
        if not rows and (names := self.structure.mine.of_rows):
            stated = poutine.condition(self.structure, data=values)
            with poutine.block(hide_fn=lambda msg: msg["name"] not in names):
                stated({}, {}, batch)
