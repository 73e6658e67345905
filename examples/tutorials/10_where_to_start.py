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
# # 10. Meta-learning: Reptile, MAML and FedABML
#
# Train an initialization from which a new client reaches a good model in a few steps. Example: a new hospital with twenty
# rows joins. The best model *on average* is not the best start for its local training, which is called **fine-tuning**.
# **Meta-learning** optimizes this initialization.
#
# After this lesson (about 65 minutes) you can
#
# - state the server steps of Reptile and FedABML, and derive what MAML optimizes,
# - evaluate methods on held-out clients after 0, 1, 2, ... epochs of fine-tuning,
# - explain what a *learned prior* adds to a learned initialization.
#
# You need lessons 1 to 3.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import Federation, datasets, federations, likelihoods, nets
from pyrofl.figures import moving
from pyrofl.models import fedabml, fedavg, perfedavg, reptile

# %% tags=["parameters"]
rounds, seeds, full = 30, 3, True
# quick: rounds, seeds, full = 3, 1, False

# %% [markdown]
# ## Two clients, two weights
#
# Two clients have a linear model with two weights. The input of weight 1 has a large variance at client 1 and a tenth of it
# at client 2, that of weight 2 the reverse. So the loss of client 1 is steep in weight 1 and flat in weight 2.

# %%
source = torch.Generator().manual_seed(0)
flat = 0.1**0.5
x1 = torch.randn(50, 2, generator=source, dtype=torch.float64) * torch.tensor([1.0, flat])
x2 = torch.randn(50, 2, generator=source, dtype=torch.float64) * torch.tensor([flat, 1.0])
y1, y2 = (
    x1[:, 0] + 0.1 * torch.randn(50, generator=source),
    x2[:, 1] + 0.1 * torch.randn(50, generator=source),
)
toy = Federation.from_arrays({"client 1": (x1, y1), "client 2": (x2, y2)}).to("cpu", torch.float64)
optimum = [torch.linalg.lstsq(x, y).solution.numpy() for x, y in ((x1, y1), (x2, y2))]
everything = torch.linalg.lstsq(torch.cat([x1, x2]), torch.cat([y1, y2])).solution.numpy()
print(
    "optimum of client 1",
    optimum[0].round(2),
    " of client 2",
    optimum[1].round(2),
    " of all rows",
    everything.round(2),
)

# %% [markdown]
# ## Three methods
#
# Each round the server sends an initialization $w$, and client $j$ trains from it to $w_j$. Let $\bar w$ be the mean of the
# $w_j$, weighted by rows. The methods differ in the server step:
#
# - **FedAvg** (lesson 1): $w \leftarrow \bar w$.
# - **Reptile** (Nichol and others, 2018): $w \leftarrow w + \epsilon\, (\bar w - w)$ with a step $0 < \epsilon \le 1$, by
#   default 0.5.
# - **FedABML** (Liu and others, 2023) learns a prior $N(m, s^2)$ of each weight instead of $w$. A client starts its normal
#   posterior at this prior, improves it by `steps` gradient steps on the ELBO of lesson 3, in which the KL divergence has the
#   weight `kl`, and moves mean and variance of the prior towards this posterior, by the fraction `lr_prior`. The server
#   averages the clients' $m$ and $\log s$.
#
# The figure shows $w$, or $m$, after each round. Ellipses are the losses of the clients, crosses their minima.

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
        logger=lambda run, _: where.append(next(iter(run.state.server.values())).flatten().numpy()),
        progress=False,
    )
    paths[name] = np.array(where)
    print(f"{name} converges to", paths[name][-1].round(2))


def show(axes, t):
    grid = np.linspace(-0.6, 1.6, 60)
    for j, (x, y) in enumerate(((x1, y1), (x2, y2))):
        loss = [[float(((x @ torch.tensor([a, b]) - y) ** 2).mean()) for a in grid] for b in grid]
        axes.contour(grid, grid, loss, levels=[0.03, 0.1, 0.3], colors=f"C{j}", alpha=0.4)
        axes.plot(*optimum[j], "x", color=f"C{j}")
    for k, (name, path) in enumerate(paths.items()):
        axes.plot(*path[: t + 1].T, "-", color=f"C{k + 2}", linewidth=1)
        axes.plot(*path[t], "os^"[k], color=f"C{k + 2}", markersize=12 - 4 * k, label=name)
    axes.plot(*everything, "k+", markersize=10, label="optimum of all rows")
    axes.set_xlabel("weight 1")
    axes.set_ylabel("weight 2")
    axes.legend(fontsize=8, loc="lower left")


moving(show, range(rounds), size=(5, 4.2), title=lambda t: f"round {t + 1}")

