"""SFVI: structured federated variational inference with any guide of the shared variables.

Hassan, Salomone and Mengersen, "Federated Variational Inference Methods for Structured Latent
Variable Models", 2023. `pvi.hierarchical(..., guide=...)` builds it; unlike PVI it has no factors.

    q(g)          g = center + root w, without constraints; w of the guide's family
    q_j(z_j | g)  a normal of the client's own, linear in g, then scaled as in PVI

    client   z_j: natural-gradient steps on  F_j, its part of the free energy, given q(g)
             sends  grad F_j  by the parameters of q(g), from all its rows;
             F_j = -E[log p(y_j, z_j | g) - log q_j(z_j | g) + (log p(g) - log q(g)) / J]
    server   sums the gradients of the clients that report (steps are shorter where few do); moves
             center and root by natural gradients with momentum, the family's parameters by Adam

Departures from the paper: natural gradients, of z_j and of center and root, with rates that fall as
gradients turn back (Kesten, "Accelerated stochastic approximation", 1958). The family's parameters
move slowly as long as center and root have far to go, so that a normal is fitted first and then
bent. Noise of g is the same for all clients of a round, as their parts have large gradients that
cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Generator, Size, Tensor

from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, WeightedSum, descend, uniform
from pyrofl.inference.definition.elbo import elbo, latent, normal_event_size, with_rows
from pyrofl.inference.definition.metadata import SHARED, Metadata, Moments
from pyrofl.inference.definition.method import GradientStep, Method, Phase, View, as_received
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.definition.programs import Guide, Program
from pyrofl.inference.training.noise import ClientNoise, is_unset_latent
from pyrofl.models.guides import Family, build_guide
from pyrofl.models.guides.correlated import standard_noise
from pyrofl.models.pvi.natural_gradient import given_others, halve_until_descent, update_normal
from pyrofl.models.pvi.partitioned import MAX_MEAN_STEP, START_SCALE
from pyrofl.models.shared.gaussians import balance_noise
from pyrofl.models.shared.sites import Layout
from pyrofl.models.shared.unconstrained import Scaled, scaling_mask
from pyrofl.plates import DRAWS_PLATE
from pyrofl.tensors import Tensors, add_trailing_axes, generator, pick, role, times, under

BASE, BEND, OWN = "_w", "bend", "_own"  # what the family draws, its parameters, a client's noise
LEARNED = f"center root loc/* {BEND}/*"  # by the server
NATURAL_LR, ADAM_LR = 0.5, 0.01  # rates of the server
MOMENTUM = 0.8  # of natural gradients, once they have turned back
TURNS_PER_HALVING = 10  # turns of the gradient that halve the rates


class FixedNoise(Messenger):
    """Pyro handler that replaces the noise of a guide's normal sites by given values."""

    def __init__(self, common: Tensor, client_noise: Tensor) -> None:
        super().__init__()
        self.common, self.client_noise = common, client_noise

    def _pyro_sample(self, msg: Any) -> None:
        if is_unset_latent(msg) and normal_event_size(msg["fn"]):
            noise, fn = self.client_noise if msg["name"] == OWN else self.common, msg["fn"]
            msg["value"], msg["done"] = fn.mean + fn.stddev * noise, True


