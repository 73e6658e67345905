"""LG-FedAvg: local representations with a shared head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov and Morency, "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", 2020.

    p(b_j), p(h)     flat
    p(y | x, b_j, h) = Categorical(logits=head(base(x; b_j); h))
    q                = Delta(b_j), Delta(h_j)

    client   b_j, h_j = SGD from its last b_j and h, together, on the mean loss per row
    server   h        = sum_j n_j h_j / sum_j n_j

FedPer with the parts exchanged. Departures from the paper: no auxiliary losses on the
representation (they are optional there); its experiments start from a trained FedAvg model, which
`federate(server=...)` does for the head; new clients train, where the paper averages the
predictions of all bases.

Use it where rows look different at each client, as from other sensors, and labels mean the same. It
assumes that clients can learn a representation alone; bases stay at home.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from pyrofl.inference.definition.method import Method
from pyrofl.models import fedavg
from pyrofl.models.shared.base_and_head import head_and_base_patterns, make_personal
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "momentum": (0.0, 0.9)}


@rebuildable
def build(
    net: Network,
    *,
    head: str | None = None,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the LG-FedAvg method (local bases, shared head).

    Args:
        net: the network.
        head: patterns of the names that are shared; default the network's head.
        training: as in `fedavg.build`; `fine_tune` trains both parts.

    Raises:
        ValueError: if no parameter matches `head`.
    """
    method = make_personal(fedavg.build(net, **training), head_and_base_patterns(net, head)[1])
    return replace(method, name="lgfedavg")
