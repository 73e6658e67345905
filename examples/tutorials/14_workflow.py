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
# # 14. A complete workflow
#
# Take one question from the prior to the report: prior predictive check, fit, convergence, corrected draws, predictive checks of two
# families, LOO-PIT, power-scaling, simulation-based calibration, leave-one-client-out, report. Each step has a decision: continue, or
# go back and change the model.
#
# After this lesson (about 75 minutes) you can
#
# - carry out each step for a model of your own,
# - name the decision that each step supports,
# - use the functions of ArviZ on a federated posterior.
#
# You need lessons 1 to 6.

# %%
# %matplotlib inline
import warnings
from pathlib import Path
from tempfile import mkdtemp

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, figures

# %% tags=["parameters"]
draws, replications, full = 2000, 40, True
# quick: draws, replications, full = 100, 2, False

# %% [markdown]
# ## 1. Question and data
#
# Eight hospitals count infections per month. The number of occupied beds differs between months, from 50 to 200; `x` holds it in
# hundreds. **Question: how many infections per hundred beds does each hospital have, and how sure is this?** The rows stay in the
# hospitals. The data are simulated, so that the answer is known.

# %%
rng = np.random.default_rng(4)
months = dict(zip("ABCDEFGH", (24, 24, 18, 18, 12, 12, 6, 6), strict=True))
truth = np.exp(rng.normal(1.0, 0.5, 8))
rows = {}
for (name, count), rate in zip(months.items(), truth, strict=True):
    beds = rng.uniform(0.5, 2.0, count)
    infections = rng.negative_binomial(2.0, 2.0 / (2.0 + rate * beds))
    rows[name] = beds[:, None], infections.astype(float)
data = Federation.from_arrays(rows).to("cpu", torch.float64)
data


# %% [markdown]
# ## 2. Two models
#
# The logarithm of a hospital's rate is normal around a common mean. Given the rate, counts are Poisson, or negative binomial with a
# common shape: a Poisson rate that varies from month to month. The variance of a negative binomial count with mean $m$ is
# $m + m^2/\text{shape}$, that of a Poisson count is $m$.


# %%
def hospitals(family):
    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            shape = pyro.sample("shape", dist.LogNormal(1.0, 1.0)) if family != "Poisson" else None
            eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
            rate = pyro.deterministic("rate", (mu + tau * eta).exp())
            with batch.rows():
                mean = batch.x[..., 0] * rate
                counts = (
                    dist.GammaPoisson(shape, shape / mean)
                    if shape is not None
                    else dist.Poisson(mean)
                )
                pyro.sample("y", counts, obs=batch.y)

    return model


shared = {"Poisson": "mu tau", "negative binomial": "mu tau shape"}
methods = {
    name: pyrofl.hierarchical(hospitals(name), data, shared=sites) for name, sites in shared.items()
}

# %% [markdown]
# ## 3. Fit, and check convergence
#
# **Decision: a run that has not converged is not interpreted.** Fit for more rounds first.

# %%
runs = {name: pyrofl.fit(method, data, progress=False) for name, method in methods.items()}
for name, run in runs.items():
    print(f"{name}: {len(run.records)} rounds; {run.status}")

# %% [markdown]
# ## 4. Corrected draws
#
# The fit is an approximation. `to_arviz` reweights its draws to the exact posterior. **Decision: if Pareto k is above 0.7 or the effective
# sample size is below 400, the correction is unreliable;** then fit for more rounds, or use a more flexible guide.

# %%
found = {
    name: run.to_arviz(draws=draws, groups="all", progress=False) for name, run in runs.items()
}
quality = {}
for name, each in found.items():
    stats = each["sample_stats"]
    quality[name] = float(stats["pareto_k"].max()), float(stats["importance_ess"].min())
    print(f"{name}: Pareto k {quality[name][0]:.2f}, effective sample size {quality[name][1]:.0f}")

# %% tags=["remove-cell"]
if full:
    assert all(run.status.kind == "converged" for run in runs.values())
    assert all(k < 0.7 and ess > 400 for k, ess in quality.values())

