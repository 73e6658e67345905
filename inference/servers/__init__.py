"""What a server makes of messages: weighted means, merges that bear bad ones, optimiser steps."""

from pyrofl.inference.facts import NOT_NEGATIVE, POSITIVE
from pyrofl.inference.servers.averages import average, blend, weighted_mean
from pyrofl.inference.servers.optimisers import descend
from pyrofl.inference.servers.pooled import Pooled, Total, by, by_size, evenly, followed
from pyrofl.inference.servers.robust import Combine, combining

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
