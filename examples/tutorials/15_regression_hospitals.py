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
# # 13. A multilevel regression over hospitals
#
# Fit a logistic multilevel regression from a formula to patients of eight hospitals that do not share their data. The
# steps are those that a user of brms, rstanarm or Bambi knows: data, formula, priors, prior predictive check, fit,
# convergence, summary, effects and prediction.
#
# After these fifteen minutes you can
#
# - describe the data of all hospitals by sums,
# - write a formula, read its priors, and check them before the fit,
# - decide from the diagnostics whether a posterior can be used,
# - report odds ratios, effects of hospitals and conditional effects,
# - predict for a hospital that took no part.
#
# You need to know what a multilevel (mixed) model is. The extra `regression` must be installed.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyro.distributions as dist

import pyrofl
from pyrofl import checks, effects, federations, figures

# %% tags=["parameters"]
draws, replicas = 4000, 1000
# quick: draws, replicas = 200, 50

# %% [markdown]
# ## The data
#
# We simulate the patients, so that the true values are known. Hospitals differ in size and in mortality; the log odds
# of death increase by 0.05 per year of age and by 0.8 per point of severity, and the treatment decreases them by 0.7.

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
# Small hospitals have wide intervals. The regression has to decide how much of the differences is due to patients, to
# hospitals and to chance.
#
# ## Formula and priors
#
# The formula is that of brms:
#
# ```r
# brm(died ~ age + severity + treated + (1 | hospital), family = bernoulli())
# ```
#
# The column `hospital` need not exist: a hospital is a client, and `client="hospital"` gives it its name.

# %%
formula = "died ~ age + severity + treated + (1 | hospital)"
method = pyrofl.regression(formula, data, family="bernoulli", client="hospital")
print(method.priors())

# %% [markdown]
# The default priors are weakly informative and scaled by the standard deviations of the columns, which follow from sums
# as above (as in rstanarm). `Intercept` is that at the mean of all columns. `sd_hospital` is the standard deviation of
# the hospitals' intercepts.
#
# Would data from these priors be plausible? `prior_predictive` draws parameters from the priors, and responses of all
# patients given them, before any fit.

# %%
prior = checks.prior_predictive(method, data, draws=replicas)
figures.predictive_checks(checks.predictive_checks(prior, ("mean",)))

# %% [markdown]
# The default priors allow every mortality from 0 to 1. We know more: mortality differs between hospitals, but hardly by a
# factor of 20 in the odds. So we replace two of the priors by name.

# %%
priors = {"Intercept": dist.Normal(-1.0, 1.0), "sd_hospital": dist.HalfNormal(0.75)}
method = pyrofl.regression(formula, data, family="bernoulli", client="hospital", priors=priors)
prior = checks.prior_predictive(method, data, draws=replicas)
figures.predictive_checks(checks.predictive_checks(prior, ("mean",)))

# %% [markdown]
# ## Fit and convergence
#
# Each round, every hospital sends a normal approximation of its likelihood, which is a vector and a matrix of the shared
# parameters; the server combines them. The fit stops when the posterior no longer changes.

# %%
run = pyrofl.fit(method, data, progress=False)
posterior = run.to_arviz(draws, progress=False)
print(run.status)
sent = sum(record.bytes_up for record in run.records) / len(tables) / 1000
print(f"{run.state.number} rounds; every hospital sent {sent:.2f} kB in all")
print(f"largest Pareto k: {float(posterior.sample_stats['pareto_k'].max()):.2f}")

# %% [markdown]
# Two questions decide whether the posterior can be used. Has the fit converged? The status answers this. Are the normal
# approximations good enough? `to_arviz` corrects them by importance sampling, and **Pareto k** measures whether the
# correction works: values below 0.7 are good. R-hat compares several fits: `pyrofl.fit(method, data, seeds=4).summary()`.
#
# ## Summary
#
# The table has means, standard deviations, 95% intervals, effective numbers of draws and Pareto k. The simulated values
# are inside the intervals of this data set (of many data sets, 95% of the intervals contain them).

# %%
table = run.summary(draws, progress=False)
table["true"] = pd.Series(
    {f"b[{name}]": value for name, value in TRUE.items()} | {"sd_hospital": 0.6}
)
table[["mean", "sd", "2.5%", "97.5%", "ess_bulk", "pareto_k", "true"]].round(2)

# %% [markdown]
# For a report, coefficients of a logistic regression are shown as odds ratios:

# %%
effects.ratios(run, draws=draws).round(2)

# %% [markdown]
# ## Hospitals
#
# `effects.groups` is `ranef()` of lme4; with `total=True`, it is `coef()`. The forest plot shows the intercept of each
# hospital and of the population. Small hospitals are pulled towards the population.

# %%
figure = effects.forest(run, "Intercept", draws=draws)
plt.show()

# %% [markdown]
# ## Conditional effects
#
# How does the probability of death depend on severity, with and without the treatment, for a patient of mean age?

# %%
figures.conditional(
    effects.conditional(run, "severity", "treated", at={"treated": [0, 1]}, draws=draws)
)

# %% [markdown]
# ## Prediction
#
# The same two patients are predicted for Basel, which has many patients, and for a new hospital, whose intercept is drawn
# from the distribution of all hospitals. Both are means over the posterior.

# %%
patients = pd.DataFrame({"age": [50, 80], "severity": [0.0, 1.0], "treated": [1, 1]})
for name in ("basel", None):
    found = effects.predict(run, patients, client=name, draws=draws)
    print(name or "new hospital", found.mean[:, 1].numpy().round(2))

# %% [markdown]
# Finally, can the model reproduce the deaths in every hospital? The observed fraction should lie within the interval of
# data that the fitted model simulates.

# %%
figures.predictive_checks(checks.predictive_checks(run, ("mean",), replicas, progress=False))

# %% [markdown]
# ## Exercises
#
# 1. Does the effect of the treatment differ between hospitals? Let its coefficient vary by hospital.
# 2. What is the probability that a patient in Bern has higher odds of death than the same patient in Basel?
# 3. A registry publishes that the odds ratio of the treatment is about 0.5, almost certainly between 0.35 and 0.7. Use it as a prior.

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. (1 + treated | hospital) adds the standard deviation of the effect. Its interval begins near 0, as it should: the
# simulated effect is the same in all hospitals.
varying = formula.replace("(1 |", "(1 + treated |")
other = pyrofl.regression(varying, data, family="bernoulli", client="hospital")
other_run = pyrofl.fit(other, data, progress=False)
scales = other_run.summary(draws, progress=False)
print(
    scales.loc[[n for n in scales.index if n.startswith("sd")], ["mean", "2.5%", "97.5%"]].round(2)
)

# %% tags=["hide-cell"]
# 2. The coefficients of a patient are the same, so it is the probability that the intercept of Bern is larger.
r = posterior["posterior"]["r_hospital"]
print(f"{float((r.sel(client='bern') > r.sel(client='basel')).mean()):.2f}")

# %% tags=["hide-cell"]
# 3. On the log scale the interval is log(0.35) to log(0.7), with middle -0.69 and a quarter of its width as standard
# deviation. The prior moves the estimate little and narrows its interval.
informed = {**priors, "treated": dist.Normal(-0.69, 0.17)}
other = pyrofl.regression(formula, data, family="bernoulli", client="hospital", priors=informed)
other_run = pyrofl.fit(other, data, progress=False)
print(effects.ratios(other_run, draws=draws).loc["treated"].round(2).to_dict())
