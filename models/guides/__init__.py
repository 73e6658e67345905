"""Guides: variational families for each client's parameters, inside Pyro's client plate."""

from pyrofl.inference.definition.programs import Guide
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.models.guides.basic import (
    Family,
    delta,
    inverse_softplus,
    log_mean_field,
    mean_field,
)
from pyrofl.models.guides.building import build_guide
from pyrofl.models.guides.correlated import copula, flow, full_covariance, low_rank

__all__ = [
    "Family",
    "Guide",
    "build_guide",
    "copula",
    "delta",
    "flow",
    "from_pyro",
    "full_covariance",
    "inverse_softplus",
    "log_mean_field",
    "low_rank",
    "mean_field",
]
