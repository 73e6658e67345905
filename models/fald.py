"""FALD: federated averaging Langevin dynamics, a sampler of the global posterior; also FSGLD.

Deng, Zhang, Ma, Song and Lin, "On Convergence of Federated Averaging Langevin Dynamics", UAI 2024
(2021); with surrogates, El Mekkaoui, Mesquita, Blomstedt and Kaski, "Federated Stochastic Gradient
Langevin Dynamics", UAI 2021.

    p(w)        = any prior, Normal(0, I)
    p(y | x, w) = Categorical(logits=net(x; w))
    draws       of w, one of each round, in a chain whose stationary law is near p(w | D)

    client   w_j = w_j - lr grad U_j(w_j) + (2 lr J temperature)^1/2 xi,   xi ~ Normal(0, I)
             U_j(w) = -J log p(D_j | w) - log p(w)                 J clients, of which it is one
    server   w   = mean_j w_j, which is kept, and is the next draw

The mean of U_j is U = -log p(w, D), and that of J noises has variance 2 lr temperature: with one
local step this is Langevin's of all rows. With more, clients that differ drift to posteriors of
their own in between. Surrogates, normal factors t_j of each client's rows, take that out,

             U_j(w) - log prod_k t_k(w) + J log t_j(w)            "conducive" gradients

which has the same mean, as the terms that are added cancel. Here t_j is renewed in every round, the
second-order expansion about the w that came down. In a normal linear model U_j is then U and, with
the rows all in one batch, the chain of any number of local steps has the exact mean, and along each
axis of precision P the variance temperature / (P (1 - lr P / 2)).

`posterior` and `to_arviz` give the draws of the chain, in their order: of those after a share
`discard` of the rounds, each requested draw is the next one of the chain, thinned or repeated to
the requested number. So chains of several seeds have R-hat and ESS that are meaningful, and
a chain of few rounds shows a small ESS. The view "global" predicts by the last draw, "ensemble" by
the mean over some of them.

Use it where the posterior of one model is wanted as draws, with R-hat and ESS, and not as a normal.
It assumes many cheap rounds, and that all clients take part in each.

Of the papers' text abstract and introduction could be read; no equation numbers. Departures from
the paper: clients count evenly, as the server knows their number and not their rows; noise is
independent between clients (the paper's rho = 0). Where not all report, the chain is noisier than
it should be, by J over their number: partial reports leave a bias, as the paper finds. FSGLD moves
one chain from client to client and finds surrogates once; here all clients are visited at once.
"""

from __future__ import annotations

from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, checked, described
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, Weight, WeightedSum, uniform
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import INCOMPARABLE, SHARED, Metadata, keep_server_state
from pyrofl.inference.definition.method import (
    ClosedFormUpdate,
    GradientStep,
    Method,
    Phase,
    View,
    as_received,
)
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, Prior, Program, Supervised
from pyrofl.models import guides
from pyrofl.models.fisher import STANDARD
from pyrofl.models.likelihoods import categorical
from pyrofl.models.scaffold import gradient
from pyrofl.models.shared.curvature import diagonal, full_fisher, slopes, weight_of_each
from pyrofl.models.shared.gaussians import PARAMETERS, Normals
from pyrofl.models.shared.kept_models import members
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, spread_out, times, under

HELD = "server/draw"  # role of the chain, [rounds, *p]

Surrogates = Literal["none", "diagonal", "full"]


