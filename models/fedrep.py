"""FedRep: each client trains its local head first and then the shared base.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021.

    p(b), p(h_j)     flat
    p(y | x, b, h_j) = Categorical(logits=head(base(x; b); h_j))
    q                = Delta(b_j), Delta(h_j)

    client   h_j = SGD from its last h_j with b fixed        `head_epochs`
             b_j = SGD from b with h_j fixed                 `epochs`
    server   b   = sum_j n_j b_j / sum_j n_j

FedPer in turns. pFedVEM with a delta guide, a flat prior and heads in minibatches is this. With
`fine_tune` the head is fitted to the averaged base before a test, which is how a new client starts.

Use it where many clients have few rows each and share a representation: heads are fitted first,
then the base. It assumes that few features are common to all; heads stay at home.

Departures from the paper: bases count by size, where clients are equal in the paper; heads start at
one common draw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from pyrofl.arguments import Whole, checked
from pyrofl.inference.definition.method import Method
from pyrofl.models import fedavg
from pyrofl.models.shared.base_and_head import head_and_base_patterns, make_personal, train_only
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "momentum": (0.0, 0.9)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    head: str | None = None,
    head_epochs: Whole = 10,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the FedRep method (personal heads on a shared representation).

    Args:
        net: the network.
        head: patterns of the names that are personal; default the network's head.
        head_epochs: local epochs on the head, before those on the base.
        training: as in `fedavg.build`; `epochs` are those on the base, `fine_tune` those on the
            head before a test.

    Raises:
        ValueError: if `head` matches no parameter or all.
    """
    head_names, rest = head_and_base_patterns(net, head, requires_both=True)
    method = make_personal(fedavg.build(net, **training), head_names)
    (train,) = method.phases
    return replace(
        method,
        name="fedrep",
        phases=(train_only(train, head_names, head_epochs), train_only(train, rest)),
        adapt=tuple(train_only(phase, head_names) for phase in method.adapt),
    )
