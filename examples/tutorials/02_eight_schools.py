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
# # 2. Eight schools as eight clients
#
# Fit the eight-schools model without pooling the data. Eight schools gave their pupils extra lessons before a
# test. Each school estimated the effect of the lessons in test points, and the standard error of this estimate.
# The schools do not want to share their data.
#
# After this lesson (about 65 minutes) you can
#
# - fit a hierarchical model while all rows stay on their clients,
# - derive *shrinkage*: why the estimate of one school moves towards the others, and how far,
# - explain why shrinkage is the same as *personalization* in federated learning,
# - compare a federated posterior with the exact one.
#
# You need tutorial 1, or to know what a client and a server are, and what a prior and a posterior are.

# %%
# %matplotlib inline
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import datasets, federations, figures, reference
from pyrofl.figures import moving
from pyrofl.models import pvi

# %% tags=["parameters"]
rounds, draws, warmup, full = 25, 2000, 1000, True
# quick: rounds, draws, warmup, full = 3, 40, 10, False

# %% [markdown]
# ## The data
#
# A *client* is a participant that holds its own data. Here each school is a client with one row: the measured
# effect $y_j$ and its standard error $\sigma_j$, which is assumed known. The effect is the response `y`; the
# standard error is the only column of `x`.

# %%
schools = datasets.load("eight_schools")
data = federations.split(schools, "groups").to("cpu", torch.float64)
y, sigma = data.y, data.x[:, 0]

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.errorbar(y, range(8), xerr=sigma, fmt="o", capsize=3)
axes.set_yticks(range(8), data.names)
axes.set_xlabel("measured effect (test points) ± one standard error")
axes.axvline(0, color="grey", linewidth=0.8)
plt.show()

# %% [markdown]
# School A measured 28 points; the estimate of school C is negative. The standard errors are large, however, so
# differences of this size can be due to chance. There are two simple answers:
#
# - **One estimate per school** (in federated learning: *local* models). The estimate for school A is 28 points,
#   which is probably much too high.
# - **One estimate for all schools** (*complete pooling*). All schools get the same number, and the differences between
#   schools are lost. FedAvg weights clients by their number of rows; each school has one row, so this is the plain mean.
#   The standard errors give a better one: weights $1/\sigma_j^2$ have the smallest variance.

# %%
weight = 1 / sigma**2
by_rows, by_precision = float(y.mean()), float((weight * y).sum() / weight.sum())
print(f"weighted by rows, as FedAvg: {by_rows:.2f} points")
print(
    f"weighted by precision: {by_precision:.1f} points, standard error {float(weight.sum() ** -0.5):.1f}"
)

# %% tags=["remove-cell"]
assert float(y[0]) == 28
assert y[2] < 0
assert by_rows == 8.75
assert round(by_precision, 1) == 7.7

# %% [markdown]
# ## The model
#
# A hierarchical model is a compromise between the two: the schools differ, but they are related. The effect
# $\theta_j$ of a school is drawn from a population with unknown mean $\mu$ and unknown standard deviation $\tau$:
#
# $$\mu \sim N(0, 5^2),\quad \tau \sim \text{HalfCauchy}(5),\quad
# \theta_j = \mu + \tau\,\eta_j,\ \eta_j \sim N(0, 1),\quad y_j \sim N(\theta_j, \sigma_j^2).$$
#
# If $\tau$ is large, the schools have little in common; if it is zero, they are identical. $\tau$ is estimated
# from the data. In Pyro the model has six lines. `batch.clients()` is the plate over clients, and `batch.rows()`
# is the plate over the rows of a client; tutorial 3 explains both. This model does not use `received` and
# `local`.


