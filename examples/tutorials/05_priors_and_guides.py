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
# # 5. Choose the prior and the guide
#
# Replace the prior and the guide of a method, and compare the results. The **prior** is the distribution of the
# parameters before any data are seen. The **guide** is the family of distributions that approximates the posterior.
# Each is one argument.
#
# After this lesson (about 70 minutes) you can
#
# - replace a prior, and compare the models by leave-one-out cross-validation (LOO) and in a figure,
# - replace a guide, recognize what it cannot represent, and derive how much too narrow it is,
# - decide which of the two matters for your data.
#
# You need lessons 1 to 4.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, guides, priors
from pyrofl.models import pfedvem, pvi

# %% tags=["parameters"]
rounds, draws, full = 25, 2000, True
# quick: rounds, draws, full = 3, 200, False

# %% [markdown]
# ## Ten clinics, one of them an outlier
#
# Each clinic measured how much a drug lowers the blood pressure of five patients. In nine clinics the drop is about 8 mmHg.
# The tenth clinic used another device.

# %%
rng = np.random.default_rng(3)
truth = np.array([8.5, 7.0, 9.0, 8.0, 7.5, 8.2, 9.3, 7.8, 8.6, 30.0])
clinics = {
    f"clinic {j}": (np.zeros((5, 1)), truth[j] + 3.0 * rng.normal(size=5)) for j in range(10)
}
data = Federation.from_arrays(clinics).to("cpu", torch.float64)

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for j, (_, y) in enumerate(clinics.values()):
    axes.plot(y, np.full(5, j), "o", color="C0", alpha=0.6)
axes.set_yticks(range(10), clinics)
axes.invert_yaxis()
axes.set_xlabel("drop in blood pressure (mmHg), one dot per patient")
plt.show()

# %% [markdown]
# ## Two population distributions
#
# With a **normal** population an outlier is very unlikely. To explain it, $\tau$ has to be large, which weakens the
# shrinkage of all clinics. A **Student-t** population has heavy tails and allows a few outliers. (Its $\tau$ is a scale
# parameter: with three degrees of freedom the standard deviation is $\sqrt{3}\,\tau$. The two values of $\tau$ are
# therefore not directly comparable.)
#
# Why does it allow outliers? A Student-t distribution with $\nu$ degrees of freedom is a normal distribution with an unknown
# weight per clinic, $\theta_j \sim N(\mu, \tau^2/\lambda_j)$ with $\lambda_j \sim \text{Gamma}(\nu/2, \nu/2)$. Given $\theta_j$, the
# weight has a Gamma distribution again, with parameters $(\nu + 1)/2$ and $(\nu + (\theta_j - \mu)^2/\tau^2)/2$. Its mean is
#
# $$E[\lambda_j \mid \theta_j] = \frac{\nu + 1}{\nu + (\theta_j - \mu)^2/\tau^2}.$$
#
# **A clinic far from $\mu$ gets a small weight**, so it hardly affects $\mu$ and $\tau$. A normal distribution gives all clinics
# the weight 1.


# %%
def hospital(population):
    """Return the model with this population distribution of the clinics."""

    def model(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 20.0))
            tau = pyro.sample("tau", dist.HalfNormal(10.0))
            theta = pyro.sample("theta", population(mu, tau))
            with batch.rows():
                pyro.sample("y", dist.Normal(theta, 3.0), obs=batch.y)

    return model


populations = {
    "normal": dist.Normal,
    "Student-t": lambda mu, tau: dist.StudentT(3.0, mu, tau),
}
runs = {
    name: pyrofl.fit(
        pvi.hierarchical(hospital(population), data, shared="mu tau"),
        data,
        rounds=rounds,
        progress=False,
    )
    for name, population in populations.items()
}
found = {name: run.to_arviz(draws=draws)["posterior"] for name, run in runs.items()}
for name, posterior in found.items():
    print(
        f"{name:10s} tau {float(posterior['tau'].mean()):5.2f}, mu {float(posterior['mu'].mean()):5.2f}"
    )

