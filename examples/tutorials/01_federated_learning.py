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
# Train one model on the data of several clients without collecting them, see where this goes wrong, and why a posterior helps.
#
# After this lesson (about 75 minutes) you can
#
# - describe a round of **FedAvg** (federated averaging; McMahan and others, AISTATS 2017), and compute one by hand,
# - derive where FedAvg ends, and explain *client drift*,
# - describe how data can be partitioned among clients, and measure what the partition does to the accuracy,
# - compute how many bytes a client sends,
# - explain what a posterior adds to a point estimate.
#
# You need gradient descent, the normal distribution and Bayes' rule. No knowledge of federated learning is assumed.
#
# **Set up.** Install Python 3.11 or later, Jupyter (`pip install jupyterlab`), and pyrofl: run
# `pip install -e .` (6 GB, or 2 GB after PyTorch's build for CPUs) in the folder of pyrofl, which your teacher gives you. All data come with pyrofl. This lesson
# computes for about ten seconds.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import Federation, datasets, federations, figures, likelihoods, nets
from pyrofl.models import fedavg, local, scaffold

# %% tags=["parameters"]
rounds = 20
# quick: rounds = 2

# %% [markdown]
# ## Clients, server and rounds
#
# A **client** is a participant that holds its own data: a hospital, a school, a telephone. Its **rows** (observations) never
# leave it. A **server** coordinates the training, and sees no rows. A **round** of FedAvg has four steps:
#
# 1. The server sends the model's parameters $w$ to the clients.
# 2. Each client $j$ trains on its own rows: $E$ **local steps** of gradient descent from $w$, which end at $w_j$.
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


def fedavg_round(w, steps, eta):
    own = m + (1 - eta * a) ** steps * (w - m)
    return (n * own).sum() / n.sum()


print("one step:   ", round(fedavg_round(0.0, 1, eta), 3))
print("five steps: ", round(fedavg_round(0.0, 5, eta), 3))

# %% [markdown]
# From $w = 0$, client 1 is at its minimum and does not move. With one step, client 2 moves to 0.4, and the mean is 0.2. With
# five steps it moves to 0.922, and the mean is 0.461: more progress in a round. But where does FedAvg end?

# %% tags=["remove-cell"]
assert round(fedavg_round(0.0, 1, eta), 3) == 0.2
assert round(fedavg_round(0.0, 5, eta), 3) == 0.461
assert round(m[1] + (1 - eta * a[1]) ** 5 * (0 - m[1]), 3) == 0.922

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
# This requires $|1 - \eta a_j| < 1$: otherwise a client's steps diverge. For one step, $1 - r_j = \eta a_j$, and FedAvg ends at
# $w^*$. For very many steps, $r_j$ goes to 0, and FedAvg ends at the mean of the minima $m_j$ weighted by rows, in which the
# curvature no longer counts. The difference is called **client drift**: with several local steps, clients move towards their
# own minima.


# %%
def end(steps, eta):
    weight = n * (1 - (1 - eta * a) ** steps)
    return (weight * m).sum() / weight.sum()


optimum = (n * a * m).sum() / (n * a).sum()
local_steps = range(1, 41)
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(local_steps, [end(e, eta) for e in local_steps], "o", markersize=3, label="FedAvg")
axes.axhline(optimum, color="black", label="minimum of the total loss")
axes.axhline(m.mean(), color="gray", linestyle=":", label="mean of the clients' minima")
axes.set_xlabel("local steps E in a round")
axes.set_ylabel("w where FedAvg ends")
axes.legend(fontsize=8)
plt.show()
print({e: round(float(end(e, eta)), 3) for e in (1, 10, 40)})

# %% [markdown]
# The minimum of the total loss is 0.8. FedAvg ends at 0.8 with one step, at 0.604 with ten and at 0.504 with forty: the more
# local steps, the closer to the mean of the clients' minima, 0.5.
#
# ## The same in pyrofl
#
# Linear regression without intercept has these losses, if all rows of client $j$ have the input $x = \sqrt{a_j}$ and the
# response $y = \sqrt{a_j}\, m_j$: half the squared error is $\frac12 (y - w x)^2 = \frac{a_j}{2} (w - m_j)^2$. It is the negative
# log likelihood of a normal distribution with standard deviation 1, up to a constant: `likelihoods.normal(1.0)`. A
# `Federation` holds the rows of all clients. `epochs` is the number of passes over a client's rows; with `batch=None`, each
# pass is one step with all rows. `momentum=0.0` is plain gradient descent.
#
# **SCAFFOLD** (Karimireddy and others, ICML 2020) corrects the drift. Each client keeps an estimate $c_j$ of its own gradient:
# the mean of $f_j'$ over its local steps of the last round. The server keeps the mean $c$ of these estimates. A local step uses
# $f_j'(w) - c_j + c$ instead of $f_j'(w)$. At $w^*$ the estimates become $c_j = f_j'(w^*)$ and, as both clients have the same
# number of rows, $c = 0$; the step is then zero for every client, and a round changes nothing. The next cell shows that SCAFFOLD arrives
# there.

