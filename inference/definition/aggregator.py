"""Server aggregation: the next server state from weighted means of the clients' messages.

    aggregate=Aggregator({"mean/*": weight_by("tau"), "base/*": by_size}, server_step=step)

One declaration is enough to aggregate stored messages, to fold messages on arrival, and to apply
robust rules (`rule`). The mean needs only sums over clients, so that sums over machines and secure
sums can replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import or_
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from pyrofl.arguments import check_fields
from pyrofl.data import Cohort
from pyrofl.inference.definition.averages import Combine, blend, get_rule, mean
from pyrofl.inference.definition.optim import Optim, Sgd
from pyrofl.returned import as_tensors, calling
from pyrofl.tensors import Tensors, join_up, matches

Weight = Callable[[Tensors, Cohort], Tensor]
"""(message [C, ...], cohort) -> weight of each client, [C]; or [C, K] for tensors of which clients
send K, such as branches or clusters, each aggregated separately."""

Aggregate = Callable[[Tensors, Tensors, Cohort, Generator], Tensors]
"""(server, message [C, ...], cohort, generator) -> the next state; `Aggregator` is one."""

MIN_TOTAL_WEIGHT = 1e-12  # one of K with a smaller total weight keeps its value


def by_size(message: Tensors, cohort: Cohort) -> Tensor:
    """Return each client's aggregation weight, which is its number of training rows: [C]."""
    return cohort.size


def uniform(message: Tensors, cohort: Cohort) -> Tensor:
    """Return equal aggregation weights for all clients, [C]."""
    return torch.ones_like(cohort.size)


def weight_by(name: str) -> Weight:
    """Return a function that reads clients' aggregation weights from a tensor in their messages."""
    return lambda message, cohort: message[name]


@dataclass(frozen=True)
class WeightedSum:
    """Weight function by which the server computes a weighted sum of messages, not their mean."""

    weight: Weight

    def __call__(self, message: Tensors, cohort: Cohort) -> Tensor:
        """Return each client's aggregation weight, [C]."""
        return self.weight(message, cohort)


class Weighed(NamedTuple):
    """Values of clients' messages, [C, ...], with the weights by which the server averages them.

    Messages that have been folded into one have C = 1.
    """

    values: Tensors
    weights: Tensors  # by patterns, [C] or [C, K]


