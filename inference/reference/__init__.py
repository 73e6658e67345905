"""Reference inference by MCMC or SVI on pooled data, and its comparison with federated fits."""

from pyrofl.inference.reference.comparison import compare_posteriors
from pyrofl.inference.reference.samplers import centralised, hmc, nuts, pooled

__all__ = ["centralised", "compare_posteriors", "hmc", "nuts", "pooled"]
