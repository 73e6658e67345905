"""FedProx: FedAvg whose clients stay near the model they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020.

    p(w_j | w)    = Normal(w, I / (mu n_j))              the term mu/2 ||w_j - w||^2 (eq. 2)
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Delta(w_j)                           so each client finds its MAP

    client   w_j = SGD from w on the mean loss per row plus mu/2 ||w_j - w||^2
    server   w   = sum_j n_j w_j / sum_j n_j

mu = 0 is FedAvg. Departures from the paper: the server weighs clients by size, as FedAvg does,
where the paper draws them by size and averages evenly.
"""

from __future__ import annotations

import pyro.distributions as dist

from pyrofl.inference.method import Method
from pyrofl.models import fedavg, guides
from pyrofl.models.likelihoods import Likelihood, categorical
from pyrofl.models.priors import Family, proximal
from pyrofl.nets import Network


def build(
    net: Network,
    *,
    mu: float = 0.1,
    likelihood: Likelihood = categorical,
    prior: Family = dist.Normal,
    guide: guides.Family = guides.delta,
    scale: float = 0.05,
    draws: int = 5,
    epochs: int = 5,
    batch: int | None = 10,
    lr: float = 0.01,
    momentum: float = 0.9,
    fine_tune: int = 0,
) -> Method:
    """Build FedProx.

    Args:
        net: the network; all its parameters are shared.
        mu: strength of the proximal term, per datum: the prior's variance is 1 / (mu n_j).
        likelihood: of a row, given the network's outputs.
        prior: location-scale family that is centred at the received model.
        guide: family of q(w_j).
        scale: standard deviation of q(w_j) before round one, if it has any.
        draws: Monte Carlo samples of every loss, if q(w_j) is random.
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        fine_tune: local epochs before testing; 0 tests the global model alone.

    Raises:
        ValueError: if a number is out of its range.
    """
    return fedavg.build(
        net,
        likelihood=likelihood,
        prior=proximal(mu, prior),
        guide=guide,
        scale=scale,
        draws=draws,
        epochs=epochs,
        batch=batch,
        lr=lr,
        momentum=momentum,
        fine_tune=fine_tune,
    )
