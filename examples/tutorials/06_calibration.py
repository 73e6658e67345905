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
# After this lesson (about 70 minutes) you can
#
# - derive why ranks are uniform, check an inference method by simulation-based calibration (SBC), and interpret its histograms,
# - check a model against observed data (PIT, predictive checks),
# - draw reliability curves for all clients, and compare the smallest ones,
# - measure the uncertainty of a model on classes that it was not trained on.
#
# You need lessons 1 to 5. The cells compute for about half a minute.

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
replications, draws, rounds = 200, 199, 20
# quick: replications, draws, rounds = 20, 19, 2

# %% [markdown]
# ## 1. Check the inference: simulation-based calibration
#
# Draw a parameter from the prior, $\theta \sim p(\theta)$, simulate data from it, $y \sim p(y \mid \theta)$, and compute $S$
# posterior draws $\theta_1, \dots, \theta_S$. The joint density of truth and data is
#
# $$p(\theta)\, p(y \mid \theta) = p(y)\, p(\theta \mid y).$$
#
# Read from right to left: given $y$, the true $\theta$ is itself a draw of the posterior. If inference is exact, the $S + 1$
# numbers $\theta, \theta_1, \dots, \theta_S$ are independent draws of the same distribution, so each of the $S + 1$ positions
# of $\theta$ among them is equally probable. **The rank of the truth, the number of draws below it, is uniform**, and an
# interval between quantiles of the draws contains the truth with its nominal probability. This requires no real data and no
# exact posterior.
#
# Four clients have 10, 6, 3 and 1 rows. Only these numbers count, because `checks.sbc` simulates all responses; it fits 200
# simulated federations in one vectorized batch. We check PVI with the full guide and with the mean-field guide of lesson 5. The
# posteriors of `mu` and of the clients' `eta` are strongly correlated, as only their sum `mu + 1.5 * eta` affects a client's
# rows. Each of ten rounds has six gradient steps (`steps`), and each step averages the ELBO over eight draws (`num_particles`).

# %%
sizes = {"A": 10, "B": 6, "C": 3, "D": 1}
empty = {name: (np.zeros((n, 1)), np.zeros(n)) for name, n in sizes.items()}
data = Federation.from_arrays(empty).to("cpu", torch.float64)


def model(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu + 1.5 * eta, 1.0), obs=batch.y)


checked = {}
for covariance in ("full", "diagonal"):
    method = pvi.hierarchical(
        model, data, shared="mu", covariance=covariance, damping=0.5, num_particles=8, steps=6
    )
    checked[covariance] = checks.sbc(
        method, data, rounds=10, replications=replications, draws=draws
    )
    print(f"{covariance:9s} smallest p value {checked[covariance].p_value:.2g}")

figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
for axes, (name, result) in zip(panels, checked.items(), strict=True):
    axes.hist(result.places["mu"], result.bins, range=(0, 1), edgecolor="white")
    axes.axhline(replications / result.bins, color="black", linestyle=":")
    axes.set_title(f"{name} covariance", fontsize=10)
    axes.set_xlabel("rank of the true mu, scaled to 0 to 1")
panels[0].set_ylabel("replications")
plt.show()

# %% [markdown]
# The dotted line is the expected height if ranks are uniform: 10 of 200 replications in each of 20 bins. The p value is that of a
# test for uniform ranks, the smallest of all parameters, adjusted for their number.
#
# A flat histogram indicates correct inference. A **U** shape means that the truth lies too often near or beyond the extreme
# draws: the posterior is too narrow. A peak in the middle means that it is too wide, and a slope that it is biased.

# %%
covered = {name: result.coverage((0.5, 0.9))["mu"] for name, result in checked.items()}
for name, fraction in covered.items():
    print(
        f"{name:9s} covered by 50% intervals: {float(fraction[0]):.2f}, by 90% intervals: {float(fraction[1]):.2f}"
    )

# %% tags=["remove-cell"]
if replications == 200:
    assert {result.bins for result in checked.values()} == {20}
    assert abs(float(covered["full"][1]) - 0.9) < 4 * (0.9 * 0.1 / replications) ** 0.5
    assert float(covered["diagonal"][1]) < 0.5
    assert checked["full"].p_value > 0.05 > 1e-10 > checked["diagonal"].p_value

