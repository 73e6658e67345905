"""Validation of name patterns: each must match a tensor or a site."""

from __future__ import annotations

from collections.abc import Iterable

from pyrofl.inference.definition.aggregator import Aggregator
from pyrofl.inference.definition.metadata import (
    INCOMPARABLE,
    Mark,
    Moments,
    Monitor,
    Rule,
    WireCost,
    metadata_of_class,
)
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.tensors import Tensors, matches, suggest_name, unmatched_patterns


def refuse_unmatched_patterns(
    method: Method,
    local: Tensors,
    server: Tensors,
    state_after: Tensors | None,
    message_and_received: Tensors,
    sites: list[str],
) -> None:
    """Raise ValueError for a name pattern of the method that matches no tensor or site."""
    checks: list[tuple[str, str, Iterable[str]]] = [
        (f"step {move.names!r} of {kind}", move.names, local)
        for kind in ("phases", "adapt")
        for phase in getattr(method, kind)
        for move in phase.updates
        if isinstance(move, GradientStep)
    ]
    for names, mark in metadata_of_class(method.metadata.tensors, Mark):
        of_sites = names in method.shared
        held = local if mark is INCOMPARABLE else server
        checks.append((f"metadata {mark.text!r}", names, sites if of_sites else held))
    for names, _ in (
        *metadata_of_class(method.metadata.tensors, Rule),
        *metadata_of_class(method.metadata.tensors, WireCost),
    ):
        checks.append(("metadata of messages", names, message_and_received))
    for names, moments in metadata_of_class(method.metadata.tensors, Moments):
        checks.append(("metadata Moments", names, {**server, **local}))
        if moments.optimal:
            checks.append(("metadata Moments", " ".join(moments.optimal), local))
    if state_after is not None:
        monitors = metadata_of_class(method.metadata.tensors, Monitor)
        checks += [("Monitor", names, state_after) for names, _ in monitors]
    for what, patterns, valid_names in checks:
        for pattern in unmatched_patterns(patterns, valid_names):
            raise ValueError(
                f"{pattern!r} in the {what} matches no name; {suggest_name(pattern, valid_names)}"
            )


def refuse_ineffective_aggregation_patterns(
    method: Method, server: Tensors, message: Tensors
) -> None:
    """Raise ValueError for a name pattern of the aggregation that has no effect."""
    if isinstance(aggregate := method.aggregate, Aggregator):
        values = aggregate.transform_messages(server, message)
        sent = {n: v for n, v in values.items() if n in server}
        used = [patterns for _, patterns in aggregate.groups(sent)]
        for hidden in (p for p in aggregate.weights if p not in used):
            if covered := [n for n in sent if matches(n, hidden)]:
                raise ValueError(
                    f"{hidden!r} in the aggregation has no effect, as an earlier pattern matches "
                    f"{covered[0]!r}; put it before that pattern"
                )
        left = [n for n in sent if not any(matches(n, p) for p in aggregate.weights)]
        patterns = " ".join(aggregate.weights)
        for pattern in unmatched_patterns(patterns, sent if left else values):
            if left or (pattern != "*" and "*" in patterns.split()):
                effect = f"{left[0]!r} would stay unchanged" if left else "'*' would decide for all"
                raise ValueError(
                    f"{pattern!r} in the aggregation matches no name, so {effect}; "
                    f"{suggest_name(pattern, left or values)}"
                )
