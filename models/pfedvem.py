"""pFedVEM: personalisation weighted by confidence, fitted by variational EM.

Zhu, Ma and Blaschko, "Confidence-aware Personalized Federated Learning via Variational
Expectation Maximization", CVPR 2023. The network is a shared base and a personal Bayesian head
w_j of d parameters:

    p(w_j | w, tau_j) = Normal(w, I / tau_j)        one precision ("confidence") per client
    p(y | x, w_j)     = Categorical(logits=head(base(x); w_j))
    q(w_j)            = Normal(mu_j, diag(softplus(pi_j))^2)

    client   tau_j = d / (sum softplus(pi_j)^2 + ||mu_j - w||^2)      eq. 8
             mu_j, pi_j by gradient steps on the ELBO, the base by epochs of its likelihood
    server   w     = sum_j tau_j mu_j / sum_j tau_j                   eq. 9
             base  = sum_j n_j base_j / sum_j n_j

tau_j is taken before the head moves, so the server weighs by a confidence that is one E-step
old, as in the authors' algorithm. All clients train in every round; some report.

Departures from the paper: its algorithm prints argmin of the ELBO and n_j/K sum f - KL; here, as in
the authors' code, the client minimises n_j/K sum f + KL. A client that turns NaN does not report,
where the authors' code restores its head and reports. Confidence is at most 1 / lr_head,
which at the defaults only the ablation "deviation" and guides without variance reach.
"""

from __future__ import annotations

from typing import Literal

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Generator, Size, Tensor

from pyrofl.arguments import Count, CountOrNone, NotNegative, Positive, ShareBelowOne, checked
from pyrofl.data import Batch, Who
from pyrofl.inference.elbo import elbo
from pyrofl.inference.facts import NOT_NEGATIVE, POSITIVE
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.optim import sgd
from pyrofl.inference.programs import Likelihood, Supervised, built_for
from pyrofl.inference.servers import Pooled, blend, by, by_size
from pyrofl.inference.servers.robust import Combine, combining
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import Family, around
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, pick, role, total, under

Confidence = Literal["full", "uncertainty", "deviation"]

CEILING = 1e12  # largest confidence


def precision(
    variance: Tensor, deviation: Tensor, d: int, confidence: Confidence = "full"
) -> Tensor:
    """Return the confidence [C] that maximises the ELBO (eq. 8), or an ablation of it.

    Args:
        variance: [C], sum of the posterior variances of a client's head.
        deviation: [C], squared distance of its mean from the server's head.
        d: number of parameters of the head.
        confidence: "uncertainty" leaves out the deviation, "deviation" the uncertainty (tables 2
            and 3).
    """
    spread = {"full": variance + deviation, "uncertainty": variance, "deviation": deviation}
    # With no variance at all the objective is unbounded at mu_j = w: a ceiling is needed.
    return (d / spread[confidence]).clamp(max=CEILING)


