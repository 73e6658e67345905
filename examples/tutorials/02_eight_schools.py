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
# After this lesson (about 70 minutes) you can
#
# - fit a hierarchical model while all rows stay on their clients,
# - derive *shrinkage*: why the estimate of one school moves towards a common mean, and how far,
# - explain why shrinkage is the same as *personalization* in federated learning,
# - compare a federated posterior with the exact one.
#
# You need lesson 1, or to know what a client and a server are, and what a prior and a posterior are. The cells compute for about
# a minute.

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
rounds, draws = 25, 4000
# quick: rounds, draws = 3, 400

# %% [markdown]
# ## The data
#
# A *client* is a participant that holds its own data. Here each school is a client with one row: the measured
# effect $y_j$ and its standard error $\sigma_j$, which is assumed known. The effect is the response `y`; the
# standard error is the only column of `x`.

# %%
schools = datasets.load("eight_schools")
data = federations.split(schools, "groups").to("cpu", torch.float64)  # one client per school
y, sigma = data.y, data.x[:, 0]

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.errorbar(y, range(8), xerr=sigma, fmt="o", capsize=3)
axes.set_yticks(range(8), data.names)
axes.invert_yaxis()
axes.set_xlabel("measured effect (test points) ± one standard error")
axes.axvline(0, color="gray", linewidth=0.8)
plt.show()

# %% [markdown]
# School A measured 28 points; the estimate of school C is negative. The standard errors are large, however, so
# differences of this size can be due to chance. There are two simple answers:
#
# - **One estimate per school** (in federated learning: *local* models). The estimate for school A is 28 points,
#   which is probably much too high.
# - **One estimate for all schools** (*complete pooling*). All schools get the same number, and the differences between
#   schools are lost. FedAvg with many local steps ends at the mean weighted by rows; each school has one row, so this is the
#   plain mean. The standard errors give a better one: of all weighted means, that with weights $1/\sigma_j^2$ (the *precisions* of the
#   measurements) has the smallest variance.

# %%
weight = 1 / sigma**2
by_rows, by_precision = float(y.mean()), float((weight * y).sum() / weight.sum())
print(f"weighted by rows, as FedAvg with many local steps: {by_rows:.2f} points")
print(
    f"weighted by precision: {by_precision:.1f} points, standard error {float(weight.sum() ** -0.5):.1f}"
)

# %% tags=["remove-cell"]
assert float(y[0]) == 28
assert y[2] < 0
assert by_rows == 8.75
assert round(by_precision, 1) == 7.7
assert round(float(weight.sum() ** -0.5), 1) == 4.1
assert round(by_precision * float(weight.sum() / (weight.sum() + 1 / 25)), 1) == 4.6

