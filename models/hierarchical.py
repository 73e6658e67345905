"""The method that fits a hierarchical program in the fewest rounds.

These are likelihood factors (`pyrofl.models.likelihood_factors`, about three rounds), if each
client's own sites are normal given the shared ones, and otherwise PVI (`pyrofl.models.pvi`, some 10
to 60 rounds). Both take the same programs, and `to_arviz` corrects the draws of both.
"""

from __future__ import annotations

from pyrofl.arguments import Positive, checked
from pyrofl.data import Federation
from pyrofl.inference.method import Method
from pyrofl.inference.programs import Program
from pyrofl.models import likelihood_factors, pvi
from pyrofl.models.likelihood_factors.structure import OTHERS

__all__ = ["method"]


@checked
def method(model: Program, data: Federation, *, shared: str, wide: Positive = 10.0) -> Method:
    """Build likelihood factors for a hierarchical program if it has their structure, else PVI.

    Args:
        model: a program (received, local, batch), as of `pvi.hierarchical`.
        data: the federation.
        shared: patterns of the sites that are one for all clients; others are each client's own.
        wide: standard deviation of improper priors before round one.

    Returns:
        The method; its name is "likelihood_factors" or "pvi".

    Raises:
        ValueError: if neither method can fit the program; see `pvi.hierarchical`.
    """
    try:
        return likelihood_factors.hierarchical(model, data, shared=shared, wide=wide)
    except ValueError as error:
        if not str(error).endswith(OTHERS):
            raise
    return pvi.hierarchical(model, data, shared=shared, wide=wide)
