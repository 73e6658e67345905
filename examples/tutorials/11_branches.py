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
# # 11. Find groups of clients: pFedMB
#
# Fit a model that finds groups of similar clients during training. Ten clients form five pairs, and the pairs are unknown.
# A global model ignores the differences between pairs; local models ignore the similarity within a pair. **pFedMB** (Mori
# and others, IJCNN 2023) gives every layer of a network several *branches*, and each client combines the branches with personal
# weights.
#
# After this lesson (about 55 minutes) you can
#
# - explain branch weights, and plot them during training,
# - find groups of clients from their branch weights,
# - compare pFedMB with clustering (IFCA), a global model and local models.
#
# You need lessons 1 to 3.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import datasets, nets
from pyrofl.figures import moving
from pyrofl.models import fedavg, ifca, local, pfedmb

# %% tags=["parameters"]
rounds, full = 20, True
# quick: rounds, full = 3, False

# %% [markdown]
# ## Five pairs
#
# Both clients of pair $k$ have the digits $2k$ and $2k + 1$, fifty training rows each. Both are tested on all test images of these
# two digits.

# %%
digits = datasets.load("digits")
source = torch.Generator().manual_seed(0)
order = torch.randperm(len(digits.y), generator=source)
pair = torch.arange(10) // 2
groups = [order[digits.y[order] // 2 == k] for k in pair]
train = [rows[~digits.is_test[rows]][j % 2 :: 2][:50] for j, rows in enumerate(groups)]
test = [rows[digits.is_test[rows]] for rows in groups]
names = tuple(f"{'AB'[j % 2]} of pair {j // 2}" for j in range(10))
data = pyrofl.Federation(digits.x, digits.y, train, test, names=names, classes=digits.classes)

figure, axes = plt.subplots(2, 10, figsize=(8, 2), layout="constrained")
for j in range(10):
    for i in range(2):
        axes[i, j].imshow(digits.x[train[j][i]].reshape(8, 8), cmap="Greys")
        axes[i, j].set_axis_off()
    axes[0, j].set_title(f"pair {j // 2}", fontsize=8)
plt.show()

# %% [markdown]
# ## The model
#
# Branch $b$ of layer $l$ is a complete set of weights of this layer, $W_{lb}$. Client $i$ uses a weighted mean of the $B$ branches.
# Its **branch weights** $\alpha_{lb}^i$ are non-negative and sum to one in each layer:
#
# $$W_l^i = \sum_{b=1}^{B} \alpha_{lb}^i\, W_{lb}.$$
#
# A round has four steps:
#
# 1. The server sends all branches.
# 2. Each client trains its branch weights by gradient descent, with learning rate `lr_alpha`. The branches do not change.
# 3. Each client trains its copies of the branches, with learning rate `lr`. The branch weights do not change.
# 4. The server computes the mean of each branch over clients, weighted by $n_i \alpha_{lb}^i$.
#
# The branch weights are personal. A client with weight zero on a branch does not change it.
#
# ### Derivation: the server step
#
# Consider one layer. Client $i$ has trained branch $b$ to $W_{ib}$. The server chooses the branch that is closest to all of them, where
# a client counts by its number of rows $n_i$ and by its use of the branch, $\alpha_{ib}$:
#
# $$W_b = \arg\min_W \sum_i n_i \alpha_{ib} \|W - W_{ib}\|^2.$$
#
# The derivative, $2 \sum_i n_i \alpha_{ib} (W - W_{ib})$, is zero at **the mean weighted by $n_i \alpha_{ib}$**:
#
# $$W_b = \frac{\sum_i n_i \alpha_{ib} W_{ib}}{\sum_i n_i \alpha_{ib}}.$$
#
# **One branch is FedAvg.** If every client has the weight 1 on one branch and 0 on the others, each branch is FedAvg on a cluster of
# clients. This is **IFCA** (iterative federated clustering; Ghosh and others, NeurIPS 2020): in each round a client chooses the
# cluster whose model has the smallest loss on its rows, and trains only this model.
#
# Fit five branches. With `shared=True` a client has the same branch weights in all layers. They begin equal, 0.2 each.

# %%
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
method = pfedmb.build(net, branches=5, shared=True, lr=0.1, lr_alpha=1.0)
history = [np.full((10, 5), 0.2)]


def watch(run, _):
    drawn = run.posterior(1)["alpha"]  # [draws, clients, layers, branches]
    history.append(drawn[0, :, 0].numpy())


run = pyrofl.fit(method, data, rounds=rounds, logger=watch, progress=False)


def show(axes, t):
    image = axes.imshow(history[t], cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_yticks(range(10), names, fontsize=8)
    axes.set_xticks(range(5), [f"branch {b}" for b in range(5)], fontsize=8)
    for j in range(10):
        b = history[t][j].argmax()
        color = "white" if history[t][j, b] > 0.5 else "black"
        axes.text(
            b, j, f"{history[t][j, b]:.2f}", color=color, ha="center", va="center", fontsize=7
        )
    return image


moving(show, range(rounds + 1), size=(5, 4), title=lambda t: f"branch weights after round {t}")

# %% [markdown]
# At the end each client has almost all its weight on one branch, and the two clients of a pair on the same one: the method found
# the pairs, although no client received rows or branch weights of another client. The next cell computes Euclidean distances
# between the clients' branch weights.

# %%
alpha = torch.from_numpy(history[-1])
apart = torch.cdist(alpha, alpha)
same = (pair[:, None] == pair) & ~torch.eye(10, dtype=torch.bool)
print(
    f"mean distance of branch weights: same pair {float(apart[same].mean()):.2f}, different pairs {float(apart[pair[:, None] != pair].mean()):.2f}"
)
nearest = (apart + 9 * torch.eye(10)).argmin(1)
print(
    "clients with their nearest neighbor in the same pair:",
    int((pair[nearest] == pair).sum()),
    "of 10",
)

# %% tags=["remove-cell"]
if full:
    assert all(len(rows) == 50 for rows in data.train)
    assert (pair[nearest] == pair).all()
    assert apart[same].mean() < 0.2 < 0.8 < apart[pair[:, None] != pair].mean()
    assert alpha.max(1).values.min() > 0.9

# %% [markdown]
# ## Compare with other methods
#
# `local` trains each client alone. The last line is pFedMB with a server that weights all clients equally, whatever their
# branch weights.

# %%
plain = {"lr": 0.1, "momentum": 0.0, "batch": 64}
rivals = {
    "FedAvg, global model": (fedavg.build(net, **plain), "global"),
    "Local, personal models": (local.build(net, **plain), "personal"),
    "IFCA, hard clusters": (ifca.build(net, clusters=5, **plain), "personal"),
    "pFedMB, 5 branches": (method, "personal"),
    "pFedMB, unweighted server": (
        pfedmb.build(net, branches=5, shared=True, weighted=False, lr=0.1, lr_alpha=1.0),
        "personal",
    ),
}
reached = {}
for name, (one, view) in rivals.items():
    fitted = pyrofl.fit(one, data, rounds=rounds, progress=False)
    score = fitted.evaluate(model=view)
    reached[name] = score.mean("accuracy")
    print(f"{name:26s} accuracy {reached[name]:.3f}, nll {score.mean('nll'):.3f}")

# %% tags=["remove-cell"]
if full:
    mine = reached["pFedMB, 5 branches"]
    assert min(mine, reached["IFCA, hard clusters"]) > reached["FedAvg, global model"] + 0.1
    assert max(mine, reached["IFCA, hard clusters"]) <= reached["Local, personal models"] + 0.01
    assert reached["pFedMB, unweighted server"] < mine - 0.01

# %% [markdown]
# pFedMB and IFCA are much more accurate than the global model, but not more accurate than local models, which are good here because
# each client has only two classes. With equal weights at the server, pFedMB is less accurate: every client then changes every
# branch. The small differences come from one partition and one seed. The script `examples/pfedmb_pairs.py` of the repository repeats
# the comparison with three seeds and tuned learning rates.
#
# ## A posterior over the branch weights
#
# How certain are the branch weights? With `guide="dirichlet"` they have a posterior instead of a point estimate: a Dirichlet
# distribution, a density on non-negative numbers that sum to one. Its prior is flat, and the client maximizes its ELBO (lesson
# 3). The figure shows mean and standard deviation:

# %%
bayes = pfedmb.build(net, branches=5, shared=True, guide="dirichlet", lr=0.1, lr_alpha=1.0)
fitted = pyrofl.fit(bayes, data, rounds=rounds, progress=False)
draws = fitted.posterior(500)["alpha"][:, :, 0].numpy()
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for b in range(5):
    axes.errorbar(
        np.arange(10) + 0.12 * (b - 2),
        draws[:, :, b].mean(0),
        2 * draws[:, :, b].std(0),
        fmt="o",
        markersize=3,
        label=f"branch {b}",
    )
axes.set_xticks(range(10), names, rotation=45, ha="right", fontsize=8)
axes.set_ylabel("branch weight, mean ± 2 sd")
axes.set_ylim(-0.05, 1.15)
axes.legend(fontsize=7, ncols=5, loc="upper center")
plt.show()

# %% tags=["remove-cell"]
if full:
    means = draws.mean(0)
    assert (0.8 < means.max(1)).all()
    assert (means.argmax(1)[::2] == means.argmax(1)[1::2]).all()
    assert len({*means.argmax(1)[::2].tolist()}) == 5
    widths = np.take_along_axis(draws.std(0), means.argmax(1)[:, None], 1)
    assert (0.02 < widths).all()
    assert (widths < 0.08).all()

# %% [markdown]
# Every client has one branch with a mean weight above 0.8, and the clients of a pair the same one: fifty rows determine the branch.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Exercise 1 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `main_branch(run)`: the number of the branch with the largest weight for each client of a fitted pFedMB run, [clients]. Use the
# mean over layers: `run.posterior(1)["alpha"]` has the shape [1, clients, layers, branches]. Branches are counted from 0.

# %% tags=["hide-cell", "solution"]
# First the mean over layers, then the largest entry over branches.


def main_branch(run):
    return run.posterior(1)["alpha"][0].mean(1).argmax(1)


# %% tags=["hide-cell", "test"]
quick = pyrofl.federations.split(datasets.load("digits"), "labels:2", clients=6)
fitted = pyrofl.fit(
    pfedmb.build(nets.build("mlp:16", (64,), 10), branches=3, lr=0.1, lr_alpha=1.0),
    quick, rounds=4, progress=False,
)  # fmt: skip
alpha = fitted.posterior(1)["alpha"][0].numpy()
assert np.shape(main_branch(fitted)) == (6,), "return one number for each client"
assert np.asarray(main_branch(fitted)).tolist() == [int(np.argmax(a.sum(0))) for a in alpha], (
    "expected the branch with the largest mean weight over the layers"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `branch(sent, n, alpha)`: the server step for one branch. `sent` holds the clients' versions, [clients, parameters]; their
# numbers of rows `n` and their weights `alpha` of this branch have the shape [clients]. At least one of these weights is positive.

# %% tags=["hide-cell", "solution"]
# Weights n alpha, normalized.


def branch(sent, n, alpha):
    weight = n * alpha
    return (weight[:, None] * sent).sum(0) / weight.sum()


# %% tags=["hide-cell", "test"]
sent = np.array([[0.0, 4.0], [6.0, 1.0], [9.0, 9.0]])
at = branch(sent, np.array([20, 10, 40]), np.array([0.5, 0.5, 0.0]))
assert np.shape(at) == (2,), "expected one number for each parameter"
assert np.allclose(branch(np.ones((2, 2)), np.array([3, 5]), np.array([0.1, 0.2])), 1.0), (
    "weights must sum to one: divide by the sum of n times alpha"
)
assert np.allclose(at, [2.0, 3.0]), (
    "weights are rows times branch weight; a client with weight zero does not count"
)

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `neighbors(alpha)`: for each client, the number of the *other* client whose branch weights have the smallest Euclidean
# distance to its own. Clients are counted from 0. `alpha` has the shape [clients, branches].

# %% tags=["hide-cell", "solution"]
# Exclude the client: its distance to itself is zero.


def neighbors(alpha):
    distance = ((alpha[:, None] - alpha[None]) ** 2).sum(2)
    np.fill_diagonal(distance, np.inf)
    return distance.argmin(1)


# %% tags=["hide-cell", "test"]
weights = np.array([[0.9, 0.1], [0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
assert np.asarray(neighbors(weights)).tolist() == [2, 3, 0, 1], (
    "expected the nearest other client: a client is not its own neighbor; count from 0"
)
weights = np.array([[0.6, 0.4], [0.5, 0.5], [1.0, 0.0]])
assert np.asarray(neighbors(weights)).tolist() == [1, 0, 0], (
    "compare distances: the product of branch weights favors a client with one large weight"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Fit the method with two branches. Which pairs share a branch?
# 2. Fit it with eight branches. Does every branch have the largest weight of some client?
# 3. With `shared=False`, the default, every layer has separate branch weights. In which layer do the pairs differ more?

# %% tags=["hide-cell", "solution"]
# 1. With two branches, several pairs share one. Here pairs 1 and 2 use branch 0, pairs 3 and 4 use branch 1, and pair 0 uses both.
two = pyrofl.fit(
    pfedmb.build(net, branches=2, shared=True, lr=0.1, lr_alpha=1.0),
    data,
    rounds=rounds,
    progress=False,
)
weight = two.posterior(1)["alpha"][0, ::2, 0, 0].numpy()
print(weight.round(2), "weight of branch 0 per pair")

# %% tags=["hide-cell", "solution"]
# 2. No, five of eight have: the others have small weights everywhere, or are used together with others. Branches are not clusters.
eight = pyrofl.fit(
    pfedmb.build(net, branches=8, shared=True, lr=0.1, lr_alpha=1.0),
    data,
    rounds=rounds,
    progress=False,
)
largest = len(eight.posterior(1)["alpha"][0, :, 0].argmax(-1).unique())
print("branches with the largest weight of at least one client:", largest)

# %% tags=["hide-cell", "solution"]
# 3. Compare the distances within and between pairs in each layer: the pairs differ slightly more in the last layer.
own = pyrofl.fit(
    pfedmb.build(net, branches=5, lr=0.1, lr_alpha=1.0), data, rounds=rounds, progress=False
)
drawn = own.posterior(1)["alpha"][0]  # [clients, layers, branches]
differ = []
for layer in range(drawn.shape[1]):
    d = torch.cdist(drawn[:, layer], drawn[:, layer])
    differ.append(float(d[pair[:, None] != pair].mean()))
    print(f"layer {layer}: same pair {float(d[same].mean()):.2f}, different pairs {differ[-1]:.2f}")

# %% tags=["remove-cell"]
if full:
    assert weight[[1, 2]].min() > 0.8
    assert weight[[3, 4]].max() < 0.2
    assert 0.2 < weight[0] < 0.8
    assert largest == 5
    assert 0 < differ[-1] - differ[0] < 0.5
