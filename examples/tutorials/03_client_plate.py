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
# # 3. The client plate
#
# Write a federated model with two plates: one over clients, one over the rows of a client. A model in pyrofl is an
# ordinary Pyro model. A plate declares conditional independence: given the tensors that the server sent, the clients
# are independent. Many clients can therefore be trained in one vectorized operation, or each on its own machine.
#
# After this lesson (about 60 minutes) you can
#
# - read and draw a federated model,
# - derive the shape of every tensor in it, and why the losses of clients add,
# - check that joint training of several clients gives the same losses as separate training,
# - recognize the errors that the library reports.

# %%
# %matplotlib inline
import math
import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, figures
from pyrofl.models import pvi

# %% tags=["parameters"]
rounds, full = 10, True
# quick: rounds, full = 2, False

# %% [markdown]
# ## Three clients of unequal size
#
# Three nurses measure temperatures: one has two patients, one five, one nine. Each row is a patient. There are no
# covariates, so `x` is a column of zeros.

# %%
source = torch.Generator().manual_seed(0)
sizes = {"Ada": 2, "Ben": 5, "Eva": 9}
truth = {"Ada": 36.5, "Ben": 37.5, "Eva": 38.0}


def measured(name):
    noise = torch.randn(sizes[name], generator=source, dtype=torch.float64)
    return torch.zeros(sizes[name], 1, dtype=torch.float64), truth[name] + 0.5 * noise


rows = {name: measured(name) for name in sizes}
data = Federation.from_arrays(rows).to("cpu", torch.float64)
data

# %% [markdown]
# A **batch** holds rows of several clients. Its first axis is the client, its second axis the row. Clients with fewer
# rows are padded with empty rows, and a mask marks the real ones.

# %%
batch = data.batch(torch.tensor([0, 1, 2]))
print("y   ", tuple(batch.y.shape), "= [clients, rows]")
print("mask", batch.mask.int().tolist())

figure, axes = plt.subplots(figsize=(6, 1.8), layout="constrained")
axes.imshow(batch.mask, cmap="Blues", aspect="auto", vmin=0, vmax=1.5)
axes.set_yticks(range(3), data.names)
axes.set_xlabel("row of the batch (white: padding)")
plt.show()

# %% [markdown]
# ## The model


# %%
def model(received, local, batch):
    with batch.clients():
        common = pyro.sample("common", dist.Normal(37.0, 2.0))
        mine = pyro.sample("mine", dist.Normal(common, 1.0))
        with batch.rows():
            pyro.sample("temperature", dist.Normal(mine, 0.5), obs=batch.y)


# %% [markdown]
# `received` holds the tensors that the server sent, `local` those of the client. This model uses neither. These are
# the shapes that Pyro records:

# %%
trace = pyro.poutine.trace(model).get_trace({}, {}, batch)
trace.compute_log_prob()
for name, site in trace.nodes.items():
    if site["type"] == "sample" and "log_prob" in site and name not in ("clients", "rows"):
        print(
            f"{name:12s} value {tuple(site['value'].shape)}, log_prob {tuple(site['log_prob'].shape)}"
        )

# %% [markdown]
# - `mine` has shape `[3, 1]`: one number per client. The last axis broadcasts over rows.
# - `temperature` has shape `[3, 9]`: clients times rows. The log probabilities are summed over the rows of a client;
#   padded rows contribute zero.
# - `common` also has one number *per client*. A client cannot access the other clients, so it has its own copy.
#   `shared="common"` declares that all copies are one parameter, and the method makes them agree.
#
# `figures.plates` draws the dependencies and the plates of a model. (`pyro.render_model` draws them too, with
# Graphviz.)

# %%
figures.plates(pyrofl.get_dependencies(pvi.hierarchical(model, data, shared="common"), data))

