"""Reptile: the server moves a fraction of the way to the clients' mean (meta-learning).

Nichol, Achiam and Schulman, "On First-Order Meta-Learning Algorithms", 2018.

    p(w)        flat
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Delta(w_j)

    client   w_j = SGD from w on the mean loss per row
    server   w   = w + server_lr (sum_j n_j w_j / sum_j n_j - w)
    test     w_j = SGD from w on the client's own rows

FedAvgM without momentum and with fine-tuning: server_lr = 1 is FedAvg. With `server_momentum` = 0.9
the server is MetaVD's.

Use it where clients are tuned before use and second derivatives cost too much. It assumes that a
common start is a few steps from every client's model.

Departures from the paper: clients are weighted by size, as in FedAvg. Local training is SGD, the
paper's is Adam.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from pyrofl.arguments import NotNegative, ShareBelowOne, checked
from pyrofl.inference.definition.method import Method
from pyrofl.models import fedavg, fedavgm
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "server_lr": (0.25, 0.5, 1.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    server_lr: NotNegative = 0.5,
    server_momentum: ShareBelowOne = 0.0,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the Reptile method (first-order meta-learning).

    Args:
        net: the network; all its parameters are shared.
        server_lr: share of the way from the old state to the clients' mean.
        server_momentum: of the server's steps.
        training: of the clients, as in `fedavg.build`, but unless given lr is 0.03 and there is
            one epoch of fine_tune.
    """
    settings: fedavg.Training = {"lr": 0.03, "fine_tune": 1, **training}
    method = fedavgm.build(net, server_lr=server_lr, server_momentum=server_momentum, **settings)
    return replace(method, name="reptile")
