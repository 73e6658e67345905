"""Which guides of shared sites `pvi.hierarchical` supports, and what to use instead of others."""

from __future__ import annotations

from inspect import isclass

from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuide,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
)

from pyrofl.arguments import accepts, described
from pyrofl.models.guides import log_mean_field, mean_field

JOINED = "a family that joins the shared sites: guides.full_covariance, low_rank(...), copula or "
JOINED += "flow(...)"
DIAGONAL = "pvi.hierarchical(..., covariance='diagonal') without a guide"
NORMAL = "guide=None, which is a normal with all dependences"

INSTEAD: dict[object, str] = {
    AutoNormal: DIAGONAL,
    AutoDiagonalNormal: DIAGONAL,
    mean_field: DIAGONAL,
    log_mean_field: DIAGONAL,
    AutoLowRankMultivariateNormal: "guides.low_rank(...)",
    AutoIAFNormal: "guides.flow(...)",
    AutoNormalizingFlow: "guides.flow(...)",
    AutoLaplaceApproximation: NORMAL,
    AutoDelta: NORMAL,
}


def refuse_other_forms(guide: object) -> None:
    """Raise ValueError for a guide of another form, which names the supported one.

    AutoMultivariateNormal stands for `guides.full_covariance`.
    """
    kind = type(guide) if isinstance(guide, AutoGuide) else guide
    if kind is AutoMultivariateNormal and kind is guide:
        return
    if kind in INSTEAD:
        alone = ", which draws each shared variable by itself" if INSTEAD[kind] is DIAGONAL else ""
        raise ValueError(f"guide is {described(kind)}{alone}; use {INSTEAD[kind]}, or {JOINED}")
    automatic = isclass(kind) and issubclass(kind, AutoGuide)
    family = accepts(guide, {}, init_scale=1.0, loc="mu", spread="pi")
    if automatic or (not family and accepts(guide, {}, {}, None)):
        written = "" if automatic else ", which is no family of guides"
        name = described(kind).partition("(")[0]
        raise ValueError(f"guide is {name}{written}; use {NORMAL}, or {JOINED}")
