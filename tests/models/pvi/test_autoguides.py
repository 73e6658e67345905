"""Guides of Pyro in hierarchical programs: they work, or one line names the supported form."""

from __future__ import annotations

from typing import Any

import pytest
from programs import eight_schools as schools_program
from pyro.infer import autoguide

import pyrofl
from pyrofl import datasets, federations, fit
from pyrofl.models import guides, pvi

hierarchies = pytest.mark.parametrize("build", [pvi.hierarchical, pyrofl.hierarchical])


def eight() -> Any:
    return federations.split(datasets.load("eight_schools"), "groups", 8)


@hierarchies
@pytest.mark.parametrize("guide", [autoguide.AutoMultivariateNormal, guides.full_covariance])
def test_guides_that_join_shared_sites_work(build, guide):
    method = build(schools_program, eight(), shared="mu tau", guide=guide)
    assert method.name == "pvi"
    draws = fit(method, eight(), 1, progress=False).posterior(3)
    assert tuple(draws["theta"].shape) == (3, 8)


@hierarchies
@pytest.mark.parametrize(
    ("guide", "instead"),
    [
        (autoguide.AutoNormal, r"pvi.hierarchical\(..., covariance='diagonal'\)"),
        (autoguide.AutoDiagonalNormal, r"pvi.hierarchical\(..., covariance='diagonal'\)"),
        (guides.mean_field, r"pvi.hierarchical\(..., covariance='diagonal'\)"),
        (autoguide.AutoLowRankMultivariateNormal, r"guides.low_rank\(...\)"),
        (autoguide.AutoIAFNormal, r"guides.flow\(...\)"),
        (autoguide.AutoLaplaceApproximation, "guide=None"),
        (autoguide.AutoDelta, "guide=None"),
        (autoguide.AutoNormal(schools_program), r"pvi.hierarchical\(..., covariance='diagonal'\)"),
    ],
)
def test_other_guides_are_refused_in_one_line(build, guide, instead):
    with pytest.raises(ValueError, match=rf"^guide is .*; use [^\n]*{instead}[^\n]*$"):
        build(schools_program, eight(), shared="mu tau", guide=guide)


@hierarchies
def test_a_written_guide_is_refused_in_one_line(build):
    def written(received: Any, local: Any, batch: Any) -> None:
        """Sample nothing."""

    with pytest.raises(ValueError, match=r"^guide is written, .*; use guide=None.*family[^\n]*$"):
        build(schools_program, eight(), shared="mu tau", guide=written)