# %%
rows = {
    f"client {j + 1}": (np.full((10, 1), a[j] ** 0.5), np.full(10, a[j] ** 0.5 * m[j]))
    for j in range(2)
}
two = Federation.from_arrays(rows).to("cpu", torch.float64)  # in double precision
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
    ends[method.name] = float(run.state.server["w/w"])  # the name of the parameter on the server
    print(f"{method.name:9s} w = {ends[method.name]:.3f}")

# %% tags=["remove-cell"]
assert [round(end(e, eta), 3) for e in (1, 10, 40)] == [0.8, 0.604, 0.504]
assert (optimum, m.mean()) == (0.8, 0.5)
if rounds == 20:
    assert abs(ends["fedavg"] - end(10, eta)) < 1e-6
    assert abs(ends["scaffold"] - optimum) < 1e-3

# %% [markdown]
# FedAvg ends where the derivation predicts, SCAFFOLD at the minimum of the total loss.
#
# ## Partitions
#
# How rows are distributed among clients is called a **partition**. If the rows of all clients are independent and identically
# distributed (iid), drift is small, because their losses have nearly the same minimum. Real clients differ in *which classes* they have, in their *number of rows*, in their
# *inputs* (another device), and in the *relation* of input and response. For experiments, one data set is partitioned
# artificially. Here are 1,347 training images of handwritten digits, ten classes, on twenty clients:
#
# - `iid`: at random, equal sizes, about 67 images each;
# - `dirichlet:0.3`: the images of each class are split by twenty random fractions that sum to one, drawn from a Dirichlet
#   distribution with all parameters 0.3. The smaller this number, the more unequal the fractions;
# - `labels:2`: at most two classes per client.
#
# `test="same_classes"` gives each client all test images of the classes on which it trains, so a client with two classes has
# an easy task. The figure shows `dirichlet:0.3`: above the number of images of each client, below its images by class.

# %%
digits = datasets.load("digits")
partitions = ("iid", "dirichlet:0.3", "labels:2")
parted = {p: federations.split(digits, p, clients=20, test="same_classes") for p in partitions}
counts = federations.class_counts(parted["dirichlet:0.3"])
figures.partition(counts, parted["dirichlet:0.3"].names, digits.classes)

# %% [markdown]
# The clients differ in size, and every client has few or no images of some classes.
#
# Train FedAvg on each partition, and compare it with `local`, in which each client trains alone. The network `mlp:50`
# has 64 inputs (the pixels), one hidden layer of 50 units, and 10 outputs. In each round a client makes
# 5 passes over its rows, in random batches of 10 rows, by gradient descent with momentum: a step also uses 0.9 times the step
# before.

# %%
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
training = {"lr": 0.03, "epochs": 5, "batch": 10, "momentum": 0.9}
accuracy = {}
for p, data in parted.items():
    for name, build in {"FedAvg": fedavg.build, "local": local.build}.items():
        run = pyrofl.fit(build(net, **training), data, rounds=rounds, progress=False)
        accuracy[p, name] = run.evaluate().mean("accuracy")
    print(f"{p:14s} FedAvg {accuracy[p, 'FedAvg']:.3f}, local {accuracy[p, 'local']:.3f}")

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for k, name in enumerate(("FedAvg", "local")):
    axes.bar(
        np.arange(3) + 0.35 * (k - 0.5), [accuracy[p, name] for p in partitions], 0.35, label=name
    )
axes.set_xticks(range(3), partitions)
axes.set_ylim(0, 1)
axes.set_ylabel("accuracy, mean over clients")
axes.legend(fontsize=8, loc="lower right")
plt.show()

# %% [markdown]
# With iid and with Dirichlet clients FedAvg is better than training alone. With at most two classes per client, training
# alone is better: a client's own model only has to distinguish its two classes, while FedAvg has one model for all ten.
# Whether federation helps depends on the partition.
# Methods that give each client its own model *and* use the others' data are called **personalized** (lessons 2 and 7).

