"""FOLA: federated online Laplace approximation; the posterior is the next round's prior.

Liu, Jiang, Zheng, Chen, Qi, Huang and Shao, "A Bayesian Federated Learning Framework with Online
Laplace Approximation", 2021 (IEEE TPAMI 2023).

    p(w)        = q_0(w) = Normal(m0, S0)            S0 diagonal
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Normal(m, P^-1), diagonal or full   the server's, and the next prior

    client   w_j = SGD from m on the mean over rows of
                   -log p(D_j | w) + strength / 2 (w - m)'P(w - m)
             P_j = P + F_j,   F_j the Fisher information of its rows at w_j
    server   P   = sum_j n_j P_j / sum_j n_j
             m   = P^-1 sum_j n_j P_j w_j / sum_j n_j

The server's is the maximum of the product of the clients' normals to the powers n_j / n. Each round
thus adds the information of a mean client. In a normal linear model with J clients of one size q is
the exact posterior after J rounds, and from then on it is too narrow, as rows count again: stop
there, or take a smaller `strength` for what is learned on, as the authors' code does with 1 / t.
With `together` clients count in full and what they had of the prior once: q is the exact posterior
after one round, and J times as narrow further on as it would be.

Use it where rounds are few and a normal posterior of one model is wanted. It assumes curvature at
the optimum, and as many rounds as there are clients: from then on it is too sure.

Departures from the paper, of which the abstract and the authors' code could be read: their code
adds up squares of mean gradients of minibatches along the way for F_j, here it is the expected
information at w_j. Its prior has no precision, and it has pruning. Here the prior's pull is a
proximal step, for which no precision is too high, after each step of SGD.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator

from pyrofl.arguments import Count, NotNegative, Positive, ShareBelowOne, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.aggregator import Aggregator, WeightedSum, by_size, uniform
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.method import Method, Phase, as_received
from pyrofl.inference.definition.programs import Likelihood, Prior
from pyrofl.models import guides
from pyrofl.models.fisher import STANDARD
from pyrofl.models.likelihoods import categorical
from pyrofl.models.shared.laplace import LaplaceCore
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

SEARCH_GRID = {"lr": (0.003, 0.01, 0.03, 0.1), "strength": (0.3, 1.0, 3.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    strength: NotNegative = 1.0,
    multiply: bool = False,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: NotNegative = 0.01,
    momentum: ShareBelowOne = 0.9,
    clip: Positive | None = 10.0,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the FOLA method (federated online Laplace approximation).

    Args:
        net: the network; all its parameters are shared and Bayesian.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters before round one; independent normals, such as
            dist.Normal(0.0, 1.0).
        guide: `mean_field` for diagonal precisions, the paper's, or `full_covariance`.
        strength: of the prior while clients train; 1 is Bayes.
        multiply: multiply what clients learned, instead of the mean of it.
        epochs: local epochs.
        batch: rows in a step, and of what F_j is added up from; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        clip: largest norm of a gradient, that of the authors' code.
        aggregation: of P_j and P_j w_j, as in `fedavg.build`.

    Raises:
        ValueError: if the prior is not normal, the guide another one, or a full covariance too big.
    """
    core = LaplaceCore(net, likelihood, prior, guide)

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the server's posterior at a random draw, and mark that no round has run."""
        return core.init(generator, clients) | {"begun": torch.zeros(())}

    def prior_of(q: Tensors) -> Tensors:
        """Return mean and precision [C, ...] of the round's prior: the server's posterior.

        Before round one the mean is that of the method's prior.
        """
        first, w = core.layout.each("mean"), flatten_clients(role("w", q))
        begun = q["begun"][:, None] > 0
        return {"mean": torch.where(begun, w, first.to(w)), "precision": core.precision(q)}

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Copy the received prior to the client's local tensors."""
        return under("prior", prior_of(received))

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's posterior from the received prior and the Fisher information."""
        precision = local["prior/precision"] + local["information"]
        factor = core.factor(precision, flatten_clients(role("w", local)))
        return factor | core.guide_parameters(*core.normals.moments(factor))

    def changes(server: Tensors, message: Tensors) -> Tensors:
        """Return the client's likelihood factor: its posterior divided by the prior."""
        prior = prior_of({n: v[None] for n, v in server.items()})
        old = core.factor(prior["precision"], prior["mean"])
        return {n: message[n] - v for n, v in old.items() if n in message}

    def next_prior(server: Tensors, pooled: Tensors) -> Tensors:
        """Return guide parameters of the new global posterior, the next round's prior."""
        if multiply:
            prior = prior_of({n: v[None] for n, v in server.items()})
            old = core.factor(prior["precision"], prior["mean"])
            pooled = {n: v[0] + pooled[n] for n, v in old.items()}
        return core.posterior(pooled) | {"begun": torch.ones_like(server["begun"])}

    pooling = Aggregator({"*": by_size}, next_prior, aggregation)
    if multiply:
        pooling = replace(pooling, weights={"*": WeightedSum(uniform)}, transform=changes)
    phases = core.training_phases(epochs, batch, lr, momentum, strength, clip)
    return Method(
        name="fola",
        init=init,
        model=core.model,
        guide=core.q,
        phases=(Phase((begin,)), *phases, Phase((settle,))),
        upload=core.upload,
        aggregate=pooling,
        views={"global": as_received},
        metadata=core.metadata,
    )