@checked
def build(
    net: Network,
    *,
    head: str | None = None,
    likelihood: Likelihood = categorical,
    prior: Family = dist.Normal,
    guide: guides.Family = guides.mean_field,
    confidence: Confidence = "full",
    fresh_tau: bool = False,
    m_step_iters: Count = 1,
    beta: ShareBelowOne = 0.0,
    own_base: bool = True,
    scale: Positive = 1.0,
    draws: Count = 5,
    head_epochs: CountOrNone = 10,
    base_epochs: CountOrNone = 5,
    batch: Count | None = 10,
    lr_head: NotNegative = 1e-3,
    lr_base: NotNegative = 1e-3,
    momentum: ShareBelowOne = 0.9,
    merge: str | Combine = "mean",
) -> Method:
    """Build pFedVEM; the defaults are the authors' for CIFAR-10.

    Args:
        net: the network; its parameters split in base and head.
        head: patterns of the names that are personal and Bayesian, the rest is shared; "*" makes
            the whole network Bayesian (start it with scale=0.1). Default: the network's head.
        likelihood: of a row, given the network's outputs.
        prior: location-scale family of p(w_j | w, tau_j), with scale tau_j^-1/2. Eqs. 8 and 9
            maximise the ELBO for the normal; for others they set the scale by the same moments.
        guide: family of q(w_j).
        confidence: eq. 8, or an ablation of it. A client whose spread is zero, as before its first
            step with "deviation", keeps the confidence it had, which is 1 / scale^2 at first. It
            is at most 1 / lr_head at a client: steps of lr_head diverge under a stronger pull.
        fresh_tau: report the confidence after local training instead of before.
        m_step_iters: eqs. 9 and 8 in turn at the server; with more than 1 variances travel too.
        beta: what the server keeps of its old state.
        own_base: test the personal model with the client's own base, as after its local training;
            otherwise with the received one.
        scale: standard deviation of q(w_j) before round one; its square is the paper's rho^2.
        draws: Monte Carlo samples K of every loss.
        head_epochs: full-batch steps on q(w_j); the likelihood is summed over the rows.
        base_epochs: epochs on the base, as in FedAvg; the likelihood is a mean over the rows.
        batch: rows in a step on the base.
        lr_head: learning rate on the sum scale.
        lr_base: learning rate on the mean scale.
        momentum: of both optimisers, which start afresh each round.
        merge: how the server makes one head and one base of the clients', as in `fedavg.build`,
            each on its own. "median" does without confidences, of which a bad client may claim any.

    Raises:
        ValueError: if no parameter of `net` matches `head`.
    """
    head = net.head if head is None else head
    shapes = net.matching(head)
    rest = [n for n in net.shapes if n not in shapes]
    d = sum(shape.numel() for shape in shapes.values())
    strongest = 1 / lr_head if lr_head else CEILING
    q = guide(shapes, scale=scale, loc="mu", spread="pi")
    point = guide(shapes, scale=1e-6, loc="mu", spread="pi")  # the server's head has no spread

    def init(generator: Generator, clients: int) -> Tensors:
        """Start the base as the network does, the common head at random."""
        start = net.init(generator)
        centre = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
        return under("base", {n: start[n] for n in rest}) | under("loc", centre)

    def join(received: Tensors, who: Who, generator: Generator) -> Tensors:
        """Start q(w_j) at the common head."""
        own = under("own", role("base", received)) if own_base else {}
        tau = torch.full_like(who.size, scale**-2)
        return q.start(role("loc", received)) | own | {"tau": tau}

    def centred(
        name: str, shape: Size, received: Tensors, local: Tensors, data: Batch
    ) -> TorchDistribution:
        """State p(w_j | w, tau_j)."""
        return around(prior, received[f"loc/{name}"], local["tau"].rsqrt())

    def spreads(received: Tensors, local: Tensors, data: Batch) -> tuple[Tensors, Tensor, Tensor]:
        """Return mu_j, the sum of variances and ||mu_j - w||^2."""
        mean, variance = q.moments(received, local, data)
        gap = {n: mean[n] - received[f"loc/{n}"] for n in shapes}
        return mean, total(variance), total({n: v.square() for n, v in gap.items()})

    @built_for(guide=q)
    def set_confidence(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Set tau_j by eq. 8, before the head moves."""
        _, variance, deviation = spreads(received, local, data)
        tau = precision(variance, deviation, d, confidence)
        # Without any spread, as of a mean that has not moved yet, eq. 8 knows nothing.
        return {"tau": torch.where(tau < CEILING, tau.clamp(max=strongest), local["tau"])}

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Make what is sent and what is kept of the trained client."""
        mean, variance, _ = spreads(received, local, data)
        own = under("own", role("base", local)) if own_base else {}
        tau = set_confidence(received, local, data) if fresh_tau else {}
        spread = {"variance": variance} if m_step_iters > 1 else {}
        return under("mean", mean) | own | tau | spread

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the head's mean, the base and the confidence."""
        return pick(local, "mean/* base/* tau variance")

    def by_server_names(server: Tensors, message: Tensors) -> Tensors:
        """Let mu_j stand for w."""
        return under("loc", role("mean", message)) | pick(message, "base/*")

    def update(server: Tensors, pooled: Tensors) -> Tensors:
        """Go to the mean of heads by confidence (eq. 9) and of bases by size."""
        return server | blend(server, pooled, beta)

    def alternate(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        """Take eqs. 9 and 8 in turn, which needs all messages: confidences follow the mean."""
        combine, mean, tau = combining(merge), role("mean", message), message["tau"]
        for _ in range(m_step_iters):
            centre = combine(mean, tau, role("loc", server))
            deviation = total({n: (mean[n] - centre[n]).square() for n in shapes})
            tau = precision(message["variance"], deviation, d, confidence)
        base = combine(role("base", message), who.size, role("base", server))
        return update(server, under("loc", centre) | under("base", base))

    def personal(received: Tensors, local: Tensors) -> Tensors:
        """Read the client's head and base."""
        return local | under("base", role("own", local))

    def common(received: Tensors, local: Tensors) -> Tensors:
        """Read the server's head and base."""
        return local | received | point.start(role("loc", received))

    def statistics(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Tell tau_j and the mean squared distance from w."""
        return {"tau": local["tau"], "deviation": spreads(received, local, data)[2] / d}

    samples = draws if q.random else None
    move_head = Step(q.names, sgd(lr_head, momentum), elbo(samples))
    move_base = Step("base/*", sgd(lr_base, momentum), elbo(samples, kl=0.0, mean=True))
    weights = {"loc/*": by("tau"), "base/*": by_size}
    return Method(
        init=init,
        join=join,
        model=Supervised(net, likelihood, centred, points="base"),
        guide=q,
        phases=(
            Phase((set_confidence,)),
            Phase((move_head,), head_epochs),
            *((Phase((move_base,), base_epochs, batch),) if rest else ()),
            Phase((settle,)),
        ),
        upload=upload,
        merge=alternate if m_step_iters > 1 else Pooled(weights, update, merge, by_server_names),
        views={"personal": personal, "global": common},
        statistics=statistics,
        facts={"tau": POSITIVE, "variance": POSITIVE if q.random else NOT_NEGATIVE},
        all_train=True,
    )
