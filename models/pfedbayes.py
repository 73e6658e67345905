"""pFedBayes: personal posteriors with a KL penalty towards a global prior.

Zhang, Li, Li, Guo and Shao, "Personalized Federated Learning via Variational Bayesian Inference",
ICML 2022. Every weight is random:

    p(w_j | v)    = Normal(m, diag(softplus(rho))^2)          v = (m, rho), shared
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Normal(m_j, diag(softplus(rho_j))^2)      kept by the client

    client   v_j = v, and on every minibatch
             q_j by K steps of Adam on  E_q[-log p(D_j | w)] + zeta KL[q_j || p(. | v_j)]
             v_j by one such step on the divergence
    server   v = (1 - beta) v + beta mean_j v_j        of m and rho

pFedMe with distributions for points. On its own the step on v_j would end at q_j.

Use it where clients have few rows and a distribution over every weight improves predictions; its
intervals are too narrow. It assumes that clients' posteriors are normal, weight by weight, and near
the server's.

Departures from the paper: networks start by their layers' own rules. zeta weighs the divergence
against the likelihood of all rows of a client; the authors' code weighs it against a minibatch's
and divides by the number of steps in a round, which is the same where these are an epoch. Their
code draws the weights with a thousandth of q's standard deviation, that is hardly at random; here
q is drawn from as printed, unless `noise` is 0.001. The guide `delta` has no spread at all.
zeta and lr were chosen on handwritten digits; the paper has 10 and 0.001, for clients with many
more rows.
"""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus

from pyrofl.arguments import Count, NotNegative, Positive, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.aggregation import Aggregator, damped, uniform
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import TransformedLoss, elbo
from pyrofl.inference.definition.metadata import Metadata, normals
from pyrofl.inference.definition.method import (
    GradientStep,
    Method,
    Phase,
    as_received,
    return_received,
)
from pyrofl.inference.definition.optim import adam
from pyrofl.inference.definition.programs import Likelihood, Loss, Program, of_network
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import PriorFamily, as_event, as_families
from pyrofl.models.shared.activations import (
    Activations,
    Sampling,
    divergence,
    is_chosen,
    reason_against,
)
from pyrofl.models.shared.personal_copies import as_personal, start_own
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors

