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
# # 8. Learning where to start: Reptile, MAML and FedABML
#
# A new hospital joins. It has twenty rows. What is the best model to give it? Not the one that is best *on average*, but one from which
# a few training steps on twenty rows reach a good model. **Meta-learning** trains that starting point.
#
# After these fifteen minutes you can
#
# - say what Reptile, MAML and FedABML do differently from FedAvg, in one picture,
# - test methods on clients that never trained, after 0, 1, 2, ... steps,
# - see what a *learnt prior* adds to a learnt starting point.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import Federation, datasets, federations, figures, likelihoods, nets
from pyrofl.figures import moving
from pyrofl.models import fedabml, fedavg, perfedavg, reptile

# %% tags=["parameters"]
rounds, seeds = 30, 3
# quick: rounds, seeds = 3, 1

# %% [markdown]
# ## Two clients, two weights
#
# The loss of each client is like a valley: steep in one direction, flat in the other. Client 1 knows weight 1 well, client 2 weight 2. We look at
# the map of the two weights.

# %%
source = torch.Generator().manual_seed(0)
flat = 0.1**0.5
x1 = torch.randn(50, 2, generator=source, dtype=torch.float64) * torch.tensor([1.0, flat])
x2 = torch.randn(50, 2, generator=source, dtype=torch.float64) * torch.tensor([flat, 1.0])
y1, y2 = (
    x1[:, 0] + 0.1 * torch.randn(50, generator=source),
    x2[:, 1] + 0.1 * torch.randn(50, generator=source),
)
toy = Federation.of({"client 1": (x1, y1), "client 2": (x2, y2)}).to("cpu", torch.float64)
optimum = [torch.linalg.lstsq(x, y).solution.numpy() for x, y in ((x1, y1), (x2, y2))]
everything = torch.linalg.lstsq(torch.cat([x1, x2]), torch.cat([y1, y2])).solution.numpy()
print(
    "best for client 1",
    optimum[0].round(2),
    " for client 2",
    optimum[1].round(2),
    " for all rows",
    everything.round(2),
)

# %% [markdown]
# Now three methods learn on these two clients. What the server holds is one point on the map; watch where it goes.

# %%
line = nets.build("linear", input_shape=(2,), outputs=1)
common = {"likelihood": likelihoods.normal(1.0), "batch": None}
methods = {
    "FedAvg": fedavg.build(line, lr=0.3, epochs=5, momentum=0.0, **common),
    "Reptile": reptile.build(line, lr=0.3, epochs=5, momentum=0.0, **common),
    "FedABML": fedabml.build(line, lr=0.3, epochs=1, steps=5, kl=1.0, lr_prior=0.5, **common),
}
paths = {}
for name, method in methods.items():
    where = []
    pyrofl.fit(
        method,
        toy,
        rounds=rounds,
        log=lambda run, _: where.append(next(iter(run.state.server.values())).flatten().numpy()),
        progress=False,
    )
    paths[name] = np.array(where)
    print(f"{name} ends at", paths[name][-1].round(2))


def show(axes, t):
    grid = np.linspace(-0.6, 1.6, 60)
    for j, (x, y) in enumerate(((x1, y1), (x2, y2))):
        loss = [[float(((x @ torch.tensor([a, b]) - y) ** 2).mean()) for a in grid] for b in grid]
        axes.contour(grid, grid, loss, levels=[0.03, 0.1, 0.3], colors=f"C{j}", alpha=0.4)
        axes.plot(*optimum[j], "x", color=f"C{j}")
    for k, (name, path) in enumerate(paths.items()):
        axes.plot(*path[: t + 1].T, "-", color=f"C{k + 2}", linewidth=1)
        axes.plot(*path[t], "o", color=f"C{k + 2}", label=name)
    axes.plot(*everything, "k+", markersize=10, label="best for all rows")
    axes.set_xlabel("weight 1")
    axes.set_ylabel("weight 2")
    axes.legend(fontsize=8, loc="lower left")


moving(show, range(rounds), size=(5, 4.2), title=lambda t: f"round {t + 1}")

# %% [markdown]
# Crosses: the best weights for each client. Plus: the best weights for all rows together. A good starting point for *both* may be another one: from
# the place where the valleys cross, each client needs to move along its own valley only. All three methods end close to
# the plus but not on it: local steps draw every client towards its own cross. FedAvg is there first.
#
# ## Clients that never trained
#
# Fifty clients have handwritten digits, at most two kinds each. Ten of them train. The other forty come later: each may take some epochs on its own rows, and is
# tested on its own test rows.

