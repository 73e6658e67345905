"""SCAFFOLD: control variates that correct client drift in local training.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020.

    p(w)        flat
    p(y | x, w) = Categorical(logits=net(x; w))
    q(w)        = Delta(w_j)

    client   w_j = w - lr (g(w_j) - c_j + c), K times                     eq. 3
             c_j+ = c_j - c + (w - w_j) / (K lr)                          eq. 4, option II
             c_j+ = gradient of all rows at w                             eq. 4, option I
    server   w = w + server_lr mean_S (w_j - w)                           eq. 5
             c = c + |S| / J mean_S (c_j+ - c_j)

c_j, the client's estimate of its own gradient, is private; its change is sent. All c are zero
before round one.

Use it where the same clients come again and again, make many local steps on unlike rows, and one
model is wanted. It assumes that clients keep state between rounds.

Departures from the paper: local momentum, off by default. With momentum a gradient counts more the
earlier it comes, so option II divides by the sum of these weights instead of K, which keeps c_j+
a mean of the client's gradients. A client without a step keeps its c_j.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

import torch
from torch import Generator, Tensor

from pyrofl.arguments import NotNegative, checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import Aggregator, WeightedSum, uniform
from pyrofl.inference.definition.averages import blend
from pyrofl.inference.definition.elbo import Directed
from pyrofl.inference.definition.metadata import PER_CLIENT, Metadata
from pyrofl.inference.definition.method import Method, Phase, phase_and_step
from pyrofl.inference.definition.programs import Loss, Program
from pyrofl.models import fedavg
from pyrofl.models.shared.schedules import decayed
from pyrofl.nets import Network
from pyrofl.recipes import rebuildable
from pyrofl.tensors import Tensors, add_trailing_axes, role, under

Option = Literal["I", "II"]
KNOWN = "server/own"  # every c_j, where the server remembers them

SEARCH_GRID = {"lr": fedavg.LEARNING_RATES, "server_lr": (0.3, 1.0)}


@rebuildable
@checked
def build(
    net: Network,
    *,
    option: Option = "II",
    server_lr: NotNegative = 1.0,
    remember: bool = False,
    **training: Unpack[fedavg.Training],
) -> Method:
    """Build the SCAFFOLD method (stochastic controlled averaging).

    Args:
        net: the network; all its parameters are shared.
        option: how a client renews its control variate: "I" reads all its rows once more, "II" is
            free.
        server_lr: step of the server towards the plain mean of the clients' models.
        remember: the server keeps every c_j, so that a client that has lost its own can come back,
            see `Metadata.reset_clients`: its c_j is taken out of c, and it starts with another of
            zero. It costs the server a model for every client.
        training: of the clients, as of `fedavg.build`, but lr is 0.1 and momentum 0 unless given.

    Raises:
        ValueError: if lr is 0, by which eq. 4 divides; or remember is to go with an aggregation
            that bears bad messages, after which c is no mean of c_j.
    """
    settings: fedavg.Training = {"lr": 0.1, "momentum": 0.0, **training}
    base = fedavg.build(net, **settings)
    elapsed = settings.get("elapsed") if settings.get("decay") else None
    lr, momentum = decayed(settings["lr"], elapsed), settings["momentum"]
    if not lr > 0:
        raise ValueError(f"lr is {lr}; expected a number above 0, by which eq. 4 divides")
    if remember and (how := settings.get("aggregation", "mean")) != "mean":
        raise ValueError(f"remember is True and aggregation is {how!r}; expected 'mean', or False")
    train, step = phase_and_step(base)
    names = list(base.init(torch.Generator(), 1))

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the global model, and the server's control variate c with zero."""
        start = base.init(generator, clients)
        zero = {n: torch.zeros_like(v) for n, v in start.items()}
        each = {n: torch.zeros(clients, *v.shape).to(v) for n, v in start.items() if remember}
        client_counts = {"server/clients": torch.tensor(clients), **under(KNOWN, each)}
        return start | under("control", zero) | client_counts

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize the client's control variate c_j with zero."""
        control = role("control", received)
        zero = {n: v.new_zeros(v.shape[1:]).expand_as(v) for n, v in control.items()}
        return base.init_client(received, cohort, generator) | under("own", zero)

    def begin(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Reset the counter of local steps to zero."""
        return {"steps": torch.zeros_like(data.size)}

    def count(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Increase the counter of local steps."""
        return {"steps": local["steps"] + 1}

    def at_received(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Return by how much the gradient at the received parameters exceeds c_j (option I)."""
        slopes = gradient(base.model, base.guide, step.loss, names, received, local, data)
        moved = (local["steps"] > 0).to(data.size)
        return {
            n: (v - local[f"own/{n}"]).mul_(add_trailing_axes(moved, v)) for n, v in slopes.items()
        }

    def along_the_way(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Return by how much the mean gradient of the local steps exceeds c_j (option II).

        That is (w - w_j) / (K lr) - c, by as few passes over memory as possible.
        """
        weight = lr * total_weight(local["steps"], momentum)
        share = torch.where(weight > 0, 1 / weight, 0.0)
        change = {}
        for n in names:
            way = received[n] - local[n]
            way.addcmul_(add_trailing_axes(weight, way), received[f"control/{n}"], value=-1)
            change[n] = way.mul_(add_trailing_axes(share, way))
        return change

    exceeds = at_received if option == "I" else along_the_way

    def renew(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        """Compute the client's new control variate (eq. 4), and its change."""
        change = exceeds(received, local, data)
        new = {n: local[f"own/{n}"] + v for n, v in change.items()}
        return under("own", new) | under("change", change)

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Send the client's model w_j, and the change of its control variate c_j."""
        return {n: local[n] for n in (*names, *(f"change/{n}" for n in names))}

    def update(server: Tensors, pooled: Tensors) -> Tensors:
        """Update the server's model and control variate c (eq. 5)."""
        clients = int(server["server/clients"])
        control = {
            n: v + pooled[f"change/{n}"] / clients for n, v in role("control", server).items()
        }
        moved = blend(server, {n: pooled[n] for n in names}, 1 - server_lr)
        return server | moved | under("control", control)

    pooled = Aggregator(
        {"change/*": WeightedSum(uniform), "*": uniform},
        server_step=update,
        rule=settings.get("aggregation", "mean"),
    )

    def remembered(
        server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Aggregate all messages, and store every client's control variate c_j."""
        changed = {
            f"{KNOWN}/{n}": v.index_add(0, cohort.ids, message[f"change/{n}"])
            for n, v in role(KNOWN, server).items()
        }
        return pooled(server, message, cohort, generator) | changed

    def drift(name: str, received: Tensors, local: Tensors) -> Tensor:
        """Return the drift correction c - c_j of a parameter's gradient (eq. 3)."""
        return received[f"control/{name}"] - local[f"own/{name}"]

    corrected = replace(step, loss=Directed(step.loss, tuple(names), drift))
    return replace(
        base,
        name="scaffold",
        init=init,
        init_client=init_client,
        phases=(Phase((begin,)), replace(train, updates=(corrected, count)), Phase((renew,))),
        upload=upload,
        aggregate=remembered if remember else pooled,
        metadata=Metadata(
            {f"{KNOWN}/*": PER_CLIENT} if remember else {},
            reset_clients=taken_out,
            reads={"model": base.model, "guide": base.guide} if option == "I" else {},
        ),
    )


def taken_out(server: Tensors, cohort: Cohort) -> Tensors:
    """Subtract the control variates of given clients from the server's control variate."""
    counts = role(KNOWN, server)
    if len(cohort.ids) and not counts:
        raise ValueError(
            "scaffold: what a client has lost, its c_j, is in c for good, as the server does not "
            "know it; expected remember=True from the beginning (--set remember=true)"
        )
    clients = int(server["server/clients"])
    control = {
        f"control/{n}": server[f"control/{n}"] - v[cohort.ids].sum(0) / clients
        for n, v in counts.items()
    }
    return (
        server
        | control
        | under(KNOWN, {n: v.index_fill(0, cohort.ids, 0) for n, v in counts.items()})
    )


def gradient(
    model: Program,
    guide: Program,
    loss: Loss,
    names: list[str],
    received: Tensors,
    local: Tensors,
    batch: Batch,
) -> Tensors:
    """Return the gradient of a loss at the received parameters: name -> [C, *p]."""
    with torch.enable_grad():
        at = {n: received[n].detach().clone().requires_grad_() for n in names}
        value = loss(model, guide, received, local | at, batch).sum()
        return dict(zip(names, torch.autograd.grad(value, list(at.values())), strict=True))


def total_weight(steps: Tensor, momentum: float) -> Tensor:
    """Return the total weight of all gradients in K steps of SGD with momentum, [C].

    A gradient that comes k steps before the end counts (1 - beta^k) / (1 - beta) times.

    >>> total_weight(torch.tensor([1.0, 2.0]), 0.5), total_weight(torch.tensor([7.0]), 0.0)
    (tensor([1.0000, 2.5000]), tensor([7.]))
    """
    rest = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - rest) / (1 - momentum)
