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
# # 6. Check the calibration
#
# Check whether probabilities are correct: the 90% intervals of a posterior should contain the truth in 90% of cases, and
# the predictions that a classifier makes with probability 0.95 should be correct in 95% of cases.
#
# After this lesson (about 65 minutes) you can
#
# - derive why ranks are uniform, check an inference method by simulation-based calibration (SBC), and interpret its histograms,
# - check a model against observed data (PIT, predictive checks),
# - draw reliability curves for all clients, and compare the smallest ones,
# - measure the uncertainty of a model on classes that it was not trained on.
#
# You need lessons 1 to 5.

# %%
# %matplotlib inline
from dataclasses import replace
from statistics import NormalDist

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, datasets, federations, figures, nets
from pyrofl.models import fedavg, pfedvem, pvi

# %% tags=["parameters"]
replications, rounds, full = 200, 20, True
# quick: replications, rounds, full = 20, 2, False

# %% [markdown]
# ## 1. Check the inference: simulation-based calibration
#
# Draw a parameter from the prior, $\theta \sim p(\theta)$, simulate data from it, $y \sim p(y \mid \theta)$, and compute $S$
# posterior draws $\theta_1, \dots, \theta_S$. The joint density of truth and data is
#
# $$p(\theta)\, p(y \mid \theta) = p(y)\, p(\theta \mid y).$$
#
# Read from right to left: given $y$, the true $\theta$ is itself a draw of the posterior. If inference is exact, the $S + 1$ numbers
# $\theta, \theta_1, \dots, \theta_S$ are independent draws of the same distribution, so each of the $S + 1$ positions of
# $\theta$ among them is equally probable. **The rank of the truth among the posterior draws is uniform**, and an interval
# between quantiles of the draws contains the truth with its nominal probability. This requires no real data and no exact posterior. `checks.sbc` fits hundreds of simulated federations in one vectorized batch.

# %%
sizes = (10, 6, 3, 1)
rows = torch.arange(20).split(sizes)
x = torch.randn(20, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
data = Federation(x, 0 * x[:, 0], rows, [r[:0] for r in rows], names=tuple("ABCD"))


def model(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu + 1.5 * eta, 1.0), obs=batch.y)


found = {}
for covariance in ("full", "diagonal"):
    method = pvi.hierarchical(
        model, data, shared="mu", covariance=covariance, damping=0.5, num_particles=8, steps=6
    )
    draws = 199 if replications >= 100 else 19
    found[covariance] = checks.sbc(method, data, rounds=10, replications=replications, draws=draws)
    print(f"{covariance:9s} smallest p value {found[covariance].p_value:.2g}")

figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
for axes, (name, ranks) in zip(panels, found.items(), strict=True):
    axes.hist(ranks.places["mu"].values.ravel(), ranks.bins, edgecolor="white")
    axes.axhline(replications / ranks.bins, color="black", linestyle=":")
    axes.set_title(f"{name} covariance", fontsize=10)
    axes.set_xlabel("rank of the true mu among the draws")
panels[0].set_ylabel("replications")
plt.show()

# %% [markdown]
# A flat histogram indicates correct inference. A **U** shape means that the truth lies too often near or beyond the extreme
# draws: the posterior is too narrow. A peak in the middle means that it is too wide, and a slope that it is biased.

# %%
covered = {name: ranks.coverage((0.5, 0.9))["mu"] for name, ranks in found.items()}
for name, fraction in covered.items():
    print(
        f"{name:9s} covered by 50% intervals: {float(fraction[0]):.2f}, by 90% intervals: {float(fraction[1]):.2f}"
    )

# %% tags=["remove-cell"]
if full:
    assert abs(float(covered["full"][1]) - 0.9) < 4 * (0.9 * 0.1 / replications) ** 0.5
    assert float(covered["diagonal"][1]) < 0.5

# %% [markdown]
# For the guide with full covariance, about 90% of the 90% intervals contain the truth. For the diagonal guide fewer than half do.
#
# ## 2. Check the model against the observed data
#
# SBC does not use observed data. The **probability integral transform** (PIT) does: for each row it is the fraction of
# predictive draws below the observed response. For a well-specified model it is uniform, too. Here a normal model is fitted
# to data with rare large errors.

# %%
errors = np.random.default_rng(0).standard_t(1.5, size=200)
y = torch.from_numpy(3 + errors)
parts = torch.arange(200).split(40)
rough = Federation(
    torch.zeros(200, 1).double(), y, parts, [r[:0] for r in parts], names=tuple("PQRST")
)


def measured(family):
    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
            with batch.rows():
                pyro.sample("y", family(mu, sigma), obs=batch.y)

    return program


