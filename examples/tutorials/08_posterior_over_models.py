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
# # 8. A posterior over models: FedBE
#
# Compare two ways to combine the models of clients: FedAvg averages their weights; **FedBE** (Chen and Chao, ICLR 2021)
# samples *many* mixtures of the clients' models at the server and averages their predictions. The distribution of these
# mixtures is a posterior over models.
#
# With three clients, every mixture is a point in a triangle. This tutorial reproduces figure 1 of the paper, with more
# seeds.
#
# After this lesson (about 60 minutes) you can
#
# - read a plot on the simplex of three clients' models,
# - distinguish the average of *weights* from the average of *predictions*,
# - explain distillation and when it is used,
# - explain why one seed is not sufficient evidence.
#
# You need lessons 1 to 3.

# %%
# %matplotlib inline
import itertools

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import make_swiss_roll

import pyrofl
from pyrofl import Federation, datasets, federations, nets
from pyrofl.figures import moving
from pyrofl.models import fedavg, fedbe
from pyrofl.models.fedbe.distillation import predictions
from pyrofl.models.fedbe.posteriors import dirichlet, sample
from pyrofl.tensors import generator, role

# %% tags=["parameters"]
rounds, seeds, full = 10, 20, True
# quick: rounds, seeds, full = 2, 2, False

# %% [markdown]
# ## Three clients, three classes
#
# The rows lie on a spiral. Each third of the spiral is a class. Each client has 80 rows of one class and 10 rows of each
# of the other two.


# %%
def make_clients(seed):
    points, along = make_swiss_roll(3000, noise=1.0, random_state=seed)
    x = torch.from_numpy(points[:, [0, 2]] / 10).float()
    y = torch.from_numpy(along).argsort().argsort() // 1000
    by_class = [(y == c).nonzero().flatten() for c in range(3)]
    train = []
    for j in range(3):
        counts = [80 if c == j else 10 for c in range(3)]
        train.append(torch.cat([r[:n] for r, n in zip(by_class, counts, strict=True)]))
        by_class = [r[n:] for r, n in zip(by_class, counts, strict=True)]
    test = torch.cat(by_class)
    names = ("class 0", "class 1", "class 2")
    return Federation(x, y, tuple(train), (test,) * 3, ("A", "B", "C"), names), test


data, test = make_clients(0)
figure, panels = plt.subplots(
    1, 3, figsize=(8, 2.8), sharex=True, sharey=True, layout="constrained"
)
for j, axes in enumerate(panels):
    rows = data.train[j]
    axes.scatter(*data.x[rows].T, c=data.y[rows], cmap="viridis", s=8)
    axes.set_title(f"client {data.names[j]}", fontsize=10)
    axes.set_xlabel("x1")
panels[0].set_ylabel("x2")
plt.show()

# %% [markdown]
# ## Accuracy of all mixtures in each round
#
# Each corner of the triangle is the model of one client after its local training. A point inside is a weighted mean of
# the three sets of *weights*. The colour is the accuracy of this model on test rows of all classes.

# %%
net = nets.build("mlp:32", input_shape=(2,), outputs=3)
how = {
    "posterior": "dirichlet", "alpha": 0.5, "samples": 10, "teachers": "S", "distil": "none",
    "epochs": 2, "batch": 10, "lr": 0.003,
}  # fmt: skip
method = fedbe.build(net, **how)
steps = 12
share = (
    torch.tensor([w for w in itertools.product(range(steps + 1), repeat=3) if sum(w) == steps])
    / steps
)


def accuracy(models):
    """Return the accuracies [M] of models with parameters [M, *p]."""
    return (predictions(net, models, data.x[test]).argmax(-1) == data.y[test]).float().mean(1)


triangles, uploads = [], []


def watch(run, _):
    clients = role("w", run.state.message)
    mixed = {n: torch.tensordot(share, v, 1) for n, v in clients.items()}
    triangles.append(accuracy(mixed).numpy())
    uploads.append(clients)


