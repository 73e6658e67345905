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
# # 1. Federated learning
#
# Train one model on the data of several clients without collecting the data, see where this goes wrong, and why a posterior
# helps.
#
# After this lesson (about 65 minutes) you can
#
# - describe a round of **FedAvg** (McMahan and others, AISTATS 2017), and compute one by hand,
# - derive where FedAvg ends, and explain *client drift*,
# - describe how data can be partitioned among clients, and measure what the partition does to the accuracy,
# - compute how many bytes a client sends,
# - explain what a posterior adds to a point estimate.
#
# You need gradient descent, the normal distribution and Bayes' rule. No knowledge of federated learning is assumed.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import Federation, datasets, federations, figures, likelihoods, nets
from pyrofl.models import fedavg, local, scaffold

# %% tags=["parameters"]
rounds, full = 20, True
# quick: rounds, full = 2, False

# %% [markdown]
# ## Clients, server and rounds
#
# A **client** is a participant that holds its own data: a hospital, a school, a telephone. Its **rows** (observations) never
# leave it. A **server** coordinates the training, and sees no rows. A **round** of FedAvg has four steps:
#
# 1. The server sends the model's parameters $w$ to the clients.
# 2. Each client $j$ trains on its own rows: $E$ steps of gradient descent from $w$, which end at $w_j$.
# 3. Each client sends $w_j$.
# 4. The server computes the mean, weighted by the number of rows $n_j$:
#
# $$w \leftarrow \sum_j \frac{n_j}{n} w_j, \qquad n = \sum_j n_j.$$
#
# Then the next round begins. **FedAvg weights clients by their number of rows.**
#
# ## A round by hand
#
# Two clients estimate one number $w$. The loss of client $j$, the mean over its rows, is a parabola with curvature $a_j$ and
# minimum $m_j$:
#
# $$f_j(w) = \frac{a_j}{2} (w - m_j)^2, \qquad f_j'(w) = a_j (w - m_j).$$
#
# Both have the same number of rows. Client 1 has $a_1 = 1$, $m_1 = 0$; client 2 has $a_2 = 4$, $m_2 = 1$. A gradient step
# with learning rate $\eta$ multiplies the distance to the minimum by $1 - \eta a_j$, so that after $E$ steps
#
# $$w_j = m_j + (1 - \eta a_j)^E (w - m_j).$$

# %%
n, a, m, eta = np.array([10, 10]), np.array([1.0, 4.0]), np.array([0.0, 1.0]), 0.1


def fedavg_round(w, epochs):
    own = m + (1 - eta * a) ** epochs * (w - m)
    return (n * own).sum() / n.sum()


print("one step:   ", round(fedavg_round(0.0, 1), 3))
print("five steps: ", round(fedavg_round(0.0, 5), 3))

# %% [markdown]
# From $w = 0$, client 1 is at its minimum and does not move. With one step, client 2 moves to 0.4, and the mean is 0.2. With
# five steps it moves to 0.922, and the mean is 0.461. More local steps mean more progress in a round, and communication is
# expensive. But where does FedAvg end?

# %% tags=["remove-cell"]
assert round(fedavg_round(0.0, 1), 3) == 0.2
assert round(fedavg_round(0.0, 5), 3) == 0.461

# %% [markdown]
# ## Derivation: client drift
#
# The aim is the minimum of the loss of all rows, $\sum_j n_j f_j$. Its derivative is zero at
#
# $$w^* = \frac{\sum_j n_j a_j m_j}{\sum_j n_j a_j}.$$
#
# FedAvg ends where a round changes nothing. Insert $w_j$ into the mean, with $r_j = (1 - \eta a_j)^E$:
#
# $$w = \sum_j \frac{n_j}{n}\big(m_j + r_j (w - m_j)\big) \quad\Longrightarrow\quad
# w = \frac{\sum_j n_j (1 - r_j)\, m_j}{\sum_j n_j (1 - r_j)}.$$
#
# For one step, $1 - r_j = \eta a_j$, and FedAvg ends at $w^*$. For very many steps, $r_j = 0$, and FedAvg ends at the mean
# of the minima $m_j$, in which the curvature no longer counts. The difference is called **client drift**: with several local
# steps, clients move towards their own minima, and the mean of the results is not the minimum of the total.


# %%
def drifted(epochs):
    kept = 1 - (1 - eta * a) ** epochs
    return (n * kept * m).sum() / (n * kept).sum()


