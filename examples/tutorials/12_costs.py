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
# # 12. Benefits and costs of federation
#
# Measure what federation gains and what it costs. It *improves* predictions, because every client learns from rows that
# cannot be pooled. It *costs* accuracy of the posterior, communication and time, and differential privacy adds noise.
#
# After this lesson (about 65 minutes) you can
#
# - compare a federated posterior with the posterior of the pooled rows, variable by variable,
# - estimate which clients benefit from federation, with intervals,
# - compute the bytes that are sent,
# - interpret epsilon, and derive and measure the error of private results,
# - compute the sum of private numbers without revealing them.
#
# You need lessons 1 to 3, and the extra `privacy`: `pip install -e '.[privacy]'`. The cells compute for about two minutes.

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
rounds, draws, hospitals, full = 20, 2000, 300, True
# quick: rounds, draws, hospitals, full = 3, 60, 20, False

# %% [markdown]
# ## The benefit: better predictions
#
# Twelve clinics measure how a dose changes a pain score. The smallest have four patients, the largest has 40. Each clinic has
# its own slope $b_j$, and the slopes are similar. We compare three estimates of a clinic's slope:
#
# - federated: the posterior mean of a hierarchical model (lesson 2), fitted by PVI;
# - local: the posterior mean given the clinic's own patients, with the prior $N(0, 2^2)$ for every clinic;
# - one slope for all: least squares with the pooled patients.
#
# Each is tested on 200 further patients of the clinic. The figure shows by how much the federated estimate reduces the mean
# squared error of the other two.

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
data = Federation.from_arrays(clinics).to("cpu", torch.float64)


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
federated = run.to_arviz(draws=draws, corrected=full, progress=False)
slope = {"federated": federated["posterior"]["b"].mean(("chain", "draw")).values}
# The precisions of the patients and the prior add (lesson 2); the noise has the variance 1.
slope["local"] = np.array([(x[:, 0] @ y) / (x[:, 0] @ x[:, 0] + 1 / 4.0) for x, y in train])
pooled = sum(x[:, 0] @ y for x, y in train) / sum(x[:, 0] @ x[:, 0] for x, _ in train)
slope["one slope"] = np.full(12, pooled)


def loss(b):
    """Return squared errors on test patients, [clinic, patient]."""
    return np.array([(y - b[j] * x[:, 0]) ** 2 for j, (x, y) in enumerate(test)])


figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for k, rival in enumerate(("local", "one slope")):
    gain = loss(slope[rival]) - loss(slope["federated"])
    error = 1.96 * gain.std(1) / gain.shape[1] ** 0.5
    axes.errorbar(
        np.arange(12) + 0.15 * (k - 0.5),
        gain.mean(1),
        error,
        fmt="o",
        label=f"compared with {rival}",
    )
axes.axhline(0, color="black", linewidth=0.8)
axes.set_xticks(range(12), sizes)
axes.set_xlabel("training patients of the clinic")
axes.set_ylabel("reduction of squared error, 95% interval")
axes.legend(fontsize=8)
plt.show()

# %%
gains = {
    rival: (loss(slope[rival]) - loss(slope["federated"])).mean(1)
    for rival in ("local", "one slope")
}
by_distance = np.abs(slopes - slope["one slope"]).argsort()
for name, gain in {
    "local, six smallest clinics": gains["local"][:6],
    "local, six largest clinics": gains["local"][6:],
    "one slope, six true slopes closest to it": gains["one slope"][by_distance[:6]],
    "one slope, six true slopes farthest from it": gains["one slope"][by_distance[6:]],
}.items():
    print(f"mean reduction compared with {name}: {gain.mean():.3f}")

# %% tags=["remove-cell"]
assert (len(sizes), min(sizes), max(sizes)) == (12, 4, 40)
if full:
    assert gains["local"][:6].mean() > 5 * gains["local"][6:].mean() > 0
    assert gains["local"].argmax() == 0
    assert gains["local"][0] > 0.8
    assert (gains["local"] < 0).sum() >= 3
    assert (
        gains["one slope"][by_distance[6:]].mean() > 0 > gains["one slope"][by_distance[:6]].mean()
    )

