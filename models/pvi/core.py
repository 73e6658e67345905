"""What clients and server compute in partitioned variational inference; `pvi` has the equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Generator, Tensor

from pyrofl.data import Batch, Who
from pyrofl.inference.elbo import elbo
from pyrofl.inference.facts import PER_CLIENT, SHARED, Rule
from pyrofl.inference.method import Method, Phase, Step, View
from pyrofl.inference.programs import Program, built_for
from pyrofl.models.pvi.factors import PARAMETERS, Factors
from pyrofl.models.pvi.gaussians import Normals, balanced, inverse, log_det, stacked, times
from pyrofl.models.pvi.natural_gradient import natural
from pyrofl.models.pvi.unconstrained import Layout
from pyrofl.tensors import Tensors

Covariance = Literal["diagonal", "blocks", "full"]

NOISE = ("_shared", "_own")  # auxiliary sites of the guide
REACH = 2.0  # longest step of a mean, in standard deviations of the prior
NARROW = 0.1  # of the prior's standard deviation: where clients start

_STANDARD = torch.distributions.Normal(0.0, 1.0)


@dataclass(frozen=True)
class Partitioned:
    """A program whose shared variables g get one normal factor from each client.

    A client keeps mean [C, n] and root [C, n, n] or [C, n] of its own normal q_j(g, v_j), where
    z_j = v_j, or z_j = v_j exp(power (g - about)) with power [C, n - d, d] and about [C, d].

    Attributes:
        model: the program.
        ours: sites that clients share, d entries.
        mine: sites that each client has for itself, n - d entries.
        covariance: which of them q lets depend on each other.
        draws: Monte Carlo samples; None has none, and moves the means alone.
        start: mean and standard deviation [d] of q before round one; None is the prior.
    """

    model: Program
    ours: Layout
    mine: Layout
    covariance: Covariance
    draws: int | None
    start: Callable[[Generator], tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: if one is unknown or out of its range.
        """
        if self.covariance not in get_args(Covariance):
            raise ValueError(
                f"covariance is {self.covariance!r}; expected one of {get_args(Covariance)}"
            )
        if self.draws is not None and (self.draws < 2 or self.draws % 2):
            raise ValueError(f"draws is {self.draws}; expected an even number, at least 2")
        Normals(self.ours.size + self.mine.size, self.full)

    @property
    def full(self) -> bool:
        """Whether roots and precisions are matrices."""
        return self.covariance != "diagonal"

    @property
    def normals(self) -> Normals:
        """Normals of the shared variables."""
        return Normals(self.ours.size, self.full)

    def prior(self) -> Tensors:
        """Return the natural parameters of p0."""
        return self._naturals(*self.ours.prior())

    def _naturals(self, mean: Tensor, sd: Tensor) -> Tensors:
        root = torch.diag_embed(sd) if self.full else sd
        return dict(zip(PARAMETERS, self.normals.naturals(mean, root), strict=True))

    def init(self, factors: Factors, generator: Generator, clients: int) -> Tensors:
        """Start at the network's or the prior's mean."""
        prior = self.prior()
        q = prior if self.start is None else self._naturals(*self.start(generator))
        server = factors.init(prior, q, clients)
        if all(site.exact for site in self.ours.sites):
            return server
        return server | {"share": torch.tensor(1 / clients, dtype=torch.float64)}

    def scales(self) -> Tensor | None:
        """Return by what a client's own variables are scaled: 1 or 0, [n - d, d].

        Those with a fixed normal prior, by powers of the positive ones that clients share: there
        the program itself multiplies them, so that what the rows say of z_j depends on g so.
        """
        if self.covariance != "full":
            return None
        fixed, positive = self.mine.each("exact"), self.ours.each("positive")
        found = torch.outer(fixed, positive)
        return found if bool(found.any()) else None

    def join(self, received: Tensors, who: Who, generator: Generator) -> Tensors:
        """Start q_j at what came down, and the client's own variables at their prior."""
        mean, root = self.normals.moments(*(received[n] for n in PARAMETERS))
        # Means over a wide start are ruled by its tails; a narrow one soon has the right width.
        root = root * NARROW if self.start is None else root
        centre, sd = (v.to(mean).expand(len(mean), -1) for v in self.mine.prior())
        mean = torch.cat([mean, centre], -1)
        if not self.full:
            return {"mean": mean, "root": torch.cat([root, sd], -1)}
        none = root.new_zeros(len(root), self.mine.size, self.ours.size)
        start = {"mean": mean, "root": stacked(root, none, torch.diag_embed(sd))}
        if self.scales() is None:
            return start
        return start | {"power": none, "about": mean[:, : self.ours.size]}

    def recentre(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """State the same q_j with powers about its present mean, where their steps are good."""
        d, mean, root = self.ours.size, local["mean"], local["root"]
        growth = times(local["power"], mean[:, :d] - local["about"]).exp()
        growth = torch.cat([torch.ones_like(mean[:, :d]), growth], -1)
        return {"mean": mean * growth, "root": root * growth[..., None], "about": mean[:, :d]}

    def tilted(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """State the client's target: cavity, its share of the prior, its rows."""
        d, share = self.ours.size, received.get("share", torch.zeros(()).to(batch.size))
        with pyro.plate("_clients", len(batch), dim=-2):
            u = pyro.sample("_u", dist.ImproperUniform(dist.constraints.real, (), (d,)))
            others = self.normals.log_density(u, *(received[n] for n in PARAMETERS))
            prior = self.normals.log_density(u, *(self.prior()[n].to(u) for n in PARAMETERS))
            pyro.factor("_others", others - share * prior)
        with _Scaled(self.ours.names, share):
            self.model(received, local, batch)

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Draw from q, its density that of the sites."""
        self._draw(local, batch, None, 1.0)

    def _draw(
        self, local: Tensors, batch: Batch, change: Callable[[Tensor], Tensor] | None, share: Any
    ) -> None:
        mean, root, d = local["mean"], local["root"], self.ours.size
        with batch.clients():
            parts = zip(NOISE, mean.split([d, self.mine.size], -1), strict=True)
            counted = change is None
            drawn = [_noise(name, part, counted) for name, part in parts if part.shape[-1]]
            e = torch.cat(drawn, -1)
            e = e if change is None else change(e)
            u = mean + (times(root, e) if self.full else root * e)
            ours, mine = u.split([d, self.mine.size], -1)
            grown = u.new_zeros(())
            if "power" in local:
                exponent = times(local["power"], ours - local["about"])
                mine, grown = mine * exponent.exp(), exponent.sum(-1)
            pyro.sample("_u", dist.Delta(ours, event_dim=1), infer={"is_auxiliary": True})
            # The density of g comes first, what is left of the joint one belongs to z given g.
            both, first = log_det(root, self.full), log_det(self._leading(root), self.full)
            known = 0.0 if counted else _STANDARD.log_prob(e).sum(-1)
            self.ours.sample(ours, (known - first).expand(u.shape[:-1]), share)
            self.mine.sample(mine, (first - both - grown).expand(u.shape[:-1]), 1.0)

    def _leading(self, root: Tensor) -> Tensor:
        d = self.ours.size
        return root[..., :d, :d] if self.full else root[..., :d]

    def free_energy(
        self, _: Program, __: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the free energy [C] of the client's target."""
        change = torch.zeros_like if self.draws is None else balanced

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            self._draw(local, batch, change, received.get("share", 0.0))

        return elbo(self.draws)(self.tilted, guide, received, local, batch)

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send q_j(g)."""
        mean = local["mean"][:, : self.ours.size]
        found = self.normals.naturals(mean, self._leading(local["root"]))
        return dict(zip(PARAMETERS, found, strict=True))

    def together(self, received: Tensors, local: Tensors) -> Tensors:
        """Let the shared sites follow q(g), and a client's own ones its q_j(z_j | g)."""
        d = self.ours.size
        mean, root = self.normals.moments(*(received[n] for n in PARAMETERS))
        own_mean, own = local["mean"][:, d:], local["root"]
        if not self.full:
            joint = torch.cat([root, own[:, d:]], -1)
            return local | {"mean": torch.cat([mean, own_mean], -1), "root": joint}
        slope = own[:, d:, :d] @ inverse(own[:, :d, :d], upper=False)
        own_mean = own_mean + times(slope, mean - local["mean"][:, :d])
        joint = stacked(root, slope @ root, own[:, d:, d:])
        return local | {"mean": torch.cat([mean, own_mean], -1), "root": joint}

    def method(self, damping: float | None, steps: int, batch: int | None, lr: float) -> Method:
        """Return the method; arguments and errors are those of `pvi.hierarchical`."""
        factors, within, scales = Factors(self.normals, damping), None, self.scales()
        if self.covariance == "blocks":
            within = torch.block_diag(*(torch.ones(v.size, v.size) for v in (self.ours, self.mine)))
        reach = REACH * torch.cat([layout.prior()[1] for layout in (self.ours, self.mine)])
        optim = natural(lr, -(-steps // 2), reach, within, self.draws is None, scales)
        guide = partial(self.guide)  # one object, which the loss can be bound to
        loss = built_for(model=self.model, guide=guide)(partial(self.free_energy))
        step, before = Step("mean root power", optim, loss), Phase((self.recentre,))
        proper = Rule("a precision of a normal distribution", self.normals.proper)
        return Method(
            init=partial(self.init, factors),
            model=self.model,
            guide=guide,
            phases=(*(() if scales is None else (before,)), Phase((step,), steps, batch)),
            merge=factors.merge,
            download=factors.cavity,
            join=self.join,
            upload=self.upload,
            views={
                "personal" if self.mine.size else "global": View(self.together, factors.posterior)
            },
            facts={
                "precision": proper,
                f"{self.ours.names} _u {NOISE[0]}": SHARED,
                "server/shift server/precision": PER_CLIENT,
            },
        )


class _Scaled(Messenger):
    """Let the log densities of some sites count in part."""

    def __init__(self, names: str, share: Tensor) -> None:
        super().__init__()
        self.names, self.share = set(names.split()), share

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names:
            msg["scale"] = msg["scale"] * self.share


def _noise(name: str, like: Tensor, counted: bool) -> Tensor:
    """Sample standard normal noise as an auxiliary site, whose density may be left out."""
    fn = dist.Normal(torch.zeros_like(like), torch.ones_like(like)).to_event(1)
    e: Tensor = pyro.sample(name, fn.mask(counted), infer={"is_auxiliary": True})
    return e