# %% [markdown]
# ## 5. Prior predictive check
#
# Are data from the prior plausible, before the observed data are considered? Each draw of the group `prior_predictive` has one value per month.
# **Decision: if it contains impossible data, or excludes plausible ones, change the prior.**

# %%
prior = found["negative binomial"]["prior_predictive"]["y"].values.reshape(draws, -1)
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.hist(np.log10(1 + prior.mean(1)), 40, label="mean of a simulated data set")
axes.axvline(np.log10(1 + float(data.y.mean())), color="black", label="mean of the observed data")
axes.set_xlabel("mean number of infections per month")
axes.set_xticks(np.log10(1 + np.array([0, 1, 10, 100, 1000])), ["0", "1", "10", "100", "1000"])
axes.set_yticks([])
axes.legend(fontsize=8)
plt.show()
between = np.mean((prior.mean(1) > 0.1) & (prior.mean(1) < 100))
print(f"fraction of simulated data sets with a mean between 0.1 and 100: {between:.2f}")

# %% [markdown]
# Nearly all simulated data sets have a mean that a hospital could report. The prior is weak, but not absurd.
#
# ## 6. Posterior predictive checks of both families
#
# Compare mean, standard deviation and maximum of each hospital's counts with simulated ones. **Decision: a p value near 0 or 1 shows what the
# model cannot reproduce.** p is the probability that a simulated statistic is larger than the observed one.

