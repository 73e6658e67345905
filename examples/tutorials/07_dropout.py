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
# # 7. Dropout as a posterior: MetaVD, and when it helps
#
# Dropout multiplies weights by noise while a network is trained. **Variational dropout** reads this as a posterior, $q(w) = N(\theta, \alpha\theta^2)$: each weight has a
# mean $\theta$ and a relative variance $\alpha$. If $\alpha$ can be learnt, the data decide how much dropout a weight gets.
# **MetaVD** (Jeon and others, NeurIPS 2023) lets a small network at the server predict $\alpha$ for every *client*.
#
# After these fifteen minutes you can
#
# - translate a dropout rate into a posterior, and back,
# - watch the rates of clients being learnt,
# - recognise when rates run away, and why,
# - say on which clients the method helps, and on which it hurts.

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
rounds = 40
# quick: rounds = 3

# %% [markdown]
# ## A dropout rate is a variance
#
# Ordinary dropout with rate $p$ multiplies a weight by 0 with probability $p$, and otherwise by $1/(1-p)$. The product has mean $\theta$ and variance $\alpha\theta^2$ with
#
# $$\alpha = \frac{p}{1-p}, \qquad p = \frac{\alpha}{1+\alpha}.$$
#
# The normal distribution with this mean and variance is *Gaussian dropout*. So $\alpha = 1$ is a rate of one half, and $\alpha = 9$ a rate of 0.9: little is left of the weight but noise.

# %%
rate = 0.5
source = np.random.default_rng(0)
kept = (source.random(100_000) > rate) / (1 - rate)
print(f"mean {kept.mean():.3f}, variance {kept.var():.3f}; alpha is {rate / (1 - rate):.3f}")

# %% [markdown]
# ## The price of knowing a weight
#
# The prior says nothing about the size of a weight. The Kullback-Leibler divergence from the prior to the posterior is, per weight,
#
# $$\text{KL} = \frac{1}{2} \log(1 + 1/\alpha).$$
#
# It falls with $\alpha$, and never stops falling. So the prior always pulls towards more dropout; only the data pull back. Where a weight does not matter, nothing holds it.

# %%
alpha = np.logspace(-3, 3, 200)
figure, axes = plt.subplots(figsize=(5, 2.8), layout="constrained")
axes.semilogx(alpha, 0.5 * np.log(1 + 1 / alpha))
for p in (0.1, 0.5, 0.9):
    axes.axvline(p / (1 - p), linestyle=":", color="grey")
    axes.text(p / (1 - p), 3, f" p = {p}", fontsize=8)
axes.set_xlabel("alpha")
axes.set_ylabel("price of a weight (nats)")
plt.show()

# %% [markdown]
# ## Twenty clients with few rows
#
# Dropout is against overfitting, so we make clients that can overfit: 40 rows of each digit in all, dealt unevenly to twenty clients, and a network
# with far more weights than rows. Six more clients never train.

# %%
digits = datasets.per_class(datasets.load("digits"), 40)
data = federations.split(digits, "dirichlet:0.3,min=5", clients=20, held_out=6)
net = nets.build("mlp:100,50", input_shape=(64,), outputs=10)
shared = {"on": "reptile", "lr": 0.07}


def fitted(hyper_lr, dropout="meta", log=None):
    """Fit, with beta warmed up over the first rounds."""
    return pyrofl.fit(
        lambda number: metavd.build(net, **shared, dropout=dropout, hyper_lr=hyper_lr, done=number / rounds),
        data, rounds=rounds, log=log, progress=False,
    )  # fmt: skip


# %% [markdown]
# ## Watch the rates
#
# `statistics()` tells the dropout rate of each weight of each client. Two learning rates of the hypernetwork: a small one, and the authors' 0.9.

# %%
courses = {}
for speed in (0.09, 0.9):
    seen = []

    def watch(run, _, seen=seen):
        told = run.statistics()
        name = next(n for n in told if n.startswith("dropout_rate/"))
        seen.append(told[name][:20].flatten(1).numpy())

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
    axes.set_xlabel("dropout rate of a weight, all clients")
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
axes.set_ylabel("rates above 0.9 (%)")
axes.legend()
plt.show()

