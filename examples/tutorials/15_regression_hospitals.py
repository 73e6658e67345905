# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 15. A multilevel regression over hospitals
#
# Fit a logistic multilevel regression from a formula to patients of eight hospitals that do not share their data. The
# steps are those that a user of brms, rstanarm or Bambi knows: data, formula, priors, prior predictive check, fit,
# convergence, summary, effects and prediction.
#
# After this lesson (about 65 minutes) you can
#
# - describe the data of all hospitals by sums,
# - write a formula, read its priors, and check them before the fit,
# - decide from the diagnostics whether a posterior can be used,
# - report odds ratios, effects of hospitals and conditional effects,
# - predict for a hospital that did not participate.
#
# You need lesson 1, and to know what a multilevel (mixed) model and a logistic regression are. Terms of Bayesian inference are
# explained in lesson 2. The extra `regression` must be installed: `pip install -e '.[regression]'`. The cells compute for about
# a minute.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro.distributions as dist

import pyrofl
from pyrofl import checks, effects, federations, figures

# %% tags=["parameters"]
draws, replicas, full = 4000, 1000, True
# quick: draws, replicas, full = 200, 50, False

# %% [markdown]
# ## The data
#
# We simulate the patients, so that the true values are known. Hospitals differ in size and in mortality: their intercepts have
# the standard deviation 0.6. The log odds of death increase by 0.05 per year of age and by 0.8 per point of severity, and the
# treatment decreases them by 0.7.

# %%
TRUE = {"age": 0.05, "severity": 0.8, "treated": -0.7}
sizes = {
    "aarau": 40,
    "basel": 160,
    "bern": 120,
    "chur": 35,
    "genf": 140,
    "thun": 30,
    "uri": 25,
    "zug": 50,
}
random = np.random.default_rng(3)
tables = {}
for name, n in sizes.items():
    age, severity = random.normal(62, 10, n).round(), random.normal(0, 1, n).round(1)
    treated = random.integers(0, 2, n)
    eta = (
        random.normal(-0.8, 0.6)
        + TRUE["age"] * (age - 62)
        + TRUE["severity"] * severity
        + TRUE["treated"] * treated
    )
    died = (random.uniform(size=n) < 1 / (1 + np.exp(-eta))).astype(int)
    tables[name] = pd.DataFrame(
        {"died": died, "age": age, "severity": severity, "treated": treated}
    )
data = federations.from_frames(tables)
data

# %% [markdown]
# In a federation no participant sees all rows, but sums are enough for a first table: every hospital reports its number of
# patients, of deaths, and the sums of age and its square. The server adds them.


# %%
def report(rows):
    """Return what a hospital sends."""
    return {
        "patients": len(rows),
        "deaths": rows["died"].sum(),
        "age": rows["age"].sum(),
        "age²": (rows["age"] ** 2).sum(),
    }


sums = pd.DataFrame({name: report(rows) for name, rows in tables.items()}).T
all_rows = sums.sum()
mean = all_rows["age"] / all_rows["patients"]
sd = (all_rows["age²"] / all_rows["patients"] - mean**2) ** 0.5
print(
    f"{all_rows['patients']:.0f} patients, {all_rows['deaths']:.0f} deaths; age {mean:.1f} ± {sd:.1f} years"
)

rate = sums["deaths"] / sums["patients"]
error = (rate * (1 - rate) / sums["patients"]) ** 0.5
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.errorbar(rate, sums.index, xerr=1.96 * error, fmt="o", capsize=3)
axes.set_xlabel("fraction of patients who died, with 95% interval")
plt.show()

# %% [markdown]
# The mortality lies between 0.18 and 0.58; small hospitals have wide intervals. The regression has to decide how much of the
# differences is due to patients, to hospitals and to chance.
#
# ## Formula and priors
#
# The formula is that of brms:
#
# ```r
# brm(died ~ age + severity + treated + (1 | hospital), family = bernoulli())
# ```
#
# `(1 | hospital)` gives each hospital its own intercept. The column `hospital` need not exist: a hospital is a client, and
# `client="hospital"` states that this is what the word means in the formula.

# %%
formula = "died ~ age + severity + treated + (1 | hospital)"
method = pyrofl.regression(formula, data, family="bernoulli", client="hospital")
print(method.priors())