# %% [markdown]
# For the guide with full covariance, about 90% of the 90% intervals contain the truth. For the diagonal guide fewer than half
# do, and its histogram has the U shape: its posterior is too narrow, as lesson 5 derived.
#
# ## 2. Check the model against the observed data
#
# SBC does not use observed data. The **probability integral transform** (PIT) does: for each row it is the fraction of
# predictive draws below the observed response. (A *predictive draw* is a response drawn from the model with parameters drawn from
# the posterior.) For a correct model it is uniform, too, or nearly so, as the posterior was fitted to the same rows. Five clients
# have 40 rows each, with rare large errors. We fit a model with normal errors, and one with Student-t errors:

# %%
y = 3 + np.random.default_rng(0).standard_t(1.5, size=(5, 40))
measurements = {name: (np.zeros((40, 1)), own) for name, own in zip("PQRST", y, strict=True)}
rough = Federation.from_arrays(measurements).to("cpu", torch.float64)


def measured(family):
    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
            with batch.rows():
                pyro.sample("y", family(mu, sigma), obs=batch.y)

    return program


families = {"normal": dist.Normal, "Student-t": lambda mu, sigma: dist.StudentT(2.0, mu, sigma)}
fits, center = {}, {}
figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
for axes, (name, family) in zip(panels, families.items(), strict=True):
    method = pvi.hierarchical(measured(family), rough, shared="mu sigma")
    fits[name] = pyrofl.fit(method, rough, rounds=rounds, progress=False)
    table = checks.pit(fits[name], progress=False)
    axes.hist(table["pit"], 10, range=(0, 1), edgecolor="white")
    axes.set_title(f"{name} errors", fontsize=10)
    axes.set_xlabel("PIT of a row")
    center[name] = table["pit"].between(0.3, 0.7).mean()
    print(f"{name} errors: fraction of rows with a PIT between 0.3 and 0.7: {center[name]:.2f}")
panels[0].set_ylabel("rows")
plt.show()

# %% [markdown]
# If the PIT is uniform, 0.4 of the rows lie between 0.3 and 0.7. With Student-t errors they do. With normal errors about 0.8 of the
# rows do: most rows are closer to the center than predicted, because a few extreme rows inflate the estimated standard deviation.
#
# ## 3. Check the probabilities of a classifier
#
# The **confidence** of a prediction is the probability of the predicted class. Sort the predictions into bins by confidence; if
# they are calibrated, the mean accuracy in each bin equals the mean confidence, and the points of the figure lie on the diagonal.
# We compare FedAvg (lesson 1) with the personal models of pFedVEM (lessons 5 and 7), both with learning rates that were chosen on
# validation rows.

# %%
digits = federations.split(datasets.load("digits"), "slices:5", clients=20, test="same_classes")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
runs = {
    "FedAvg": pyrofl.fit(fedavg.build(net, lr=0.1), digits, rounds=rounds, progress=False),
    "pFedVEM": pyrofl.fit(
        pfedvem.build(net, lr_head=0.01, lr_base=0.01), digits, rounds=rounds, progress=False
    ),
}
figures.reliability({name: run.calibration() for name, run in runs.items()})

# %% [markdown]
# At least four of five predictions are in the last bin, with a confidence above 0.93. The other bins have few rows, and hollow
# points very few. The **expected calibration error** (ECE) is therefore a weighted mean of the distances from the diagonal: each
# bin counts by its number of rows. A mean over all clients can hide the small ones. Compare the five smallest clients with the
# mean:

# %%
calibration_errors = {}
for name, run in runs.items():
    scores = run.evaluate()
    few = digits.sizes[scores.ids].argsort()[:5]
    found = scores.mean("ece"), float(scores.values["ece"][few].mean())
    calibration_errors[name] = found
    print(f"{name:8s} ECE {found[0]:.3f}; five smallest clients {found[1]:.3f}")

# %% tags=["remove-cell"]
if replications == 200:
    assert 0.75 < center["normal"] < 0.85
    assert abs(center["Student-t"] - 0.4) < 0.1
    binned = [run.calibration().rows.flatten() for run in runs.values()]
    assert all(rows[-1] >= 0.8 * rows.sum() and len(rows) == 15 for rows in binned)
    assert np.max([*calibration_errors.values()]) < 0.05