run = pyrofl.fit(method, data, rounds=rounds, logger=watch, progress=False)
corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, 0.866]])


def show(axes, t):
    place = share.numpy() @ corners
    image = axes.tricontourf(
        *place.T, 100 * triangles[t], levels=np.linspace(30, 100, 29), extend="min"
    )
    for name, (x, y) in zip(data.names, corners, strict=True):
        axes.annotate(
            name, (x, y), (8 if y else 0, -4 if y else -12), textcoords="offset points", ha="center"
        )
    best = triangles[t].argmax()
    axes.plot(*place[best], "*", color="white", markeredgecolor="black", markersize=13)
    axes.plot(*corners.mean(0), "o", color="white", markeredgecolor="black")
    axes.set_aspect("equal")
    axes.set_axis_off()
    return image


moving(
    show,
    range(rounds),
    size=(4.5, 4),
    title=lambda t: (
        f"round {t + 1}: accuracy of the best mixture (star) {100 * triangles[t].max():.0f}%"
    ),
)

# %% [markdown]
# Yellow is high accuracy, dark is low. The model at a corner is most accurate on the main class of its client and least
# accurate on the class at the other end of the spiral. The circle in the centre is the model of FedAvg. The star is the
# best mixture; it is selected on the test rows, so it is not available in practice.
#
# ## Average the predictions of many mixtures
#
# FedBE draws random mixtures from a Dirichlet distribution on the triangle. It averages their *predictions*, not their
# weights.

# %%
clients = uploads[-1]
centre = {n: v.mean(0, keepdim=True) for n, v in clients.items()}
mixtures = sample(dirichlet(clients, run.state.reporters.size, 0.5), 100, generator(1))
mixtures = {n: mixtures[n] for n in clients}
averaged = predictions(net, mixtures, data.x[test])
own = predictions(net, clients, data.x[test])
shares = {
    "FedAvg (mean of weights)": accuracy(centre).item(),
    "best of 100 random mixtures": accuracy(mixtures).max().item(),
    "mean of the clients' predictions": float((own.mean(0).argmax(-1) == data.y[test]).float().mean()),
    "mean of 100 mixtures' predictions": float((averaged.mean(0).argmax(-1) == data.y[test]).float().mean()),
}  # fmt: skip
for name, value in shares.items():
    print(f"{name:35s} {100 * value:.1f}%")

# %% [markdown]
# ## Derivation: why predictions are averaged
#
# Let $p_s(y)$ be the probability of the true class by mixture $s$. The logarithm is concave, so by Jensen's inequality
#
# $$-\log \Big(\frac1S \sum_s p_s(y)\Big) \le \frac1S \sum_s -\log p_s(y):$$
#
# **the averaged predictions are at least as good as the models are on average**, in negative log likelihood. Nothing of this kind holds
# for the average of weights. The mixtures' weights have a symmetric Dirichlet distribution with parameter $\alpha$; for $K$ clients, each weight has
#
# $$\text{mean } \frac1K, \qquad \text{variance } \frac{\frac1K\big(1 - \frac1K\big)}{K\alpha + 1}.$$
#
# ## Compare over many seeds
#
# In the paper, for one random spiral, the accuracy of the ensemble is 69% and that of FedAvg 64%. Repeat the comparison
# for many spirals:

# %%
gains, best = [], []
for seed in range(seeds):
    data, test = make_clients(seed)
    fitted = pyrofl.fit(method, data, rounds=rounds, seed=seed, progress=False)
    clients = role("w", fitted.state.message)
    middle = accuracy({n: v.mean(0, keepdim=True) for n, v in clients.items()}).item()
    gains.append(100 * (fitted.evaluate(model="ensemble").mean("accuracy") - middle))
    some = sample(dirichlet(clients, fitted.state.reporters.size, 0.5), 100, generator(seed))
    best.append(100 * (accuracy({n: some[n] for n in clients}).max().item() - middle))

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
edges = np.linspace(min(gains + [-15]), max(best + [15]), 25)
axes.hist(gains, edges, alpha=0.7, label="ensemble of 10 mixtures")
axes.hist(best, edges, alpha=0.7, label="best of 100 mixtures (selected on test rows)")
axes.axvline(0, color="black", linewidth=0.8)
axes.axvline(5, color="black", linestyle=":", label="result of the paper (one seed): +5")
axes.set_xlabel("difference in accuracy from FedAvg (percentage points)")
axes.set_ylabel("seeds")
axes.legend(fontsize=8)
plt.show()

