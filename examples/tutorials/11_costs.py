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
# # 11. What federation costs, and what it buys
#
# Nobody federates for fun. It *buys* better predictions, by learning from rows that may not be pooled. It *costs* accuracy of the posterior, messages, time, and noise, if one wants a promise of privacy.
# All of these can be measured.
#
# After these fifteen minutes you can
#
# - put a federated posterior next to the one from pooled rows, number by number,
# - say for whom federation pays, with an interval,
# - count bytes,
# - read an epsilon, and see what it costs,
# - add numbers that nobody sees.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, figures, reference
from pyrofl.models import pvi

# %% tags=["parameters"]
rounds, draws, hospitals = 20, 2000, 300
# quick: rounds, draws, hospitals = 3, 60, 20

# %% [markdown]
# ## What it buys
#
# Twelve clinics measure how a dose changes a pain score. Some have 40 patients, some only four. Each has its own slope $b_j$, and the slopes are similar.

# %%
rng = np.random.default_rng(2)
sizes = [4, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40]
slopes = 1.0 + 0.4 * rng.normal(size=12)


def patients(j, count):
    dose = rng.uniform(-1, 1, size=(count, 1))
    return dose, slopes[j] * dose[:, 0] + rng.normal(size=count)


train = [patients(j, n) for j, n in enumerate(sizes)]
test = [patients(j, 200) for j in range(12)]
clinics = {f"{n} patients ({j})": (*train[j], *test[j]) for j, n in enumerate(sizes)}
data = Federation.of(clinics).to("cpu", torch.float64)


def related(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        b = pyro.sample("b", dist.Normal(mu, tau))
        with batch.rows():
            pyro.sample("pain", dist.Normal(b * batch.x[..., 0], 1.0), obs=batch.y)


run = pyrofl.fit(
    pvi.hierarchical(related, data, shared="mu tau"), data, rounds=rounds, progress=False
)
federated = run.to_arviz(draws=draws, corrected=draws >= 400)
slope = {"federated": federated["posterior"]["b"].mean(("chain", "draw")).values}
# Alone: the same prior for every clinic (mean 0, wide), no other clinic's rows.
slope["alone"] = np.array([(x[:, 0] @ y) / (x[:, 0] @ x[:, 0] + 1 / 4.0) for x, y in train])
pooled = sum(x[:, 0] @ y for x, y in train) / sum(x[:, 0] @ x[:, 0] for x, _ in train)
slope["one for all"] = np.full(12, pooled)


def loss(b):
    """Return squared errors on test patients, [clinic, patient]."""
    return np.array([(y - b[j] * x[:, 0]) ** 2 for j, (x, y) in enumerate(test)])


figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for k, rival in enumerate(("alone", "one for all")):
    gain = loss(slope[rival]) - loss(slope["federated"])
    error = 1.96 * gain.std(1) / gain.shape[1] ** 0.5
    axes.errorbar(
        np.arange(12) + 0.15 * (k - 0.5), gain.mean(1), error, fmt="o", label=f"against {rival}"
    )
axes.axhline(0, color="black", linewidth=0.8)
axes.set_xticks(range(12), sizes)
axes.set_xlabel("training patients of the clinic")
axes.set_ylabel("squared error saved, 95% interval")
axes.legend(fontsize=8)
plt.show()

# %%
for rival in ("alone", "one for all"):
    gain = (loss(slope[rival]) - loss(slope["federated"])).mean(1)
    print(
        f"against {rival:12s} the six small clinics save {gain[:6].mean():.3f}, the six large ones {gain[6:].mean():.3f}"
    )

# %% [markdown]
# Small clinics gain most against being alone. Against one slope for all, the clinics whose own slope is far from the common one gain. (From tables: `pyrofl answer` makes this figure for a comparison on the command line.)
#
# ## What it costs: the posterior
#
# The same program with all rows in one place, by NUTS:

# %%
exact = reference.nuts(
    related, data, draws=draws // 2, warmup=draws // 4, chains=2, shared="mu tau", jit=True
)
table = reference.cost(federated, exact)
table[["mean", "sd", "difference", "ratio"]].loc[table["variable"].isin(["mu", "tau", "b"])].round(
    2
)

# %%
figures.cost(table)

# %% [markdown]
# `difference` and `ratio` say what federation, and the approximation behind it, did to the posterior: almost nothing here. And in bytes:

# %%
told = run.rounds
sent = sum(float(told[c].sum()) for c in told.columns if "bytes" in c)
row = data.x[0].numel() * 8 + 8
print(
    f"all messages of {len(told)} rounds: {sent / 1024:.1f} KiB; all rows: {sum(sizes) * row / 1024:.1f} KiB"
)

# %% [markdown]
# With few rows, messages are larger than the data. Federation is not about saving bytes here: rows do not move because they *must not*.
#
# ## What a promise of privacy costs
#
# Differential privacy adds noise to what clients send, and promises: whatever anybody does with the result, they can hardly tell whether a client's rows were used. The promise has a
# number, **epsilon**: small is strong. Many small hospitals fit one logistic regression.

# %%
source = torch.Generator().manual_seed(0)
weights = torch.tensor([1.0, -0.5], dtype=torch.float64)
x = torch.randn(10 * hospitals, 2, generator=source, dtype=torch.float64)
y = (torch.rand(len(x), generator=source) < torch.sigmoid(x @ weights)).double()
parts = torch.arange(len(x)).split(10)
many = Federation(x, y, parts, [p[:0] for p in parts])


def logistic(received, local, batch):
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(logits=(w * batch.x).sum(-1)), obs=batch.y)


