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
# # 4. Priors and guides: change one line, and see what changes
#
# A Bayesian method has two parts that you may choose: the **prior** (what you believe before you see data) and the
# **guide** (the family in which the posterior is searched). In papers both are often fixed. Here each is one word.
#
# After these fifteen minutes you can
#
# - replace a prior, and judge the result by leave-one-out (LOO) and by eye,
# - replace a guide, and see what it cannot express,
# - know which of the two matters for your data.

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
rounds, draws = 25, 2000
# quick: rounds, draws = 3, 200

# %% [markdown]
# ## Ten clinics, one of them strange
#
# Each clinic measured how much a drug lowers the blood pressure of five patients. Nine clinics find about 8 units.
# The tenth used another device.

# %%
rng = np.random.default_rng(3)
truth = np.array([8.5, 7.0, 9.0, 8.0, 7.5, 8.2, 9.3, 7.8, 8.6, 30.0])
clinics = {
    f"clinic {j}": (np.zeros((5, 1)), truth[j] + 3.0 * rng.normal(size=5)) for j in range(10)
}
data = Federation.of(clinics).to("cpu", torch.float64)

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for j, (_, y) in enumerate(clinics.values()):
    axes.plot(y, np.full(5, j), "o", color="C0", alpha=0.6)
axes.set_yticks(range(10), clinics)
axes.invert_yaxis()
axes.set_xlabel("drop in blood pressure (mmHg), one dot per patient")
plt.show()

# %% [markdown]
# ## Two priors for "what clinics are like"
#
# A **normal** population leaves hardly any room for a clinic that is far away: to explain it, $\tau$ has to grow, and then all
# clinics learn less from each other. A **Student-t** population has long tails: now and then a clinic is strange. (Its $\tau$ is a scale. Its standard deviation is
# $\sqrt{3}\,\tau$ with three degrees of freedom, so do not compare the two $\tau$ directly.)


# %%
def hospital(population):
    """Return the model with this population of clinics."""

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
# ### By eye

# %%
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
raw = np.array([y.mean() for _, y in clinics.values()])
axes.plot(raw, range(10), "kx", label="mean of its five patients")
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
# With the Student-t population the nine ordinary clinics have shorter intervals, and lie nearer to each other: they learn more from
# each other, as the strange one no longer stretches the population.


# %%
def width(posterior):
    low, high = posterior["theta"].quantile([0.05, 0.95], ("chain", "draw")).values
    return (high - low)[:9].mean()


for name, posterior in found.items():
    print(f"{name:10s} mean width of the intervals of the nine: {width(posterior):.2f} mmHg")

# %% [markdown]
# ### By LOO
#
# "Which model better predicts a patient who was left out?" LOO estimates this from the draws, and ArviZ compares. A higher `elpd` is
# better; `dse` is the standard error of the difference.

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
# Look at both the numbers and the picture. The library warns where Pareto k is above 0.7: there the estimate is not to be trusted, so
# take the difference as a hint. LOO asks about one more *patient* of the same clinics; for one more
# *clinic* there is `checks.loco`.
#
# ## A guide that cannot say "these two belong together"
#
# Now the other choice. Take a line with an intercept and a slope, where all $x$ are far from zero. Its posterior is a narrow ellipse that
# lies diagonally. A *mean-field* guide has no correlations. Let us see what it does here.


# %%
def straight(low, high):
    x = np.linspace(low, high, 8)
    return x[:, None], 1.0 + 0.5 * x + 0.5 * rng.normal(size=8)


lines = Federation.of({"A": straight(2, 4), "B": straight(3, 5)}).to("cpu", torch.float64)


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
# A mean-field guide is an ellipse whose axes are parallel to those of the picture, so it has to fit *inside* the diagonal one: its
# mean is right, and its spread is much too small. Look at this picture before you trust the interval of a mean-field method.
#
# The exact standard deviation is known here:

# %%
x = lines.x[:, 0].numpy()
design = np.column_stack([np.ones(len(x)), x])
exact = np.linalg.inv(np.eye(2) / 9 + design.T @ design / 0.25)
for name, b in shown.items():
    print(f"{name:10s} sd of b0 is {b[:, 0].std() / exact[0, 0] ** 0.5:.2f} of the exact one")

# %% [markdown]
# ## In a neural network
#
# For networks nobody knows the exact posterior. There we judge by predictions. One line each:

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
# 1. Make the strange clinic less strange (9 instead of 30). Which population does LOO prefer now?
# 2. Centre the lines: subtract the mean of `x`. What happens to the mean-field guide, and why?
# 3. Bend the guide: `guide=guides.flow(2)` in `pvi.hierarchical` with the normal population. Does $\tau$ change?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. Compare the difference with its standard error `dse`: without a strange clinic long tails buy little. The warnings say that Pareto k
# is above 0.7 for most rows, so LOO cannot rank the two here; `checks.loco` leaves out whole clinics instead.
mild = dict(clinics) | {"clinic 9": (np.zeros((5, 1)), clinics["clinic 9"][1] - 21.0)}
mild = Federation.of(mild).to("cpu", torch.float64)
again = {
    name: pyrofl.fit(
        pvi.hierarchical(hospital(p), mild, shared="mu tau"), mild, rounds=rounds, progress=False
    )
    for name, p in populations.items()
}
other = checks.compare_loo(again, draws=draws)
print(other[[c for c in ("rank", "elpd_diff", "dse") if c in other]].round(2))

# %% tags=["hide-cell"]
# 2. With centred x intercept and slope are independent, and the mean-field guide is exact.
from dataclasses import replace

centred = replace(lines, x=lines.x - lines.x.mean())
method = pvi.hierarchical(line, centred, shared="b", covariance="diagonal")
b = pyrofl.fit(method, centred, rounds=rounds, progress=False).posterior(draws)["b"].reshape(-1, 2)
design = np.column_stack([np.ones(len(x)), x - x.mean()])
exact = np.linalg.inv(np.eye(2) / 9 + design.T @ design / 0.25)
print(f"sd of b0 is {float(b[:, 0].std()) / exact[0, 0] ** 0.5:.2f} of the exact one")

# %% tags=["hide-cell"]
# 3. Hardly: ten clinics say enough of tau, so that a normal on its logarithm fits. Where they say less,
# as in tutorial 1, it bends more.
bent = pvi.hierarchical(hospital(dist.Normal), data, shared="mu tau", guide=guides.flow(2))
tau = pyrofl.fit(bent, data, rounds=2 * rounds, progress=False).posterior(draws)["tau"]
print(f"tau: mean {float(tau.mean()):.2f}, 95% quantile {float(tau.quantile(0.95)):.2f};", end=" ")
print(
    f"normal guide: {float(found['normal']['tau'].mean()):.2f}, {float(found['normal']['tau'].quantile(0.95)):.2f}"
)
