"""Client computations of PVI (partitioned variational inference).

The package docstring has the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Generator, Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import (
    CHANGES,
    INCOMPARABLE,
    MODERATE,
    PER_CLIENT,
    SHARED,
    Factors,
    LocalPair,
    Metadata,
    Moments,
    Rule,
)
from pyrofl.inference.definition.method import GradientStep, Method, Phase, View
from pyrofl.inference.definition.optim import Optim
from pyrofl.inference.definition.programs import Program, without_parameters
from pyrofl.models.guides.correlated import standard_noise
from pyrofl.models.pvi.leaving import without_client
from pyrofl.models.pvi.natural_gradient import halve_until_descent, natural
from pyrofl.models.pvi.server import Covariance, FactorServer
from pyrofl.models.shared.gaussians import Normals, assemble_root, balance_noise, inverse
from pyrofl.models.shared.sites import Layout
from pyrofl.models.shared.unconstrained import Scaled, scaling_mask
from pyrofl.plates import DRAWS_PLATE
from pyrofl.tensors import Tensors, add_trailing_axes, pick, role, times, under

NOISE = ("_shared", "_own")  # auxiliary sites of the guide
MAX_MEAN_STEP = 2.0  # longest step of a mean, in standard deviations of the prior
START_SCALE = 0.1  # of the prior's standard deviation: where clients start


@dataclass(frozen=True)
class Partitioned(FactorServer):
    """Partitioned variational inference of a Pyro program, with one normal factor per client.

    The factors are of the shared variables, see `FactorServer`. A client keeps mean [C, n] and root
    [C, n, n] or [C, n] of its own normal q_j(g, v_j), and whether that has `moved`, [C] bool. Its
    z_j = v_j, or z_j = v_j exp(power (g - about)) with power [C, n - d, d] and about [C, d].
    """

    model: Program
    shared_sites: Layout  # g: sites that clients share, d entries
    client_sites: Layout  # z_j: sites that each client has for itself, n - d entries
    covariance: Covariance
    draws: int | None  # None has none, and moves the means alone
    damping: float | None
    start: Callable[[Generator], tuple[Tensor, Tensor]] | None = None  # mean, sd [d]; or the prior

    def __post_init__(self) -> None:
        Normals(
            self.shared_sites.size + self.client_sites.size, self.full
        )  # refuses too many variables

    def method(
        self,
        steps: int,
        batch: int | None,
        lr: float,
        guide: Program | None = None,
        pair: LocalPair | None = None,
    ) -> Method:
        """Return partitioned variational inference (PVI) as a federated method.

        Arguments are the local steps, batch size and learning rate, a written guide with the
        distribution of `Partitioned.guide`, and the pair of `Method.to_pyro`.
        """
        together = f"{self.shared_sites.names} {NOISE[0]}{'' if guide else ' _u'}"
        pair = pair or self.pair(self.under_cavity, self.guide)
        guide = without_parameters(guide or self.guide)
        factors = Factors(
            View(self.together, self.cavity), self.densities, self.replace, without_client
        )
        proper = Rule("a precision of a normal distribution", self.normals.proper)
        return Method(
            name="pvi",
            init=self.init,
            model=self.model,
            guide=guide,
            phases=self.phases(steps, batch, lr),
            aggregate=self.aggregate,
            download=self.cavity,
            init_client=self.init_client,
            upload=self.upload,
            views={
                "personal" if self.client_sites.size else "global": View(self.together, self.result)
            },
            metadata=Metadata(
                {
                    "shift": CHANGES,
                    "precision": (proper, CHANGES),
                    "precision shift": MODERATE,
                    together: SHARED,
                    "server/shift server/precision": (PER_CLIENT, factors),
                    # The cavity that a loss is relative to is another in each round.
                    self.moving: INCOMPARABLE,
                    f"shift precision{'' if self.exact else ' share'}": Moments(
                        self.moments, optimal=None if self.draws is None else ("mean", "root")
                    ),
                },
                reads={"model": self.model, "guide": guide},
                pair=pair,
            ),
        )

    def pair(self, tilted: Program, guide: Program, loss_difference: str = "") -> LocalPair:
        """Return what clients fit as a pair for `Method.to_pyro`: tilted distribution and guide.

        The guide reads "mean" and "root", which is exp("log_root") where it is diagonal.
        """

        def with_root(received: Tensors, local: Tensors, batch: Batch) -> object:
            """Run the guide with the covariance root that the parameters stand for."""
            root = local["root"] if self.full else local["log_root"].exp()
            root = root if self.within is None else root * self.within.to(root)
            return guide(received, local | {"root": root}, batch)

        def start(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
            """Return mean and root from which clients start; ValueError for improper cavities."""
            bad = int((~self.normals.proper(received["precision"])).sum())
            if bad:
                raise ValueError(
                    f"the cavity of {bad} of {len(batch)} clients, the posterior without the "
                    "client's own factor, is no distribution, as some of its precisions are not "
                    "positive; use the state of another round"
                )
            local = self.begun(received, local, batch)
            return local if self.full else local | {"log_root": local["root"].log()}

        spread = () if self.draws is None else ("root" if self.full else "log_root",)
        powers = () if self.scales is None else ("power",)
        names = " ".join(("mean", *spread, *powers))
        if self.draws is None:
            loss_difference = "is taken at the mean of the guide alone"
        return LocalPair(tilted, with_root, names, self.regular_cavity, start, loss_difference)

    def begun(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Return the local tensors from which clients start in a regular round."""
        return local if self.scales is None else local | self.recenter(received, local, batch)

    def phases(self, steps: int, batch: int | None, lr: float) -> tuple[Phase, ...]:
        """Return local training phases: natural-gradient steps, halved if they raise the loss."""
        optim = self.natural(steps, lr)
        step = GradientStep(self.moving, optim, partial(self.free_energy))
        climb = Phase((self.drawn, step, self.shortened), steps, batch)
        return (climb,) if self.scales is None else (Phase((self.recenter,)), climb)

    def natural(self, steps: int, lr: float) -> Optim:
        """Return the natural-gradient optimizer of the clients for one round."""
        reach = MAX_MEAN_STEP * torch.cat(
            [v.each("sd") for v in (self.shared_sites, self.client_sites)]
        )
        return natural(lr, -(-steps // 2), reach, self.within, self.draws is None, self.scales)

    # A client

    def init_client(self, received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's posterior: shared part as received, own part by the prior."""
        mean, root = self.normals.moments(received)
        # Means over a wide start are ruled by its tails; a narrow one soon has the right width.
        root = root * START_SCALE if self.start is None else root
        center, sd = (v.to(mean).expand(len(mean), -1) for v in self.client_sites.prior())  # [C, m]
        start = {"mean": torch.cat([mean, center], -1)}
        start["moved"] = torch.zeros(len(mean), dtype=torch.bool, device=mean.device)
        if not self.full:
            return start | {"root": torch.cat([root, sd], -1)}
        none = root.new_zeros(len(root), self.client_sites.size, self.shared_sites.size)
        powers = {} if self.scales is None else {"power": none, "about": mean}
        return start | {"root": assemble_root(root, none, torch.diag_embed(sd))} | powers

    def recenter(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Express the scale exponents of the client's posterior relative to its current mean.

        The posterior stays the same.
        """
        mean, _ = self._parts(local["mean"])
        growth = times(local["power"], mean - local["about"]).exp()
        growth = torch.cat([torch.ones_like(mean), growth], -1)
        # [C, n] and [C, n, n]
        moved = {"mean": local["mean"] * growth, "root": local["root"] * growth[..., None]}
        return moved | {"about": mean}

    def tilted(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Define the client's tilted distribution: cavity, share of the prior, and likelihood."""
        share = received.get("share")
        with pyro.plate("_clients", len(batch), dim=-2):
            free = dist.ImproperUniform(dist.constraints.real, (), (self.shared_sites.size,))
            u = pyro.sample("_u", free)
            others = self.normals.log_density(u, received)
            if share is not None:
                prior = self.normals.log_density(u, {n: v.to(u) for n, v in self.prior.items()})
                others = others - share * prior
            pyro.factor("_others", others)
        with Scaled(self.shared_sites.names, share):
            self.model(received, local, batch)

    def under_cavity(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample all sites of the program; a factor replaces the prior p(g) by the cavity.

        The density is q(g) / t_j(g) (p(g) / p0(g))^(1 / J) p(y_j, z_j | g), as that of `tilted`,
        but of the program's own sites and with plates that Pyro's inference can read.
        """
        nodes: Any = poutine.trace(self.model).get_trace(received, local, batch).nodes
        sites = {site.name: nodes[site.name] for site in self.shared_sites.sites}
        u, growth = self.shared_sites.unconstrained({n: site["value"] for n, site in sites.items()})
        if self.centering:
            u, more = self.centering.variables(u, received)
            growth = growth + more
        each = (site["fn"].log_prob(site["value"]) for site in sites.values())
        prior = growth + sum(value.sum(-1, keepdim=True) for value in each)  # density of u
        cavity, p0 = (
            self.normals.log_density(u, {n: v.to(u) for n, v in pick(q, "shift precision").items()})
            for q in (received, self.prior)
        )
        share = received.get("share", 0.0)
        with pyro.plate("_clients", len(batch), dim=-2):
            pyro.factor("cavity", cavity - share * p0 - (1 - share) * prior)

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample all sites from the client's posterior, and record their log densities."""
        with batch.clients():
            parts = zip(NOISE, self._parts(local["mean"]), strict=True)
            e = torch.cat([standard_noise(n, v) for n, v in parts if v.shape[-1]], -1)
            values = self._state(e, received, local, batch, 1.0, counted=True)
        # Of rows that nobody has trained on there is nothing but the model.
        if batch.at is not None and (names := self.client_sites.of_rows):
            stated = poutine.condition(self.model, data=values)
            with poutine.block(hide_fn=lambda msg: msg["name"] not in names):
                stated({}, {}, batch)

    def _state(
        self,
        e: Tensor,
        received: Tensors,
        local: Tensors,
        batch: Batch,
        share: Tensor | float,
        counted: bool = False,
    ) -> Tensors:
        """Record the posterior's values for given noise as sample sites with log densities.

        To be called inside `batch.clients()`. Return the values by site.
        """
        mean, root = local["mean"], local["root"]
        u = mean + (times(root, e) if self.full else root * e)
        shared_u, client_u = self._parts(u)
        grown = u.new_zeros(())
        if "power" in local:
            exponent = times(local["power"], shared_u - local["about"])
            client_u, grown = client_u * exponent.exp(), exponent.sum(-1)
        pyro.sample("_u", dist.Delta(shared_u, event_dim=1), infer={"is_auxiliary": True})
        # The density of g comes first, what is left of the joint one belongs to z given g.
        both = self.normals.log_det(root)
        first = self.normals.log_det(self.normals.leading(root))
        constant = 0.5 * e.shape[-1] * math.log(2 * math.pi)
        log_density = (
            0.0 if counted else -torch.linalg.vector_norm(e, dim=-1).square() / 2 - constant
        )
        log_shared = (log_density - first).expand(u.shape[:-1])
        if self.centering:
            shared_u, bent = self.centering.effects(shared_u, received)
            log_shared = log_shared - share * bent
        values = self.shared_sites.sample(shared_u, log_shared, share)
        left = (first - both - grown).expand(u.shape[:-1])
        rows = batch.mask.shape[1] if batch.at is None else 0
        return values | self.client_sites.sample(client_u, left, 1.0, rows)

    def free_energy(
        self, _: Program, __: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the client's free energy [C] (negative ELBO) for the current step's noise."""

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            """Record the posterior's sample sites, computed from the current step's noise."""
            noise = local["noise"]
            # [C, 1, n] at the mean of the guide, else [S, C, 1, n].
            noise = noise.squeeze(-2) if self.draws is None else noise.movedim(-2, 0)
            with batch.clients():
                self._state(noise, received, local, batch, received.get("share", 0.0))

        return elbo(self.draws)(self.tilted, guide, received, local, batch)

    def drawn(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Draw the Monte Carlo noise of a step, and store the parameters before the step."""
        mean = local["mean"]
        if self.draws is None:
            noise = torch.zeros_like(mean)[:, None]  # [C, 1, n]
        else:
            with pyro.plate(DRAWS_PLATE, self.draws, dim=-3), batch.clients():
                zeros = mean.new_zeros(self.draws, len(mean), 1, mean.shape[-1])
                raw = standard_noise("_noise", zeros)
            noise = balance_noise(raw).squeeze(-2).movedim(0, 1)  # [C, S, n]
        return {"noise": noise} | under("before", pick(local, self.moving))

    def shortened(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Halve optimization steps that increased a client's free energy for the same noise."""
        before, after = role("before", local), pick(local, self.moving)
        energy = partial(self.free_energy, self.model, self.guide, received)
        now = halve_until_descent(
            lambda updated: energy(local | updated, batch), before, after, self._between
        )
        return now | {"moved": torch.ones_like(local["moved"])}

    def _between(self, start: Tensors, end: Tensors, share: Tensor) -> Tensors:
        """Interpolate the client's posterior at a fraction [C] of an optimization step."""
        way = Normals(start["mean"].shape[-1], self.full).between(start, end, share)
        if self.scales is not None:
            way["power"] = torch.lerp(
                start["power"], end["power"], add_trailing_axes(share, end["power"])
            )
        part = {
            n: torch.where(add_trailing_axes(share > 0, v), v, start[n]) for n, v in way.items()
        }
        return {n: torch.where(add_trailing_axes(share < 1, v), v, end[n]) for n, v in part.items()}

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send natural parameters of the client's normal approximation of shared variables."""
        mean, _ = self._parts(local["mean"])
        return self.normals.naturals(mean, self.normals.leading(local["root"]))

    def together(self, received: Tensors, local: Tensors) -> Tensors:
        """Return parameters of the joint posterior q(g) q_j(z_j | g) of shared and own variables.

        Where a client without a factor has trained, which has joined later, its rows count too.
        """
        d, client_root = self.shared_sites.size, local["root"]
        mean, root = self.normals.moments(received)
        before, own_mean = self._parts(local["mean"])
        if not self.full:
            joint = torch.cat([root, client_root[:, d:]], -1)
        else:
            slope = client_root[:, d:, :d] @ inverse(client_root[:, :d, :d], upper=False)
            own_mean = own_mean + times(slope, mean - before)
            joint = assemble_root(root, slope @ root, client_root[:, d:, d:])
        both = {"mean": torch.cat([mean, own_mean], -1), "root": joint}
        counted = received.get("counted", torch.ones_like(local["moved"]))
        old = counted | ~local["moved"]
        return local | {
            n: torch.where(add_trailing_axes(old, v), v, local[n]) for n, v in both.items()
        }

    @property
    def lr(self) -> float:
        """Default learning rate of natural gradients for networks."""
        return 0.3

    @property
    def moving(self) -> str:
        """Names of the local tensors that optimization steps change."""
        return "mean root" if self.scales is None else "mean root power"

    @cached_property
    def scales(self) -> Tensor | None:
        """Mask [n - d, d] of the shared variables that scale each client-specific variable."""
        return (
            scaling_mask(self.shared_sites, self.client_sites)
            if self.covariance == "full"
            else None
        )

    @cached_property
    def within(self) -> Tensor | None:
        """Mask [n, n] of the entries of a covariance root, or None if all entries are learned."""
        if self.covariance != "blocks":
            return None
        blocks = (
            torch.ones(side.size, side.size) for side in (self.shared_sites, self.client_sites)
        )
        mask: Tensor = torch.block_diag(*blocks)
        return mask

    def _parts(self, value: Tensor) -> tuple[Tensor, ...]:
        """Split vectors [..., n] into shared variables and client-specific variables."""
        parts: tuple[Tensor, ...] = value.split(
            [self.shared_sites.size, self.client_sites.size], -1
        )
        return parts
