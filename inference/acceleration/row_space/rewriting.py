"""Training phases rewritten to be faster for clients with few rows, with equal results.

Results are equal up to rounding. Phases are rewritten if a method's programs, losses and optimizers
are known dataclasses: `Supervised`, `Guide`, `Elbo`, `Sgd`. Other methods run as written.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

from pyro.distributions import Normal
from torch import Size, Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.acceleration.row_space.alternatives import Alternatives, ShortPhase
from pyrofl.inference.acceleration.row_space.first_layer import (
    FirstLayer,
    RowSpaceWeights,
    first_layer,
)
from pyrofl.inference.acceleration.row_space.linear_views import ignores, ignores_rows, sums
from pyrofl.inference.definition.elbo import Directed, Elbo, OfGradients, On, TransformedLoss
from pyrofl.inference.definition.method import GradientStep, Method, Phase
from pyrofl.inference.definition.optim import Optim, Sgd
from pyrofl.inference.definition.programs import Loss, Program, Proximal, Supervised, flat
from pyrofl.tensors import Tensors, matches

MIN_ENTRIES = 2**15  # of a layer for which a rewritten phase is faster: measured
MEMORY_COST = 30  # number of rows whose products take as long as a step's memory access: measured
# Options of SGD.
LINEAR_OPTIONS = "fused", "foreach", "weight_decay", "dampening", "nesterov", "maximize"
ENABLED = True  # benchmarks and tests compare with phases as written


ALTERNATIVES_BY_PHASE: dict[object, tuple[object, Alternatives]] = {}
MAX_CACHED_PHASES = 256  # entries, which are used from round to round


def alternatives(
    method: Method, phase: Phase, received: Tensors, local: Tensors, data: Federation
) -> Alternatives:
    """Return a training phase and its equivalent, if any, that is faster for clients with few rows.

    They depend on the names of received and local tensors and on the shape of a row, but not on the
    training clients: a client runs the same way alone and with others.
    """
    if not ENABLED:
        return Alternatives((phase,), (phase,), 0)
    parts = method.model, method.guide, phase
    key = *map(id, parts), tuple(received), tuple(local), data.x.shape[1:], data.x.dtype
    if key not in ALTERNATIVES_BY_PHASE:
        phases, most = rewrite_for_few_rows(method, phase, received, local, data) or ((phase,), 0)
        if len(ALTERNATIVES_BY_PHASE) >= MAX_CACHED_PHASES:
            ALTERNATIVES_BY_PHASE.pop(next(iter(ALTERNATIVES_BY_PHASE)), None)
        ALTERNATIVES_BY_PHASE[key] = (
            parts,
            Alternatives((phase,), phases, most),
        )  # stored parts keep their ids
    return ALTERNATIVES_BY_PHASE[key][1]


@dataclass(frozen=True)
class RowSpaceLoss:
    """Loss of a model whose first layer is represented by coefficients of data rows."""

    loss: Loss
    rows: RowSpaceWeights

    def __call__(
        self, model: Program, guide: Program, received: Tensors, local: Tensors, batch: Batch
    ) -> Tensor:
        """Return the loss of each client, [C], computed with row coefficients."""
        tensors = received, local
        short, received, local, priors = self.rows(cast("Supervised", model), *tensors, batch)
        value = self.loss(short, guide, received, local, batch)
        return value if priors.along is None else value + priors.along


def with_row_coefficients(loss: Loss, rows: RowSpaceWeights) -> Loss:
    """Change a loss function so that it computes the first layer from coefficients of rows."""
    if isinstance(loss, Directed):
        names = tuple(n for n in loss.names if n not in rows.moving)
        inner = with_row_coefficients(loss.loss, rows)
        return replace(loss, loss=inner, names=names) if names else inner
    if isinstance(loss, (On, OfGradients)):
        return replace(loss, loss=with_row_coefficients(loss.loss, rows))
    return RowSpaceLoss(loss, rows)


def rewrite_for_few_rows(
    method: Method, phase: Phase, received: Tensors, local: Tensors, data: Federation
) -> tuple[tuple[Phase, ...], float] | None:
    """Rewrite a training phase for clients with few rows; return phases and row limit, or None.

    It must have steps on minibatches, by SGD, on ELBOs that only depend on the layer by the
    network's outputs and perhaps a normal prior with one scale per client around received values.
    Losses may add a constant direction to the gradient, or combine gradients of ELBOs linearly.
    Other updates must depend neither on the layer nor on rows.
    """
    steps = [move for move in phase.updates if isinstance(move, GradientStep)]
    readings = (trace_first_layer(method, step, phase, received, local, data) for step in steps)
    supported = [one for one in readings if one]
    if not supported or len(supported) < len(steps):
        return None
    layer, center = supported[0].layer, max(one.center for one in supported)
    if any(one.layer.name != layer.name or one.center not in ("", center) for one in supported):
        return None
    names = weights_of(layer, local)
    moving = tuple(n for n in names if any(matches(n, step.names) for step in steps))
    read = {n for one in supported for n in one.reads}
    if not moving or not read <= {*moving} or not all(map(is_linear_sgd, (s.optim for s in steps))):
        return None
    direction = supported[0].direction
    if any(one.direction or one.is_derived for one in supported) and (len(steps) > 1 or center):
        return None
    if direction and ({*moving} != read or not {*moving} <= {*direction.names}):
        return None
    others = [move for move in phase.updates if not isinstance(move, GradientStep)]
    if not all(ignores(move, names, received, local) for move in others):
        return None
    weights = len(moving) + max(len(moving), 1 + bool(center)) + 2 * bool(direction)
    most = most_rows(phase, layer.shape, weights, MEMORY_COST * (1 + bool(center)))
    if (center and center not in local) or not most or not layer.takes(data.x):
        return None
    decays = any(cast("Sgd", step.optim).options.get("weight_decay") for step in steps)
    towards = partial(direction.direction, moving[0]) if direction else None
    rows = RowSpaceWeights(layer, moving, center, decays, towards)
    moves = tuple(
        replace(move, loss=with_row_coefficients(move.loss, rows))
        if isinstance(move, GradientStep)
        else move
        for move in phase.updates
    )
    only_layer_reads_x = all(one.only_layer_reads_x for one in supported)
    short = ShortPhase(moves, phase.epochs, phase.batch, only_layer_reads_x)
    return (Phase((rows.begin,)), short, Phase((rows.end,))), most


class LayerUse(NamedTuple):
    """Result of tracing a gradient step: the network's first layer, and the tensors it reads."""

    layer: FirstLayer
    reads: set[str]  # local tensors
    center: str  # the received tensor that is the center of its prior; "" without such a prior
    only_layer_reads_x: bool  # only the layer's outputs depend on x
    direction: Directed | None  # the loss that adds a constant to the gradient, if any
    is_derived: bool  # the loss is one of gradients, of which second derivatives are taken