optimum = (n * a * m).sum() / (n * a).sum()
steps = np.arange(1, 41)
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(steps, [drifted(e) for e in steps], "o", markersize=3, label="FedAvg")
axes.axhline(optimum, color="black", label="minimum of the total loss")
axes.axhline(m.mean(), color="grey", linestyle=":", label="mean of the clients' minima")
axes.set_xlabel("local steps E in a round")
axes.set_ylabel("w at the end")
axes.legend(fontsize=8)
plt.show()
print(
    "E = 1:",
    round(drifted(1), 3),
    " E = 10:",
    round(drifted(10), 3),
    " E = 40:",
    round(drifted(40), 3),
)

# %% [markdown]
# The minimum of the total loss is 0.8. FedAvg ends at 0.8 with one step, at 0.604 with ten and at 0.504 with forty.
#
# ## The same in pyrofl
#
# A linear network with the single input $\sqrt{a_j}$ and the response $\sqrt{a_j}\, m_j$ has exactly these losses.
# `batch=None` uses all rows in each step. **SCAFFOLD** (Karimireddy and others, ICML 2020) corrects the drift: clients also send
# how their gradient differs from the mean gradient, and subtract the difference in each step.

# %%
rows = {
    f"client {j + 1}": (np.full((10, 1), a[j] ** 0.5), np.full(10, a[j] ** 0.5 * m[j]))
    for j in range(2)
}
two = Federation.from_arrays(rows).to("cpu", torch.float64)
line = nets.build("linear", input_shape=(1,), outputs=1)
settings = {
    "likelihood": likelihoods.normal(1.0),
    "epochs": 10,
    "batch": None,
    "lr": eta,
    "momentum": 0.0,
}
ends = {}
for build in (fedavg.build, scaffold.build):
    method = build(line, **settings)
    run = pyrofl.fit(method, two, rounds=5 * rounds, progress=False)
    ends[method.name] = float(run.state.server["w/w"])
    print(f"{method.name:9s} w = {ends[method.name]:.3f}")

# %% tags=["remove-cell"]
assert [round(drifted(e), 3) for e in (1, 10, 40)] == [0.8, 0.604, 0.504]
if full:
    assert abs(ends["fedavg"] - drifted(10)) < 1e-6
    assert abs(ends["scaffold"] - optimum) < 1e-3

# %% [markdown]
# FedAvg ends where the derivation predicts, SCAFFOLD at the minimum of the total loss.
#
# ## Partitions
#
# How rows are distributed among clients is called a **partition**. With independent, identically distributed (iid) clients
# there is no drift to speak of. Real clients differ, in four ways: in *which classes* they have, in their *number of rows*,
# in their *inputs* (another device), and in the *relation* of input and response. For experiments, one data set is
# partitioned artificially. Here are 1,347 training images of handwritten digits on twenty clients:
#
# - `iid`: at random, equal sizes;
# - `dirichlet:0.3`: each class is split by fractions drawn from a Dirichlet(0.3) distribution;
# - `labels:2`: at most two classes per client.

# %%
digits = datasets.load("digits")
partitions = ("iid", "dirichlet:0.3", "labels:2")
parted = {p: federations.split(digits, p, clients=20, test="labels_global") for p in partitions}
counts = federations.class_counts(parted["dirichlet:0.3"])
figures.partition(counts, parted["dirichlet:0.3"].names, digits.classes)

# %% [markdown]
# Train FedAvg on each partition, and compare it with `local`, in which each client trains alone. Each client is tested on
# the classes that it holds, so a client with two classes has an easy task.

# %%
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
accuracy = {}
for p, data in parted.items():
    for name, method in {
        "FedAvg": fedavg.build(net, lr=0.03),
        "local": local.build(net, lr=0.03),
    }.items():
        run = pyrofl.fit(method, data, rounds=rounds, progress=False)
        accuracy[p, name] = run.evaluate().mean("accuracy")
    print(f"{p:14s} FedAvg {accuracy[p, 'FedAvg']:.3f}, local {accuracy[p, 'local']:.3f}")

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for k, name in enumerate(("FedAvg", "local")):
    axes.bar(
        np.arange(3) + 0.35 * (k - 0.5), [accuracy[p, name] for p in partitions], 0.35, label=name
    )
axes.set_xticks(range(3), partitions)
axes.set_ylim(0.5, 1)
axes.set_ylabel("accuracy, mean over clients")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# With iid and with Dirichlet clients FedAvg is better than training alone. With at most two classes per client, training
# alone is better: a client's own model only has to distinguish its two classes, while FedAvg has one model for all ten.
# Whether federation helps depends on the partition.
# Methods that give each client its own model *and* use the others' data are called **personalized**; tutorials 2 and 7
# introduce two.

