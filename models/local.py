"""Local: training without federation, the baseline for personalized methods.

    p(w_j)        flat
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Delta(w_j)

    client   w_j = SGD from its last w_j on the mean loss per row
    server   nothing

All clients start from the same random network, as in the federated methods. This is FedAvg with
every parameter kept at the clients.

Use it as what federation must beat: clients with many rows often do best alone. It assumes nothing
of the others, and shares nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import Method
from pyrofl.models import fedavg
from pyrofl.models.shared.base_and_head import make_personal
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "momentum": (0.0, 0.9)}


@rebuildable
def build(net: Network, **training: Unpack[fedavg.LocalTrainingOptions]) -> Method:
    """Build the local method: each client trains its own network without federation.

    Args:
        net: the network; all its parameters are private.
        training: as in `fedavg.build`, without `aggregation`.

    Raises:
        ValueError: if there is `aggregation`.
    """
    if "aggregation" in training:
        raise ValueError(
            f"aggregation is {dict(training)['aggregation']!r}; expected none, as nothing travels"
        )
    method = make_personal(fedavg.build(net, **training), "*")
    return replace(method, name="local", metadata=Metadata(train_all_clients=True))
