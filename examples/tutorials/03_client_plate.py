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
# After this lesson you can
#
# - read and draw a federated model,
# - derive the shape of every tensor in it,
# - check that joint training of several clients gives the same losses as separate training,
# - recognize the errors that the library reports.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, figures
from pyrofl.models import pvi

# %% tags=["parameters"]
rounds = 10
# quick: rounds = 2

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
# ## Joint and separate evaluation give the same losses
#
# Because clients are independent, the loss of a batch of clients is a vector with one number per client. With a
# fixed guide, compare the losses of three clients in one batch with those of each client by itself:

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

# %% [markdown]
# A round of a hundred clients takes three to six times as long as a round of one (measured with this model), not a
# hundred times, because one vectorized operation computes all clients. A client on its own machine runs the same
# function, with a plate of size one.
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
# 1. Write a site inside `batch.clients()` that is a vector of four numbers per client. What is its shape?
# 2. Make the noise an unknown parameter with one value per nurse.
# 3. Give Ada a hundred rows, all at 36.5. How do her estimate and the other two change?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. Additional axes come last and are declared as event dimensions: [clients, 1, 4].


def vector(received, local, batch):
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))


print(tuple(pyro.poutine.trace(vector).get_trace({}, {}, batch).nodes["w"]["value"].shape))

# %% tags=["hide-cell"]
# 2. A standard deviation needs a prior on positive numbers.


def noisy(received, local, batch):
    with batch.clients():
        common = pyro.sample("common", dist.Normal(37.0, 2.0))
        mine = pyro.sample("mine", dist.Normal(common, 1.0))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with batch.rows():
            pyro.sample("temperature", dist.Normal(mine, noise), obs=batch.y)


own = pyrofl.fit(
    pvi.hierarchical(noisy, data, shared="common"), data, rounds=rounds, progress=False
)
print(own.to_arviz(draws=500)["posterior"]["noise"].mean(("chain", "draw")).values.round(2))

# %% tags=["hide-cell"]
# 3. With a hundred rows her estimate is the mean of her own rows. The common temperature decreases a
# little, and the other two estimates decrease with it, but less, because they also depend on their own rows.
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