centre = {}
figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
for axes, (name, family) in zip(
    panels,
    {
        "normal errors": dist.Normal,
        "Student-t errors": lambda m, s: dist.StudentT(2.0, m, s),
    }.items(),
    strict=True,
):
    run = pyrofl.fit(
        pvi.hierarchical(measured(family), rough, shared="mu sigma"),
        rough,
        rounds=rounds,
        progress=False,
    )
    table = checks.pit(run)
    column = next(c for c in table.columns if c.startswith("pit"))
    axes.hist(table[column], 10, range=(0, 1), edgecolor="white")
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("PIT of a row")
    centre[name] = table[column].between(0.3, 0.7).mean()
    print(
        f"{name}: fraction of rows with PIT between 0.3 and 0.7: {centre[name]:.2f} (0.4 expected)"
    )
panels[0].set_ylabel("rows")
plt.show()

# %% [markdown]
# The peak in the left histogram means that most rows are closer to the centre than predicted, because a few extreme rows
# inflate the estimated standard deviation.
#
# ## 3. Check the probabilities of a classifier

# Both methods run at their tuned learning rates (tutorial 7).

# %%
digits = federations.split(datasets.load("digits"), "slices:5", clients=20, test="labels_global")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
runs = {
    "FedAvg": pyrofl.fit(fedavg.build(net, lr=0.1), digits, rounds=rounds, progress=False),
    "pFedVEM": pyrofl.fit(
        pfedvem.build(net, lr_head=0.01, lr_base=0.01), digits, rounds=rounds, progress=False
    ),
}
figures.reliability({name: run.calibration() for name, run in runs.items()})

# %% [markdown]
# On the diagonal, accuracy equals confidence. The **expected calibration error** (ECE) is the mean distance from the
# diagonal. A mean over all clients can hide the small ones. Compare the five smallest clients with the average:

# %%
for name, run in runs.items():
    scores = run.evaluate()
    few = digits.sizes[scores.ids].argsort()[:5]
    smallest = float(scores.values["ece"][few].mean())
    print(f"{name:8s} ECE {scores.mean('ece'):.3f}; five smallest clients {smallest:.3f}")

# %% tags=["remove-cell"]
if full:
    assert centre["normal errors"] > 0.6
    assert abs(centre["Student-t errors"] - 0.4) < 0.1
    assert max(run.evaluate().mean("ece") for run in runs.values()) < 0.05

# %% [markdown]
# ## 4. Measure uncertainty on unknown classes
#
# Train on the digits 0 to 4, and predict the digits 5 to 9. The predictions should have a high **entropy**. (`doubt` below
# is simpler: one minus the largest probability.) The AUROC measures how well a score separates known from unknown classes:
# 0.5 is chance, 1 is perfect separation.

# %%
every = datasets.load("digits")
known = every.y < 5
inside = replace(
    every,
    x=every.x[known],
    y=every.y[known],
    is_test=every.is_test[known],
    classes=every.classes[:5],
)
unknown = every.x[~known]
small = federations.split(inside, "labels:3", 10)
five = nets.build("mlp:50", (64,), 5)
method = pfedvem.build(five, lr_base=0.01, lr_head=0.01)
run = pyrofl.fit(method, small, rounds=rounds, progress=False)
mine = checks.uncertainty(method, small, run.state, draws=100)
other = checks.uncertainty(method, small, run.state, unknown, draws=100)
figures.entropies(
    {"digits 0 to 4": mine.by_client("total"), "digits 5 to 9": other.by_client("total")}, 5
)

# %%
for score in ("doubt", "total", "epistemic"):
    print(f"AUROC by {score}: {float(mine.told_apart(other, score).mean()):.3f}")

# %% [markdown]
# *Total* entropy is the sum of two parts: **aleatoric** uncertainty (for example a blurred digit; more data do not reduce
# it) and **epistemic** uncertainty (the model is uncertain because data are missing; more data reduce it).
#
# ## Exercises
#
# Exercises 1 and 2 are basic, 3 is intermediate, 4 is advanced. Use NumPy and the standard library only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `ranks(truth, draws)`: for each replication, the number of draws that are smaller than the truth. `truth` has the shape
# [replications], `draws` has the shape [replications, S].

# %% tags=["hide-cell", "solution"]
# A number from 0 to S: S + 1 possible ranks.


def ranks(truth, draws):
    return (draws < truth[:, None]).sum(1)


# %% tags=["hide-cell", "test"]
some = np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
assert ranks(np.array([2.5, 5.0]), some).tolist() == [2, 0], (
    "count the draws below the truth, for each replication"
)
assert ranks(np.array([9.0, 99.0]), some).tolist() == [3, 3], "ranks are counts from 0 to S"

# %% [markdown]
# ### Exercise 2 (basic, 2 points)
#
# Write `coverage(truth, draws, level)`: the fraction of replications in which the truth lies in the central interval of the
# draws with probability `level`, such as 0.9.

# %% tags=["hide-cell", "solution"]
# A central interval leaves (1 - level) / 2 on each side.