# %% tags=["remove-cell"]
assert int(sum(parted["iid"].sizes[:20])) == 1347
assert {67, 68} == {*map(int, parted["iid"].sizes[:20])}
assert (np.asarray(counts)[:20].min(1) <= 2).all()
assert (np.asarray(federations.class_counts(parted["labels:2"]))[:20] > 0).sum(1).max() == 2
if rounds == 20:
    assert accuracy["iid", "FedAvg"] > accuracy["iid", "local"] + 0.02
    assert accuracy["dirichlet:0.3", "FedAvg"] > accuracy["dirichlet:0.3", "local"] + 0.02
    assert accuracy["labels:2", "local"] > accuracy["labels:2", "FedAvg"]

# %% [markdown]
# ## What travels
#
# A client of FedAvg receives and sends every parameter once per round, four bytes each (SCAFFOLD twice as much: also $c$ and $c_j$). The network has a weight for each pair of
# connected units and an intercept for each hidden unit and output, hence $64 \cdot 50 + 50 + 50 \cdot 10 + 10 = 3{,}760$
# parameters, that is 15 kB per message. Twenty rounds in two directions are 602 kB per client. To send its 67 images of 64
# pixels once, four bytes per pixel, would cost 17 kB: **federated learning does not save traffic here; it keeps the rows
# where they are.**

