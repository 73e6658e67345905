"""Hierarchical models as users would write them, each with its table, settings and reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import binomial
import lines
import positive
import tables

from pyrofl import Federation, Method
from pyrofl.inference.programs import Program
from pyrofl.models import pvi


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its table, and what is compared.

    Attributes:
        name: of the problem.
        family: of the responses, given all variables.
        program: a user's program.
        load: makes the federation.
        shared: patterns of the sites that clients share.
        own: what clients have for themselves and is compared, too.
        also: what follows from the shared sites and is compared.
        hidden: shared sites that are not compared.
        settings: arguments of `pvi.hierarchical`.
        rounds: of the fit.
        exact: what a client's own variables are in the reference: integrated out by "quadrature",
            in closed form as they are "normal", or drawn with the others by "nuts".
        nuts: draws and warm-up of each of the four chains.
        sums: program and table that have the same posterior, and few rows.
    """

    name: str
    family: str
    program: Program
    load: Callable[[], Federation]
    shared: str
    own: str = ""
    also: str = ""
    hidden: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: int = 30
    exact: Literal["quadrature", "normal", "nuts"] = "quadrature"
    nuts: tuple[int, int] = (500, 300)
    sums: tuple[Program, Callable[[], Federation]] | None = None

    @property
    def compared(self) -> tuple[str, ...]:
        """Sites that are compared: those of the population first."""
        return (*self.population, *self.own.split())

    @property
    def population(self) -> tuple[str, ...]:
        """Shared sites that are compared."""
        shown = [n for n in self.shared.split() if n not in self.hidden.split()]
        return (*shown, *self.also.split())

    def method(self, data: Federation, **changes: Any) -> Method:
        """Build PVI with the problem's settings, some of them changed."""
        return pvi.hierarchical(
            self.program, data, shared=self.shared, **{**self.settings, **changes}
        )

    def pooled(self) -> tuple[Program, Federation]:
        """Return program and table of the reference."""
        program, load = self.sums or (self.program, self.load)
        return program, load()


sleep = partial(tables.courses, "sleepstudy", "Reaction", "Days", "Subject")
rats = partial(tables.courses, "rats_growth", "weight", "day", "rat")
FEW = {"num_particles": 32, "steps": 5}
MANY = {"num_particles": 96, "steps": 5}
LINES = {"num_particles": 32, "steps": 20}
LKJ = Problem(
    "sleepstudy_lkj",
    "normal, correlated effects",
    lines.correlated_lines,
    sleep,
    "beta sd sigma root",
    "w",
    "rho",
    "root",
    LINES,
    rounds=50,
    exact="normal",
)
EPIL = Problem("epil", "Poisson", positive.epil, tables.epil, "beta tau", "b")

PROBLEMS = {
    p.name: p
    for p in [
        Problem("surgical", "binomial", binomial.surgical, tables.surgical, "mu tau", "b"),
        Problem("seeds", "binomial", binomial.seeds, tables.seeds, "alpha sigma", "b"),
        Problem("cbpp", "binomial", binomial.cbpp, tables.cbpp, "beta tau", "b"),
        EPIL,
        replace(
            EPIL,
            name="epil_visits",
            program=positive.epil_visits,
            shared="beta tau sigma",
            exact="nuts",
        ),
        Problem(
            "kidney",
            "Weibull, censored",
            positive.kidney,
            tables.kidney,
            "b0 beta shape tau",
            "f",
        ),
        Problem(
            "eight_schools",
            "normal",
            lines.eight_schools,
            partial(tables.built_in, "eight_schools"),
            "mu tau",
            "theta",
            exact="normal",
        ),
        Problem(
            "rat_tumours",
            "binomial",
            binomial.rat_tumours,
            partial(tables.built_in, "rat_tumours"),
            "mu tau",
            "rate",
            settings=FEW,
            rounds=60,
        ),
        Problem(
            "baseball",
            "binomial",
            binomial.baseball,
            partial(tables.built_in, "baseball"),
            "mu tau",
            "ability",
            rounds=40,
        ),
        Problem(
            "radon_minnesota",
            "normal",
            lines.radon,
            tables.radon,
            "gamma sd sigma",
            "intercept slope",
            settings=FEW,
            rounds=60,
            exact="normal",
        ),
        Problem(
            "sleepstudy",
            "normal",
            lines.lines,
            sleep,
            "beta sd sigma",
            "w",
            settings=LINES,
            rounds=50,
            exact="normal",
        ),
        LKJ,
        Problem(
            "nes",
            "normal",
            lines.nes,
            tables.nes,
            "beta tau sigma",
            "w",
            settings=MANY,
            rounds=60,
            exact="normal",
            sums=(lines.nes_sums, tables.nes_sums),
        ),
        Problem(
            "heart_disease",
            "Bernoulli",
            binomial.heart_disease,
            tables.heart_disease,
            "beta tau",
            "w",
            settings=MANY,
            rounds=60,
            exact="nuts",
        ),
        replace(
            EPIL,
            name="epil_negative_binomial",
            family="negative binomial",
            program=positive.epil_negative_binomial,
            shared="beta tau size",
        ),
        Problem(
            "cbpp_beta",
            "beta-binomial",
            binomial.cbpp_beta,
            tables.cbpp,
            "size beta tau",
            "b",
        ),
        Problem(
            "sleepstudy_gamma",
            "gamma",
            positive.reactions,
            tables.reactions,
            "beta tau spread",
            "b",
        ),
        Problem(
            "sleepstudy_robust",
            "Student's t",
            lines.robust_lines,
            sleep,
            "beta sd sigma df",
            "w",
            settings=LINES,
            rounds=50,
            exact="nuts",
        ),
        replace(LKJ, name="rats_growth_lkj", load=rats),
    ]
}
