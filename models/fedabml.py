"""FedABML: a prior learned from all clients, from which each client adapts its posterior.

Liu, Lv, Zeng, Xu, Wang and Yu, "Personalized Federated Learning via Amortized Bayesian
Meta-Learning: A New Perspective and Practical Algorithms", 2023. Every weight is random:

    p(w_i | theta) = Normal(m, diag(exp nu)^2)              theta = (m, nu), shared
    p(y | x, w_i)  = Categorical(logits=net(x; w_i))
    q(w_i | phi_i) = Normal(m_i, diag(exp nu_i)^2)          phi_i = (m_i, nu_i), not stored; eq. 3.9

    L_i(theta, phi) = E_q[-log p(D_i | w)] + lambda KL[q(. | phi) || p(. | theta)]
    F(theta)        = mean over i of min_phi L_i(theta, phi)               eq. 3.5

    client   phi_i, theta_i = theta                                        algorithm 1, line 6
             phi_i   -= eta  dL_i/dphi (phi_i, theta_i) / n_i   k times    line 8, eqs. 3.8 and 3.10
             theta_i -= eta' dL_i/dtheta (phi_i, theta_i) / n_i            line 9
    server   theta = mean of theta_i over the clients that reported        line 10

Given phi the likelihood does not depend on theta, so line 9 needs no network and no draws. To
personalize, phi_i starts at theta, which is then frozen, and makes epochs of steps.

Use it where new clients come all the time and must learn from few rows: a few steps lead from the
prior to a posterior. It assumes that weights scatter normally around one center, each weight by
itself; clients keep nothing.

Departures from the paper: line 9 by default is a step of the natural gradient, in the moments of
the normal: theta goes a share eta' of the way to phi, whatever n_i and lambda; the plain one is an
option. The paper runs k = 5 steps on phi where its algorithm prints one: here they are on the same
minibatch with fresh draws, as in pFedMe. With steps=1, natural=False and batch=None the algorithm
is that printed, except that losses are means over rows, where the paper has sums, and that nu is
averaged, where its theta may be read as (m, exp nu) (`average="std"`). A client takes exp(nu) for
at least (eta lambda / n_i)^1/2, under which steps of eta would overshoot m, so a large lambda
widens it (10, eta 0.1, 50 rows: 0.14 for 0.05); it is never below 1e-4. `meta_grad="unrolled"`
differentiates L_i(theta, phi(theta)) through the steps from theta to phi: with a delta guide and
lambda = 0 this is MAML, which the paper calls a special case; the algorithm as printed becomes
pFedMe and Reptile. Prediction takes the mean of q unless draws are requested. lambda = 0.1, R = 3
and eta = 0.1 were chosen on handwritten digits; the paper has R = 5, tunes lambda and has eta = 0.1
on its grid.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.arguments import Count, NotNegative, Positive, Whole, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregate, Aggregator, uniform
from pyrofl.inference.definition.averages import Combine, get_rule
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.metadata import Metadata, normals
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, Loss, Program, of_network
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily, as_event, as_families
from pyrofl.models.shared.activations import Activations, Sampling, is_chosen, reason_against
from pyrofl.models.shared.meta_gradients import make_descent
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

MetaGradient = Literal["kl", "unrolled"]
GuideName = Literal["log_mean_field", "mean_field", "delta"]
Average = Literal["mnu", "std", "moments"]

MIN_SD = 1e-4  # smallest standard deviation of the prior

SEARCH_GRID = {"lr": (0.03, 0.1, 0.3, 1.0), "kl": (0.001, 0.01, 0.1, 1.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: PriorFamily = dist.Normal,
    guide: GuideName | guides.Family = "log_mean_field",
    meta_grad: MetaGradient = "kl",
    natural: bool = True,
    average: Average = "mnu",
    init_scale: Positive = 0.05,
    kl: NotNegative = 0.1,
    num_particles: Count = 5,
    sampling: Sampling = "weights",
    steps: Count = 5,
    epochs: Whole = 3,
    batch: Count | None = 50,
    lr: NotNegative = 0.1,
    lr_prior: NotNegative | None = None,
    fine_tune: Whole = 5,
    tune_steps: Count = 1,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the FedABML method (amortized Bayesian meta-learning).

    Args:
        net: the network; all its parameters are random.
        likelihood: of a row, given the network's outputs.
        prior: location-scale family of p(w_i | theta), see `pyrofl.priors`. Line 9
            minimizes the KL divergence for the normal; for others it sets center and scale by the
            same moments.
        guide: family of q(w_i | phi_i), by name or as a function, one that can be started at given
            moments. With "delta" the prior's standard deviation stays at `init_scale`: this is
            Reptile or pFedMe and, "unrolled" with kl=0, MAML.
        meta_grad: "kl" steps along dL/dtheta at the posterior reached (algorithm 1), "unrolled"
            along the derivative of the loss after k steps from theta.
        natural: whether steps along "kl" are preconditioned.
        average: what the server averages, evenly: "mnu" m and nu, so that standard deviations get
            their geometric mean; "std" m and standard deviations; "moments" first and second
            moments, so that the prior's variance counts how far clients are apart.
        init_scale: standard deviation of the prior before round one.
        kl: lambda, the weight of the KL divergence; 1 is exact Bayes.
        num_particles: Monte Carlo samples s of every loss.
        sampling: what a step on phi draws, "weights" or "activations"; see `pfedbayes.build`.
        steps: k, steps on phi for each step on theta.
        epochs: local epochs R.
        batch: rows in a step; None takes all.
        lr: eta, learning rate of phi; the loss L_i / n_i is per datum.
        lr_prior: eta', learning rate of theta on the same scale; of natural steps the share of
            the way from prior to posterior, at most 1. Default: 0.5 if natural, or else `lr`.
        fine_tune: epochs on phi before the personal model is tested.
        tune_steps: steps on each minibatch of these; 1 costs what it costs other methods.
        aggregation: how the server makes one of what it would average, as in `fedavg.build`. With
            "moments" rules that leave out the largest make standard deviations too small.

    Raises:
        ValueError: if steps are natural and lr_prior is more than the whole way, or if sampling is
            "activations", and guide, prior or network do not permit it.
    """
    chosen: guides.Family = getattr(guides, guide) if isinstance(guide, str) else guide
    families = as_families(prior, net.shapes)
    natural = natural and meta_grad == "kl"
    rate = (0.5 if natural else lr) if lr_prior is None else lr_prior
    if natural and rate > 1:
        raise ValueError(f"lr_prior is {rate}; expected 0 to 1, a share of the way, if natural")
    shapes = net.shapes
    q = guides.build_guide(chosen, shapes, init_scale=init_scale, loc="mu", spread="pi")
    power = 2 if average == "moments" else 1

    def weights(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Sample the weights w_i of each client from p(w_i | theta), inside `batch.clients()`."""
        w = {}
        for n, shape in shapes.items():
            m, sd = local[f"loc/{n}"], log_scale(local, n).exp()
            # Under this scale, [C, 1, ...], steps of lr would overshoot the mean.
            least = (lr * kl / batch.size).sqrt().reshape(-1, *(1 for _ in sd.shape[1:]))
            w[n] = pyro.sample(n, as_event(families[n](m, sd.maximum(least)), len(shape)))
        return w

    @of_network(net, likelihood)
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the weights of each client around the common ones, then its responses."""
        with batch.clients():
            w = weights(received, local, batch)
            with batch.rows():
                pyro.sample("y", likelihood(net(w, batch.x), batch.x), obs=batch.y)

    def log_mean_field(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the weights of each client from q(w_i | phi_i) (eq. 3.9).

        phi_i = (m_i, nu_i) is amortized: the phases below start it at theta once a round, and k
        gradient steps on every minibatch move it on. With meta_grad="unrolled" it starts at theta
        on every minibatch.
        """
        with batch.clients():
            for n, shape in shapes.items():
                m, nu = local[f"mu/{n}"], local[f"pi/{n}"]
                pyro.sample(n, dist.Normal(m, nu.exp()).to_event(len(shape)))

    if guide == "log_mean_field":
        q = replace(q, program=log_mean_field)

    def theta(loc: Tensors, log_scale: Tensors) -> Tensors:
        """Return named tensors of the prior: means, and log standard deviations bounded below."""
        bounded = {n: v.clamp(min=math.log(MIN_SD)) for n, v in log_scale.items()}
        return under("loc", loc) | (under("log_scale", bounded) if q.random else {})

    def log_scale(local: Tensors, name: str) -> Tensor:
        if q.random:
            return local[f"log_scale/{name}"]
        return torch.full_like(local[f"loc/{name}"], math.log(init_scale))

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: parameters drawn by the network's initialization."""
        center = net.init(generator)
        return theta(
            center, {n: torch.full_like(v, math.log(init_scale)) for n, v in center.items()}
        )

    def posterior(local: Tensors) -> Tensors:
        """Return initial parameters of a client's posterior, copied from the learned prior."""
        sd = {n: log_scale(local, n).exp() for n in net.shapes}
        return q.start({n: v.clone() for n, v in role("loc", local).items()}, sd)

    loss: Loss = elbo(num_particles if q.random else None, kl=kl, mean=True)
    reads: dict[str, Program] = {"guide": q}
    if is_chosen(sampling, reason_against(net, chosen, prior)):
        reads["model"] = model
        loss = Activations(net, likelihood, num_particles).negative_elbo(q, weights, kl)
    descend = make_descent(loss, q.names, lr, steps)

    def follow(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Update the learned prior towards the client's posterior by a gradient step.

        The gradient is plain or natural; this is line 9 of algorithm 1.
        """
        mean, variance = q.moments(received, local, data)
        loc, width = {}, {}
        for n, m in role("loc", local).items():
            nu = log_scale(local, n)
            if natural:
                loc[n], width[n] = step_to(m, nu, mean[n], variance[n], rate)
            else:
                speed = (rate * kl / data.size).reshape(-1, *(1 for _ in net.shapes[n]))
                # Steps of `speed`, [C, 1, ...], overshoot where the variance is smaller.
                slopes = gradient(m, nu.maximum(speed.log() / 2), mean[n], variance[n])
                loc[n], width[n] = (v - speed * g for v, g in zip((m, nu), slopes, strict=True))
        return theta(loc, width)

    def bound(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Return the prior's parameters, with its standard deviations bounded below."""
        return theta(role("loc", local), role("log_scale", local))

    def spreads(server: Tensors, message: Tensors) -> Tensors:
        """Return the clients' means, and their standard deviations or second moments, to aggregate.

        Second moments are taken about the server's m, for numerical precision.
        """
        width = {n: (power * v).exp() for n, v in role("log_scale", message).items()}
        if average == "moments":
            old = role("loc", server)
            width = {n: v + (message[f"loc/{n}"] - old[n]).square() for n, v in width.items()}
        return under("loc", role("loc", message)) | under("log_scale", width)

    def prior_of(server: Tensors, aggregated: Tensors) -> Tensors:
        """Compute the prior's mean m and log standard deviation nu from aggregated moments."""
        loc, width = role("loc", aggregated), role("log_scale", aggregated)
        if average == "moments":
            old = role("loc", server)
            width = {n: v - (loc[n] - old[n]).square() for n, v in width.items()}
        return under("loc", loc) | under(
            "log_scale", {n: v.log() / power for n, v in width.items()}
        )

    combine = get_rule(aggregation)

    def robust_moments(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Aggregate the clients' means robustly, then their second moments about the new mean.

        So it needs all messages.
        """
        even = torch.ones_like(cohort.size)
        loc = combine(role("loc", message), even, role("loc", server))
        about = under("loc", loc)
        wide = role("log_scale", spreads(about, message))
        old = role("log_scale", spreads(server, server))
        return server | prior_of(about, about | under("log_scale", combine(wide, even, old)))

    pooled: Aggregate = Aggregator({"*": uniform}, rule=aggregation)  # line 10
    if average == "moments" and aggregation != "mean":
        pooled = robust_moments
    elif average != "mnu":
        pooled = Aggregator(
            {"loc/*": uniform, "log_scale/*": uniform},
            server_step=lambda server, aggregated: server | prior_of(server, aggregated),
            rule=aggregation,
            transform=spreads,
        )

    def ahead(
        model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the loss [C] of the client's posterior after k gradient steps from the prior."""
        reached = descend(model, guide, received, local | posterior(local), data)
        return loss(model, guide, received, reached, data)

    def start(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Initialize the parameters of the client's posterior with those of the learned prior."""
        return posterior(local)

    begin = Phase((start,))
    sent = "loc/* log_scale/*" if q.random else "loc/*"  # by the clients
    phases: tuple[Phase, ...]
    if meta_grad == "kl":
        infer = GradientStep(q.names, sgd(lr), loss, steps)  # line 8; `follow` is line 9
        phases = (begin, Phase((infer, follow), epochs, batch))
    else:
        phases = (Phase((GradientStep(sent, sgd(rate), ahead), bound), epochs, batch),)
    tune = Phase((GradientStep(q.names, sgd(lr), loss, tune_steps),), fine_tune, batch)
    return Method(
        name="fedabml",
        init=init,
        model=model,
        guide=q,
        phases=phases,
        aggregate=pooled,
        adapt=(begin, tune) if fine_tune else (),
        views={
            "personal": lambda _, local: posterior(local) | local,
            "global": lambda received, local: local | received | posterior(received),
        },
        metadata=Metadata(normals("loc", "log_scale", torch.exp) if q.random else {}, reads=reads),
    )


def gradient(m: Tensor, nu: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of KL[q || p] for the mean and log standard deviation of a normal p.

    Each is [C, *p].

    This is line 9 of algorithm 1.
    """
    s2, gap = (2 * nu).exp(), mean - m
    return -gap / s2, 1 - (variance + gap.square()) / s2


def step_to(
    m: Tensor, nu: Tensor, mean: Tensor, variance: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Move a normal prior's first two moments a fraction of the way to the posterior's moments.

    This is a natural gradient step on KL[q || p] in the mean parameters of the normal (Amari,
    "Natural Gradient Works Efficiently in Learning", 1998): a variance stays positive at any
    share, and a share of 1 ends at the posterior.

    Args:
        m: prior mean.
        nu: logarithm of the prior's standard deviation.
        mean: posterior mean.
        variance: posterior variance.
        share: of the way, 0 to 1.

    Returns:
        New m and nu.
    """
    gap = mean - m
    s2 = (1 - share) * (2 * nu).exp() + share * (variance + (1 - share) * gap.square())
    return m + share * gap, s2.log() / 2