# %% [markdown]
# All four numbers are below 0.05: here both methods are calibrated, also at the small clients.
#
# ## 4. Measure uncertainty on unknown classes
#
# Train on the digits 0 to 4, and predict the digits 5 to 9. The model cannot be right, so its predictions should be uncertain.
# The uncertainty of a prediction with class probabilities $p_c$ is its **entropy** $-\sum_c p_c \log p_c$: 0 if one class is
# certain, and $\log 5 = 1.61$ if five classes are equally probable. The *total* entropy is that of the probabilities averaged over
# posterior draws. It is the sum of two parts:
#
# - **aleatoric** uncertainty, the mean of the entropies of the draws (for example a blurred digit; more data do not reduce it),
# - **epistemic** uncertainty, the rest: the draws disagree because data are missing; more data reduce it.

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

# %% [markdown]
# Nearly all predictions of known digits have a small entropy; those of unknown digits have larger ones. How well does a score
# separate the two? The **AUROC** is the probability that a random unknown digit has a higher score than a random known one: 0.5 is
# chance, 1 is perfect separation. A simple third score is `doubt`, one minus the largest of the averaged probabilities.

# %%
separated = {
    score: float(mine.told_apart(other, score).mean()) for score in ("doubt", "total", "epistemic")
}
for score, value in separated.items():
    print(f"AUROC by {score}: {value:.3f}")

# %% tags=["remove-cell"]
if replications == 200:
    assert all(abs(value - 0.96) < 0.02 for value in separated.values())
    assert np.quantile(np.concatenate([v.numpy() for v in mine.by_client("total")]), 0.9) < 0.3
    assert np.median(np.concatenate([v.numpy() for v in other.by_client("total")])) > 0.4

# %% [markdown]
# All three scores separate the digits well, with an AUROC of about 0.96; here `doubt` is as good as the entropies.

# %% [markdown]
# ## Exercises
#
# Exercises 1 and 2 are basic, 3 is intermediate, 4 is advanced. Exercise 1 uses pyrofl, the others NumPy and the standard library
# only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `overconfidence(calibration)`: mean confidence minus accuracy over all rows, given the result of `run.calibration()`. Its
# attributes `rows`, `confidence` and `accuracy` have the shape [bins]: the number of predictions in each bin, and their mean
# confidence and accuracy (NaN in empty bins). Return a float.

# %% tags=["hide-cell", "solution"]
# Weight the bins by their rows; NaN times 0 is NaN, so leave empty bins out.


def overconfidence(calibration):
    some = calibration.rows > 0
    difference = (calibration.confidence - calibration.accuracy)[some]
    return float((calibration.rows[some] * difference).sum() / calibration.rows.sum())


# %% tags=["hide-cell", "test"]
quick = federations.split(datasets.load("digits"), "labels:3", clients=5)
small = nets.build("mlp:16", input_shape=(64,), outputs=10)
for epochs in (1, 5):
    fit = pyrofl.fit(fedavg.build(small, epochs=epochs), quick, rounds=3, progress=False)
    bins, scores = fit.calibration(), fit.evaluate()
    found = overconfidence(bins)
    assert np.shape(found) == (), "return one number for all rows"
    assert np.isfinite(found), "some bins are empty: their means are NaN"
    right = int((bins.accuracy * bins.rows).nansum().round()) / int(bins.rows.sum())
    sure = float((bins.confidence * bins.rows).nansum()) / int(bins.rows.sum())
    assert np.isclose(abs(found), abs(sure - right), atol=1e-5), "bins count by their rows"
    assert np.isclose(found, sure - right, atol=1e-5), "mind the sign: confidence minus accuracy"

# %% [markdown]
# ### Exercise 2 (basic, 2 points)
#
# Write `coverage(truth, draws, level)`: the fraction of replications in which the truth lies in the central interval of the
# draws with probability `level`, such as 0.9: the interval between two quantiles of the draws of this replication, with the
# probability (1 - `level`) / 2 on both sides. `truth` has the shape [replications], `draws` the shape [replications, S].

# %% tags=["hide-cell", "solution"]
# A central interval leaves (1 - level) / 2 on each side.


def coverage(truth, draws, level):
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=1)
    return ((low <= truth) & (truth <= high)).mean()


