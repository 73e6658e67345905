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
# # 1. Eight schools as eight clients
#
# Eight schools gave their pupils extra lessons before a test. Each school measured how many points the lessons
# were worth, and how uncertain this number is. The schools do not want to send their data away.
#
# After these fifteen minutes you can
#
# - fit a hierarchical model without moving a row,
# - say why the estimate of a school moves towards the others (*shrinkage*),
# - see that shrinkage is the same thing as *personalisation* in federated learning,
# - check a federated posterior against the exact one.
#
# You need to know what a prior and a posterior are. No federated learning is assumed.

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
# A *client* is anyone who holds rows that do not move. Here a client is a school, and it has one row: the
# measured effect $y_j$, and its standard error $\sigma_j$, which counts as known. The effect is the response, `y`; the
# standard error is the only column of `x`.

# %%
schools = datasets.load("eight_schools")
data = federations.split(schools, "groups").to("cpu", torch.float64)
y, sigma = data.y, data.x[:, 0]

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.errorbar(y, range(8), xerr=sigma, fmt="o", capsize=3)
axes.set_yticks(range(8), data.names)
axes.set_xlabel("measured effect of the lessons (test points), with one standard error")
axes.axvline(0, color="grey", linewidth=0.8)
plt.show()

# %% [markdown]
# School A measured 28 points, school C less than nothing. But look at the bars: a difference of this
# size can be chance. Two simple answers come to mind.
#
# - **Everyone alone** (in federated learning: *local* models). School A says 28 points and is
#   probably much too optimistic.
# - **One number for all** (*pooling*; in federated learning: FedAvg). All schools get the weighted mean,
#   and what is special about a school is lost.

# %%
weight = 1 / sigma**2
pooled = float((weight * y).sum() / weight.sum())
print(f"one number for all: {pooled:.1f} points, standard error {float(weight.sum() ** -0.5):.1f}")

# %% [markdown]
# ## The model
#
# There is an answer in between: schools differ, but they have something in common. The effect $\theta_j$ of a
# school is drawn from a population with mean $\mu$ and standard deviation $\tau$, which nobody knows:
#
# $$\mu \sim N(0, 5^2),\quad \tau \sim \text{HalfCauchy}(5),\quad
# \theta_j = \mu + \tau\,\eta_j,\ \eta_j \sim N(0, 1),\quad y_j \sim N(\theta_j, \sigma_j^2).$$
#
# If $\tau$ is large, schools have little in common; if it is zero, they are all the same. The data
# decide. In Pyro these are six lines. `batch.clients()` says "for every client", `batch.rows()` says
# "for every row of a client". (`received` and `local` are not needed
# yet.) Tutorial 2 is about these two plates.


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
# ## Fit it, and move no row
#
# `pvi.hierarchical` is told which unknowns all schools share: `mu` and `tau`. Everything else stays in
# the school. In each round a school sends one small message: how its data change what is believed about
# $\mu$ and $\tau$ (a *factor*; tutorial 5). The server multiplies the eight factors with the prior. We keep
# what is believed after each round, to watch it.

# %%
seen = []


