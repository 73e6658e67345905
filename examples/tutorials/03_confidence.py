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
# # 3. Confidence weights: pFedVEM
#
# Learn how **pFedVEM** (Zhu, Ma and Blaschko, CVPR 2023) weights clients. FedAvg weights each client by its number of
# rows. pFedVEM weights it by its **confidence**, which also depends on the distance between the model of the client
# and the model of the server. The example: two people measure the length of planks, one of them four planks, the other
# sixteen.
#
# We compute the method three times: by hand, in closed form over many rounds, and in Pyro. All three give the same
# numbers.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import Federation, figures, likelihoods, nets
from pyrofl.figures import moving
from pyrofl.models import fedavg, pfedvem

# %% tags=["parameters"]
rounds, steps = 12, 400
# quick: rounds, steps = 3, 40

# %% [markdown]
# ## 1. One round by hand
#
# Client $j$ has a personal mean length $w_j$, close to a common length $w$. The confidence $\tau_j$ states how close. It
# is a precision (the inverse of a variance):
#
# $$w_j \sim N(w, 1/\tau_j), \qquad y_{ji} \sim N(w_j, 2^2).$$
#
# Client 1 has 4 rows with mean 1. Client 2 has 16 rows with mean 3. The server starts with $w = 0$, and
# both clients start with $\tau_j = 1$.
#
# **Client update.** Given $w$ and $\tau_j$, the posterior of $w_j$ is normal. Its precision is the sum of the precision
# of the rows, $p_j = n_j / 2^2$, and that of the prior, $\tau_j$:
#
# $$s_j^2 = \frac{1}{p_j + \tau_j},\qquad \mu_j = \frac{p_j \bar y_j + \tau_j w}{p_j + \tau_j}.$$
#
# Hence $\mu_1 = (1 \cdot 1 + 1 \cdot 0)/2$ and $\mu_2 = (4 \cdot 3 + 1 \cdot 0)/5$.

# %%
n, mean, w, tau = np.array([4.0, 16.0]), np.array([1.0, 3.0]), 0.0, np.ones(2)
p = n / 4
mu = (p * mean + tau * w) / (p + tau)
variance = 1 / (p + tau)
print("mu", mu.round(4), "variance", variance.round(4))

# %% [markdown]
# **Confidence** (equation 8 of the paper, here for one number):
#
# $$\tau_j = \frac{1}{s_j^2 + (\mu_j - w)^2}.$$
#
# The confidence is small if the posterior variance $s_j^2$ is large, or if the client is far from $w$.
# **Server update** (equation 9): the mean, weighted by confidence.
#
# $$w = \frac{\sum_j \tau_j \mu_j}{\sum_j \tau_j}.$$

# %%
tau = 1 / (variance + (mu - w) ** 2)
w = (tau * mu).sum() / tau.sum()
print("tau", tau.round(4), "  w", round(w, 4))

# %% [markdown]
# Client 2 has four times as many rows but a smaller weight, because it is far from the server's $w$. With weights
# proportional to the number of rows, $w$ would be closer to client 2:

# %%
print("w with weights by number of rows:", round((n * mu).sum() / n.sum(), 4))

# %% [markdown]
# ## 2. Many rounds in closed form
#
# Now repeat the round. The algorithm of the paper first computes $\tau_j$ from the posterior of the previous round, then
# updates $w_j$, then the server.


# %%
def closed_form(rounds, confidence=lambda variance, apart: 1 / (variance + apart)):
    w, mu, variance = 0.0, np.zeros(2), np.ones(2)
    path = []
    for _ in range(rounds):
        tau = confidence(variance, (mu - w) ** 2)
        mu, variance = (p * mean + tau * w) / (p + tau), 1 / (p + tau)
        w = (tau * mu).sum() / tau.sum()
        path.append((w, tau.copy(), mu.copy(), variance.copy()))
    return path


path = closed_form(rounds)
for t, (at, tau, mu, _) in enumerate(path[:5], 1):
    print(f"round {t}: w {at:.4f}, tau {tau.round(3)}, mu {mu.round(3)}")

# %% [markdown]
# Move the slider. The grey line is the server's $w$. Dotted curves are the priors of the clients around it, solid curves
# are their posteriors, and crosses are the means of their rows.

# %%
grid = np.linspace(-1.5, 4.5, 400)


def bell(centre, sd):
    return np.exp(-0.5 * ((grid - centre) / sd) ** 2) / sd / np.sqrt(2 * np.pi)


def show(axes, t):
    w, tau, mu, variance = path[t]
    for j, colour in enumerate(("C0", "C1")):
        axes.plot(grid, bell(mu[j], variance[j] ** 0.5), colour, label=f"client {j + 1}, posterior")
        axes.plot(
            grid, bell(w, tau[j] ** -0.5), colour, linestyle=":", label=f"client {j + 1}, prior"
        )
        axes.plot(mean[j], 0, "x", color=colour)
    axes.axvline(w, color="grey", label="server, w")
    axes.set_ylim(0, 2)
    axes.set_xlabel("length")
    axes.set_ylabel("density")
    axes.legend(fontsize=7, loc="upper left")


moving(show, range(rounds), title=lambda t: f"round {t + 1}")

