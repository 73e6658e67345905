"""pFedVEM: personalisation weighted by confidence, fitted by variational EM.

Zhu, Ma and Blaschko, "Confidence-aware Personalized Federated Learning via Variational
Expectation Maximization", CVPR 2023. A shared base and a personal Bayesian head w_j, d numbers:

    p(w_j | w, tau_j) = Normal(w, I / tau_j)        one precision ("confidence") per client
    p(y | x, w_j)     = Categorical(logits=head(base(x); w_j))
    q(w_j)            = Normal(mu_j, diag(softplus(pi_j))^2)

    client   tau_j = d / (sum softplus(pi_j)^2 + ||mu_j - w||^2)      eq. 8
             mu_j, pi_j by gradient steps on the ELBO, the base by epochs of its likelihood
    server   w     = sum_j tau_j mu_j / sum_j tau_j                   eq. 9
             base  = sum_j n_j base_j / sum_j n_j

tau_j is taken before the head moves: the server weighs by a confidence that is one E-step old, as
in the authors' algorithm. All clients train in every round; some report.

Use it where clients differ in how many rows they have and how odd they are: the server weighs each
head by its confidence. It assumes that heads scatter normally around a common one; all clients
train in every round and keep their heads.

Departures from the paper: its algorithm prints argmin of the ELBO and n_j/K sum f - KL; here, as in
the authors' code, the client minimises n_j/K sum f + KL. A client that turns NaN does not report,
where the authors' code restores its head and reports. Confidence is at most 1 / lr_head, beyond
which steps of lr_head diverge: only "deviation" and guides without variance get there.
"""

from __future__ import annotations

from typing import Any, Literal

import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl import arguments
from pyrofl.data import Batch, Who
from pyrofl.inference import programs
from pyrofl.inference.aggregation import (
    Aggregator,
    Combine,
    blend,
    by_size,
    weight_by,
    with_server_step,
)
from pyrofl.inference.elbo import elbo
from pyrofl.inference.metadata import NOT_NEGATIVE, POSITIVE
from pyrofl.inference.method import GradientStep, Method, Phase
from pyrofl.inference.optim import sgd
from pyrofl.models import guides, likelihoods
from pyrofl.nets import Network
from pyrofl.recipes import repeatable
from pyrofl.tensors import Tensors, role, under

Confidence = Literal["full", "uncertainty", "deviation"]
CEILING = 1e12  # with no variance at all the objective is unbounded at mu_j = w


def precision(variance: Tensor, deviation: Tensor, d: int, of: Confidence = "full") -> Tensor:
    """Return the confidence [C] that maximises the ELBO (eq. 8), or an ablation (tables 2 and 3).

    Args:
        variance: [C], sum of the posterior variances of a client's head, of d parameters.
        deviation: [C], squared distance of its mean from the server's head.
        d: number of parameters.
        of: both, or one of the two alone.
    """
    spread = {"full": variance + deviation, "uncertainty": variance, "deviation": deviation}
    return (d / spread[of]).clamp(max=CEILING)


TUNE_OVER = {"lr_head": (0.0003, 0.001, 0.003, 0.01), "lr_base": (0.0003, 0.001, 0.003, 0.01)}


