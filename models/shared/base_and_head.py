"""Networks in two parts: which parameters stay with the client, and which train when.

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
from functools import partial

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Who
from pyrofl.inference.elbo import Loss, Program, with_rows
from pyrofl.inference.method import Method, Phase, Step, as_trained
from pyrofl.models import fedavg, guides
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import Prior
from pyrofl.nets import Forward, Network
from pyrofl.tensors import Tensors, matches, role, spread_out

ROWS = 16  # of a client that go through a base at once, lest what lies between layers fill memory
FEATURES = "rows/features"  # local tensor with what the base makes of the client's rows


def keep(method: Method, names: str) -> Method:
    """Let some parameters never leave the client, whose model is then a personal one.

    Args:
        method: its server holds nothing but parameters of the network, "role/NAME", as FedAvg's.
        names: patterns of what stays. All clients start from the same draw of it, as they would
            if it came down in round one.
    """

    def stays(name: str) -> bool:
        return matches(name.partition("/")[2], names)

    def init(generator: Generator, clients: int) -> Tensors:
        return {n: v for n, v in method.init(generator, clients).items() if not stays(n)}

    def join(received: Tensors, who: Who, generator: Generator) -> Tensors:
        whole = method.init(generator, len(who.ids))
        return spread_out({n: v for n, v in whole.items() if stays(n)}, len(who.ids))

    def merge(server: Tensors, message: Tensors, who: Who, generator: Generator) -> Tensors:
        return method.merge(server, message, who, generator) if message else server

    return replace(method, init=init, join=join, merge=merge, views={"personal": as_trained})


def only(phase: Phase, names: str, epochs: int | Callable[[Tensor], Tensor] | None = None) -> Phase:
    """Let a phase of one gradient step move the parameters that match, and no others.

    Args:
        phase: whose step moves whole roles, "role/*".
        names: patterns of the parameters.
        epochs: instead of the phase's.
    """
    (step,) = phase.moves
    assert isinstance(step, Step)
    roles = [pattern.removesuffix("*") for pattern in step.names.split()]
    chosen = " ".join(role + name for role in roles for name in names.split())
    moves = (replace(step, names=chosen),)
    return replace(phase, moves=moves, epochs=phase.epochs if epochs is None else epochs)


def on_frozen_base(
    phase: Phase,
    net: Network,
    head: str,
    base: str,
    program: Callable[[Forward], Program],
    whole: Program,
) -> tuple[Phase, ...]:
    """Let a head train on what a base that stands still makes of all rows, computed once.

    Args:
        phase: moves the head alone.
        net: the network.
        head: patterns of the parameters that train.
        base: role of the others, which must be points.
        program: how the network runs -> the model.
        whole: the model that runs the whole network. Where another takes its place, as after
            `replace(method, model=...)`, it trains instead.

    Returns:
        A phase that computes the features, one that trains on them and one that drops them; or
        `phase` itself, if the network cannot be cut there or there are no epochs.
    """
    cut = net.split(head)
    if cut is None or phase.epochs == 0:
        return (phase,)
    below, above = cut

    def features(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        weights = with_rows(role(base, local), len(batch))
        return {FEATURES: torch.cat([below(weights, x) for x in batch.x.split(ROWS, 1)], 1)}

    def forget(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        return {FEATURES: local[FEATURES][:, :0].clone()}  # a view would hold on to all of them

    def on_features(loss: Loss) -> Loss:
        def wrapped(
            model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
        ) -> Tensor:
            known = batch.of(local[FEATURES])
            rest = {n: v for n, v in local.items() if n != FEATURES}
            if model is whole:
                model = program(lambda w, _: above(w, known))
            return loss(model, guide, received, rest, batch)

        return wrapped

    moves = [replace(m, loss=on_features(m.loss)) for m in phase.moves if isinstance(m, Step)]
    return Phase((features,)), replace(phase, moves=tuple(moves)), Phase((forget,))


def fitting_head(
    phases: tuple[Phase, ...],
    method: Method,
    net: Network,
    head: str,
    prior: Prior,
    training: fedavg.Training,
) -> tuple[Phase, ...]:
    """Put `on_frozen_base` around phases of FedAvg's model, unless a guide gives its base draws."""
    if training.get("guide", guides.delta) is not guides.delta:
        return phases
    program = partial(fedavg.supervised, net, training.get("likelihood", categorical), prior)
    return tuple(
        part
        for phase in phases
        for part in on_frozen_base(phase, net, head, "w", program, method.model)
    )


def head_and_base(net: Network, head: str | None) -> tuple[str, str]:
    """Return patterns of the head and of all other parameters.

    Args:
        net: the network.
        head: patterns; None is the network's own head, "" nothing and "*" all.

    Raises:
        ValueError: if there are patterns and no parameter matches.
    """
    head = net.head if head is None else head
    mine = net.matching(head) if head else {}
    return head, " ".join(n for n in net.shapes if n not in mine)


def two_parts(net: Network, head: str | None) -> tuple[str, str]:
    """Return `head_and_base`, neither of them empty.

    Raises:
        ValueError: if one is.
    """
    parts = head_and_base(net, head)
    if not all(parts):
        raise ValueError(
            f"head is {head!r}; expected patterns of some but not all of {', '.join(net.shapes)}"
        )
    return parts