@dataclass(frozen=True)
class SharedGuide:
    """Structured federated variational inference (SFVI) with any guide of shared variables.

    The server holds center [d], root [d, d], and the family's parameters. A client keeps its normal
    of v_j given x = unit^-1 (u - about): own/mean [C, m], own/slope [C, m, d], own/root [C, m, m].
    Its z_j = v_j, or z_j = v_j exp(power (u - about)) with own/power [C, m, d].
    """

    model: Program
    shared_sites: Layout  # g: sites that clients share, d entries
    client_sites: Layout  # z_j: sites that each client has for itself, m entries
    family: Family
    draws: int
    lr: float

    def __post_init__(self) -> None:
        """Raise ValueError if the guide family is not supported."""
        if not self.noise_count:
            raise ValueError(
                "the guide draws each shared variable by itself, or none; expected a family that "
                "joins them: full_covariance, low_rank(...), copula or flow(...)"
            )

    def method(self, steps: int, batch: int | None) -> Method:
        """Return SFVI as a federated method; arguments as in `hierarchical`."""
        guide = self.guide  # every time it is asked for it is another object
        loss = partial(self.shared_loss)
        settle = (Phase((self.recenter,)), Phase((self.settle,), steps, batch))
        slope = Phase(
            (GradientStep(LEARNED, sgd(1.0), loss),)
        )  # a step of length 1 tells the gradient
        view = "personal" if self.client_sites.size else "global"
        return Method(
            name="pvi",
            init=self.init,
            model=self.model,
            guide=guide,
            phases=(*(settle if self.client_sites.size else ()), slope),
            aggregate=Aggregator({LEARNED: WeightedSum(uniform)}, server_step=self.descended),
            init_client=self.init_client,
            upload=self.upload,
            views={view: View(as_received)},
            metadata=Metadata(
                {
                    self.names: SHARED,
                    "center root": Moments(self.moments, optimal=("center", "root")),
                    f"loc/* {BEND}/*": Moments(lambda q: {n: (v, v * 0 + 1) for n, v in q.items()}),
                },
                reads={"model": self.model, "guide": guide},
                pair="its clients send gradients of their parts of one objective, and none fits a "
                "guide by itself; use run.posterior or to_arviz, or pvi.hierarchical without guide",
            ),
        )

    # The server

    def init(self, source: Generator, clients: int) -> Tensors:
        """Initialize the parameters of the shared guide around the prior mean."""
        mean, sd = self.shared_sites.prior()
        bend = self.family_guide.start({BASE: torch.zeros_like(mean)})
        base = {"center": mean, "root": torch.diag(START_SCALE * sd)}
        noise = torch.randint(2**62, (), generator=source)
        count = {"turns": torch.tensor(0), "noise": noise, "share": torch.tensor(1.0 / clients)}
        return base | bend | count | {"server/last": torch.zeros(len(mean), 1 + len(mean))}

    def descended(self, server: Tensors, pooled: Tensors) -> Tensors:
        """Update the shared guide's parameters by the clients' summed gradients."""
        root, last = server["root"], server["server/last"]
        now = root.mT @ torch.cat([pooled["center"][:, None], pooled["root"]], 1)  # [d, 1 + d]
        turns = server["turns"] + ((now * last).sum() < 0)
        rate = float(self.rate(turns))
        # Far from the best normal the base moves first: the bend would fit where it passes.
        left = now[:, 0].square().sum()
        bend = ADAM_LR * rate * float((1 + turns) / (1 + turns + left))
        new = descend(adam(bend), server, pick(pooled, f"loc/* {BEND}/*"))
        # Along a ridge gradients are small and of one direction, and noise is of any.
        way = now + MOMENTUM * rate**0.5 * (turns > 0) * last
        center, root = update_normal(server["center"], root, way, NATURAL_LR * rate)
        count = {"turns": turns, "noise": server["noise"] + 1, "server/last": way}
        return server | new | {"center": center, "root": root} | count

    def moments(self, q: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """Return center and scale of each shared site, ignoring the guide family's transform."""
        sd = torch.linalg.vector_norm(q["root"], dim=-1)
        return self.shared_sites.moments({"mean": q["center"], "sd": sd})

    def rate(self, turns: Tensor) -> Tensor:
        """Return the natural-gradient learning rate, which falls as gradients change direction."""
        return self.lr * TURNS_PER_HALVING / (TURNS_PER_HALVING + turns)

    # A client

    def init_client(self, received: Tensors, cohort: Cohort, source: Generator) -> Tensors:
        """Initialize the guide of the client's own variables with their prior."""
        center, unit = received["center"], received["root"]
        mean, sd = (v.to(center).expand(len(center), -1) for v in self.client_sites.prior())
        none = center.new_zeros(len(center), self.client_sites.size, self.shared_sites.size)
        # [C, m], [C, m, d] and [C, m, m]
        client_guide = {"mean": mean, "slope": none, "root": torch.diag_embed(sd)}
        powers = {} if self.scales is None else {"power": none}
        return under("own", client_guide | powers) | {"about": center, "unit": unit}

    def recenter(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Express the guide of the client's own variables relative to the current shared guide.

        That is q(z_j | g), which stays the same, at the current q(g).
        """
        u = self.points(received, batch)
        about, off = u.mean(0), u - u.mean(0)  # [C, d], [S, C, d]
        # Root of the covariance of u, [C, d, d].
        unit, info = torch.linalg.cholesky_ex(torch.einsum("sci,scj->cij", off, off) / len(off))
        client_guide, before = role("own", local), local["unit"]
        good = (info == 0) & about.isfinite().all(-1)  # or it is stated as it was
        about = torch.where(good[:, None], about, local["about"])
        unit = torch.where(good[:, None, None], unit, before)
        moved = _solved(before, (about - local["about"])[..., None])  # [C, d, 1]
        mean = client_guide["mean"] + (client_guide["slope"] @ moved)[..., 0]
        new = client_guide | {"mean": mean, "slope": client_guide["slope"] @ _solved(before, unit)}
        if self.scales is not None:
            growth = times(client_guide["power"], about - local["about"]).exp()[..., None]
            new |= {"mean": mean * growth[..., 0]}
            new |= {n: new[n] * growth for n in ("slope", "root")}
        return under("own", new) | {"about": about, "unit": unit}

    def settle(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Update the guide of the client's own variables by a natural-gradient step.

        That is q(z_j | g), given q(g).
        """
        e, before = balance_noise(self.drawn(local["about"], batch)), role("own", local)

        def energy(client_guide: Tensors) -> Tensor:
            return self.bound(received, local | under("own", client_guide), batch, e)

        params = {n: v.detach().clone().requires_grad_() for n, v in before.items()}
        grads = torch.autograd.grad(energy(params).sum(), list(params.values()))
        reach, spread = MAX_MEAN_STEP * self.client_sites.each("sd"), local["unit"].square().sum(-1)
        grad = dict(zip(params, grads, strict=True))
        rate = self.rate(received["turns"])[:, None].to(batch.size)
        after = given_others(before, grad, rate, reach, spread, self.scales)
        return under("own", halve_until_descent(energy, before, after, _between))

    def shared_loss(
        self, _: Program, __: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the client's part of the free energy [C], with noise common to all clients."""
        raw = self.drawn(local["about"], batch)
        common = self.common_noise(received).to(raw)
        # What is shared stays so, as `balance_noise` alters noise by that before it alone.
        e = balance_noise(torch.cat([common, raw[..., self.noise_count :]], -1))
        return self.bound(received, local, batch, e)

    def bound(self, received: Tensors, local: Tensors, batch: Batch, e: Tensor) -> Tensor:
        """Return the client's part of the free energy (negative ELBO) [C], given noise."""
        common, client_noise = e.tensor_split([self.noise_count], -1)
        share = received["share"]

        def target(received: Tensors, local: Tensors, batch: Batch) -> None:
            with Scaled(self.names, share[:, None]):
                self.model(received, local, batch)

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            with Scaled(self.names, share[:, None]), FixedNoise(common, client_noise):
                self.guide(received, local, batch)

        return elbo(self.draws)(target, guide, received, local, batch)

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample all sites from the guide, and record their log densities."""
        u = self.transformed_draw(local, batch)
        with batch.clients():
            log_det = torch.linalg.slogdet(local["root"]).logabsdet
            self.shared_sites.sample(u, -log_det.expand(u.shape[:-1]), 1.0)
            if not self.client_sites.size:
                return
            client_guide, off = role("own", local), u - local["about"]
            e = standard_noise(OWN, client_guide["mean"])
            slope = _solved(local["unit"], client_guide["slope"], left=False)
            v = client_guide["mean"] + times(slope, off) + times(client_guide["root"], e)
            grown = client_guide["root"].diagonal(dim1=-2, dim2=-1).log().sum(-1)  # [C, 1]
            if "power" in client_guide:
                exponent = times(client_guide["power"], off)
                v, grown = v * exponent.exp(), grown + exponent.sum(-1)
            self.client_sites.sample(v, -grown.expand(v.shape[:-1]), 1.0)

    def transformed_draw(self, local: Tensors, batch: Batch) -> Tensor:
        """Return the shared variables, transformed from a draw of the guide family."""
        silent = poutine.infer_config(
            self.family_guide.program, lambda site: {"is_auxiliary": True}
        )
        trace: Any = poutine.trace(silent).get_trace({}, local, batch)
        return local["center"] + times(local["root"], trace.nodes[BASE]["value"])

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send the gradient of the client's loss for the parameters of the shared guide."""
        return {n: v - local[n] for n, v in pick(received, LEARNED).items()}

    def points(self, received: Tensors, batch: Batch) -> Tensor:
        """Return draws of shared variables [S, C, d], computed from the round's common noise."""
        e = balance_noise(self.common_noise(received).to(received["center"]))
        with FixedNoise(e, e), pyro.plate(DRAWS_PLATE, self.draws, dim=-3):
            return self.transformed_draw(with_rows(received, len(batch)), batch).squeeze(-2)

    def common_noise(self, received: Tensors) -> Tensor:
        """Return the round's noise [S, C, 1, k], the same for all clients of a server."""
        keys, kind = received["noise"].tolist(), torch.float64
        generators = {key: generator("noise of what clients share", key) for key in {*keys}}
        drawn = {
            key: torch.randn(self.draws, 1, self.noise_count, generator=source, dtype=kind)
            for key, source in generators.items()
        }
        return torch.stack([drawn[key] for key in keys], 1)

    def drawn(self, like: Tensor, batch: Batch) -> Tensor:
        """Draw independent standard normal noise [S, C, 1, k + m] for each client."""
        size = self.draws, len(batch), 1, self.noise_count + self.client_sites.size
        with pyro.plate(DRAWS_PLATE, self.draws, dim=-3), batch.clients():
            noise: Tensor = standard_noise("_noise", like.new_zeros(size))
        return noise

    @cached_property
    def family_guide(self) -> Guide:
        """Guide of the given family, with all shared variables as a single site."""
        shapes = {BASE: Size([self.shared_sites.size])}
        return build_guide(self.family, shapes, init_scale=1.0, loc="loc", spread=BEND)

    @cached_property
    def noise_count(self) -> int:
        """Number of standard normal variables in a draw of the shared variables (k)."""
        start = self.family_guide.start({BASE: torch.zeros(1, 1, self.shared_sites.size)})
        one = torch.ones(1, 1)
        nobody = Batch(one, one, one.bool(), one[0], one[0].long())
        with pyro.validation_enabled(False), ClientNoise([generator(0)]):
            sites = dict(
                latent(poutine.trace(self.family_guide.program).get_trace({}, start, nobody))
            )
        return normal_event_size(sites[f"_{BEND}"]["fn"]) if f"_{BEND}" in sites else 0

    @cached_property
    def scales(self) -> Tensor | None:
        """Mask [m, d] of the shared variables that scale each client-specific variable."""
        return scaling_mask(self.shared_sites, self.client_sites)

    @property
    def names(self) -> str:
        """Names of the sites that all clients share, as one space-separated text."""
        return f"{self.shared_sites.names} {BASE} _{BEND}"


def _solved(matrix: Tensor, value: Tensor, left: bool = True) -> Tensor:
    """Solve linear systems; return NaN where a matrix is singular.

    A message with NaN is invalid.
    """
    solution, info = torch.linalg.solve_ex(matrix, value, left=left)
    return torch.where((info == 0)[..., None, None], solution, torch.nan)


def _between(start: Tensors, end: Tensors, share: Tensor) -> Tensors:
    """Interpolate tensors between `start` and `end` at a fraction [C] for each client."""
    way = {n: torch.lerp(v, end[n], add_trailing_axes(share, v)) for n, v in start.items()}
    way = {n: torch.where(add_trailing_axes(share > 0, v), v, start[n]) for n, v in way.items()}
    return {n: torch.where(add_trailing_axes(share < 1, v), v, end[n]) for n, v in way.items()}