def coverage(truth, draws, level):
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=1)
    return ((low <= truth) & (truth <= high)).mean()


# %% tags=["hide-cell", "test"]
grid = np.tile(np.arange(101.0), (4, 1))
at = coverage(np.array([7.0, 50.0, 90.0, 99.0]), grid, 0.9)
assert np.isclose(at, 0.75), (
    "the central 90% interval of 0, ..., 100 is from 5 to 95: it contains three of four"
)
assert np.isclose(coverage(np.array([2.0, 20.0, 80.0, 98.0]), grid, 0.5), 0.0), (
    "the central 50% interval is from 25 to 75"
)

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write `ece(confidence, correct, bins)`: the expected calibration error. Divide [0, 1] into `bins` equal intervals; in each,
# take the absolute difference of mean accuracy and mean confidence; average with the numbers of rows as weights. Confidences
# are below 1; empty intervals do not count.

# %% tags=["hide-cell", "solution"]
# The weight of an interval is its fraction of rows.


def ece(confidence, correct, bins):
    place = (confidence * bins).astype(int)
    total = 0.0
    for k in range(bins):
        inside = place == k
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


# %% tags=["hide-cell", "test"]
sure = np.array([0.9, 0.9, 0.9, 0.6])
assert np.isclose(ece(sure, np.array([1, 1, 0, 1]), 10), 0.75 * (0.9 - 2 / 3) + 0.25 * 0.4), (
    "weight intervals by their rows"
)
assert np.isclose(ece(np.array([0.95, 0.05]), np.array([0, 1]), 10), 0.95), (
    "differences of opposite sign must not cancel"
)
assert np.isclose(ece(np.full(10, 0.8), np.arange(10) < 8, 5), 0.0), (
    "calibrated predictions have no error"
)

# %% [markdown]
# ### Exercise 4 (advanced, 3 points)
#
# A posterior is normal with the correct mean, but its standard deviation is `ratio` times the correct one. Write
# `actual(ratio, level)`: the probability that its central interval with nominal probability `level` contains the truth. Use
# `NormalDist` of the standard library: `NormalDist().inv_cdf(q)` and `.cdf(z)`.

# %% tags=["hide-cell", "solution"]
# The interval is ratio * z correct standard deviations to both sides. Half the width: a 95% interval contains the truth in 67%.


def actual(ratio, level):
    z = NormalDist().inv_cdf((1 + level) / 2)
    return 2 * NormalDist().cdf(ratio * z) - 1


# %% tags=["hide-cell", "test"]
assert np.isclose(actual(1.0, 0.9), 0.9), "with the correct width the interval holds"
assert np.isclose(actual(0.5, 0.95), 0.673, atol=1e-3), "half the width: 67% instead of 95%"
assert np.isclose(actual(2.0, 0.5), 0.823, atol=1e-3), (
    "too wide: the interval contains the truth too often"
)

# %% [markdown]
# ## Explore
#
# 1. Stop the method after one round, with `damping=0.5`. What is the shape of the SBC histogram?
# 2. Check the normal model of the data with large errors for each client with `checks.predictive_checks`. What is the p
#    value of the largest response?
# 3. Does averaging over posterior draws (`draws=100`) lower the ECE of pFedVEM compared with its mean?

# %% tags=["hide-cell", "solution"]
# 1. The method has not converged: the posterior is too wide (close to the prior), so the histogram has a peak in the middle.
method = pvi.hierarchical(model, data, shared="mu", damping=0.5, num_particles=8, steps=6)
early = checks.sbc(
    method, data, rounds=1, replications=replications, draws=draws, allow_diverged=True
)
counts = np.histogram(early.places["mu"].values.ravel(), early.bins)[0]
print(counts)

# %% tags=["hide-cell", "solution"]
# 2. See the rows `max`. A p value near 1 (clients P and Q) means that the simulated maximum is nearly always larger than the
# observed one: large errors at other clients inflate the standard deviation. A p value near 0 would mean that the simulated
# maximum is nearly always smaller.
bad = pyrofl.fit(
    pvi.hierarchical(measured(dist.Normal), rough, shared="mu sigma"),
    rough,
    rounds=rounds,
    progress=False,
)
table = checks.predictive_checks(bad)
print(table.round(3).head(10).to_string())

# %% tags=["hide-cell", "solution"]
# 3. Compare the two numbers. The draws of a client differ, so their mean is less confident than the model of the mean; whether this
# helps depends on the method and the data. Measure it.
for draws in (None, 100):
    print(draws, f"ECE {runs['pFedVEM'].evaluate(draws=draws).mean('ece'):.4f}")

# %% tags=["remove-cell"]
if full:
    middle = len(counts) // 4
    assert counts[middle:-middle].sum() > 0.55 * counts.sum()
    highest = table[table["statistic"] == "max"].set_index("client")["p"]
    assert highest[["P", "Q"]].min() > 0.9