# %% [markdown]
# ## Derivation: the losses of clients add
#
# Write $\theta$ for the shared and $z_j$ for the local parameters, $q(z_j)$ for the guide. Given $\theta$, the plate declares
#
# $$p(y, z \mid \theta) = \prod_j \Big[ p(z_j \mid \theta) \prod_i p(y_{ji} \mid z_j) \Big].$$
#
# The logarithm of a product is a sum, and the guide is independent over clients, too. The ELBO is therefore a sum of one
# number per client, each of which needs only the rows of that client:
#
# $$\mathrm{ELBO}(\theta) = \sum_j \Big( \sum_i E_{q}[\log p(y_{ji} \mid z_j)] -
# \mathrm{KL}\big(q(z_j)\,\|\,p(z_j \mid \theta)\big) \Big).$$
#
# **This sum is what makes federated inference possible**: each client computes its own term, and the server adds them.
#
# ## Joint and separate evaluation give the same losses
#
# The loss of a batch of clients is a vector with one number per client. With a fixed guide, compare the losses of three
# clients in one batch with those of each client by itself:

# %%
elbo = pyrofl.elbo(num_particles=None)


def guide(received, local, batch):
    with batch.clients():
        pyro.sample("common", dist.Delta(local["common"]))
        pyro.sample("mine", dist.Delta(local["mine"]))


def start(b):
    return {n: torch.full((len(b),), 37.0, dtype=torch.float64) for n in ("common", "mine")}


together = elbo(model, guide, {}, start(batch), batch)
alone = [
    elbo(model, guide, {}, start(b), b) for b in (data.batch(torch.tensor([j])) for j in range(3))
]
print("joint   ", [round(float(v), 6) for v in together])
print("separate", [round(float(v), 6) for v in alone])
print(
    "largest difference",
    f"{max(abs(float(a) - float(b)) for a, b in zip(together, alone, strict=False)):.0e}",
)

# %% tags=["remove-cell"]
assert torch.allclose(together, torch.cat(alone), rtol=1e-12)
assert trace.nodes["mine"]["value"].shape == (3, 1)
assert trace.nodes["temperature"]["log_prob"].shape == (3, 9)

# %% [markdown]
# One vectorized operation computes all clients, so a hundred clients take much less than a hundred times as long as one:

# %%
hundred = {f"nurse {j}": measured("Ben") for j in range(100)}
many = Federation.from_arrays(hundred).to("cpu", torch.float64)
seconds = {}
for count in (100, 1):
    some = many.batch(torch.arange(count))
    begin = time.process_time()
    for _ in range(20):
        elbo(model, guide, {}, start(some), some)
    seconds[count] = time.process_time() - begin
print(f"a hundred clients take {seconds[100] / seconds[1]:.1f} times as long as one")

# %% [markdown]
# A client on its own machine runs the same function, with a plate of size one.
#
# ## Fit the model

# %%
run = pyrofl.fit(
    pvi.hierarchical(model, data, shared="common"), data, rounds=rounds, progress=False
)
posterior = run.to_arviz(draws=1000)["posterior"]
print(f"common: {float(posterior['common'].mean()):.2f} (shared by all nurses)")
for name in data.names:
    mine = posterior["mine"].sel(client=name)
    print(f"{name}: {float(mine.mean()):.2f} ± {float(mine.std()):.2f} ({sizes[name]} rows)")

# %%
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
for name in data.names:
    axes.hist(
        posterior["mine"].sel(client=name).values.ravel(),
        60,
        density=True,
        alpha=0.6,
        label=f"{name}, {sizes[name]} rows",
    )
axes.set_xlabel("mean temperature of the nurse's patients (°C)")
axes.set_ylabel("posterior density")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# Ada has only two rows: her estimate has a larger standard deviation than Eva's and shrinks more towards the others.
#
# ## Errors that are detected
#
# Before the first round, the library runs the model on a few rows and raises an error if a plate is used incorrectly.
# In this model the site `mine` is outside `batch.clients()`:


# %%
def forgotten(received, local, batch):
    mine = pyro.sample("mine", dist.Normal(37.0, 2.0))
    with batch.clients(), batch.rows():
        pyro.sample("temperature", dist.Normal(mine, 0.5), obs=batch.y)


try:
    method = pvi.hierarchical(forgotten, data, shared="mine")
    pyrofl.fit(method, data, rounds=1, progress=False)
except ValueError as error:
    print(error)

# %% [markdown]
# In this model a row depends on other rows, through a mean over the batch. The result would depend on which clients
# are in the batch, and the data of one client would affect the model of another:


