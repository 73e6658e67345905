"""Fisher: average of the clients' models, weighted by each parameter's Fisher information.

Matena and Raffel, "Merging Models with Fisher-Weighted Averaging", NeurIPS 2022, across clients, as
in one-shot federated learning by Laplace's approximation.

    p(w)        = Normal(m0, S0)                  S0 diagonal
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Normal, diagonal or full

    client   w_j = SGD from the mean of q on the mean loss per row
             F_j = sum_i E_y[g g'],  g = grad of log p(y | x_i, w) at w_j
    server   q   = p(w) prod_j exp(-(w - w_j)'F_j(w - w_j) / 2), over the clients that reported:
             precision  S0^-1 + sum_j F_j
             mean       its inverse times  S0^-1 m0 + sum_j F_j w_j

Where the model is linear and normal and w_j the optimum, q is the exact posterior after one round,
with all parameters against each other (`full_covariance`). One round is what merging is about: it
contains what no average of the w_j does: each client's information on each parameter. After more
rounds clients start from the mean and q is computed again, from the rows of those that reported
alone; so nothing is counted twice.

Use it where there is one round and no second: each parameter is weighed by what a client knows of
it. It assumes that clients end near an optimum, and that a normal fits there.

Of the paper's text nothing could be read here; the aggregation is its well-known closed form.
Departures from the paper: the prior, which keeps parameters without information where
they are likely to be; every row counts the same, with no weights of clients except F_j. The
expectation over y is exact (see `shared.laplace`), not sampled. FedLPA's blocks by layer are not
here: a sum over clients of Kronecker products is none.
"""

from __future__ import annotations

from pyrofl.arguments import Count, NotNegative, ShareBelowOne, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.aggregation.aggregator import Aggregator, WeightedSum, uniform
from pyrofl.inference.aggregation.averages import Combine
from pyrofl.inference.method import Method, Phase, as_received
from pyrofl.inference.programs import Likelihood, Prior
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import fixed
from pyrofl.models.shared.laplace import Laplace
from pyrofl.models.shared.vectors import flattened
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role

STANDARD = fixed()  # Normal(0, 1)


TUNE_OVER = {"lr": (0.003, 0.01, 0.03, 0.1), "momentum": (0.0, 0.9), "epochs": (2, 5)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = STANDARD,
    guide: guides.Family = guides.mean_field,
    epochs: Whole = 5,
    batch: Count | None = 10,
    lr: NotNegative = 0.01,
    momentum: ShareBelowOne = 0.9,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the Fisher merging method (Fisher-weighted averaging of models).

    Args:
        net: the network; all its parameters are shared and Bayesian.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; independent normals, such as dist.Normal(0.0, 1.0).
        guide: `mean_field` for the diagonal of F_j, `full_covariance` for all of it, with a few
            hundred parameters.
        epochs: local epochs.
        batch: rows in a step, and of what F_j is added up from, which takes memory for the same
            number of slopes; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        aggregation: of factors; other than "mean" it is their number times the median or the like.

    Raises:
        ValueError: if the prior is not normal, the guide another one, or a full covariance too big.
    """
    core = Laplace(net, likelihood, prior, guide)

    def times_prior(factor: Tensors) -> Tensors:
        """Return the natural parameters of a normal factor multiplied by the prior."""
        return {n: core.factor_of_prior[n].to(v) + v for n, v in factor.items()}

    def settle(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's posterior, and the normal approximation of its likelihood."""
        factor = core.factor(local["information"], flattened(role("w", local)))
        return factor | core.stated(*core.normals.moments(times_prior(factor)))

    def product(server: Tensors, pooled: Tensors) -> Tensors:
        """Return the server's posterior: the prior times the aggregated factors."""
        return core.posterior(times_prior(pooled))

    return Method(
        name="fisher",
        init=core.init,
        model=core.model,
        guide=core.q,
        phases=(*core.training(epochs, batch, lr, momentum), Phase((settle,))),
        upload=core.upload,
        aggregate=Aggregator({"*": WeightedSum(uniform)}, product, aggregation),
        views={"global": as_received},
        metadata=core.metadata,
    )