# %% tags=["remove-cell"]
assert int(sum(parted["iid"].sizes[:20])) == 1347
if full:
    assert accuracy["iid", "FedAvg"] > accuracy["iid", "local"] + 0.02
    assert accuracy["dirichlet:0.3", "FedAvg"] > accuracy["dirichlet:0.3", "local"] + 0.02
    assert accuracy["labels:2", "local"] > accuracy["labels:2", "FedAvg"]

# %% [markdown]
# ## What travels
#
# A client receives and sends every parameter once per round, four bytes each. The network has 64 inputs, 50 hidden units and
# 10 outputs, hence $64 \cdot 50 + 50 + 50 \cdot 10 + 10 = 3{,}760$ parameters, that is 15 kB in each direction. Sixty-seven
# images of 64 pixels with four bytes each are 17 kB: **federated learning does not save traffic here; it keeps the rows where
# they are.** What a message reveals about the rows is another question (tutorial 4).

# %%
parameters = sum(shape.numel() for shape in net.shapes.values())
print(
    f"{parameters:,} parameters, {4 * parameters / 1000:.0f} kB per message, {4 * 64 * 67 / 1000:.0f} kB of images"
)

# %% tags=["remove-cell"]
assert parameters == 3760
assert round(4 * parameters / 1000) == 15
assert round(4 * 64 * 67 / 1000) == 17

# %% [markdown]
# ## Why a posterior
#
# FedAvg ends with one number per parameter. It does not state how certain this number is, and it weights clients by rows,
# however informative the rows are. Return to the two parabolas. If $f_j$ is a negative log likelihood per row, the
# likelihood of client $j$ is a normal density with mean $m_j$ and precision $n_j a_j$. By Bayes' rule, with a flat prior, the
# **posterior** of all rows is the product of the clients' likelihoods, again a normal density:
#
# $$p(w \mid \text{all rows}) \propto \prod_j p(\text{rows of } j \mid w): \qquad
# \text{precision } \sum_j n_j a_j, \quad \text{mean } \frac{\sum_j n_j a_j m_j}{\sum_j n_j a_j} = w^*.$$
#
# If each client sends two numbers, precision and mean, the server has the exact answer after **one round**, without drift and
# with a standard deviation.

# %%
precision = n * a
mean, sd = (precision * m).sum() / precision.sum(), precision.sum() ** -0.5
w = np.linspace(-0.6, 1.6, 300)
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for j in range(2):
    scale = precision[j] ** -0.5
    axes.plot(
        w,
        np.exp(-0.5 * ((w - m[j]) / scale) ** 2) / scale,
        f"C{j}",
        label=f"likelihood of client {j + 1}",
    )
axes.plot(w, np.exp(-0.5 * ((w - mean) / sd) ** 2) / sd, "k", label="posterior")
axes.axvline(drifted(10), color="grey", linestyle=":", label="FedAvg, 10 local steps")
axes.set_xlabel("w")
axes.set_yticks([])
axes.legend(fontsize=8)
plt.show()
print(
    f"posterior {mean:.2f} ± {sd:.2f}; FedAvg is {abs(drifted(10) - mean) / sd:.1f} standard deviations away"
)

# %% [markdown]
# The posterior is 0.80 ± 0.14, and FedAvg with ten local steps ends 1.4 standard deviations away. For models that are not
# normal, the product has no closed form; the next tutorials show how it is approximated, and how the approximation is
# checked.

# %% tags=["remove-cell"]
assert (round(mean, 2), round(sd, 2)) == (0.8, 0.14)
assert round(abs(drifted(10) - mean) / sd, 1) == 1.4

# %% [markdown]
# ## Exercises
#
# Exercises 1 and 2 are basic, 3 is intermediate, 4 is advanced. Use NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `average(w, n)`: the server step of FedAvg. `w` holds the clients' parameters, [clients, parameters]; `n` holds their
# numbers of rows, [clients].

# %% tags=["hide-cell", "solution"]
# Weights n_j / n, the same for all parameters of a client.


def average(w, n):
    return (n[:, None] * w).sum(0) / n.sum()


# %% tags=["hide-cell", "test"]
sent = np.array([[0.0, 2.0], [4.0, 6.0]])
assert np.shape(average(sent, np.array([3, 1]))) == (2,), "expected one number for each parameter"
assert np.allclose(average(sent, np.array([3, 1])), [1.0, 3.0]), (
    "clients are weighted by their number of rows"
)
assert np.allclose(average(np.ones((5, 2)), np.arange(1, 6)), 1.0), "weights must sum to one"

