"""pFedMe: personalized models with Moreau envelopes around a global model.

Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.

    p(theta_j | w_j)  = Normal(w_j, I / (lambda n_j))    the term lambda/2 ||theta_j - w_j||^2
    p(y | x, theta_j) = Categorical(logits=net(x; theta_j))
    q(theta_j)        = Delta(theta_j)                   so each client finds its MAP

    client   w_j = w, and on every minibatch
             theta_j -= lr (g(theta_j) + lambda (theta_j - w_j))   K times
             w_j     -= lr_center lambda (w_j - theta_j)
    server   w = (1 - beta) w + beta mean_j w_j

Ditto whose center follows: the step on w_j is one down the same loss, of which only the prior
depends on w_j. With theta_j from w_j in every round it is FedABML with a delta guide.

Use it where personal models are to stay near a common one: lambda controls how near. It assumes
that they scatter normally around it; inner steps multiply the work.

Departures from the paper: theta_j starts from the client's last theta_j, as in common code; the
algorithm leaves open where the inner problem starts. The inner steps have FedAvg's momentum, which
0 turns off. lambda, lr and lr_center were chosen on handwritten digits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import pyro.distributions as dist

from pyrofl.arguments import Count, NotNegative, Positive, checked
from pyrofl.inference.definition.aggregator import Aggregator, damped, uniform
from pyrofl.inference.definition.elbo import Elbo, TransformedLoss
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import (
    GradientStep,
    Method,
    as_received,
    phase_and_step,
    return_received,
)
from pyrofl.inference.definition.optim import sgd
from pyrofl.models import fedavg
from pyrofl.models.priors import PriorFamily, proximal
from pyrofl.models.shared.personal_copies import as_personal, start_own
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

SEARCH_GRID = {"lr": (0.01, 0.05, 0.2), "strength": (1.0, 5.0, 15.0), "lr_center": (0.05, 0.2, 0.5)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    strength: Positive = 5.0,
    prior: PriorFamily = dist.Normal,
    steps: Count = 5,
    lr_center: NotNegative = 0.2,
    beta: Positive = 1.0,
    **training: Unpack[fedavg.CenteredTraining],
) -> Method:
    """Build pFedMe (personalized Moreau envelopes); every client trains in every round.

    As in the paper, only some of the trained clients report.

    Args:
        net: the network; all its parameters are shared, and personal a second time.
        strength: lambda, of the pull between theta_j and w_j, per datum. `lr * strength` above 1
            makes theta_j swing.
        prior: location-scale family of p(theta_j | w_j), such as dist.Laplace; see `pyrofl.priors`.
        steps: K, on theta_j for each step on w_j.
        lr_center: eta, learning rate of w_j.
        beta: how far the server goes to the mean; beyond 1 it overshoots, as the paper tries. In
            pFedVEM `beta` is the opposite, the fraction of its old state that the server keeps.
        training: of theta_j, as in `fedavg.build`, but unless given lr is 0.05 and batch 50;
            `fine_tune` epochs are of both steps.
    """
    settings: fedavg.CenteredTraining = {"lr": 0.05, "batch": 50, **training}
    base = fedavg.build(net, prior=proximal(strength, prior), **settings)
    train, step = phase_and_step(base)
    assert isinstance(step.loss, Elbo)
    whole, pull = (
        TransformedLoss(replace(step.loss, likelihood=rows), as_personal, return_received)
        for rows in (True, False)
    )
    moves = (
        replace(step, names="own/*", loss=whole, num_steps=steps),
        GradientStep(step.names, sgd(lr_center), pull),
    )

    return replace(
        base,
        name="pfedme",
        init_client=start_own,
        phases=(replace(train, updates=moves),),
        aggregate=damped(
            Aggregator({"*": uniform}, rule=training.get("aggregation", "mean")), 1 - beta
        ),
        adapt=tuple(replace(phase, updates=moves) for phase in base.adapt),
        views={"personal": as_personal, "global": as_received},
        metadata=Metadata(train_all_clients=True),
    )
