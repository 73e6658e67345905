"""Figures: every function returns a matplotlib Figure of its own; no window opens."""

from pyrofl.figures.checks import (
    coverage,
    narrowing,
    predictive_checks,
    ranks,
    reliability_by_client,
)
from pyrofl.figures.papers import (
    after_epochs,
    alphas,
    confidence_histogram,
    densities,
    distance,
    simplex,
)
from pyrofl.figures.posteriors import cost, courses, forest, lines, pooling, shrinkage
from pyrofl.figures.runs import (
    clients,
    comparison,
    confidence,
    curves,
    partition,
    reliability,
    save,
)

__all__ = [
    "after_epochs",
    "alphas",
    "clients",
    "comparison",
    "confidence",
    "confidence_histogram",
    "cost",
    "courses",
    "coverage",
    "curves",
    "densities",
    "distance",
    "forest",
    "lines",
    "narrowing",
    "partition",
    "pooling",
    "predictive_checks",
    "ranks",
    "reliability",
    "reliability_by_client",
    "save",
    "shrinkage",
    "simplex",
]