# %% [markdown]
# ## The model
#
# A **hierarchical model** is a compromise between the two: the schools differ, but they are related. The effect
# $\theta_j$ of a school is drawn from a population with unknown mean $\mu$ and unknown standard deviation $\tau$:
#
# $$\mu \sim N(0, 5^2),\quad \tau \sim \text{HalfCauchy}(5),\quad
# \theta_j = \mu + \tau\,\eta_j,\ \eta_j \sim N(0, 1),\quad y_j \sim N(\theta_j, \sigma_j^2).$$
#
# The third formula is $\theta_j \sim N(\mu, \tau^2)$, written with a standard normal $\eta_j$. The prior of $\tau$,
# HalfCauchy(5), is a wide density on positive numbers: half of it is below 5, and large values are not excluded. If $\tau$ is
# large, the schools have little in common; if it is zero, they are identical. $\tau$ is estimated from the data.
#
# Pyro describes a model as a program. `pyro.sample(name, distribution)` declares a random variable, called a **site**; with
# `obs=` the variable is observed. `pyro.deterministic` names a quantity that is computed from others. A **plate** declares
# independent repetitions: `batch.clients()` is the plate over clients, `batch.rows()` that over the rows of a client.
# `mu` and `tau` are inside the plate, too, because each client runs this program by itself and has its own copy; the
# argument `shared="mu tau"` below declares that all copies are equal. Lesson 3 explains this, `received` and `local`.


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
# Suppose that $\mu$ and $\tau$ are known. By Bayes' rule, the posterior density of $\theta_j$ is proportional to likelihood times
# prior. Both are normal densities in $\theta_j$, so the logarithm is a parabola:
#
# $$\log p(\theta_j \mid y_j, \mu, \tau) = -\frac{(y_j - \theta_j)^2}{2 \sigma_j^2} - \frac{(\theta_j - \mu)^2}{2 \tau^2} + \text{constant}.$$
#
# Minus its curvature is the precision of the posterior: the sum of the two precisions, $\sigma_j^{-2} + \tau^{-2}$. Its derivative is
# zero at the mean weighted by these precisions. Multiply numerator and denominator by $\sigma_j^2 \tau^2$:
#
# $$E[\theta_j \mid y_j, \mu, \tau] = \frac{\sigma_j^{-2}\, y_j + \tau^{-2} \mu}{\sigma_j^{-2} + \tau^{-2}}
# = \frac{\tau^2 y_j + \sigma_j^2 \mu}{\sigma_j^2 + \tau^2} = (1 - B_j)\, y_j + B_j\, \mu,
# \qquad B_j = \frac{\sigma_j^2}{\sigma_j^2 + \tau^2}.$$
#
# $B_j$ is the **shrinkage weight**: 0 keeps the measurement (local model), 1 replaces it by $\mu$ (complete pooling). It is
# large for schools with a large standard error. As $\mu$ and $\tau$ are unknown, the posterior averages over them.
#
# ## Fit the model
#
# The method is partitioned variational inference (PVI, lesson 4). It approximates the posterior by normal densities: of $\mu$
# and $\log \tau$, and given these of the $\eta_j$. In each round every school sends one small message, a normal approximation
# that takes its own data into account. From it the server computes how these data change the posterior of $\mu$ and $\tau$, and
# applies a part of each change, so several rounds are needed. (For this model,
# `pyrofl.hierarchical` would choose a method that needs one round; PVI also fits models for which there is no such method.) The
# function `watch` stores draws from the approximation after each round. The fit takes 10 to 30 seconds.

# %%
seen = []


def watch(run, _):
    found = run.to_arviz(draws=draws, corrected=False, progress=False)["posterior"]
    flat = {n: found[n].values.reshape(-1, *found[n].shape[2:]) for n in ("mu", "tau", "theta")}
    seen.append(flat)


method = pvi.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, rounds=rounds, logger=watch, progress=False)
print(run.status)

# %% [markdown]
# ## The posterior after each round
#
# "converged" means that the last server steps (*aggregations*) changed nothing that matters: no mean and no standard deviation
# changed by more than 0.01 posterior standard deviations. (The limit of 0.1% is for parameters without a distribution.)
#
# Move the slider. The circles and bars are medians and 95% intervals of the eight schools. The gray band is the 95% interval of
# the effect in a new school, drawn from $N(\mu, \tau^2)$ with $\mu$ and $\tau$ from the posterior; the dashed line is its median.


# %%
def show(axes, t):
    now = seen[t]
    new = now["mu"] + now["tau"] * np.random.default_rng(0).normal(size=len(now["mu"]))
    low, middle, high = np.quantile(new, [0.025, 0.5, 0.975])
    axes.axvspan(low, high, color="lightgray", label="new school")
    axes.axvline(middle, color="gray", linestyle="--")
    low, middle, high = np.quantile(now["theta"], [0.025, 0.5, 0.975], axis=0)
    axes.errorbar(middle, range(8), xerr=[middle - low, high - middle], fmt="o", label="school")
    axes.plot(y, range(8), "x", color="black", label="measurement")
    axes.set_yticks(range(8), data.names)
    axes.set_xlim(-30, 35)
    axes.invert_yaxis()
    axes.set_xlabel("effect (test points)")
    axes.legend(loc="lower left", fontsize=8)


print("mean of mu:", [round(float(now["mu"].mean()), 1) for now in seen])
moving(show, range(len(seen)), title=lambda t: f"after round {t + 1}")