# %%
digits = datasets.load("digits")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
plain = {"lr": 0.03, "momentum": 0.0}
builders = {
    "FedAvg": lambda tune: fedavg.build(net, fine_tune=tune, **plain),
    "Reptile": lambda tune: reptile.build(net, fine_tune=tune, **plain),
    "FedABML": lambda tune: fedabml.build(net, fine_tune=tune, lr=0.1, draws=2),
}
epochs = (0, 1, 2, 5, 10)
found = {name: [] for name in builders}
for seed in range(seeds):
    clients = federations.split(digits, "labels:2", 10, seed=seed, held_out=40)
    for name, build in builders.items():
        state = pyrofl.fit(build(0), clients, rounds=rounds, seed=seed, progress=False).state
        found[name].append([
            pyrofl.evaluate(
                build(tune), clients, state, population="held_out", seed=seed,
                **({"model": "personal", "adapted": "adapt"} if tune else {"model": "global"}),
            ).mean("accuracy")
            for tune in epochs
        ])  # fmt: skip
figures.after_epochs(epochs, found)

# %%
for name, runs in found.items():
    print(f"{name:8s}", [f"{v:.3f}" for v in np.mean(runs, 0)], "after epochs", epochs)

# %% [markdown]
# At zero epochs all are bad: a new client has two kinds of digits, and the common model knows ten. After one or two epochs the methods differ; after ten
# all are above 0.9. FedAvg with fine-tuning is hard to beat here: look at numbers before you believe a method's name.
#
# ## MAML: differentiate through the step
#
# MAML minimises exactly what we want: choose $w$ so that the loss *after one step* is small,
#
# $$\min_w \sum_j L_j\big(w - \eta \nabla L_j(w)\big).$$
#
# Its gradient needs second derivatives (a Hessian times a vector). `perfedavg.build(net, order="exact")` takes them exactly, `"first"` drops
# them, `"hessian_free"` uses a difference of gradients.

# %%
clients = federations.split(digits, "labels:2", 10, seed=0, held_out=40)
for order in ("exact", "hessian_free", "first"):
    run = pyrofl.fit(perfedavg.build(net, order=order), clients, rounds=rounds, progress=False)
    score = run.evaluate(population="held_out", model="personal", adapted="adapt").mean("accuracy")
    print(f"Per-FedAvg, {order:12s} after one step: accuracy {score:.3f}")

# %% [markdown]
# ## What a prior adds
#
# FedABML learns not only where to start (a mean for each weight) but also how far each weight should move (a standard deviation for each). A weight that all
# clients need alike gets a small one. Look at the learnt standard deviations of the first and the last layer:

# %%
state = pyrofl.fit(builders["FedABML"](0), clients, rounds=rounds, progress=False).state
spread = {
    n: v.exp().flatten().numpy() for n, v in state.server.items() if n.startswith("log_scale/")
}
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, values in spread.items():
    if values.size > 100:
        axes.hist(np.log10(values), 40, alpha=0.6, density=True, label=name)
axes.set_xlabel("log10 of the prior's standard deviation of a weight")
axes.set_ylabel("density of weights")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. On the toy, start FedAvg with only one local step per round. Where does it go?
# 2. Which method does best with few rows? Take 40 rows of each digit in all, and ten held-out clients (hint: `datasets.per_class`).
# 3. What does FedABML's `kl` (the paper's lambda) do to the learnt spread?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. With one step FedAvg is gradient descent on all rows: it goes to the plus.
one = fedavg.build(line, lr=0.3, epochs=1, momentum=0.0, **common)
last = pyrofl.fit(one, toy, rounds=20 * rounds, progress=False).state.server
print(
    next(iter(last.values())).numpy().round(2), "and the best for all rows is", everything.round(2)
)

# %% tags=["hide-cell"]
# 2. After two epochs FedABML and FedAvg are about equal and Reptile is behind, on this one split.
few = federations.split(datasets.per_class(digits, 40), "labels:2", 10, seed=0, held_out=10)
for name, build in builders.items():
    state = pyrofl.fit(build(0), few, rounds=rounds, progress=False).state
    score = pyrofl.evaluate(
        build(2), few, state, population="held_out", model="personal", adapted="adapt"
    )
    print(f"{name:8s} {score.mean('accuracy'):.3f}")

# %% tags=["hide-cell"]
# 3. A larger lambda holds clients nearer to the prior. After these few rounds the median spread differs by a tenth only.
for kl in (0.01, 0.1, 1.0):
    state = pyrofl.fit(
        fedabml.build(net, lr=0.1, draws=2, kl=kl), clients, rounds=rounds // 3, progress=False
    ).state
    values = torch.cat(
        [v.exp().flatten() for n, v in state.server.items() if n.startswith("log_scale/")]
    )
    print(f"kl {kl}: median standard deviation {float(values.median()):.4f}")