# %%
def leaking(received, local, batch):
    with batch.clients():
        mine = pyro.sample("mine", dist.Normal(37.0, 2.0))
        with batch.rows():
            centred = batch.y - batch.y.mean()
            pyro.sample("temperature", dist.Normal(mine, 0.5), obs=centred + 37)


try:
    method = pvi.hierarchical(leaking, data, shared="mine")
    pyrofl.fit(method, data, rounds=1, progress=False)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Exercises
#
# Exercises 1 and 2 are basic, 3 is intermediate, 4 is advanced.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write a model `heights(received, local, batch)`: every client has a site `average` with prior $N(170, 10^2)$; the rows
# `batch.y` are observed at the site `height`, normal around `average` with standard deviation 5.

# %% tags=["hide-cell", "solution"]
# `average` belongs to a client, `height` to a row of a client.


def heights(received, local, batch):
    with batch.clients():
        average = pyro.sample("average", dist.Normal(170.0, 10.0))
        with batch.rows():
            pyro.sample("height", dist.Normal(average, 5.0), obs=batch.y)


# %% tags=["hide-cell", "test"]
ragged = {
    "A": (torch.zeros(2, 1), torch.tensor([160.0, 170.0])),
    "B": (torch.zeros(1, 1), torch.tensor([180.0])),
}
pair = Federation.from_arrays(ragged).to("cpu", torch.float64).batch(torch.tensor([0, 1]))


def traced(model):
    found = pyro.poutine.trace(model).get_trace({}, {}, pair)
    found.compute_log_prob()
    return found.nodes


sites = traced(heights)
assert {"average", "height"} <= {*sites}, "expected the sites average and height"
assert sites["average"]["value"].shape == (2, 1), (
    "average: one number per client; use batch.clients()"
)
assert sites["height"]["is_observed"], "pass obs=batch.y"
assert sites["height"]["log_prob"].shape == (2, 2), "height: one number per row; use batch.rows()"
assert torch.all(sites["average"]["fn"].stddev == 10), (
    "the prior has standard deviation 10, not variance 10"
)
assert torch.all(sites["height"]["fn"].stddev == 5), "rows have standard deviation 5"
assert float(sites["height"]["log_prob"][1, 1]) == 0, "padded rows must not count"

# %% [markdown]
# ### Exercise 2 (basic, 2 points)
#
# Write `means(y, mask)`: the mean of each client's rows, [clients], given a padded batch `y` and its mask, both
# [clients, rows].

# %% tags=["hide-cell", "solution"]
# Padding must count neither in the sum nor in the number of rows.


def means(y, mask):
    return (y * mask).sum(1) / mask.sum(1)


# %% tags=["hide-cell", "test"]
filled = torch.tensor([[1.0, 3.0, 9.0], [4.0, 9.0, 9.0]])
real = torch.tensor([[True, True, False], [True, False, False]])
assert means(filled, real).shape == (2,), "expected one number per client"
assert torch.allclose(means(filled, real), torch.tensor([2.0, 4.0])), "padded rows must not count"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# Write a model `slopes(received, local, batch)`: every client has a site `w`, a **vector** of three numbers with independent
# standard normal priors; the response `y` is normal around $w \cdot x$ with standard deviation 1. `batch.x` has the shape
# [clients, rows, 3].

# %% tags=["hide-cell", "solution"]
# The three numbers are an event: the prior has one log probability per client. [clients, 1, 3] times [clients, rows, 3] broadcasts
# over rows.


def slopes(received, local, batch):
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((w * batch.x).sum(-1), 1.0), obs=batch.y)


# %% tags=["hide-cell", "test"]
pair = {
    n: (torch.arange(3.0 * k).reshape(k, 3), torch.ones(k)) for n, k in {"A": 4, "B": 2}.items()
}
pair = Federation.from_arrays(pair).to("cpu", torch.float64).batch(torch.tensor([0, 1]))
sites = traced(slopes)
w = sites["w"]["value"]
assert w.shape == (2, 1, 3), "w: three numbers per client, [clients, 1, 3]"
assert sites["w"]["log_prob"].shape == (2, 1), "declare the vector as an event: .to_event(1)"
assert sites["y"]["log_prob"].shape == (2, 4), "y: one number per row"
expected = (w * pair.x).sum(-1)
assert torch.allclose(sites["y"]["fn"].mean.expand(2, 4), expected), (
    "the mean of a row is w times x, summed over the last axis"
)
assert torch.all(sites["y"]["fn"].stddev == 1), "rows have standard deviation 1"

