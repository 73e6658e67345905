"""Write the page of known multilevel data sets from the results of the scripts of this folder.

Run: python examples/regression/gallery.py [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from regression_cases import CASES, Case

from pyrofl.files.text_tables import markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "regression_gallery.md"


FURTHER = {
    "cbpp": "contagious bovine pleuropneumonia in four periods (Lesnoff et al. 2004; cbpp of lme4)",
    "radon": "log radon in houses, by floor (0: basement) and uranium in the county (Gelman and "
    "Hill 2007, section 12.6)",
    "eight_schools": "eight schools (Rubin 1981); precision is 1 / se^2, and a prior fixes the "
    "residual standard deviation at 1",
    "rats": "weights (g) of rats at five ages (Gelfand et al. 1990; BUGS volume 1)",
    "penguins": "body mass (g) of penguins (Gorman et al. 2014; palmerpenguins)",
    "nurses": "stress of nurses in 25 hospitals (Hox et al. 2010, simulated)",
    "nes": "party identification, 1 to 7, in eight US election studies (Gelman and Hill 2007, "
    "section 4.7)",
    "heart_disease": "heart disease, complete rows (Detrano et al. 1989; UCI)",
    "trauma": "mortality of trauma patients (Draaisma et al. 1989; R package BFI)",
    "seeds": "germinated seeds by type and root extract (Crowder 1978; BUGS volume 1)",
    "epil": "seizures in four periods (Thall and Vail 1990; epil of MASS); log_base is the log of "
    "a quarter of the baseline count",
}
"""Name of a case without a section -> its description."""

BEGIN = """# Known multilevel data sets

This page fits twelve well-known multilevel data sets with one line each, and compares the estimates
with lme4 VERSION. Each group is a client; `tables` is `federations.from_frames({client: frame})`.

lme4, brms and Bambi take the same [formula](regression.md); in R, `C(x)` is `factor(x)`, and
`p(k, n)` is `cbind(k, n - k)` for lme4 and `k | trials(n)` for brms.

The table has posterior means (standard deviations) of pyrofl, and estimates (standard errors) of
lme4, by REML for normal responses. Scales of few groups, such as three islands or hospitals, are
larger in pyrofl, because the mean of a skewed posterior is above its mode. All estimates are in
[results.json](../regression/results.json) and [lme4.json](../regression/lme4.json).
"""

SLEEP = """## Sleep deprivation

Reaction times (ms) in ten days (Belenky et al. 2003; `sleepstudy` of lme4).

```text
# pyrofl
pyrofl.regression("Reaction ~ Days + (Days | Subject)", tables, client="Subject")
# lme4
lmer(Reaction ~ Days + (Days | Subject), sleepstudy)
# brms
brm(Reaction ~ Days + (Days | Subject), sleepstudy)
# Bambi
bmb.Model("Reaction ~ Days + (Days | Subject)", sleepstudy)
```
"""


def page(
    results: dict[str, Any],
    lme4: dict[str, Any],
    features: dict[str, Any],
    features_r: dict[str, Any],
    nuts: dict[str, float],
) -> str:
    """Return the text of the page."""
    parts = [BEGIN.replace("VERSION", lme4["versions"]["lme4"])]
    parts.append(SLEEP)
    parts.append(table(results["sleepstudy"]["estimates"], lme4["sleepstudy"]) + "\n")
    others = (f"# {about}\n{line(CASES[name])}" for name, about in FURTHER.items())
    code = "\n".join(others)
    further = f"## Further data sets\n\n```text\n{code}\n```\n"
    parts += [further, comparison(results), seconds(results, lme4, nuts)]
    return "\n".join([*parts, compared_with_r(features, features_r)])


def line(case: Case) -> str:
    """Return the line that fits a case."""
    options = f', family="{case.family}"' * (case.family != "gaussian")
    more = ', weights="precision", priors=priors' if case.options else ""
    return f'pyrofl.regression("{case.formula}", tables{options}, client="{case.client}"{more})'


def table(estimates: dict[str, list[float]], lme4: dict[str, Any]) -> str:
    """Return a table of estimates, compared with those of lme4."""
    rows = list[tuple[str, ...]]()
    known = matched(list(estimates), lme4)
    for parameter in sorted(estimates, key=lambda n: n != "Intercept"):
        if parameter in known:
            mine, other = estimates[parameter], known[parameter]
            texts = number(*mine), number(other[0], *(other[1:] or [None]), like=mine[1])
            rows.append((f"`{parameter}`", *texts))
    return markdown(("parameter", "pyrofl", "lme4"), rows)


def matched(names: list[str], lme4: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return the estimates of lme4 by the names of pyrofl."""
    terms = {plain(name): name for name in names if name == "Intercept" or name[:2] == "b["}
    scales = [n for n in names if n.startswith(("sd_", "corr_")) or n == "sigma"]
    sd = lme4["sd"] if isinstance(lme4["sd"], list) else [lme4["sd"]]
    found: dict[str, tuple[float, ...]] = {
        terms[plain(name)]: (value, lme4["se"][name]) for name, value in lme4["estimate"].items()
    }
    return found | {n: (v,) for n, v in zip(scales, sd, strict=True)}