# %% [markdown]
# ### Exercise 2 (basic, 2 points)
#
# Write `train(w, a, m, eta, steps)`: gradient descent of one client on $f(w) = \frac a2 (w - m)^2$, starting at `w`. Return
# the parameter after `steps` steps.

# %% tags=["hide-cell", "solution"]
# The gradient is a (w - m).


def train(w, a, m, eta, steps):
    for _ in range(steps):
        w = w - eta * a * (w - m)
    return w


# %% tags=["hide-cell", "test"]
assert np.isclose(train(0.0, 4.0, 1.0, 0.1, 1), 0.4), (
    "one step subtracts eta times the gradient a (w - m)"
)
assert np.isclose(train(0.0, 4.0, 1.0, 0.1, 5), 1 - 0.6**5), (
    "each step starts where the last one ended"
)
assert np.isclose(train(3.0, 2.0, 3.0, 0.1, 7), 3.0), "at its minimum a client does not move"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write `limit(n, a, m, eta, steps)`: where FedAvg ends, for any number of clients. Use the closed form, no loop over rounds.

# %% tags=["hide-cell", "solution"]
# Each client's minimum has the weight n_j (1 - r_j), r_j = (1 - eta a_j)^E.


def limit(n, a, m, eta, steps):
    weight = n * (1 - (1 - eta * a) ** steps)
    return (weight * m).sum() / weight.sum()


# %% tags=["hide-cell", "test"]
three = np.array([10, 20, 30]), np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.0, 3.0])
assert np.isclose(limit(*three, 0.1, 1), 400 / 170), (
    "with one step FedAvg ends at the minimum of the total loss"
)
assert np.isclose(limit(*three, 0.1, 10_000), 110 / 60), (
    "with many steps it ends at the mean of the minima, by rows"
)
at, own = limit(*three, 0.1, 5), 0.0
for j in range(3):
    own += three[0][j] / 60 * (three[2][j] + (1 - 0.1 * three[1][j]) ** 5 * (at - three[2][j]))
assert np.isclose(at, own), "a further round must change nothing"

# %% [markdown]
# ### Exercise 4 (advanced, 3 points)
#
# Write `posterior(n, a, m)`: mean and standard deviation of the posterior of `w` with a flat prior, where the negative log
# likelihood of a row of client $j$ is $f_j$.

# %% tags=["hide-cell", "solution"]
# The likelihood of client j has precision n_j a_j. Precisions add; the mean is weighted by them.


def posterior(n, a, m):
    precision = n * a
    return (precision * m).sum() / precision.sum(), precision.sum() ** -0.5


# %% tags=["hide-cell", "test"]
centre, spread = posterior(*three)
assert np.isclose(centre, 400 / 170), "the mean is weighted by precision, n_j a_j"
assert np.isclose(spread, 170**-0.5), (
    "the standard deviation is the inverse root of the total precision"
)
assert np.isclose(posterior(4 * three[0], *three[1:])[1], spread / 2), (
    "four times the rows, half the standard deviation"
)

# %% [markdown]
# ## Explore
#
# 1. At which learning rate does a client with $a = 4$ diverge? Try `fedavg_round` with a larger `eta`.
# 2. Does a smaller learning rate remove the drift of ten local steps? What does it cost?

# %% tags=["hide-cell", "solution"]
# 1. The factor 1 - 4 eta has absolute value 1 at eta = 0.5: beyond, each step increases the distance to the minimum.
for eta in (0.4, 0.6):
    print(
        f"eta {eta}: after five steps client 2 is at {m[1] + (1 - eta * a[1]) ** 5 * (0 - m[1]):.1f}"
    )

# %% tags=["hide-cell", "solution"]
# 2. Yes: for small eta, 1 - r_j is about E eta a_j, which is proportional to a_j. But 1/eta times the number of rounds is needed.
ends = {}
for eta in (0.1, 0.01, 0.001):
    w, count = 0.0, 0
    while abs(w - drifted(10)) > 1e-3:
        w, count = fedavg_round(w, 10), count + 1
    ends[eta] = drifted(10)
    print(f"eta {eta}: FedAvg ends at {ends[eta]:.3f}, reached within 0.001 after {count} rounds")

# %% tags=["remove-cell"]
assert abs(ends[0.001] - optimum) < 0.01