# %% [markdown]
# ### Exercise 4 (advanced, 4 points)
#
# Write `client_elbo(y, mean, sd)`: the ELBO of one client with rows `y` (a tensor), $z \sim N(0, 1)$, $y_i \sim N(z, 1)$ and the
# guide $q(z) = N(\text{mean}, \text{sd}^2)$. Use $E_q[(y - z)^2] = (y - \text{mean})^2 + \text{sd}^2$ and
# $\mathrm{KL}(q \| p) = \frac12(\text{sd}^2 + \text{mean}^2 - 1) - \log \text{sd}$.

# %% tags=["hide-cell", "solution"]
# sd^2 counts in the expectation of every row, the KL divergence once per client.


def client_elbo(y, mean, sd):
    rows = -0.5 * math.log(2 * math.pi) - 0.5 * ((y - mean) ** 2 + sd**2)
    return float(rows.sum()) - (0.5 * (sd**2 + mean**2 - 1) - math.log(sd))


# %% tags=["hide-cell", "test"]
own = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
evidence = torch.distributions.MultivariateNormal(0 * own, torch.eye(3).double() + 1).log_prob(own)
best = client_elbo(own, 7 / 4, 0.5)
assert client_elbo(own, 7 / 4, 0.5) > client_elbo(own, 7 / 4, 0.6), (
    "the ELBO is largest at the posterior, sd 0.5"
)
assert math.isclose(best, float(evidence)), "at the exact posterior the ELBO equals log p(y)"
assert client_elbo(own, 7 / 4, 0.5) > client_elbo(own, 1.5, 0.5), (
    "the ELBO is largest at the posterior mean"
)

# %% [markdown]
# ## Explore
#
# 1. Make the noise an unknown parameter with one value per nurse.
# 2. Give Ada a hundred rows, all at 36.5. How do her estimate and the other two change?

# %% tags=["hide-cell", "solution"]
# 1. A standard deviation needs a prior on positive numbers.


def noisy(received, local, batch):
    with batch.clients():
        common = pyro.sample("common", dist.Normal(37.0, 2.0))
        mine = pyro.sample("mine", dist.Normal(common, 1.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with batch.rows():
            pyro.sample("temperature", dist.Normal(mine, noise), obs=batch.y)


noisy_run = pyrofl.fit(
    pvi.hierarchical(noisy, data, shared="common"), data, rounds=rounds, progress=False
)
print(noisy_run.to_arviz(draws=500)["posterior"]["noise"].mean(("chain", "draw")).values.round(2))

# %% tags=["hide-cell", "solution"]
# 2. With a hundred rows her estimate is the mean of her own rows. The other two estimates change by less than 0.05 degrees: the
# common temperature decreases a little, but their own rows determine them.
many = Federation.from_arrays(rows | {"Ada": (torch.zeros(100, 1), torch.full((100,), 36.5))})
many = many.to("cpu", torch.float64)
sure = pyrofl.fit(
    pvi.hierarchical(model, many, shared="common"), many, rounds=rounds, progress=False
)
after = sure.to_arviz(draws=1000)["posterior"]["mine"].mean(("chain", "draw"))
before = posterior["mine"].mean(("chain", "draw"))
for name in data.names:
    print(
        f"{name}: {float(before.sel(client=name)):.2f} before, {float(after.sel(client=name)):.2f} after"
    )

# %% tags=["remove-cell"]
if full:
    spread = posterior["mine"].std(("chain", "draw"))
    assert float(spread.sel(client="Ada")) > 1.5 * float(spread.sel(client="Eva"))
    assert abs(float(after.sel(client="Ada")) - 36.5) < 0.03
    assert all(abs(float((after - before).sel(client=n))) < 0.05 for n in ("Ben", "Eva"))
