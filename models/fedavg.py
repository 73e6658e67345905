"""FedAvg: one global model, the average of the models that clients train locally.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017.

    p(w)        flat
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Delta(w_j)                           so each client maximizes its likelihood

    client   w_j = SGD from w on the mean loss per row
    server   w   = sum_j n_j w_j / sum_j n_j           over the clients that reported (algorithm 1)

With `fine_tune` the global model is trained on the client's own rows before it is tested there.

Use it as the first baseline: where clients hold rows of the same kind it is hard to beat. It
assumes that one model suits all; after many local epochs on unlike rows it drifts.

Departures from the paper: momentum, which 0 turns off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict

import pyro
import pyro.distributions as dist
from torch import Generator, Tensor

from pyrofl.arguments import Count, NotNegative, Share, ShareBelowOne, Whole, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.aggregator import Aggregator, by_size
from pyrofl.inference.definition.averages import Combine
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import GradientStep, Method, Phase, as_received, as_trained
from pyrofl.inference.definition.optim import sgd
from pyrofl.inference.definition.programs import Likelihood, Prior, as_prior, flat, of_network
from pyrofl.models import guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.shared.schedules import decayed
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors


class SgdOptions(TypedDict, total=False):
    """Settings of local training by stochastic gradient descent."""

    likelihood: Likelihood
    guide: guides.Family | None
    init_scale: NotNegative
    num_particles: Count
    epochs: Whole | Callable[[Tensor], Tensor]
    batch: Count | None
    lr: NotNegative
    momentum: ShareBelowOne
    weight_decay: NotNegative
    decay: bool
    elapsed: Share | None
    fine_tune: Whole


class LocalTrainingOptions(SgdOptions, total=False):
    """Settings of local training as in FedAvg: with a prior, without an aggregation rule."""

    prior: Prior


class Training(LocalTrainingOptions, total=False):
    """Settings of FedAvg: local training, prior and aggregation rule."""

    aggregation: str | Combine


class CenteredTraining(SgdOptions, total=False):
    """Settings of local training for methods whose prior is centered at the received model."""

    aggregation: str | Combine


LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SEARCH_GRID = {"lr": LEARNING_RATES, "momentum": (0.0, 0.9)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = flat,
    guide: guides.Family | None = None,
    init_scale: NotNegative = 0.05,
    num_particles: Count = 5,
    epochs: Whole | Callable[[Tensor], Tensor] = 5,
    batch: Count | None = 10,
    lr: NotNegative = 0.01,
    momentum: ShareBelowOne = 0.9,
    weight_decay: NotNegative = 0.0,
    decay: bool = False,
    elapsed: Share | None = None,
    fine_tune: Whole = 0,
    aggregation: str | Combine = "mean",
) -> Method:
    """Build the FedAvg method (federated averaging).

    Args:
        net: the network; all its parameters are shared.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters: a distribution such as dist.Normal(0.0, 1.0), a family or a
            function, see `pyrofl.priors`. With the delta guide anything but `flat` gives MAP. Every
            client adds it to its own loss, so it counts once per client in the average.
        guide: family of q(w) that replaces the guide below, which is `guides.delta`; with
            `mean_field` the server averages variational parameters.
        init_scale: standard deviation of q(w) before round one, if it has any.
        num_particles: Monte Carlo samples of every loss, if q(w) is random.
        epochs: local epochs, or ids [C] -> epochs [C] where clients have budgets of their own.
        batch: rows in a step; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        weight_decay: of SGD, on the same scale: a normal prior of variance 1 / (weight_decay n_j).
        decay: train with a tenth of lr from 30% of the rounds on, a hundredth from 60% on (FedBE).
        elapsed: share of the rounds that are over, for `decay`; None: it has not begun.
        fine_tune: local epochs before testing; 0 tests the global model alone.
        aggregation: how the server makes one model of the clients': "mean" is the paper's,
            "median", "trimmed:0.1", "krum:2" and "clip:1.0" bear bad messages, see `get_rule`.
    """
    shapes = net.shapes
    prior_of = as_prior(prior, shapes)

    @of_network(net, likelihood, prior_of)
    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Sample the parameters w from their prior, then the responses of all rows."""
        with batch.clients():
            w = {n: pyro.sample(n, prior_of(n, shapes[n], received, local, batch)) for n in shapes}
            with batch.rows():
                pyro.sample("y", likelihood(net(w, batch.x), batch.x), obs=batch.y)

    def points(received: Tensors, local: Tensors, batch: Batch) -> None:
        """Set the parameters to the point w: maximum likelihood, or MAP with a prior."""
        with batch.clients():
            for n, shape in shapes.items():
                pyro.sample(n, dist.Delta(local[f"w/{n}"], event_dim=len(shape)))

    q = guides.build_guide(
        guide or guides.delta, shapes, init_scale=init_scale, loc="w", spread="spread"
    )
    if guide is None:
        q = replace(q, program=points)

    def init(generator: Generator, clients: int) -> Tensors:
        """Return the server's initial state: parameters drawn by the network's initialization."""
        return q.start(net.init(generator))

    optim = sgd(decayed(lr, elapsed if decay else None), momentum, weight_decay=weight_decay)
    step = GradientStep(q.names, optim, elbo(num_particles if q.random else None, mean=True))
    train = Phase((step,), epochs, batch)
    return Method(
        name="fedavg",
        init=init,
        model=model,
        guide=q,
        phases=(train,),
        aggregate=Aggregator({"*": by_size}, rule=aggregation),
        adapt=(replace(train, epochs=fine_tune),) if fine_tune else (),
        views={"global": as_received} | ({"personal": as_trained} if fine_tune else {}),
    )
