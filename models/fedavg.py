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

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypedDict

import pyro
from torch import Generator, Tensor

from pyrofl.data import Batch, Who
from pyrofl.inference.elbo import Program, elbo
from pyrofl.inference.fast.row_space import with_few_rows
from pyrofl.inference.method import Method, Phase, Step, as_received, as_trained
from pyrofl.inference.optim import sgd
from pyrofl.inference.servers.averages import by_size
from pyrofl.inference.servers.robust import Combine, combining
from pyrofl.models import guides
from pyrofl.models.likelihoods import Likelihood, categorical
from pyrofl.models.priors import Prior, flat
from pyrofl.models.shared.schedules import decayed
from pyrofl.nets import Forward, Network
from pyrofl.tensors import Tensors


class LocalTraining(TypedDict, total=False):
    """What a method whose clients train as in FedAvg hands on to `build`, which explains it."""

    likelihood: Likelihood
    guide: guides.Family
    scale: float
    draws: int
    epochs: int | Callable[[Tensor], Tensor]
    batch: int | None
    lr: float
    momentum: float
    weight_decay: float
    decay: bool
    done: float | None
    fine_tune: int


class Training(LocalTraining, total=False):
    """The same where there is something to merge."""

    merge: str | Combine


def build(
    net: Network,
    *,
    likelihood: Likelihood = categorical,
    prior: Prior = flat,
    guide: guides.Family = guides.delta,
    scale: float = 0.05,
    draws: int = 5,
    epochs: int | Callable[[Tensor], Tensor] = 5,
    batch: int | None = 10,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    decay: bool = False,
    done: float | None = None,
    fine_tune: int = 0,
    merge: str | Combine = "mean",
) -> Method:
    """Build FedAvg.

    Args:
        net: the network; all its parameters are shared.
        likelihood: of a row, given the network's outputs.
        prior: on the parameters; with the delta guide anything but `flat` gives MAP.
        guide: family of q(w); with `mean_field` the server averages variational parameters.
        scale: standard deviation of q(w) before round one, if it has any.
        draws: Monte Carlo samples of every loss, if q(w) is random.
        epochs: local epochs, or ids [C] -> epochs [C] where clients have budgets of their own.
        batch: rows in a step; None takes all.
        lr: learning rate; the loss is a mean over the rows.
        momentum: of SGD, which starts afresh each round.
        weight_decay: of SGD, on the same scale: a normal prior of variance 1 / (weight_decay n_j).
        decay: train with a tenth of lr from 30% of the rounds on, a hundredth from 60% on (FedBE).
        done: share of the rounds that are over, for `decay`; None: it has not begun.
        fine_tune: local epochs before testing; 0 tests the global model alone.
        merge: how the server makes one model of the clients': "mean" is the paper's, "median",
            "trimmed:0.1", "krum:2" and "clip:1.0" bear bad messages, see `combining`.

    Raises:
        ValueError: if a number is out of its range.
    """
    q = guide(net.shapes, scale=scale, loc="w", spread="spread")
    combine = combining(merge)

    def init(generator: Generator, clients: int) -> Tensors:
        return q.start(net.init(generator))

    def update(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        return server | combine(message, who.size, server)

    optim = sgd(decayed(lr, done if decay else None), momentum, weight_decay=weight_decay)
    step = Step(q.names, optim, elbo(draws if q.random else None, mean=True))
    train, program = Phase((step,), epochs, batch), partial(supervised, net, likelihood, prior)
    model = program()
    if prior is flat and guide is guides.delta and not weight_decay:
        train = with_few_rows(train, net, "w", net.shapes, program, model, q.program)
    return Method(
        init=init,
        model=model,
        guide=q.program,
        phases=(train,),
        merge=update,
        fold=by_size if merge == "mean" else None,
        adapt=(replace(train, epochs=fine_tune),) if fine_tune else (),
        views={"global": as_received} | ({"personal": as_trained} if fine_tune else {}),
    )


def supervised(
    net: Network, likelihood: Likelihood, prior: Prior, forward: Forward | None = None
) -> Program:
    """Return the model in which all parameters of the network are latent, one set per client.

    Args:
        net: the network.
        likelihood: of a row, given its outputs.
        prior: on its parameters.
        forward: runs instead of the network.
    """
    run = forward or net

    def model(received: Tensors, local: Tensors, data: Batch) -> None:
        with data.clients():
            w = {
                n: pyro.sample(n, prior(n, shape, received, local, data))
                for n, shape in net.shapes.items()
            }
            with data.rows():
                pyro.sample("y", likelihood(run(w, data.x), data.x), obs=data.y)

    return model
