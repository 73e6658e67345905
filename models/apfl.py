"""APFL: each client mixes a global and a local model by a weight that it learns.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020.

    p(w), p(v_j)          flat
    p(y | x, w, v_j)      = Categorical(logits=net(x; alpha_j v_j + (1 - alpha_j) w))
    q(w, v_j)             = Delta

    client   once, on all rows, with w_j = w as received:
             alpha_j -= lr_alpha <v_j - w_j, grad L_j(alpha_j v_j + (1 - alpha_j) w_j)>
             clipped to [0, 1]; then on each minibatch:
             w_j     -= lr grad L_j(w_j)                                              as FedAvg
             v_j     -= lr grad L_j(alpha_j v_j + (1 - alpha_j) w_j)
    server   w        = sum_j n_j w_j / sum_j n_j

alpha_j = 0 is FedAvg and alpha_j = 1 is Local. alpha_j must suit the w that is tested: with w_j,
which has just been trained on the client's rows, v_j would seem of no use.

Use it where clients differ in how much they have in common: each learns how to mix a model of its
own with the common one. It assumes that clients keep state between rounds, and doubles their work.

Departures from the paper: grad is the gradient at the mixture, without the factor alpha_j of the
derivative by v_j: with it v_j would stand still at alpha_j = 0, and alpha_j stay there. alpha_j
moves first; in the authors' code after the first minibatch, on its rows. On every minibatch v_j
reads the w_j that has just moved. The server weighs clients by size, as FedAvg does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Generator

from pyrofl.arguments import NotNegative, Share, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.elbo import TransformedLoss
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import (
    GradientStep,
    Method,
    Phase,
    as_received,
    phase_and_step,
)
from pyrofl.inference.definition.optim import sgd
from pyrofl.models import fedavg
from pyrofl.models.shared.personal_copies import start_own
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, add_trailing_axes, role

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "alpha": (0.25, 0.5, 0.75)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    alpha: Share = 0.5,
    lr_alpha: NotNegative = 0.03,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the APFL method (adaptive personalized federated learning).

    Args:
        net: the network; all its parameters are shared, and personal a second time.
        alpha: share of a client's own model before round one.
        lr_alpha: learning rate of the shares, which take one step a round; 0 keeps them.
        training: of both models, as in `fedavg.build`, but lr is 0.03 unless given; `fine_tune`
            epochs are on v_j, after a step of alpha_j.
    """
    settings: fedavg.Training = {"lr": 0.03, **training}
    base = fedavg.build(net, **settings)
    train, step = phase_and_step(base)

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize a client's local model at the global one, and its mixing weight at `alpha`."""
        return start_own(received, cohort, generator) | {
            "alpha": torch.full_like(cohort.size, alpha)
        }

    def mixed(received: Tensors, local: Tensors) -> Tensors:
        """Return the client's mixture alpha_j v_j + (1 - alpha_j) w_j of local and global model."""
        return local | {
            n: torch.lerp(local[n], local[f"own/{n}"], add_trailing_axes(local["alpha"], local[n]))
            for n in received
        }

    def clamp(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Clamp the mixture weight alpha_j to the interval [0, 1]."""
        return {"alpha": local["alpha"].clamp(0, 1)}

    def at_mixture(received: Tensors, local: Tensors) -> Tensors:
        """Mix the local and global model, with unscaled gradients for the local parameters.

        The true derivative by v_j is alpha_j.
        """
        now, own = mixed(received, local), role("own", local)
        return now | {n: now[n].detach() + (own[n] - own[n].detach()) for n in received}

    weigh = Phase((GradientStep("alpha", sgd(lr_alpha), TransformedLoss(step.loss, mixed)), clamp))
    personal_step = replace(step, names="own/*", loss=TransformedLoss(step.loss, at_mixture))
    before = (weigh,) if lr_alpha else ()
    return replace(
        base,
        name="apfl",
        init_client=init_client,
        phases=(*before, replace(train, updates=(step, personal_step))),
        adapt=tuple(
            p for phase in base.adapt for p in (*before, replace(phase, updates=(personal_step,)))
        ),
        views={"personal": mixed, "global": as_received},
        metadata=Metadata(statistics=lambda received, local, data: {"alpha": local["alpha"]}),
    )
