"""FedOpt: adaptive server optimizers (FedAdam, FedYogi, FedAdagrad) on the mean update.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar and McMahan, "Adaptive Federated
Optimization", ICLR 2021.

    p(w)        flat
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Delta(w_j)

    client   w_j = SGD from w on the mean loss per row
    server   d = sum_j n_j w_j / sum_j n_j - w
             m = beta1 m + (1 - beta1) d
             v = v + d^2                                             adagrad
             v = v - (1 - beta2) d^2 sign(v - d^2)                   yogi
             v = beta2 v + (1 - beta2) d^2                           adam
             w = w + server_lr m / (v^1/2 + tau)

Before round one m = 0 and v = tau^2; as in the paper nothing corrects them for their start. "sgd"
is FedAvgM: m = beta1 m + d and w = w + server_lr m, with beta1 = 0 and server_lr = 1 FedAvg. Any
other method's server takes such steps by `with_server_optimizer`.

Use it where FedAvg is slow, or few clients report: the server adapts its step for every weight. It
assumes that one model suits all, and needs a learning rate at the server.

Departures from the paper: clients are weighted by size, as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from pyrofl.arguments import NotNegative, Positive, ShareBelowOne, checked
from pyrofl.inference.definition.aggregator import descend, with_server_step
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.optim import Optim, WithoutCompiler, sgd
from pyrofl.models import fedavg
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors

Adaptation = Literal["adam", "yogi", "adagrad"]
Optimizer = Literal["adam", "yogi", "adagrad", "sgd"]

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "server_lr": (0.003, 0.01, 0.03, 0.1)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    optimizer: Optimizer = "adam",
    server_lr: NotNegative = 0.03,
    beta1: ShareBelowOne = 0.9,
    beta2: ShareBelowOne = 0.99,
    tau: Positive = 1e-3,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build FedAdam, FedYogi, FedAdagrad or FedAvgM: FedAvg with a server optimizer.

    Args:
        net: the network; all its parameters are shared.
        optimizer: of the server.
        server_lr: its learning rate; for all but "sgd" about how far a parameter goes in a round.
        beta1: momentum; the paper has 0 for adagrad.
        beta2: how slowly adam and yogi forget the squares.
        tau: how adaptive: parameters whose changes are smaller than this are treated alike.
        training: of the clients, as of `fedavg.build`.
    """
    if optimizer == "sgd":
        make = sgd(server_lr, beta1)
    else:
        make = adaptive(optimizer, server_lr, beta1, beta2, tau)
    return replace(with_server_optimizer(fedavg.build(net, **training), make), name="fedopt")


def with_server_optimizer(method: Method, make: Optim) -> Method:
    """Extend a federated method: its server applies an optimizer to the aggregated update.

    Args:
        method: any. What its server sends down moves along the gradient old - new; what lies
            under "server/" is as aggregated.
        make: the optimizer; what it remembers lies under "server/optim".
    """

    def step(server: Tensors, merged: Tensors) -> Tensors:
        """Apply a server optimizer step, with old minus aggregated parameters as gradient."""
        public = [n for n in merged if not n.startswith("server/")]
        return merged | descend(make, server, {n: server[n] - merged[n] for n in public})

    return replace(method, aggregate=with_server_step(method.aggregate, step))


@checked
def adaptive(
    rule: Adaptation,
    server_lr: NotNegative,
    beta1: ShareBelowOne,
    beta2: ShareBelowOne,
    tau: Positive,
) -> Optim:
    """Return a constructor of the FedAdam, FedYogi or FedAdagrad server optimizer."""
    return lambda params: Adaptive(params, rule, server_lr, beta1, beta2, tau)


class Adaptive(WithoutCompiler):
    """Server optimizer of FedAdam, FedYogi and FedAdagrad, without bias correction."""

    def __init__(
        self,
        params: list[Tensor],
        rule: Adaptation,
        lr: float,
        beta1: float,
        beta2: float,
        tau: float,
    ) -> None:
        """Initialize the optimizer with parameters and validated settings."""
        settings = {"rule": rule, "lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters in place by one optimization step."""
        for group in self.param_groups:
            beta1, beta2, tau = group["beta1"], group["beta2"], group["tau"]
            for p in group["params"]:
                state, square = self.state[p], p.grad.square()
                v = state.get("v", torch.full_like(p, tau**2))
                state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * p.grad
                if group["rule"] == "adagrad":
                    v = v + square
                elif group["rule"] == "yogi":
                    v = v - (1 - beta2) * square * (v - square).sign()
                else:
                    v = beta2 * v + (1 - beta2) * square
                state["v"] = v
                p -= group["lr"] * state["m"] / (v.sqrt() + tau)
