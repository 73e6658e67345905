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
# Compare two ways to combine the models of clients: FedAvg averages their weights; **FedBE** (Chen and Chao, ICLR 2021) draws
# *many* random mixtures of the clients' models at the server and averages their predictions. The distribution of the mixtures is
# used as a posterior over models.
#
# With three clients, every mixture is a point in a triangle (a *simplex*). This lesson reproduces figure 1 of the paper, with
# more seeds.
#
# After this lesson (about 65 minutes) you can
#
# - read a plot on the simplex of three clients' models,
# - distinguish the average of *weights* from the average of *predictions*,
# - explain distillation and when it is used,
# - explain why one seed is not sufficient evidence.
#
# You need lessons 1 to 3. The cells compute for about a quarter of a minute.

# %%
# %matplotlib inline
import itertools

import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist
import torch
from sklearn.datasets import make_swiss_roll

import pyrofl
from pyrofl import Federation, datasets, federations, nets
from pyrofl.figures import moving
from pyrofl.models import fedavg, fedbe
from pyrofl.models.shared.distillation import predictions
from pyrofl.tensors import role

# %% tags=["parameters"]
rounds, seeds = 10, 20
# quick: rounds, seeds = 2, 2

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
# Each corner of the triangle is the model of one client after its local training. A point inside is a weighted mean of the three
# sets of *weights*: `mix` computes the models of many points. All clients have 100 rows, so the center is the model of FedAvg. The
# color is the accuracy of a model on test rows of all classes. `predictions(net, models, x)` returns the probabilities of the
# classes, [models, rows, classes]. Move the slider to see all rounds.

# %%
net = nets.build("mlp:32", input_shape=(2,), outputs=3)
how = {
    "posterior": "dirichlet", "alpha": 0.5, "samples": 10,  # ten mixtures, see below
    "teachers": "S", "distil": "none",  # the ensemble consists of these; no distillation yet
    "epochs": 2, "batch": 10, "lr": 0.003,
}  # fmt: skip
method = fedbe.build(net, **how)
steps = 12
share = (
    torch.tensor([w for w in itertools.product(range(steps + 1), repeat=3) if sum(w) == steps])
    / steps
)


def mix(weight, clients):
    """Return the weighted means of clients' models, [M, *p], with weights [M, clients]."""
    return {n: torch.tensordot(weight, v, 1) for n, v in clients.items()}


def accuracy(models, data, test):
    """Return the accuracies [M] of models with parameters [M, *p]."""
    return (predictions(net, models, data.x[test]).argmax(-1) == data.y[test]).float().mean(1)


triangles, uploads = [], []


def watch(run, _):
    uploads.append(role("w", run.state.message))  # the parameters that the clients sent
    triangles.append(accuracy(mix(share, uploads[-1]), data, test).numpy())


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
    axes.figure.colorbar(
        image,
        cax=axes.inset_axes((0.95, 0.3, 0.03, 0.6)),
        label="accuracy (%)",
        ticks=range(30, 101, 10),
    )
    axes.set_aspect("equal")
    axes.set_axis_off()


moving(
    show,
    range(rounds),
    size=(4.5, 4),
    title=lambda t: (
        f"round {t + 1}: accuracy of the best mixture (star) {100 * triangles[t].max():.0f}%"
    ),
)

# %% [markdown]
# A model at a corner is most accurate on the main class of its client, and those of A and C misclassify nearly all rows of each
# other's main class. So the accuracy over all classes is low, below 70%. The circle in the center is the model of FedAvg. The
# star is the best mixture; it is selected on the test rows, so it is not available in practice.
#
# ## Average the predictions of many mixtures
#
# FedBE draws random mixtures from a Dirichlet distribution on the triangle, a distribution of positive weights that sum to one.
# All its parameters are $\alpha = 0.5$ here. FedBE averages the mixtures' *predictions*, not their weights.