@dataclass(frozen=True, repr=False)
class Aggregator:
    """Server aggregation that computes the next server state from weighted means over clients.

    Attributes:
        weights: patterns of names (the first match counts) -> the clients' weights. The names of
            one entry are aggregated together, which matters to Krum and clipping.
        server_step: (server, aggregated [*p]) -> the next state; by default the weighted means.
        rule: "mean", or a robust aggregation rule, see `get_rule`.
        transform: (server, message [C, ...]) -> values to average, with the names of the server's
            tensors that they replace. The server's state is transformed too, for rules that need
            the previous value.
        noised: (aggregated [*p], generator) -> input of `server_step`, to add noise to the means.
    """

    weights: Mapping[str, Weight]
    server_step: Callable[[Tensors, Tensors], Tensors] = or_
    rule: str | Combine = "mean"
    transform: Callable[[Tensors, Tensors], Tensors] = lambda server, message: message
    add_noise: Callable[[Tensors, Generator], Tensors] = lambda pooled, generator: pooled

    def __post_init__(self) -> None:
        """Validate the aggregation rule and the weight functions."""
        check_fields(self)
        for patterns, weight in self.weights.items():
            if not isinstance(patterns, str) or not callable(weight):
                raise ValueError(
                    f"weights hold {patterns!r}: a {type(weight).__name__}; expected a dict of "
                    "patterns -> function (message, cohort) -> weights, such as "
                    '{"*": by_size}'
                )
        get_rule(self.rule)

    def __repr__(self) -> str:
        how = (
            self.rule if isinstance(self.rule, str) else getattr(self.rule, "__name__", "own rule")
        )
        return f"Aggregator({', '.join(self.weights)}; {how})"

    def __call__(
        self, server: Tensors, message: Tensors, cohort: Cohort, generator: Generator
    ) -> Tensors:
        """Aggregate messages to the next server state; raise AggregationError if impossible."""
        return self.close(server, self.weigh(server, message, cohort), generator)

    def weigh(self, server: Tensors, message: Tensors, cohort: Cohort) -> Weighed:
        """Return the values to aggregate from clients' messages, [C, *p], and clients' weights."""
        values = self.transform_messages(server, message)
        weights: Tensors = {}
        for names, patterns in self.groups(values):
            with calling(f"the weight of {patterns!r}", message):
                pattern_weights = weights[patterns] = self.weights[patterns](message, cohort)
            _check_weight_shape(patterns, pattern_weights, values, names)
        return Weighed(values, weights)

    def fold(self, *parts: Weighed) -> Weighed:
        """Combine weighted messages into one: their weighted mean, with their total weight."""
        values, weights = join_up(p.values for p in parts), join_up(p.weights for p in parts)
        folded = self._combine_all(Weighed(values, weights), _mean_or_default, {}, 0.0)
        sums = {p: w.sum(0, keepdim=True) for p, w in weights.items()}  # [1] or [1, K]
        return Weighed({n: v[None] for n, v in folded.items()}, sums)

    def close(self, server: Tensors, weighed: Weighed, generator: Generator) -> Tensors:
        """Return the next server state, computed from weighted client messages."""
        ahead = self.transform_messages(server, {n: v[None] for n, v in server.items()})
        old = server | {n: v[0] for n, v in ahead.items()}
        pooled = self._combine_all(weighed, get_rule(self.rule), old, MIN_TOTAL_WEIGHT)
        for names, patterns in self.groups(pooled):
            if isinstance(self.weights[patterns], WeightedSum):
                pooled |= {n: pooled[n] * weighed.weights[patterns].sum() for n in names}
        pooled = as_tensors("what noised returns", self.add_noise(pooled, generator))
        return self.server_step(server, pooled)

    def transform_messages(self, server: Tensors, message: Tensors) -> Tensors:
        """Apply `transform` to clients' messages; return the values to average, [C, ...]."""
        return as_tensors("what transform returns", self.transform(server, message))

    def _combine_all(
        self, weighed: Weighed, combine: Combine, before: Tensors, least: float
    ) -> Tensors:
        """Aggregate every tensor over clients; keep its old value if all its weights are zero."""
        aggregated: Tensors = {}
        for names, patterns in self.groups(weighed.values):
            values = {n: weighed.values[n] for n in names}
            old = {n: before.get(n, torch.zeros_like(v[0])) for n, v in values.items()}
            aggregated |= _combine_group(combine, values, weighed.weights[patterns], old, least)
        return aggregated

    def groups(self, values: Tensors) -> list[tuple[list[str], str]]:
        """Group tensor names by the first pattern in `weights` that they match."""
        names_by_pattern: dict[str, list[str]] = {}
        for name in values:
            first = next((p for p in self.weights if matches(name, p)), None)
            if first is not None:
                names_by_pattern.setdefault(first, []).append(name)
        return [(names, patterns) for patterns, names in names_by_pattern.items()]


def _check_weight_shape(patterns: str, weight: Tensor, values: Tensors, names: list[str]) -> None:
    """Raise ValueError unless the clients' weights have shape [C], or [C, K] for K components."""
    first = values[names[0]]
    if not isinstance(weight, Tensor):
        kind = type(weight).__name__
        raise ValueError(f"the weight of {patterns!r} is a {kind}; expected a tensor [clients]")
    if weight.shape in (first.shape[:1], first.shape[:2]) and weight.dim():
        return
    several = f", or {list(first.shape[:2])}, one per client and component"
    raise ValueError(
        f"the weight of {patterns!r} has shape {list(weight.shape)}; expected "
        f"{list(first.shape[:1])}, one for each client{several if first.dim() > 1 else ''}"
    )