# %% [markdown]
# The default priors are weakly informative, as in rstanarm: the standard deviation of a coefficient is 2.5 divided by that of its
# column, which follows from sums as above (2.5 / 9.8 years for age). The prior of `Intercept` is that of the log odds **at the mean
# of all columns**. `sd_hospital` is the standard deviation of the hospitals' intercepts.
#
# Would data from these priors be plausible? `prior_predictive` draws parameters from the priors, and responses of all
# patients given them, before any fit. The figure compares the simulated fractions of deaths with the observed ones.

# %%
prior = checks.prior_predictive(method, data, draws=replicas)
simulated = [checks.predictive_checks(prior, ("mean",))]
figures.predictive_checks(simulated[0])

# %% [markdown]
# The default priors allow nearly every mortality from 0 to 1. We know more. A mortality of 1/4 in a typical hospital, between 1/20
# and 3/4, is a log odds of about -1 with standard deviation 1. And 95% of the hospitals lie within 1.96 standard deviations
# $\sigma$ of the mean, so that their odds differ by a factor of up to $e^{2 \cdot 1.96\, \sigma}$; with $\sigma = 0.75$ it is 19,
# and we hardly expect more. So we replace two of the priors by name:

# %%
priors = {"Intercept": dist.Normal(-1.0, 1.0), "sd_hospital": dist.HalfNormal(0.75)}
method = pyrofl.regression(formula, data, family="bernoulli", client="hospital", priors=priors)
prior = checks.prior_predictive(method, data, draws=replicas)
simulated.append(checks.predictive_checks(prior, ("mean",)))
figures.predictive_checks(simulated[1])

# %% tags=["remove-cell"]
if full:
    default, chosen = simulated
    assert default["low"].max() < 0.1 < 0.9 < default["high"].min()
    assert 0.07 < chosen["low"].min()
    assert chosen["high"].max() < 0.73
    assert (chosen["p"].between(0.025, 0.975)).all()

# %% [markdown]
# Mortalities below 0.1 or above 0.7 are now improbable, and all observed ones are possible.
#
# ## Fit and convergence
#
# Each round, every hospital sends a normal approximation of its likelihood, which is a vector and a matrix of the shared
# parameters (coefficients, intercept, `sd_hospital`); the server multiplies them with the prior. The fit stops when the posterior no
# longer changes.

# %%
run = pyrofl.fit(method, data, progress=False)
posterior = run.to_arviz(draws, progress=False)
print(run.status)
sent = sum(record.bytes_up for record in run.records) / len(tables) / 1000
print(f"{run.state.number} rounds; every hospital sent {sent:.2f} kB in all")
print(f"largest Pareto k: {float(posterior.sample_stats['pareto_k'].max()):.2f}")

# %% [markdown]
# Two questions decide whether the posterior can be used. Has the fit converged? The status answers this. Are the normal
# approximations good enough? `to_arviz` corrects them by **importance sampling**: draws of the approximation are resampled with weights,
# the exact posterior density divided by that of the approximation. **Pareto k** measures whether a few draws have most of the
# weight: values below 0.7 are good. (R-hat needs several fits: `pyrofl.fit(method, data, seeds=4).summary()`.)
#
# ## Summary
#
# The table has means, standard deviations, 95% intervals, effective numbers of draws and Pareto k. `Intercept` is here, as in brms, that
# of a patient with zeros in all columns, of age 0; only its prior refers to the mean of the columns. All simulated values are inside
# the intervals (in many data sets, 95% of them would be).

# %%
table = run.summary(draws, progress=False)
table["true"] = pd.Series(
    {f"b[{name}]": value for name, value in TRUE.items()} | {"sd_hospital": 0.6}
)
table[["mean", "sd", "2.5%", "97.5%", "ess_bulk", "pareto_k", "true"]].round(2)

# %% tags=["remove-cell"]
if full:
    assert run.status.kind == "converged"
    assert float(posterior.sample_stats["pareto_k"].max()) < 0.7
    known = table.dropna(subset="true")
    assert len(known) == 4
    assert known["true"].between(known["2.5%"], known["97.5%"]).all()

# %% [markdown]
# For a report, the coefficients $b$ of a logistic regression are shown as **odds ratios** $e^b$: the factor of the odds per unit of the
# column. `p_above_1` is the posterior probability that the odds ratio is above 1.

# %%
odds = effects.ratios(run, draws=draws)
odds.round(2)