# %%
clients, x_test, y_test = uploads[-1], data.x[test], data.y[test]
fedavg_model = mix(torch.full((1, 3), 1 / 3), clients)
torch.manual_seed(1)
mixed = mix(dist.Dirichlet(torch.full((3,), 0.5)).sample([100]), clients)


def averaged(models):
    """Return the accuracy of the averaged predictions of models."""
    p = predictions(net, models, x_test).mean(0)
    return float((p.argmax(-1) == y_test).float().mean())


fractions = {
    "FedAvg (mean of weights)": averaged(fedavg_model),
    "best of 100 random mixtures": float(accuracy(mixed, data, test).max()),
    "mean of the clients' predictions": averaged(clients),
    "mean of 100 mixtures' predictions": averaged(mixed),
}
for name, value in fractions.items():
    print(f"{name:35s} {100 * value:.1f}%")

# %% [markdown]
# In this run FedAvg and the averaged predictions are about equally accurate, 80%. Why average predictions at all?
#
# ## Derivation: why predictions are averaged
#
# Let $p_s(y)$ be the probability of the true class by mixture $s$. The logarithm is concave, so by Jensen's inequality
#
# $$-\log \Big(\frac1S \sum_s p_s(y)\Big) \le \frac1S \sum_s -\log p_s(y):$$
#
# **the averaged predictions are at least as good as the mixtures are on average**, in negative log likelihood (NLL). Nothing of
# this kind holds for the average of weights, and the inequality does not compare the two:


# %%
def probability(models):
    """Return the probabilities of the true classes, [models, rows]."""
    return predictions(net, models, x_test)[:, range(len(test)), y_test]


p = probability(mixed)
nll = {
    "mean NLL of the mixtures": float(-p.log().mean()),
    "NLL of the averaged predictions": float(-p.mean(0).log().mean()),
    "NLL of FedAvg": float(-probability(fedavg_model).log().mean()),
}
for name, value in nll.items():
    print(f"{name:32s} {value:.2f}")

# %% [markdown]
# The inequality holds; FedAvg is about as good as the averaged predictions, in NLL as in accuracy.
#
# How far from the center are the mixtures? In a symmetric Dirichlet distribution with parameter $\alpha$ and $K$ clients, each
# client's weight has (a known property of the distribution)
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
    spiral, unseen = make_clients(seed)
    fitted = pyrofl.fit(method, spiral, rounds=rounds, seed=seed, progress=False)
    clients = role("w", fitted.state.message)
    middle = float(accuracy(mix(torch.full((1, 3), 1 / 3), clients), spiral, unseen))
    gains.append(100 * (fitted.evaluate(model="ensemble").mean("accuracy") - middle))
    torch.manual_seed(seed)
    many = mix(dist.Dirichlet(torch.full((3,), 0.5)).sample([100]), clients)
    best.append(100 * (float(accuracy(many, spiral, unseen).max()) - middle))

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
if rounds == 10:
    at_corners = predictions(net, uploads[-1], x_test).argmax(-1)
    by_class = np.array(
        [
            [float((guess == c)[y_test == c].float().mean()) for c in range(3)]
            for guess in at_corners
        ]
    )
    assert (by_class.argmax(1) == range(3)).all()
    assert max(by_class[0, 2], by_class[2, 0]) < 0.1
    assert accuracy(uploads[-1], data, test).max() < 0.7
    names = ("FedAvg (mean of weights)", "mean of 100 mixtures' predictions")
    assert all(abs(fractions[name] - 0.8) < 0.015 for name in names)
    mean_nll, averaged_nll, fedavg_nll = nll.values()
    assert averaged_nll < mean_nll
    assert abs(averaged_nll - fedavg_nll) < 0.03
if seeds == 20:
    assert np.mean(best) > 8  # some mixtures are much more accurate
    assert abs(gains.mean()) < error  # that the ensemble is, is not certain
    assert 0.4 <= (gains > 0).mean() <= 0.7
    assert gains.min() < -12
    assert gains.max() > 10

