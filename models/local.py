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

from torch import Generator

from pyrofl.data import Who
from pyrofl.inference.method import Method, as_trained
from pyrofl.models import fedavg, guides
from pyrofl.models.likelihoods import Likelihood, categorical
from pyrofl.models.priors import Prior, flat
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, spread_out


def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = flat,
    guide: guides.Family = guides.delta,
    scale: float = 0.05,
    draws: int = 5,
    epochs: int = 5,
    batch: int | None = 10,
    lr: float = 0.01,
    momentum: float = 0.9,
) -> Method:
    """Build training without federation; every client trains in every round.

    Args:
        net: the network; all its parameters are private.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; with the delta guide anything but `flat` gives MAP.
        guide: family of q(w_j).
        scale: standard deviation of q(w_j) before round one, if it has any.
        draws: Monte Carlo samples of every loss, if q(w_j) is random.
        epochs: epochs in a round.
        batch: rows in a step; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.

    Raises:
        ValueError: if a number is out of its range.
    """
    together = fedavg.build(
        net,
        likelihood=likelihood,
        prior=prior,
        guide=guide,
        scale=scale,
        draws=draws,
        epochs=epochs,
        batch=batch,
        lr=lr,
        momentum=momentum,
    )

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
