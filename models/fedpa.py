"""FedPA: clients send updates that estimate the mean of the global posterior.

Al-Shedivat, Gillenwater, Xing and Rostamizadeh, "Federated Learning via Posterior Averaging: A New
Perspective and Practical Algorithms", ICLR 2021.

    p(w)        flat
    p(y | x, w) = Categorical(logits=net(x; w))
    p(w | D)    ~ prod_j Normal(w; mu_j, Sigma_j)        each factor from samples of SGD

    client   x_1 ... x_l  = means of the iterates of one epoch of SGD each, after a burn-in
             delta_j = Sigma_j^-1 (w - mu_j),  mu_j = mean x
             Sigma_j = rho_l I + (1 - rho_l) cov x,  rho_l = 1 / (1 + (l - 1) rho)
    server   w = w - server_lr sum_j n_j delta_j / sum_j n_j, with momentum

One sample is FedAvg with averaged iterates. A message is w - delta_j, what FedAvg's server would
make of it: here too the server takes what clients send for models, and goes to their mean.

Use it where clients make many local steps and one model is wanted: clients report where their
posteriors lie, not where SGD stopped. It assumes that samples of SGD stand for a client's
posterior.

Departures from the paper: Sigma_j^-1 by Woodbury's identity instead of a recursion, at the same
cost of l^2 d. Clients count by size, as in the authors' code; their momentum starts afresh with
every sample.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from pyrofl.arguments import Count, NotNegative, ShareBelowOne, checked
from pyrofl.data import Batch
from pyrofl.inference.definition.method import Method, Phase, phase_and_step
from pyrofl.inference.definition.optim import sgd
from pyrofl.models import fedavg
from pyrofl.models.fedopt import with_server_optimizer
from pyrofl.models.guides.correlated import split_vectors
from pyrofl.models.shared.vectors import flatten_clients
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, role, under

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "server_lr": (0.25, 0.5, 1.0), "rho": (0.01, 0.1)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    samples: Count = 3,
    rho: NotNegative = 0.1,
    server_lr: NotNegative = 0.5,
    server_momentum: ShareBelowOne = 0.9,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the FedPA method (federated posterior averaging).

    Args:
        net: the network; all its parameters are shared.
        samples: l, each of one epoch, after the epochs of `training`.
        rho: how much the covariance of the samples counts; 0 leaves it out, as one sample does.
        server_lr: learning rate of the server along the mean of delta_j.
        server_momentum: of the server.
        training: of the clients, as in `fedavg.build`; its `epochs` are the burn-in.
    """
    base = fedavg.build(net, **training)
    burn_in, step = phase_and_step(base)

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Reset the running sum of SGD iterates and the step counter to zero."""
        return under("sum", {n: torch.zeros_like(local[n]) for n in received}) | {
            "steps": torch.zeros_like(data.size)
        }

    def add(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Add the current parameters to the running sum of SGD iterates, and count the step."""
        return under("sum", {n: local[f"sum/{n}"] + local[n] for n in received}) | {
            "steps": local["steps"] + 1
        }

    def draw(s: int) -> tuple[Phase, ...]:
        """Return training phases for one posterior sample: the mean of an epoch's SGD iterates."""

        def keep(received: Tensors, local: Tensors, data: Batch) -> Tensors:
            mean = flatten_clients(role("sum", local)) / local["steps"][:, None]  # [C, d]
            return {f"sample/{s}": mean}

        epoch = replace(burn_in, updates=(step, add), epochs=1)
        return Phase((begin,)), epoch, Phase((keep,))

    def send(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's message: received parameters minus its estimated update delta_j."""
        drawn = torch.stack([local[f"sample/{s}"] for s in range(samples)], 1)  # [C, l, d]
        start, shapes = flatten_clients(received), {n: v.shape[1:] for n, v in received.items()}
        return split_vectors(start - change(start, drawn, rho), shapes)

    draws = tuple(phase for s in range(samples) for phase in draw(s))
    method = replace(base, name="fedpa", phases=(burn_in, *draws, Phase((send,))))
    return with_server_optimizer(method, sgd(server_lr, server_momentum))


def change(w: Tensor, drawn: Tensor, rho: float) -> Tensor:
    """Return the client's update: inverse sample covariance times distance to the sample mean.

    That is delta_j = Sigma^-1 (w - sample mean), with the samples' shrunk covariance Sigma.

    Args:
        w: [C, d].
        drawn: [C, l, d].
        rho: of the shrinkage 1 / (1 + (l - 1) rho).
    """
    mean = drawn.mean(1)
    gap, apart, count = w - mean, drawn - mean[:, None], drawn.shape[1]
    shrink = 1 / (1 + (count - 1) * rho)
    if shrink == 1:
        return gap
    # Sigma = shrink (I + rho A'A), as (1 - shrink) / (l - 1) is shrink rho.
    inside = torch.eye(count, dtype=w.dtype, device=w.device) / rho + apart @ apart.mT
    # Not raised where it fails: that client's samples are of no use, and the others' are.
    root, info = torch.linalg.cholesky_ex(inside)
    inner = torch.cholesky_solve(apart @ gap[..., None], root)
    inner = torch.where((info == 0)[:, None, None], inner, torch.nan)
    answer: Tensor = (gap - (apart.mT @ inner)[..., 0]) / shrink
    return answer