# %% tags=["remove-cell"]
if full:
    away = {name: np.linalg.norm(path - everything, axis=1) for name, path in paths.items()}
    assert all(0.02 < each[-1] < 0.2 for each in away.values())
    assert np.abs(paths["FedAvg"][-1] - paths["Reptile"][-1]).max() < 0.001
    near = {n: int((np.linalg.norm(p - p[-1], axis=1) < 0.02).argmax()) for n, p in paths.items()}
    assert min(near, key=near.get) == "FedAvg"
    curvature = [(x**2).mean(0).numpy() for x in (x1, x2)]
    assert 5 < curvature[0][0] / curvature[1][0] < 20

# %% [markdown]
# The plus is the minimum for all rows together. FedAvg and Reptile end at the same point, because a server step changes
# nothing where $\bar w = w$; Reptile needs more rounds. The point is not the plus: this is the drift of lesson 1, where
# clients with a steep loss count less after several local steps. As a start for fine-tuning this is no error: a client corrects
# its steep weight in a few steps, its flat weight hardly, so the start should favor the client for which a weight is flat.
#
# ## Held-out clients
#
# Handwritten digits are split over fifty clients with at most two classes each. Ten clients train. The other forty are
# **held out** (`held_out=40`, `population="held_out"`): they do not take part in the training. Each then fine-tunes a copy of
# the model on its training rows, for `fine_tune` epochs (`adaptation="fine_tune"`), and is evaluated on its test rows. One
# fit is evaluated after different numbers of epochs.

# %%
digits = datasets.load("digits")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
plain = {"lr": 0.03, "momentum": 0.0}
builders = {
    "FedAvg": lambda tune: fedavg.build(net, fine_tune=tune, **plain),
    "Reptile": lambda tune: reptile.build(net, fine_tune=tune, **plain),
    "FedABML": lambda tune: fedabml.build(net, fine_tune=tune, lr=0.1, num_particles=2),
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
                **({"model": "personal", "adaptation": "fine_tune"} if tune else {"model": "global"}),
            ).mean("accuracy")
            for tune in epochs
        ])  # fmt: skip
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for name, runs in found.items():
    error = np.std(runs, 0) / max(1, seeds - 1) ** 0.5
    axes.errorbar(epochs, np.mean(runs, 0), error, marker="o", capsize=3, label=name)
axes.set(xlabel="epochs of fine-tuning", ylabel="accuracy of new clients (± standard error)")
axes.legend()
plt.show()

# %%
for name, runs in found.items():
    print(f"{name:8s}", [f"{v:.3f}" for v in np.mean(runs, 0)], "after epochs", epochs)

# %% tags=["remove-cell"]
if full:
    reached = {name: np.mean(runs, 0) for name, runs in found.items()}
    assert all(each[0] < 0.6 and each[1] > 0.8 and each[-1] > 0.9 for each in reached.values())
    others = np.maximum(reached["Reptile"], reached["FedABML"])
    assert (reached["FedAvg"][2:] > others[2:] - 0.01).all()
    assert (reached["FedAvg"] > reached["Reptile"])[:3].all()

# %% [markdown]
# Without fine-tuning all accuracies are low: a held-out client has two classes, and the global model predicts ten. One epoch
# raises them above 0.8, ten epochs above 0.9. FedAvg with fine-tuning is a strong baseline: from two epochs on
# no method is clearly better. Reptile, which makes half the step, is behind it at first. The learning rates were not tuned for this comparison.
#
# ## MAML: differentiate through the gradient step
#
# MAML (model-agnostic meta-learning; Finn and others, ICML 2017) chooses $w$ to minimize the loss $L_j$ of client $j$ *after
# one gradient step* with learning rate $\eta$, summed over clients:
#
# $$\min_w \sum_j L_j\big(w - \eta \nabla L_j(w)\big).$$
#
# The derivative of a term with respect to $w$ follows from the chain rule. With $w' = w - \eta \nabla L_j(w)$ and the matrix
# $H_j$ of second derivatives of $L_j$ (Hessian), it is
#
# $$\big(I - \eta H_j(w)\big)\, \nabla L_j(w').$$
#
# ### Derivation: MAML with two parabolas
#
# Let $L_j(w) = \frac{a_j}{2}(w - m_j)^2$, as in lesson 1. One step ends at $w' = w - \eta a_j (w - m_j)$, whose distance to the
# minimum is $w' - m_j = (1 - \eta a_j)(w - m_j)$. The loss after the step, and its derivative with respect to $w$, are
#
# $$\frac{a_j}{2} (1 - \eta a_j)^2 (w - m_j)^2, \qquad a_j (1 - \eta a_j)^2 (w - m_j).$$
#
# One factor $1 - \eta a_j$ comes from the smaller gradient at $w'$, the other from the derivative of the step, $I - \eta H_j$.
# The sum of the derivatives over clients is zero at
#
# $$w = \frac{\sum_j a_j (1 - \eta a_j)^2 m_j}{\sum_j a_j (1 - \eta a_j)^2}.$$
#
# Compared with the minimum of the total loss, whose weights are $a_j$, **clients with a steep loss count less** (for
# $\eta a_j < 1$): one step already brings them close to their minimum.
#
# **Per-FedAvg** (Fallah and others, NeurIPS 2020) is federated MAML: local steps follow this derivative. `order="exact"`
# computes it exactly, `"first"` omits the factor $I - \eta H_j$, and `"hessian_free"` estimates gradients and Hessian from
# separate minibatches:

# %%
tuned = {"population": "held_out", "model": "personal", "adaptation": "fine_tune"}
orders = {"exact": [], "hessian_free": [], "first": []}
for order, accuracies in orders.items():
    for seed in range(seeds):
        clients = federations.split(digits, "labels:2", 10, seed=seed, held_out=40)
        method = perfedavg.build(net, order=order)
        run = pyrofl.fit(method, clients, rounds=rounds, seed=seed, progress=False)
        accuracies.append(run.evaluate(**tuned).mean("accuracy"))
    print(f"Per-FedAvg, {order:12s} after one step: accuracy {np.mean(accuracies):.3f}")

# %% tags=["remove-cell"]
if full:
    assert all(0.8 < np.mean(each) < 0.95 for each in orders.values())
    assert all(max(orders, key=lambda o: orders[o][seed]) == "first" for seed in range(seeds))

# %% [markdown]
# After **one gradient step** on its training rows a held-out client reaches an accuracy between 0.8 and 0.95. Second
# derivatives do not help here: `"first"` is the most accurate with every seed.
#
# ## A learned prior
#
# FedABML learns the mean of each weight (the initialization), and also its standard deviation $s$. A small $s$ keeps a client's
# weight close to the initialization; with a large one it follows the rows of the client. The larger the change of a weight
# during local training, the larger $s$ becomes. All begin with $s = 0.05$. The figure shows $s$ in the first layer (`fc1`) and
# in the last one (`head`):

# %%
clients = federations.split(digits, "labels:2", 10, seed=0, held_out=40)
state = pyrofl.fit(builders["FedABML"](0), clients, rounds=rounds, progress=False).state
learned = {
    n: state.server[f"log_scale/{n}.weight"].exp().flatten().numpy() for n in ("fc1", "head")
}
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
bins = np.linspace(0.045, 0.12, 31)
for name, values in learned.items():
    axes.hist(
        values.clip(max=0.12),
        bins,
        weights=np.full(len(values), 1 / len(values)),
        alpha=0.6,
        label=name,
    )
axes.set_xlabel("prior standard deviation of a weight (last bar: 0.12 and more)")
axes.set_ylabel("fraction of the layer's weights")
axes.legend(fontsize=8)
plt.show()
print({name: f"{100 * (values > 0.06).mean():.0f}% above 0.06" for name, values in learned.items()})

# %% tags=["remove-cell"]
if full:
    above = {name: (values > 0.06).mean() for name, values in learned.items()}
    assert above["fc1"] < 0.03
    assert 0.35 < above["head"] < 0.5

# %% [markdown]
# The first layer keeps the initial value almost everywhere: local training hardly changes it. In the last layer, which has to be
# adapted to the two classes of a client, 4 of 10 weights have a clearly larger standard deviation.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Exercise 1 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `adaptability(run)`: the mean accuracy of the held-out clients after fine-tuning, minus that of the global model before.
# `run.evaluate` takes `population="held_out"`, and `model` and `adaptation` as in the lesson.

# %% tags=["hide-cell", "solution"]
# The global model is the same for all clients; the personal one begins there and trains on the client's rows.


def adaptability(run):
    before = run.evaluate(population="held_out", model="global")
    after = run.evaluate(population="held_out", model="personal", adaptation="fine_tune")
    return after.mean("accuracy") - before.mean("accuracy")


