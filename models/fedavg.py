"""FedAvg: one model for everybody, the average of what the clients make of it.

McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017.

    p(w)        flat
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Delta(w_j)                           so each client maximises its likelihood

    client   w_j = SGD from w on the mean loss per row
    server   w   = sum_j n_j w_j / sum_j n_j           over the clients that reported (algorithm 1)

With `fine_tune` the global model is trained on the client's own rows before it is tested there.
Departures from the paper: momentum, which 0 turns off.
"""

from __future__ import annotations

import pyro
from torch import Generator

from pyrofl.data import Batch, Who
from pyrofl.inference.elbo import Program, elbo
from pyrofl.inference.method import Method, Phase, Step, as_received, as_trained
from pyrofl.inference.optim import sgd
from pyrofl.inference.server import average
from pyrofl.models import guides
from pyrofl.models.likelihoods import Likelihood, categorical
from pyrofl.models.priors import Prior, flat
from pyrofl.nets import Network
from pyrofl.tensors import Tensors


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
    fine_tune: int = 0,
) -> Method:
    """Build FedAvg.

    Args:
        net: the network; all its parameters are shared.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; with the delta guide anything but `flat` gives MAP.
        guide: family of q(w); with `mean_field` the server averages variational parameters.
        scale: standard deviation of q(w) before round one, if it has any.
        draws: Monte Carlo samples of every loss, if q(w) is random.
        epochs: local epochs.
        batch: rows in a step; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        fine_tune: local epochs before testing; 0 tests the global model alone.

    Raises:
        ValueError: if a number is out of its range.
    """
    q = guide(net.shapes, scale=scale, loc="w", spread="spread")

    def init(generator: Generator, clients: int) -> Tensors:
        return q.start(net.init(generator))

    def merge(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        return server | average(message, who.size)

    step = Step(q.names, sgd(lr, momentum), elbo(draws if q.random else None, mean=True))
    return Method(
        init=init,
        model=supervised(net, likelihood, prior),
        guide=q.program,
        phases=(Phase((step,), epochs, batch),),
        merge=merge,
        adapt=(Phase((step,), fine_tune, batch),) if fine_tune else (),
        views={"global": as_received} | ({"personal": as_trained} if fine_tune else {}),
    )


def supervised(net: Network, likelihood: Likelihood, prior: Prior) -> Program:
    """Return the model in which all parameters of the network are latent, one set per client."""

    def model(received: Tensors, local: Tensors, data: Batch) -> None:
        with data.clients():
            w = {
                n: pyro.sample(n, prior(n, shape, received, local, data))
                for n, shape in net.shapes.items()
            }
            with data.rows():
                pyro.sample("y", likelihood(net(w, data.x), data.x), obs=data.y)

    return model
