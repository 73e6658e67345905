"""Methods whose clients send contributions to the server's weighted sums as messages.

A server that is an `Aggregator` computes its next state from weighted means, so it only needs two
kinds of sums:

    weight/K  = sum_c weight_c                      of its K-th entry
    sum/NAME  = sum_c weight_c (value_c - before)   before: the server's tensor of that name

and for `WeightedSum` only the sum of weight_c value_c. Noise and masks are added to these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyrofl.arguments import checked
from pyrofl.data import Batch, Cohort
from pyrofl.inference.definition.aggregator import (
    MIN_TOTAL_WEIGHT,
    Aggregator,
    Weight,
    WeightedSum,
    by_size,
    uniform,
)
from pyrofl.inference.definition.metadata import Metadata, Rule, WireCost
from pyrofl.inference.definition.method import Method, Phase, send_all
from pyrofl.tensors import Tensors, matches, role, spread_out, under

AT, SUM, WEIGHT = "at", "sum", "weight"
IDS, SIZE = "who/ids", "who/size"


@dataclass(frozen=True)
class Sums:
    """Conversion of messages to contributions to weighted sums, and of sums to a server state.

    Attributes:
        aggregate: aggregation of the server.
        even: expected clients of a round: weights by rows and uniform weights are replaced by 1,
            and the sum is divided by this number; None: clients send their weights.
        most: weight that is sent as 1.
        least: smallest sum of weights used as a divisor.
    """

    aggregate: Aggregator
    even: float | None = None
    most: float = 1.0
    least: float = MIN_TOTAL_WEIGHT

    def contributions(self, server: Tensors, message: Tensors, cohort: Cohort) -> Tensors:
        """Return the clients' contributions to weighted sums, [C, ...], given their messages."""
        values, contributions = self.aggregate.transform(server, message), Tensors()
        before = server | self.aggregate.transform(server, server)
        for names, patterns in self.aggregate.groups(values):
            weight = torch.ones_like(cohort.size)
            if not self._alike(patterns):
                weight = _inner(self.aggregate.weights[patterns])(message, cohort) / self.most
                if not self._is_total(patterns):
                    contributions[self._name(patterns)] = weight
            for n in names:
                old = 0.0 if self._is_total(patterns) else before.get(n, 0.0)
                contributions[f"{SUM}/{n}"] = _times(weight, values[n] - old)
        return contributions

    def opened(self, server: Tensors, sums: Tensors) -> Tensors:
        """Return the next server state, given the sums of all clients' contributions."""
        ahead = self.aggregate.transform(server, {n: v[None] for n, v in server.items()})
        before, pooled = server | {n: v[0] for n, v in ahead.items()}, Tensors()
        for n, value in role(SUM, sums).items():
            patterns = next(p for p in self.aggregate.weights if matches(n, p))
            if self._is_total(patterns):
                pooled[n] = value * self.most if not self._alike(patterns) else value
                continue
            many = value.new_tensor(self.even or 1.0)
            weight = many if self._alike(patterns) else sums[self._name(patterns)]
            pooled[n] = before.get(n, 0.0) + _times(1 / weight.clamp(min=self.least), value)
        return self.aggregate.server_step(server, pooled)

    def _alike(self, patterns: str) -> bool:
        """Return whether every client has weight 1 in the sums of tensors with matching names."""
        return self.even is not None and _inner(self.aggregate.weights[patterns]) in (
            by_size,
            uniform,
        )

    def _is_total(self, patterns: str) -> bool:
        return isinstance(self.aggregate.weights[patterns], WeightedSum)

    def _name(self, patterns: str) -> str:
        return f"{WEIGHT}/{list(self.aggregate.weights).index(patterns)}"


@checked
def summed(method: Method, sums: Sums | None = None) -> Method:
    """Return a method whose clients send contributions to the server's weighted sums as messages.

    Results are equal up to rounding. Rules of messages are removed, as sums do not show which
    client violates them.

    Args:
        method: a method that aggregates by an `Aggregator` of weighted means.
        sums: sums to send, instead of those of its aggregation.

    Returns:
        The method with sums.

    Raises:
        ValueError: if its server needs single messages; the message names the method.
    """
    aggregate = weighted_mean_aggregator(method)
    weighted_sums, is_complete = sums or Sums(aggregate), method.download is send_all

    def download(server: Tensors, cohort: Cohort) -> Tensors:
        """Return the tensors that clients download, with those to subtract from messages."""
        return method.download(server, cohort) | under(AT, send_all(server, cohort))

    def count(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        """Return the clients' ids and numbers of rows as client-local tensors."""
        return {IDS: batch.ids, SIZE: batch.size}

    def upload(received: Tensors, local: Tensors) -> Tensors:
        """Return the clients' contributions to weighted sums, sent in place of their messages."""
        downloaded = {
            n: v for n, v in received.items() if is_complete or not n.startswith(f"{AT}/")
        }
        message = method.upload(downloaded, local)
        before = received if is_complete else role(AT, received)
        return weighted_sums.contributions(before, message, Cohort(local[IDS], local[SIZE]))

    return replace(
        method,
        download=send_all if is_complete else download,
        phases=(*method.phases, Phase((count,))),
        upload=upload,
        aggregate=Aggregator(
            {f"{SUM}/* {WEIGHT}/*": WeightedSum(uniform)}, server_step=weighted_sums.opened
        ),
        metadata=without_message_rules(method.metadata),
    )


def weighted_mean_aggregator(method: Method) -> Aggregator:
    """Return the method's `Aggregator`; raise ValueError unless it computes weighted means."""
    aggregate = method.aggregate
    if isinstance(aggregate, Aggregator) and aggregate.rule == "mean":
        return aggregate
    how = (
        f"aggregation is {aggregate.rule!r}"
        if isinstance(aggregate, Aggregator)
        else "aggregation is not a weighted mean"
    )
    raise ValueError(
        f"{method.name or method.programs}: {how}, so its server needs every single message; use "
        "a method that aggregates by an Aggregator of weighted means"
    )


def without_message_rules(metadata: Metadata) -> Metadata:
    """Return a method's metadata without validation rules and sizes of single client messages."""
    each = {n: f if isinstance(f, tuple) else (f,) for n, f in metadata.tensors.items()}
    unruled = {
        n: tuple(f for f in facts if not isinstance(f, Rule | WireCost))
        for n, facts in each.items()
    }
    tensors = {n: facts for n, facts in unruled.items() if facts}
    return replace(metadata, tensors=tensors)


def repeat_for_clients(server: Tensors, cohort: Cohort, names: str) -> Tensors:
    """Return the server tensors that match `names`, repeated for each client of a cohort."""
    tensors = {n: v for n, v in server.items() if matches(n, names)}
    return under(AT, spread_out(tensors, len(cohort.ids)))


def _inner(weight: Weight) -> Weight:
    return weight.weight if isinstance(weight, WeightedSum) else weight


def _times(weight: Tensor, value: Tensor) -> Tensor:
    """Return values [..., *p] multiplied by weights [...], broadcast over the last axes."""
    return weight.reshape([*weight.shape, *(1 for _ in value.shape[weight.dim() :])]) * value


def is_summed(method: Method) -> bool:
    """Return whether the clients of a method send sums, see `summed`."""
    aggregate = method.aggregate
    weights = aggregate.weights if isinstance(aggregate, Aggregator) else {}
    return any(names.startswith(f"{SUM}/") for names in weights)