# %%
for speed, seen in courses.items():
    print(
        f"hyper_lr {speed}: {100 * (seen[-1] > 0.9).mean():.0f}% of the rates are above 0.9 after {rounds} rounds"
    )

# %% [markdown]
# With the larger learning rate the pull of the prior wins for many weights: their dropout rates **run away**. This is what the algorithm does, and not an accident: the pull on a
# dropout rate never ends, and the sparsity that the paper reports is this state. A smaller learning rate, or a larger network, only delays it. What you report therefore depends on *when you stop*; look at
# the curve, not at the last number alone.
#
# ## Does it help?
#
# Accuracy says who is right; the negative log likelihood (NLL, lower is better) also says who is too sure. We compare with the same method without dropout, on clients that trained and on clients that never did.

# %%
for name, run in {
    "Reptile": fitted(0.9, dropout="none"),
    "Reptile + MetaVD": fitted(0.9),
    "one rate for all (VD)": fitted(0.9, dropout="vd"),
}.items():
    cells = []
    for population in ("training", "held_out"):
        how = {"model": "personal", "adapted": "adapt", "population": population}
        found = run.evaluate(draws=None if name == "Reptile" else 10, **how)
        cells.append(
            f"{population} accuracy {found.mean('accuracy'):.3f}, nll {found.mean('nll'):.2f}"
        )
    print(f"{name:22s} " + "; ".join(cells))

# %% [markdown]
# Here MetaVD lowers the NLL of both, and raises the accuracy of clients that never trained. Dropout helps where a network overfits, and hurts where it underfits: this is as true of learnt dropout as of the ordinary kind. The page on the papers' claims shows both cases on CIFAR-10, with three seeds.
#
# ## Exercises
#
# 1. Give the clients 140 rows of each digit instead of 40. Is NLL still better with MetaVD?
# 2. Rates of *clients*: do clients with few rows get more dropout? Compute the correlation.
# 3. What does `beta=1.0` instead of 10 change? And a smaller network, `mlp:32,16`?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. Yes, but by less, and accuracy is a little lower: with more rows there is less overfitting to prevent.
more = federations.split(
    datasets.per_class(datasets.load("digits"), 140), "dirichlet:0.3,min=5", clients=20, held_out=6
)
for name, dropout in (("Reptile", "none"), ("Reptile + MetaVD", "meta")):
    run = pyrofl.fit(
        lambda number, dropout=dropout: metavd.build(net, **shared, dropout=dropout, hyper_lr=0.9, done=number / rounds),
        more, rounds=rounds, progress=False,
    )  # fmt: skip
    found = run.evaluate(model="personal", adapted="adapt", draws=None if dropout == "none" else 10)
    print(f"{name:18s} accuracy {found.mean('accuracy'):.3f}, nll {found.mean('nll'):.2f}")

# %% tags=["hide-cell"]
# 2. No. Small clients overfit most, but the number is positive: the larger clients get more dropout.
last = courses[0.9][-1].mean(1)
sizes = data.sizes[:20].numpy()
print(f"correlation of rate and log(rows): {np.corrcoef(last, np.log(sizes))[0, 1]:.2f}")

# %% tags=["hide-cell"]
# 3. The pull of the prior is ten times weaker, so fewer rates pass 0.9. In a small network they pass it earlier.
run = pyrofl.fit(
    lambda number: metavd.build(net, **shared, hyper_lr=0.9, beta=1.0, done=number / rounds),
    data, rounds=rounds, progress=False,
)  # fmt: skip
rates = torch.cat(
    [v[:20].flatten() for n, v in run.statistics().items() if n.startswith("dropout_rate/")]
)
print(f"beta 1: {100 * float((rates > 0.9).double().mean()):.0f}% above 0.9")

small = nets.build("mlp:32,16", input_shape=(64,), outputs=10)
early = []


def share(run, _):
    told = run.statistics()
    rates = torch.cat([v[:20].flatten() for n, v in told.items() if n.startswith("dropout_rate/")])
    early.append(100 * float((rates > 0.9).double().mean()))


pyrofl.fit(
    lambda number: metavd.build(small, **shared, hyper_lr=0.9, done=number / rounds),
    data, rounds=rounds, log=share, progress=False,
)  # fmt: skip
print("mlp:32,16, every fifth round:", [f"{v:.0f}%" for v in early[::5]])