# %% tags=["hide-cell", "test"]
quick = federations.split(datasets.load("digits"), "labels:2", clients=8, held_out=4)
fitted = pyrofl.fit(
    fedavg.build(nets.build("mlp:16", (64,), 10), fine_tune=3), quick, rounds=3, progress=False
)
both = [
    fitted.evaluate(population="held_out", **how).values["accuracy"].mean()
    for how in ({"model": "global"}, {"model": "personal", "adaptation": "fine_tune"})
]
found = adaptability(fitted)
assert np.shape(found) == (), "return one number"
assert found > 0, "fine-tuning helps these clients: check the order of the difference"
assert np.isclose(found, float(both[1] - both[0]), atol=1e-5), (
    "compare the accuracy of held-out clients before and after fine-tuning"
)

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `maml_gradient(w, a, m, eta)`: the derivative of the loss of one client after one gradient step, with respect to the start
# `w`. The loss is the parabola of the derivation.

# %% tags=["hide-cell", "solution"]
# Two factors 1 - eta a.


def maml_gradient(w, a, m, eta):
    return a * (1 - eta * a) ** 2 * (w - m)


# %% tags=["hide-cell", "test"]
def after(w, a, m, eta):
    return a / 2 * (w - eta * a * (w - m) - m) ** 2


for given in ((2.0, 3.0, 1.0, 0.1), (0.0, 1.0, 4.0, 0.5)):
    w, *others = given
    change = (after(w + 1e-5, *others) - after(w - 1e-5, *others)) / 2e-5
    assert np.isclose(maml_gradient(*given), change), (
        "expected the slope of `after` at w: compare with its difference quotient"
    )

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `start(a, m, eta)`: the initialization that MAML finds for clients with curvatures `a` and minima `m` (arrays).

# %% tags=["hide-cell", "solution"]
# Weights a (1 - eta a)^2.


def start(a, m, eta):
    weight = a * (1 - eta * a) ** 2
    return (weight * m).sum() / weight.sum()


# %% tags=["hide-cell", "test"]
curvature, minimum = np.array([1.0, 4.0]), np.array([0.0, 1.0])
assert np.isclose(start(curvature, minimum, 0.0), 0.8), (
    "with eta = 0 it is the minimum of the total loss: weights are the curvatures a"
)
assert np.isclose(start(curvature, minimum, 0.25), 0.0), (
    "a client that reaches its minimum in one step does not count"
)
assert np.isclose(start(curvature, minimum, 0.1), 1.44 / 2.25), (
    "at MAML's start the gradients of exercise 2 add up to zero"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. In the example with two clients, fit FedAvg with one local step per round. To which point does it converge?
# 2. Which method is best with few rows, after two epochs? Use 40 rows of each digit in total, `datasets.per_class(digits, 40)`,
#    and ten held-out clients.
# 3. How does the argument `kl` of FedABML change the learned standard deviations? Try 0.01, 0.1 and 1.0; 1.0 is Bayes' rule.

# %% tags=["hide-cell", "solution"]
# 1. With one local step FedAvg is gradient descent on all rows: it converges to the plus.
one = fedavg.build(line, lr=0.3, epochs=1, momentum=0.0, **common)
last = next(iter(pyrofl.fit(one, toy, rounds=20 * rounds, progress=False).state.server.values()))
print(last.numpy().round(2), "; optimum of all rows:", everything.round(2))

# %% tags=["hide-cell", "solution"]
# 2. After two epochs FedABML and FedAvg are about equal, and Reptile is less accurate (one seed).
after_two = {}
few = federations.split(datasets.per_class(digits, 40), "labels:2", 10, seed=0, held_out=10)
for name, build in builders.items():
    state = pyrofl.fit(build(0), few, rounds=rounds, progress=False).state
    score = pyrofl.evaluate(
        build(2), few, state, population="held_out", model="personal", adaptation="fine_tune"
    )
    after_two[name] = score.mean("accuracy")
    print(f"{name:8s} {after_two[name]:.3f}")

# %% tags=["hide-cell", "solution"]
# 3. A larger `kl` keeps clients closer to the prior. After these few rounds the median standard deviations differ by a tenth only.
medians = []
for kl in (0.01, 0.1, 1.0):
    state = pyrofl.fit(
        fedabml.build(net, lr=0.1, num_particles=2, kl=kl),
        clients,
        rounds=rounds // 3,
        progress=False,
    ).state
    values = torch.cat(
        [v.exp().flatten() for n, v in state.server.items() if n.startswith("log_scale/")]
    )
    medians.append(float(values.median()))
    print(f"kl {kl}: median standard deviation {medians[-1]:.4f}")

# %% tags=["remove-cell"]
if full:
    assert np.abs(last.numpy().flatten() - everything.flatten()).max() < 0.005
    assert abs(after_two["FedABML"] - after_two["FedAvg"]) < 0.03
    assert after_two["Reptile"] < after_two["FedAvg"] - 0.03
    assert abs(max(medians) / min(medians) - 1.1) < 0.05
