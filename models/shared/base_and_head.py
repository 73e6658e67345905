"""Base and head of a network: personal parameters, and the order in which both parts train.

Four methods, and the two between which they lie, are one predicate on names and a schedule, put
around FedAvg:

    fedper     the head is personal     all train together
    fedrep     the head is personal     the head trains, then the base
    fedbabu    the head is personal     the base trains; the head does before a test
    lgfedavg   the base is personal     all train together
    fedavg     nothing is personal
    local      everything is personal
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from torch import Generator, Tensor

from pyrofl.data import Cohort
from pyrofl.inference.definition.method import GradientStep, Method, Phase, as_trained
from pyrofl.inference.definition.programs import Supervised
from pyrofl.nets import Network
from pyrofl.tensors import Tensors, matches, spread_out


def make_personal(method: Method, names: str) -> Method:
    """Return a variant of a method in which the parameters that match `names` stay at the clients.

    All clients start from the same draw of them, as they would if it came down in round one.

    Raises:
        ValueError: if its guide has tensors of several parameters, only some of which are to stay.
    """
    shapes = cast("Supervised", method.model).net.shapes
    stays = {matches(n, names) for n in shapes}
    for n in method.init(Generator(), 1):
        if n.partition("/")[2] not in shapes and len(stays) > 1:
            raise ValueError(
                f"guide has the tensor {n}, of all parameters together, and {names!r} are to stay "
                "with the client; expected guides.delta, guides.mean_field or guides.log_mean_field"
            )

    def start(generator: Generator, clients: int, stays: bool) -> Tensors:
        whole = method.init(generator, clients)
        return {n: v for n, v in whole.items() if matches(n.partition("/")[2], names) == stays}

    def init(generator: Generator, clients: int) -> Tensors:
        """Initialize the server with the shared parameters only."""
        return start(generator, clients, stays=False)

    def init_client(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        """Initialize a client's personal parameters by a random draw common to all clients."""
        return spread_out(start(generator, len(cohort.ids), stays=True), len(cohort.ids))

    return replace(method, init=init, init_client=init_client, views={"personal": as_trained})


def train_only(
    phase: Phase, names: str, epochs: int | Callable[[Tensor], Tensor] | None = None
) -> Phase:
    """Return the training phase restricted to the parameters that match `names`."""
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    roles = [pattern.removesuffix("*") for pattern in step.names.split()]
    chosen = " ".join(role + name for role in roles for name in names.split())
    moves = (replace(step, names=chosen),)
    return replace(phase, updates=moves, epochs=phase.epochs if epochs is None else epochs)


def head_and_base_patterns(
    net: Network, head: str | None, *, requires_both: bool = False
) -> tuple[str, str]:
    """Return name patterns of the network's head and of its other parameters.

    The head is by default the network's own.

    A pattern of "" matches no parameter.
    """
    head = net.head if head is None else head
    head_params = net.select_params(head) if head else {}
    rest = " ".join(n for n in net.shapes if n not in head_params)
    if requires_both and not (head and rest):
        raise ValueError(
            f"head is {head!r}; expected patterns of some but not all of {', '.join(net.shapes)}"
        )
    return head, rest