# %% [markdown]
# ### Compare the posteriors in a figure

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
raw = np.array([y.mean() for _, y in clinics.values()])
axes.plot(raw, range(10), "kx", label="mean of the five patients")
for k, (name, posterior) in enumerate(found.items()):
    low, middle, high = posterior["theta"].quantile([0.05, 0.5, 0.95], ("chain", "draw")).values
    at = np.arange(10) + 0.15 * (k - 0.5)
    axes.errorbar(middle, at, xerr=[middle - low, high - middle], fmt="o", markersize=4, label=name)
axes.set_yticks(range(10), data.names)
axes.invert_yaxis()
axes.set_xlabel("effect in the clinic (mmHg), 90% intervals")
axes.legend()
plt.show()

# %% [markdown]
# With the Student-t population, the nine ordinary clinics have shorter intervals and closer means: their shrinkage is
# stronger, because the outlier no longer inflates the standard deviation of the population.


# %%
def width(posterior):
    low, high = posterior["theta"].quantile([0.05, 0.95], ("chain", "draw")).values
    return (high - low)[:9].mean()


for name, posterior in found.items():
    print(f"{name:10s} mean interval width of clinics 0 to 8: {width(posterior):.2f} mmHg")

# %% [markdown]
# ### Compare the models by LOO
#
# LOO estimates from the posterior draws how well a model predicts a patient that was left out. A higher `elpd` is better;
# `dse` is the standard error of the difference.

# %%
table = checks.compare_loo(runs, draws=draws)
table[
    [
        c
        for c in ("rank", "elpd_loo", "elpd_diff", "elpd", "se", "dse", "weight", "largest_k")
        if c in table
    ]
].round(2)

# %% [markdown]
# Consider both the table and the figure. The library warns if a Pareto k is above 0.7; the estimate is then unreliable
# and only indicative. LOO estimates the prediction for a new *patient* of the same clinics. For a new *clinic*, use
# `checks.loco`.
#
# ## A guide without correlations
#
# Now change the guide. The model is a line with intercept and slope, and all $x$ are far from zero. The posterior of
# intercept and slope is a narrow, diagonal ellipse. A *mean-field* guide has no correlations. Compare the two:


# %%
def straight(low, high):
    x = np.linspace(low, high, 8)
    return x[:, None], 1.0 + 0.5 * x + 0.5 * rng.normal(size=8)


lines = Federation.from_arrays({"A": straight(2, 4), "B": straight(3, 5)}).to("cpu", torch.float64)


def line(received, local, batch):
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with batch.rows():
            mean = b[..., 0] + b[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, 0.5), obs=batch.y)


shown = {}
for name, how in {"full": "full", "mean field": "diagonal"}.items():
    method = pvi.hierarchical(line, lines, shared="b", covariance=how)
    fit = pyrofl.fit(method, lines, rounds=2 * rounds, progress=False)
    shown[name] = fit.posterior(draws)["b"].reshape(-1, 2).numpy()

figure, panels = plt.subplots(
    1, 2, figsize=(7, 3.2), sharex=True, sharey=True, layout="constrained"
)
for axes, (name, b) in zip(panels, shown.items(), strict=True):
    axes.plot(*b[:1000].T, ".", markersize=2)
    axes.set_title(f"{name}: sd of b0 {b[:, 0].std():.2f}", fontsize=10)
    axes.set_xlabel("b0")
panels[0].set_ylabel("b1")
plt.show()

# %% [markdown]
# A mean-field guide is an ellipse with axes parallel to the axes of the plot, so it fits *inside* the diagonal ellipse.
# Its mean is correct, but its standard deviation is much too small.
#
# ### Derivation: the width of a mean-field guide
#
# Let the posterior be $N(m, P^{-1})$ and the guide $N(\mu, \mathrm{diag}(s_k^2))$. Up to constants,
#
# $$\mathrm{KL}(q \| p) = \tfrac12 \Big(\sum_k P_{kk} s_k^2 + (\mu - m)^\top P (\mu - m)\Big) - \sum_k \log s_k.$$
#
# The derivatives are zero at $\mu = m$ and $s_k^2 = 1/P_{kk}$: the guide has the variance of parameter $k$ *given all others*,
# not its marginal variance $(P^{-1})_{kk}$. With two parameters of correlation $\rho$,
#
# $$\frac{s_k}{\text{exact sd}} = \sqrt{1 - \rho^2}.$$
#
# **The intervals of a mean-field method are too narrow for correlated parameters.** Check the ratio in this model:

# %%
x = lines.x[:, 0].numpy()
design = np.column_stack([np.ones(len(x)), x])
exact = np.linalg.inv(np.eye(2) / 9 + design.T @ design / 0.25)
correlation = exact[0, 1] / (exact[0, 0] * exact[1, 1]) ** 0.5
ratios = {name: b[:, 0].std() / exact[0, 0] ** 0.5 for name, b in shown.items()}
for name, ratio in ratios.items():
    print(f"{name:10s} sd of b0 / exact sd: {ratio:.2f}")
print(f"predicted for mean field: {(1 - correlation**2) ** 0.5:.2f}")

# %% tags=["remove-cell"]
if full:
    assert abs(ratios["full"] - 1) < 0.08
    assert abs(ratios["mean field"] / (1 - correlation**2) ** 0.5 - 1) < 0.1
    assert width(found["Student-t"]) < 0.95 * width(found["normal"])
    assert abs(float(found["Student-t"]["mu"].mean()) - 8.2) < 0.3

# %% [markdown]
# ## A neural network
#
# The exact posterior of a neural network is unknown, so we compare predictions. Each variant changes one argument:

# %%
digits = pyrofl.federations.split(
    pyrofl.datasets.load("digits"), "slices:5", clients=20, test="labels_global"
)
net = pyrofl.nets.build("mlp:50", input_shape=(64,), outputs=10)
choices = {
    "normal prior": {},
    "Laplace prior": {"prior": dist.Laplace},
    "Student-t prior": {"prior": priors.student_t(df=3.0)},
    "point guide": {"guide": guides.delta},
}
for name, change in choices.items():
    method = pfedvem.build(net, lr_base=0.01, **change)
    scores = pyrofl.fit(method, digits, rounds=rounds // 2, progress=False).evaluate(
        model="personal"
    )
    print(f"{name:16s} accuracy {scores.mean('accuracy'):.3f}, nll {scores.mean('nll'):.3f}")

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 and 3 are intermediate, 4 is advanced. Use NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `mean_field_sd(covariance)`: the standard deviations of the mean-field guide that is closest to a normal posterior
# with this covariance matrix.

# %% tags=["hide-cell", "solution"]
# Invert first, take the diagonal then.


def mean_field_sd(covariance):
    return np.linalg.inv(covariance).diagonal() ** -0.5


# %% tags=["hide-cell", "test"]
narrow = np.array([[4.0, 1.8], [1.8, 1.0]])
assert np.allclose(mean_field_sd(np.diag([4.0, 9.0])), [2.0, 3.0]), (
    "without correlation the guide is exact"
)
assert np.allclose(mean_field_sd(narrow), [2 * 0.19**0.5, 0.19**0.5]), (
    "sd given all others: invert, then take the diagonal"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 2 points)
#
# Write `ratio(correlation)`: the standard deviation of a mean-field guide divided by the exact one, for two parameters.

# %% tags=["hide-cell", "solution"]
# At correlation 0.9 the interval is less than half as wide as it should be.


def ratio(correlation):
    return (1 - correlation**2) ** 0.5


# %% tags=["hide-cell", "test"]
assert np.isclose(ratio(0.0), 1.0), "without correlation the guide is exact"
assert np.isclose(ratio(0.6), 0.8), "expected the root of 1 - correlation^2"
assert np.isclose(ratio(-0.6), 0.8), "the sign of the correlation does not matter"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write `weight(theta, mu, tau, df)`: the expected weight $E[\lambda]$ of a clinic with effect `theta` in a Student-t population.

# %% tags=["hide-cell", "solution"]
# The distance counts in units of tau, squared. Clinic 9, at 30, gets a weight near 4 / (3 + 100) = 0.04.


def weight(theta, mu, tau, df):
    return (df + 1) / (df + ((theta - mu) / tau) ** 2)


# %% tags=["hide-cell", "test"]
assert np.isclose(weight(8.0, 8.0, 2.0, 3.0), 4 / 3), "at mu the weight is (df + 1) / df"
assert np.isclose(weight(10.0, 8.0, 2.0, 3.0), 1.0), "at a distance of tau the weight is 1"
assert np.isclose(weight(30.0, 10.0, 2.0, 3.0), 4 / 103), (
    "the distance counts in units of tau, squared"
)