# %% [markdown]
# Compared with local models, small clinics gain most on average, and one of the two smallest by far the most: its four patients led to
# a wrong slope. Not every clinic gains; for some the local slope happens to be closer. Compared with one slope for all, the clinics
# gain whose slope is far from it. (`pyrofl benefit` draws such a figure for methods compared on the command line.)
#
# ## The cost: accuracy of the posterior
#
# Draw from the exact posterior of the same model and the pooled rows, and compare (lesson 2):

# %%
exact = reference.hmc(related, data, shared="mu tau")
table = reference.compare_posteriors(federated, exact)
table[["mean", "sd", "difference", "ratio"]].loc[table["variable"].isin(["mu", "tau", "b"])].round(
    2
)

# %%
figures.posterior_differences(table)

# %% tags=["remove-cell"]
if full:
    of_model = table[table["variable"].isin(["mu", "tau", "b"])]
    assert of_model["difference"].abs().max() < 0.25
    assert (of_model["ratio"] - 1).abs().max() < 0.2

# %% [markdown]
# `difference` (in standard deviations) and `ratio` measure how much federation and the normal approximation change the posterior:
# here almost not at all. Now compare the bytes. A number of double precision has eight bytes, a row two numbers:

# %%
table = run.rounds
sent = sum(float(table[c].sum()) for c in table.columns if "bytes" in c)
row = data.x[0].numel() * 8 + 8
print(
    f"all messages of {len(table)} rounds: {sent / 1000:.0f} kB; all rows: {sum(sizes) * row / 1000:.0f} kB"
)

# %% tags=["remove-cell"]
assert sent > sum(sizes) * row
if full:
    assert round(sent / 1000) == 21
    assert round(sum(sizes) * row / 1000) == 3

# %% [markdown]
# With few rows, the messages (21 kB) are larger than the data (3 kB). The purpose of federation is not to save bytes: it is used
# because rows *may not* leave the clients.
#
# ## The cost of differential privacy
#
# Rows that stay on a client can still be inferred from its messages (lesson 4 has an example). **Differential privacy** adds noise
# to the messages. It guarantees that the result reveals little about whether the rows of any one client were used: every result
# is at most $e^\varepsilon$ times as probable with them as without them, and the reverse, except with a small probability $\delta$.
# **Epsilon**, $\varepsilon$, measures the guarantee. With $\varepsilon = 1$ the factor is 2.7; with $\varepsilon = 5$ it is 148, which
# protects little.
#
# Here 300 small hospitals with ten patients each fit one logistic regression with two weights. `clip` is the largest length of a
# message, $C$: longer ones are shortened. `noise_multiplier` is $z$: the noise has the standard deviation $zC$. With
# `where="client"` each hospital adds it to its own message, so that it need not trust the server.

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


method = pvi.hierarchical(logistic, many, shared="w", damping=0.5, steps=4, num_particles=16)
results = []
for noise in (None, 2.0, 4.0, 8.0):
    # The seed makes this simulation reproducible; do not set it for noise that protects real data.
    promise = noise and pyrofl.Privacy(
        clip=4.0, noise_multiplier=noise, delta=1e-4, where="client", seed=0
    )
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
axes.loglog(private[:, 0], private[:, 2], "s--", label="posterior standard deviation")
axes.axhline(results[0][1], color="C0", linestyle=":", label="error without noise")
axes.set_xlabel("epsilon per hospital")
axes.legend(fontsize=8)
plt.show()

# %% tags=["remove-cell"]
if full:
    assert (private[:, 1] > 5 * private[:, 2]).all()  # far from the truth
    assert abs(private[-1, 0] - 1) < 0.1
    assert private[-1, 1] > 1.12
    assert 4 < private[0, 0] < 6
    assert np.abs(private[:, 2] / results[0][2] - 1).max() < 0.5  # width almost unchanged