def plain(name: str) -> str:
    """Return the name of a coefficient without brackets, as in "cp2" for "b[C(cp)[2.0]]"."""
    inner = name[2:-1] if name.startswith("b[") else name
    return re.sub(r"\bC\(|factor\(|[()\[\]]|\.0\b", "", inner)


def number(value: float, error: float | None, like: float = 0.0) -> str:
    """Return a number with the digits that its error, or `like`, needs, and the error."""
    size = like if error is None else error
    digits = 0 if size >= 10 else 1 if size >= 1 else 2 if size >= 0.1 else 3 if size >= 0.01 else 4
    return f"{value:.{digits}f}" + ("" if error is None else f" ({error:.{digits}f})")


def comparison(results: dict[str, Any]) -> str:
    """Return the section that compares all cases with NUTS."""
    compared = {n: row for n, row in results.items() if row["verdict"] != "no reference"}
    families = len({row["family"] for row in compared.values()})
    good = [name for name, row in compared.items() if row["verdict"] == "accurate"]
    text = (
        f"Of {len(compared)} regressions of {families} families, {len(good)} agree with NumPyro's "
        "NUTS on the pooled rows. Means differ by at most 0.1 standard deviations. Ratios of "
        "standard deviations are between 0.9 and 1.1, up to two Monte Carlo standard errors. "
        f"{exceptions(compared.keys() - {*good})}".rstrip()
    )
    return f"## Comparison with NUTS\n\n{text}\n"


SECONDS = """CPU seconds on one core, without imports: pyrofl agrees on the columns, fits with
defaults and draws 4,000 times; NUTS has four chains of 1,000 warm-up iterations and 1,000 draws
on the pooled rows, with NumPyro's defaults, compilation included; lme4, glmmTMB, ordinal and
survival maximize a likelihood. Shift is the largest difference of a mean in standard deviations,
and ratio the one of a standard deviation that is farthest from 1. Rows from `hospitals 160` to
`uneven` are simulated; NUTS was not run where it is empty, or was stopped after ten minutes.
"""
BOUND = 30.0, 3.0  # seconds, or times NUTS


def seconds(results: dict[str, Any], lme4: dict[str, Any], nuts: dict[str, float]) -> str:
    """Return the table of seconds of all cases."""
    rows, slow, measured = [], [], 0
    for name, row in results.items():
        if row["verdict"] == "failed":
            continue
        cells = [words(name), words(row["family"]), row["clients"], row["rows"]]
        cells += [f"{row['seconds']:.1f}", f"{v:.1f}" if (v := nuts.get(name)) else ""]
        cells += [f"{v:.2f}" if (v := lme4.get(name, {}).get("seconds")) else ""]
        rows.append([*map(str, cells), *differences(row)])
        bound, times = BOUND
        if name in nuts or row["seconds"] <= bound:
            measured += 1
            slow += [words(name)] * (row["seconds"] > max(bound, times * nuts.get(name, 0.0)))
    head = ["data", "family", "clients", "rows", "pyrofl", "NUTS", "lme4", "shift", "ratio"]
    text = f"{measured - len(slow)} of {measured} fits take at most {BOUND[0]:.0f} s or "
    text += f"{BOUND[1]:.0f} times as long as NUTS"
    text += f"; {', '.join(slow)} do not." if slow else "."
    return f"## Seconds\n\n{SECONDS}\n{text}\n\n{markdown(head, rows)}\n"