method = pvi.hierarchical(logistic, many, shared="w", damping=0.5, steps=4, draws=16)
results = []
for noise in (None, 2.0, 4.0, 8.0):
    # The seed makes this simulation repeatable; noise that is to protect anyone has none.
    promise = noise and pyrofl.Privacy(clip=4.0, noise=noise, delta=1e-4, where="client", seed=0)
    fitted = pyrofl.fit(method, many, rounds=5, privacy=promise or None, progress=False)
    w = fitted.posterior(400, ids=torch.tensor([0]))["w"][:, 0]
    epsilon = fitted.privacy.epsilon if promise else float("inf")
    results.append((epsilon, float((w.mean(0) - weights).norm()), float(w.std(0).norm())))
    print(
        f"epsilon {epsilon:6.2f}: error of the mean {results[-1][1]:.3f}, sd of the posterior {results[-1][2]:.3f}"
    )

figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
private = np.array(results[1:])
axes.loglog(private[:, 0], private[:, 1], "o-", label="error of the mean")
axes.loglog(private[:, 0], private[:, 2], "s--", label="sd that the posterior claims")
axes.axhline(results[0][1], color="C0", linestyle=":", label="error without noise")
axes.set_xlabel("epsilon of each hospital")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# Remember two things. The price falls with the number of clients (exercise 2). And the posterior **does not know of the noise**: it claims to be almost as sure as before while its mean is far off.
#
# ## Adding numbers that nobody sees
#
# Noise is a promise to everybody, also against the readers of the result. If only the *server* should not read single messages, there is a way without any loss. Every two clients
# agree on a secret random number. One adds it, the other subtracts it.

# %%
secret = np.random.default_rng(7)
values = {"A": 3, "B": 5, "C": 10}
pairs = {
    ("A", "B"): secret.integers(-1000, 1000),
    ("A", "C"): secret.integers(-1000, 1000),
    ("B", "C"): secret.integers(-1000, 1000),
}
masked = {
    n: v
    + sum(m for (a, _), m in pairs.items() if a == n)
    - sum(m for (_, b), m in pairs.items() if b == n)
    for n, v in values.items()
}
print(
    "the server sees",
    {n: int(v) for n, v in masked.items()},
    "and their sum",
    int(sum(masked.values())),
)

# %% [markdown]
# `pyrofl.privacy.Masks` does this for whole messages, with keys that two clients agree on without a secret channel. The page on privacy says what it protects, and what it does not.
#
# ## Exercises
#
# 1. Make all slopes equal (`0.0` instead of `0.4`). Who gains now, and against whom?
# 2. Use 30 hospitals instead of 300. What is left of the mean at the same noise?
# 3. In the sum above, what can the server compute if B and C tell it all that they know?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. With equal slopes one number for all is right, and the federated model comes near to it: tau becomes smaller. Against being alone
# small clinics still gain; against one number for all nobody does. (The truth is 1 and the mean of dose^2 is 1/3.)
rng = np.random.default_rng(2)
slopes = 1.0 + 0.0 * rng.normal(size=12)
same = Federation.of({n: patients(j, sizes[j]) for j, n in enumerate(clinics)}).to(
    "cpu", torch.float64
)
again = pyrofl.fit(
    pvi.hierarchical(related, same, shared="mu tau"), same, rounds=rounds, progress=False
)
theirs = again.posterior(draws)["b"].mean(0).numpy()
dealt = [(same.x[r, 0].numpy(), same.y[r].numpy()) for r in same.train]
rivals = {
    "alone": np.array([(x @ y) / (x @ x + 1 / 4.0) for x, y in dealt]),
    "one for all": sum(x @ y for x, y in dealt) / sum(x @ x for x, _ in dealt),
}
for rival, b in rivals.items():
    gain = ((b - 1.0) ** 2 - (theirs - 1.0) ** 2) / 3
    print(
        f"against {rival:12s} small clinics save {gain[:6].mean():.3f}, large {gain[6:].mean():.3f}"
    )
print(
    f"tau: {float(again.posterior(draws)['tau'].mean()):.2f}, before {float(run.posterior(draws)['tau'].mean()):.2f}"
)

# %% tags=["hide-cell"]
# 2. The noise has the same size, and the sum is ten times smaller. The error is larger than the length of the true vector (1.12):
# nothing is left. (With 300 hospitals it was about as large as that length. These are single draws of the noise.)
few = Federation(
    x, y, parts[: max(3, hospitals // 10)], [p[:0] for p in parts[: max(3, hospitals // 10)]]
)
fitted = pyrofl.fit(
    pvi.hierarchical(logistic, few, shared="w", damping=0.5, steps=4, draws=16), few, rounds=5, progress=False,
    privacy=pyrofl.Privacy(clip=4.0, noise=4.0, delta=1e-4, where="client", seed=0),
)  # fmt: skip
w = fitted.posterior(400, ids=torch.tensor([0]))["w"][:, 0]
print(f"error of the mean {float((w.mean(0) - weights).norm()):.2f}")

# %% tags=["hide-cell"]
# 3. A's number: it subtracts what B and C sent from the sum, or takes their secrets off A's message.
print("A sent", int(sum(masked.values()) - values["B"] - values["C"]))