# %%
gains = np.array(gains)
error = gains.std(ddof=1) / len(gains) ** 0.5
print(
    f"ensemble minus FedAvg: mean {gains.mean():+.1f} points, standard error {error:.1f}; better in {int((gains > 0).sum())} of {len(gains)} seeds"
)
print(f"best mixture minus FedAvg: mean {np.mean(best):+.1f} points")

# %% tags=["remove-cell"]
if full:
    assert np.mean(best) > 5  # some mixtures are much more accurate
    assert abs(gains.mean()) < 2 * error  # that the ensemble is, is not certain
    assert gains.min() < 0 < 5 < max(gains.max(), max(best))

# %% [markdown]
# There are two conclusions. Some mixtures are much more accurate than the centre, but they were selected on the test
# rows. It is not certain that the ensemble of random mixtures is more accurate than the centre in this small problem. The
# result of a single seed can lie anywhere in the histogram.
#
# ## Distillation
#
# An ensemble of ten models is ten times as expensive as one model. FedBE **distils** it: the server has unlabelled rows,
# predicts them with the ensemble, and trains one model on these predictions. Here we use the digits: 300 training rows go
# to the server without their labels and are removed from the clients (`server=300`).

# %%
digits = datasets.load("digits")
holders = federations.split(digits, "labels:2", clients=10, test="labels_global", server=300)
unlabelled = holders.unlabelled
print(f"{int(holders.sizes.sum())} rows at clients, {len(unlabelled)} at the server")
big = nets.build("mlp:50", input_shape=(64,), outputs=10)
local = {"epochs": 10, "lr": 0.05}
students = {}
for name, one in {
    "FedAvg": fedavg.build(big, **local),
    "FedBE": fedbe.build(big, unlabelled=unlabelled, distil_lr=0.01, distil_lr_end=0.004, **local),
}.items():
    fitted = pyrofl.fit(one, holders, rounds=rounds // 2, progress=False)
    students[name] = {
        v: fitted.evaluate(model=v, population="pooled").mean("accuracy")
        for v in fitted.method.views
        if v != "personal"
    }
    print(name, {v: round(a, 3) for v, a in students[name].items()})

# %% tags=["remove-cell"]
if full:
    assert len(unlabelled) == 300
    assert students["FedBE"]["global"] > students["FedBE"]["ensemble"]

# %% [markdown]
# `ensemble` is the teacher, `global` the student: one network with the same size as that of FedAvg. Here the student is
# even more accurate than its teacher. The student must be trained to convergence: with too small a learning rate it
# stops between the mean of the weights, where it starts, and its teacher.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Use NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `mixtures(models, weight)`: the parameters of mixtures of clients' models. `models` has the shape [clients, parameters],
# `weight` the shape [mixtures, clients], and its rows sum to one.

# %% tags=["hide-cell", "solution"]
# A product of matrices: [mixtures, clients] times [clients, parameters].


def mixtures(models, weight):
    return weight @ models


# %% tags=["hide-cell", "test"]
sent = np.array([[0.0, 4.0], [2.0, 0.0]])
parts = np.array([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])
assert np.shape(mixtures(sent, parts)) == (3, 2), "expected one model for each mixture"
assert np.allclose(mixtures(sent, parts), [[1, 2], [0, 4], [1.5, 1]]), (
    "expected the weighted mean of the clients' parameters"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `ensemble_nll(p)`: the negative log likelihood of the averaged predictions, a mean over rows. `p` holds the probability of the
# true class, [mixtures, rows].

# %% tags=["hide-cell", "solution"]
# First average over mixtures, then take the logarithm.


def ensemble_nll(p):
    return -np.log(p.mean(0)).mean()


# %% tags=["hide-cell", "test"]
p = np.array([[0.9, 0.1], [0.1, 0.3]])
assert np.isclose(ensemble_nll(p), -(np.log(0.5) + np.log(0.2)) / 2), (
    "average over mixtures first, then take logarithms"
)
assert ensemble_nll(p) < -np.log(p).mean(), (
    "by Jensen's inequality it is smaller than the mean of the NLLs"
)

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `spread(alpha, clients)`: the standard deviation of one client's weight in a symmetric Dirichlet distribution with parameter
# `alpha`.

# %% tags=["hide-cell", "solution"]
# The root of the variance above; it decreases with alpha and with the number of clients.


def spread(alpha, clients):
    mean = 1 / clients
    return (mean * (1 - mean) / (clients * alpha + 1)) ** 0.5


# %% tags=["hide-cell", "test"]
assert np.isclose(spread(1.0, 2), 12**-0.5), "two clients, alpha 1: uniform on 0 to 1"
assert np.isclose(spread(0.5, 3), (2 / 9 / 2.5) ** 0.5), "expected the root of the variance"
assert spread(5.0, 3) < spread(0.5, 3), "a large alpha gives mixtures near the centre"

# %% [markdown]
# ## Explore
#
# 1. Train the clients for 10 local epochs instead of 2, with the same learning rate. How does the accuracy at the centre of
#    the triangle change?
# 2. Draw the mixtures with `alpha=5.0` instead of 0.5. Where in the triangle do they lie, and how does the accuracy of their
#    averaged predictions change?
# 3. Use `distil_lr=1e-4`. Which accuracy does the student reach?

# %% tags=["hide-cell", "solution"]
# 1. The clients' models differ more after ten epochs, so one might expect a lower accuracy of the mean of weights. Here the
# opposite happens: two epochs were too few, and with ten the accuracy at the centre rises from 80% to 96%, that of the ensemble.
data, test = make_clients(0)
far = pyrofl.fit(fedbe.build(net, **(how | {"epochs": 10})), data, rounds=rounds, progress=False)
clients = role("w", far.state.message)
longer = accuracy({n: v.mean(0, keepdim=True) for n, v in clients.items()}).item()
ensemble = far.evaluate(model="ensemble").mean("accuracy")
print(f"centre {100 * longer:.1f}%, ensemble {100 * ensemble:.1f}%")

# %% tags=["hide-cell", "solution"]
# 2. A large alpha gives mixtures near the centre, so the accuracy of the ensemble is close to that of the centre in solution 1.
near = sample(dirichlet(clients, far.state.reporters.size, 5.0), 100, generator(1))
averaged = predictions(net, {n: near[n] for n in clients}, data.x[test]).mean(0).argmax(-1)
close = float((averaged == data.y[test]).float().mean())
print(f"alpha 5: {100 * close:.1f}%")

# %% tags=["hide-cell", "solution"]
# 3. Not more than that of FedAvg: the student stays near the mean of the weights, where it starts.
slow = fedbe.build(big, unlabelled=unlabelled, distil_lr=1e-4, distil_lr_end=1e-4, **local)
fitted = pyrofl.fit(slow, holders, rounds=rounds // 2, progress=False)
unfinished = {
    v: fitted.evaluate(model=v, population="pooled").mean("accuracy")
    for v in ("global", "ensemble")
}
print({v: round(a, 3) for v, a in unfinished.items()})

# %% tags=["remove-cell"]
if full:
    assert abs(shares["FedAvg (mean of weights)"] - 0.80) < 0.02
    assert abs(longer - 0.96) < 0.02
    assert ensemble > shares["mean of 100 mixtures' predictions"] + 0.1
    assert abs(close - longer) < 0.02
    assert unfinished["global"] <= students["FedAvg"]["global"] + 0.01
