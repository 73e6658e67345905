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
# $q(w) = N(\theta, \alpha\theta^2)$: each weight has a mean $\theta$, and a variance that is $\alpha$ times its square. If the
# *relative variance* $\alpha$ is learned, the data determine the dropout rate of each weight. In **MetaVD** (Jeon and others,
# NeurIPS 2023) the server predicts $\alpha$ for every *client*, by a small network, the **hypernetwork**.
#
# After this lesson (about 55 minutes) you can
#
# - convert a dropout rate into a posterior variance, and back,
# - plot the dropout rates of the clients during training,
# - recognize when dropout rates diverge towards 1, and explain why,
# - state for which clients the method improves predictions.
#
# You need lessons 1 to 3. The cells compute for about half a minute.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.figures import moving
from pyrofl.models import metavd

# %% tags=["parameters"]
rounds = 40
# quick: rounds = 3

# %% [markdown]
# ## The dropout rate determines the variance
#
# Dropout with rate $p$ multiplies a weight $\theta$ by 0 with probability $p$, and otherwise by $1/(1-p)$. The factor has mean
# $(1-p)/(1-p) = 1$, and its square has mean $(1-p)/(1-p)^2 = 1/(1-p)$, so its variance is $1/(1-p) - 1 = p/(1-p)$. The product
# has mean $\theta$ and variance $\alpha\theta^2$ with
#
# $$\alpha = \frac{p}{1-p}, \qquad p = \frac{\alpha}{1+\alpha}.$$
#
# *Gaussian dropout* is the normal distribution with this mean and variance. $\alpha = 1$ corresponds to a dropout rate
# of one half, and $\alpha = 9$ to a rate of 0.9, where noise dominates the weight.

# %%
p = 0.5
source = np.random.default_rng(0)
kept = (source.random(100_000) > p) / (1 - p)
print(f"mean {kept.mean():.3f}, variance {kept.var():.3f}; alpha is {p / (1 - p):.3f}")

# %% tags=["remove-cell"]
assert abs(kept.mean() - 1) < 4 / len(kept) ** 0.5
assert abs(kept.var() - p / (1 - p)) < 0.01  # each square is 1, with few exceptions
assert round(0.9 / (1 - 0.9), 6) == 9

# %% [markdown]
# ## The Kullback-Leibler divergence per weight
#
# The ELBO penalizes a posterior $q$ that is far from the prior by their Kullback-Leibler divergence (lesson 3). Take the prior
# $w \sim N(0, \gamma^2)$, and choose the $\gamma$ that is best for this weight. The divergence of two normal distributions is
#
# $$\text{KL}(q \,\|\, \text{prior}) = \frac12 \Big( \log \frac{\gamma^2}{\alpha\theta^2} - 1 + \frac{\alpha\theta^2 + \theta^2}{\gamma^2} \Big).$$
#
# Its derivative with respect to $\gamma^2$, $\frac12 \big(1/\gamma^2 - (1 + \alpha)\,\theta^2/\gamma^4\big)$, is zero at
# $\gamma^2 = (1 + \alpha)\,\theta^2$. Insert this: the last two terms cancel, and
#
# $$\text{KL} = \frac12 \log \frac{1 + \alpha}{\alpha} = \frac12 \log(1 + 1/\alpha).$$
#
# It decreases with $\alpha$ without a minimum, so the KL term always favors more dropout. Only the likelihood limits
# $\alpha$. If a weight does not affect the likelihood, its $\alpha$ grows without bound.

# %%
alpha = np.logspace(-3, 3, 200)
figure, axes = plt.subplots(figsize=(5, 2.8), layout="constrained")
axes.semilogx(alpha, 0.5 * np.log(1 + 1 / alpha))
for p in (0.1, 0.5, 0.9):
    axes.axvline(p / (1 - p), linestyle=":", color="gray")
    axes.text(p / (1 - p), 3, f" p = {p}", fontsize=8)
axes.set_xlabel("alpha")
axes.set_ylabel("KL divergence per weight (nats)")
plt.show()

# %% [markdown]
# ## Twenty clients with few rows
#
# Dropout reduces overfitting, so we create clients that overfit: 40 rows of each digit in total, distributed unevenly
# over twenty clients, and a network with far more weights than rows. Six more clients are excluded from training.
#
# Only the weights of the last hidden layer are random, $100 \cdot 50 = 5{,}000$ numbers. In each round, a client minimizes the
# **negative log likelihood** (NLL: the mean of $-\log p$ of the true class of its rows) plus $\beta$ times the mean KL
# divergence per weight, with $\beta = 10$. The other part of the method is *Reptile* (lesson 10): the server moves its $\theta$
# towards the mean of the clients' models, and each client takes one gradient step on its training rows before it is tested
# (`adaptation="fine_tune"`).

