"""Fit what features.R fits, over clients with default settings, and write features.json.

Each feature of `pyrofl.regression` is compared on the page with the R package that has it. Clients
are groups of the data, or features.R partitions the rows among three. Fits that are in the file are
not computed again.

Run: Rscript examples/regression/features.R FOLDER
     python examples/regression/features.py --data FOLDER [--fits NAMES] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fit_cases import HERE, build
from regression_cases import Case

import pyrofl
from pyrofl import effects

Estimates = dict[str, tuple[float, float | None]]
"""Name of R -> posterior mean and standard deviation, which is None where there is none.

The median of survival curves and restricted means, which are skewed functions of parameters.
"""
Measure = Callable[[Any], Estimates]

SOMEONE = pd.DataFrame({"age": [60], "sex": [1], "ecog": [1]})
GRID = pd.DataFrame({"times": np.arange(5.0, 60.0, 5.0)})  # ms, where curves are compared
VISITS = list(range(90, 721, 90))  # days


def pairs(names: Any, table: pd.DataFrame) -> Estimates:
    """Return means and standard deviations of a table by names."""
    return {str(n): (m, s) for n, m, s in zip(names, table["mean"], table["sd"], strict=True)}


def parameters(run: Any) -> Estimates:
    """Return all parameters by the names of R, such as "sigma SexMale" of b_sigma[Sex[Male]]."""
    table = run.summary()
    return pairs(map(r_name, table.index), table)


def r_name(name: str) -> str:
    """Return the name that features.R has for a parameter."""
    name = re.sub(r"^Intercept(?:_(\w+))?", r"\1 (Intercept)", name)
    name = re.sub(r"^b(?:_(\w+))?\[(.*)\]$", r"\1 \2", name).strip()
    if name.startswith("cutpoints"):
        return name
    name = re.sub(r"^\(Intercept\)\[(.*)\]$", r"\1 (Intercept)", name)
    return re.sub(r"[\[\]]", "", name.replace(", ", " "))


def statements(**differences: str) -> Measure:
    """Return the measure of functions of parameters, such as "b[x] - b[z]", by `hypothesis`."""

    def measure(run: Any) -> Estimates:
        """Return the means of the left sides."""
        table = run.hypothesis([f"{text} > 0" for text in differences.values()])
        return pairs(differences, table)

    return measure


def survival_at(run: Any) -> Estimates:
    """Return medians of survival probabilities of one row."""
    table = effects.survival(run, SOMEONE, [180.0, 365.0, 730.0], "1")
    sd = (table["97.5%"] - table["2.5%"]) / (2 * 1.96)
    names = (f"S({time:g})" for time in table["time"])
    return pairs(names, table.assign(mean=table["median"], sd=sd))


def restricted(run: Any) -> Estimates:
    """Return the median of the restricted mean survival time of one row."""
    table = effects.restricted_mean(run, SOMEONE, 730.0, "1")
    return pairs(["mean"], table.assign(mean=table["median"]))


def curve(run: Any) -> Estimates:
    """Return a curve at the grid."""
    draws = effects.row_draws(run, GRID, "1", 4000)["predictions"]["epred"].to_numpy()[0]
    table = pd.DataFrame({"mean": draws.mean(0), "sd": draws.std(0)})
    return pairs((f"f({x:g})" for x in GRID["times"]), table)


def expected(run: Any) -> Estimates:
    """Return the expected events of each client."""
    return {str(n): (value, None) for n, value in effects.standardize(run)["expected"].items()}


def marginal(run: Any) -> Estimates:
    """Return the marginal means of both genders, and their difference."""
    table = effects.marginal(run, "Gender")
    return pairs(table.index, table)


def explained(run: Any) -> Estimates:
    """Return Bayesian R2."""
    return pairs(["R2"], effects.r2(run))


def kaplan_meier(case: Case, folder: Path) -> Estimates:
    """Return Kaplan-Meier curves of clients with their bands, from counts between visits."""
    counts = pyrofl.survival_counts(case.tables(folder), "time", "status", VISITS, rules=None)
    table = pyrofl.kaplan_meier(counts).query("client != 'all' and 0 < survival < 1")
    estimates: Estimates = {}
    for row in table.itertuples(index=False):
        at = f"(inst={row.client}, {row.time:g})"
        ends = dict(zip(("S", "low", "high"), row[4:7], strict=True))
        estimates |= {f"{n}{at}": (float(v), None) for n, v in ends.items()}
    return estimates


_OWLS = "y ~ food + offset(logBroodSize) + (1 | Nest)"
_DAYS = "Days ~ Eth + Sex + Lrn"
_LUNG = "age + sex + ecog"
_HOUSING = "sat | weights(Freq) ~ Infl + Type + Cont"
CASES = {
    "sigma": Case(
        "orthodont",
        "Subject",
        {"distance": "distance ~ age * Sex + (1 | Subject)", "sigma": "~ Sex"},
    ),
    "phi": Case("engel", "client", {"share": "share ~ log_income", "phi": "~ log_income"}, "beta"),
    "shape": Case("quine", "client", {"Days": _DAYS, "shape": "~ Sex"}, "negative_binomial"),
    "zi": Case("owls", "Nest", {"y": _OWLS, "zi": "~ food"}, "zero_inflated_poisson"),
    "zi_negative_binomial": Case(
        "owls", "Nest", {"y": _OWLS, "zi": "~ food"}, "zero_inflated_negative_binomial"
    ),
    "hurdle": Case("owls", "Nest", {"y": _OWLS, "hu": "~ food"}, "hurdle_poisson"),
    "truncated_poisson": Case(
        "calling_owls", "Nest", _OWLS.replace("y", "y | trunc(lb=1)", 1), "poisson"
    ),
    "truncated_negative_binomial": Case(
        "absent", "client", _DAYS.replace("Days", "Days | trunc(lb=1)"), "negative_binomial"
    ),
    "weibull": Case("lung", "inst", f"censored(time, status) ~ {_LUNG}", "weibull"),
    "intervals": Case(
        "lung", "inst", f"censored(last, status, upper=upper) ~ {_LUNG}", "lognormal"
    ),
    "cox": Case("lung", "inst", f"censored(time, status) ~ {_LUNG}", "cox"),
    "cox_entry": Case(
        "heart", "client", "censored(stop, event, entry=start) ~ age + surgery + transplant", "cox"
    ),
    "meta_fixed": Case("studies", "study", "yi | se(se) ~ 1"),
    "meta_random": Case("studies", "study", "yi | se(se) ~ struct + (1 | study)"),
    "weights": Case("admissions", "client", "y | weights(Freq) ~ Gender + Dept", "bernoulli"),
    "smooth": Case("mcycle", "client", "accel ~ s(times, df=20)"),
    "gp": Case("mcycle", "client", "accel ~ gp(times)"),
    "monotonic": Case("esoph", "client", "p(ncases, n) ~ C(age) + mo(alc)", "binomial"),
    "beta_binomial": Case("cbpp", "herd", "p(incidence, size) ~ period", "beta_binomial"),
    "median": Case(
        "engel", "client", {"foodexp": "foodexp ~ income", "quantile": 0.5}, "asym_laplace"
    ),
    "quantile": Case(
        "engel", "client", {"foodexp": "foodexp ~ income", "quantile": 0.9}, "asym_laplace"
    ),
    "negative_binomial": Case("quine", "client", _DAYS, "negative_binomial"),
    "poisson_identity": Case(
        "warpbreaks", "client", "breaks ~ wool + tension", "poisson", {"link": "identity"}
    ),
    "cumulative": Case("soup", "RESP", "SURENESS ~ PROD + DAY + (1 | RESP)", "cumulative"),
    "cumulative_weights": Case("housing", "client", _HOUSING, "cumulative"),
    "sratio": Case("housing", "client", _HOUSING, "sratio"),
    "acat": Case("housing", "client", _HOUSING, "acat"),
    "categorical": Case("housing", "client", _HOUSING, "categorical"),
    "student": Case("boston", "client", "medv ~ lstat + rm", "student"),
    "r_squared": Case("boston", "client", "medv ~ lstat + rm"),
    "standardize": Case("cbpp", "herd", "p(incidence, size) ~ period + (1 | herd)", "binomial"),
}
"""Name -> case of a fit."""

MEASURES: dict[str, dict[str, Measure]] = {
    "weibull": {"survival": survival_at, "restricted_mean": restricted},
    "weights": {
        "hypothesis": statements(difference="b[Dept[B]] - b[Dept[C]]"),
        "marginal": marginal,
    },
    "smooth": {"smooth": curve},
    "gp": {"gp": curve},
    "monotonic": {
        "monotonic": statements(
            **{
                "1": "3 * b[mo(alc)] * zeta_mo_alc[mo(alc)[1]]",
                "2": "3 * b[mo(alc)] * (1 - zeta_mo_alc[mo(alc)[3]])",
                "3": "3 * b[mo(alc)]",
            }
        )
    },
    "r_squared": {"r_squared": explained},
    "standardize": {"standardize": expected},
}
"""Name of a case -> rows of the page that are more than its parameters."""


def evaluate(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a case: estimates, status and CPU seconds of the fit."""
    case = CASES[name]
    began = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method = build(case, folder)
        run = pyrofl.fit(method, case.tables(folder), progress=False)
        measures = MEASURES.get(name, {})
        estimates = {name: parameters(run), **{row: get(run) for row, get in measures.items()}}
    row: dict[str, Any] = {"formula": case.formula, "family": case.family}
    row |= {"clients": run.data.clients, "rows": len(run.data.y), "status": str(run.status)}
    row |= {"seconds": round(time.process_time() - began, 1)}
    row |= {"warnings": [str(w.message) for w in caught if issubclass(w.category, UserWarning)]}
    return {n: {**row, "estimates": rounded(values)} for n, values in estimates.items()}


