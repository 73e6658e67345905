"""PVI: a normal posterior of what clients share, a product of one factor for each client.

Ashman, Bui, Nguyen, Markou, Weller, Swaroop and Turner, "Partitioned Variational Inference: A
Framework for Probabilistic Federated Learning", 2022; with latents z_j of each client's own,
Hassan, Salomone and Mengersen, "Federated Variational Inference Methods for Structured Latent
Variable Models", 2023.

    p(g, z, y)    = p(g) prod_j p(z_j | g) p(y_j | g, z_j)
    q(g)          = p0(g) prod_j t_j(g)                  normal factors; p0 stands for the prior
    q(g, z)       = q(g) prod_j q_j(z_j | g)             q_j normal, linear in g, then scaled:
    z_ji          = v_ji prod_k (s_k / b_k)^c_jik        s_k the positive shared variables

    client   q_j(g, z_j) = argmax E[log p(y_j, z_j | g) + log (p(g) / p0(g)) / J]
                                  - KL(q_j(g) || q(g) / t_j(g)) + entropy of q_j(z_j | g)
    server   t_j  = t_j^(1 - damping) (q_j t_j / q)^damping,  so q is moved by t_j^new / t_j^old

All variables are taken without constraints (log of positive ones). Each client has a share 1 / J
of what the prior is more than p0, so it need not be normal; where it is, p0 is the prior. Clients
climb by natural gradients: a normal model takes one step with lr=1, and one round with damping=1.

The powers c in [-1, 1] are learned, with covariance="full", for own variables with a fixed normal
prior (v normal and linear in g; c = 0 elsewhere). In a non-centred program the rows rule
eta = (theta - mu) / tau, so eta goes with 1 / tau; a normal joint of eta and log tau cannot, and is
too narrow in tau, federated or not. Standard deviations of the population's spread over NUTS's:

                                            schools   baseball   rat tumours   radon
    normal, all clients pooled                 0.82       0.71          0.60    0.57
    normal, federated                          0.82       0.71          0.64    0.62
    with powers, federated                     1.01       0.92          0.97    0.91

Departures from the papers: the powers, and damping that adapts. The server keeps the factors and
sends the cavity q / t_j, so that a client which trains and is not heard does no harm; the numbers
on the wire are as many. Where q would not be a distribution any more, the server halves its step
until it is. The factors start where `init` of the network says, not at 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, Positive, PositiveShare, Whole, checked
from pyrofl.data import Batch, Federation, Who
from pyrofl.inference.elbo import elbo
from pyrofl.inference.facts import PER_CLIENT, SHARED, Centre, Rule
from pyrofl.inference.method import Method, Phase, Step, View, send_all
from pyrofl.inference.programs import Likelihood, Prior, Program, Supervised, built_for
from pyrofl.inference.servers.averages import CannotMerge
from pyrofl.models import guides
from pyrofl.models.guides.correlated import standard_noise
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.models.pvi.gaussians import PARAMETERS, Normals, balanced, inverse, stacked, times
from pyrofl.models.pvi.natural_gradient import natural
from pyrofl.models.pvi.unconstrained import Layout, Scaled, layouts
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, role, under

Covariance = Literal["diagonal", "blocks", "full"]

STANDARD = fixed()  # Normal(0, 1)
NOISE = ("_shared", "_own")  # auxiliary sites of the guide
REACH = 2.0  # longest step of a mean, in standard deviations of the prior
NARROW = 0.1  # of the prior's standard deviation: where clients start
FASTER, SLOWER = 1.3, 0.6  # what the damping is multiplied by
HALVINGS = 30  # of the server's step, before it stays where it is


@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    covariance: Literal["diagonal", "full"] = "diagonal",
    damping: PositiveShare | None = None,
    scale: Positive = 0.05,
    draws: Count = 8,
    epochs: Whole = 10,
    batch: Count | None = None,
    lr: PositiveShare = 0.3,
) -> Method:
    """Build PVI for a network, all of whose parameters are shared and Bayesian.

    Args:
        net: the network.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters.
        guide: `mean_field` stands for the normal q(w); with `delta` clients move its mean alone,
            and its variance stays.
        covariance: "diagonal", or "full" for a few hundred parameters.
        damping: see `hierarchical`, as for draws.
        scale: standard deviation of q(w) before round one.
        draws: Monte Carlo samples, an even number.
        epochs: passes over the client's rows.
        batch: rows in a step; None takes all.
        lr: of natural gradients.

    Raises:
        ValueError: if draws is odd, or the guide another one.
    """
    if guide not in (guides.mean_field, guides.delta):
        raise ValueError(f"guide is {guide}; expected mean_field or delta, and see covariance")

    def priors(received: Tensors, local: Tensors, data: Batch) -> None:
        with data.clients():
            for n, shape in net.shapes.items():
                pyro.sample(n, prior(n, shape, received, local, data))

    one = torch.ones(1, 1)
    nobody = Batch(one, one, one.bool(), one[0], one[0].long())
    sites = layouts(priors, nobody, "*", scale, draws=64)

    def start(generator: Generator) -> tuple[Tensor, Tensor]:
        centre = sites[0].joined(net.init(generator))
        return centre, torch.full_like(centre, scale)

    program = Supervised(net, likelihood, prior)
    samples = draws if guide is guides.mean_field else None
    core = Partitioned(program, *sites, covariance, samples, damping, start)
    return core.method(epochs, batch, lr)


@checked
def hierarchical(
    model: Program,
    data: Federation,
    *,
    shared: str,
    covariance: Covariance = "full",
    damping: PositiveShare | None = None,
    draws: Count = 128,
    steps: Whole = 40,
    batch: Count | None = None,
    lr: PositiveShare = 1.0,
    wide: Positive = 10.0,
) -> Method:
    """Build PVI for a Pyro program of one's own.

    Args:
        model: a program (received, local, batch), all of whose sites are in `batch.clients()`; it
            reads neither of the first two.
        data: the federation; the model is run on its first client to see its sites.
        shared: patterns of the sites that are one for all clients; others are each client's own.
        covariance: "full" lets all depend on all; "blocks" cuts what a client's own sites depend on
            the shared ones; "diagonal" cuts everything.
        damping: share of the way that the factors of reporting clients are moved. None adapts it
            between 1 / M for M of them, with which it starts, and 1: it grows while the server's
            steps of successive rounds point the same way, and falls when they turn back.
        draws: Monte Carlo samples of a step, an even number; with twice as many as a client has
            variables or more, steps in a normal model have no noise.
        steps: natural-gradient steps in a round; with `batch` epochs of them.
        batch: rows in a step; None takes all.
        lr: of natural gradients.
        wide: standard deviation to start with where the prior is improper; no trace of it is left.

    Raises:
        ValueError: if draws is odd, or a site is unsuitable.
    """
    sites = layouts(model, data.batch(torch.tensor([0])), shared, wide)
    return Partitioned(model, *sites, covariance, draws, damping).method(steps, batch, lr)


@dataclass(frozen=True)
class Partitioned:
    """A program whose shared variables g get one normal factor from each client.

    The server holds q as shift and precision, see `gaussians`, and the factors as server/shift and
    server/precision [J, ...]; where the damping adapts, also the last one and the last proposal.
    A client keeps mean [C, n] and root [C, n, n] or [C, n] of its own normal q_j(g, v_j), where
    z_j = v_j, or z_j = v_j exp(power (g - about)) with power [C, n - d, d] and about [C, d].
    """

    model: Program
    ours: Layout  # g: sites that clients share, d entries
    mine: Layout  # z_j: sites that each client has for itself, n - d entries
    covariance: Covariance
    draws: int | None  # None has none, and moves the means alone
    damping: float | None
    start: Callable[[Generator], tuple[Tensor, Tensor]] | None = None  # mean, sd [d]; or the prior

    def __post_init__(self) -> None:
        """Refuse an odd number of draws, and too many variables."""
        if self.draws and self.draws % 2:
            raise ValueError(f"draws is {self.draws}; expected an even number")
        Normals(self.ours.size + self.mine.size, self.full)

    def method(self, steps: int, batch: int | None, lr: float) -> Method:
        """Return the method; arguments are those of `hierarchical`."""
        sides, guide = (self.ours, self.mine), self.guide
        within = None
        if self.covariance == "blocks":
            within = torch.block_diag(*(torch.ones(v.size, v.size) for v in sides))
        reach = REACH * torch.cat([v.each("sd") for v in sides])
        optim = natural(lr, -(-steps // 2), reach, within, self.draws is None, self.scales)
        loss = built_for(model=self.model, guide=guide)(partial(self.free_energy))
        names = "mean root" if self.scales is None else "mean root power"
        climb = Phase((Step(names, optim, loss),), steps, batch)
        return Method(
            init=self.init,
            model=self.model,
            guide=guide,
            phases=(climb,) if self.scales is None else (Phase((self.recentre,)), climb),
            merge=self.merge,
            download=self.cavity,
            join=self.join,
            upload=self.upload,
            views={"personal" if self.mine.size else "global": View(self.together, send_all)},
            facts={
                "precision": Rule("a precision of a normal distribution", self.normals.proper),
                f"{self.ours.names} _u {NOISE[0]}": SHARED,
                "server/shift server/precision": PER_CLIENT,
                "shift": Centre(lambda _, q: self.normals.mean_and_sd(q)),
            },
        )

    # The server

    def init(self, generator: Generator, clients: int) -> Tensors:
        """Start at the network's or the prior's mean; every client has an equal factor."""
        q = self.prior if self.start is None else self.normals.independent(*self.start(generator))
        share = torch.tensor(1 / clients, dtype=torch.float64)
        each = {n: ((q[n] - self.prior[n]) / clients).repeat(clients, 1) for n in PARAMETERS}
        server = q | under("server", each)
        if self.damping is None:
            last = {n: torch.zeros_like(v) for n, v in q.items()}
            server |= under("server", under("last", last) | {"damping": share})
        return server if bool(self.ours.each("exact").all()) else server | {"share": share}

    def cavity(self, server: Tensors, who: Who) -> Tensors:
        """Send q without the client's own factor, q / t_j."""
        received = send_all(server, who)
        known = who.ids < len(server["server/shift"])
        at = torch.where(known, who.ids, 0)
        own = {n: server[f"server/{n}"][at] * known[:, None] for n in PARAMETERS}
        return received | {n: received[n] - own[n] for n in PARAMETERS}

    def merge(self, server: Tensors, message: Tensors, who: Who, _: Generator) -> Tensors:
        """Move the factors of all messages at once, part of the way; CannotMerge if q is lost."""
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
        """Return the damping of this round; see `hierarchical`."""
        # Proposals turn back where factors overshoot, or nothing but noise is left to average.
        moments = self.normals.moments(server)
        last = self.normals.measured(role("server/last", server), *moments)
        turn = self.normals.measured(total, *moments) @ last
        factor = torch.where(turn > 0, FASTER, torch.where(turn < 0, SLOWER, 1.0))
        return (server["server/damping"] * factor).clamp(1 / clients, 1.0)

    # A client

    def join(self, received: Tensors, who: Who, generator: Generator) -> Tensors:
        """Start q_j at what came down, and the client's own variables at their prior."""
        mean, root = self.normals.moments(received)
        # Means over a wide start are ruled by its tails; a narrow one soon has the right width.
        root = root * NARROW if self.start is None else root
        centre, sd = (v.to(mean).expand(len(mean), -1) for v in self.mine.prior())
        whole = torch.cat([mean, centre], -1)
        if not self.full:
            return {"mean": whole, "root": torch.cat([root, sd], -1)}
        none = root.new_zeros(len(root), self.mine.size, self.ours.size)
        powers = {} if self.scales is None else {"power": none, "about": mean}
        return {"mean": whole, "root": stacked(root, none, torch.diag_embed(sd))} | powers

    def recentre(self, received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """State the same q_j with powers about its present mean, where their steps are good."""
        mean, _ = self._parts(local["mean"])
        growth = times(local["power"], mean - local["about"]).exp()
        growth = torch.cat([torch.ones_like(mean), growth], -1)
        moved = {"mean": local["mean"] * growth, "root": local["root"] * growth[..., None]}
        return moved | {"about": mean}

    def tilted(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """State the client's target: cavity, its share of the prior, its rows."""
        share = received.get("share", torch.zeros(()).to(batch.size))
        with pyro.plate("_clients", len(batch), dim=-2):
            u = pyro.sample(
                "_u", dist.ImproperUniform(dist.constraints.real, (), (self.ours.size,))
            )
            others = self.normals.log_density(u, received)
            prior = self.normals.log_density(u, {n: v.to(u) for n, v in self.prior.items()})
            pyro.factor("_others", others - share * prior)
        with Scaled(self.ours.names, share):
            self.model(received, local, batch)

    def guide(self, received: Tensors, local: Tensors, batch: Batch) -> None:
        """Draw from q, its density that of the sites."""
        self._draw(local, batch)

    def _draw(
        self,
        local: Tensors,
        batch: Batch,
        change: Callable[[Tensor], Tensor] | None = None,
        share: Tensor | float = 1.0,
    ) -> None:
        """Draw from q; noise may be changed, and a share of the shared sites' Jacobians counts."""
        mean, root, counted = local["mean"], local["root"], change is None
        with batch.clients():
            parts = zip(NOISE, self._parts(mean), strict=True)
            e = torch.cat([standard_noise(n, v, counted) for n, v in parts if v.shape[-1]], -1)
            e = e if change is None else change(e)
            u = mean + (times(root, e) if self.full else root * e)
            ours, mine = self._parts(u)
            grown = u.new_zeros(())
            if "power" in local:
                exponent = times(local["power"], ours - local["about"])
                mine, grown = mine * exponent.exp(), exponent.sum(-1)
            pyro.sample("_u", dist.Delta(ours, event_dim=1), infer={"is_auxiliary": True})
            # The density of g comes first, what is left of the joint one belongs to z given g.
            both = self.normals.log_det(root)
            first = self.normals.log_det(self.normals.leading(root))
            known = 0.0 if counted else dist.Normal(0.0, 1.0).log_prob(e).sum(-1)
            self.ours.sample(ours, (known - first).expand(u.shape[:-1]), share)
            self.mine.sample(mine, (first - both - grown).expand(u.shape[:-1]), 1.0)

    def free_energy(
        self, _: Program, __: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the free energy [C] of the client's target."""
        change = balanced if self.draws else torch.zeros_like

        def guide(received: Tensors, local: Tensors, batch: Batch) -> None:
            self._draw(local, batch, change, received.get("share", 0.0))

        return elbo(self.draws)(self.tilted, guide, received, local, batch)

    def upload(self, received: Tensors, local: Tensors) -> Tensors:
        """Send q_j(g)."""
        return self.normals.naturals(
            self._parts(local["mean"])[0], self.normals.leading(local["root"])
        )

    def together(self, received: Tensors, local: Tensors) -> Tensors:
        """Let the shared sites follow q(g), and a client's own ones its q_j(z_j | g)."""
        d, own = self.ours.size, local["root"]
        mean, root = self.normals.moments(received)
        before, own_mean = self._parts(local["mean"])
        if not self.full:
            joint = torch.cat([root, own[:, d:]], -1)
        else:
            slope = own[:, d:, :d] @ inverse(own[:, :d, :d], upper=False)
            own_mean = own_mean + times(slope, mean - before)
            joint = stacked(root, slope @ root, own[:, d:, d:])
        return local | {"mean": torch.cat([mean, own_mean], -1), "root": joint}

    @property
    def full(self) -> bool:
        """Whether roots and precisions are matrices."""
        return self.covariance != "diagonal"

    @cached_property
    def normals(self) -> Normals:
        """Normals of the shared variables."""
        return Normals(self.ours.size, self.full)

    @cached_property
    def prior(self) -> Tensors:
        """The natural parameters of p0."""
        return self.normals.independent(*self.ours.prior())

    @cached_property
    def scales(self) -> Tensor | None:
        """By what a client's own variables are scaled, if any are: 1 or 0, [n - d, d].

        Those with a fixed normal prior, by powers of the positive ones that clients share: there
        the program itself multiplies them, so that what the rows say of z_j depends on g so.
        """
        found = torch.outer(self.mine.each("exact"), self.ours.each("positive"))
        return found if self.covariance == "full" and bool(found.any()) else None

    def _parts(self, value: Tensor) -> tuple[Tensor, ...]:
        """Part entries [..., n] into g and z_j."""
        parts: tuple[Tensor, ...] = value.split([self.ours.size, self.mine.size], -1)
        return parts