# %% [markdown]
# ### Exercise 4 (advanced, 3 points)
#
# Write `correlation(x)`: the posterior correlation of intercept and slope of a line with normal noise and a flat prior, given
# the inputs `x`. Invert $X^\top X$ by hand.

# %% tags=["hide-cell", "solution"]
# The inverse of [[n, sum x], [sum x, sum x^2]] is proportional to [[sum x^2, -sum x], [-sum x, n]]. The correlation is
# -mean(x) / sqrt(mean(x^2)): zero for centred x. Hence centring makes a mean-field guide exact here.


def correlation(x):
    return -x.mean() / (x**2).mean() ** 0.5


# %% tags=["hide-cell", "test"]
inputs = np.array([2.0, 3.0, 7.0])
inverse = np.linalg.inv(np.array([[3.0, inputs.sum()], [inputs.sum(), (inputs**2).sum()]]))
assert np.isclose(correlation(inputs), inverse[0, 1] / (inverse[0, 0] * inverse[1, 1]) ** 0.5), (
    "compare with the inverse of X'X"
)
assert np.isclose(correlation(inputs - 4), 0.0), "centred inputs: no correlation"
assert correlation(inputs) < 0 < correlation(-inputs), "mind the sign"

# %% [markdown]
# ## Explore
#
# 1. Replace the outlier of 30 by 9. Which population does LOO prefer now?
# 2. Centre the lines: subtract the mean of `x`. How does the result of the mean-field guide change, and why?
# 3. Use a normalizing flow as the guide: `guide=guides.flow(2)` in `pvi.hierarchical`, with the normal population. Does
#    the posterior of $\tau$ change?

# %% tags=["hide-cell", "solution"]
# 1. Compare the difference with its standard error `dse`: without an outlier, heavy tails improve the predictions little. The
# warnings report a Pareto k above 0.7 for most rows, so LOO cannot rank the two models; `checks.loco` leaves out whole clinics.
mild = dict(clinics) | {"clinic 9": (np.zeros((5, 1)), clinics["clinic 9"][1] - 21.0)}
mild = Federation.from_arrays(mild).to("cpu", torch.float64)
again = {
    name: pyrofl.fit(
        pvi.hierarchical(hospital(p), mild, shared="mu tau"), mild, rounds=rounds, progress=False
    )
    for name, p in populations.items()
}
other = checks.compare_loo(again, draws=draws)
print(other[[c for c in ("rank", "elpd_diff", "dse") if c in other]].round(2))

# %% tags=["hide-cell", "solution"]
# 2. With centred x, intercept and slope are independent in the posterior, and the mean-field guide is exact.
from dataclasses import replace

centred = replace(lines, x=lines.x - lines.x.mean())
method = pvi.hierarchical(line, centred, shared="b", covariance="diagonal")
b = pyrofl.fit(method, centred, rounds=rounds, progress=False).posterior(draws)["b"].reshape(-1, 2)
design = np.column_stack([np.ones(len(x)), x - x.mean()])
exact = np.linalg.inv(np.eye(2) / 9 + design.T @ design / 0.25)
centred_ratio = float(b[:, 0].std()) / exact[0, 0] ** 0.5
print(f"sd of b0 / exact sd: {centred_ratio:.2f}")

# %% tags=["hide-cell", "solution"]
# 3. Hardly: the data of ten clinics determine tau well enough for a normal approximation of its logarithm. With less
# information, as in lesson 2, the flow changes the posterior more.
bent = pvi.hierarchical(hospital(dist.Normal), data, shared="mu tau", guide=guides.flow(2))
tau = pyrofl.fit(bent, data, rounds=2 * rounds, progress=False).posterior(draws)["tau"]
print(f"tau: mean {float(tau.mean()):.2f}, 95% quantile {float(tau.quantile(0.95)):.2f};", end=" ")
print(
    f"normal guide: {float(found['normal']['tau'].mean()):.2f}, {float(found['normal']['tau'].quantile(0.95)):.2f}"
)

# %% tags=["remove-cell"]
if full:
    assert abs(centred_ratio - 1) < 0.08
