"""pFedVEM: personalization weighted by confidence, fitted by variational EM.

Zhu, Ma and Blaschko, "Confidence-aware Personalized Federated Learning via Variational
Expectation Maximization", CVPR 2023. A shared base and a personal Bayesian head w_j, d numbers:

    p(w_j | w, tau_j) = Normal(w, I / tau_j)        section 3.2; "confidence" tau_j = 1 / rho_j^2
    p(y | x, w_j)     = Categorical(logits=head(base(x); w_j))
    q(w_j)            = Normal(mu_j, diag(softplus(pi_j))^2)          eq. 11
    ELBO              = sum_j E_q[log p(D_j | w_j)] - KL[q(w_j) || p(w_j | w, tau_j)]      eq. 5

    client   tau_j = d / (sum softplus(pi_j)^2 + ||mu_j - w||^2)      eq. 8, before mu_j changes
             mu_j, pi_j by gradient steps on its part of the ELBO     eq. 6 by K draws
             base_j by epochs on E_q[mean of -log p(y | x, w_j)]      algorithm 1, line 10
    server   w     = sum_j tau_j mu_j / sum_j tau_j                   eq. 9
             base  = sum_j n_j base_j / sum_j n_j                     algorithm 1, line 6

Use it where clients differ in size and in how far they deviate from the others: the server weighs
each head by its confidence. It assumes that heads scatter normally around a common one. All clients
train in every round and keep their heads.

By default the widths sd_j = softplus(pi_j) hardly leave `init_scale`: gradients reach pi_j with the
small rate of mu_j, and where rows are uninformative the prior holds sd_j at tau_j^-1/2, and eq. 8
tau_j at sd_j^-2. Nor is tau_j bounded, as at w = mu_j the ELBO keeps rising with tau_j: with two
clients of one row each, y = 0 with variance 1 and y = 2 with variance 1/4, exact posteriors and w =
0 at the start, tau_2 is 28, 352 and 37,104 after 12, 100 and 10,000 rounds (with lr_head near 0, as
1 / lr_head bounds it).

`prior_scale` is a variant, not in the paper, that learns the widths (`shared/head_widths.py`).

Departures from the paper: its algorithm subtracts the KL divergence; as in the authors' code, the
client minimizes n_j/K sum f + KL. A client that turns NaN does not report, where the authors' code
restores its head and reports. A client's confidence is at most 1 / lr_head, beyond which steps of
lr_head overshoot w: only "deviation", guides without variance and long runs get there. Confidences
that the server computes (`m_step_iters` above 1) have no such limit. Heads of a pretrained network
start at their own values, those of others at a normal draw as in the authors' code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus

from pyrofl import arguments
from pyrofl.data import Batch, Cohort
from pyrofl.inference import aggregation as agg
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, around, of_network
from pyrofl.models import guides, likelihoods, priors
from pyrofl.models.shared import head_widths
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import (
    Tensors,
    matches,
    pick,
    renamed,
    role,
    squared_distance,
    sum_per_client,
    under,
)

SEARCH_GRID = {"lr_head": (0.0003, 0.001, 0.003, 0.01), "lr_base": (0.0003, 0.001, 0.003, 0.01)}
MAX_CONFIDENCE = 1e12  # with no variance at all the objective is unbounded at mu_j = w
Confidence = Literal["full", "uncertainty", "deviation"]


def precision(
    variance: Tensor,
    deviation: Tensor,
    d: int,
    confidence: Confidence = "full",
    prior_scale: float | None = None,
) -> Tensor:
    """Return each client's confidence tau [C], given the variance and deviation of its head.

    This is eq. 8, or an ablation of it.

    The ablations are those of tables 2 and 3. With `prior_scale`, it is the mode of log tau under
    the prior of the variant that learns the widths.
    """
    spread = {"full": variance + deviation, "uncertainty": variance, "deviation": deviation}[
        confidence
    ]
    if prior_scale is not None:
        return 2 * d / (spread + d * prior_scale**2)
    return (d / spread).clamp(max=MAX_CONFIDENCE)


@rebuildable
@arguments.checked
def build(
    net: Network,
    *,
    head: str | None = None,
    likelihood: Likelihood = likelihoods.categorical,
    prior: priors.PriorFamily = dist.Normal,
    guide: guides.Family | None = None,
    confidence: Confidence = "full",
    confidence_after_training: bool = False,
    m_step_iters: arguments.Count = 1,
    beta: arguments.ShareBelowOne = 0.0,
    personal_base: bool = True,
    prior_scale: arguments.Positive | None = None,
    init_scale: arguments.Positive = 1.0,
    num_particles: arguments.Count = 5,
    head_epochs: arguments.Whole = 10,
    base_epochs: arguments.Whole = 5,
    batch: arguments.Count | None = 10,
    lr_head: arguments.NotNegative = 1e-3,
    lr_base: arguments.NotNegative = 1e-3,
    momentum: arguments.ShareBelowOne = 0.9,
    aggregation: str | agg.Combine = "mean",
) -> Method:
    """Build pFedVEM (confidence-aware personalization), with the authors' CIFAR-10 defaults.

    Args:
        net: Network; its parameters are split into base and head.
        head: Patterns of the personal, Bayesian parameters; "*" for all. Default: the net's head.
        likelihood: Likelihood of a row, given the network's outputs.
        prior: Family of p(w_j | w, tau_j), see `pyrofl.priors`; eqs. 8 and 9 maximize the
            ELBO for the normal alone.
        guide: Family of q(w_j) that replaces the guide below, which is `guides.mean_field`.
        confidence: Eq. 8 or an ablation; where the spread is zero it stays, at first 1 / scale^2.
        confidence_after_training: Report the confidence after local training instead of before.
        m_step_iters: Iterations of eqs. 9 and 8 at the server; above 1 variances are sent too.
        beta: Fraction of its old state that the server keeps; `beta` of pFedMe is the fraction that
            it replaces, 1 - beta.
        personal_base: Test the personal model with the client's own base, not the received one.
        prior_scale: Scale s of the variant that learns the widths of q(w_j), such as 1; see above.
            None is the paper's schedule, whose widths stay near `init_scale`, and takes a fifth of
            the time on handwritten digits.
        init_scale: Standard deviation rho of q(w_j) before round one; 0.1 suits a Bayesian base.
        num_particles: Monte Carlo samples K of every loss.
        head_epochs: Full-batch steps on q(w_j); the likelihood is summed over the rows.
        base_epochs: Epochs on the base, as in FedAvg; the likelihood is a mean over the rows.
        batch: Rows per minibatch for the base.
        lr_head: Learning rate of q(w_j); its loss is summed over rows.
        lr_base: Learning rate of the base; its loss is averaged over rows.
        momentum: Momentum of both optimizers, which are reset every round.
        aggregation: As in `fedavg.build`, of heads and bases apart; "median" needs no confidences.

    Raises:
        ValueError: If no parameter of `net` matches `head`, or if `prior_scale` is given with a
            prior that is not normal or a guide that is not of independent normals.
    """
    family = guides.mean_field if guide is None else guide
    if prior_scale is not None and (
        prior is not dist.Normal or family not in head_widths.INDEPENDENT_GUIDES
    ):
        raise ValueError(
            f"prior_scale is {prior_scale}, whose widths have a closed form for a normal prior and "
            "the guides mean_field and log_mean_field alone; choose these, or leave it out"
        )
    shapes = net.select_params(net.head if head is None else head)
    d, strongest = (
        sum(s.numel() for s in shapes.values()),
        1 / lr_head if lr_head else MAX_CONFIDENCE,
    )
    families = priors.as_families(prior, shapes)

    @of_network(net, likelihood, points="base")
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the head w_j of each client around the common head w, then its responses."""
        w, sd = role("loc", received), local["tau"].rsqrt()
        with batch.clients():
            # p(w_j | w, tau_j), one site for each parameter of the head
            head = {n: pyro.sample(n, around(families[n], w[n], sd)) for n in shapes}
            with batch.rows():
                outputs = net(role("base", local) | head, batch.x)
                pyro.sample("y", likelihood(outputs, batch.x), obs=batch.y)  # p(y | x, w_j)

    def mean_field(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the head w_j of each client from q(w_j), independent normals (eq. 11)."""
        with batch.clients():
            for n, shape in shapes.items():
                mu, sd = local[f"mu/{n}"], softplus(local[f"pi/{n}"])
                pyro.sample(n, dist.Normal(mu, sd).to_event(len(shape)))

    q = guides.build_guide(family, shapes, init_scale=init_scale, loc="mu", spread="pi")
    if guide is None:
        q = replace(q, program=mean_field)

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the base by the network's own draw, and the common head by normal draws.

        Heads that the network keeps, such as pretrained ones, start at their own values.
        """
        start = net.init(generator)
        base = {n: v for n, v in start.items() if n not in shapes}
        loc = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        loc |= {n: start[n] for n in shapes if matches(n, net.keep)}
        return under("base", base) | under("loc", loc)

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the posterior of the client's head with the common head as mean."""
        own = renamed(received, {"base": "own"}) if personal_base else {}
        tau = torch.full_like(cohort.size, init_scale**-2)
        return q.start(role("loc", received)) | own | {"tau": tau}

    def spreads(received: Tensors, local: Tensors, data: Batch) -> tuple[Tensor, Tensor]:
        """Return the variance of the client's head, and its squared distance to the common head.

        These are the trace of the covariance of q(w_j), and ||mu_j - w||^2, [C] each.
        """
        mean, spread = q.moments(received, local, data)
        return sum_per_client(spread), squared_distance(mean, role("loc", received))

    def update_confidence(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's confidence tau_j from its head's variance and deviation (eq. 8)."""
        tau = precision(*spreads(received, local, data), d, confidence, prior_scale)
        # Without any spread, as of a mean that has not moved yet, eq. 8 knows nothing.
        return {"tau": torch.where(tau < MAX_CONFIDENCE, tau.clamp(max=strongest), local["tau"])}

    def finish(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the posterior mean and other tensors that the client sends or stores."""
        result = under("mean", q.moments(received, local, data)[0])
        result |= renamed(local, {"base": "own"}) if personal_base else {}
        result |= {"variance": spreads(received, local, data)[0]} if m_step_iters > 1 else {}
        return result | (
            update_confidence(received, local, data) if confidence_after_training else {}
        )

    def alternate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Aggregate all messages, alternating updates of the common head and of confidences.

        These are eq. 9 and eq. 8.
        """
        for _ in range(m_step_iters):
            new = weighted(server, message, cohort, generator)
            deviation = squared_distance(renamed(message, {"mean": "loc"}), new)
            tau = precision(message["variance"], deviation, d, confidence, prior_scale)
            message = message | {"tau": tau}
        return new

    def common(received: Tensors, local: Tensors) -> Tensors:
        """Return the global model: the received base and the common head."""
        return local | received | point.start(role("loc", received))

    samples, positive = (
        num_particles if q.random else None,
        agg.POSITIVE if q.random else agg.NOT_NEGATIVE,
    )
    gradient = q.names if prior_scale is None else "mu/*"
    # Eq. 6: the likelihood is a sum over rows, and the divergence has weight 1.
    head_step = GradientStep(gradient, sgd(lr_head, momentum), elbo(samples))
    # Line 10 of algorithm 1: the likelihood alone, as a mean over rows.
    base_step = GradientStep("base/*", sgd(lr_base, momentum), elbo(samples, kl=0.0, mean=True))
    widths = head_widths.widths_update(net, shapes, likelihood, q, num_particles)
    # The server's head has no spread.
    point = guides.build_guide(family, shapes, init_scale=1e-6, loc="mu", spread="pi")
    weighted = agg.Aggregator(
        {"loc/*": agg.weight_by("tau"), "base/*": agg.by_size},  # eq. 9, and line 6 of algorithm 1
        rule=aggregation,
        transform=lambda _, sent: renamed(sent, {"mean": "loc", "base": "base"}),
    )
    return Method(
        name="pfedvem",
        init=init,
        init_client=init_client,
        model=model,
        guide=q,
        phases=(
            Phase((update_confidence,)),
            Phase((head_step,), head_epochs),
            *([Phase((base_step,), base_epochs, batch)] if len(shapes) < len(net.shapes) else []),
            *([Phase((widths,))] if prior_scale is not None else []),
            Phase((finish,)),
        ),
        upload=lambda received, local: pick(local, "mean/* base/* tau variance"),
        aggregate=agg.damped(alternate if m_step_iters > 1 else weighted, beta),
        views={"personal": lambda received, local: local | renamed(local, {"own": "base"})}
        | ({"global": common} if q.has_centers else {}),
        metadata=Metadata(
            {"tau": agg.POSITIVE} | ({"variance": positive} if m_step_iters > 1 else {}),
            train_all_clients=True,
            statistics=lambda received, local, data: {
                "tau": local["tau"],
                "deviation": spreads(received, local, data)[1] / d,
            },
            reads={"guide": q},
        ),
    )