# %%
digits = datasets.per_class(datasets.load("digits"), 40)
data = federations.split(digits, "dirichlet:0.3,min=5", clients=20, held_out=6)
net = nets.build("mlp:100,50", input_shape=(64,), outputs=10)


def fitted(hyper_lr=0.9, dropout="meta", log=None, clients=data, network=net, beta=10.0):
    """Return the fitted run; `hyper_lr` is the learning rate of the hypernetwork."""
    method = metavd.build(
        network, on="reptile", lr=0.07, dropout=dropout, hyper_lr=hyper_lr, beta=beta
    )
    return pyrofl.fit(method, clients, rounds=rounds, logger=log, progress=False)


# %% [markdown]
# ## Dropout rates during training
#
# `statistics()` returns the dropout rate of each random weight of each client. We compare two learning rates of the hypernetwork:
# a small one, and 0.9 as used by the authors.


# %%
def rates_of(run):
    """Return the dropout rates [training clients, weights]."""
    (rates,) = (v for n, v in run.statistics().items() if n.startswith("dropout_rate/"))
    return rates[:20].flatten(1).numpy()


courses = {}
for speed in (0.09, 0.9):
    courses[speed] = []
    fitted(speed, log=lambda run, _, seen=courses[speed]: seen.append(rates_of(run)))


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
    axes.legend(fontsize=8, loc="upper center")


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
above = {speed: [100 * (r > 0.9).mean() for r in seen] for speed, seen in courses.items()}
assert courses[0.9][0].shape == (20, 5000)
if rounds == 40:
    assert above[0.9][-1] > 50 > 10 > max(above[0.09])
    assert max(above[0.9][:20]) < 10
    assert 20 < np.argmax(np.array(above[0.9]) > 10) < 30
    assert data.sizes[:20].min() >= 5
    assert (len(data.names), len(digits.y[~digits.is_test])) == (26, 400)

# %% [markdown]
# With the larger learning rate, most dropout rates **diverge towards 1** after about 25 rounds (the first and the last bar of the
# histogram are cut off). This is a property of the objective, not an error: the KL term has no minimum. For the first twenty
# rounds the two curves cannot be distinguished, so the result depends on *the number of rounds*: examine the whole curve, not only
# its last value.
#
# ## Does MetaVD improve predictions?
#
# Accuracy ignores the confidence of predictions; the NLL (lower is better) also penalizes predictions that are wrong and
# certain. We compare three methods on training clients and on held-out clients: Reptile without dropout, with MetaVD (learning
# rate 0.9), and with variational dropout whose rates are the same for all clients. With dropout, predictions are averaged over
# ten posterior draws.

# %%
scores = {}
for name, dropout in {
    "Reptile": "none",
    "Reptile + MetaVD": "meta",
    "Reptile + VD (shared)": "vd",
}.items():
    run, cells = fitted(dropout=dropout), []
    for population in ("training", "held_out"):
        how = {"model": "personal", "adaptation": "fine_tune", "population": population}
        found = run.evaluate(draws=None if dropout == "none" else 10, **how)
        scores[dropout, population] = found
        cells.append(
            f"{population} accuracy {found.mean('accuracy'):.3f}, nll {found.mean('nll'):.2f}"
        )
    print(f"{name:22s} " + "; ".join(cells))

# %% tags=["remove-cell"]
gain = {
    (d, p): float(scores["none", p].mean("nll") - scores[d, p].mean("nll"))
    for d in ("meta", "vd")
    for p in ("training", "held_out")
}
if rounds == 40:
    assert min(gain["meta", p] for p in ("training", "held_out")) > 0.1
    assert max(abs(gain["vd", p]) for p in ("training", "held_out")) < 0.05
    accuracies = {k: v.mean("accuracy") for k, v in scores.items()}
    assert abs(accuracies["meta", "training"] - accuracies["none", "training"]) < 0.02

# %% [markdown]
# MetaVD lowers the NLL of both groups by more than 0.1; dropout rates that are the same for all clients do not. The accuracy of the
# training clients hardly changes, and the six held-out clients are too few to compare accuracies. Dropout improves a network that
# overfits and degrades a network that underfits; this holds for learned dropout too. `examples/papers/README.md` in the
# repository shows both cases on CIFAR-10, with three seeds.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Exercise 1 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `median_alpha(run)`: for each client of a fitted MetaVD run, the median of $\alpha$ over all weights with dropout, [clients].
# `run.statistics()` maps names to tensors; the one whose name begins with `"dropout_rate/"` holds the dropout rates, [clients, outputs,
# inputs].

# %% tags=["hide-cell", "solution"]
# alpha = p / (1 - p). Both axes of the layer belong to the weights of a client.


