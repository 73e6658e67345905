"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019.

    p(w)        flat
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Delta(w_j)

    client   w_j = SGD from w on the mean loss per row
    server   v   = beta v + (w - sum_j n_j w_j / sum_j n_j),   w = w - lr v

The averaging form v = beta v + (1 - beta) (...) is this one with server_lr = 1 - beta; beta = 0
with server_lr = 1 is FedAvg. Departures from the paper: server_lr, which it leaves at 1.

Use it where few clients report or labels are skewed, so that FedAvg's model swings from round to
round. It assumes that one model suits all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from pyrofl.arguments import NotNegative, ShareBelowOne, checked
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.optim import sgd
from pyrofl.models import fedavg
from pyrofl.models.fedopt import with_server_optimizer
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "server_lr": (0.3, 1.0), "server_momentum": (0.5, 0.9)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    server_lr: NotNegative = 1.0,
    server_momentum: ShareBelowOne = 0.9,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the FedAvgM method (federated averaging with server momentum).

    Args:
        net: the network; all its parameters are shared.
        server_lr: learning rate of the server on the clients' mean change.
        server_momentum: beta; what the server remembers lies under "server/optim".
        training: of the clients, as of `fedavg.build`.
    """
    method = with_server_optimizer(fedavg.build(net, **training), sgd(server_lr, server_momentum))
    return replace(method, name="fedavgm")