# %% [markdown]
# In round 1 both clients have the same weight, because both start with the same $\tau_j$. (By hand, we computed $\tau_j$
# after the client updates, so client 2 had a smaller weight.) Later the server moves towards client 2, which has the
# smaller posterior variance, and the confidence of client 2 increases. Client 1 remains far from $w$ and keeps a small
# confidence.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
times = range(1, rounds + 1)
left.plot(times, [step[0] for step in path], "k", label="server, w")
for j in range(2):
    left.plot(times, [step[2][j] for step in path], f"C{j}", label=f"client {j + 1}")
    right.semilogy(times, [step[1][j] for step in path], f"C{j}", label=f"client {j + 1}")
left.set_ylabel("length")
right.set_ylabel("confidence tau")
for axes in (left, right):
    axes.set_xlabel("round")
    axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## 3. The same model in Pyro
#
# `pfedvem.build` accepts any network and likelihood. Here the network is a linear model with a constant input of 1,
# and all its parameters are Bayesian and personal (`head="*"`). Gradient steps replace the closed form; each round has
# enough of them to reach the optimum.

# %%
rng = np.random.default_rng(0)


def rows(count, centre):
    """Return `count` rows with sample mean `centre`."""
    y = rng.normal(size=count)
    return np.ones((count, 1)), y - y.mean() + centre


data = Federation.from_arrays({"client 1": rows(4, 1.0), "client 2": rows(16, 3.0)}).to(
    "cpu", torch.float64
)
line = nets.build("linear", input_shape=(1,), outputs=1)
method = pfedvem.build(
    line, head="*", likelihood=likelihoods.normal(2.0), head_epochs=steps, lr_head=0.02,
    momentum=0.0, num_particles=50,
)  # fmt: skip
start = {"loc/w": torch.zeros(1, dtype=torch.float64)}
run = pyrofl.fit(method, data, rounds=rounds, server_state=start, progress=False)
found = run.state.message
print(
    "Pyro        tau",
    found["tau"].numpy().round(3),
    " w",
    round(float(run.state.server["loc/w"]), 3),
)
print("closed form tau", path[-1][1].round(3), " w", round(path[-1][0], 3))

# %% [markdown]
# They agree up to the Monte Carlo noise of the gradients. (The tests of the library replace the gradient steps by the
# closed form; the results then agree to nine digits.)
#
# ## Handwritten digits
#
# Now use a real network. Handwritten digits are split across twenty clients. Each client holds five of the ten classes,
# and some have few rows. The *head* of the network (its last layer) is Bayesian and personal; the *base* (all other
# layers) is shared.

# %%
digits = pyrofl.datasets.load("digits")
clients = pyrofl.federations.split(digits, "slices:5", clients=20, test="labels_global")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
common = pyrofl.fit(fedavg.build(net, lr=0.05), clients, rounds=rounds, progress=False)
personal = pyrofl.fit(pfedvem.build(net, lr_base=0.01), clients, rounds=rounds, progress=False)
print(f"FedAvg, global model:     accuracy {common.evaluate(model='global').mean('accuracy'):.3f}")
print(
    f"pFedVEM, personal models: accuracy {personal.evaluate(model='personal').mean('accuracy'):.3f}"
)

# %% [markdown]
# Each client is tested on the classes that it holds. The figure shows the confidence of each client:

# %%
statistics = personal.statistics()
figures.confidence(statistics["tau"], statistics["deviation"], clients.sizes[: clients.clients])

# %% [markdown]
# ## Exercises
#
# 1. In the closed form, compute the weights from the posterior variance alone ($1/s_j^2$, an ablation in table 2 of the
#    paper), and from the deviation alone. What is the final $w$ of each?
# 2. Change the mean of client 2 from 3 to 1.2. Which client has the larger confidence now, and why?
# 3. Fit pFedVEM with `confidence="uncertainty"` on the digits. What is the accuracy?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. With the posterior variance alone, client 2 has the larger weight, because it has more rows. With both terms, the final w
# is even closer to client 2, because client 1 remains far from w and its confidence decreases. With the deviation alone, nothing
# changes: both clients start at w = 0 with a deviation of zero, so their confidence is infinite (capped here and in the library).
by = {
    "both": lambda variance, apart: 1 / (variance + apart),
    "uncertainty": lambda variance, apart: 1 / variance,
    "deviation": lambda variance, apart: 1 / np.maximum(apart, 1e-6),
}
for name, rule in by.items():
    print(f"{name:12s} w {closed_form(30, rule)[-1][0]:.3f}")

# %% tags=["hide-cell"]
# 2. Client 2: both clients are close to w now, and client 2 has the smaller posterior variance.
mean = np.array([1.0, 1.2])
w, tau, mu, _ = closed_form(30)[-1]
print("tau", tau.round(2), " w", round(w, 3))

# %% tags=["hide-cell"]
# 3. Change one argument. On this data set the difference in accuracy is small.
again = pyrofl.fit(
    pfedvem.build(net, lr_base=0.01, confidence="uncertainty"),
    clients,
    rounds=rounds,
    progress=False,
)
print(
    f"confidence from the variance alone: accuracy {again.evaluate(model='personal').mean('accuracy'):.3f}"
)
