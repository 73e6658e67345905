"""Guides of the families that users choose, of the library or Pyro's automatic ones."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isclass
from typing import Any, cast

import torch
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuide,
    AutoMultivariateNormal,
    AutoNormal,
)

from pyrofl.arguments import accepts, described
from pyrofl.inference.definition.programs import Guide
from pyrofl.models.guides.automatic import of_sites
from pyrofl.models.guides.basic import Family, Shapes, delta, mean_field
from pyrofl.models.guides.correlated import full_covariance

# Sites of networks are real, so that these are the same distributions.
AUTOGUIDES: dict[object, Family] = {
    AutoNormal: mean_field,
    AutoDiagonalNormal: mean_field,
    AutoDelta: delta,
    AutoMultivariateNormal: full_covariance,
}
EXAMPLES = "guides.delta, guides.mean_field, guides.full_covariance, guides.low_rank(2), "
EXAMPLES += "guides.copula or guides.flow()"


def build_guide(
    family: object, shapes: Shapes, *, is_simplex: bool = False, **settings: Any
) -> Guide:
    """Return the guide of a family for sites of the given shapes.

    Args:
        family: what the user passed as `guide`: a family, a guide of `from_pyro`, a Pyro guide
            (received, local, batch), or an AutoGuide class, which stands for the family of the same
            distributions where there is one.
        shapes: of the sites, by name.
        is_simplex: whether the sites are weights that sum to one over their last axis.
        settings: further arguments of a `Family`.

    Raises:
        ValueError: if it is no family, or one of other sites.
    """
    expected = f"expected a family such as {EXAMPLES} or a Pyro guide"
    if is_simplex:
        expected = "expected simplex.softmax or simplex.dirichlet, or their names"
    elif isclass(family):
        family = AUTOGUIDES.get(family, family)
    elif isinstance(family, Guide):
        family.start({n: torch.zeros(shape) for n, shape in shapes.items()})  # refuses other sites
        return family
    automatic = isclass(family) and issubclass(family, AutoGuide)
    if automatic or not accepts(family, shapes, **settings):
        if not is_simplex and (automatic or accepts(family, {}, {}, None)):
            return of_sites(cast("Callable[..., Any]", family), shapes, automatic)
        raise ValueError(f"guide is {described(family)}; {expected}")
    guide = cast("Family", family)(shapes, **settings)
    if not isinstance(guide, Guide) or guide.is_simplex != is_simplex:
        kind = "weights that sum to one" if is_simplex else "real numbers"
        raise ValueError(f"guide is {described(family)}, which is not one of {kind}; {expected}")
    return guide