def median_alpha(run):
    (p,) = (v for name, v in run.statistics().items() if name.startswith("dropout_rate/"))
    return (p / (1 - p)).flatten(1).median(1).values


# %% tags=["hide-cell", "test"]
quick = federations.split(datasets.load("digits"), "labels:2", clients=5)
fitted = pyrofl.fit(
    metavd.build(nets.build("mlp:8,9", (64,), 10), on="reptile"), quick, rounds=2, progress=False
)
found = median_alpha(fitted)
assert np.shape(found) == (5,), "return one number for each client"
rates = next(v for n, v in fitted.statistics().items() if n.startswith("dropout_rate/")).numpy()
for p, alpha in zip(rates, found, strict=True):
    odds = np.sort(p.ravel()) / (1 - np.sort(p.ravel()))
    low, high = odds[(len(odds) - 1) // 2], odds[len(odds) // 2]
    assert low * 0.999 <= float(alpha) <= high * 1.001, (
        "expected the median over all weights of the client, of alpha and not of the rate"
    )

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
assert np.isclose(rate(3.0, 1.0), 0.1), (
    "alpha is the variance divided by the squared mean, here 1/9; then convert it into a rate"
)
assert np.isclose(rate(-1.0, 9.0), 0.9), "the sign of the mean does not matter"

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `slope(alpha)`: the derivative of the KL divergence with respect to $\alpha$. Is it ever zero?

# %% tags=["hide-cell", "solution"]
# KL = (log(1 + alpha) - log(alpha)) / 2. The derivative is negative for every alpha: the KL term always favors more dropout.


def slope(alpha):
    return -1 / (2 * alpha * (1 + alpha))


# %% tags=["hide-cell", "test"]
assert slope(1.0) < 0, "the divergence decreases with alpha: the derivative is negative"
h = 1e-6
for at in (0.5, 1.0, 4.0):
    change = (np.log1p(1 / (at + h)) - np.log1p(1 / (at - h))) / (4 * h)
    assert np.isclose(slope(at), change, rtol=1e-4), (
        "compare with a difference quotient of log(1 + 1/alpha) / 2"
    )

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Give the clients 140 rows of each digit instead of 40, with `datasets.per_class` and the same partition, and use
#    `fitted(clients=...)`. Does MetaVD still lower the NLL of the training clients?
# 2. Do clients with few rows get higher dropout rates? Compute the correlation of the mean rate in the last round, from
#    `courses[0.9]`, with the logarithm of `data.sizes[:20]`.
# 3. Use `beta=1.0` instead of 10. How does the fraction of rates above 0.9 change? How does the curve change with the smaller
#    network `mlp:32,16`?

# %% tags=["hide-cell", "solution"]
# 1. Yes, but by less: with more rows there is less overfitting.
more = federations.split(
    datasets.per_class(datasets.load("digits"), 140), "dirichlet:0.3,min=5", clients=20, held_out=6
)
larger = {}
for dropout in ("none", "meta"):
    found = fitted(dropout=dropout, clients=more).evaluate(
        model="personal", adaptation="fine_tune", draws=None if dropout == "none" else 10
    )
    larger[dropout] = found
    print(f"{dropout:5s} accuracy {found.mean('accuracy'):.3f}, nll {found.mean('nll'):.2f}")

# %% tags=["hide-cell", "solution"]
# 2. No. Small clients overfit most, but the correlation is positive: larger clients get higher dropout rates.
last = courses[0.9][-1].mean(1)
sizes = data.sizes[:20].numpy()
correlation = np.corrcoef(last, np.log(sizes))[0, 1]
print(f"correlation of rate and log(rows): {correlation:.2f}")

# %% tags=["hide-cell", "solution"]
# 3. The weight of the KL term is ten times smaller, so hardly any rates diverge. In the smaller network they diverge earlier.
weak = rates_of(fitted(beta=1.0))
print(f"beta 1: rates above 0.9: {100 * (weak > 0.9).mean():.0f}%")

small, early = nets.build("mlp:32,16", input_shape=(64,), outputs=10), []
fitted(network=small, log=lambda run, _: early.append(100 * (rates_of(run) > 0.9).mean()))
print("mlp:32,16, every fifth round:", [f"{v:.0f}%" for v in early[::5]])

# %% tags=["remove-cell"]
if rounds == 40:
    difference = larger["none"].mean("nll") - larger["meta"].mean("nll")
    assert 0 < difference < gain["meta", "training"]
    assert correlation > 0.2
    assert (weak > 0.9).mean() < 0.1

    def passed(curve):
        return next(t for t, percent in enumerate(curve) if percent > 50)

    assert passed(early) < passed(above[0.9])
