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
# Replace the prior and the guide of a model, and compare the results. The **prior** is the distribution of the parameters
# before any data are seen; in a hierarchical model the population, from which the clients' parameters are drawn, is a part of
# it. The **guide** is the family of distributions that approximates the posterior (lesson 3).
#
# After this lesson (about 75 minutes) you can
#
# - replace a prior, and compare the models by leave-one-out cross-validation (LOO) and in a figure,
# - replace a guide, recognize what it cannot represent, and derive by how much it is too narrow,
# - decide which of the two matters for your data.
#
# You need lessons 1 to 4. The cells compute for about a minute.

# %%
# %matplotlib inline
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, guides, priors
from pyrofl.models import pfedvem, pvi

# %% tags=["parameters"]
rounds, draws = 25, 2000
# quick: rounds, draws = 3, 200

# %% [markdown]
# ## Ten clinics, one of them an outlier
#
# Each clinic measured how much a drug lowers the blood pressure of five patients. The drop of a patient varies around the
# effect $\theta_j$ in the clinic, with the known standard deviation 3 mmHg. In clinics 0 to 8 the effect is about 8 mmHg. Clinic
# 9 used another device.

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
# The effects are drawn from a population with unknown mean $\mu$ and scale $\tau$. With a **normal** population an outlier is
# very unlikely. To explain it, $\tau$ has to be large, which weakens the shrinkage of all clinics. A **Student-t** population has
# heavy tails and allows a few outliers. (With three degrees of freedom its standard deviation is $\sqrt{3}\,\tau$, so the two
# values of $\tau$ are not directly comparable.)
#
# Why does it allow outliers? A Student-t distribution with $\nu$ degrees of freedom is a normal distribution whose precision is
# multiplied by an unknown **weight** of each clinic: $\theta_j \sim N(\mu, \tau^2/\lambda_j)$,
# $\lambda_j \sim \text{Gamma}(\nu/2, \nu/2)$. The two numbers are shape and rate; the mean is shape divided by rate, here 1.
# Bayes' rule multiplies the two densities. As functions of $\lambda_j$ they are proportional to
#
# $$\lambda_j^{1/2} \exp\Big({-\lambda_j} \frac{(\theta_j - \mu)^2}{2\tau^2}\Big) \quad\text{and}\quad
# \lambda_j^{\nu/2 - 1} \exp\Big({-\lambda_j} \frac{\nu}{2}\Big).$$
#
# The exponents add, so the product is a Gamma density with shape $(\nu + 1)/2$ and rate $(\nu + (\theta_j - \mu)^2/\tau^2)/2$.
# Its mean is
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
found = {name: run.to_arviz(draws=draws, progress=False)["posterior"] for name, run in runs.items()}
for name, posterior in found.items():
    print(
        f"{name:10s} tau {float(posterior['tau'].mean()):5.2f}, mu {float(posterior['mu'].mean()):5.2f}"
    )

# %% [markdown]
# To reach clinic 9, the normal population needs a $\tau$ of about 8, and its mean $\mu$ moves towards this clinic, to about 10.
# With the Student-t population $\tau$ is about 2 and $\mu$ about 8.
#
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
# With the Student-t population, the other nine clinics have shorter intervals, and their means are closer together: their
# shrinkage is stronger, because the outlier no longer inflates $\tau$.


# %%
def width(posterior):
    low, high = posterior["theta"].quantile([0.05, 0.95], ("chain", "draw")).values
    return (high - low)[:9].mean()


for name, posterior in found.items():
    print(f"{name:10s} mean interval width of clinics 0 to 8: {width(posterior):.2f} mmHg")

# %% [markdown]
# ### Compare the models by LOO
#
# LOO estimates how well a model predicts a patient that was left out: the **elpd** (expected log predictive density) is
# $\sum_i \log p(y_i \mid \text{all rows except } i)$, and a higher value is better. No model is fitted again: as in lesson 2,
# importance sampling reweights the draws, here by $1/p(y_i \mid \theta)$, which removes row $i$. **Pareto k** measures how unequal
# these weights are. Above 0.7 a few draws dominate, and the estimate for this row is unreliable; the library warns. (One such row
# of fifty, with a k close to 0.7, hardly changes the sum.) `elpd_diff` is
# the difference from the best model, `dse` its standard error, `largest_k` the largest Pareto k of all rows.

