"""FedPer: the network's lower layers (base) are shared; each client trains its own head.

Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers", 2019.

    p(b), p(h_j)     flat
    p(y | x, b, h_j) = Categorical(logits=head(base(x; b); h_j))
    q                = Delta(b_j), Delta(h_j)

    client   b_j, h_j = SGD from b and its last h_j, together, on the mean loss per row
    server   b        = sum_j n_j b_j / sum_j n_j

With an empty head this is FedAvg, with an empty base Local. Departures from the paper: heads start
at one common draw.

Use it where rows look alike everywhere, but clients label them in ways of their own. It assumes
that one representation suits all; heads stay at the clients, so new clients have to train one.
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
    """Build the FedPer method (shared base, personal heads).

    Args:
        net: the network.
        head: patterns of the names that are personal; default the network's head.
        training: as in `fedavg.build`; `fine_tune` trains both parts.

    Raises:
        ValueError: if no parameter matches `head`.
    """
    method = make_personal(fedavg.build(net, **training), head_and_base_patterns(net, head)[0])
    return replace(method, name="fedper")
