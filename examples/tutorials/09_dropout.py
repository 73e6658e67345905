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
# # 9. Variational dropout: MetaVD
#
# Learn how dropout is a posterior approximation, and when learned dropout rates improve a federated model. Dropout
# multiplies weights by noise during training. **Variational dropout** interprets this as a posterior,
# $q(w) = N(\theta, \alpha\theta^2)$: each weight has a mean $\theta$ and a relative variance $\alpha$. If $\alpha$ is
# learned, the data determine the dropout rate of each weight. In **MetaVD** (Jeon and others, NeurIPS 2023) a small
# network at the server predicts $\alpha$ for every *client*.
#
# After this lesson (about 55 minutes) you can
#
# - convert a dropout rate into a posterior variance, and back,
# - plot the dropout rates of the clients during training,
# - recognize when dropout rates diverge towards 1, and explain why,
# - state for which clients the method improves predictions.
#
# You need lessons 1 to 3.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.figures import moving
from pyrofl.models import metavd

# %% tags=["parameters"]
rounds, full = 40, True
# quick: rounds, full = 3, False

# %% [markdown]
# ## The dropout rate determines the variance
#
# Dropout with rate $p$ multiplies a weight by 0 with probability $p$, and otherwise by $1/(1-p)$. The product has mean
# $\theta$ and variance $\alpha\theta^2$ with
#
# $$\alpha = \frac{p}{1-p}, \qquad p = \frac{\alpha}{1+\alpha}.$$
#
# *Gaussian dropout* is the normal distribution with this mean and variance. $\alpha = 1$ corresponds to a dropout rate
# of one half, and $\alpha = 9$ to a rate of 0.9, where noise dominates the weight.

# %%
rate = 0.5
source = np.random.default_rng(0)
kept = (source.random(100_000) > rate) / (1 - rate)
print(f"mean {kept.mean():.3f}, variance {kept.var():.3f}; alpha is {rate / (1 - rate):.3f}")

# %% tags=["remove-cell"]
assert abs(kept.mean() - 1) < 4 / len(kept) ** 0.5
assert abs(kept.var() - rate / (1 - rate)) < 0.01  # each square is 1, with few exceptions
assert round(0.9 / (1 - 0.9), 6) == 9

# %% [markdown]
# ## The Kullback-Leibler divergence per weight
#
# The prior is uninformative about the size of a weight. The Kullback-Leibler (KL) divergence from the prior to the
# posterior is, per weight,
#
# $$\text{KL} = \frac{1}{2} \log(1 + 1/\alpha).$$
#
# ### Derivation
#
# Take the prior $w \sim N(0, \gamma^2)$ with the best $\gamma$ for this weight. The KL divergence of two normal distributions is
#
# $$\text{KL} = \frac12 \Big( \log \frac{\gamma^2}{\alpha\theta^2} - 1 + \frac{\alpha\theta^2 + \theta^2}{\gamma^2} \Big).$$
#
# Its derivative with respect to $\gamma^2$ is zero at $\gamma^2 = (1 + \alpha)\,\theta^2$. Insert this: the last two terms cancel, and
#
# $$\text{KL} = \frac12 \log \frac{1 + \alpha}{\alpha}.$$
#
# It decreases with $\alpha$ without a minimum, so the KL term always favours more dropout. Only the likelihood limits
# $\alpha$. If a weight does not affect the likelihood, its $\alpha$ grows without bound.

# %%
alpha = np.logspace(-3, 3, 200)
figure, axes = plt.subplots(figsize=(5, 2.8), layout="constrained")
axes.semilogx(alpha, 0.5 * np.log(1 + 1 / alpha))
for p in (0.1, 0.5, 0.9):
    axes.axvline(p / (1 - p), linestyle=":", color="grey")
    axes.text(p / (1 - p), 3, f" p = {p}", fontsize=8)
axes.set_xlabel("alpha")
axes.set_ylabel("KL divergence per weight (nats)")
plt.show()

# %% [markdown]
# ## Twenty clients with few rows
#
# Dropout reduces overfitting, so we create clients that overfit: 40 rows of each digit in total, distributed unevenly
# over twenty clients, and a network with far more weights than rows. Six more clients are excluded from training.

# %%
digits = datasets.per_class(datasets.load("digits"), 40)
data = federations.split(digits, "dirichlet:0.3,min=5", clients=20, held_out=6)
net = nets.build("mlp:100,50", input_shape=(64,), outputs=10)
shared = {"on": "reptile", "lr": 0.07}


def fitted(hyper_lr, dropout="meta", log=None):
    """Return the fitted run; beta is warmed up over the first rounds."""
    return pyrofl.fit(
        lambda number: metavd.build(net, **shared, dropout=dropout, hyper_lr=hyper_lr, done=number / rounds),
        data, rounds=rounds, logger=log, progress=False,
    )  # fmt: skip


