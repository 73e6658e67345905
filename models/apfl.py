"""APFL: every client mixes the common model with one of its own, and learns by how much.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020.

    p(w), p(v_j)          flat
    p(y | x, w, v_j)      = Categorical(logits=net(x; alpha_j v_j + (1 - alpha_j) w))
    q(w, v_j)             = Delta

    client   w_j     -= lr grad L_j(w_j)                                              as FedAvg
             v_j     -= lr alpha_j grad L_j(alpha_j v_j + (1 - alpha_j) w_j)
             alpha_j -= lr_alpha <v_j - w_j, grad L_j(alpha_j v_j + (1 - alpha_j) w_j)>
    server   w        = sum_j n_j w_j / sum_j n_j

alpha_j = 0 is FedAvg and alpha_j = 1 is Local.

Departures from the paper: on every minibatch w_j, v_j and alpha_j move in turn, each reading what
the others are by then; the server weighs clients by size, as FedAvg does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Generator

from pyrofl.data import Batch, Who
from pyrofl.inference.method import Method, Step, as_received
from pyrofl.inference.optim import sgd
from pyrofl.models import fedavg
from pyrofl.models.priors import Prior, flat
from pyrofl.models.shared.personal_copies import only_step, seen_by, start_own
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, like


def build(
    net: Network,
    *,
    alpha: float = 0.5,
    lr_alpha: float = 0.01,
    prior: Prior = flat,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build APFL.

    Args:
        net: the network; all its parameters are shared, and personal a second time.
        alpha: share of a client's own model before round one.
        lr_alpha: learning rate of the shares; 0 keeps them.
        prior: on the parameters; with the delta guide anything but `flat` gives MAP.
        training: of both models, as in `fedavg.build`, but lr is 0.03 unless given; `fine_tune`
            epochs are on v_j and alpha_j.

    Raises:
        ValueError: if a number is out of its range.
    """
    if not 0 <= alpha <= 1 or not lr_alpha >= 0:
        raise ValueError(f"alpha is {alpha}, lr_alpha {lr_alpha}; expected 0 to 1, and >= 0")
    settings: fedavg.Training = {"lr": 0.03, **training}
    base = fedavg.build(net, prior=prior, **settings)
    train, step = only_step(base)

    def join(received: Tensors, who: Who, generator: Generator) -> Tensors:
        return start_own(received, who, generator) | {"alpha": torch.full_like(who.size, alpha)}

    def mixed(received: Tensors, local: Tensors) -> Tensors:
        return local | {
            n: torch.lerp(local[n], local[f"own/{n}"], like(local["alpha"], local[n]))
            for n in received
        }

    def clamp(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        return {"alpha": local["alpha"].clamp(0, 1)}

    loss = seen_by(mixed, step.loss)
    mine = (
        replace(step, names="own/*", loss=loss),
        *((Step("alpha", sgd(lr_alpha), loss), clamp) if lr_alpha else ()),
    )
    return replace(
        base,
        join=join,
        phases=(replace(train, moves=(step, *mine)),),
        adapt=tuple(replace(phase, moves=mine) for phase in base.adapt),
        views={"personal": mixed, "global": as_received},
        statistics=lambda received, local, data: {"alpha": local["alpha"]},
    )