SEARCH_GRID = {"lr": (0.001, 0.003, 0.01, 0.03), "kl": (0.001, 0.01, 0.1, 1.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: PriorFamily = dist.Normal,
    guide: guides.Family | None = None,
    init_scale: Positive = 0.05,
    kl: Positive = 0.1,
    num_particles: Count = 2,
    sampling: Sampling = "weights",
    steps: Count = 5,
    epochs: Whole = 5,
    batch: Count | None = 50,
    lr: NotNegative = 0.01,
    noise: Positive = 1.0,
    beta: Positive = 1.0,
    fine_tune: Whole = 0,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build pFedBayes (personalized variational Bayes); every client trains in every round.

    That every client trains is as in the authors' code.

    Args:
        net: the network; all its parameters are random.
        likelihood: of a row, given the network's outputs.
        prior: location-scale family of p(w_j | v), at the moments of v; see `pyrofl.priors`.
        guide: family of q(w_j), and of what the server averages, instead of the guide below,
            which is `guides.mean_field`. Without spread the prior's standard deviation stays at
            `init_scale`: this is pFedMe by Adam.
        init_scale: standard deviation of q(w_j) and of the prior before round one.
        kl: zeta, the weight of the KL divergence; 1 is exact Bayes.
        num_particles: Monte Carlo samples of every loss.
        sampling: what a step on q_j draws: "weights", or "activations", the outputs of linear
            layers and convolutions for every row, so that gradients vary less; "auto" draws these
            where guide, prior and network permit it.
        steps: K, on q_j for each step on v_j.
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr: learning rate of Adam, which starts afresh each round, for both steps.
        noise: standard deviations of the draws that the likelihood sees, in those of q; the
            authors' code has 0.001. Other than 1 it needs a guide that starts at given moments.
        beta: how far the server goes to the mean.
        fine_tune: epochs of both steps before testing.
        aggregation: how the server makes one v of the clients', as in `fedavg.build`; all of them
            weigh the same.

    Raises:
        ValueError: if sampling is "activations", and the guide is not one of independent normals,
            the prior not normal, or the network without linear layers and convolutions.
    """
    chosen, families = guide or guides.mean_field, as_families(prior, net.shapes)

    def mean_field(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the weights w_j of each client from q(w_j), independent normals."""
        with batch.clients():
            for n, shape in net.shapes.items():
                m, sd = local[f"w/{n}"], softplus(local[f"spread/{n}"])
                pyro.sample(n, dist.Normal(m, sd).to_event(len(shape)))

    q = guides.build_guide(chosen, net.shapes, init_scale=init_scale, loc="w", spread="spread")
    if guide is None:
        q = replace(q, program=mean_field)

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the global distribution v around the network's random draw."""
        return q.start(net.init(generator))

    def weights(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Sample a client's weights from p(w_j | v_j), inside `data.clients()`."""
        mean, variance = q.moments(received, received, data)
        width = {
            n: v.sqrt() if q.random else torch.full_like(v, init_scale) for n, v in variance.items()
        }
        return {
            n: pyro.sample(n, as_event(families[n](mean[n], width[n]), len(shape)))
            for n, shape in net.shapes.items()
        }

    @of_network(net, likelihood)
    def model(received: Tensors, local: Tensors, data: Batch) -> None:
        """Define the Pyro model: prior around the global distribution, and likelihood.

        That is p(w_j | v_j) p(y | x, w_j).
        """
        with data.clients():
            w = weights(received, local, data)
            with data.rows():
                pyro.sample("y", likelihood(net(w, data.x), data.x), obs=data.y)

    samples = num_particles if q.random else None
    pull = replace(elbo(kl=kl, mean=True), likelihood=False)
    follow: Loss = TransformedLoss(pull, as_personal, return_received)

    def faint(
        model: Program, guide: Program, received: Tensors, local: Tensors, data: Batch
    ) -> Tensor:
        """Return the negative ELBO, with posterior noise in the likelihood scaled by `noise`."""
        mean, variance = q.moments(received, local, data)
        drawn = local | q.start(mean, {n: noise * v.sqrt() for n, v in variance.items()})
        fit = elbo(samples, kl=0.0, mean=True)(model, guide, received, drawn, data)
        return fit + pull(model, guide, received, local, data)

    infer: Loss = TransformedLoss(faint, as_personal, return_received)
    reads: dict[str, Program] = {"guide": q}
    if is_chosen(sampling, reason_against(net, chosen, prior)):
        outputs, reads["model"] = Activations(net, likelihood, num_particles), model
        follow = TransformedLoss(divergence(q, weights, kl), as_personal, return_received)
        infer = TransformedLoss(
            outputs.negative_elbo(q, weights, kl, noise), as_personal, return_received
        )
    elif noise == 1 or not q.random:
        infer = TransformedLoss(elbo(samples, kl, mean=True), as_personal, return_received)
    moves = (GradientStep("own/*", adam(lr), infer, steps), GradientStep(q.names, adam(lr), follow))
    return Method(
        name="pfedbayes",
        init=init,
        init_client=start_own,
        model=model,
        guide=q,
        phases=(Phase(moves, epochs, batch),),
        aggregate=damped(Aggregator({"*": uniform}, rule=aggregation), 1 - beta),
        adapt=(Phase(moves, fine_tune, batch),) if fine_tune else (),
        views={"personal": as_personal, "global": as_received},
        metadata=Metadata(
            normals("w", "spread", softplus) if chosen is guides.mean_field else {},
            train_all_clients=True,
            reads=reads,
        ),
    )
