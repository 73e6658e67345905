"""What a server makes of messages: weighted means, merges that bear bad ones, optimiser steps."""

from pyrofl.inference.facts import NOT_NEGATIVE, POSITIVE
from pyrofl.inference.servers.averages import Combine, average, blend, combining, weighted_mean
from pyrofl.inference.servers.pooled import Pooled, Total, by, by_size, descend, evenly, followed

__all__ = [
    "NOT_NEGATIVE",
    "POSITIVE",
    "Combine",
    "Pooled",
    "Total",
    "average",
    "blend",
    "by",
    "by_size",
    "combining",
    "descend",
    "evenly",
    "followed",
    "weighted_mean",
]
