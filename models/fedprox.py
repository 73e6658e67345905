"""FedProx: FedAvg with a proximal term in the clients' objective.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020.

    p(w_j | w)    = Normal(w, I / (mu n_j))              the term mu/2 ||w_j - w||^2 (eq. 2)
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Delta(w_j)                           so each client finds its MAP

    client   w_j = SGD from w on the mean loss per row plus mu/2 ||w_j - w||^2
    server   w   = sum_j n_j w_j / sum_j n_j

mu = 0 is FedAvg. Departures from the paper: the server weighs clients by size, as FedAvg does,
where the paper draws them by size and averages evenly.

Use it where some clients do more work than others, or rows are unlike, so that FedAvg drifts. It
assumes that one model suits all; mu has to be chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import pyro.distributions as dist

from pyrofl.arguments import NotNegative, checked
from pyrofl.inference.definition.method import Method
from pyrofl.models import fedavg
from pyrofl.models.priors import PriorFamily, proximal
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "mu": (0.01, 0.1, 1.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    mu: NotNegative = 0.1,
    prior: PriorFamily = dist.Normal,
    **training: Unpack[fedavg.CenteredTraining],
) -> Method:
    """Build the FedProx method (FedAvg with a proximal term).

    Args:
        net: the network; all its parameters are shared.
        mu: strength of the proximal term, per datum: the prior's variance is 1 / (mu n_j).
        prior: location-scale family that is centered at the received model, such as dist.Laplace;
            see `pyrofl.priors`.
        training: as in `fedavg.build`.
    """
    return replace(fedavg.build(net, prior=proximal(mu, prior), **training), name="fedprox")