def differences(row: dict[str, Any]) -> list[str]:
    """Return the shift and the ratio of a case for the table, "" without a reference."""
    if row["verdict"] == "no reference":
        return ["", ""]
    ratios = (row[one][0] for one in ("low", "high"))
    return [f"{abs(row['shift'][0]):.2f}", f"{max(ratios, key=lambda v: abs(math.log(v))):.2f}"]


def words(name: str) -> str:
    """Return a name with spaces."""
    return name.replace("_", " ")


def exceptions(names: set[str]) -> str:
    """Return a sentence that names the cases that do not agree; "" if there are none."""
    return f"Not accurate: {', '.join(sorted(names))}. " if names else ""


FEATURES = {
    "sigma": "formula of sigma",
    "phi": "formula of phi, beta",
    "shape": "formula of shape",
    "zi": "formula of zi",
    "zi_negative_binomial": "zero inflation, overdispersed",
    "hurdle": "formula of hu",
    "truncated_poisson": "truncation of Poisson",
    "truncated_negative_binomial": "truncation, overdispersed",
    "weibull": "censored times",
    "survival": "survival curve",
    "restricted_mean": "restricted mean",
    "intervals": "left and interval censoring",
    "cox": "Cox, stratified by client",
    "cox_entry": "delayed entry",
    "kaplan_meier": "Kaplan-Meier curves",
    "meta_fixed": "known standard errors",
    "meta_random": "random-effects meta-analysis",
    "weights": "weights of rows",
    "hypothesis": "difference of coefficients",
    "marginal": "marginal means",
    "smooth": "smooth curve at 11 points",
    "gp": "Gaussian process, the same",
    "monotonic": "monotonic effect",
    "beta_binomial": "beta-binomial",
    "median": "median regression",
    "quantile": "quantile .9",
    "negative_binomial": "negative binomial",
    "poisson_identity": "identity link",
    "cumulative": "ordinal, with effects",
    "cumulative_weights": "cumulative",
    "sratio": "stopping ratios",
    "acat": "adjacent categories",
    "categorical": "categories",
    "student": "Student's t",
    "r_squared": "R2",
    "standardize": "expected events by client",
}
"""Row -> the feature that it compares."""

EXPRESSIONS = {
    "survival": "effects.survival(run, row, times)",
    "restricted_mean": "effects.restricted_mean(run, row, 730)",
    "kaplan_meier": "kaplan_meier(counts)",
    "hypothesis": "run.hypothesis(statement)",
    "marginal": "effects.marginal(run, 'Gender')",
    "r_squared": "effects.r2(run)",
    "standardize": "effects.standardize(run)",
}
"""Row -> the call that returns the compared result, if it is not of the parameters."""

_NESTS = (
    "the standard deviation of 27 nests, and with it the error of the intercept, is a tenth larger "
    "than by maximum likelihood"
)
_SKEWED = "importance sampling of the skewed posterior of the pooled rows has the same"
_LAPLACE = "with asymmetric Laplace errors, the posterior is narrower than the estimator's"
REASONS = {
    "sigma": "the mean of log sigma is above its mode by sqrt(0.5 / 31) = 0.13 standard errors, "
    "of 31 degrees of freedom",
    "shape": "maximum likelihood ignores that four coefficients are estimated; with the adjusted "
    "profile likelihood of Cox and Reid the shift is 0.01",
    "zi": _NESTS,
    "hurdle": _NESTS,
    "truncated_poisson": _NESTS,
    "survival": f"{_SKEWED} medians",
    "restricted_mean": f"{_SKEWED} medians",
    "meta_random": "the standard deviation of studies has a skewed posterior; its mean by "
    "numerical integration is the same",
    "gp": "R (`gaussian_process` of features.R) fixes the scales at their estimates; the "
    "posterior averages over them",
    "monotonic": f"uniform shares of the steps pull their sum down; {_SKEWED} means",
    "beta_binomial": f"{_SKEWED} means",
    "median": f"{_LAPLACE}; a Metropolis sampler has the same mean and sd",
    "quantile": _LAPLACE,
    "student": "standard errors of gam are of the expected information; the observed one gives a "
    "ratio of 1.02",
    "standardize": "sums of probabilities are convex in the coefficients; at their posterior means "
    "the shift is 0.05",
}
"""Row with a shift or ratio beyond `FEATURE_LIMITS` -> the reason."""