# %% [markdown]
# Some mixtures are much more accurate than the center, but they were selected on the test rows. The ensemble of random mixtures is
# more accurate than FedAvg in about half of the seeds, and the mean difference is smaller than its standard error: these
# experiments do not show an improvement. **The result of a single seed can lie anywhere in the histogram**, from less than -12 to
# more than +10 points, so a difference of 5 points in one run is no evidence.
#
# ## Distillation
#
# An ensemble of ten models is ten times as expensive as one model. FedBE **distils** it: the server has rows without labels,
# predicts their class probabilities with the ensemble (the *teacher*), and trains one model (the *student*) on these predictions.
# The student begins the next round. So distillation is possible where the server has rows of the same kind. Here 300 training
# rows of the digits go to the server without their labels and are removed from the clients (`server_data=300`). Each client has at most
# two classes. The accuracy is that on all test rows (`population="pooled"`).

# %%
digits = datasets.load("digits")
holders = federations.split(digits, "labels:2", clients=10, test="same_classes", server_data=300)
server_data = holders.server_data
print(f"{int(holders.sizes.sum())} rows at clients, {len(server_data)} at the server")
big = nets.build("mlp:50", input_shape=(64,), outputs=10)
local = {"epochs": 10, "lr": 0.05}
distilling = {"server_data": server_data, "distil_lr": 0.01, "distil_lr_end": 0.004}
students = {}
for name, one, models in (
    ("FedAvg", fedavg.build(big, **local), ["global"]),
    ("FedBE", fedbe.build(big, **distilling, **local), ["ensemble", "global"]),
):
    fitted = pyrofl.fit(one, holders, rounds=rounds // 2, progress=False)
    students[name] = {
        model: fitted.evaluate(model=model, population="pooled").mean("accuracy")
        for model in models
    }
    print(name, {model: round(value, 3) for model, value in students[name].items()})

# %% tags=["remove-cell"]
if rounds == 10:
    assert len(server_data) == 300
    assert students["FedBE"]["global"] > students["FedBE"]["ensemble"] + 0.05
    assert students["FedBE"]["global"] > students["FedAvg"]["global"] + 0.1

# %% [markdown]
# `ensemble` is the teacher, `global` the student: one network with the same size as that of FedAvg. Here the student is even more
# accurate than its teacher, and more accurate than FedAvg by more than ten points. (This is one seed: repeat it before you
# conclude.) The student must be trained to convergence: with too small a learning rate it stops near the mean of the clients'
# weights, where it starts.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Exercise 1 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `gain(run)`: by how many percentage points the ensemble of a fitted FedBE run is more accurate than the mean of the clients'
# models. `run.evaluate(model=...)` returns the scores of a model: `"ensemble"` or `"global"`, which here is this mean. Use the mean
# over clients.

# %% tags=["hide-cell", "solution"]
# A negative number means that the ensemble is worse.


def gain(run):
    return 100 * (
        run.evaluate(model="ensemble").mean("accuracy")
        - run.evaluate(model="global").mean("accuracy")
    )


# %% tags=["hide-cell", "test"]
quick = federations.split(datasets.load("digits"), "labels:2", clients=6)
fitted = pyrofl.fit(
    fedbe.build(nets.build("mlp:16", (64,), 10), posterior="dirichlet", distil="none"),
    quick, rounds=2, progress=False,
)  # fmt: skip
both = {m: fitted.evaluate(model=m).values["accuracy"].mean() for m in ("ensemble", "global")}
difference = 100 * float(both["ensemble"] - both["global"])
assert np.shape(gain(fitted)) == (), "return one number"
assert abs(gain(fitted)) > 1, "return percentage points"
assert np.isclose(abs(gain(fitted)), abs(difference), atol=1e-3), "compare the mean accuracies"
assert np.isclose(gain(fitted), difference, atol=1e-3), "positive if the ensemble is better"

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `ensemble_nll(p)`: the negative log likelihood of the averaged predictions, a mean over rows. `p` holds the probability
# of the true class, [mixtures, rows].

# %% tags=["hide-cell", "solution"]
# First average over mixtures, then take the logarithm.


def ensemble_nll(p):
    return -np.log(p.mean(0)).mean()


# %% tags=["hide-cell", "test"]
p = np.array([[0.9, 0.1, 0.6], [0.1, 0.3, 0.2]])
assert np.shape(ensemble_nll(p)) == (), "return one number, the mean over rows"
assert ensemble_nll(p) > 0, "a negative log likelihood of probabilities is positive: mind the sign"
assert ensemble_nll(p) < -np.log(p).mean(), (
    "by Jensen's inequality it is smaller than the mean of the NLLs: what is averaged first?"
)
assert np.isclose(ensemble_nll(p), -(np.log(0.5) + np.log(0.2) + np.log(0.4)) / 3), (
    "the predictions that are averaged over mixtures are probabilities of a row"
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
assert np.isclose(spread(1.0, 2), 12**-0.5), (
    "two clients, alpha 1: uniform on 0 to 1, with standard deviation 12^(-1/2)"
)
assert np.isclose(spread(0.5, 3), (2 / 9 / 2.5) ** 0.5), "expected the root of the variance"
assert spread(5.0, 3) < spread(0.5, 3), "a large alpha gives mixtures near the center"

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Train the clients for 10 local epochs instead of 2: `fedbe.build(net, **(how | {"epochs": 10}))`, with the data of the
#    triangle, `data` and `test`. How does the accuracy at the center of the triangle change?
# 2. Draw 100 mixtures of the models `uploads[-1]` with $\alpha = 5$ instead of 0.5. Where in the triangle do they lie? Compare the
#    accuracy of their averaged predictions, the function `averaged`, with that of FedAvg, for some seeds.
# 3. Use `distil_lr=1e-4` and `distil_lr_end=1e-4`. Which accuracy does the student reach?

# %% tags=["hide-cell", "solution"]
# 1. The clients' models differ more after ten epochs, so one might expect a lower accuracy of the mean of weights. Here the
# opposite happens: two epochs were too few, and with ten the accuracy at the center rises from 80% to 96%.
longer = pyrofl.fit(
    fedbe.build(net, **(how | {"epochs": 10})), data, rounds=rounds, progress=False
).state
center = mix(torch.full((1, 3), 1 / 3), role("w", longer.message))
print(f"center: {100 * averaged(center):.1f}%")

# %% tags=["hide-cell", "solution"]
# 2. Near the center: the standard deviation of a weight is 0.12 instead of 0.30. So the averaged predictions are nearly those of
# the model at the center, FedAvg, for all seeds; with alpha = 0.5 they depend on the draws.
for alpha in (0.5, 5.0):
    found = []
    for seed in range(5):
        torch.manual_seed(seed)
        weight = dist.Dirichlet(torch.full((3,), alpha)).sample([100])
        found.append(averaged(mix(weight, uploads[-1])))
    print(f"alpha {alpha}: {100 * min(found):.1f}% to {100 * max(found):.1f}%")

# %% tags=["hide-cell", "solution"]
# 3. Not more than that of FedAvg: the student stays near the mean of the weights, where it starts.
slow = fedbe.build(big, server_data=server_data, distil_lr=1e-4, distil_lr_end=1e-4, **local)
fitted = pyrofl.fit(slow, holders, rounds=rounds // 2, progress=False)
unfinished = fitted.evaluate(model="global", population="pooled").mean("accuracy")
print(f"student: {unfinished:.3f}")

# %% tags=["remove-cell"]
assert [round(spread(alpha, 3), 2) for alpha in (5.0, 0.5)] == [0.12, 0.3]
if rounds == 10:
    assert abs(averaged(center) - 0.96) < 0.015
    assert max(found) - min(found) < 0.02
    assert abs(np.mean(found) - fractions["FedAvg (mean of weights)"]) < 0.02
    assert unfinished <= students["FedAvg"]["global"] + 0.01