# %%
table = checks.compare_loo(runs, draws=draws, progress=False)
table.filter(["elpd_loo", "elpd", "elpd_diff", "dse", "largest_k"]).round(2)

# %% [markdown]
# The Student-t population predicts better, by about two standard errors. LOO estimates the prediction for a new *patient* of
# the same clinics, for which the population matters less: the four other patients of the clinic determine $\theta_j$. For a new
# *clinic*, use `checks.loco`.
#
# ## A guide without correlations
#
# Now change the guide. The model is a line with intercept and slope, and all $x$ are far from zero. The posterior of
# intercept and slope is a narrow, diagonal ellipse. A **mean-field** guide is a product of independent normal densities
# (`covariance="diagonal"`), so it has no correlations. `posterior` returns draws of the guide itself, without the correction of
# `to_arviz` (lesson 2), with a copy of the shared `b` for each client:


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
    shown[name] = fit.posterior(draws)["b"][:, 0].numpy()  # of the first client, [draws, 2]

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
# The axes of a mean-field guide are parallel to those of the plot, so it fits *inside* the diagonal ellipse. Its mean is
# correct, but its standard deviation is much too small.
#
# ### Derivation: the width of a mean-field guide
#
# Let the posterior be $N(m, P^{-1})$, and the guide a product of normal densities with means $\mu_k$ and standard deviations
# $s_k$. The guide minimizes $\mathrm{KL}(q \| p) = E_q[\log q(b)] - E_q[\log p(b)]$ (lesson 3). Up to constants, the first term
# is $-\sum_k \log s_k$, and $-\log p(b) = \tfrac12 (b - m)^\top P (b - m)$. As $E_q[(b_k - m_k)(b_l - m_l)]$ is
# $(\mu_k - m_k)(\mu_l - m_l)$, plus $s_k^2$ if $k = l$,
#
# $$\mathrm{KL}(q \| p) = \tfrac12 \Big(\sum_k P_{kk} s_k^2 + (\mu - m)^\top P (\mu - m)\Big) - \sum_k \log s_k + \text{constant}.$$
#
# The second term is smallest at $\mu = m$. The derivative with respect to $s_k$, $P_{kk} s_k - 1/s_k$, is zero at
# $s_k^2 = 1/P_{kk}$. This is the variance of parameter $k$ *given all others*, not its variance $(P^{-1})_{kk}$. For two
# parameters with variances $v_1, v_2$ and correlation $\rho$, the inverse of the covariance matrix has
# $P_{11} = v_2/(v_1 v_2 - \rho^2 v_1 v_2) = 1/(v_1 (1 - \rho^2))$. Hence
#
# $$\frac{s_k}{\text{exact sd}} = \sqrt{1 - \rho^2}.$$
#
# **The intervals of a mean-field method are too narrow for correlated parameters.** Check the ratio in this model. By lesson 4,
# the exact precision is that of the prior, $1/3^2$, plus $X^\top X/0.5^2$, where $X$ has the columns 1 and $x$:

# %%
x = lines.x[:, 0].numpy()
design = np.column_stack([np.ones(len(x)), x])
exact = np.linalg.inv(np.eye(2) / 9 + design.T @ design / 0.25)
rho = exact[0, 1] / (exact[0, 0] * exact[1, 1]) ** 0.5
compared = {name: b[:, 0].std() / exact[0, 0] ** 0.5 for name, b in shown.items()}
for name, value in compared.items():
    print(f"{name:10s} sd of b0 / exact sd: {value:.2f}")
print(f"predicted for mean field: {(1 - rho**2) ** 0.5:.2f}")

# %% tags=["remove-cell"]
assert abs(truth[:9].mean() - 8) < 0.5
if rounds == 25:
    for name, about, least in (("normal", (8, 10), 4.4), ("Student-t", (2, 8), 3.8)):
        middle = [float(found[name][site].mean()) for site in ("tau", "mu")]
        assert np.allclose(middle, about, atol=0.5)
        assert abs(width(found[name]) - least) < 0.15
    ordinary = {
        name: float(f["theta"].mean(("chain", "draw"))[:9].std()) for name, f in found.items()
    }
    assert ordinary["Student-t"] < 0.95 * ordinary["normal"]
    assert table.index[0] == "Student-t"
    assert 1.4 < abs(table["elpd_diff"]["normal"]) / table["dse"]["normal"] < 3
    assert abs(compared["full"] - 1) < 0.08
    assert abs(compared["mean field"] / (1 - rho**2) ** 0.5 - 1) < 0.1
    assert compared["mean field"] < 0.3