def rounded(estimates: Estimates) -> dict[str, list[float | None]]:
    """Return estimates with six digits."""
    return {
        name: [None if v is None else float(f"{v:.6g}") for v in pair]
        for name, pair in estimates.items()
    }


def curves_of_counts(folder: Path) -> dict[str, Any]:
    """Return the row of Kaplan-Meier curves, which are no fit."""
    case = CASES["cox"]
    began = time.process_time()
    estimates, tables = kaplan_meier(case, folder), case.tables(folder)
    row = {"clients": len(tables.frames), "rows": sum(map(len, tables.frames.values()))}
    seconds = round(time.process_time() - began, 1)
    return {**row, "seconds": seconds, "estimates": rounded(estimates)}


def main() -> None:
    """Compute the rows that are missing, and write them after each fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that features.R has filled"
    )
    parser.add_argument("--fits", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=HERE / "features.json")
    args = parser.parse_args()
    if not args.data.is_dir():
        parser.error(f"{args.data} does not exist; expected the folder of features.R: --data")
    rows = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows |= {"kaplan_meier": curves_of_counts(args.data)}
    for name in (name for name in args.fits if name not in rows):
        rows |= evaluate(name, args.data)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, rows[name]["seconds"], rows[name]["status"], flush=True)


if __name__ == "__main__":
    main()