FEATURE_LIMITS = 0.1, (0.9, 1.1)  # shift, ratio

COMPARED = """Each feature is fitted over clients with defaults, and by the R package that has it,
on data that R packages ship ([features.R](../regression/features.R),
[features.py](../regression/features.py)). Clients are groups of the data, or rows are partitioned
among three. Shift is the largest difference of a posterior mean from the estimate of R in
standard errors, ratio the posterior standard deviation over the standard error that is farthest
from 1, and s CPU seconds of the fit. R's functions of parameters have standard errors by the
delta method. Survival curves and restricted means are posterior medians.
"""

OTHERS = """Reasons for larger shifts, and for ratios below
0.9 or above 1.1, are below the table. Missing are skew_normal, for which no R package is installed,
and `cs(x)`, which these packages do not have.
"""


def compared_with_r(features: dict[str, Any], features_r: dict[str, Any]) -> str:
    """Return the section that compares features with R packages."""
    rows, within = [], 0
    for name, label in FEATURES.items():
        row, other = features[name], features_r[name]
        shift, ratio = difference(row["estimates"], other)
        within += shift <= FEATURE_LIMITS[0]
        numbers = [f"{shift:.2f}", "" if ratio is None else f"{ratio:.2f}", f"{row['seconds']:.0f}"]
        cells = [label, code(other["call"]), code(EXPRESSIONS.get(name) or formula(row))]
        rows.append([*cells, str(row["clients"]), str(row["rows"]), *numbers])
    head = ["feature", "R", "pyrofl", "clients", "rows", "shift", "ratio", "s"]
    count = f"Of {len(rows)} rows, {within} have a shift of at most {FEATURE_LIMITS[0]}. {OTHERS}"
    notes = "\n".join(
        f"- {', '.join(FEATURES[name] for name in REASONS if REASONS[name] == text)}: {text}."
        for text in dict.fromkeys(REASONS.values())
    )
    return f"## Features compared with R\n\n{COMPARED}{count}\n{markdown(head, rows)}\n\n{notes}\n"


def difference(
    estimates: dict[str, list[float]], other: dict[str, Any]
) -> tuple[float, float | None]:
    """Return the largest shift in standard errors, and the ratio of sds farthest from 1."""
    by_name = {plain(name): pair for name, pair in estimates.items()}
    shifts, ratios = [], []
    for name, value in other["estimate"].items():
        mean, sd = by_name[plain(name)]
        error = other["se"][name]
        shifts.append(abs(mean - value) / error)
        ratios += [] if sd is None else [sd / error]
    return max(shifts), max(ratios, key=lambda v: abs(math.log(v)), default=None)


def formula(row: dict[str, Any]) -> str:
    """Return the formula of a row, and its family."""
    text = row["formula"]
    if isinstance(text, dict):
        (_, location), *parameters = text.items()
        text = ", ".join([location, *(f"{name} {part}" for name, part in parameters)])
    return f"{text}, {row['family']}"


def code(text: str) -> str:
    """Return code for a cell of a table."""
    return f"`{text}`".replace("|", "\\|")


def main() -> int:
    """Write the page, or with --check return 1 if it differs from the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    args = parser.parse_args()
    names = ("results", "lme4", "features", "features_r", "nuts_seconds")
    made = page(*(json.loads((HERE / f"{n}.json").read_text()) for n in names))
    if not args.check:
        PAGE.write_text(made)
        return 0
    if PAGE.read_text() != made:
        print(f"{PAGE} differs from the results; run python examples/regression/gallery.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
