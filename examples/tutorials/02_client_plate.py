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
# # 2. What a client plate is
#
# A program in this library is an ordinary Pyro model, with two plates: one for clients, one for the rows of a client.
# A plate says "these things are independent of each other, given what is outside". This is the whole
# trick of the library: if clients are independent given what the server sent, then they can be trained side by side, on
# one machine or on a hundred.
#
# After these ten minutes you can
#
# - read and draw a federated model,
# - say which shape a tensor has, and why,
# - see that training clients together gives what training them one by one gives,
# - recognise the mistakes that the library refuses.

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
# Three nurses measure temperatures: one has two patients, one five, one nine. A row is a patient. There is nothing else to know of
# a patient, so `x` is a column of zeros.

# %%
source = torch.Generator().manual_seed(0)
sizes = {"Ada": 2, "Ben": 5, "Eva": 9}
truth = {"Ada": 36.5, "Ben": 37.5, "Eva": 38.0}


def measured(name):
    noise = torch.randn(sizes[name], generator=source, dtype=torch.float64)
    return torch.zeros(sizes[name], 1, dtype=torch.float64), truth[name] + 0.5 * noise


rows = {name: measured(name) for name in sizes}
data = Federation.of(rows).to("cpu", torch.float64)
data

# %% [markdown]
# A **batch** holds rows of several clients side by side. Its first axis is the client, its second
# the row. Nurses have unequal numbers of rows, so clients with fewer rows are filled up with empty ones, and a mask says which rows are real.

# %%
batch = data.batch(torch.tensor([0, 1, 2]))
print("y   ", tuple(batch.y.shape), "= [clients, rows]")
print("mask", batch.mask.int().tolist())

figure, axes = plt.subplots(figsize=(6, 1.8), layout="constrained")
axes.imshow(batch.mask, cmap="Blues", aspect="auto", vmin=0, vmax=1.5)
axes.set_yticks(range(3), data.names)
axes.set_xlabel("row of the batch (white: filled up, counts for nothing)")
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
# `received` is what the server sent, `local` what the client keeps; this program needs neither. Look at the
# shapes that Pyro sees:

# %%
trace = pyro.poutine.trace(model).get_trace({}, {}, batch)
trace.compute_log_prob()
for name, site in trace.nodes.items():
    if site["type"] == "sample" and "log_prob" in site and name not in ("clients", "rows"):
        print(
            f"{name:12s} value {tuple(site['value'].shape)}, log_prob {tuple(site['log_prob'].shape)}"
        )

# %% [markdown]
# - `mine` has shape `[3, 1]`: one number for each client. The last axis waits for rows.
# - `temperature` has shape `[3, 9]`: clients times rows. The log probabilities of a client's rows are added up, and
#   the filled-up rows add zero.
# - `common` also has one number for *each client*. A client cannot see the others, so it has a
#   copy of its own. We tell the method that all copies are the same unknown (`shared="common"`), and
#   it is the method's work to make them agree.
#
# `figures.plates` draws what depends on what, and in which plate it is. (`pyro.render_model` does it too, with
# Graphviz.)

# %%
figures.plates(pyrofl.relations(pvi.hierarchical(model, data, shared="common"), data))

# %% [markdown]
# ## Together is the same as one by one
#
# Because clients are independent, the loss of a batch of clients is a list, one number for each
# client. Let us take a fixed guide and compare: three clients together, and each one alone.

# %%
elbo = pyrofl.elbo(draws=None)


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
print("together ", [round(float(v), 6) for v in together])
print("one by one", [round(float(v), 6) for v in alone])
print(
    "largest difference",
    f"{max(abs(float(a) - float(b)) for a, b in zip(together, alone, strict=False)):.0e}",
)

# %% [markdown]
# A round of a hundred clients takes three to six times as long as a round of one (measured with this program), not a hundred
# times, as the processor works on all of them in one operation. And a client on a machine of its own runs the same function,
# with a plate of size one.
#
# ## Fit it

# %%
run = pyrofl.fit(
    pvi.hierarchical(model, data, shared="common"), data, rounds=rounds, progress=False
)
posterior = run.to_arviz(draws=1000)["posterior"]
print(f"common: {float(posterior['common'].mean()):.2f}, one number for all nurses")
for name in data.names:
    mine = posterior["mine"].sel(client=name)
    print(f"{name}: {float(mine.mean()):.2f} +- {float(mine.std()):.2f} from {sizes[name]} rows")

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
axes.set_xlabel("temperature of the nurse's patients (degrees)")
axes.set_ylabel("posterior density")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# Ada has two rows only: she is less certain than Eva, and she borrows more from the others.
#
# ## What is refused
#
# Plates make mistakes visible. Before the first round the library runs your program on a few rows, and
# refuses what would give wrong numbers. Here somebody forgot `batch.clients()`:


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
# And here a row of one client reads other rows, by a mean over the batch. Then the result would depend on
# who is in the batch, and a row of one client could change what another client learns:


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
# 1. Which shape has a site inside `batch.clients()` that is a vector of four numbers? Write it.
# 2. Let the noise be unknown, with one value for each nurse.
# 3. Give Ada a hundred rows, all at 36.5. What happens to her estimate, and to the others'?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. Axes of your own come last, and are declared as events: [clients, 1, 4].


def vector(received, local, batch):
    with batch.clients():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([4]).to_event(1))


print(tuple(pyro.poutine.trace(vector).get_trace({}, {}, batch).nodes["w"]["value"].shape))

# %% tags=["hide-cell"]
# 2. A positive number needs a prior on positive numbers.


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
# 3. With many rows she needs nobody: her estimate is her own mean. The common temperature falls a
# little, and the others move with it, but hardly: they have rows of their own.
many = Federation.of(rows | {"Ada": (torch.zeros(100, 1), torch.full((100,), 36.5))})
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