# %% [markdown]
# The error is the distance of the posterior mean from the true weights, whose length is 1.12. At an epsilon of about 1 the error is
# larger than the weights. The posterior **does not account for the noise**: its standard deviation is almost unchanged although
# its mean is far from the truth.
#
# ### Derivation: the error of a private mean
#
# The server computes the mean of $J$ clipped messages. **If the server is trusted** (`where="server"`, the default), it adds one
# normal noise with standard deviation $zC$ to the sum, and divides by $J$. **If each client adds its own noise**, the variances
# of $J$ independent noises add: the sum has the variance $J z^2 C^2$. The standard deviations of the noise in the mean are
#
# $$\text{server: } \frac{zC}{J}, \qquad \text{client: } \frac{\sqrt{J}\, zC}{J} = \frac{zC}{\sqrt J}.$$
#
# Epsilon is the same. **With a trusted server, ten times the clients reduce the noise to a tenth; without trust, only to
# $1/\sqrt{10}$**, as they reduce the sampling error of a mean.
#
# ## Secure sums
#
# Differential privacy also protects against readers of the published result. If only the *server* must not read single
# messages, secure sums do so without loss of accuracy: every two clients agree on a secret random number; one adds it to
# its message, the other subtracts it. A message then looks random, and the secrets cancel in the sum:

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
    "the server receives",
    {n: int(v) for n, v in masked.items()},
    "with sum",
    int(sum(masked.values())),
)

# %% [markdown]
# `pyrofl.privacy.Masks` applies this to complete messages. The page `examples/docs/privacy.md` of the repository states what it
# protects, and its limits.

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Exercise 1 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `affordable(net, clients, budget)`: the largest number of rounds of FedAvg whose messages have at most `budget` bytes in all. In
# a round every client receives and sends all parameters of the pyrofl network `net`, four bytes each; `net.shapes` maps the name of each
# parameter to its shape.

# %% tags=["hide-cell", "solution"]
# Two directions, four bytes, all clients. A round that is paid in part is no round.