def watch(run, _):
    found = run.to_arviz(draws=max(draws // 10, 40))["posterior"]
    flat = {n: found[n].values.reshape(-1, *found[n].shape[2:]) for n in ("mu", "tau", "theta")}
    seen.append(flat)


method = pvi.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, rounds=rounds, log=watch, progress=False)
print(run.verdict)

# %% [markdown]
# ## What happens over the rounds
#
# Move the slider. Grey is what the server believes about the population: a school that nobody has seen yet would
# be drawn from it. The points are the eight schools.


# %%
def show(axes, t):
    now = seen[t]
    new = now["mu"] + now["tau"] * np.random.default_rng(0).normal(size=len(now["mu"]))
    axes.axvspan(*np.quantile(new, [0.05, 0.95]), color="lightgrey", label="population, 90%")
    low, middle, high = np.quantile(now["theta"], [0.05, 0.5, 0.95], axis=0)
    axes.errorbar(
        middle, range(8), xerr=[middle - low, high - middle], fmt="o", label="school, 90%"
    )
    axes.plot(y, range(8), "x", color="black", label="its own measurement")
    axes.set_yticks(range(8), data.names)
    axes.set_xlim(-40, 45)
    axes.invert_yaxis()
    axes.set_xlabel("effect (test points)")
    axes.legend(loc="lower left", fontsize=8)


moving(show, range(len(seen)), title=lambda t: f"after round {t + 1}")

# %% [markdown]
# Every circle lies between its cross and the middle of the grey band. That is **shrinkage**: the school
# borrows from the others. A school with a large standard error borrows more.
#
# In federated learning the same picture has another name: a **personalised model**. Each client has a model of
# its own, held near a common one, and the data decide how near.

# %%
posterior = run.to_arviz(draws=draws, corrected=draws >= 400)
mean = posterior["posterior"]["theta"].mean(("chain", "draw")).values
moved = (y.numpy() - mean) / (y.numpy() - float(posterior["posterior"]["mu"].mean()))
for name, error, share in sorted(
    zip(data.names, sigma.tolist(), moved, strict=True), key=lambda r: r[1]
):
    print(f"school {name}: standard error {error:4.1f}, moved {100 * share:3.0f}% of the way to mu")

# %% [markdown]
# (For a school whose measurement is very near to $\mu$ this share says little: it is a ratio of two small numbers.)
#
# ## Is it right?
#
# With eight rows we can do what a federation may not: put all rows in one place, and run NUTS, a sampler that needs no
# normal approximation. `reference.nuts` takes the same program.

# %%
exact = reference.nuts(
    model, data, draws=draws // 2, warmup=warmup, chains=2, shared="mu tau", jit=True
)
table = reference.cost(posterior, exact)
table[["mean", "sd", "difference", "ratio"]].loc[
    lambda t: [n for n in t.index if "eta" not in n or "theta" in n]
].round(2)

# %% [markdown]
# `difference` is the distance between the federated and the exact mean, in posterior standard deviations. `ratio` is the federated
# standard deviation divided by the exact one. Near 0 and near 1 is what we want. `corrected=True` above did the last step: it reweights the
# draws of the normal approximation, so that they are close to draws from the exact posterior.

# %%
figures.cost(table[~table["variable"].isin(["eta"])])

# %% [markdown]
# ## A posterior is an ArviZ object
#
# Everything that you know from ArviZ works, with names of schools as coordinates.

# %%
import arviz as az

az.summary(posterior, var_names=["mu", "tau", "theta"], kind="stats", round_to=1)

# %% [markdown]
# ## Exercises
#
# 1. The prior of $\tau$ says how different schools may be. What happens to the eight estimates if you
#    replace `HalfCauchy(5.0)` by `HalfNormal(1.0)`? Guess first.
# 2. In which school would the lessons help your child most, as far as we know? What is the probability that the
#    effect is larger in school A than in school C?
# 3. Let school A measure with a standard error of 2 instead of 15. Which number moves most?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. A narrow prior of tau makes schools alike: every estimate moves close to mu.


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
# 2. Draws answer any question about several unknowns together. A and G have the largest means, about equal, and it is far
# from certain that the lessons of A are better than those of C.
theta = posterior["posterior"]["theta"]
better = float((theta.sel(client="A") > theta.sel(client="C")).mean())
print("largest posterior mean: school", theta.mean(("chain", "draw")).idxmax("client").item())
print(f"probability that A is better than C: {better:.2f}")

# %% tags=["hide-cell"]
# 3. A's own estimate moves most, to its measurement; and mu and tau grow, as A now counts.
x = data.x.clone()
x[list(data.names).index("A"), 0] = 2.0
sure = replace(data, x=x)
again = pyrofl.fit(
    pvi.hierarchical(model, sure, shared="mu tau"), sure, rounds=rounds, progress=False
).to_arviz(draws=draws)["posterior"]
print("school A:", f"{float(again['theta'].sel(client='A').mean()):.1f}", "points;", end=" ")
print(f"mu {float(again['mu'].mean()):.1f}, tau {float(again['tau'].mean()):.1f}")