# %% [markdown]
# In the first two rounds the posterior moves to the right: the mean of $\mu$ is about 2.4 after round 1, 4.3 after round 2 and 4.4
# at the end. Later rounds change little. The end is below the 7.7 points above, because the prior
# $N(0, 5^2)$ pulls $\mu$ towards 0: if all schools were identical, $\mu$ would be the mean of 7.7 ± 4.1 and 0 ± 5 weighted by
# precision, 4.6. At the end each circle lies between its cross and the dashed line, up to the random error
# of the draws (*Monte Carlo error*: that of a mean is the standard deviation divided by $\sqrt{4000}$). This is **shrinkage**:
# the estimate of a school moves towards $\mu$, and so also uses the data of the other schools. The larger the standard error of a school, the stronger the
# shrinkage.
#
# In federated learning this is called a **personalized model**: each client has its own model, close to a common
# model, and the data determine how close.
#
# The next cell draws from the final posterior. `corrected=True` removes most of the error of the normal approximation by
# **importance sampling**: draws are resampled with weights proportional to the exact posterior density divided by that of the
# approximation. The exact density is the prior times one likelihood per school: each school sends one number per draw.
# The means therefore differ a little from those of the last frame.

# %%
posterior = run.to_arviz(draws=draws, corrected=True, progress=False)
joint = {n: posterior["posterior"][n] for n in ("mu", "tau", "theta")}
weights = [float((s**2 / (s**2 + joint["tau"] ** 2)).mean()) for s in sigma.tolist()]
for j in sigma.argsort().tolist():
    print(
        f"school {data.names[j]}: standard error {sigma[j]:4.1f}, mean shrinkage weight {weights[j]:.2f}"
    )

# %% tags=["remove-cell"]
if rounds == 25:
    centers = [float(now["mu"].mean()) for now in seen]
    for t, about in ((0, 2.4), (1, 4.3), (-1, 4.4)):
        assert abs(centers[t] - about) < 0.25  # four standard errors of 4000 draws, and rounding
    between = np.median(seen[-1]["theta"], axis=0)
    line = np.median(seen[-1]["mu"])
    assert all(
        (between[j] - float(y[j])) * (between[j] - line) <= 0.2 * abs(y[j] - line) for j in range(8)
    )
    assert str(run.status).startswith("converged")
    assert max(weights) == weights[int(sigma.argmax())]

# %% [markdown]
# ## Compare with the exact posterior
#
# With eight rows we can pool the data, which is impossible in a real federation, and draw from the posterior by Hamiltonian
# Monte Carlo (HMC). HMC generates a sequence of draws whose distribution converges to the posterior (a *Markov chain*). It
# needs no normal approximation: with enough draws it is exact. `reference.hmc` runs the same model; this takes about five seconds.

# %%
exact = reference.hmc(model, data, shared="mu tau")
table = reference.compare_posteriors(posterior, exact)
table = table[table["variable"].isin(["mu", "tau", "theta"])]
table[["mean", "sd", "difference", "ratio"]].round(2)

# %% [markdown]
# `difference` is the federated mean minus the exact one, in exact posterior standard deviations; it should be near 0. `ratio` is
# the federated standard deviation divided by the exact one; it should be near 1. The figure shows the two posteriors on the
# left, centered at the exact mean, `difference` in the middle and `ratio` on the right. Dots in the gray bands count as agreement.
# The Monte Carlo error is the standard deviation of a `difference` that is due to the finite number of draws only.

# %%
figures.posterior_differences(table, ("PVI", "HMC"))

# %% [markdown]
# All rows agree by these limits, 0.2 standard deviations and 15%: the schools obtain almost the exact posterior without pooling
# their data.
#
# ## The posterior as an ArviZ object
#
# ArviZ is a library of diagnostics and figures for posterior draws. All its functions accept the result. The names of the
# schools are its coordinates.

# %%
import arviz as az

az.summary(posterior, var_names=["mu", "tau", "theta"], kind="stats")[["mean", "sd"]].round(1)

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 and 3 are intermediate, 4 is advanced. Exercise 4 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# A ninth school joins. The others do not send their measurements again: only their mean, weighted by precision, and its standard
# error are known. Write `joined(mean, error, y, sigma)`: return both numbers for all schools together, where the new school measured
# `y` with standard error `sigma`.

