"""Personal copies of the model besides the global one, as in Ditto and pFedMe.

A client holds parameters twice: those that came down, such as "w/fc1.weight", and its own under
"own/w/fc1.weight". Programs read the former; `as_personal` puts the latter in their place.
"""

from __future__ import annotations

from torch import Generator

from pyrofl.data import Cohort
from pyrofl.tensors import Tensors, role, under


def as_personal(received: Tensors, local: Tensors) -> Tensors:
    """Return the local tensors, with the personal parameters in place of the global ones."""
    return local | role("own", local)


def start_own(received: Tensors, cohort: Cohort, generator: Generator) -> Tensors:
    """Initialize a client's personal parameters with the received global ones."""
    return under("own", received)
