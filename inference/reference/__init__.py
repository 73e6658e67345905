"""Reference inference by MCMC or SVI on pooled data, and its comparison with federated fits."""

from pyrofl.inference.reference.comparison import compare_posteriors
from pyrofl.inference.reference.samplers import centralized, hmc, nuts, pooled

__all__ = ["centralized", "compare_posteriors", "hmc", "nuts", "pooled"]