# %% tags=["remove-cell"]
if full:
    treated = odds.loc["treated"]
    of_table = [float(treated[c]) for c in ("median", "2.5%", "97.5%")]
    assert np.allclose(of_table, [0.5, 0.34, 0.75], atol=0.015)
    assert float(treated["p_above_1"]) < 0.005
    assert round(float(sums["age"].sum() / 600)) == 62
    assert np.allclose([rate.min(), rate.max()], [0.18, 0.58], atol=0.005)
    default = str(pyrofl.regression(formula, data, family="bernoulli", client="hospital").priors())
    width = float(default.partition("b[age] ~ Normal(0.0, ")[2].partition(")")[0])
    assert np.isclose(width, 2.5 / sd, rtol=0.01)
    assert round(float(np.exp(2 * 1.96 * 0.75))) == 19
    assert abs(1 / (1 + np.exp(1.0)) - 0.25) < 0.03
    assert abs(1 / (1 + np.exp(1.0 + 1.96)) - 1 / 20) < 0.005
    assert abs(1 / (1 + np.exp(1.0 - 1.96)) - 3 / 4) < 0.04

# %% [markdown]
# The treatment halves the odds of death (95% interval of the odds ratio: 0.34 to 0.75).

# %% [markdown]
# ## Hospitals
#
# `effects.groups` returns by how much the intercept of each hospital deviates from that of the population (`ranef()` of lme4; with
# `total=True` the intercepts, `coef()`). The forest plot shows these deviations.

# %%
effects.forest(run, "Intercept", total=False, draws=draws)

# %% tags=["remove-cell"]
if full:
    deviation = effects.groups(run, draws=draws).droplevel(["group", "term"])
    above = deviation.index[deviation["2.5%"] > 0].tolist()
    assert above == ["zug"]
    assert (deviation["97.5%"] > 0).all()
    small = deviation.loc[sums["patients"].nsmallest(3).index]
    assert {*small.index} == {"uri", "thun", "chur"}
    assert small["mean"].abs().max() < 0.25

# %% [markdown]
# Only the interval of Zug excludes 0: its patients die more often than patients like them elsewhere. The smallest hospitals (Uri, Thun,
# Chur) have wide intervals and are close to 0, the population: shrinkage.

# %% [markdown]
# ## Conditional effects
#
# How does the probability of death depend on severity, with and without the treatment, for a patient of mean age in a typical hospital,
# whose intercept is that of the population?

# %%
figures.conditional(
    effects.conditional(run, "severity", "treated", at={"treated": [0, 1]}, draws=draws)
)

# %% [markdown]
# ## Prediction
#
# Two treated patients, one young and one old and severely ill, are predicted for Basel, for a typical hospital and for a new hospital. The
# difference $u$ of a new hospital's intercept from that of the population is unknown: it has the distribution $N(0, \sigma^2)$, where
# $\sigma$ is `sd_hospital`. So a patient whose log odds in a typical hospital are $\eta$ (the linear predictor) dies with probability
#
# $$p_{new} = \int \frac{1}{1 + e^{-(\eta + u)}} \, N(u; 0, \sigma^2) \, du.$$
#
# **A new hospital is not a typical hospital.** In a typical hospital $u = 0$, as in the conditional effects above. $p_{new}$ is closer
# to 1/2: a step $u$ towards 1/2 changes the probability more than the same step away from it, because the logistic function is
# steepest at 1/2. All predictions are means over the posterior draws of all parameters.

# %%
patients = pd.DataFrame({"age": [50, 80], "severity": [0.0, 1.0], "treated": [1, 1]})
drawn = posterior["posterior"]
eta = [
    (drawn["Intercept"] + (drawn["b"] * list(row)).sum("term")).values.ravel()
    for row in patients.to_numpy()  # columns in the order of the terms
]
dies = {"typical hospital": np.array([(1 / (1 + np.exp(-each))).mean() for each in eta])}
for name, client in {"basel": "basel", "new hospital": None}.items():
    found = effects.predict(run, patients, client=client, draws=draws)
    dies[name] = found.mean[:, 1].numpy()
for name, probability in dies.items():
    print(f"{name:17s}", probability.round(3))

# %% tags=["remove-cell"]
assert list(drawn["b"]["term"].values) == list(patients.columns)
if full:
    assert (np.abs(dies["new hospital"] - 0.5) < np.abs(dies["typical hospital"] - 0.5)).all()
    closer = np.abs(dies["new hospital"] - dies["typical hospital"])
    assert (closer < 0.03).all()
    assert (dies["basel"] > dies["typical hospital"]).all()

