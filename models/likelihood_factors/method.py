"""Server and clients of likelihood factors; the package docstring has the algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.averages import AggregationError
from pyrofl.inference.definition.metadata import (
    PER_CLIENT,
    SHARED,
    Factors,
    Metadata,
    Moments,
    Monitor,
)
from pyrofl.inference.definition.method import Method, Phase, View
from pyrofl.inference.hmc import DRAWS_PER_CHAIN, NUM_CHAINS, LogDensity, hmc
from pyrofl.inference.posteriors.proposals import ServerDraws
from pyrofl.models.likelihood_factors.captured import CapturedPrior
from pyrofl.models.likelihood_factors.factors import (
    MAX_SQUARED,
    Factor,
    integrate,
    log_product,
    normal_equations,
)
from pyrofl.models.likelihood_factors.finding import refuse_contradicting_rows
from pyrofl.models.likelihood_factors.leaving import (
    MIN_RELATIVE_VARIANCE,
    blended_weights,
    inverse,
    normal_cavity,
    positive,
    truncated_weights,
    without_client,
)
from pyrofl.models.likelihood_factors.linear import (
    has_constant_noise,
    is_exact_after_one_round,
    statistics,
)
from pyrofl.models.likelihood_factors.rules import message_rules
from pyrofl.models.likelihood_factors.selecting import PLACE, select_draw
from pyrofl.models.likelihood_factors.structure import ProgramDensities, Structure, on_cpu
from pyrofl.models.likelihood_factors.variables import Variables, curvature, find_mode
from pyrofl.models.shared.matrices import to_cpu_double
from pyrofl.tensors import Tensors, add_trailing_axes, spread_out, under

MAX_CELLS = 4_000_000  # numbers in a tensor
MIN_EFFECTIVE_SHARE = 0.1  # effective part of the old draws, from which changes can be seen
CURE = 'use pvi.hierarchical (method="pvi" in pyrofl.hierarchical and pyrofl.regression)'
MAX_R_HAT = 1.1  # R-hat above which the server's chains have not mixed
# Distance from the prior, in its sds, to which products of factors with a negative precision count.
MAX_PRIOR_SDS = 10.0
UNMIXED = (
    "the server's chains have not mixed, so that its draws are unreliable; more rounds will not "
    "help: reparametrize the program, as from a non-centered to a centered form or to "
    f"MultivariateNormal effects, or {CURE}"
)

MIN_CHANGE_FRACTION = 0.125  # part of the changes of factors that a round makes at least
MIN_OVERSHOOT = 0.5  # change of the mean that turns back, relative to its last change and its sd
MIN_COSINE = 0.8  # of two changes of the mean in nearly the same direction
IMPROPER = f"the product of prior and factors is not a distribution; {CURE}"


@dataclass(frozen=True)
class LikelihoodFactors:
    """Likelihood factors of a hierarchical program.

    The server holds the factors as server/shift [J, n] and server/precision [J, n, n], 0 for
    clients that have not reported; draws of the shared variables u as server/draws [S, d], with
    their log density server/log_density [S]; and mean and sd [d], whose changes show convergence.
    A round makes a part server/share of the factors' changes; server/change [d] is that of the mean
    in the last round, in standard deviations.
    """

    structure: Structure
    blank: Batch  # one client with one row of zeros, to evaluate the prior

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors of a factor, as a client sends it."""
        linear = ("square", "count") if self.structure.linear is not None else ()
        return ("shift", "precision", *linear)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the server's tables of factors; "reported" is 1 for clients that have one."""
        return tuple(f"server/{part}" for part in (*self.parts, "reported"))

    def method(self, text: str) -> Method:
        """Return the federated method, with a description of the program's sites."""
        names = f"{self.structure.shared_sites.names} {PLACE}"
        others = View(self.read, self.others)
        factors = Factors(
            others, self.densities, self.replace, partial(without_client, self), False
        )
        return Method(
            name="likelihood_factors",
            init=self.init,
            model=self.structure,
            guide=self.guide,
            phases=(Phase((self.factor,)),),
            aggregate=self.aggregate,
            download=self.cavity,
            upload=self.upload,
            views={
                "personal": View(self.read, self.posterior, exact=self.is_exact, listed=self.listed)
            },
            metadata=Metadata(
                {
                    names: SHARED,
                    **message_rules(self.structure.linear is not None, self.cavity),
                    " ".join(self.tables): (PER_CLIENT, factors),
                    "mean sd": Moments(
                        self.structure.shared_sites.moments, undamped=True, noise=self.noise
                    ),
                    "server/r_hat": Monitor(MAX_R_HAT, UNMIXED, required=True, lasting=True),
                    "server/multimodal": Monitor(
                        0.0,
                        "the likelihoods of that many clients have several maxima, so the "
                        "posterior may have modes without draws: compare it with reference.nuts, "
                        "or with pvi.hierarchical for several seeds",
                    ),
                    "server/missing": Monitor(
                        0.0,
                        "that many clients have not reported: the posterior lacks their rows",
                        required=True,
                    ),
                },
                reads={"model": self.structure},
                sites=text,
                pair="its clients compute normal approximations of their likelihoods, and fit no "
                "guide; use run.posterior or to_arviz, or pvi.hierarchical",
            ),
        )

    # The server

    def init(self, source: Generator, clients: int) -> Tensors:
        """Initialize the factors with 1, and the draws with a normal that stands for the prior."""
        mean, sd = (v.double() for v in self.structure.shared_sites.prior())
        noise = torch.randn(
            NUM_CHAINS * DRAWS_PER_CHAIN, len(mean), generator=source, dtype=torch.float64
        )
        n = len(self.structure.reads) + self.structure.client_sites.size
        shapes = {"shift": (n,), "precision": (n, n)}
        none = {n: mean.new_zeros(clients, *shapes.get(n, ())) for n in (*self.parts, "reported")}
        drawn = self._drawn(mean + sd * noise, noise.square().sum(-1) / -2, 1.0)
        none |= {"missing": mean.new_tensor(float(clients)), "multimodal": mean.new_zeros(())}
        none |= {"share": mean.new_ones(()), "change": torch.zeros_like(mean)}
        return drawn | under("server", none)

    def cavity(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the moments of all draws, weighted by the inverse of its own factor.

        Where few draws are effective, and clients have no effects, a normal distribution with the
        moments of the draws is divided by the factor.
        """
        u, reads = to_cpu_double(server["server/draws"]), self.structure.reads
        factors = self._own(server, cohort)
        value = torch.cat([integrate(*some, factors) for some in self._pieces(u, factors)])
        weight = blended_weights(truncated_weights(-value), len(reads))  # [S, C]
        mean = weight.mT @ u  # [C, d]
        center, sd = u.mean(0)[reads], u.std(0)[reads].clamp(min=1e-150)
        scaled, middle = (u[:, reads] - center) / sd, (mean[:, reads] - center) / sd
        if len(reads) > MAX_SQUARED:
            spread = torch.stack([(w[:, None] * scaled).mT @ scaled for w in weight.mT])
        else:
            squares = (scaled[:, :, None] * scaled[:, None]).flatten(1)  # [S, p p]
            spread = (weight.mT @ squares).unflatten(1, (len(reads), len(reads)))  # [C, p, p]
        spread = spread - middle[:, :, None] * middle[:, None]
        one = torch.eye(len(reads), dtype=u.dtype)
        spread = positive(spread + MIN_RELATIVE_VARIANCE * one)
        precision = inverse(spread) / (sd[:, None] * sd)
        few = 1 / weight.square().sum(0) < MIN_EFFECTIVE_SHARE * len(u)
        if not self.structure.client_sites.size and bool(few.any()):
            normal = normal_cavity(u, reads, factors["shift"], factors["precision"])
            few &= normal.valid
            mean = torch.where(few[:, None], normal.mean, mean)
            precision = torch.where(few[:, None, None], normal.precision, precision)
        with torch.no_grad():
            _, roots, _ = self._stated(self._evaluated(mean))
        cavity_tensors = {"mean": mean, "cavity": precision, "root": roots}
        return {n: v.to(cohort.size.device) for n, v in cavity_tensors.items()}

    def aggregate(
        self, server: Tensors, message: Tensors, cohort: Cohort, source: Generator
    ) -> Tensors:
        """Replace the factors of reporting clients, and draw the shared variables again."""
        factors = self._changed(server, message, cohort.ids.cpu())
        if "multimodal" in message:  # as of the widest cavity so far
            several = message["multimodal"].sum().to(server["server/multimodal"])
            server = server | {"server/multimodal": several.maximum(server["server/multimodal"])}
        return self.replace(server, factors, source)

    def _changed(self, server: Tensors, message: Tensors, ids: Tensor) -> Tensors:
        """Return the tables of factors with those of reporting clients, or a part of the changes.

        Factors that all clients compute at once may overshoot, and those with negative curvature
        may have an improper product. A part of each change leads to the same fixed point, as in
        damped expectation propagation (Minka and Lafferty, UAI 2002, section 4). Factors of linear
        models are exact at once, so that they are changed in full.
        """
        new = under("server", message | {"reported": torch.ones(len(ids))})
        draws, share = to_cpu_double(server["server/draws"]), float(server["server/share"])
        while True:
            tables = {}
            for name in self.tables:
                old, value = to_cpu_double(server[name]), to_cpu_double(new[name])
                if name != "server/reported":
                    value = old[ids].lerp(value, share)
                tables[name] = old.index_copy(0, ids, value)
            factors = {n: tables[f"server/{n}"] for n in self.parts}
            proper = self._may_be_proper(factors, draws) and self._is_bounded(factors, draws)
            if proper or share <= MIN_CHANGE_FRACTION or self.structure.linear is not None:
                return tables
            share /= 2

    def _next_share(self, server: Tensors, mean: Tensor) -> Tensors:
        """Return the part of changes that the next round makes, given the last two of the mean.

        It is half as large after an overshoot, which turns back by at least half of the last change
        and of a standard deviation. It is twice as large, up to all, while the mean moves on in
        nearly the same direction, as small parts of changes need many rounds.
        """
        change = (mean - to_cpu_double(server["mean"])) / to_cpu_double(server["sd"])
        last, share = to_cpu_double(server["server/change"]), server["server/share"]
        size = float(change.norm())
        back = float(change @ last) < 0 and size > MIN_OVERSHOOT * max(1.0, float(last.norm()))
        forward = float(change @ last) > MIN_COSINE * size * float(last.norm())
        # The mean also turns back as other clients report for the first time.
        whole = bool(server["server/reported"].all()) and self.structure.linear is None
        if back and whole:
            share = (share / 2).clamp(min=MIN_CHANGE_FRACTION)
        elif forward and whole:
            share = (share * 2).clamp(max=1.0)
        return {"server/change": change, "server/share": share}

    def replace(self, server: Tensors, factors: Tensors, source: Generator) -> Tensors:
        """Draw the shared variables again, with other factors of clients."""
        reported = factors["server/reported"]
        factors = {n: to_cpu_double(factors[f"server/{n}"]) for n in self.parts}
        u, old = (to_cpu_double(server[f"server/{n}"]) for n in ("draws", "log_density"))
        if not self._may_be_proper(factors, u):
            raise AggregationError(IMPROPER)
        begun = bool(server["server/precision"].any())
        if begun:
            with torch.no_grad():
                change = self.log_density(u, factors) - old
        else:  # the prior may be wide: start from its product with factors at its middle
            u, change = self._normal(factors, len(u), source)
        change = change.nan_to_num(nan=-torch.inf, posinf=-torch.inf)
        if not bool(change.isfinite().any()):
            raise AggregationError(
                f"the product of prior and factors has no point of finite density; {CURE}"
            )
        weight = change.softmax(0)
        starts = weight.clamp(max=4 / NUM_CHAINS) + 1e-300
        start = u[torch.multinomial(starts, NUM_CHAINS, True, generator=source)]
        variables = self._variables(factors, start)
        sampled_draws = hmc(self._sampled(factors, variables), variables.sampled(start), source)
        with torch.no_grad():
            drawn, _, growth = variables.shared(sampled_draws.u)
            roots = self._stated(self._evaluated(drawn))[1]
        finite = torch.linalg.slogdet(roots).logabsdet.isfinite().all()
        if self.structure.linear is None and not bool(finite):  # other factors need no draws
            raise AggregationError(IMPROPER)
        if not bool((drawn.std(0) > 0).all()):
            raise AggregationError(
                f"the server's chains have not moved, as a factor is narrow; {CURE}"
            )
        new = self._drawn(drawn, sampled_draws.log_density - growth, sampled_draws.r_hat)
        if begun and float(1 / weight.square().sum()) > MIN_EFFECTIVE_SHARE * len(u):
            new |= self._moved(server, u, weight)
        new |= self._next_share(server, new["mean"])
        missing = {"reported": reported, "missing": (reported == 0).sum().double()}
        return server | new | under("server", factors | missing)

    def others(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send one client draws of the posterior given all other clients; see `without_client`."""
        u = to_cpu_double(server["server/others"])
        return self._given(u, self.log_density(u, self._factors(server)), server, cohort)

    def densities(
        self, server: Tensors, cohort: Cohort, sites: Tensors, log_prior: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log densities [S] of shared draws, up to one constant; see `Factors`."""
        u = to_cpu_double(self.structure.shared_sites.freed(sites)[0])
        with torch.no_grad():
            every = self.log_density(u, self._factors(server))
        own = self.factors_at(u, server, cohort)
        others = every - own - to_cpu_double(server["server/level"])
        return every.to(log_prior), others.to(log_prior), others.to(log_prior)

    def factors_at(self, u: Tensor, server: Tensors, cohort: Cohort) -> Tensor:
        """Return the log [S] of one client's factor at draws [S, d]."""
        factors = self._own(server, cohort)
        pieces = self._pieces(to_cpu_double(u), factors)
        return torch.cat([integrate(*some, factors) for some in pieces])[:, 0]

    def _factors(self, server: Tensors) -> Tensors:
        """Return the factors of all clients."""
        return {n: to_cpu_double(server[f"server/{n}"]) for n in self.parts}

    def _moved(self, server: Tensors, u: Tensor, weight: Tensor) -> Tensors:
        """Return mean and sd, changed as those of the old draws under new weights.

        Unlike differences of two sets of draws, this has no noise where no factor changes.
        """
        mean = weight @ u
        sd = (weight @ (u - mean).square()).sqrt()
        return {
            "mean": to_cpu_double(server["mean"]) + mean - u.mean(0),
            "sd": to_cpu_double(server["sd"]) * sd / u.std(0, correction=0),
        }

    def log_density(self, u: Tensor, factors: Tensors) -> Tensor:
        """Return the log density [S] of shared variables [S, d], up to a constant."""
        return self._product(u, self._evaluated(u), factors)

    def _product(self, u: Tensor, evaluated: ProgramDensities, factors: Tensors) -> Tensor:
        """Return the log density [S] at u [S, d], given the prior there."""
        prior, roots, noise = self._stated(evaluated)
        value = prior + log_product(u[:, self.structure.reads], roots, noise, factors)
        return torch.where(self._is_beyond(u, factors), -torch.inf, value)

    def _is_beyond(self, u: Tensor, factors: Tensors) -> Tensor:
        """Return whether u [S, d] is where the factors are no approximation but may be large: [S].

        A product of factors with a negative precision grows with the square of the distance, and
        the log density of a scale or shape falls only linearly: far out their product has no bound.
        Likelihoods of such variables are nearly flat, so that the posterior is near the prior.
        """
        reads = self.structure.reads
        mean, sd = (v.double()[reads] for v in self.structure.shared_sites.prior())
        is_far = (u[:, reads] - mean).abs() > MAX_PRIOR_SDS * sd
        return (is_far & self._is_negative(factors)).any(-1)

    def _is_negative(self, factors: Tensors) -> Tensor:
        """Return which variables the product of factors has a negative precision of, [p]."""
        return factors["precision"].sum(0).diagonal()[: len(self.structure.reads)] < 0

    def _is_bounded(self, factors: Tensors, u: Tensor) -> bool:
        """Return False if the product of prior and factors is highest at the ends of its range.

        Factors that are nearly flat at their expansion, as those of a shape, may pull a variable
        there together; see `_is_beyond` for its range. They are compared at the mean of draws u.
        """
        middle, points = u.mean(0), [u.mean(0)]
        mean, sd = (v.double() for v in self.structure.shared_sites.prior())
        for i in self.structure.reads[self._is_negative(factors)].tolist():
            for end in (-0.99 * MAX_PRIOR_SDS, 0.99 * MAX_PRIOR_SDS):
                point = middle.clone()
                point[i] = mean[i] + end * sd[i]
                points.append(point)
        with torch.no_grad():
            level = self.log_density(torch.stack(points), factors)
        return not bool((level[1:] > level[0]).any())

    def _sampled(self, factors: Tensors, variables: Variables) -> LogDensity:
        """Return the log density of the variables w that are sampled."""

        def log_density(w: Tensor) -> Tensor:
            u, evaluated, growth = variables.shared(w)
            return self._product(u, evaluated, factors) + growth

        return log_density

    def _normal(self, factors: Tensors, count: int, source: Generator) -> tuple[Tensor, Tensor]:
        """Return draws u [S, d] of a normal around the mode, and their log importance weights.

        It is a normal of non-centered variables, as the mode of others may be at a scale of 0.
        """
        mean, sd = self.structure.shared_sites.prior()
        variables = Variables.non_centered(self.structure, self._prior())
        log_density, (mean, sd) = self._sampled(factors, variables), variables.start()
        at = find_mode(log_density, mean)
        values, vectors = torch.linalg.eigh(curvature(log_density, at))
        half = vectors * torch.maximum(values, sd.max() ** -2).rsqrt()
        noise = torch.randn(count, len(mean), generator=source, dtype=mean.dtype)
        with torch.no_grad():
            w = at.detach() + noise @ half.mT
            return variables.shared(w)[0], log_density(w) + noise.square().sum(-1) / 2

    def noise(self, server: Tensors) -> float:
        """Return the change of a mean, in sds, that is within the Monte Carlo error of the draws.

        The standard error of a mean of draws is that of the means of the chains, which are
        independent (batch means: Flegal and Jones, "Batch means and spectral variance estimators in
        Markov chain Monte Carlo", Annals of Statistics 2010, section 2). That of a difference of
        two rounds is sqrt(2) times larger, and a change of two of these is within it. It is less
        for standard deviations of nearly normal draws, by sqrt(2), and where a round makes a part
        of the changes only.
        """
        u, share = to_cpu_double(server["server/draws"]), float(server["server/share"])
        chains = u.unflatten(0, (-1, NUM_CHAINS)).mean(0)
        error = (chains.std(0) / u.std(0)).max() / NUM_CHAINS**0.5
        return 2 * 2**0.5 * share * float(error.nan_to_num(0.0))

    def _may_be_proper(self, factors: Tensors, u: Tensor) -> bool:
        """Return False if the product of prior and factors grows without bound in a direction.

        Each client bounds the negative curvature of its own factor by that of its cavity; the sum
        of these may exceed the curvature of the prior, here at the middle of draws u [S, d].
        """
        reads, sd = self.structure.reads, self.structure.shared_sites.prior()[1].double()
        total = factors["precision"].sum(0)[: len(reads), : len(reads)]
        if not int(torch.linalg.cholesky_ex(total + torch.diag(sd[reads] ** -2)).info):
            return True
        prior = curvature(lambda at: self._evaluated(at).prior[:, 0], u.mean(0, keepdim=True))
        whole = prior.index_put((reads[:, None], reads), total, accumulate=True)
        return float(torch.linalg.eigvalsh((whole + whole.mT) / 2)[0]) >= 0

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
        tables = {n: to_cpu_double(server[f"server/{n}"]) for n in self.parts}
        ids, clients = cohort.ids.cpu(), len(tables["shift"])
        at, is_reported = ids.clamp(max=clients - 1), (ids < clients).double()
        return {n: v[at] * add_trailing_axes(is_reported, v) for n, v in tables.items()}

    def _pieces(self, u: Tensor, factors: Tensors) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield some draws [S, d] after the other, as the arguments of `integrate`."""
        with torch.no_grad():
            _, roots, noise = self._stated(self._evaluated(u))
        step = max(1, MAX_CELLS // (len(factors["shift"]) * (roots.shape[-1] + 1) ** 2))
        parts = (v.split(step) for v in (u[:, self.structure.reads], roots, noise))
        return zip(*parts, strict=True)

    def _variables(self, factors: Tensors, u: Tensor) -> Variables:
        """Choose the variables that are sampled, given draws [S, d] of the shared ones."""
        middle = u.median(0).values
        with torch.no_grad():
            _, root, noise = self._stated(self._evaluated(middle[None]))

        def log_factors(u: Tensor) -> Tensor:
            return log_product(u[:, self.structure.reads], root, noise, factors)

        return Variables.of(self.structure, self._prior(), log_factors, middle)

    def _evaluated(self, u: Tensor) -> ProgramDensities:
        """Run the program's prior at draws [S, d]."""
        none = u.new_zeros(len(u), 1, self.structure.client_sites.size)
        return self.structure.evaluate(u[:, None], none, self.blank)

    def _prior(self) -> CapturedPrior:
        """Return the program's prior for many evaluations."""
        return CapturedPrior(self.structure, self.blank)

    def _stated(self, evaluated: ProgramDensities) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p(u) [S], T [S, m, m] and the inverse noise variance [S], or 1."""
        noise = torch.ones_like(evaluated.prior[:, 0])
        has_known_noise = self.structure.linear is None or has_constant_noise(self.structure)
        if not has_known_noise and evaluated.response is not None:
            noise = evaluated.response.sd.expand(len(noise), 1, 1)[:, 0, 0] ** -2
        return evaluated.prior[:, 0], evaluated.roots[:, 0], noise

    # A client

    def factor(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Compute the client's likelihood factor under the received cavity.

        Raises:
            OtherStructure: if the client's rows show another structure of the program.
        """
        rows = on_cpu(batch)
        refuse_contradicting_rows(self.structure, rows)
        if self.structure.linear is not None:
            factor_tensors = statistics(self.structure, rows) | {"mean": received["mean"]}
        else:
            mean, cavity, root = (to_cpu_double(received[n]) for n in ("mean", "cavity", "root"))
            factor_tensors = Factor(self.structure, mean, cavity, root, rows).update()
        return {n: v.to(batch.size.device) for n, v in factor_tensors.items()}

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send the client's likelihood factor, and whether its likelihood has several maxima."""
        return {n: local[n] for n in (*self.parts, "multimodal") if n in local}

    # Predictions and posterior draws

    def posterior(self, server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the server's draws, and its own effects given each of them."""
        u, log_density = (to_cpu_double(server[f"server/{n}"]) for n in ("draws", "log_density"))
        return self._given(u, log_density, server, cohort)

    def _given(self, u: Tensor, log_density: Tensor, server: Tensors, cohort: Cohort) -> Tensors:
        """Return shared draws, and the own effects of clients given each of them."""
        factors = self._own(server, cohort)
        equations = [normal_equations(*some, factors) for some in self._pieces(u, factors)]
        a, b = (torch.cat(parts, -2) for parts in zip(*equations, strict=True))
        a, b = a.permute(3, 2, 0, 1), b.permute(2, 1, 0)  # [C, S, m, m], [C, S, m]
        one = torch.eye(self.structure.client_sites.size).to(a)
        lower = torch.linalg.cholesky_ex(a).L
        root = torch.linalg.solve_triangular(lower.mT, one.expand_as(lower), upper=True)
        mean = (root @ (root.mT @ b[..., None]))[..., 0]  # [C, S, m]
        shared = {"draws": u, "log_density": log_density}
        own = {"own_mean": mean, "own_root": root}
        shared, own = ({n: v.to(cohort.size) for n, v in part.items()} for part in (shared, own))
        return spread_out(shared, len(cohort.ids)) | own

    def listed(self, server: Tensors) -> ServerDraws:
        """Return the server's draws as noise, in the variables of its sampler."""
        u, log_density = (to_cpu_double(server[f"server/{n}"]) for n in ("draws", "log_density"))
        factors = self._factors(server)

        def listed_at(u: Tensor, found: ProgramDensities) -> tuple[Tensors, Tensor]:
            value = self._product(u, found, factors)
            return server | {"server/draws": u, "server/log_density": value}, value

        return self._variables(factors, u).standardized(u, log_density, listed_at)

    def is_exact(self, server: Tensors) -> bool:
        """Return whether the server's draws are of the exact posterior of all clients."""
        mixed, missing = (float(server[f"server/{n}"]) for n in ("r_hat", "missing"))
        exact = is_exact_after_one_round(self.structure, server["server/shift"].dtype)
        return exact and mixed <= MAX_R_HAT and not missing

    def read(self, received: Tensors, local: Tensors) -> Tensors:
        """Return the received draws, which the guide reads."""
        return received

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Select one of the server's draws, and draw the client's own noise given it."""
        select_draw(self.structure, local, batch)
