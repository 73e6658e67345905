"""Figures: every function returns a matplotlib Figure of its own; no window opens."""

from pyrofl.figures.runs import (
    clients,
    comparison,
    confidence,
    curves,
    partition,
    reliability,
    save,
)

__all__ = ["clients", "comparison", "confidence", "curves", "partition", "reliability", "save"]