# %% tags=["hide-cell", "test"]
begin = np.array([0.0, 10.0, 200.0, -50.0])
grid = begin[:, None] + np.arange(101.0)  # from begin to begin + 100
at = coverage(begin + [7.0, 50.0, 90.0, 97.0], grid, 0.9)
assert np.shape(at) == (), "return one number for all replications"
assert at <= 1, "return a fraction of the replications, not their number"
assert np.isclose(at, 0.75), (
    "the central 90% interval of 0, ..., 100 is from 5 to 95: it contains 7, 50 and 90, but not 97"
)
assert np.isclose(coverage(begin + [2.0, 20.0, 80.0, 98.0], grid, 0.5), 0.0), (
    "the central 50% interval of 0, ..., 100 is from 25 to 75"
)

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write `ece(confidence, correct, bins)`: the expected calibration error. Both arrays have the shape [rows]; `correct` is 1 where
# the prediction is right, otherwise 0. Divide [0, 1] into `bins` equal intervals; in each, take the absolute difference of mean
# accuracy and mean confidence; average with the numbers of rows as weights. Confidences are below 1; empty intervals do not
# count.

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
assert np.isfinite(ece(sure, np.array([1, 1, 0, 1]), 10)), "empty intervals do not count"
assert ece(sure, np.array([1, 1, 0, 1]), 10) <= 1, "weights sum to one: divide by all rows"
assert np.isclose(ece(np.full(50, 0.82), np.arange(50) < 41, 5), 0.0), (
    "41 of 50 correct with a confidence of 0.82: no error; use the mean confidence of the rows"
)
assert np.isclose(ece(np.array([0.95, 0.05]), np.array([0, 1]), 10), 0.95), (
    "differences of opposite sign must not cancel: take the absolute value in each interval"
)
assert np.isclose(ece(np.array([0.6, 0.8]), np.array([1, 0]), 2), 0.2), (
    "expected `bins` intervals; average accuracy and confidence in each before you compare them"
)
assert np.isclose(ece(sure, np.array([1, 1, 0, 1]), 10), 0.75 * (0.9 - 2 / 3) + 0.25 * 0.4), (
    "weight intervals by their rows"
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
assert np.isclose(actual(1.0, 0.9), 0.9), (
    "with the correct width the probability is the nominal one; the interval has two ends"
)
assert np.isclose(actual(0.5, 0.95), 0.673, atol=1e-3), "half the width: 67% instead of 95%"
assert np.isclose(actual(2.0, 0.5), 0.823, atol=1e-3), (
    "too wide: the interval contains the truth too often"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Stop PVI with the full guide after one round instead of ten. What is the shape of the SBC histogram, and why?
# 2. `checks.predictive_checks(fits["normal"])` compares statistics of each client's rows with those of predictive draws; `p` is
#    the fraction of the draws with a larger statistic. What is `p` of the largest response (`max`), and why?
# 3. `runs["pFedVEM"].evaluate(draws=100)` averages predictions over posterior draws; the default is the mean of the guide. Does
#    averaging lower the ECE of pFedVEM?

# %% tags=["hide-cell", "solution"]
# 1. It has a peak in the middle: after one round with damping 0.5 the posterior is too wide, between the prior and the exact one.
method = pvi.hierarchical(model, data, shared="mu", damping=0.5, num_particles=8, steps=6)
early = checks.sbc(method, data, rounds=1, replications=replications, draws=draws)
middle = float(((early.places["mu"] > 0.25) & (early.places["mu"] < 0.75)).mean())
print(f"fraction of ranks in the middle half: {middle:.2f} (0.5 expected)")

# %% tags=["hide-cell", "solution"]
# 2. At clients P and Q it is near 1: the simulated maximum is nearly always larger than the observed one, because large errors
# at other clients inflate the standard deviation.
table = checks.predictive_checks(fits["normal"], progress=False)
print(table[table["statistic"] == "max"].round(3).to_string())

# %% tags=["hide-cell", "solution"]
# 3. No, here it rises from about 0.02 to about 0.05: the draws of a client differ, so their mean is less confident than the
# prediction with the mean of the guide, which already was calibrated.
by_draws = {d: runs["pFedVEM"].evaluate(draws=d).mean("ece") for d in (None, 100)}
print({d: round(value, 3) for d, value in by_draws.items()})

# %% tags=["remove-cell"]
if replications == 200:
    assert middle > 0.5 + 3 * 0.5 / replications**0.5
    assert abs(by_draws[None] - 0.02) < 0.01
    assert abs(by_draws[100] - 0.05) < 0.015
    highest = table[table["statistic"] == "max"].set_index("client")["p"]
    assert highest[["P", "Q"]].min() > 0.9
