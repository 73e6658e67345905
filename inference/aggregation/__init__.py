"""Server updates: weighted means, robust aggregation rules and server optimizer steps."""

from pyrofl.inference.definition.aggregator import (
    Aggregator,
    WeightedSum,
    by_size,
    damped,
    descend,
    uniform,
    weight_by,
    with_server_step,
)
from pyrofl.inference.definition.averages import Combine, average, blend, get_rule, weighted_mean
from pyrofl.inference.definition.metadata import NOT_NEGATIVE, POSITIVE

__all__ = [
    "NOT_NEGATIVE",
    "POSITIVE",
    "Aggregator",
    "Combine",
    "WeightedSum",
    "average",
    "blend",
    "by_size",
    "damped",
    "descend",
    "get_rule",
    "uniform",
    "weight_by",
    "weighted_mean",
    "with_server_step",
]
