"""Two-stage method: an exact hierarchical posterior from posterior draws of each client alone.

Lunn, Barrett, Sweeting and Thompson, "Fully Bayesian hierarchical modeling in two stages, with
application to meta-analysis", JRSS C 62, 2013.

    p(g, z, y) = p(g) prod_j p(z_j | g) p(y_j | z_j)     z_j of a client, g shared by all

    client   z_js, s = 1 ... S, from  p_1(z_j) p(y_j | z_j)        with a prior p_1 of its own
    server   (g, z)  from  p(g) prod_j p(z_j | g) p(y_j | z_j),  each z_j one of the client's z_js

In the paper, z_js is accepted with the ratio of p(z_j | g) / p_1(z_j) in a Metropolis-Hastings
step, and g drawn given z. That chain has the law

    p(g) prod_j L_j(g),    L_j(g) = mean_s p(z_js | g) / p_1(z_js)    in proportion to p(y_j | g)

for g, and given g takes z_js with a probability in proportion to its term of L_j. The server draws
g from it by Hamiltonian Monte Carlo, and z given g.

One exchange is exact up to Monte Carlo error: log prod_j L_j has a variance of about sum_j 1 /
ESS_j, with ESS_j effective terms of L_j. Errors of means, in standard deviations, are at most about
its square root. A warning is given where it is above 0.05 on average over the draws, as terms are
few where clients are much alike, most of all where a scale of z is near 0. From round two p_1 is a
t distribution with the moments of all clients' z, which gives more. Sites z_j may be of any
continuous distribution: `likelihood_factors` needs normal ones, and PVI many rounds.

What leaves a client: S posterior draws of its own parameters under p_1. The server thus knows the
client's posterior as well as the client does, and from it p(y_j | z_j) up to a constant.

Departures from the paper: the sampler of the server, as above; p_1 is a t distribution with five
degrees of freedom, without constraints, around the median of the program's prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, Positive, checked
from pyrofl.data import Batch, Cohort, Federation
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
    MODERATE,
    PER_CLIENT,
    SHARED,
    Metadata,
    Moments,
    Monitor,
)
from pyrofl.inference.definition.method import Method, Phase, View
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.hmc import DRAWS_PER_CHAIN, LogDensity, hmc
from pyrofl.models.likelihood_factors.structure import (
    DERIVATIVE_TOLERANCE,
    NUM_CHECKED_CLIENTS,
    blank,
    on_cpu,
)
from pyrofl.models.shared.declared import Declared
from pyrofl.models.shared.matrices import to_cpu_double
from pyrofl.models.shared.sites import Layout
from pyrofl.models.shared.unconstrained import layouts
from pyrofl.tensors import Tensors, default_type, generator, matches, spread_out

__all__ = ["hierarchical"]

DEGREES_OF_FREEDOM = 5.0  # degrees of freedom of p_1
WIDTH_FACTOR = 1.5  # p_1 after round one, relative to the standard deviation of all z
NUM_CHAINS, NUM_START_POINTS = 64, 1024  # of the server, and points among which chains start
# Variance of the log density, above which draws of clients are too few.
MAX_LOG_DENSITY_VARIANCE = 0.05
MAX_R_HAT = 1.1  # R-hat above which chains have not mixed
PLACE = "_place"  # auxiliary site: which draw of the server
HINT = "use likelihood_factors.hierarchical or pvi.hierarchical for this program"


@dataclass(frozen=True)
class TwoStage:
    """Hierarchical program with d shared variables g and m own variables z, unconstrained.

    The server holds clients' draws [J, S, m] with log p_1 [J, S], and N posterior draws of g [N, d]
    and of all z [J, N, m]; and draws of a client without rows, under "server/new_...".
    """

    program: Program
    shared_sites: Layout
    client_sites: Layout
    blank: Batch  # one client with one row of zeros
    draws: int  # S

    def method(self, text: str) -> Method:
        """Return the federated method, with a description of the program's sites."""
        few = "variance of the log density: the clients' draws are too few, raise draws or rounds"
        mixed = f"chains of the clients or the server have not mixed: {HINT}"
        absent = "that many clients have not reported: the posterior lacks their rows"
        return Method(
            name="two_stage",
            init=self.init,
            model=self.program,
            guide=self.guide,
            phases=(Phase((self.sample,)),),
            aggregate=self.aggregate,
            download=self.first_prior,
            upload=lambda received, local: {n: local[n] for n in ("draws", "log_p1", "r_hat")},
            views={"personal": View(self.read, self.sent, exact=self.is_reliable)},
            metadata=Metadata(
                {
                    f"{self.shared_sites.names} {PLACE}": SHARED,
                    "server/draws server/log_p1 server/known server/own": PER_CLIENT,
                    "mean sd": Moments(self.shared_sites.moments),
                    "server/noise": Monitor(MAX_LOG_DENSITY_VARIANCE, few),
                    "server/r_hat": Monitor(MAX_R_HAT, mixed, required=True, lasting=True),
                    "server/missing": Monitor(0.0, absent, required=True),
                    "draws log_p1 r_hat": MODERATE,
                },
                reads={"model": self.program},
                sites=text,
            ),
        )

    def check(self, batch: Batch) -> None:
        """Raise ValueError unless rows depend on own sites alone, and these not on data."""
        source, shape = generator("two_stage"), (8, len(batch))
        (mean, sd), (middle, width) = self.shared_sites.prior(), self.client_sites.prior()
        u = mean + 0.5 * sd.clamp(max=1.0) * torch.randn(*shape, len(mean), generator=source)
        z = middle + 0.5 * width.clamp(max=1.0) * torch.randn(*shape, len(middle), generator=source)
        u, z = u.double(), z.double()
        with torch.no_grad():
            rows, others = (self.evaluate(v, z, batch, "") for v in (u, u.flip(0)))
            client_density = self.evaluate(u, z, batch, self.client_sites.names)
            blank = self.blank.select_clients(torch.zeros(len(batch), dtype=torch.long))
            at_server = self.evaluate(u, z, blank, self.client_sites.names)
        if not torch.allclose(rows, others, rtol=DERIVATIVE_TOLERANCE, equal_nan=True):
            raise ValueError(
                "the rows depend on shared sites, given each client's own; write own sites in "
                f"centered form, such as theta ~ Normal(mu, tau); otherwise {HINT}"
            )
        if not torch.allclose(client_density, at_server, rtol=DERIVATIVE_TOLERANCE, equal_nan=True):
            raise ValueError(
                f"the prior of {self.client_sites.names} depends on a client's data, which the "
                f"server does not have; {HINT}"
            )

    # The server

    def init(self, source: Generator, clients: int) -> Tensors:
        """Initialize the draws of g and z with normals that stand for their priors."""
        both = (
            (v.double() for v in layout.prior())
            for layout in (self.shared_sites, self.client_sites)
        )
        (mean, sd), (middle, width) = both
        shared = (
            mean
            + sd * torch.randn(NUM_CHAINS * DRAWS_PER_CHAIN, len(mean), generator=source).double()
        )
        z, client_draws = (
            middle + width * self._noise(n, source) for n in (self.draws, len(shared))
        )
        new = {"draws": z, "log_p1": self._first_prior(z, middle, width), "own": client_draws}
        tables = {n: v.expand(clients, *v.shape).clone() for n, v in new.items()}  # [J, ...]
        tables |= {f"new_{n}": v for n, v in new.items()}
        tables |= {"g": shared, "known": torch.zeros(clients), "noise": torch.zeros(())}
        tables |= {"r_hat": torch.ones(()), "missing": torch.tensor(float(clients))}
        first = {"middle": middle, "width": width, "mean": mean, "sd": sd}
        return first | {f"server/{n}": v.double() for n, v in tables.items()}

    def first_prior(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the location and the scale of p_1."""
        first_moments = {n: server[n].to(cohort.size.device) for n in ("middle", "width")}
        return spread_out(first_moments, len(cohort.ids))

    def aggregate(
        self, server: Tensors, message: Tensors, cohort: Cohort, source: Generator
    ) -> Tensors:
        """Replace the draws of reporting clients, and draw from the posterior again."""
        ids = cohort.ids.cpu()
        sent = {n: to_cpu_double(message[n]) for n in ("draws", "log_p1")}
        sent["known"] = torch.ones(len(ids)).double()
        held = {
            n: to_cpu_double(server[f"server/{n}"]).index_copy(0, ids, v) for n, v in sent.items()
        }
        is_reported, z, log_p1 = held["known"] > 0, held["draws"], held["log_p1"]

        def log_density(u: Tensor) -> Tensor:
            """Return the log density [N] of shared variables u [N, d], up to a constant."""
            terms = self._terms(u, z[is_reported], log_p1[is_reported])
            prior: Tensor = self._prior(u) + (terms.logsumexp(-1) - math.log(self.draws)).sum(-1)
            return prior

        mean, sd = (v.double() for v in self.shared_sites.prior())
        normal = dist.Normal(mean, sd).to_event(1)
        tried = mean + sd * torch.randn(NUM_START_POINTS, len(mean), generator=source).double()
        start = _starts(log_density, tried, normal.log_prob(tried), NUM_CHAINS, source)
        sampled_draws = hmc(log_density, start, source)
        # A client that has not reported holds draws of its prior, as a new one.
        new = (
            to_cpu_double(server[f"server/new_{n}"])[None] for n in ("draws", "log_p1")
        )  # [1, S, ...]
        z, log_p1 = (torch.cat(pair) for pair in zip((z, log_p1), new, strict=True))
        client_draws, inverse = self._resampled(sampled_draws.u, z, log_p1, source)
        pooled, noise = (
            client_draws[:-1][is_reported].flatten(0, 1),  # [J N, m]
            inverse[:, :-1][:, is_reported].sum(-1).mean(),
        )
        r_hat = max(sampled_draws.r_hat, float(message["r_hat"].max()))
        state = held | {
            "own": client_draws[:-1],
            "new_own": client_draws[-1],
            "g": sampled_draws.u,
            "noise": noise,
        }
        state |= {"r_hat": noise.new_tensor(r_hat), "missing": (~is_reported).sum().double()}
        moments = {"mean": sampled_draws.u.mean(0), "sd": sampled_draws.u.std(0)}
        moments |= {"middle": pooled.mean(0), "width": WIDTH_FACTOR * pooled.std(0)}
        return server | moments | {f"server/{n}": v for n, v in state.items()}

    def _resampled(
        self, u: Tensor, z: Tensor, log_p1: Tensor, source: Generator
    ) -> tuple[Tensor, Tensor]:
        """Return z [J, N, m] given each u [N, d], from draws [J, S, m], and 1 / ESS [N, J]."""
        points, worth = [], []
        with torch.no_grad():
            for part in u.split(NUM_CHAINS):
                w = self._terms(part, z, log_p1).softmax(-1)  # [K, J, S]
                at = torch.multinomial(w.flatten(0, 1), 1, generator=source).view(w.shape[:2])
                points.append(z[torch.arange(len(z)), at])
                worth.append(w.square().sum(-1))
        return torch.cat(points).movedim(0, 1), torch.cat(worth)

    def _terms(self, u: Tensor, z: Tensor, log_p1: Tensor) -> Tensor:
        """Return log p(z | u) - log p_1(z), [K, J, S], for u [K, d] and z [J, S, m]."""
        flat = z.flatten(0, 1)  # [J S, m]
        many = self.blank.select_clients(torch.zeros(len(flat), dtype=torch.long))
        value = self.evaluate(u[:, None], flat[None], many, self.client_sites.names)
        return value.view(len(u), *z.shape[:2]) - log_p1

    def _prior(self, u: Tensor) -> Tensor:
        """Return log p(u), [K]."""
        z = self.client_sites.prior()[0].to(u).expand(len(u), 1, -1)
        return self.evaluate(u[:, None], z, self.blank, self.shared_sites.names)[:, 0]

    def evaluate(self, u: Tensor, z: Tensor, batch: Batch, names: str) -> Tensor:
        """Return log densities [S, C] at u [S, C, d] and z [S, C, m]: of latent sites, or of rows.

        `names` are sites, whose densities are those of unconstrained variables; "" stands for rows.
        """

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            zero = u.new_zeros(*u.shape[:-1], 1)
            with batch.clients():
                self.shared_sites.sample(u[..., None, :], zero, 1.0)  # [S, C, 1, d]
                self.client_sites.sample(z[..., None, :], zero, 1.0)  # [S, C, 1, m]

        with pyro.validation_enabled(False), default_type(u.dtype):
            q, p = traces(self.program, guide, {}, {}, batch, len(u))
        total = u.new_zeros(u.shape[:-1])
        for name, site in latent(q) if names else observed(p):
            if not names:
                total = total + per_draw(weighed(site, log_prob(name, site)), len(batch))
            elif matches(name, names):
                stated = p.nodes[name]
                total = total - per_draw(site["fn"].log_density, len(batch))  # log Jacobian
                if not isinstance(base_of(stated["fn"]), dist.ImproperUniform):
                    density = weighed(stated, log_prob(name, stated))
                    total = total + per_draw(density, len(batch))
        return total

    def is_reliable(self, server: Tensors) -> bool:
        """Return whether the draws are of the posterior of all clients, up to a small error."""
        limits = {"noise": MAX_LOG_DENSITY_VARIANCE, "r_hat": MAX_R_HAT, "missing": 0.0}
        return all(float(server[f"server/{n}"]) <= limit for n, limit in limits.items())

    # A client

    def sample(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Draw each client's own variables from p_1 times its likelihood."""
        with batch.clients():  # one number of the client's own random stream
            normal = dist.Normal(torch.zeros_like(batch.size)[:, None].double(), 1.0)
            seeds = pyro.sample("_seed", normal)[:, 0].tolist()
        rows, per_client = on_cpu(batch), []
        for c, seed in enumerate(seeds):
            one = rows.select_clients(slice(c, c + 1))
            middle, width = (to_cpu_double(received[n][c]) for n in ("middle", "width"))
            per_client.append(
                self._sampled(one, middle, width, generator("two_stage", int(abs(seed) * 2**40)))
            )
        draws, log_p1, r_hat = (  # [C, S, m], [C, S], [C]
            torch.stack(v).to(batch.size.device) for v in zip(*per_client, strict=True)
        )
        return {"draws": draws, "log_p1": log_p1, "r_hat": r_hat, "middle": received["middle"]}

    def _sampled(
        self, one: Batch, middle: Tensor, width: Tensor, source: Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return draws [S, m] of one client, their log p_1 [S], and R-hat."""
        u = self.shared_sites.prior()[0].double()

        def log_density(z: Tensor) -> Tensor:
            """Return the client's log density [N] of own variables z [N, m], under p_1."""
            shared = u.expand(len(z), 1, -1)
            rows = self.evaluate(shared, z[:, None], one, "")[:, 0]  # [N]
            return rows + self._first_prior(z, middle, width)

        tried = middle + width * self._noise(NUM_START_POINTS, source)
        first = self._first_prior(tried, middle, width)
        count = math.ceil(self.draws / DRAWS_PER_CHAIN)
        sampled_draws = hmc(log_density, _starts(log_density, tried, first, count, source), source)
        z = sampled_draws.u[: self.draws]
        return z, self._first_prior(z, middle, width), z.new_tensor(sampled_draws.r_hat)

    def _first_prior(self, z: Tensor, middle: Tensor, width: Tensor) -> Tensor:
        """Return log p_1(z), [...]."""
        value: Tensor = dist.StudentT(DEGREES_OF_FREEDOM, middle, width).log_prob(z).sum(-1)
        return value

    def _noise(self, count: int, source: Generator) -> Tensor:
        """Return noise [count, m] of the t distribution of p_1."""
        normal = torch.randn(count, self.client_sites.size, generator=source, dtype=torch.float64)
        squares = torch.randn(
            count, self.client_sites.size, int(DEGREES_OF_FREEDOM), generator=source
        ).double()
        return normal * (DEGREES_OF_FREEDOM / squares.square().sum(-1)).sqrt()

    # Posterior draws

    def sent(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the draws of the shared variables, with its own."""
        names, device = ("g", "own", "new_own"), cohort.size.device
        g, client_draws, new = (server[f"server/{n}"].to(device) for n in names)
        ids = cohort.ids.to(device)
        is_reported = (ids < len(client_draws))[:, None, None]  # [C, 1, 1]
        sent_draws = torch.where(
            is_reported, client_draws[ids.clamp(max=len(client_draws) - 1)], new
        )
        return spread_out({"g": g}, len(ids)) | {"own": sent_draws}

    def read(self, received: Tensors, local: Tensors) -> Tensors:
        """Return the received draws, which the guide reads."""
        return received

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Select one of the server's draws."""
        if "own" in local:
            u, z = local["g"], local["own"]
        else:  # while clients train
            z = local["middle"][..., None, :]  # [..., 1, m]
            u = self.shared_sites.prior()[0].to(z).expand(*z.shape[:-1], -1)
        count = u.shape[-2]
        with batch.clients():
            listed: Any = {"is_auxiliary": True, "listed": count}
            standard = dist.Normal(u.new_zeros(len(batch), 1), 1.0)
            place = pyro.sample(PLACE, standard.mask(False), infer=listed)
            at = (torch.special.ndtr(place) * count).long().clamp(0, count - 1)
            client = torch.arange(len(batch), device=u.device)[:, None].expand_as(at)
            middle = (place == 0)[..., None]  # as of the mean of the guide
            # [..., C, 1, d] and [..., C, 1, m]
            u, z = (torch.where(middle, v.mean(-2), v[client, 0, at]) for v in (u, z))
            zero = torch.zeros_like(u[..., 0])
            self.shared_sites.sample(u, zero, 1.0)
            self.client_sites.sample(z, zero, 1.0)


def _starts(
    log_density: LogDensity, tried: Tensor, log_q: Tensor, count: int, source: Generator
) -> Tensor:
    """Return starts of chains [count, d], by importance weights of points [S, d] from q."""
    with torch.no_grad():
        value = torch.cat([log_density(part) for part in tried.split(NUM_CHAINS)])
    weight = (
        (value - log_q).nan_to_num(nan=-torch.inf, posinf=-torch.inf).softmax(0).nan_to_num(0.0)
    )
    weight = weight.clamp(max=4 / count) + 1e-300
    return tried[torch.multinomial(weight, count, True, generator=source)]


@checked
def hierarchical(
    model: Program,
    data: Federation,
    *,
    shared: str,
    draws: Count = 1024,
    improper_sd: Positive = 10.0,
) -> Method:
    """Build the two-stage method for your own hierarchical Pyro program; one round suffices.

    Args:
        model: a program (received, local, batch), all of whose sites are in `batch.clients()`; it
            reads neither of the first two. Given a client's own sites, its rows do not depend on
            the shared ones: write theta ~ Normal(mu, tau), not mu + tau * eta, and give each client
            its own noise scale.
        data: the federation; the model is run on its first clients to validate it.
        shared: names or shell patterns, separated by spaces, of the sites that are one for all
            clients, such as "mu tau" or "beta_*"; others are each client's own.
        draws: posterior draws S that a client sends; the work of the server grows with S and the
            number of clients.
        improper_sd: standard deviation of improper priors before round one; it does not change
            the result.

    Returns:
        A method whose server draws from the posterior in every round. The second round has less
        Monte Carlo error than the first where clients are much alike.

    Raises:
        ValueError: if a pattern of shared matches no site, rows depend on a shared site given the
            own ones, or an own site has a value for each row or a prior that depends on data; then
            use `likelihood_factors.hierarchical` or `pvi.hierarchical`.

    Examples:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> from pyrofl import datasets, federations
        >>> from pyrofl.inference.fit import fit
        >>> data = federations.split(datasets.load("eight_schools"), "groups", 8)
        >>> def schools(received, local, batch):
        ...     with batch.clients():
        ...         mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        ...         tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        ...         theta = pyro.sample("theta", dist.Normal(mu, tau))
        ...         with batch.rows():
        ...             pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)
        >>> method = hierarchical(schools, data, shared="mu tau", draws=64)
        >>> run = fit(method, data, rounds=1, progress=False)
        >>> tuple(run.posterior(10)["theta"].shape)
        (10, 8)
    """
    one = on_cpu(data.batch(torch.tensor([0])))
    shared_sites, client_sites = layouts(
        model, one, shared, improper_sd, rows=int(data.sizes.max())
    )
    declared = Declared(model, data, shared_sites, client_sites)
    declared.check()
    if not client_sites.size:
        raise ValueError(f"all sites are shared, and no site is a client's own; {HINT}")
    if client_sites.of_rows:
        raise ValueError(f"site {client_sites.of_rows[0]!r} has a value for every row; {HINT}")
    some = on_cpu(data.batch(torch.arange(min(NUM_CHECKED_CLIENTS, data.clients))))
    core = TwoStage(model, shared_sites, client_sites, blank(some), draws)
    core.check(some)
    return core.method(declared.text())