def affordable(net, clients, budget):
    parameters = sum(shape.numel() for shape in net.shapes.values())
    return int(budget // (2 * 4 * parameters * clients))


# %% tags=["hide-cell", "test"]
quick = pyrofl.federations.split(pyrofl.datasets.load("digits"), "iid", clients=5)
small = pyrofl.nets.build("mlp:4", (64,), 10)
fitted = pyrofl.fit(pyrofl.models.fedavg.build(small), quick, rounds=3, progress=False)
sent = sum(record.bytes_down + record.bytes_up for record in fitted.records)
assert affordable(small, 5, sent) == 3, (
    f"three rounds of this network with five clients: {sent} bytes"
)
assert affordable(small, 5, sent - 1) == 2, "one byte less: the third round cannot be completed"
assert affordable(small, 10, sent) == 1, "twice the clients: twice the bytes per round"
assert affordable(small, 5, 0) == 0, "without a budget there is no round"
assert isinstance(affordable(small, 5, sent), int), "a number of rounds is an integer"

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `noise_sd(clip, multiplier, clients, where)`: the standard deviation of the noise in the mean of the clients' clipped
# messages. `where` is `"server"` or `"client"`.

# %% tags=["hide-cell", "solution"]
# The noise of the sum, divided by the number of clients.


def noise_sd(clip, multiplier, clients, where):
    return multiplier * clip / (clients if where == "server" else clients**0.5)


# %% tags=["hide-cell", "test"]
assert np.isclose(noise_sd(2.0, 1.5, 10, "server"), 0.3), (
    "server: one noise is added to the sum; the mean of ten clients has a tenth of it"
)
assert np.isclose(noise_sd(2.0, 1.5, 100, "server"), 0.03), (
    "server: ten times the clients, a tenth of the noise"
)
assert np.isclose(noise_sd(2.0, 1.5, 100, "client"), 0.3), (
    "client: the sum has a hundred independent noises; how do their variances add?"
)

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# Write `messages(numbers, secrets)`: what the clients send in a secure sum, [clients]. Clients $i < j$ share `secrets[i, j]`; $i$ adds it
# to its number, $j$ subtracts it. Entries on and below the diagonal have no meaning.

# %% tags=["hide-cell", "solution"]
# Row sums of the upper triangle are added, column sums subtracted. The total of all messages is that of the numbers.


def messages(numbers, secrets):
    upper = np.triu(secrets, 1)
    return numbers + upper.sum(1) - upper.sum(0)


# %% tags=["hide-cell", "test"]
shared = np.array([[0.0, 5.0, -2.0], [0.0, 0.0, 7.0], [0.0, 0.0, 0.0]])
below = np.array([[9.0, 0.0, 0.0], [9.0, 8.0, 0.0], [7.0, 9.0, 9.0]])
sent = messages(np.array([1.0, 2.0, 3.0]), shared)
assert np.shape(sent) == (3,), "expected one message for each client"
assert np.isclose(np.sum(sent), 6.0), "the secrets must cancel in the sum"
assert np.allclose(sent, [1 + 5 - 2, 2 - 5 + 7, 3 + 2 - 7]), (
    "of clients i < j, client i adds the secret, client j subtracts it"
)
assert np.allclose(messages(np.array([1.0, 2.0, 3.0]), shared + below), sent), (
    "use only entries above the diagonal"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Make all true slopes equal to 1 (`0.0` instead of `0.4`). Which clinics gain now, and compared with which model?
# 2. Use 30 hospitals instead of 300, with the noise multiplier 4.0. How large is the error?
# 3. In the sum above, what can the server compute if B and C reveal all that they know?

# %% tags=["hide-cell", "solution"]
# 1. With equal slopes, one slope for all is the correct model. The federated model is close to it: tau is smaller. Compared with
# local models small clinics still gain; compared with one slope no clinic gains. (The true slope is 1, and the mean of dose^2 is 1/3.)
rng = np.random.default_rng(2)
slopes = 1.0 + 0.0 * rng.normal(size=12)
same = Federation.from_arrays({n: patients(j, sizes[j]) for j, n in enumerate(clinics)}).to(
    "cpu", torch.float64
)
again = pyrofl.fit(
    pvi.hierarchical(related, same, shared="mu tau"), same, rounds=rounds, progress=False
)
theirs = again.posterior(draws)["b"].mean(0).numpy()
local_rows = [(same.x[r, 0].numpy(), same.y[r].numpy()) for r in same.train]
rivals = {
    "local": np.array([(x @ y) / (x @ x + 1 / 4.0) for x, y in local_rows]),
    "one slope": sum(x @ y for x, y in local_rows) / sum(x @ x for x, _ in local_rows),
}
equal = {}
for rival, b in rivals.items():
    equal[rival] = gain = ((b - 1.0) ** 2 - (theirs - 1.0) ** 2) / 3
    print(
        f"reduction compared with {rival:9s}: small clinics {gain[:6].mean():.3f}, large clinics {gain[6:].mean():.3f}"
    )
after, before = (float(each.posterior(draws)["tau"].mean()) for each in (again, run))
print(f"tau: {after:.2f}, before {before:.2f}")

# %% tags=["hide-cell", "solution"]
# 2. The error is 1.5 instead of 1.1, larger than the length of the true weights (1.12): the estimate is useless. These are single draws
# of the noise. By the derivation the noise of a mean is 10^1/2 times larger; here the prior keeps the estimate near zero.
few = Federation(
    x, y, parts[: max(3, hospitals // 10)], [p[:0] for p in parts[: max(3, hospitals // 10)]]
)
fitted = pyrofl.fit(
    pvi.hierarchical(logistic, few, shared="w", damping=0.5, steps=4, num_particles=16), few, rounds=5, progress=False,
    privacy=pyrofl.Privacy(clip=4.0, noise_multiplier=4.0, delta=1e-4, where="client", seed=0),
)  # fmt: skip
w = fitted.posterior(400, ids=torch.tensor([0]))["w"][:, 0]
error = float((w.mean(0) - weights).norm())
print(f"error of the mean {error:.2f}")

# %% tags=["hide-cell", "solution"]
# 3. The number of A: subtract the numbers of B and C from the sum, or subtract their secrets from the message of A.
print("A sent", int(sum(masked.values()) - values["B"] - values["C"]))

# %% tags=["remove-cell"]
assert sum(masked.values()) == 18
assert sum(masked.values()) - values["B"] - values["C"] == values["A"]
assert round(float(weights.norm()), 2) == 1.12
if full:
    assert after < before
    assert equal["local"][:6].mean() > 0
    assert equal["one slope"].mean() <= 0
    assert 1.3 < error < 1.7
    assert 0.95 < private[1, 1] < 1.25  # the same noise with 300 hospitals