# %% tags=["hide-cell", "solution"]
# The mean and its standard error replace the measurements: the precision of the mean is the sum of theirs.


def joined(mean, error, y, sigma):
    before, new = error**-2, sigma**-2
    return (before * mean + new * y) / (before + new), (before + new) ** -0.5


# %% tags=["hide-cell", "test"]
effects, errors = np.array([28.0, 8.0, -3.0, 7.0]), np.array([15.0, 10.0, 16.0, 11.0])
together = [effects[0], errors[0]]
for one, width in zip(effects[1:], errors[1:], strict=True):
    found = joined(*together, one, width)
    assert np.shape(found) == (2,), "return two numbers: the mean and its standard error"
    assert found[1] < min(together[1], width), "more data reduce the standard error"
    together = found
assert np.isclose(together[0], np.average(effects, weights=errors**-2)), (
    "one school after the other must give the same mean as all at once"
)
assert np.isclose(together[1], (errors**-2).sum() ** -0.5), (
    "one school after the other must give the same standard error as all at once"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 2 points)
#
# Write `shrinkage(sigma, tau)`: the shrinkage weight $B$ of a school with standard error `sigma`. `tau` may be 0.

# %% tags=["hide-cell", "solution"]
# The part of the total variance sigma^2 + tau^2 that is due to the measurement.


def shrinkage(sigma, tau):
    return sigma**2 / (sigma**2 + tau**2)


# %% tags=["hide-cell", "test"]
assert np.isclose(shrinkage(5.0, 5.0), 0.5), "equal variances: B is 1/2"
assert np.isclose(shrinkage(3.0, 1.0), 0.9), (
    "a large standard error gives a weight close to 1; variances are squares"
)
try:
    alike = shrinkage(3.0, 0.0)
except ZeroDivisionError:
    alike = None
assert alike is not None, "tau = 0: do not divide by tau"
assert np.isclose(alike, 1.0), "tau = 0: complete pooling"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write `larger(theta, a, b)`: the posterior probability, between 0 and 1, that the effect of school `a` is larger than that
# of school `b`; `a` and `b` are columns, counted from 0. `theta` holds joint draws, [draws, schools]; a draw with
# equal effects counts as not larger.

# %% tags=["hide-cell", "solution"]
# Compare within each draw: joint draws keep the dependence between schools.


def larger(theta, a, b):
    return (theta[:, a] > theta[:, b]).mean()


# %% tags=["hide-cell", "test"]
some = np.array([[0.0, 1.0], [2.0, 1.0], [3.0, 1.0], [-9.0, 1.0]])
clear = np.array([[5.0, 0.0], [4.0, 1.0], [3.0, 2.0]])
assert isinstance(larger(clear, 0, 1), float), "return one number, a fraction of the draws"
assert larger(clear, 0, 1) != 0.5, "a and b are columns: theta[:, a]"
assert larger(clear, 0, 1) != 0.0, "is a larger than b? Columns are counted from 0"
shift = np.linspace(-10, 10, 101)
always = larger(np.column_stack([shift + 1, shift]), 0, 1)
assert always <= 1, "a probability is at most 1: return a fraction, not a count or a percentage"
assert always == 1.0, "compare within each draw: here a is always larger"
assert larger(np.ones((3, 2)), 0, 1) == 0.0, "equal effects do not count as larger"
assert larger(some, 0, 1) == 0.5, (
    "expected the fraction of draws with a larger value of a: do not compare means"
)
tie = np.array([[1.0, 1.0], [2.0, 1.0]])
assert larger(tie, 0, 1) == 0.5, (
    "divide by the number of all draws, also of those with equal effects"
)

# %% [markdown]
# ### Exercise 4 (advanced, 3 points)
#
# Write `population_mean(data, tau)` with pyrofl: mean and standard deviation of the posterior of $\mu$, a tuple of two floats, where
# the standard deviation `tau` of the population is **known** and $\mu \sim N(0, 5^2)$. `data` is a federation like that of this
# lesson: `batch.y` holds the measurements, `batch.x[..., 0]` their standard errors. Fit the model by `pyrofl.hierarchical` (one
# round is enough), and use 4000 draws of `run.to_arviz`.