# %%
def model(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


# %% [markdown]
# ## Derivation: how far an estimate moves
#
# Suppose that $\mu$ and $\tau$ are known. Then the posterior of $\theta_j$ is normal. Its precision is the sum of the
# precision of the measurement and that of the population, and its mean is weighted by these precisions:
#
# $$\theta_j \mid y_j, \mu, \tau \sim N\big(B_j\,\mu + (1 - B_j)\,y_j,\ (\sigma_j^{-2} + \tau^{-2})^{-1}\big),
# \qquad B_j = \frac{\sigma_j^2}{\sigma_j^2 + \tau^2}.$$
#
# $B_j$ is the **shrinkage factor**: 0 keeps the measurement (local model), 1 replaces it by $\mu$ (complete pooling). It is
# large for schools with a large standard error. The complete posterior averages this over $\mu$ and $\tau$.
#
# ## Fit the model
#
# `shared="mu tau"` names the parameters that all schools share; all others are local to a school. In each round
# every school sends one small message: how its data change the posterior of $\mu$ and $\tau$ (a *factor*;
# see tutorial 4). The server multiplies the eight factors with the prior. The function `watch` stores the
# posterior after each round.

# %%
seen = []


def watch(run, _):
    found = run.to_arviz(draws=max(draws // 10, 40))["posterior"]
    flat = {n: found[n].values.reshape(-1, *found[n].shape[2:]) for n in ("mu", "tau", "theta")}
    seen.append(flat)


method = pvi.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, rounds=rounds, logger=watch, progress=False)
print(run.status)

# %% [markdown]
# ## The posterior after each round
#
# Move the slider. The grey band is the posterior predictive distribution of the effect in a new school. The
# points are the eight schools.


# %%
def show(axes, t):
    now = seen[t]
    new = now["mu"] + now["tau"] * np.random.default_rng(0).normal(size=len(now["mu"]))
    axes.axvspan(
        *np.quantile(new, [0.05, 0.95]), color="lightgrey", label="new school, 90% interval"
    )
    low, middle, high = np.quantile(now["theta"], [0.05, 0.5, 0.95], axis=0)
    axes.errorbar(
        middle, range(8), xerr=[middle - low, high - middle], fmt="o", label="school, 90% interval"
    )
    axes.plot(y, range(8), "x", color="black", label="measurement")
    axes.set_yticks(range(8), data.names)
    axes.set_xlim(-40, 45)
    axes.invert_yaxis()
    axes.set_xlabel("effect (test points)")
    axes.legend(loc="lower left", fontsize=8)


moving(show, range(len(seen)), title=lambda t: f"after round {t + 1}")

# %% [markdown]
# Circles lie between their crosses and the middle of the grey band. This is **shrinkage**: the estimate of a
# school also uses the data of the other schools. The larger the standard error of a school, the stronger the
# shrinkage.
#
# In federated learning this is called a **personalized model**: each client has its own model, close to a common
# model, and the data determine how close.

# %%
posterior = run.to_arviz(draws=draws, corrected=draws >= 400)
joint = {n: posterior["posterior"][n] for n in ("mu", "tau", "theta")}
mean = joint["theta"].mean(("chain", "draw")).values
factors = [float((s**2 / (s**2 + joint["tau"] ** 2)).mean()) for s in sigma.tolist()]
for name, error, factor in sorted(
    zip(data.names, sigma.tolist(), factors, strict=True), key=lambda r: r[1]
):
    print(f"school {name}: standard error {error:4.1f}, mean shrinkage factor {factor:.2f}")

# %% tags=["remove-cell"]
centre = float(joint["mu"].mean())
if full:
    assert all((mean[j] - float(y[j])) * (mean[j] - centre) <= 0.3 for j in range(8))

# %% [markdown]
# ## Compare with the exact posterior
#
# With eight rows we can pool the data, which is impossible in a real federation, and run NUTS, a sampler that does
# not use a normal approximation. `reference.nuts` runs the same model.

# %%
exact = reference.nuts(
    model, data, draws=draws // 2, warmup=warmup, chains=2, shared="mu tau", jit=True
)
table = reference.compare_posteriors(posterior, exact)
table[["mean", "sd", "difference", "ratio"]].loc[
    lambda t: [n for n in t.index if "eta" not in n or "theta" in n]
].round(2)

# %% [markdown]
# `difference` is the difference between the federated and the exact mean, in posterior standard deviations. `ratio`
# is the federated standard deviation divided by the exact one. `difference` should be near 0 and `ratio` near 1.
# `corrected=True` above reweights the draws of the normal approximation, so that their distribution is closer to the
# exact posterior.

# %%
figures.cost(table[~table["variable"].isin(["eta"])])

# %% [markdown]
# ## The posterior as an ArviZ object
#
# All functions of ArviZ accept the result. The names of the schools are its coordinates.

# %%
import arviz as az

az.summary(posterior, var_names=["mu", "tau", "theta"], kind="stats", round_to=1)

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 and 3 are intermediate, 4 is advanced. Use NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `pooled(y, sigma)`: return the mean of the measurements `y` weighted by precision, and its standard error.

# %% tags=["hide-cell", "solution"]
# The precisions add, and the standard error is the inverse root of their sum.


def pooled(y, sigma):
    weight = 1 / sigma**2
    return (weight * y).sum() / weight.sum(), weight.sum() ** -0.5


# %% tags=["hide-cell", "test"]
found, error = pooled(np.array([0.0, 10.0]), np.array([1.0, 2.0]))
assert np.isclose(found, 2.0), "weights are 1 / sigma^2: here 1 and 1/4"
assert np.isclose(error, 1.25**-0.5), (
    "the standard error is the inverse root of the sum of the weights"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 2 points)
#
# Write `shrinkage(sigma, tau)`: the shrinkage factor $B$ of a school with standard error `sigma`.

# %% tags=["hide-cell", "solution"]
# The part of the total variance sigma^2 + tau^2 that is due to the measurement.


def shrinkage(sigma, tau):
    return sigma**2 / (sigma**2 + tau**2)


# %% tags=["hide-cell", "test"]
assert np.isclose(shrinkage(5.0, 5.0), 0.5), "equal variances: half way"
assert np.isclose(shrinkage(3.0, 1.0), 0.9), (
    "a large standard error gives a factor close to 1; variances are squares"
)
assert np.isclose(shrinkage(3.0, 0.0), 1.0), "tau = 0: complete pooling"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write `larger(theta, a, b)`: the posterior probability that the effect of school number `a` is larger than that of school
# number `b`. `theta` holds joint draws, [draws, schools].

# %% tags=["hide-cell", "solution"]
# Compare within each draw: joint draws keep the dependence between schools. In the fit above, A and G have the largest means,
# which are about equal, and A is larger than C with probability near 0.6: far from certain, although the measurements are 28 and -3.


def larger(theta, a, b):
    return (theta[:, a] > theta[:, b]).mean()


# %% tags=["hide-cell", "test"]
shift = np.linspace(-10, 10, 101)
assert larger(np.column_stack([shift + 1, shift]), 0, 1) == 1.0, (
    "compare within each draw: here a is always larger"
)
some = np.array([[0.0, 1.0], [2.0, 1.0], [3.0, 1.0], [-9.0, 1.0]])
assert larger(some, 0, 1) == 0.5, "expected the fraction of draws with a larger value of a"
assert larger(some[1:3], 1, 0) == 0.0, "the order of the schools matters"

# %% [markdown]
# ### Exercise 4 (advanced, 3 points)
#
# Write `conditional(y, sigma, mu, tau)`: mean and standard deviation of $\theta_j$, given all other quantities.

# %% tags=["hide-cell", "solution"]
# Precisions add; the mean is weighted by them.


def conditional(y, sigma, mu, tau):
    factor = sigma**2 / (sigma**2 + tau**2)
    return factor * mu + (1 - factor) * y, (sigma**-2 + tau**-2) ** -0.5


# %% tags=["hide-cell", "test"]
middle, sd = conditional(28.0, 15.0, 8.0, 5.0)
assert np.isclose(middle, 8 + 20 * 0.1), "y = 28 counts with 1 - B = 0.1"
assert np.isclose(sd, (1 / 225 + 1 / 25) ** -0.5), (
    "the standard deviation is the inverse root of the sum of precisions"
)
assert conditional(28.0, 15.0, 8.0, 5.0)[1] < 5.0, "data reduce the standard deviation"

# %% [markdown]
# ## Explore
#
# 1. The prior of $\tau$ states how different the schools may be. How do the eight estimates change if
#    `HalfNormal(1.0)` replaces `HalfCauchy(5.0)`?
# 2. Which school has the largest posterior mean? How probable is it that the effect is larger in A than in C?
# 3. Change the standard error of school A from 15 to 2. Which estimate changes most?

# %% tags=["hide-cell", "solution"]
# 1. A narrow prior of tau makes the schools more similar: every estimate moves close to mu.


def alike(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


other = pyrofl.fit(
    pvi.hierarchical(alike, data, shared="mu tau"), data, rounds=rounds, progress=False
)
at = other.to_arviz(draws=draws)["posterior"]["theta"].mean(("chain", "draw")).values
before, after = mean.max() - mean.min(), at.max() - at.min()
print(f"range of the eight means: {before:.1f} points before, {after:.1f} with HalfNormal(1.0)")

# %% tags=["hide-cell", "solution"]
# 2. A and G have the largest means, which are about equal. The probability is about 0.6.
theta = joint["theta"]
print("largest posterior mean: school", theta.mean(("chain", "draw")).idxmax("client").item())
better = larger(theta.values.reshape(-1, 8), 0, 2)
print(f"probability that the effect of A is larger than that of C: {better:.2f}")

# %% tags=["hide-cell", "solution"]
# 3. The estimate of A changes most: it moves to its measurement. mu and tau increase, because A now has more weight.
x = data.x.clone()
x[list(data.names).index("A"), 0] = 2.0
sure = replace(data, x=x)
again = pyrofl.fit(
    pvi.hierarchical(model, sure, shared="mu tau"), sure, rounds=rounds, progress=False
).to_arviz(draws=draws)["posterior"]
moved = again["theta"].mean(("chain", "draw")).values - mean
print("change of the eight estimates:", moved.round(1))
print(f"mu {float(again['mu'].mean()):.1f}, tau {float(again['tau'].mean()):.1f}")

# %% tags=["remove-cell"]
if full:
    assert after < before / 3
    assert {*np.array(data.names)[mean.argsort()[-2:]]} == {"A", "G"}
    assert abs(better - 0.62) < 0.05
    assert np.abs(moved).argmax() == 0
    assert float(again["mu"].mean()) > float(joint["mu"].mean())
    assert float(again["tau"].mean()) > float(joint["tau"].mean())
