"""pFedVEM: personalization weighted by confidence, fitted by variational EM.

Zhu, Ma and Blaschko, "Confidence-aware Personalized Federated Learning via Variational
Expectation Maximization", CVPR 2023. A shared base and a personal Bayesian head w_j, d numbers:

    p(w_j | w, tau_j) = Normal(w, I / tau_j)        one precision ("confidence") per client
    p(y | x, w_j)     = Categorical(logits=head(base(x); w_j))
    q(w_j)            = Normal(mu_j, diag(softplus(pi_j))^2)

    client   tau_j = d / (sum softplus(pi_j)^2 + ||mu_j - w||^2)      eq. 8, before mu_j changes
             mu_j, pi_j by gradient steps on the ELBO, the base by epochs of its likelihood
    server   w     = sum_j tau_j mu_j / sum_j tau_j                   eq. 9
             base  = sum_j n_j base_j / sum_j n_j

Use it where clients differ in size and in how far they deviate from the others: the server weighs
each head by its confidence. It assumes that heads scatter normally around a common one. All clients
train in every round and keep their heads.

Departures from the paper: its algorithm subtracts the KL divergence; as in the authors' code, the
client minimizes n_j/K sum f + KL. A client that turns NaN does not report, where the authors' code
restores its head and reports. Confidence is at most 1 / lr_head, beyond which steps of lr_head
diverge: only "deviation" and guides without variance get there.
"""

from __future__ import annotations

from typing import Any, Literal

import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl import arguments, tensors
from pyrofl.data import Batch, Cohort
from pyrofl.inference import aggregation as agg
from pyrofl.inference import programs
from pyrofl.inference.elbo import elbo
from pyrofl.inference.metadata import Metadata
from pyrofl.inference.method import GradientStep, Method, Phase
from pyrofl.inference.optim import sgd
from pyrofl.models import guides, likelihoods, priors
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

TUNE_OVER = {"lr_head": (0.0003, 0.001, 0.003, 0.01), "lr_base": (0.0003, 0.001, 0.003, 0.01)}
CEILING = 1e12  # with no variance at all the objective is unbounded at mu_j = w
Confidence = Literal["full", "uncertainty", "deviation"]
Tensors = tensors.Tensors


def precision(variance: Tensor, deviation: Tensor, d: int, of: Confidence = "full") -> Tensor:
    """Return precision tau [C] of eq. 8 (or an ablation), given variance and deviation [C].

    The ablations are those of tables 2 and 3.
    """
    spread = {"full": variance + deviation, "uncertainty": variance, "deviation": deviation}
    return (d / spread[of]).clamp(max=CEILING)


@rebuildable
@arguments.checked
def build(
    net: Network,
    *,
    head: str | None = None,
    likelihood: programs.Likelihood = likelihoods.categorical,
    prior: priors.PriorFamily = dist.Normal,
    guide: guides.Family = guides.mean_field,
    confidence: Confidence = "full",
    fresh_tau: bool = False,
    m_step_iters: arguments.Count = 1,
    beta: arguments.ShareBelowOne = 0.0,
    own_base: bool = True,
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
        guide: Family of q(w_j).
        confidence: Eq. 8 or an ablation; where the spread is zero it stays, at first 1 / scale^2.
        fresh_tau: Report the confidence after local training instead of before.
        m_step_iters: Iterations of eqs. 9 and 8 at the server; above 1 variances are sent too.
        beta: Fraction of its old state that the server keeps.
        own_base: Test the personal model with the client's own base, else with the received one.
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
        ValueError: If no parameter of `net` matches `head`.
    """
    shapes = net.select_params(net.head if head is None else head)
    d, strongest = sum(s.numel() for s in shapes.values()), 1 / lr_head if lr_head else CEILING
    q = guides.build_guide(guide, shapes, init_scale=init_scale, loc="mu", spread="pi")
    family = priors.as_family(prior)
    point = guide(shapes, init_scale=1e-6, loc="mu", spread="pi")  # the server's head has no spread

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the base by the network's own draw, and the common head by a normal one."""
        base = {n: v for n, v in net.init(generator).items() if n not in shapes}
        loc = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        return tensors.under("base", base) | tensors.under("loc", loc)

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize q(w_j) with the common head as its mean."""
        own = tensors.renamed(received, {"base": "own"}) if own_base else {}
        tau = torch.full_like(cohort.size, init_scale**-2)
        return q.start(tensors.role("loc", received)) | own | {"tau": tau}

    def centered(name: str, _: Any, received: Tensors, local: Tensors, data: Batch) -> Any:
        """Return the prior p(w_j | w, tau_j), centered at the common head w."""
        return programs.around(family, received[f"loc/{name}"], local["tau"].rsqrt())

    def spreads(received: Tensors, local: Tensors, data: Batch) -> tuple[Tensor, Tensor]:
        """Return the total variance of q(w_j), and the squared distance of mu_j and w, [C] each."""
        mean, spread = q.moments(received, local, data)
        return tensors.total(spread), tensors.squared_distance(mean, tensors.role("loc", received))

    def update_confidence(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's confidence tau_j by eq. 8."""
        tau = precision(*spreads(received, local, data), d, confidence)
        # Without any spread, as of a mean that has not moved yet, eq. 8 knows nothing.
        return {"tau": torch.where(tau < CEILING, tau.clamp(max=strongest), local["tau"])}

    def finish(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the posterior mean and the other tensors that the client sends or stores."""
        made = tensors.under("mean", q.moments(received, local, data)[0])
        made |= tensors.renamed(local, {"base": "own"}) if own_base else {}
        made |= {"variance": spreads(received, local, data)[0]} if m_step_iters > 1 else {}
        return made | (update_confidence(received, local, data) if fresh_tau else {})

    def alternate(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Aggregate all messages, alternating eq. 9 (common head) and eq. 8 (confidences)."""
        for _ in range(m_step_iters):
            new = weighted(server, message, cohort, generator)
            apart = tensors.squared_distance(tensors.renamed(message, {"mean": "loc"}), new)
            message = message | {"tau": precision(message["variance"], apart, d, confidence)}
        return new

    samples, positive = (
        num_particles if q.random else None,
        agg.POSITIVE if q.random else agg.NOT_NEGATIVE,
    )
    head_step = GradientStep(q.names, sgd(lr_head, momentum), elbo(samples))
    base_step = GradientStep("base/*", sgd(lr_base, momentum), elbo(samples, kl=0.0, mean=True))
    weighted = agg.Aggregator(
        {"loc/*": agg.weight_by("tau"), "base/*": agg.by_size},
        rule=aggregation,
        transform=lambda _, sent: tensors.renamed(sent, {"mean": "loc", "base": "base"}),
    )
    return Method(
        name="pfedvem",
        init=init,
        init_client=init_client,
        model=programs.Supervised(net, likelihood, centered, points="base"),
        guide=q,
        phases=(
            Phase((update_confidence,)),
            Phase((head_step,), head_epochs),
            *([Phase((base_step,), base_epochs, batch)] if len(shapes) < len(net.shapes) else []),
            Phase((finish,)),
        ),
        upload=lambda received, local: tensors.pick(local, "mean/* base/* tau variance"),
        aggregate=agg.damped(alternate if m_step_iters > 1 else weighted, beta),
        views={
            "personal": lambda received, local: local | tensors.renamed(local, {"own": "base"}),
            "global": lambda got, local: local | got | point.start(tensors.role("loc", got)),
        },
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