# %% tags=["hide-cell", "solution"]
# tau is a number now, not a site. All schools share mu; each has its own effect.


def population_mean(data, tau):
    def known_tau(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            with batch.rows():
                pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)

    method = pyrofl.hierarchical(known_tau, data, shared="mu")
    run = pyrofl.fit(method, data, progress=False)
    mu = run.to_arviz(draws=4000, progress=False)["posterior"]["mu"]
    return float(mu.mean()), float(mu.std())


# %% tags=["hide-cell", "test"]
measured, errors = np.array([28.0, 20.0, -3.0]), np.array([3.0, 10.0, 16.0])
three = {f"school {j}": (errors[[j], None], measured[[j]]) for j in range(3)}
found = population_mean(pyrofl.Federation.from_arrays(three).to("cpu", torch.float64), 4.0)
assert np.shape(found) == (2,), "return two numbers: the mean and the sd"
mean, exact = 13.883248, 3.291591
assert not np.isclose(found[0], exact, atol=0.3), "return the mean first, then the sd"
assert abs(found[0] - mean) < 5 * exact / 4000**0.5, (
    "the mean is not that of the posterior: check the prior of mu, the population and the noise"
)
assert abs(found[1] / exact - 1) < 5 / 8000**0.5, (
    "the standard deviation is not that of the posterior: is mu shared, and theta not?"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. In the draws above, which school has the larger effect, A or G? And A or C, whose measurements are 28 and -3? Use `larger`
#    and `theta`, the draws as an array: `theta = joint["theta"].values.reshape(-1, 8)`.
# 2. Suppose that school A had measured its 28 points with a standard error of 2 instead of 15. The estimate of A moves to its
#    measurement. Which other estimate changes most, and why? The changed data are
#    `x = data.x.clone(); x[0, 0] = 2.0; sure = replace(data, x=x)`.

# %% tags=["hide-cell", "solution"]
# 1. Nobody can tell A from G: the probability that A is larger is close to 1/2, and the two means differ by a few times their
# Monte Carlo error (0.09) at most. A is larger than C with probability 0.6 only: far from certain.
theta = joint["theta"].values.reshape(-1, 8)
for b in ("G", "C"):
    print(f"probability that A is larger than {b}: {larger(theta, 0, data.names.index(b)):.2f}")
print("means:", dict(zip(data.names, theta.mean(0).round(2).tolist(), strict=True)))
print(f"Monte Carlo error of the mean of A: {theta[:, 0].std() / len(theta) ** 0.5:.2f}")

# %% tags=["hide-cell", "solution"]
# 2. G: a precise measurement of 28 raises mu, but above all tau. All schools then shrink less, towards a larger mean. G has a
# large measurement (18 points), so both effects move it upwards.
x = data.x.clone()
x[0, 0] = 2.0
sure = replace(data, x=x)
again = pyrofl.fit(
    pvi.hierarchical(model, sure, shared="mu tau"), sure, rounds=rounds, progress=False
).to_arviz(draws=draws, progress=False)["posterior"]
moved = again["theta"].mean(("chain", "draw")).values - theta.mean(0)
print("change of the estimates:", dict(zip(data.names, moved.round(1).tolist(), strict=True)))
print(f"mu {float(again['mu'].mean()):.1f}, tau {float(again['tau'].mean()):.1f}")

# %% tags=["remove-cell"]
if rounds == 25:
    assert table["difference"].abs().max() < 0.15
    assert (table["ratio"] - 1).abs().max() < 0.15
    assert abs(larger(theta, 0, 2) - 0.62) < 0.05
    assert abs(larger(theta, 0, 6) - 0.5) < 0.05
    assert round(theta[:, 0].std() / len(theta) ** 0.5, 2) == 0.09
    assert [data.names[j] for j in np.abs(moved).argsort()[-2:]] == ["G", "A"]
    assert float(again["mu"].mean()) > float(joint["mu"].mean())
    assert float(again["tau"].mean()) > float(joint["tau"].mean())