def _combine_group(
    combine: Combine, values: Tensors, weight: Tensor, before: Tensors, least: float
) -> Tensors:
    """Aggregate tensors over C clients, separately for K components if the weights are [C, K].

    The previous value is kept where the sum of the weights is at most `least`.
    """
    if weight.dim() == 1:
        return as_tensors("what the rule returns", combine(values, weight, before))
    components = []
    for k, component_weights in enumerate(weight.unbind(1)):
        at = component_weights.nonzero().flatten()
        old = {n: v[k] for n, v in before.items()}
        sent = {n: v[at, k] for n, v in values.items()}
        unused = bool((component_weights >= 0).all() and component_weights.sum() <= least)
        components.append(old if unused else combine(sent, component_weights[at], old))
    return {n: torch.stack([one[n] for one in components]) for n in values}


def _mean_or_default(values: Tensors, weight: Tensor, none: Tensors) -> Tensors:
    """Return the weighted mean over clients, or default values if all weights are zero."""
    return mean(values, weight, none) if weight.any() else none


def with_server_step(
    aggregate: Aggregate, change: Callable[[Tensors, Tensors], Tensors]
) -> Aggregate:
    """Extend an aggregation function by a server step on the aggregated values.

    An `Aggregator` stays one. The step may be that of an optimizer, such as `descend`.
    """
    if isinstance(aggregate, Aggregator):
        then = aggregate.server_step
        return replace(
            aggregate, server_step=lambda server, pooled: change(server, then(server, pooled))
        )

    def both(server: Tensors, message: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
        return change(server, aggregate(server, message, cohort, generator))

    return both


def damped(aggregate: Aggregate, keep: float) -> Aggregate:
    """Return an aggregation function with damping: keep * old state + (1 - keep) * new state."""
    return with_server_step(aggregate, lambda old, new: old | blend(old, new, keep))


def descend(make: Optim, server: Tensors, gradient: Tensors, role: str = "server/optim") -> Tensors:
    """Take one server optimizer step along a pseudo-gradient; return values and optimizer state.

    Args:
        make: function that creates the optimizer, such as `sgd(1.0, momentum=0.9)`; the server
            counts as one client, so that `clip` is the norm over all tensors of the gradient.
        server: server state with the values [*p] and the optimizer state of earlier rounds.
        gradient: [*p] by the names of the values.
        role: prefix of the optimizer state; names under "server/" are never sent.

    Returns:
        New values and optimizer state, for the server's state.
    """
    params = {n: server[n].detach()[None].clone().requires_grad_() for n in gradient}
    optimizer = make(list(params.values()))
    is_plain = isinstance(make, Sgd)  # it does not write into gradients
    for n, p in params.items():
        slope = gradient[n].detach()[None]
        p.grad = slope if is_plain else slope.clone()
        start = f"{role}/{n}:"
        optimizer_state = {
            k.removeprefix(start): v for k, v in server.items() if k.startswith(start)
        }
        optimizer.state[p] = {k: v.clone() for k, v in optimizer_state.items()}
    dense = all(v.is_contiguous() for n, p in params.items() for v in (p, gradient[n]))
    has_state = {bool(optimizer.state[p]) for p in params.values()}
    if not (is_plain and dense and len(has_state) == 1):
        for group in optimizer.param_groups:
            # A fused optimizer needs equal strides, and state of all tensors or of none.
            group["fused"] = None
    optimizer.step()
    state = {f"{role}/{n}:{k}": v for n, p in params.items() for k, v in optimizer.state[p].items()}
    memory = {n: v for n, v in state.items() if torch.is_tensor(v)}
    return {n: p.detach()[0] for n, p in params.items()} | memory
