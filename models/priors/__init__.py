"""Priors on the parameters of a network."""

from pyrofl.models.priors.families import (
    Family,
    Prior,
    around,
    as_event,
    by_name,
    fixed,
    flat,
    mixture,
    proximal,
    student_t,
)
from pyrofl.models.priors.horseshoe import Horseshoe

__all__ = [
    "Family",
    "Horseshoe",
    "Prior",
    "around",
    "as_event",
    "by_name",
    "fixed",
    "flat",
    "mixture",
    "proximal",
    "student_t",
]
