"""Families of responses: links, Pyro distributions, auxiliary parameters and their priors.

A likelihood is Pyro code of one line; it may use eta, the linear predictor [C, B], y, the
responses, the auxiliary parameters by name, and the response's own columns (trials, event). A
cumulative hazard may use the same, and {t}, a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyrofl.arguments import check_name

Floats = NDArray[np.float64]

SMALLEST = "1e-9"  # response of a positive family whose logarithm has a finite slope
SUPPORTS = {
    "real": "finite numbers",
    "binary": "0 and 1, or two categories",
    "count": "whole numbers of at least 0",
    "trials": "whole numbers from 0 to the number of trials",
    "positive": f"numbers above 0, at least {SMALLEST} in their unit",
    "nonnegative": "numbers of at least 0",
    "unit": "numbers between 0 and 1, both excluded",
    "closed unit": "numbers from 0 to 1",
    "levels": "at least three categories, or whole numbers",
}
"""Name of a support -> the values that it admits."""


LINKS = {
    **dict.fromkeys(("sigma", "nu", "phi", "shape"), ".exp()"),
    **dict.fromkeys(("zi", "hu", "zoi", "coi", "quantile"), ".sigmoid()"),
    "alpha": "",
}
"""Parameter of a family -> Pyro code that maps its linear predictor to its values."""
DOMAINS = {".exp()": "positive numbers", ".sigmoid()": "numbers between 0 and 1", "": "numbers"}
"""Pyro code of `LINKS` -> the values that the parameter may have."""


@dataclass(frozen=True)
class Family:
    """Family of responses.

    Attributes:
        links: name of the link -> Pyro code of the likelihood; the first is the default.
        support: one of `SUPPORTS`.
        auxiliary: name of a parameter -> Pyro code of its prior, where S stands for the
            standard deviation of the response; "" if it needs a value or a formula.
        kind: "rows" if a row has a distribution of its own, "factor" if a row has a log density,
            "cox" if a client has one, "ordinal" or "categorical".
        column: name of the response's second column, such as trials.
        center: where the prior of the intercept is centered: at the link of the mean response,
            "mean", at the log hazard of the mean time, "time", or at 0, "zero".
        ratio: name of the link -> name of exp(b), such as "odds ratio"; empty if it has none.
        response: Pyro code of a new row's distribution, if its likelihood is not one.
        is_smooth: whether the log density has second derivatives, which likelihood factors need.
        additions: further columns that the response may have, such as se, or trunc.
        cumulative: Pyro code of the cumulative hazard at a time {t}, which bounds of times need.
        is_ordered: whether cut points of ordered categories are ordered, too.
    """

    links: Mapping[str, str]
    support: str
    auxiliary: Mapping[str, str] = field(default_factory=dict)
    kind: str = "rows"
    column: str = ""
    center: str = "zero"
    ratio: Mapping[str, str] = field(default_factory=dict)
    response: str = ""
    is_smooth: bool = True
    additions: tuple[str, ...] = ()
    cumulative: str = ""
    is_ordered: bool = True

    def link(self, name: str | None) -> str:
        """Return the name of a link after validation; None is the default."""
        name = next(iter(self.links)) if name is None else name
        check_name(name, self.links, "link")
        return name

    def admits(self, y: Floats, second: Floats | None) -> NDArray[np.bool_]:
        """Return whether each response [N] is in the family's support.

        Args:
            y: responses.
            second: trials, or upper bounds of events that are after a time, or None.
        """
        whole = (y == np.round(y)) & (y >= 0)
        is_left = (y == 0) & ((0.0 if second is None else second) > 0)
        fits: NDArray[np.bool_] = {
            "real": np.isfinite(y),
            "binary": (y == 0) | (y == 1),
            "count": whole,
            "trials": whole & (y <= (np.inf if second is None else second)),
            "positive": np.isfinite(y) & (is_left | (y >= float(SMALLEST))),
            "nonnegative": np.isfinite(y) & (y >= 0),
            "unit": (y > 0) & (y < 1),
            "closed unit": (y >= 0) & (y <= 1),
            "levels": whole,
        }[self.support]
        return fits


_PROBIT = "torch.special.ndtr(eta).clamp(1e-12, 1 - 1e-12)"
_CLOGLOG = "(-torch.expm1(-eta.exp())).clamp(1e-12, 1 - 1e-12)"
_ODDS, _RATE, _HAZARD = {"logit": "odds ratio"}, {"log": "rate ratio"}, {"log": "hazard ratio"}
_MEANS = {"log": "ratio of means"}
_SIGMA, _SHAPE = {"sigma": "dist.Exponential(1 / S)"}, {"shape": "dist.Gamma(2.0, 0.1)"}
_PHI, _BETA = {"phi": "dist.Gamma(2.0, 0.1)"}, "phi * eta.sigmoid(), phi * (-eta).sigmoid()"
_ODD = "(quantile / (1 - quantile)).sqrt()"
_POSITIVE_RATE = "torch.where(eta < 0, torch.nan, eta)"  # points with negative rates are rejected
_QUANTILE = f"sigma / (quantile * (1 - quantile)).sqrt(), {_ODD}"
_GATE, _HURDLE = {"zi": "dist.Beta(1.0, 1.0)"}, {"hu": "dist.Beta(1.0, 1.0)"}

FAMILIES: dict[str, Family] = {
    "gaussian": Family(
        {"identity": "dist.Normal(eta, sigma)", "log": "dist.Normal(eta.exp(), sigma)"},
        "real",
        _SIGMA,
        center="mean",
        ratio=_MEANS,
        additions=("se", "trunc"),
    ),
    "student": Family(
        {"identity": "dist.StudentT(nu, eta, sigma)"},
        "real",
        {**_SIGMA, "nu": "dist.Gamma(2.0, 0.1)"},
        center="mean",
        additions=("se",),
    ),
    "skew_normal": Family(
        {"identity": "SkewNormal(eta, sigma, alpha)"},
        "real",
        {**_SIGMA, "alpha": "dist.Normal(0.0, 4.0)"},
        center="mean",
        additions=("se",),
    ),
    "asym_laplace": Family(
        {"identity": f"dist.AsymmetricLaplace(eta, {_QUANTILE})"},
        "real",
        {**_SIGMA, "quantile": ""},
        center="mean",
        is_smooth=False,
    ),
    "bernoulli": Family(
        {
            "logit": "dist.Bernoulli(logits=eta)",
            "probit": f"dist.Bernoulli({_PROBIT})",
            "cloglog": f"dist.Bernoulli({_CLOGLOG})",
        },
        "binary",
        ratio=_ODDS,
    ),
    "binomial": Family(
        {
            "logit": "dist.Binomial(trials, logits=eta)",
            "probit": f"dist.Binomial(trials, {_PROBIT})",
            "cloglog": f"dist.Binomial(trials, {_CLOGLOG})",
        },
        "trials",
        column="trials",
        ratio=_ODDS,
    ),
    "beta_binomial": Family(
        {"logit": f"dist.BetaBinomial({_BETA}, trials)"},
        "trials",
        _PHI,
        column="trials",
        ratio=_ODDS,
    ),
    "poisson": Family(
        {"log": "dist.Poisson(eta.exp())", "identity": f"dist.Poisson({_POSITIVE_RATE})"},
        "count",
        additions=("trunc",),
        center="mean",
        ratio=_RATE,
    ),
    "negative_binomial": Family(
        {"log": "dist.NegativeBinomial(shape, logits=eta - shape.log())"},
        "count",
        _SHAPE,
        center="mean",
        ratio=_RATE,
        additions=("trunc",),
    ),
    "zero_inflated_poisson": Family(
        {"log": "dist.ZeroInflatedPoisson(eta.exp(), gate=zi)"},
        "count",
        _GATE,
        center="mean",
        ratio=_RATE,
    ),
    "zero_inflated_negative_binomial": Family(
        {"log": "dist.ZeroInflatedNegativeBinomial(shape, logits=eta - shape.log(), gate=zi)"},
        "count",
        {**_SHAPE, **_GATE},
        center="mean",
        ratio=_RATE,
    ),
    "hurdle_poisson": Family(
        {"log": "Hurdle(dist.Poisson(eta.exp()), hu)"},
        "count",
        _HURDLE,
        center="mean",
        ratio=_RATE,
    ),
    "hurdle_negative_binomial": Family(
        {"log": "Hurdle(dist.NegativeBinomial(shape, logits=eta - shape.log()), hu)"},
        "count",
        {**_SHAPE, **_HURDLE},
        center="mean",
        ratio=_RATE,
    ),
    "hurdle_gamma": Family(
        {"log": "Hurdle(dist.Gamma(shape, shape * (-eta).exp()), hu)"},
        "nonnegative",
        {**_SHAPE, **_HURDLE},
        center="mean",
        ratio=_MEANS,
    ),
    "gamma": Family(
        {"log": "dist.Gamma(shape, shape * (-eta).exp())"},
        "positive",
        _SHAPE,
        center="mean",
        ratio=_MEANS,
        additions=("event", "upper", "entry"),
        cumulative="-log_gamma_survival(shape, shape * (-eta).exp() * {t})",
    ),
    "lognormal": Family(
        {"identity": "dist.LogNormal(eta, sigma)"},
        "positive",
        _SIGMA,
        center="mean",
        ratio={"identity": "ratio of medians"},
        additions=("event", "upper", "entry"),
        cumulative="-torch.special.log_ndtr((eta - {t}.log()) / sigma)",
    ),
    "beta": Family(
        {"logit": f"dist.Beta({_BETA})"},
        "unit",
        _PHI,
        ratio=_ODDS,
    ),
    "zero_one_inflated_beta": Family(
        {"logit": "ZeroOneInflatedBeta(eta.sigmoid(), phi, zoi, coi)"},
        "closed unit",
        {**_PHI, "zoi": "dist.Beta(1.0, 1.0)", "coi": "dist.Beta(1.0, 1.0)"},
        ratio=_ODDS,
    ),
    "cumulative": Family(
        {"logit": "dist.OrderedLogistic(eta, cutpoints)"}, "levels", kind="ordinal", ratio=_ODDS
    ),
    "sratio": Family(
        {"logit": "dist.Categorical(logits=stopping(eta, cutpoints))"},
        "levels",
        kind="ordinal",
        ratio=_ODDS,
        is_ordered=False,
    ),
    "acat": Family(
        {"logit": "dist.Categorical(logits=adjacent(eta, cutpoints))"},
        "levels",
        kind="ordinal",
        ratio=_ODDS,
        is_ordered=False,
    ),
    "categorical": Family(
        {"logit": "dist.Categorical(logits=logits)"}, "levels", kind="categorical", ratio=_ODDS
    ),
    "exponential": Family(
        {"log": "event * eta - y * eta.exp()"},
        "positive",
        kind="factor",
        column="event",
        ratio=_HAZARD,
        center="time",
        response="dist.Exponential(eta.exp())",
        additions=("upper", "entry"),
        cumulative="{t} * eta.exp()",
    ),
    "weibull": Family(
        {"log": "event * (shape.log() + (shape - 1) * y.log() + eta) - y**shape * eta.exp()"},
        "positive",
        {"shape": "dist.Gamma(2.0, 1.0)"},
        kind="factor",
        column="event",
        ratio=_HAZARD,
        center="time",
        response="dist.Weibull((-eta / shape).exp(), shape + 0 * eta)",
        additions=("upper", "entry"),
        cumulative="{t}**shape * eta.exp()",
    ),
    "cox": Family(
        {"log": "cox(eta, y, event, batch.mask)"},
        "positive",
        kind="cox",
        column="event",
        ratio=_HAZARD,
        additions=("entry",),
    ),
}
"""Name of a family -> its links, likelihood, auxiliary parameters and priors."""


def family_of(name: str) -> Family:
    """Return the family of the given name; raise ValueError with the nearest name if unknown."""
    check_name(name, FAMILIES, "family")
    return FAMILIES[name]