# %% [markdown]
# The mean-field guide is less than a third as wide as the posterior.
#
# ## A neural network
#
# In a method for networks, prior and guide are arguments. Here is pFedVEM, which lesson 7 explains: each client has a posterior
# of the weights of the network's last layer. The exact posterior is unknown, so we compare predictions by their accuracy and
# their **negative log likelihood** (`nll`): the mean of $-\log p$ of the true class. Lower is better; it also penalizes predictions
# that are wrong and certain. A point guide has no variance. Each variant changes one argument:

# %%
digits = pyrofl.federations.split(
    pyrofl.datasets.load("digits"), "slices:5", clients=20, test="same_classes"
)
net = pyrofl.nets.build("mlp:50", input_shape=(64,), outputs=10)
choices = {
    "normal prior": {},
    "Laplace prior": {"prior": dist.Laplace},
    "Student-t prior": {"prior": priors.student_t(df=3.0)},
    "point guide": {"guide": guides.delta},
}
scores = {}
for name, change in choices.items():
    method = pfedvem.build(net, lr_base=0.01, **change)
    run = pyrofl.fit(method, digits, rounds=rounds // 2, progress=False)
    score = run.evaluate(model="personal")
    scores[name] = [score.mean("accuracy"), score.mean("nll")]
    print(f"{name:16s} accuracy {scores[name][0]:.3f}, nll {scores[name][1]:.3f}")

# %% tags=["remove-cell"]
if rounds == 25:
    assert (np.ptp([*scores.values()], axis=0) < 0.01).all()

# %% [markdown]
# All differences are below 0.01: here neither prior nor guide matters.
#
# ## Which of the two matters?
#
# - **The prior** matters if clients have few rows, or if some clients are outliers. Replace the population, and compare the
#   models by LOO and in a figure.
# - **The guide** matters if parameters are strongly correlated or their posterior is skewed. Replace it by a richer one, and
#   compare the standard deviations. `to_arviz` warns if the guide is far from the posterior: it also reports a Pareto k, of its
#   own importance weights.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 and 3 are intermediate, 4 is advanced. Exercise 2 uses pyrofl, the others NumPy only.

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
assert np.shape(mean_field_sd(narrow)) == (2,), "return one standard deviation for each parameter"
assert np.allclose(mean_field_sd(np.diag([4.0, 9.0])), [2.0, 3.0]), (
    "without correlation the guide is exact: for variances 4 and 9, expected 2 and 3"
)
assert np.allclose(mean_field_sd(narrow), [2 * 0.19**0.5, 0.19**0.5]), (
    "the variance of the guide is that of a parameter given all others: see the derivation"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 2 points)
#
# Write `under_priors(data, choices)` with pyrofl: the posterior mean of a number $m$ that all clients share, for each prior of $m$ in
# the list `choices` (Pyro distributions), as a list of floats. The rows `batch.y` are $N(m, 1)$. Use `pyrofl.hierarchical` and 4000
# draws of `run.to_arviz`.

# %% tags=["hide-cell", "solution"]
# Only the prior changes from fit to fit.


def under_priors(data, choices):
    means = []
    for prior in choices:

        def program(received, local, batch, prior=prior):
            with batch.clients():
                m = pyro.sample("m", prior)
                with batch.rows():
                    pyro.sample("y", dist.Normal(m, 1.0), obs=batch.y)

        run = pyrofl.fit(pyrofl.hierarchical(program, data, shared="m"), data, progress=False)
        means.append(float(run.to_arviz(draws=4000, progress=False)["posterior"]["m"].mean()))
    return means


# %% tags=["hide-cell", "test"]
few = {"A": (np.zeros((2, 1)), np.array([5.0, 7.0])), "B": (np.zeros((2, 1)), np.array([6.0, 8.0]))}
few = Federation.from_arrays(few).to("cpu", torch.float64)
means = under_priors(few, [dist.Normal(0.0, 0.5), dist.Normal(0.0, 10.0)])
assert np.shape(means) == (2,), "return one number for each prior"
assert all(isinstance(value, float) for value in means), "return floats"
for value, sd, mean, width in zip(means, (0.5, 10.0), (3.25, 6.484), (0.354, 0.499), strict=True):
    assert abs(value - mean) < 5 * width / 4000**0.5, (  # five standard errors of 4000 draws
        f"prior N(0, {sd}^2): use it as the prior of m, share m, and observe all rows"
    )

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
# the inputs `x`, an array. The covariance is proportional to $(X^\top X)^{-1}$; invert this matrix by hand.

# %% tags=["hide-cell", "solution"]
# The inverse of [[n, sum x], [sum x, sum x^2]] is proportional to [[sum x^2, -sum x], [-sum x, n]]. The correlation is
# -mean(x) / sqrt(mean(x^2)): zero for centered x. Hence centering makes a mean-field guide exact here.


def correlation(x):
    return -x.mean() / (x**2).mean() ** 0.5


# %% tags=["hide-cell", "test"]
inputs = np.array([2.0, 3.0, 7.0])
assert np.isclose(correlation(inputs - 4), 0.0), "centered inputs: no correlation"
assert correlation(inputs) < 0 < correlation(-inputs), (
    "mind the sign: for positive inputs, a larger slope needs a smaller intercept"
)
assert np.isclose(correlation(inputs), -0.879883), (
    "divide the covariance by the root of the product of both variances, in the inverse of X'X"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Make clinic 9 ordinary, with `ordinary = (np.zeros((5, 1)), clinics["clinic 9"][1] - 21)` and
#    `mild = Federation.from_arrays(clinics | {"clinic 9": ordinary}).to("cpu", torch.float64)`. Which population does LOO
#    prefer now? Read the warnings, too.
# 2. Center the inputs of the lines: `centered = replace(lines, x=lines.x - lines.x.mean())`. How does the result of the
#    mean-field guide change, and why?
# 3. A *normalizing flow* is a guide that transforms a normal variable by learned functions, so that it can be skewed. Use one
#    for the clinics: `guide=guides.flow(2)` in `pvi.hierarchical`, with the normal population and `2 * rounds` rounds. Does the
#    posterior of $\tau$ change?

# %% tags=["hide-cell", "solution"]
# 1. Student-t is still the best, but by less than two standard errors: without an outlier, heavy tails hardly improve the
# predictions. The warnings report a Pareto k above 0.7 for the rows, so LOO cannot rank the two models; `checks.loco` leaves
# out whole clinics.
ordinary = (np.zeros((5, 1)), clinics["clinic 9"][1] - 21)
mild = Federation.from_arrays(clinics | {"clinic 9": ordinary}).to("cpu", torch.float64)
again = {
    name: pyrofl.fit(
        pvi.hierarchical(hospital(p), mild, shared="mu tau"), mild, rounds=rounds, progress=False
    )
    for name, p in populations.items()
}
other = checks.compare_loo(again, draws=draws, progress=False)
print(other.filter(["elpd_diff", "dse"]).round(2))

# %% tags=["hide-cell", "solution"]
# 2. With centered x, intercept and slope are independent in the posterior, and the mean-field guide is exact.
centered = replace(lines, x=lines.x - lines.x.mean())
method = pvi.hierarchical(line, centered, shared="b", covariance="diagonal")
b = pyrofl.fit(method, centered, rounds=rounds, progress=False).posterior(draws)["b"][:, 0]
design = np.column_stack([np.ones(len(x)), x - x.mean()])
exact = np.linalg.inv(np.eye(2) / 9 + design.T @ design / 0.25)
centered_ratio = float(b[:, 0].std()) / exact[0, 0] ** 0.5
print(f"sd of b0 / exact sd: {centered_ratio:.2f}")

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
if rounds == 25:
    assert table.index[0] == "Student-t"
    assert abs(other["elpd_diff"]["normal"]) < 2 * other["dse"]["normal"]
    assert other["largest_k"].max() > 0.7
    assert abs(centered_ratio - 1) < 0.08
    assert abs(float(tau.mean() / found["normal"]["tau"].mean()) - 1) < 0.1
