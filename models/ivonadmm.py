"""IVON-ADMM: Bayesian duality over clients, with natural-gradient steps of normal posteriors.

Moellenhoff, Swaroop, Doshi-Velez and Khan, "Federated ADMM from Bayesian Duality", ICLR 2026.

    p(w)     = Normal(m0, S0^-1)                     S0 diagonal
    q(w)     = Normal(m, S^-1)                       the server's
    q_j(w)   = Normal(m_j, S_j^-1)                   with the dual variables v_j and V_j

    client   q_j = argmin E[-log p(D_j | w)] / temperature + v_j'm_j - V_j'E[w^2] / 2
                          + rho KL(q_j || q)
             by steps of IVON
             v_j = v_j + rho damping (S_j m_j - S m),   V_j = V_j + rho damping (S_j - S)
    server   S   = (1 - alpha) mean_j S_j + alpha (S0 + sum_j V_j)          alpha = 1 / (1 + rho J)
             S m = (1 - alpha) mean_j S_j m_j + alpha (S0 m0 + sum_j v_j)

exp(v_j'w - w'V_j w / 2) is the client's factor of the posterior, as in PVI: where clients and
server agree, all are the mean-field variational posterior. In PVI the server's is the product of
the prior and the factors alone; here the mean of the clients' posteriors keeps it stable.

Use it for networks, with clients that keep state: a step costs as much as one of Adam, and the
width of the posterior is learned, for the given temperature. It assumes mean-field normals.

Departures from the paper: J counts all clients; where some report, the means are theirs and the
sums contain the last value of the others. The learning rate is constant; the authors' falls by a
cosine over the rounds.
"""

from __future__ import annotations

import torch

from pyrofl.arguments import Count, Positive, PositiveShare, ShareBelowOne, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.aggregator import Aggregator, WeightedSum, uniform
from pyrofl.inference.definition.metadata import POSITIVE
from pyrofl.inference.definition.method import Method, Phase, as_received
from pyrofl.inference.definition.programs import Likelihood, Prior
from pyrofl.models import guides
from pyrofl.models.fisher import STANDARD
from pyrofl.models.likelihoods import categorical
from pyrofl.models.shared.client_factors import ClientFactors
from pyrofl.models.shared.gaussians import PARAMETERS
from pyrofl.models.shared.ivon import Ivon, independent_family
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

SEARCH_GRID = {
    "lr": (0.03, 0.1, 0.2),
    "rho": (0.2, 0.5, 1.0),
    "temperature": (0.03, 0.1, 1.0),
}


@rebuildable
@checked
def build(
    net: Network,
    *,
    rho: Positive = 0.5,
    damping: PositiveShare = 0.1,
    temperature: Positive = 0.1,
    init_scale: Positive = 0.5,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: Positive = 0.1,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.999,
) -> Method:
    """Build the IVON-ADMM method.

    Args:
        net: the network; all its parameters are shared and Bayesian.
        rho: step size of ADMM, the weight of the divergence from the server's posterior.
        damping: fraction of the change that a client applies to its dual variables.
        temperature: of the posterior: 1 is that of Bayes' rule, less makes it narrower.
        init_scale: standard deviation of q(w) before round one; see `pvi.build` for its unit.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; independent normals.
        guide: family of q(w), `mean_field`.
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr: learning rate of natural gradients.
        beta1: decay rate of the average gradient.
        beta2: decay rate of the curvature.

    Raises:
        ValueError: if the prior is not normal, or the guide is another one.
    """
    core = LaplaceCore(net, likelihood, prior, independent_family(guide))
    factors = ClientFactors(core, init_scale=init_scale)
    ivon = Ivon(core, lr, beta1, beta2, temperature * rho)

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Start at the received normal; the goal is it without the client's own factor."""
        q = factors.received(received)
        goal = {n: v - local[f"own/{n}"] / rho for n, v in q.items()}
        precision = q["precision"]
        return ivon.start(q["shift"] / precision, precision, precision, goal, data)

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Update the client's dual variables, and store its normal."""
        precision, q = ivon.precision(local, data), factors.received(received)
        own = core.factor(precision, local["mean"])
        change = {n: rho * damping * (v - q[n]) for n, v in own.items()}
        parameters = core.guide_parameters(local["mean"], precision.rsqrt())
        return own | parameters | factors.changed(local, change)

    def with_sums(server: Tensors, message: Tensors) -> Tensors:
        """Return the values to average, and those to sum over the reporting clients."""
        sent_parameters = {n: v for n, v in message.items() if n in PARAMETERS}
        if sent_parameters:
            sent_parameters["count"] = torch.ones_like(sent_parameters["shift"][:, 0])
        return message | under("sum", sent_parameters)

    def consensus(server: Tensors, pooled: Tensors) -> Tensors:
        """Return the server's state after the step of ADMM."""
        alpha, sent_parameters = 1 / (1 + rho / server["share"]), role("sum", pooled)
        q = factors.received({n: v[None] for n, v in server.items()})
        change = {
            n: rho * damping * (sent_parameters[n] - sent_parameters["count"] * v[0])
            for n, v in q.items()
        }
        total = {n: v + change[n] for n, v in role("server/total", server).items()}
        dual = {n: core.factor_of_prior[n].to(v) + v for n, v in total.items()}
        mixed = {n: torch.lerp(pooled[n], v, alpha.to(v)) for n, v in dual.items()}
        return server | core.posterior(mixed) | under("server/total", total)

    return Method(
        name="ivonadmm",
        init=factors.init,
        model=core.model,
        guide=core.q,
        phases=(Phase((begin,)), ivon.phase(epochs, batch), Phase((settle,))),
        init_client=factors.init_client,
        upload=core.upload,
        aggregate=Aggregator(
            {"sum/*": WeightedSum(uniform), "*": uniform}, consensus, transform=with_sums
        ),
        views={"global": as_received},
        metadata=factors.metadata.extend({"precision": POSITIVE}),
    )