def weights_of(layer: FirstLayer, local: Tensors) -> tuple[str, ...]:
    """Return the names of all local tensors of clients that are weights of a layer."""
    return tuple(n for n in local if n.endswith(f"/{layer.name}") and n[:5] != "rows/")


def trace_first_layer(
    method: Method,
    step: GradientStep,
    phase: Phase,
    received: Tensors,
    local: Tensors,
    data: Federation,
) -> LayerUse | None:
    """Return the network's first layer and which of its tensors a gradient step reads, or None."""
    views, core, model, guide = list[TransformedLoss](), step.loss, method.model, method.guide
    direction, is_derived = core if isinstance(core, Directed) else None, False
    core = direction.loss if direction else core
    while isinstance(core, (On, TransformedLoss, OfGradients)):
        if isinstance(core, On):
            model, guide = core.model, core.guide
        elif isinstance(core, TransformedLoss):
            views.append(core)
        elif not core.is_linear:
            return None
        is_derived |= isinstance(core, OfGradients)
        core = core.loss
    if (direction or is_derived) and views:
        return None
    if not isinstance(core, Elbo) or not isinstance(model, Supervised) or model.forward is not None:
        return None
    layer, homes = first_layer(model.net), model.homes(guide, local)
    home = homes.get(layer.name) if layer else None
    if layer is None or home is None:
        return None
    center = "" if model.points and home == f"{model.points}/{layer.name}" else None
    if center is None:  # there is a prior
        prior = model.prior_of(layer.name) if model.prior else None
        near = isinstance(prior, Proximal) and prior.family is Normal
        if prior is not flat and not near:
            return None
        center = f"{prior.loc}/{layer.name}" if isinstance(prior, Proximal) else ""
    names, reads = weights_of(layer, local), set[str]()
    moves = [m.names for m in phase.updates if isinstance(m, GradientStep)]
    other = {n for n in local if n not in names and any(matches(n, m) for m in moves)}
    for view, name in [(v.view, home) for v in views] + [
        (v.center, center) for v in views if v.center and center
    ]:
        read = sums(view, name, names, other, received, local)
        if read is None:
            return None
        reads |= read
    only_layer_reads_x = ignores_rows(model.likelihood, model.net, data.x)
    return LayerUse(
        layer, reads if views else {home}, center, only_layer_reads_x, direction, is_derived
    )


def is_linear_sgd(optim: Optim) -> bool:
    """Return whether an optimizer is SGD, with only options that combine gradients linearly."""
    return isinstance(optim, Sgd) and not any(
        on for name, on in optim.options.items() if name not in LINEAR_OPTIONS
    )


def most_rows(phase: Phase, shape: Size, weights: int = 2, traffic: int = MEMORY_COST) -> int:
    """Return the largest number of rows per client for which a rewritten phase is faster."""
    every = range(1, shape.numel())
    return bisect_left(every, True, key=lambda n: not pays(phase, shape, n, weights, traffic))


def pays(
    phase: Phase, shape: Size, rows: int, weights: int = 2, traffic: int = MEMORY_COST
) -> bool:
    """Return whether a rewritten training phase is faster for a client with `rows` rows.

    The cost is counted in products of one row with the layer [out, in]: two in every epoch and
    step, and the memory access of a step, the `traffic`; compared with those before and after, X A'
    and C' X for some `weights`, and X X', which must not be larger than the layer.
    """
    out, wide = shape
    if callable(phase.epochs) or phase.batch is None:
        return False
    steps = phase.epochs * sum(m.num_steps for m in phase.updates if isinstance(m, GradientStep))
    saved = steps * (1 - rows / wide) * (2 + traffic / phase.batch)
    return saved > weights + rows / out and max(MIN_ENTRIES, rows**2) <= out * wide
