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

USE_JOINT_FAMILY = "a family that joins the shared sites: guides.full_covariance, low_rank(...), "
USE_JOINT_FAMILY += "copula or flow(...)"
USE_DIAGONAL = "pvi.hierarchical(..., covariance='diagonal') without a guide"
USE_NO_GUIDE = "guide=None, which is a normal with all dependences"

ADVICE_BY_GUIDE: dict[object, str] = {
    AutoNormal: USE_DIAGONAL,
    AutoDiagonalNormal: USE_DIAGONAL,
    mean_field: USE_DIAGONAL,
    log_mean_field: USE_DIAGONAL,
    AutoLowRankMultivariateNormal: "guides.low_rank(...)",
    AutoIAFNormal: "guides.flow(...)",
    AutoNormalizingFlow: "guides.flow(...)",
    AutoLaplaceApproximation: USE_NO_GUIDE,
    AutoDelta: USE_NO_GUIDE,
}


def refuse_unsupported_guide(guide: object) -> None:
    """Raise ValueError for a guide of another form, which names the supported one.

    AutoMultivariateNormal stands for `guides.full_covariance`.
    """
    kind = type(guide) if isinstance(guide, AutoGuide) else guide
    if kind is AutoMultivariateNormal and kind is guide:
        return
    if kind in ADVICE_BY_GUIDE:
        advice = ADVICE_BY_GUIDE[kind]
        alone = ", which draws each shared variable by itself" if advice is USE_DIAGONAL else ""
        raise ValueError(f"guide is {described(kind)}{alone}; use {advice}, or {USE_JOINT_FAMILY}")
    automatic = isclass(kind) and issubclass(kind, AutoGuide)
    family = accepts(guide, {}, init_scale=1.0, loc="mu", spread="pi")
    if automatic or (not family and accepts(guide, {}, {}, None)):
        written = "" if automatic else ", which is no family of guides"
        name = described(kind).partition("(")[0]
        raise ValueError(f"guide is {name}{written}; use {USE_NO_GUIDE}, or {USE_JOINT_FAMILY}")
