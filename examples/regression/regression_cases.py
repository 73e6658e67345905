"""Multilevel regressions of known data sets, each with its formula, family and clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import simulated

from pyrofl import federations
from pyrofl.data.frames import Tables

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "hierarchical"
"""Folder of the CSV files, which are not part of the repository; see `--data`."""

Prepare = Callable[[pd.DataFrame], pd.DataFrame]


@dataclass(frozen=True)
class Case:
    """Regression of one data set.

    Attributes:
        data: name of the CSV file, without its ending, or of a simulated table.
        client: column that identifies the client.
        formula: formula of `pyrofl.regression`, or one for each parameter.
        family: family of the responses.
        options: further arguments of `pyrofl.regression`.
        prepare: function of the table that adds columns.
    """

    data: str
    client: str
    formula: str | dict[str, str]
    family: str = "gaussian"
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Prepare = lambda table: table

    def table(self, folder: Path) -> pd.DataFrame:
        """Return all rows, with the added columns."""
        if self.data in simulated.TABLES:
            return simulated.TABLES[self.data]()
        return self.prepare(pd.read_csv(folder / f"{self.data}.csv"))

    def tables(self, folder: Path) -> Tables:
        """Return the rows of each client."""
        found = self.table(folder).groupby(self.client, sort=True)
        return federations.from_frames(
            {str(name): rows.reset_index(drop=True) for name, rows in found}
        )


def _epil(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(log_base=np.log(table["base"] / 4), log_age=np.log(table["age"]))


def _heart(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(sick=(table["target"] > 0).astype(int))


def _penguins(table: pd.DataFrame) -> pd.DataFrame:
    table = table.dropna(subset=["bill_length_mm", "sex"])
    return table.assign(shape=table["bill_depth_mm"] / table["bill_length_mm"])


def _schools(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(precision=1 / table["se"] ** 2)


_EPIL = "log_base * treatment + log_age + visit4 + (1 | subject)"
_HEART = "sick ~ age + sex + C(cp) + exang + oldpeak + (1 | hospital)"
_NES = "partyid7 ~ real_ideo + race_adj + C(age_discrete) + educ1 + gender + income + (1 | year)"
_NURSES = "stress ~ age + gender + experien + C(wardtype) + C(hospsize) + (1 | hospital)"
_KIDNEY = "censored(time, status) ~ age + sex + disease"
_BILLS = "bill_length_mm + bill_depth_mm"
_SCHOOLS = {  # the priors of Gelman et al., and errors that are known: their squares are 1 / weight
    "Intercept": dist.Normal(0.0, 5.0),
    "sd_school": dist.HalfCauchy(5.0),
    "sigma": dist.Uniform(0.9999, 1.0001),
}


def _linear(covariates: int, more: str = "") -> str:
    """Return the formula of x1, x2 and so on, with intercepts of clients."""
    names = (f"x{k}" for k in range(1, covariates + 1))
    return f"y ~ {' + '.join(names)}{more} + (1 | client)"


_LINEAR = {
    "hospitals_160": _linear(8),
    "hospitals_929": _linear(8),
    "admissions": _linear(20, " + f0 + f1 + f2 + f3 + f4"),
    "ratings": "y ~ 1 + (1 | item) + (1 | rater) + (1 | client)",
    "thirty_items": "y ~ 1 + (1 | item) + (1 | rater) + (1 | client)",
    "coefficients_60": _linear(60),
    "coefficients_200": _linear(200),
    "clients_5000": _linear(2),
    "uneven": _linear(4),
}
CASES = {
    "sleepstudy": Case("sleepstudy", "Subject", "Reaction ~ Days + (Days | Subject)"),
    "radon": Case("radon_minnesota", "county", "log_radon ~ floor + log_uranium + (1 | county)"),
    "eight_schools": Case(
        "eight_schools",
        "school",
        "effect ~ 1 + (1 | school)",
        options={"weights": "precision", "priors": _SCHOOLS},
        prepare=_schools,
    ),
    "rats": Case("rats_growth", "rat", "weight ~ day + (day | rat)"),
    "penguins": Case(
        "penguins",
        "island",
        "body_mass_g ~ flipper_length_mm + sex + (1 | island)",
        prepare=_penguins,
    ),
    "nurses": Case("nurses", "hospital", _NURSES),
    "nes": Case("nes_1972_2000", "year", _NES),
    "heart_disease": Case("heart_disease", "hospital", _HEART, "bernoulli", prepare=_heart),
    "trauma": Case(
        "trauma", "hospital", "mortality ~ sex + age + ISS + GCS + (1 | hospital)", "bernoulli"
    ),
    "cbpp": Case("cbpp", "herd", "p(incidence, size) ~ C(period) + (1 | herd)", "binomial"),
    "seeds": Case(
        "seeds", "plate", "p(germinated, seeds) ~ extract * type + (1 | plate)", "binomial"
    ),
    "surgical": Case(
        "surgical", "hospital", "p(deaths, operations) ~ 1 + (1 | hospital)", "binomial"
    ),
    "rat_tumors": Case(
        "rat_tumors", "experiment", "p(tumors, rats) ~ 1 + (1 | experiment)", "binomial"
    ),
    "baseball": Case("baseball_1970", "player", "p(hits, at_bats) ~ 1 + (1 | player)", "binomial"),
    "epil": Case("epil", "subject", f"seizures ~ {_EPIL}", "poisson", prepare=_epil),
    "epil_negative_binomial": Case(
        "epil", "subject", f"seizures ~ {_EPIL}", "negative_binomial", prepare=_epil
    ),
    "epil_zero_inflated": Case(
        "epil", "subject", f"seizures ~ {_EPIL}", "zero_inflated_poisson", prepare=_epil
    ),
    "sleepstudy_student": Case(
        "sleepstudy", "Subject", "Reaction ~ Days + (Days | Subject)", "student"
    ),
    "sleepstudy_gamma": Case("sleepstudy", "Subject", "Reaction ~ Days + (1 | Subject)", "gamma"),
    "sleepstudy_lognormal": Case(
        "sleepstudy", "Subject", "Reaction ~ Days + (Days | Subject)", "lognormal"
    ),
    "penguins_beta": Case(
        "penguins", "island", "shape ~ species + sex + (1 | island)", "beta", prepare=_penguins
    ),
    "penguins_categorical": Case(
        "penguins", "year", f"species ~ {_BILLS}", "categorical", prepare=_penguins
    ),
    "nurses_cumulative": Case("nurses", "hospital", _NURSES, "cumulative"),
    "nes_monotonic": Case(
        "nes_1972_2000", "year", "partyid7 ~ mo(educ1) + mo(income) + gender + (1 | year)"
    ),
    "nurses_process": Case(
        "nurses", "hospital", "stress ~ gp(age) + gender + C(wardtype) + (1 | hospital)"
    ),
    "nurses_sratio": Case(
        "nurses", "hospital", "stress ~ age + cs(experien) + gender + (1 | hospital)", "sratio"
    ),
    "nurses_acat": Case(
        "nurses", "hospital", "stress ~ age + cs(experien) + gender + (1 | hospital)", "acat"
    ),
    "kidney_gamma": Case("kidney", "patient", f"{_KIDNEY} + (1 | patient)", "gamma"),
    "kidney_exponential": Case("kidney", "patient", f"{_KIDNEY} + (1 | patient)", "exponential"),
    "kidney_weibull": Case("kidney", "patient", f"{_KIDNEY} + (1 | patient)", "weibull"),
    "kidney_cox": Case("kidney", "disease", "censored(time, status) ~ age + sex", "cox"),
    **{name: Case(name, "client", text, "bernoulli") for name, text in _LINEAR.items()},
}
"""Name -> case."""