# %%
tables = {
    name: checks.predictive_checks(run, draws=max(draws // 2, 50)) for name, run in runs.items()
}
for name, table in tables.items():
    extreme = table[(table["p"] < 0.025) | (table["p"] > 0.975)]
    print(
        f"{name}: {len(extreme)} of {len(table)} statistics are extreme",
        extreme["statistic"].value_counts().to_dict(),
    )
figures.predictive_checks(tables["Poisson"])

# %% [markdown]
# The Poisson model reproduces the means, but neither standard deviations nor maxima: real months differ more than Poisson counts do. The negative
# binomial model reproduces all. **Continue with the negative binomial model.**

# %% tags=["remove-cell"]
if full:
    assert between > 0.9
    poisson = tables["Poisson"].query("p < 0.025 or p > 0.975")["statistic"]
    assert len(poisson) >= 5
    assert "mean" not in set(poisson)
    assert not len(tables["negative binomial"].query("p < 0.025 or p > 0.975"))

# %% [markdown]
# ## 7. Leave-one-out and LOO-PIT
#
# Leave-one-out cross-validation compares the families by the density of each month given all others. LOO-PIT is the position of the
# observed month in that predictive distribution, the posterior draws weighted by $1/p(\text{month} \mid \text{draw})$; it is uniform for a well-specified model. Each curve should stay in the band, which contains **all**
# of a uniform curve with probability 95% (a simultaneous band).


# %%
def band(count, level=0.95, trials=1000):
    """Return a grid and limits that contain the whole ECDF of uniform numbers with probability `level`."""
    grid = np.linspace(0, 1, 101)[1:-1]
    many = np.sort(np.random.default_rng(0).uniform(size=(trials, count)), 1)
    ecdf = np.stack([np.searchsorted(each, grid, side="right") for each in many]) / count
    for tail in np.linspace(0.025, 0.0005, 50):
        low, high = np.quantile(ecdf, [tail, 1 - tail], axis=0)
        if ((low <= ecdf) & (ecdf <= high)).all(1).mean() >= level:
            break
    return grid, low - grid, high - grid


def against_uniform(axes, values, title):
    """Plot the ECDF of values minus that of uniform numbers; return whether it stays in the band."""
    grid, low, high = band(len(values))
    difference = np.searchsorted(np.sort(values), grid, side="right") / len(values) - grid
    axes.fill_between(grid, low, high, color="lightgrey", label="95% simultaneous band")
    axes.plot(grid, difference, label="ECDF - uniform")
    axes.set_title(title, fontsize=10)
    return bool(np.all((low <= difference) & (difference <= high)))


def loo_pit(found):
    """Return the position of each month in its leave-one-out predictive distribution; ties are broken at random."""
    months = found["observed_data"]["y"].values
    likelihood, simulated = (
        found[group]["y"].values.reshape(-1, len(months))
        for group in ("log_likelihood", "posterior_predictive")
    )
    weight = np.exp(
        likelihood.min(0) - likelihood
    )  # 1 / p(month | draw): the posterior without the month
    weight /= weight.sum(0)
    ties = np.random.default_rng(0).uniform(size=len(months)) * (simulated == months)
    return (weight * ((simulated < months) + ties)).sum(0)


if full:
    table = checks.compare_loo(runs, draws=draws)
    print(
        table[
            [c for c in ("elpd_loo", "elpd", "elpd_diff", "dse", "largest_k") if c in table]
        ].round(1)
    )
positions = {name: loo_pit(each) for name, each in found.items()}
figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
inside = {
    n: against_uniform(axes, p, n) for axes, (n, p) in zip(panels, positions.items(), strict=True)
}
panels[0].legend(fontsize=8)
plt.show()
print("inside the band:", inside)

# %% [markdown]
# The Poisson model leaves the band: too many months are in the tails. The negative binomial model stays inside.
#
# ## 8. Power-scaling
#
# How much would the posterior change if prior or likelihood were a little stronger? Power-scaling answers without a new fit. **Decision: a sensitivity
# to the prior above 0.05 means that the prior matters; justify it.**


# %%
def sensitivity(data, part):
    """Return the sensitivity to "prior" or "likelihood"; the function has another name in ArviZ 0.x."""
    return az.psense(data, group=part) if hasattr(az, "psense") else az.psens(data, component=part)


values = {}
for part in ("prior", "likelihood") if full else ():
    values[part] = sensitivity(found["negative binomial"], part)
for component, each in values.items():
    print(component, {n: round(float(each[n]), 2) for n in ("mu", "tau", "shape")})

# %% [markdown]
# `tau`, the standard deviation between eight hospitals, is sensitive to its prior: eight hospitals contain little information about it. `mu` and
# `shape` are not.

# %% tags=["remove-cell"]
if full:
    assert inside == {"Poisson": False, "negative binomial": True}
    assert (
        float(values["prior"]["tau"])
        > 0.05
        > max(float(values["prior"][n]) for n in ("mu", "shape"))
    )

# %% [markdown]
# ## 9. Simulation-based calibration
#
# Are the intervals correct for data from this model, with these hospitals and months? Parameters are drawn from the prior, data are
# simulated, and the method is fitted to each simulation. (Use some hundreds of simulations for a model of your
# own; forty show gross errors only.) **Decision: ranks outside the simultaneous band mean that this inference method is not
# calibrated for this model.**

# %%
ranks = checks.sbc(
    methods["negative binomial"], data, rounds=3, replications=replications, draws=99
)
figure, panels = plt.subplots(1, 3, figsize=(7, 2.6), sharey=True, layout="constrained")
calibrated = {
    n: against_uniform(axes, ranks.places[n].dropna("replication").values.ravel(), n)
    for axes, n in zip(panels, ("mu", "tau", "shape"), strict=True)
}
plt.show()
print("inside the band:", calibrated, "failed:", len(ranks.failed), "of", replications)

# %% [markdown]
# The ranks of all three parameters stay inside the band, and no fit failed: forty simulations show no gross error of the inference.
#
# ## 10. Leave one hospital out
#
# Predict each hospital from all others. **Decision: a hospital with a much lower density than the others is not described by the population;** ask what
# is different there.

# %%
left = {name: checks.loco(run, draws=max(draws, 100)) for name, run in runs.items()}
name_of = "elpd_i" if hasattr(left["Poisson"], "elpd_i") else "loo_i"
per_month = {
    name: np.asarray(getattr(each, name_of)) / np.array([*months.values()])
    for name, each in left.items()
}
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for name, each in per_month.items():
    axes.plot(list(months), each, "o", label=name)
axes.set_ylabel("log density per month,\ngiven the other hospitals")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## 11. Report
#
# State the answer in words, with its interval, and what was checked. `pyrofl.report` writes this as an HTML file, which needs no other
# file: the first page has the question, the answer, one figure and how certain it is; tables and further figures follow. (For runs of the
# command line, use `pyrofl report FOLDER`.) `run.save` keeps the run itself.

# %%
rates = found["negative binomial"]["posterior"]["rate"].stack(sample=("chain", "draw"))
low, middle, high = rates.quantile([0.025, 0.5, 0.975], "sample").values
covered = (low <= truth) & (truth <= high)
for j, name in enumerate(months):
    print(
        f"hospital {name}: {middle[j]:.1f} infections per hundred beds (95% interval {low[j]:.1f} to {high[j]:.1f}); truth {truth[j]:.1f}"
    )
print("intervals that contain the truth:", int(covered.sum()), "of 8")
folder = Path(mkdtemp())
page = pyrofl.report(
    runs["negative binomial"],
    folder / "infections.html",
    question="How many infections per hundred beds does each hospital have?",
    data="infections per month (simulated)",
    var_names=["rate", "mu", "tau", "shape"],
    draws=draws,
)
runs["negative binomial"].save(folder / "run")
print(f"{page.name} is {page.stat().st_size / 1e6:.1f} MB; open it in a browser")

# %% tags=["remove-cell"]
if full:
    assert not ranks.failed
    assert all(calibrated.values())
    assert (per_month["negative binomial"] > per_month["Poisson"]).sum() >= 6
    assert covered.sum() >= 7
    told = page.read_text()
    assert "rate goes from" in told
    assert "The fit has converged" in told

# %% [markdown]
# ## ArviZ functions on a federated posterior
#
# The result of `to_arviz` is an InferenceData (ArviZ 0.x) or a DataTree (1.x). This cell tries 22 functions of ArviZ under the names of the
# installed version. With ArviZ 0.23 all of them work, with 1.3 all except `plot_rank`, which needs two chains: fit with `seeds=2`.

# %%
posterior, loos = (
    found["negative binomial"],
    {n: checks.loo(run, draws=draws) for n, run in runs.items()} if full else {},
)
some = {"var_names": ["mu", "tau"]}
tried = {
    "summary": lambda f: f(posterior, **some),
    "ess": lambda f: f(posterior, **some),
    "mcse": lambda f: f(posterior, **some),
    "hdi": lambda f: f(posterior, **some),
    "loo": lambda f: f(posterior, var_name="y"),
    "compare": lambda f: f(loos),
    "extract": lambda f: f(posterior),
    "psense|psens": lambda f: sensitivity(posterior, "prior"),
    "plot_trace": lambda f: f(posterior, **some),
    "plot_forest": lambda f: f(posterior, **some),
    "plot_posterior|plot_dist": lambda f: f(posterior, **some),
    "plot_pair": lambda f: f(posterior, **some),
    "plot_rank": lambda f: f(posterior, **some),
    "plot_autocorr": lambda f: f(posterior, **some),
    "plot_ess": lambda f: f(posterior, **some),
    "plot_mcse": lambda f: f(posterior, **some),
    "plot_prior_posterior|plot_dist_comparison": lambda f: f(posterior, **some),
    "plot_ppc_dist|plot_ppc": lambda f: f(posterior),
    "plot_ppc_pit|plot_bpv": lambda f: f(posterior),
    "plot_loo_pit": lambda f: (
        f(posterior, "y") if az.__version__.startswith("0.") else f(posterior)
    ),
    "plot_khat": lambda f: f(loos["negative binomial"]),
    "plot_compare": lambda f: f(az.compare(loos)),
}
works, fails = [], {}
for names, call in tried.items() if full else ():
    name = next((n for n in names.split("|") if hasattr(az, n)), names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(getattr(az, name))
            works.append(name)
        except Exception as error:
            fails[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    plt.close("all")
print(f"ArviZ {az.__version__}: {len(works)} of {len(tried)} work:", *works)
for name, error in fails.items():
    print(f"  {name}: {error}")

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Use NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `variance(mean, shape)`: the variance of a negative binomial count with this mean and shape.

# %% tags=["hide-cell", "solution"]
# A Poisson count has the variance mean; the rest is the variation of its rate.


def variance(mean, shape):
    return mean + mean**2 / shape


# %% tags=["hide-cell", "test"]
assert np.isclose(variance(4.0, 2.0), 12.0), "expected mean + mean^2 / shape"
assert np.isclose(variance(4.0, 1e9), 4.0), "a large shape is a Poisson count"

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `p_value(observed, simulated)`: the fraction of the simulated statistics that are at least as large as the observed one.

# %% tags=["hide-cell", "solution"]
# A small value: the model hardly ever produces so large a statistic.


def p_value(observed, simulated):
    return (simulated >= observed).mean()


# %% tags=["hide-cell", "test"]
draws_of = np.array([1.0, 2.0, 2.0, 5.0])
assert np.isclose(p_value(2.0, draws_of), 0.75), (
    "count the simulated statistics that are at least as large; ties count"
)
assert np.isclose(p_value(9.0, draws_of), 0.0), "no simulated statistic is as large"

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `without(log_likelihood, values)`: the leave-one-out mean of a quantity, given its posterior draws `values` [draws] and the log likelihood
# of the row in each draw. Weight a draw by $1/p(\text{row} \mid \text{draw})$.

# %% tags=["hide-cell", "solution"]
# Draws that explain the row well count less: the row is taken out of the posterior. Subtract a constant first, to avoid overflow.


def without(log_likelihood, values):
    weight = np.exp(log_likelihood.min() - log_likelihood)
    return (weight * values).sum() / weight.sum()


# %% tags=["hide-cell", "test"]
fit = np.log(np.array([0.5, 0.25, 0.25]))
assert np.isclose(without(fit, np.array([1.0, 2.0, 3.0])), (1 * 2 + 2 * 4 + 3 * 4) / 10), (
    "weights are 1 / p, normalized"
)
assert np.isclose(without(fit - 2000, np.array([1.0, 2.0, 3.0])), 2.2), (
    "small likelihoods must not overflow: subtract a constant first"
)

# %% [markdown]
# ## Explore
#
# 1. Hospital C had 41 infections in one month. Remove this month, and repeat step 6 for the Poisson model. Is it good enough now?
# 2. Replace the prior of `tau` by `HalfNormal(0.25)`. How do the estimates of the hospitals change?

# %% tags=["hide-cell", "solution"]
# 1. No: the standard deviations of other hospitals remain extreme. One month is not the reason.
beds, counts = rows["C"]
without = rows | {"C": (beds[counts < 41], counts[counts < 41])}
without = Federation.from_arrays(without).to("cpu", torch.float64)
again = pyrofl.fit(
    pyrofl.hierarchical(hospitals("Poisson"), without, shared="mu tau"), without, progress=False
)
table = checks.predictive_checks(again, draws=max(draws // 2, 50))
print(table.query("p < 0.025 or p > 0.975")["statistic"].value_counts().to_dict())

# %% tags=["hide-cell", "solution"]
# 2. Their range becomes smaller: a small tau is a strong shrinkage. The small hospitals G and H hardly change, because their estimates
# are close to the common mean already.


def similar(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 1.5))
        tau = pyro.sample("tau", dist.HalfNormal(0.25))
        shape = pyro.sample("shape", dist.LogNormal(1.0, 1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        rate = pyro.deterministic("rate", (mu + tau * eta).exp())
        with batch.rows():
            pyro.sample(
                "y", dist.GammaPoisson(shape, shape / (batch.x[..., 0] * rate)), obs=batch.y
            )


tight = pyrofl.fit(pyrofl.hierarchical(similar, data, shared="mu tau shape"), data, progress=False)
rate = {
    n: p["posterior"]["rate"].mean(("chain", "draw")).values
    for n, p in (("before", found["negative binomial"]), ("after", tight.to_arviz(draws=draws)))
}
spread = {n: float(t.max() - t.min()) for n, t in rate.items()}
print(
    {n: t[-2:].round(2) for n, t in rate.items()},
    "range over hospitals",
    {n: round(s, 2) for n, s in spread.items()},
)

# %% tags=["remove-cell"]
if full:
    assert counts.max() == 41
    assert (table.query("p < 0.025")["statistic"] == "sd").sum() >= 3
    assert spread["after"] < spread["before"]
    assert len(works) >= 21, fails
