"""Local: every client trains alone; nothing travels. What personalisation must beat.

    p(w_j)        flat
    p(y | x, w_j) = Categorical(logits=net(x; w_j))
    q(w_j)        = Delta(w_j)

    client   w_j = SGD from its last w_j on the mean loss per row
    server   nothing

All clients start from the same random network, as in the federated methods.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from torch import Generator

from pyrofl.data import Who
from pyrofl.inference.method import Method, as_trained
from pyrofl.models import fedavg
from pyrofl.models.priors import Prior, flat
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, spread_out


def build(net: Network, *, prior: Prior = flat, **training: Unpack[fedavg.Training]) -> Method:
    """Build training without federation; every client trains in every round.

    Args:
        net: the network; all its parameters are private.
        prior: on the parameters; with the delta guide anything but `flat` gives MAP.
        training: as in `fedavg.build`.

    Raises:
        ValueError: if a number is out of its range.
    """
    together = fedavg.build(net, prior=prior, **training)

    def init(generator: Generator, clients: int) -> Tensors:
        return {}

    def join(received: Tensors, who: Who, generator: Generator) -> Tensors:
        return spread_out(together.init(generator, len(who.ids)), len(who.ids))

    def merge(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        return server

    return replace(
        together,
        init=init,
        join=join,
        merge=merge,
        views={"personal": as_trained},
        all_train=True,
    )