# %% [markdown]
# ## Dropout rates during training
#
# `statistics()` returns the dropout rate of each weight of each client. We compare two learning rates of the
# hypernetwork: a small one, and 0.9 as used by the authors.

# %%
courses = {}
for speed in (0.09, 0.9):
    seen = []

    def watch(run, _, seen=seen):
        statistics = run.statistics()
        name = next(n for n in statistics if n.startswith("dropout_rate/"))
        seen.append(statistics[name][:20].flatten(1).numpy())

    run = fitted(speed, log=watch)
    courses[speed] = seen


def show(axes, t):
    for k, (speed, seen) in enumerate(courses.items()):
        axes.hist(
            seen[t].ravel(),
            np.linspace(0, 1, 41),
            alpha=0.6,
            color=f"C{k}",
            density=True,
            label=f"hyper_lr {speed}",
        )
    axes.axvline(0.9, color="black", linestyle=":")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 12)
    axes.set_xlabel("dropout rate per weight, all clients")
    axes.set_ylabel("density")
    axes.legend(fontsize=8)


moving(show, range(rounds), title=lambda t: f"round {t + 1}")

# %%
figure, axes = plt.subplots(figsize=(5, 2.8), layout="constrained")
for speed, seen in courses.items():
    axes.plot(
        range(1, rounds + 1), [100 * (r > 0.9).mean() for r in seen], label=f"hyper_lr {speed}"
    )
axes.set_xlabel("round")
axes.set_ylabel("weights with a rate above 0.9 (%)")
axes.legend()
plt.show()

# %%
for speed, seen in courses.items():
    print(
        f"hyper_lr {speed}: {100 * (seen[-1] > 0.9).mean():.0f}% of the rates are above 0.9 after {rounds} rounds"
    )

# %% tags=["remove-cell"]
if full:
    above = {speed: (seen[-1] > 0.9).mean() for speed, seen in courses.items()}
    assert above[0.9] > 0.5 > 0.1 > above[0.09]
    assert data.sizes[:20].min() >= 5
    assert (len(data.names), len(digits.y[~digits.is_test])) == (26, 400)

# %% [markdown]
# With the larger learning rate, the dropout rates of many weights **diverge towards 1**. This is a property of the
# objective, not an error: the gradient of the KL term never vanishes, and the sparsity that the paper reports is this
# state. A smaller learning rate or a larger network only delays it. The result therefore depends on *the number of
# rounds*; examine the whole curve, not only its last value.
#
# ## Does MetaVD improve predictions?
#
# Accuracy ignores the confidence of predictions; the negative log likelihood (NLL, lower is better) also penalizes
# overconfidence. We compare with the same method without dropout, on training clients and on held-out clients.

# %%
scores = {}
for name, run in {
    "Reptile": fitted(0.9, dropout="none"),
    "Reptile + MetaVD": fitted(0.9),
    "Reptile + VD (shared)": fitted(0.9, dropout="vd"),
}.items():
    cells = []
    for population in ("training", "held_out"):
        how = {"model": "personal", "adaptation": "fine_tune", "population": population}
        found = run.evaluate(draws=None if name == "Reptile" else 10, **how)
        scores[name, population] = found
        cells.append(
            f"{population} accuracy {found.mean('accuracy'):.3f}, nll {found.mean('nll'):.2f}"
        )
    print(f"{name:22s} " + "; ".join(cells))

# %% tags=["remove-cell"]
if full:
    without, learned = (
        {p: scores[n, p] for p in ("training", "held_out")} for n in ("Reptile", "Reptile + MetaVD")
    )
    assert all(learned[p].mean("nll") < without[p].mean("nll") for p in learned)
    assert learned["held_out"].mean("accuracy") > without["held_out"].mean("accuracy")

# %% [markdown]
# Here MetaVD lowers the NLL of both groups, and raises the accuracy of held-out clients. Dropout improves a network that
# overfits and degrades a network that underfits; this holds for learned dropout too. The page on the papers' claims shows
# both cases on CIFAR-10, with three seeds.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Use NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `relative_variance(p)`: $\alpha$ for the dropout rate `p`.

# %% tags=["hide-cell", "solution"]
# Above: alpha = p / (1 - p).


def relative_variance(p):
    return p / (1 - p)


# %% tags=["hide-cell", "test"]
assert np.isclose(relative_variance(0.5), 1.0), "a rate of one half is alpha = 1"
assert np.isclose(relative_variance(0.9), 9.0), "a rate of 0.9 is alpha = 9"
assert np.isclose(relative_variance(0.0), 0.0), "no dropout, no variance"

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `rate(mean, variance)`: the dropout rate of a weight with this posterior mean and variance.