SEARCH_GRID = {"lr": (4e-6, 1e-5, 4e-5, 1e-4), "temperature": (0.1, 0.3, 1.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.delta,
    surrogates: Surrogates = "none",
    temperature: NotNegative = 1.0,
    discard: ShareBelowOne = 0.5,
    keep: Count = 1000,
    ensemble: Count = 10,
    epochs: Count = 5,
    batch: Count | None = 10,
    lr: Positive = 4e-5,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build FALD (federated averaging Langevin dynamics) or, with surrogate likelihoods, FSGLD.

    Args:
        net: the network; all its parameters are shared and Bayesian.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters: a distribution such as dist.Normal(0.0, 1.0), a family or a
            function, see `pyrofl.priors`.
        guide: `delta`, as draws are the chain's own.
        surrogates: "none" is FALD; normal factors of each client's rows, "diagonal", or "full" for
            a few hundred parameters.
        temperature: of the chain; 1 is exact Bayes, 0 leaves gradient descent.
        discard: share of the rounds whose draws do not count.
        keep: rounds of the chain that the server remembers, the last ones.
        ensemble: draws that predict together, in the view "ensemble".
        epochs: local epochs.
        batch: rows in a step; None takes all, or else the chain has noise of minibatches, too.
        lr: step of the chain, on the scale of U; times all rows it is that of a mean loss.
        aggregation: how one model is made of the clients', as in `fedavg.build`; other than "mean"
            the noise is not what it should be.

    Raises:
        ValueError: if the guide is another one, or a full factor too big.
    """
    if guide is not guides.delta:
        raise ValueError(
            f"guide is {described(guide)}; expected delta, as draws are those of the chain"
        )
    model, q = Supervised(net, likelihood, prior), guides.delta(net.shapes, loc="w")
    names = [f"w/{n}" for n in net.shapes]
    factors = NormalFactors(net, likelihood, surrogates == "full")

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: parameters drawn by the network's initialization."""
        share = {"share": torch.tensor(1.0 / clients)}
        none = under("total", factors.none()) if surrogates != "none" else {}
        return q.start(net.init(generator)) | share | none

    def energy(
        model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return each client's estimate of the negative log posterior, times the learning rate.

        That is lr U_j, [C].
        """
        share = received["share"]
        loss = elbo(kl=lambda *_: share)(model, guide, received, local, data) / share
        if surrogates != "none":
            w = flatten_clients({n: local[n] for n in names})
            loss = loss + factors.energy(role("total", received), w)
            loss = loss - factors.energy(role("own", local), w) / share
        return lr * loss

    def shake(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Add the Gaussian noise of a Langevin step to the client's parameters."""
        width, moved = (2 * lr * temperature / received["share"]).sqrt(), {}
        with data.clients():  # the noise of a site is the client's own
            for n in names:
                zero = torch.zeros_like(local[n]).unsqueeze(1)  # [C, 1, *p]
                fn = dist.Normal(zero, torch.ones_like(zero)).to_event(zero.dim() - 2)
                noise = pyro.sample(f"_noise/{n}", fn).squeeze(1)  # [C, *p]
                moved[n] = local[n] + width.view(-1, *(1 for _ in noise.shape[1:])) * noise
        return moved

    def update(server: Tensors, pooled: Tensors) -> Tensors:
        """Set the server's parameters to the clients' mean, and append them to its stored chain."""
        now = {n: pooled[n] for n in names}
        past = role(HELD, server)
        chain = {
            n: torch.cat([past[n], v[None]])[-keep:] if past else v[None]
            for n, v in role("w", now).items()
        }
        total = {n: v + pooled[f"change/{n}"] for n, v in role("total", server).items()}
        return server | now | under(HELD, chain) | under("total", total)

    def counted(server: Tensors, draws: int) -> Tensors:
        """Return evenly spaced draws of the Markov chain after its burn-in: name -> [draws, *p]."""
        chain = role(HELD, server) or {n: server[f"w/{n}"][None] for n in net.shapes}
        rounds = len(next(iter(chain.values())))
        first = int(discard * rounds)
        at = first + (torch.arange(draws) * (rounds - first)) // draws
        return {n: v[at.to(v.device)] for n, v in chain.items()}

    def drawn(server: Tensors, draws: int, generator: Generator) -> tuple[Tensors, Tensors]:
        """Return posterior draws of the shared parameters from the chain stored at the server."""
        return counted(server, draws), {}

    def with_draws(server: Tensors, cohort: Cohort) -> Tensors:
        """Send each client the server's parameters and an ensemble of draws from its chain."""
        some = under("teacher/w", counted(server, ensemble))
        sent = {n: v for n, v in server.items() if not n.startswith("server/")}
        return spread_out(sent | some, len(cohort.ids))

    weights: dict[str, Weight] = {"*": uniform}
    if surrogates != "none":
        weights = {"change/*": WeightedSum(uniform), **weights}
    chain = Phase((GradientStep("w/*", sgd(1.0), energy), shake), epochs, batch)
    factor_phases: tuple[Phase, ...] = ()
    if surrogates != "none":
        factor_phases = factors.phases(model, q, names, batch)
    return Method(
        name="fald",
        init=init,
        model=model,
        guide=q,
        init_client=factors.init_client
        if factor_phases
        else lambda received, cohort, generator: {},
        phases=(*factor_phases[:-1], chain, *factor_phases[-1:]),
        upload=lambda received, local: {
            n: v for n, v in local.items() if n in names or n.startswith("change/")
        },
        aggregate=Aggregator(weights, update, aggregation),
        views={"global": as_received, "ensemble": View(members, with_draws, drawn)},
        metadata=Metadata(
            {" ".join(net.shapes): SHARED, "w/*": INCOMPARABLE},
            reset_clients=refuse_lost_factors if factor_phases else keep_server_state,
            reads={"model": model, "guide": q} if factor_phases else {},
        ),
    )


class NormalFactors:
    """Normal approximations t_j of the clients' likelihoods, in natural parameters.

    A client keeps "own/shift" and "own/precision", the server their sum as "total/...".
    """

    def __init__(self, net: Network, likelihood: Likelihood, full: bool) -> None:
        self.net, self.likelihood = net, likelihood
        self.normals = Normals(sum(s.numel() for s in net.shapes.values()), full)

    def none(self) -> Tensors:
        """Return the natural parameters of a flat (constant) normal factor, which are all zero."""
        d = self.normals.size
        entries = d * (d + 1) // 2 if self.normals.full else d
        return {"shift": torch.zeros(d), "precision": torch.zeros(entries)}

    def init_client(self, received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's likelihood approximation as flat: natural parameters of zero."""
        return under("own", {n: torch.zeros_like(received[f"total/{n}"]) for n in PARAMETERS})

    def times(self, precision: Tensor, w: Tensor) -> Tensor:
        """Multiply parameter vectors w [C, d] by a factor's full or diagonal precision matrix."""
        return times(self.normals.matrix(precision), w) if self.normals.full else precision * w

    def energy(self, factor: Tensors, w: Tensor) -> Tensor:
        """Return the negative log density [C] of a normal factor at w [C, d], up to a constant."""
        value: Tensor = (w * (self.times(factor["precision"], w) / 2 - factor["shift"])).sum(-1)
        return value

    def phases(
        self, model: Program, guide: Program, names: list[str], batch: int | None
    ) -> tuple[Phase, ...]:
        """Return training phases that approximate the client's likelihood by a normal factor.

        Two come before sampling, one after.
        """

        def slope(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Compute the gradient of the client's negative log likelihood at the received model.

            The Fisher information is reset to zero.
            """
            gradients = gradient(model, guide, elbo(kl=0.0), names, received, local, data)
            none = torch.zeros_like(received["total/precision"])
            return {
                "new/precision": none,
                "slope": flatten_clients(gradients),
                "each": weight_of_each(data),
            }

        def inform(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Add a minibatch's Fisher information to the client's sum."""
            rows = slopes(self.net, self.likelihood, role("w", received), data)
            gradients = (
                self.normals.packed(full_fisher(rows)) if self.normals.full else diagonal(rows)
            )
            return {"new/precision": local["new/precision"] + gradients * local["each"][:, None]}

        def renew(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            """Replace the client's likelihood approximation; store the change for the server."""
            w = flatten_clients({n: received[n] for n in names})
            precision = local["new/precision"]
            shift = self.times(precision, w) - local["slope"]
            new = {"shift": shift, "precision": precision}
            change = {n: v - local[f"own/{n}"] for n, v in new.items()}
            return under("own", new) | under("change", change)

        moves: list[ClosedFormUpdate] = [slope, inform, renew]
        before, add, after = (Phase((m,), 1, batch if m is inform else None) for m in moves)
        return before, add, after


def refuse_lost_factors(server: Tensors, cohort: Cohort) -> Tensors:
    """Raise ValueError if clients lost likelihood factors that the server's sum still contains."""
    if len(cohort.ids):
        raise ValueError(
            "fald: what a client has lost, its surrogate, is in the server's sum for good; "
            "expected surrogates='none'"
        )
    return server
