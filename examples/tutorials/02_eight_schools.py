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
# After these fifteen minutes you can
#
# - fit a hierarchical model while all rows stay on their clients,
# - explain *shrinkage*: why the estimate of one school moves towards the others,
# - explain why shrinkage is the same as *personalization* in federated learning,
# - compare a federated posterior with the exact one.
#
# You need to know what a prior and a posterior are. No knowledge of federated learning is assumed.

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
rounds, draws, warmup = 25, 2000, 1000
# quick: rounds, draws, warmup = 3, 40, 10

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
# differences of this size can be due to chance. There are two simple estimators:
#
# - **One estimate per school** (in federated learning: *local* models). The estimate for school A is 28 points,
#   which is probably much too high.
# - **One estimate for all schools** (*complete pooling*; in federated learning: FedAvg). All schools get the
#   weighted mean, and the differences between schools are lost.

# %%
weight = 1 / sigma**2
pooled = float((weight * y).sum() / weight.sum())
print(f"pooled estimate: {pooled:.1f} points, standard error {float(weight.sum() ** -0.5):.1f}")

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
# Every circle lies between its cross and the middle of the grey band. This is **shrinkage**: the estimate of a
# school also uses the data of the other schools. The larger the standard error of a school, the stronger the
# shrinkage.
#
# In federated learning this is called a **personalized model**: each client has its own model, close to a common
# model, and the data determine how close.

# %%
posterior = run.to_arviz(draws=draws, corrected=draws >= 400)
mean = posterior["posterior"]["theta"].mean(("chain", "draw")).values
moved = (y.numpy() - mean) / (y.numpy() - float(posterior["posterior"]["mu"].mean()))
for name, error, share in sorted(
    zip(data.names, sigma.tolist(), moved, strict=True), key=lambda r: r[1]
):
    print(f"school {name}: standard error {error:4.1f}, shrinkage to mu {100 * share:3.0f}%")

# %% [markdown]
# (For a school with a measurement close to $\mu$ this fraction is the ratio of two small numbers and is not
# informative.)
#
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
# 1. The prior of $\tau$ states how different the schools may be. How do the eight estimates change if
#    `HalfNormal(1.0)` replaces `HalfCauchy(5.0)`?
# 2. Which school has the largest posterior mean? What is the posterior probability that the effect is larger in
#    school A than in school C?
# 3. Change the standard error of school A from 15 to 2. Which estimate changes most?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
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
).to_arviz(draws=draws)["posterior"]["theta"]
print("range of the eight means:", f"{mean.max() - mean.min():.1f}", "points before,", end=" ")
at = other.mean(("chain", "draw"))
print(f"{float(at.max() - at.min()):.1f} with HalfNormal(1.0)")

# %% tags=["hide-cell"]
# 2. Joint draws give the probability of any statement about several parameters. A and G have the largest means, which are
# about equal. The effect in A is not certain to be larger than the effect in C.
theta = posterior["posterior"]["theta"]
better = float((theta.sel(client="A") > theta.sel(client="C")).mean())
print("largest posterior mean: school", theta.mean(("chain", "draw")).idxmax("client").item())
print(f"probability that the effect of A is larger than that of C: {better:.2f}")

# %% tags=["hide-cell"]
# 3. The estimate of A changes most: it moves to its measurement. mu and tau increase, because A now has more weight.
x = data.x.clone()
x[list(data.names).index("A"), 0] = 2.0
sure = replace(data, x=x)
again = pyrofl.fit(
    pvi.hierarchical(model, sure, shared="mu tau"), sure, rounds=rounds, progress=False
).to_arviz(draws=draws)["posterior"]
print("school A:", f"{float(again['theta'].sel(client='A').mean()):.1f}", "points;", end=" ")
print(f"mu {float(again['mu'].mean()):.1f}, tau {float(again['tau'].mean()):.1f}")
