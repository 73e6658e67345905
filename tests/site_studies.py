"""Studies of three hospitals that disclose rows of one of them, and studies that do not."""

from __future__ import annotations

import numpy as np
import pandas as pd

FULL = {"bern": 60, "basel": 48, "chur": 45}
NAME = "bern"  # the hospital whose rows a study would disclose


def hospitals(seed=0):
    """Return tables whose columns suit every family."""
    random, frames = np.random.default_rng(seed), {}
    for k, (name, n) in enumerate(FULL.items()):
        i = np.arange(n)
        age = random.normal(60, 12, n).round().clip(30, 95)
        odds = 0.04 * (age - 60) + random.normal(size=n)
        frame = pd.DataFrame({"age": age, "odds": odds, "id": [f"{name}{j}" for j in i]})
        frame["row"], frame["dose"] = i, random.gamma(4.0, 1.0, n).round(2)
        frame["sex"], frame["arm"] = np.array(["f", "m"])[i % 2], np.array(list("abc"))[i % 3]
        frame["ward"] = [f"{name} {j}" for j in i % 4]
        frame["clinic"] = np.array(["north", "south", "west"])[i // 2 % 3]
        frame["stage"] = pd.cut(odds, [-9, -0.6, 0.6, 9], labels=["i", "ii", "iii"]).astype(str)
        frame["grade"] = pd.cut(odds, [-9, -0.6, 0.6, 9], labels=[1, 2, 3]).astype(int)
        frame["died"] = (odds > random.logistic(size=n)).astype(int)
        frame["event"], frame["time"] = i % 3 % 2, random.weibull(1.2, n).round(3) + 0.01
        frame["visits"], frame["years"] = random.poisson(2.0, n), random.uniform(0.5, 2, n).round(2)
        frame["trials"] = random.integers(5, 15, n)
        frame["successes"] = random.binomial(frame["trials"], 0.4)
        frame["score"], frame["error"] = odds.round(3), random.uniform(0.5, 1.5, n).round(2)
        frame["flag"], frame["smoker"] = 0, (i % 5 < 2).astype(int)
        frame["constant"], frame["twin"] = float(k), age + random.normal(size=n)
        frames[name] = frame.drop(columns="odds")
    return frames


def cell(column, *values):
    """Return a change of the first cells of a column."""

    def change(frame):
        frame[column] = frame[column].astype(object)
        frame.iloc[: len(values), frame.columns.get_loc(column)] = list(values)
        return frame.infer_objects()

    return change


def rows(count):
    """Return a change that leaves some rows."""
    return lambda frame: frame[:count]


def all_but(column, other, *values):
    """Return a change of a column to one value, but in the first rows."""
    return lambda frame: cell(column, *values)(frame.assign(**{column: other}))


def gaps(frame):
    """Leave three rows complete."""
    return frame.assign(age=frame["age"].where(frame.index < 3))


def twin(frame):
    """Add a copy of a column that differs in one row."""
    return frame.assign(twin=frame["age"] + 5 * (frame["row"] == 7))


def tall(frame):
    """Make one person far older than all others."""
    return cell("age", 119.0)(frame.assign(age=30.0 + frame["row"] / 30))


SURVIVAL, BINARY = {"family": "weibull"}, {"family": "bernoulli"}
NONE = rows(None)
MEET = "score ~ {smoker * flag} + age"
DISCLOSIVE = {
    "one row": ("score ~ age", {}, rows(1), "min-rows"),
    "two rows": ("score ~ age", {}, rows(2), "min-rows"),
    "four rows": ("score ~ 1", {}, rows(4), "min-rows"),
    "three complete rows": ("score ~ age", {}, gaps, "min-rows"),
    "fewer rows than coefficients": ("score ~ age*dose*twin", {}, rows(8), "rows-per-parameter"),
    "six coefficients of twelve rows": (
        "score ~ age + dose + years + twin + error",
        {},
        rows(12),
        "rows-per-parameter",
    ),
    "level of one row": ("score ~ arm", {}, cell("arm", "z"), "min-level-rows"),
    "level of two rows": ("score ~ arm", {}, cell("arm", "z", "z"), "min-level-rows"),
    "number as level": ("score ~ C(visits)", {}, cell("visits", 99), "min-level-rows"),
    "response level of one row": (
        "stage ~ age",
        {"family": "cumulative"},
        cell("stage", "iv"),
        "min-level-rows",
    ),
    "one event": ("died ~ age", BINARY, all_but("died", 0, 1), "min-events"),
    "two events": ("died ~ age", BINARY, all_but("died", 0, 1, 1), "min-events"),
    "one without event": ("died ~ age", BINARY, all_but("died", 1, 0), "min-events"),
    "no event": ("died ~ age", BINARY, all_but("died", 0), "min-events"),
    "one event as text": ("sex ~ age", BINARY, all_but("sex", "m", "f"), "min-events"),
    "one death": ("censored(time, event) ~ age", SURVIVAL, all_but("event", 0, 1), "min-events"),
    "one censored": ("censored(time, event) ~ age", SURVIVAL, all_but("event", 1, 0), "min-events"),
    "one death of a lognormal": (
        "censored(time, event) ~ age",
        {"family": "lognormal"},
        all_but("event", 0, 1),
        "min-events",
    ),
    "one late entry": (
        "censored(time, event, entry=entry) ~ age",
        SURVIVAL,
        lambda f: f.assign(entry=0.0).pipe(cell("entry", 0.001)),
        "max-share",
    ),
    "one wide interval": (
        "censored(time, event, upper=until) ~ age",
        SURVIVAL,
        lambda f: f.assign(until=f["time"]).pipe(
            lambda g: g.assign(
                until=g["time"] + 1e4 * (g["row"] == g["row"][g["event"] == 1].min())
            )
        ),
        "max-share",
    ),
    "one success": (
        "p(successes, trials) ~ age",
        {"family": "binomial"},
        all_but("successes", 0, 1),
        "min-events",
    ),
    "one count": ("visits ~ age", {"family": "poisson"}, all_but("visits", 0, 9), "max-share"),
    "one zero of a hurdle": (
        "time ~ age",
        {"family": "hurdle_gamma"},
        cell("time", 0.0),
        "min-events",
    ),
    "one zero of inflated counts": (
        "visits ~ age",
        {"family": "zero_inflated_poisson"},
        lambda f: f.assign(visits=f["row"] % 3 + 1).pipe(cell("visits", 0)),
        "min-events",
    ),
    "one whole share": (
        "share ~ age",
        {"family": "zero_one_inflated_beta"},
        lambda f: f.assign(share=f["age"] / 200).pipe(cell("share", *[0.0] * 6, 1.0)),
        "min-events",
    ),
    "person as dummy": ("score ~ {row == 7}", {}, NONE, "max-share"),
    "all persons but one": ("score ~ {row != 7}", {}, NONE, "max-share"),
    "two persons as dummy": ("score ~ {row < 2}", {}, NONE, "max-share"),
    "flag of one person": ("score ~ flag + age", {}, cell("flag", 1), "max-share"),
    "limit from outside": (
        "score ~ {time > limit}",
        {"namespace": {"limit": 2.9}},
        cell("time", 7.0),
        "max-share",
    ),
    "scaled dummy": ("score ~ scale({row == 7})", {}, NONE, "max-share"),
    "outlier": ("score ~ dose", {}, cell("dose", 1e6), "max-share"),
    "outlier of the response": ("score ~ age", {}, cell("score", 1e4), "max-share"),
    "exponential of ages": ("score ~ {np.exp(age)}", {}, tall, "max-share"),
    "interaction with an outlier": (
        "score ~ sex + smoker + sex:smoker",
        {},
        lambda f: f.assign(sex="f").pipe(cell("sex", "m", "m", *"ffmmm", *"fffmm")),
        "max-share",
    ),
    "product of flags": (MEET, {}, cell("flag", 1, 0, 0, 1, 1, 0, 0, 0, 1), "max-share"),
    "twin column": ("score ~ age + twin", {}, twin, "max-share"),
    "polynomial of degree n": ("score ~ poly(age, 9)", {}, rows(10), "rows-per-parameter"),
    "power sums": (
        f"score ~ {' + '.join(f'{{dose ** {k}}}' for k in range(1, 10))}",
        {},
        rows(20),
        "rows-per-parameter",
    ),
    "intercept per row": ("score ~ age + (1 | client:id)", {}, NONE, "min-level-rows"),
    "coefficient per row": ("score ~ id", {}, NONE, "min-level-rows"),
    "ward of one row": ("score ~ age + (1 | client:ward)", {}, cell("ward", "x"), "min-level-rows"),
    "cell of two factors": (
        "score ~ age + (1 | client:ward:sex)",
        {},
        lambda f: f.assign(sex=np.where(f["row"] % 4 < 3, "f", f["sex"])).pipe(cell("sex", "m")),
        "min-level-rows",
    ),
    "slopes of small wards": (
        "score ~ (1 + dose | client:ward)",
        {},
        lambda f: f.pipe(cell("ward", "x", "x", "x")),
        "max-share",
    ),
    "known error that isolates": ("score | se(error) ~ age", {}, cell("error", 1e-4), "max-share"),
    "offset that isolates": (
        "died ~ age + offset({-50 * (row != 7)})",
        BINARY,
        NONE,
        "max-share",
    ),
    "exposure that isolates": (
        "visits ~ age + offset(log(years))",
        {"family": "poisson"},
        cell("years", 1e5),
        "max-share",
    ),
    "trials that isolate": (
        "p(successes, trials) ~ age",
        {"family": "binomial"},
        cell("trials", 10**5),
        "max-share",
    ),
    "spread of one person": (
        {"score": "score ~ age", "sigma": "~ {row == 7}"},
        {},
        NONE,
        "max-share",
    ),
    "quantiles": ("score ~ bs(dose, df=4)", {}, NONE, "exact-values"),
    "range of a spline": ("score ~ bs(dose, knots=np.linspace(3, 6, 2))", {}, NONE, "exact-values"),
    "knot beside the largest": (
        "score ~ bs(dose, knots=np.linspace(4, 14, 3), lower_bound=0, upper_bound=15)",
        {},
        lambda f: f.assign(dose=(f["dose"].clip(1, 8))).pipe(cell("dose", 14.5)),
        "max-share",
    ),
    "names of persons": (
        "score ~ id",
        {},
        lambda f: f.assign(id=[f"person {k // 2}" for k in range(len(f))]),
        "min-level-rows",
    ),
    "many small groups": (
        "score ~ (1 | client:id)",
        {},
        lambda f: pd.concat([f.assign(age=f["age"] + k / 8) for k in range(3)]),
        "max-levels",
    ),
    "notes": (
        "score ~ arm",
        {},
        lambda f: f.assign(arm=np.where(f["sex"] == "m", "see the letter of his doctor; " * 4, "")),
        "max-level-characters",
    ),
}
"""Name -> formula, settings, change of the hospital's table, and the rule that forbids it."""

HARMLESS = {
    "line": ("score ~ age", {}),
    "random intercept": ("score ~ age + sex + (1 | client)", {}),
    "logistic": ("died ~ center(age) + sex + arm + (1 | client)", BINARY),
    "interaction": ("score ~ scale(age) * sex", {}),
    "polynomial": ("score ~ poly(age, 2) + sex", {}),
    "spline": (
        "score ~ bs(age, degree=1, knots=np.linspace(50, 70, 3), lower_bound=30, upper_bound=95)",
        {},
    ),
    "exposure": ("visits ~ age + offset(log(years)) + (1 | client)", {"family": "poisson"}),
    "negative binomial": ("visits ~ sex + arm", {"family": "negative_binomial"}),
    "binomial": ("p(successes, trials) ~ age + (1 | client)", {"family": "binomial"}),
    "weibull": ("censored(time, event) ~ age + sex + (1 | client)", SURVIVAL),
    "cox": ("censored(time, event) ~ age + sex", {"family": "cox"}),
    "entries and bounds": (
        "censored(time, event, entry=time / 2, upper=time + event) ~ age",
        SURVIVAL,
    ),
    "ordinal": ("grade ~ age + sex", {"family": "cumulative"}),
    "categorical": ("arm ~ age", {"family": "categorical"}),
    "known errors": ("score | se(error) ~ age + (1 | client)", {}),
    "random slope": ("score ~ center(age) + (1 + center(age) | client)", {}),
    "wards": ("score ~ age + (1 | client) + (1 | client:ward)", {}),
    "shared groups": ("score ~ age + (1 | clinic)", {}),
    "two parameters": ({"score": "score ~ age", "sigma": "~ sex"}, {}),
    "lognormal": ("time ~ age + smoker", {"family": "lognormal"}),
    "threshold": ("died ~ {age > 60} + sex", BINARY),
    "gamma of a logarithm": ("dose ~ log(age)", {"family": "gamma"}),
    "median": ({"score": "score ~ age + sex", "quantile": 0.5}, {"family": "asym_laplace"}),
    "constant at each hospital": ("score ~ scale(constant) + age + (1 | client)", {}),
    "text as response": ("sex ~ age + (1 | client)", BINARY),
}
"""Name -> formula and settings."""