# %% [markdown]
# The difference between new and typical is small here, below 0.03; it grows with $\sigma$. In Basel both patients die more often.

# %% [markdown]
# Finally, can the model reproduce the deaths in every hospital? The observed fraction should lie within the interval of
# data that the fitted model simulates; here it does in all eight.

# %%
checked = checks.predictive_checks(run, ("mean",), replicas, progress=False)
figures.predictive_checks(checked)

# %% tags=["remove-cell"]
assert not full or (len(checked) == 8 and checked["p"].between(0.025, 0.975).all())

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Exercise 2 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Every hospital reports its number of patients, and the mean and the standard deviation (with the divisor $n$) of their age. Write
# `pool(n, means, sds)`: mean and standard deviation of the age of **all** patients, with the divisor $\sum n$.

# %% tags=["hide-cell", "solution"]
# The variance of all patients is the mean of the variances within hospitals plus the variance between their means.


def pool(n, means, sds):
    mean = (n * means).sum() / n.sum()
    variance = (n * (sds**2 + (means - mean) ** 2)).sum() / n.sum()
    return mean, variance**0.5


# %% tags=["hide-cell", "test"]
ages = [np.array([50.0, 60.0, 70.0]), np.array([80.0, 90.0]), np.array([40.0])]
reported = [np.array([f(a) for a in ages]) for f in (len, np.mean, np.std)]
found = pool(*reported)
assert np.shape(found) == (2,), "return two numbers: the mean and the standard deviation"
center, spread = found
assert np.isclose(center, 65.0), "weight the mean of each hospital by its number of patients"
assert np.isclose(spread, np.concatenate(ages).std()), (
    "compare with the standard deviation of all ages in one list: the means of the hospitals differ, too"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# An earlier study reports that the odds ratio of the treatment lies between `low` and `high` with probability 95%. Write
# `with_study(data, low, high)`: return the method of `pyrofl.regression` for `died ~ treated + (1 | hospital)`, with the normal prior
# of the **coefficient** `b[treated]` that has this central interval; all other priors are the defaults. The 97.5% quantile of the
# standard normal distribution is 1.96.

# %% tags=["hide-cell", "solution"]
# The coefficient is the log of the odds ratio: the interval is symmetric on this scale, and 2 * 1.96 standard deviations wide.


def with_study(data, low, high):
    low, high = np.log(low), np.log(high)
    prior = dist.Normal(float(low + high) / 2, float(high - low) / (2 * 1.96))
    formula = "died ~ treated + (1 | hospital)"
    return pyrofl.regression(
        formula, data, family="bernoulli", client="hospital", priors={"b[treated]": prior}
    )


# %% tags=["hide-cell", "test"]
wards = {
    name: pd.DataFrame({"died": [0, 1, 0, 1, 1, 0], "treated": [1, 0, 1, 0, 1, 0]})
    for name in ("uri", "zug")
}
wards = federations.from_frames(wards)
for low, high in ((0.35, 0.7), (0.5, 2.0), (1.2, 6.0)):
    lines = str(with_study(wards, low, high).priors()).splitlines()
    (line,) = (one for one in lines if one.startswith("b[treated] ~ "))
    assert "Normal(" in line, f"expected a normal prior: {line}"
    center, spread = (
        float(one.split("=")[-1]) for one in line[line.index("(") + 1 : line.index(")")].split(",")
    )
    assert np.isclose(np.exp(center), (low * high) ** 0.5, rtol=0.01), (
        f"{line}: on which scale is a coefficient of a logistic regression, and where is the middle there?"
    )
    assert np.allclose(np.exp(center + np.array([-1.96, 1.96]) * spread), [low, high], rtol=0.02), (
        f"{line}: 95% of this prior do not lie between the logs of {low} and {high}"
    )
    assert any("hospital" in one for one in lines), "the intercept varies with the hospital"

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `new_hospital(eta, sd)`: the probability $p_{new}$ that a patient dies, given posterior draws of the linear predictor
# $\eta$ and of $\sigma$ (two arrays of the same length). Compute the integral of $p_{new}$ for each draw by Gauss-Hermite quadrature, then
# average over the draws:
#
# $$\int f(u) \, N(u; 0, \sigma^2) \, du \approx \frac{1}{\sqrt{\pi}} \sum_k w_k \, f(\sqrt{2} \, \sigma \, t_k),$$
#
# with the nodes and weights `t, w = np.polynomial.hermite.hermgauss(30)`.

# %% tags=["hide-cell", "solution"]
# One row for each draw, one column for each node. The weights sum to the square root of pi.


def new_hospital(eta, sd):
    t, w = np.polynomial.hermite.hermgauss(30)
    p = 1 / (1 + np.exp(-(eta[:, None] + np.sqrt(2) * sd[:, None] * t)))
    return (p @ w / np.sqrt(np.pi)).mean()


# %% tags=["hide-cell", "test"]
found = new_hospital(np.array([1.5, -1.5]), np.array([2.0, 2.0]))
assert np.ndim(found) == 0, "return one number: average over the draws"
assert np.isclose(found, 0.5), (
    "two opposite draws: 1/2 by symmetry; divide the sum by the square root of pi"
)
several, scales = np.array([-3.0, -1.0, 2.0]), np.array([1e-6, 0.5, 1.5])
grid = np.linspace(-10, 10, 20001)  # in standard deviations
normal = np.exp(-(grid**2) / 2) / np.exp(-(grid**2) / 2).sum()
by_grid = [normal @ (1 / (1 + np.exp(-e - s * grid))) for e, s in zip(several, scales, strict=True)]
assert np.isclose(new_hospital(several[:1], scales[:1]), by_grid[0], atol=1e-5), (
    "hospitals that do not differ: the probability of a typical hospital"
)
assert np.isclose(new_hospital(several[2:], scales[2:]), by_grid[2], atol=1e-4), (
    "hospitals that differ: average the probability over u; the node is sqrt(2) sd t"
)
assert np.isclose(new_hospital(several, scales), np.mean(by_grid), atol=1e-4), (
    "average the probabilities over the draws, not their linear predictors"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Does the effect of the treatment differ between hospitals? Let its coefficient vary by hospital, with `(1 + treated | hospital)`, and
#    look at its standard deviation in `summary`.
# 2. What is the probability that a patient in Bern has higher odds of death than the same patient in Basel? The hospitals' deviations
#    are `posterior["posterior"]["r_hospital"].sel(client="bern")`.
# 3. A registry publishes that the odds ratio of the treatment is between 0.35 and 0.7 with probability 95%. Use it as a prior.

# %% tags=["hide-cell", "solution"]
# 1. (1 + treated | hospital) adds the standard deviation of the effect. Its interval begins near 0, as it should: the
# simulated effect is the same in all hospitals.
varying = formula.replace("(1 |", "(1 + treated |")
other = pyrofl.regression(varying, data, family="bernoulli", client="hospital")
other_run = pyrofl.fit(other, data, progress=False)
scales = other_run.summary(draws, progress=False)
scales = scales.loc[[n for n in scales.index if n.startswith("sd")], ["mean", "2.5%", "97.5%"]]
print(scales.round(2))

# %% tags=["hide-cell", "solution"]
# 2. The coefficients of a patient are the same, so it is the probability that the intercept of Bern is larger: 0.06.
r = posterior["posterior"]["r_hospital"]
larger = float((r.sel(client="bern") > r.sel(client="basel")).mean())
print(f"{larger:.2f}")

# %% tags=["hide-cell", "solution"]
# 3. The prior is that of exercise 2. It moves the estimate little and narrows its interval.
center, spread = np.log(0.35 * 0.7) / 2, np.log(0.7 / 0.35) / (2 * 1.96)
informed = {**priors, "treated": dist.Normal(center, spread)}
other = pyrofl.regression(formula, data, family="bernoulli", client="hospital", priors=informed)
other_run = pyrofl.fit(other, data, progress=False)
before, after = (effects.ratios(each, draws=draws).loc["treated"] for each in (run, other_run))
print(pd.DataFrame({"default prior": before, "prior of the registry": after}).T.round(2))

# %% tags=["remove-cell"]
if full:
    assert len(scales) == 2
    assert abs(larger - 0.06) < 0.015
    assert scales["2.5%"].iloc[-1] < 0.1
    assert abs(np.log(after["median"] / before["median"])) < 0.2
    assert after["97.5%"] - after["2.5%"] < 0.8 * (before["97.5%"] - before["2.5%"])