# %% tags=["hide-cell", "solution"]
# alpha = variance / mean^2, so p = variance / (variance + mean^2).


def rate(mean, variance):
    return variance / (variance + mean**2)


# %% tags=["hide-cell", "test"]
assert np.isclose(rate(2.0, 4.0), 0.5), "variance = mean^2 is a rate of one half"
assert np.isclose(rate(-1.0, 9.0), 0.9), "the sign of the mean does not matter"
assert np.isclose(rate(3.0, 1.0), 0.1), "a small variance is a small rate"

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `slope(alpha)`: the derivative of the KL divergence with respect to $\alpha$. Is it ever zero?

# %% tags=["hide-cell", "solution"]
# KL = (log(1 + alpha) - log(alpha)) / 2. The derivative is negative for every alpha: the KL term always favours more dropout.


def slope(alpha):
    return -1 / (2 * alpha * (1 + alpha))


# %% tags=["hide-cell", "test"]
h = 1e-6
for at in (0.5, 1.0, 4.0):
    change = (np.log1p(1 / (at + h)) - np.log1p(1 / (at - h))) / (4 * h)
    assert np.isclose(slope(at), change, rtol=1e-4), (
        "compare with a difference quotient of log(1 + 1/alpha) / 2"
    )

# %% [markdown]
# ## Explore
#
# 1. Give the clients 140 rows of each digit instead of 40. Does MetaVD still lower the NLL?
# 2. Do clients with few rows get higher dropout rates? Compute the correlation of rate and log number of rows.
# 3. Use `beta=1.0` instead of 10. How does the fraction of rates above 0.9 change? How does it change with the smaller
#    network `mlp:32,16`?

# %% tags=["hide-cell", "solution"]
# 1. Yes, but by less, and the accuracy is slightly lower: with more rows there is less overfitting.
more = federations.split(
    datasets.per_class(datasets.load("digits"), 140), "dirichlet:0.3,min=5", clients=20, held_out=6
)
longer = {}
for name, dropout in (("Reptile", "none"), ("Reptile + MetaVD", "meta")):
    run = pyrofl.fit(
        lambda number, dropout=dropout: metavd.build(net, **shared, dropout=dropout, hyper_lr=0.9, done=number / rounds),
        more, rounds=rounds, progress=False,
    )  # fmt: skip
    found = run.evaluate(
        model="personal", adaptation="fine_tune", draws=None if dropout == "none" else 10
    )
    longer[dropout] = found
    print(f"{name:18s} accuracy {found.mean('accuracy'):.3f}, nll {found.mean('nll'):.2f}")

# %% tags=["hide-cell", "solution"]
# 2. No. Small clients overfit most, but the correlation is positive: larger clients get higher dropout rates.
last = courses[0.9][-1].mean(1)
sizes = data.sizes[:20].numpy()
correlation = np.corrcoef(last, np.log(sizes))[0, 1]
print(f"correlation of rate and log(rows): {correlation:.2f}")

# %% tags=["hide-cell", "solution"]
# 3. The weight of the KL term is ten times smaller, so fewer rates exceed 0.9. In a smaller network they exceed it earlier.
run = pyrofl.fit(
    lambda number: metavd.build(net, **shared, hyper_lr=0.9, beta=1.0, done=number / rounds),
    data, rounds=rounds, progress=False,
)  # fmt: skip
rates = torch.cat(
    [v[:20].flatten() for n, v in run.statistics().items() if n.startswith("dropout_rate/")]
)
print(f"beta 1: rates above 0.9: {100 * float((rates > 0.9).double().mean()):.0f}%")

small = nets.build("mlp:32,16", input_shape=(64,), outputs=10)
early = []


def share(run, _):
    found = run.statistics().items()
    rates = torch.cat([v[:20].flatten() for n, v in found if n.startswith("dropout_rate/")])
    early.append(100 * float((rates > 0.9).double().mean()))


pyrofl.fit(
    lambda number: metavd.build(small, **shared, hyper_lr=0.9, done=number / rounds),
    data, rounds=rounds, logger=share, progress=False,
)  # fmt: skip
print("mlp:32,16, every fifth round:", [f"{v:.0f}%" for v in early[::5]])

# %% tags=["remove-cell"]
if full:
    gain = {p: without[p].mean("nll") - learned[p].mean("nll") for p in learned}
    assert 0 < longer["none"].mean("nll") - longer["meta"].mean("nll") < gain["training"]
    assert longer["meta"].mean("accuracy") < longer["none"].mean("accuracy")
    assert correlation > 0.2
    assert float((rates > 0.9).double().mean()) < above[0.9] / 3
    big = [100 * (r > 0.9).mean() for r in courses[0.9]]
    assert next(t for t, v in enumerate(early) if v > 50) < next(
        t for t, v in enumerate(big) if v > 50
    )
