"""Reference inference: the same Pyro program with all clients pooled, and what federation costs."""

from pyrofl.inference.reference.comparison import compare_posteriors
from pyrofl.inference.reference.samplers import centralised, nuts, pooled

__all__ = ["centralised", "compare_posteriors", "nuts", "pooled"]