@repeatable
@arguments.checked
def build(
    net: Network,
    *,
    head: str | None = None,
    likelihood: programs.Likelihood = likelihoods.categorical,
    prior: programs.LocationScale = dist.Normal,
    guide: guides.Family = guides.mean_field,
    confidence: Confidence = "full",
    fresh_tau: bool = False,
    m_step_iters: arguments.Count = 1,
    beta: arguments.ShareBelowOne = 0.0,
    own_base: bool = True,
    scale: arguments.Positive = 1.0,
    draws: arguments.Count = 5,
    head_epochs: arguments.Whole = 10,
    base_epochs: arguments.Whole = 5,
    batch: arguments.Count | None = 10,
    lr_head: arguments.NotNegative = 1e-3,
    lr_base: arguments.NotNegative = 1e-3,
    momentum: arguments.ShareBelowOne = 0.9,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build pFedVEM; the defaults are the authors' for CIFAR-10.

    Args:
        net: the network; its parameters split in base and head.
        head: patterns of the names that are personal and Bayesian; "*" makes the whole network
            Bayesian (start it with scale=0.1). Default: the network's head.
        likelihood: of a row, given the network's outputs.
        prior: location-scale family of p(w_j | w, tau_j), with scale tau_j^-1/2. Eqs. 8 and 9
            maximise the ELBO for the normal; for others they set the scale by the same moments.
        guide: family of q(w_j).
        confidence: eq. 8, or an ablation of it. A client whose spread is zero, as before its first
            step with "deviation", keeps the confidence it had, which is 1 / scale^2 at first.
        fresh_tau: report the confidence after local training instead of before.
        m_step_iters: eqs. 9 and 8 in turn at the server; with more than 1 variances travel too.
        beta: what the server keeps of its old state.
        own_base: test the personal model with the client's own base, else with the received one.
        scale: standard deviation of q(w_j) before round one; its square is the paper's rho^2.
        draws: Monte Carlo samples K of every loss.
        head_epochs: full-batch steps on q(w_j); the likelihood is summed over the rows.
        base_epochs: epochs on the base, as in FedAvg; the likelihood is a mean over the rows.
        batch: rows in a step on the base.
        lr_head: on the sum scale.
        lr_base: on the mean scale.
        momentum: of both optimisers, which start afresh each round.
        aggregation: as in `fedavg.build`, of heads and bases apart; "median" needs no confidences.

    Raises:
        ValueError: if no parameter of `net` matches `head`.
    """
    shapes = net.matching(net.head if head is None else head)
    d, strongest = sum(s.numel() for s in shapes.values()), 1 / lr_head if lr_head else CEILING
    q = guide(shapes, scale=scale, loc="mu", spread="pi")
    point = guide(shapes, scale=1e-6, loc="mu", spread="pi")  # the server's head has no spread

    def init(generator: Generator, clients: int) -> Tensors:
        """Start the base as the network does, the common head at random."""
        base = {n: v for n, v in net.init(generator).items() if n not in shapes}
        centre = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        return under("base", base) | under("loc", centre)

    def init_client(received: Tensors, who: Who, generator: Generator) -> Tensors:
        """Start q(w_j) at the common head."""
        own = under("own", role("base", received)) if own_base else {}
        return q.start(role("loc", received)) | own | {"tau": torch.full_like(who.size, scale**-2)}

    def centred(name: str, _: Any, received: Tensors, local: Tensors, data: Batch) -> Any:
        """State p(w_j | w, tau_j)."""
        return programs.around(prior, received[f"loc/{name}"], local["tau"].rsqrt())

    def spreads(received: Tensors, local: Tensors, data: Batch) -> tuple[Tensors, Tensor, Tensor]:
        """Return mu_j, the sum of its variances [C], and ||mu_j - w||^2 [C]."""
        mean, variance = q.moments(received, local, data)
        spread = torch.cat([v.flatten(1) for v in variance.values()], 1).sum(1)
        return mean, spread, distance(mean, role("loc", received))

    @programs.built_for(guide=q)
    def set_confidence(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Set tau_j by eq. 8, before the head moves."""
        tau = precision(*spreads(received, local, data)[1:], d, confidence)
        # Without any spread, as of a mean that has not moved yet, eq. 8 knows nothing.
        return {"tau": torch.where(tau < CEILING, tau.clamp(max=strongest), local["tau"])}

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Make what is sent and kept of the trained client."""
        mean, variance, _ = spreads(received, local, data)
        own = under("own", role("base", local)) if own_base else {}
        more = set_confidence(received, local, data) if fresh_tau else {}
        more |= {"variance": variance} if m_step_iters > 1 else {}
        return under("mean", mean) | own | more

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the head's mean, the base and the confidence."""
        return {n: v for n, v in local.items() if n.startswith(("mean/", "base/", "tau", "var"))}

    def named(server: Tensors, message: Tensors) -> Tensors:
        """Let mu_j stand for w."""
        return under("loc", role("mean", message)) | under("base", role("base", message))

    def in_turn(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        """Repeat eqs. 9 and 8, for which all messages are needed."""
        for _ in range(m_step_iters):
            new = pooled(server, message, who, generator)
            apart = distance(role("mean", message), role("loc", new))
            message = message | {"tau": precision(message["variance"], apart, d, confidence)}
        return new

    def statistics(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Tell tau_j and the mean squared distance from w."""
        return {"tau": local["tau"], "deviation": spreads(received, local, data)[2] / d}

    def personal(received: Tensors, local: Tensors) -> Tensors:
        """Read the client's head and base."""
        return local | under("base", role("own", local))

    def common(received: Tensors, local: Tensors) -> Tensors:
        """Read the server's head and base."""
        return local | received | point.start(role("loc", received))

    samples = draws if q.random else None
    move_head = GradientStep(q.names, sgd(lr_head, momentum), elbo(samples))
    move_base = GradientStep("base/*", sgd(lr_base, momentum), elbo(samples, kl=0.0, mean=True))
    least = POSITIVE if q.random else NOT_NEGATIVE
    weights = {"loc/*": weight_by("tau"), "base/*": by_size}
    pooled = Aggregator(weights, rule=aggregation, transform=named)
    return Method(
        name="pfedvem",
        init=init,
        init_client=init_client,
        model=programs.Supervised(net, likelihood, centred, points="base"),
        guide=q,
        phases=(
            Phase((set_confidence,)),
            Phase((move_head,), head_epochs),
            *((Phase((move_base,), base_epochs, batch),) if len(shapes) < len(net.shapes) else ()),
            Phase((settle,)),
        ),
        upload=upload,
        aggregate=with_server_step(
            pooled if m_step_iters == 1 else in_turn,
            lambda server, merged: server | blend(server, merged, beta),
        ),
        views={"personal": personal, "global": common},
        statistics=statistics,
        metadata={"tau": POSITIVE} | ({"variance": least} if m_step_iters > 1 else {}),
        train_all_clients=True,
    )


def distance(mean: Tensors, centre: Tensors) -> Tensor:
    """Return ||mean - centre||^2 over all tensors, [C]."""
    return torch.cat([(v - centre[n]).flatten(1) for n, v in mean.items()], 1).square().sum(1)