# %%
parameters = sum(shape.numel() for shape in net.shapes.values())
message, images = 4 * parameters, 4 * 64 * (1347 // 20)
print(f"{parameters:,} parameters, {message / 1000:.0f} kB per message")
print(f"20 rounds: {20 * 2 * message / 1000:.0f} kB per client; its images: {images / 1000:.0f} kB")

# %% tags=["remove-cell"]
assert (parameters, 1347 // 20) == (3760, 67)
assert [round(b / 1000) for b in (message, 40 * message, images)] == [15, 602, 17]

# %% [markdown]
# ## Why a posterior
#
# FedAvg ends with one number per parameter. It does not state how certain this number is, and with many local steps it weights
# clients by rows, however informative the rows are. In the regression above, every row of client $j$ has the
# negative log likelihood $f_j$, up to a constant. That of its $n_j$ rows is $\frac{n_j a_j}{2} (w - m_j)^2$, so the likelihood is,
# up to a constant factor, a normal density in $w$ with mean $m_j$ and **precision** (inverse variance) $n_j a_j$. By Bayes' rule, with a flat (constant) prior, the **posterior** given all rows
# is proportional to the product of the clients' likelihoods. The exponents add, and a sum of parabolas is a parabola whose
# curvature is the sum: the posterior is a normal density, too.
#
# $$p(w \mid \text{all rows}) \propto \prod_j p(\text{rows of } j \mid w): \qquad
# \text{precision } \sum_j n_j a_j, \quad \text{mean } \frac{\sum_j n_j a_j m_j}{\sum_j n_j a_j} = w^*.$$
#
# If each client sends two numbers, precision and mean, the server has the exact answer after **one round**, without drift and
# with a standard deviation, the inverse root of the precision.

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
axes.axvline(end(10, eta), color="gray", linestyle=":", label="FedAvg, 10 local steps")
axes.set_xlabel("w")
axes.set_yticks([])
axes.legend(fontsize=8)
plt.show()
print(
    f"posterior {mean:.2f} ± {sd:.2f}; FedAvg is {abs(end(10, eta) - mean) / sd:.1f} standard deviations away"
)

# %% [markdown]
# The posterior is 0.80 ± 0.14. It is narrower than both likelihoods and closer to client 2, whose rows are more informative.
# FedAvg with ten local steps ends 1.4 standard deviations away. For models that are not normal, the product has no closed
# form; the next lessons show how it is approximated, and how the approximation is checked.

# %% tags=["remove-cell"]
assert (round(mean, 2), round(sd, 2)) == (0.8, 0.14)
assert round(abs(end(10, eta) - mean) / sd, 1) == 1.4

# %% [markdown]
# ## Exercises
#
# Exercises 1 and 2 are basic, 3 is intermediate, 4 is advanced. Exercise 3 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `average(w, n)`: the server step of FedAvg. `w` holds the clients' parameters, [clients, parameters]; `n` holds their
# numbers of rows, [clients]. Return the new parameters, [parameters]. In NumPy `n[:, None]` has the shape [clients, 1].

# %% tags=["hide-cell", "solution"]
# Weights n_j / n, the same for all parameters of a client.


def average(w, n):
    return (n[:, None] * w).sum(0) / n.sum()


# %% tags=["hide-cell", "test"]
sent, sizes = np.array([[0.0, 2.0], [4.0, 6.0], [8.0, 1.0]]), np.array([3, 1, 4])
assert np.shape(average(sent, sizes)) == (2,), "expected one number for each parameter"
assert np.allclose(average(np.ones((5, 2)), np.arange(1, 6)), 1.0, atol=1e-5), (
    "weights must sum to one: divide by the number of all rows"
)
assert np.allclose(average(sent, sizes), [4.5, 2.0], atol=1e-5), (
    "clients are weighted by their number of rows"
)

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
assert train(0.0, 4.0, 1.0, 0.1, 1) is not None, "return the parameter"
assert np.isclose(train(0.0, 4.0, 1.0, 0.1, 1), 0.4), "one step: which gradient has f at the start?"
assert np.isclose(train(0.0, 4.0, 1.0, 0.1, 5), 1 - 0.6**5), (
    "each step starts where the last one ended"
)
assert np.isclose(train(3.0, 2.0, 3.0, 0.1, 7), 3.0), "at its minimum a client does not move"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write `classes_held(partition)`: split the digits among ten clients by `partition`, such as `"labels:2"`, and return the mean number
# of classes of which a client has training images. `federations.class_counts` returns the number of images, [clients, classes].

# %% tags=["hide-cell", "solution"]
# A class counts once, however many of its images a client has.


def classes_held(partition):
    split = federations.split(datasets.load("digits"), partition, clients=10)
    return float((federations.class_counts(split) > 0).sum(1).float().mean())


# %% tags=["hide-cell", "test"]
assert np.shape(classes_held("iid")) == (), "return one number, the mean over clients"
assert classes_held("iid") == 10.0, (
    "each of ten clients with 134 random images has all classes: count classes, not images"
)
assert 1.0 < classes_held("labels:2") <= 2.0, "clients of this partition have at most two classes"
few = federations.split(datasets.load("digits"), "dirichlet:0.1", clients=10)
held = [len(few.y[few.train[j]].unique()) for j in range(10)]
assert np.isclose(classes_held("dirichlet:0.1"), np.mean(held)), (
    "expected the mean over clients of the number of different classes in their training rows"
)

# %% [markdown]
# ### Exercise 4 (advanced, 3 points)
#
# Write `rows_needed(n, a, sd)`: the smallest number of further rows of the **first** client with which the posterior standard
# deviation is at most `sd`, with a flat prior. `n` and `a` are arrays over clients. Return 0 if no row is needed.

# %% tags=["hide-cell", "solution"]
# The precision must reach 1 / sd^2, and each row of the first client adds a_1.


def rows_needed(n, a, sd):
    missing = sd**-2 - (n * a).sum()
    return max(0, int(np.ceil(missing / a[0])))


# %% tags=["hide-cell", "test"]
collected = np.array([10, 20]), np.array([2.0, 4.0])
more = rows_needed(*collected, 0.05)
assert more is not None, "return the number of rows"
assert more == int(more), "a number of rows is an integer"
assert more >= 0, "rows cannot be given back"
assert rows_needed(*collected, 0.1) == 0, "the standard deviation is 0.1 already: no row is needed"
assert rows_needed(*collected, 1.0) == 0, "rows are only collected, never removed"
for few, enough in ((more, True), (more - 1, False)):
    width = (100 + 2.0 * few) ** -0.5
    assert (width <= 0.05) == enough, (
        f"with {few} further rows of client 1 the standard deviation is {width:.4f}: compare it with 0.05"
    )
assert rows_needed(*collected, 0.0999) == 1, "round up: a part of a row cannot be collected"

# %% [markdown]
# ## Explore
#
# 1. Does a smaller learning rate remove the drift of ten local steps? What does it cost? Use `end` and `fedavg_round`.

# %% tags=["hide-cell", "solution"]
# 1. Yes: for small eta, 1 - r_j is about E eta a_j, which is proportional to a_j. The number of rounds is proportional to 1 / eta.
limits, needed = {}, {}
for rate in (0.1, 0.01, 0.001):
    w, count = 0.0, 0
    while abs(w - end(10, rate)) > 1e-3:
        w, count = fedavg_round(w, 10, rate), count + 1
    limits[rate], needed[rate] = end(10, rate), count
    print(
        f"eta {rate}: FedAvg ends at {limits[rate]:.3f}, reached within 0.001 after {count} rounds"
    )

# %% tags=["remove-cell"]
assert abs(limits[0.001] - optimum) < 0.01
assert 5 < needed[0.001] / needed[0.01] < 20
