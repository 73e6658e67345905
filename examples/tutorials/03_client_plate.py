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
# Write a federated model with two plates: one over clients, one over the rows of a client. A **plate** is Pyro's construct for
# conditionally independent variables: given the tensors that the server sent, the clients are independent. Many clients can
# therefore be trained in one vectorized operation, or each on its own machine.
#
# After this lesson (about 65 minutes) you can
#
# - read and draw a federated model, and derive the shape of every tensor in it,
# - define the *ELBO*, the objective of variational inference, and derive why it is a sum over clients,
# - check that joint evaluation of several clients gives the same losses as separate evaluation,
# - recognize the errors that the library reports.
#
# You need lessons 1 and 2: clients, server, and a hierarchical model. The cells compute for about half a minute.

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
rounds = 10
# quick: rounds = 2

# %% [markdown]
# ## Three clients of unequal size
#
# Three nurses measure temperatures: one has two patients, one five, one nine. Each row is a patient. There are no
# inputs, so `x` is a column of zeros. The noise of a measurement has the known standard deviation 0.5.

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
# A **batch** holds rows of several clients. Its first axis is the client, its second axis the row. Clients with fewer rows are
# **padded**: their rows are followed by copies of a row, which do not count. A **mask** marks the real rows, blue in the
# figure.

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
#
# Every client has a mean `mine`, drawn from a population with mean `common`, as in lesson 2. Each `pyro.sample` declares a
# random variable, called a **site**. The plates are nested, because a row belongs to a client.


# %%
def model(received, local, batch):
    with batch.clients():
        common = pyro.sample("common", dist.Normal(37.0, 2.0))
        mine = pyro.sample("mine", dist.Normal(common, 1.0))
        with batch.rows():
            pyro.sample("temperature", dist.Normal(mine, 0.5), obs=batch.y)


# %% [markdown]
# `received` holds the tensors that the server sent, `local` those of the client. This model uses neither.
# `pyro.poutine.trace` runs a model once and records its sites; `compute_log_prob` attaches to each site
# its log densities. These are the shapes:

# %%
trace = pyro.poutine.trace(model).get_trace({}, {}, batch)
trace.compute_log_prob()
for name in ("common", "mine", "temperature"):
    value, density = (trace.nodes[name][key].shape for key in ("value", "log_prob"))
    print(f"{name:12s} value {tuple(value)}, log_prob {tuple(density)}")

# %% [markdown]
# - `mine` has shape `[3, 1]`: one number per client. The last axis broadcasts over rows.
# - `temperature` has shape `[3, 9]`: clients times rows. Methods sum the log densities over the rows of a client; those of
#   padded rows are zero.
# - `common` also has one number *per client*. A client cannot access the other clients, so it has its own copy.
#   `shared="common"` declares that all copies are one parameter, and the method makes them agree.
#
# `figures.plates` draws a model: rounded boxes are sites, the gray one is observed; arrows are dependencies, and frames are
# plates.

# %%
figures.plates(pyrofl.get_dependencies(pvi.hierarchical(model, data, shared="common"), data))

# %% [markdown]
# `common` is outside the frame of clients, because it is shared; `mine` exists once per client, `temperature` once per row.
#
# ## Variational inference
#
# For most models the posterior $p(z \mid y) = p(y, z) / p(y)$ of the unknown $z$ has no closed form, because the integral
# $p(y) = \int p(y, z)\, dz$ has none. **Variational inference** approximates the posterior by a density $q(z)$ from a family
# that is easy to handle, such as normal densities. In Pyro this approximation is called the **guide**. Inference becomes
# optimization: choose the parameters of $q$, here its mean and variance, such that the **evidence lower bound** (ELBO; the
# evidence is $p(y)$) is largest:
#
# $$\mathrm{ELBO}(q) = E_q\big[\log p(y, z) - \log q(z)\big] \le \log p(y),$$
#
# where $E_q$ is the expectation over $z$ drawn from $q$. Derivation: insert $p(y, z) = p(z \mid y)\, p(y)$. Then
# $\mathrm{ELBO}(q) = \log p(y) - E_q[\log q(z) - \log p(z \mid y)]$. The expectation on the right is the **Kullback-Leibler
# divergence** $\mathrm{KL}(q \,\|\, p(z \mid y))$, which is never negative and is zero only if both densities are equal. So the
# ELBO is largest, and equal to $\log p(y)$, if $q$ is the posterior. Insert $p(y, z) = p(y \mid z)\, p(z)$ instead, and the ELBO
# becomes computable: it rewards a good fit and penalizes a guide that is far from the prior,
#
# $$\mathrm{ELBO}(q) = E_q[\log p(y \mid z)] - \mathrm{KL}\big(q(z) \,\|\, p(z)\big).$$
#
# ## Derivation: the losses of clients add
#
# Write $\mu$ for the shared parameters (here `common`), $z_j$ for the local ones (here `mine`), and $q(z_j)$ for their guide.
# Given $\mu$, the plates declare
#
# $$p(y, z \mid \mu) = \prod_j \Big[ p(z_j \mid \mu) \prod_i p(y_{ji} \mid z_j) \Big].$$
#
# The logarithm of a product is a sum, and the guide is independent over clients, too. Given $\mu$, the ELBO is therefore a sum
# of one number per client, each of which needs only the rows of that client:
#
# $$\mathrm{ELBO}(\mu) = \sum_j \Big( \sum_i E_{q}[\log p(y_{ji} \mid z_j)] -
# \mathrm{KL}\big(q(z_j)\,\|\,p(z_j \mid \mu)\big) \Big).$$
#
# **This sum is what makes federated inference possible**: each client computes its own term, and the server needs only the
# sum. The prior of $\mu$ is in no term: the server counts it once. Lesson 4 shows how the server combines the clients'
# terms to a posterior of $\mu$.
#
# ## Joint and separate evaluation give the same losses
#
# Fix $\mu$ at 37 degrees: the server sends it, and the model reads it from `received`. `pyrofl.elbo()` builds a function that
# returns the **loss** of each client, its negative ELBO. To compare numbers without random error, the guide here is a single
# point: `Delta(v)` has all its probability at `v`, here 37 for every client. Its $\log q$ counts as zero, so the loss is
# $-\log p(y_j, z_j \mid \mu)$. `loss` takes values of shape [clients], and inserts the axis of rows: inside the model,
# `received["common"]` has shape [clients, 1]. Compare three clients in one batch with each client by itself:


# %%
def given(received, local, batch):
    with batch.clients():
        mine = pyro.sample("mine", dist.Normal(received["common"], 1.0))
        with batch.rows():
            pyro.sample("temperature", dist.Normal(mine, 0.5), obs=batch.y)


def guide(received, local, batch):
    with batch.clients():
        pyro.sample("mine", dist.Delta(local["mine"]))


loss = pyrofl.elbo()


def losses(b):
    value = torch.full((len(b),), 37.0, dtype=torch.float64)  # one copy for each client
    return loss(given, guide, {"common": value}, {"mine": value}, b)


together = losses(batch)
alone = torch.cat([losses(data.batch(torch.tensor([j]))) for j in range(3)])
print("joint   ", together.numpy().round(3), " sum", round(float(together.sum()), 3))
print("separate", alone.numpy().round(3), " sum", round(float(alone.sum()), 3))

# %% tags=["remove-cell"]
assert torch.allclose(together, alone, rtol=1e-12)
for j, (_, y) in enumerate(rows.values()):
    by_hand = dist.Normal(37.0, 0.5).log_prob(y).sum() + dist.Normal(37.0, 1.0).log_prob(
        y.new_tensor(37.0)
    )
    assert torch.isclose(together[j], -by_hand)
assert trace.nodes["mine"]["value"].shape == (3, 1)
assert trace.nodes["common"]["value"].shape == (3, 1)
assert trace.nodes["temperature"]["log_prob"].shape == (3, 9)

# %% [markdown]
# The losses are equal. One vectorized operation computes all clients, so a hundred clients take much less than a hundred times as
# long as one:

# %%
hundred = {f"nurse {j}": measured("Ben") for j in range(100)}
many = Federation.from_arrays(hundred).to("cpu", torch.float64)
seconds = {}
for count in (100, 1):
    some = many.batch(torch.arange(count))
    begin = time.process_time()
    for _ in range(20):
        losses(some)
    seconds[count] = time.process_time() - begin
print(f"a hundred clients take {seconds[100] / seconds[1]:.1f} times as long as one")

# %% [markdown]
# A client on its own machine runs the same function, with a plate of size one.
#
# ## Fit the model
#
# `pvi.hierarchical` builds the guide, a normal density of `common` and all `mine`, and maximizes the ELBO; lesson 4 explains how. In
# this model all densities are normal, so the
# posterior is normal, too, and the guide can be exact. `own rows` is the mean of a client's rows.

# %%
run = pyrofl.fit(
    pvi.hierarchical(model, data, shared="common"), data, rounds=rounds, progress=False
)
posterior = run.to_arviz(draws=4000, progress=False)["posterior"]
common = posterior["common"]
print(f"common: {float(common.mean()):.1f} ± {float(common.std()):.2f} (shared by all nurses)")
for name in data.names:
    mine, own = posterior["mine"].sel(client=name), float(rows[name][1].mean())
    print(
        f"{name}: {float(mine.mean()):.2f} ± {float(mine.std()):.2f} ({sizes[name]} rows, own rows {own:.2f})"
    )

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
# Ada has only two rows: her estimate has a larger standard deviation than Eva's, 0.34 instead of 0.16. It also shrinks more.
# The mean of $n$ rows has the variance $0.5^2 / n$, so by lesson 2 the shrinkage weight is $B = (0.25/n) / (0.25/n + 1)$: 0.11
# for Ada, 0.05 for Ben and 0.03 for Eva. All weights are small, because the standard deviation between nurses is 1 degree, that
# of a measurement only 0.5.
# With three nurses, the mean of the population, `common`, remains uncertain: 37.3 ± 0.57.

# %% tags=["remove-cell"]
weights = [0.25 / n / (0.25 / n + 1) for n in sizes.values()]
assert [round(w, 2) for w in weights] == [0.11, 0.05, 0.03]
means = [float(y.mean()) for _, y in rows.values()]
precisions = [1 / (0.25 / n + 1) for n in sizes.values()]
total = sum(precisions) + 1 / 4
mu = (sum(p * y for p, y in zip(precisions, means, strict=True)) + 37 / 4) / total
assert (round(mu, 1), round(total**-0.5, 2)) == (37.3, 0.57)
if rounds == 10:
    found = posterior["mine"].std(("chain", "draw"))
    assert abs(float(found.sel(client="Ada")) - 0.34) < 0.02
    assert abs(float(found.sel(client="Eva")) - 0.16) < 0.01
    assert abs(float(common.mean()) - mu) < 4 * 0.57 / 4000**0.5
    for name, w, own in zip(data.names, weights, means, strict=True):
        estimate = float(posterior["mine"].sel(client=name).mean())
        error = 4 * float(found.sel(client=name)) / 4000**0.5
        assert abs(estimate - (w * mu + (1 - w) * own)) < error

# %% [markdown]
# ## Errors that are detected
#
# Before the first round, the library runs the model on a few rows and raises an error if a plate is used incorrectly.
# Here the site `temperature` is outside `batch.rows()`, so padded rows would count:


# %%
def forgotten(received, local, batch):
    with batch.clients():
        common = pyro.sample("common", dist.Normal(37.0, 2.0))
        mine = pyro.sample("mine", dist.Normal(common, 1.0))
        pyro.sample("temperature", dist.Normal(mine, 0.5), obs=batch.y)


try:
    method = pvi.hierarchical(forgotten, data, shared="common")
    pyrofl.fit(method, data, rounds=1, progress=False)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Children are measured at several ages, `batch.x[..., 0]` in years. Write a model `growth(received, local, batch)`: every client
# (a school) has a site `start` with prior $N(50, 5^2)$, its mean height at birth in cm; the site `speed` with prior $N(7, 2^2)$ is the
# growth per year; the heights `batch.y` are observed at the site `height`, normal around `start` plus `speed` times age, with
# standard deviation 5. The test also fits your model with `shared="speed"`.

# %% tags=["hide-cell", "solution"]
# `start` and `speed` have the shape [clients, 1], the ages [clients, rows]: the mean of a row is [clients, rows]. Which site is
# shared is not stated in the model.


def growth(received, local, batch):
    with batch.clients():
        start = pyro.sample("start", dist.Normal(50.0, 5.0))
        speed = pyro.sample("speed", dist.Normal(7.0, 2.0))
        with batch.rows():
            pyro.sample("height", dist.Normal(start + speed * batch.x[..., 0], 5.0), obs=batch.y)


# %% tags=["hide-cell", "test"]
ragged = {
    "A": (torch.tensor([[2.0], [6.0]]), torch.tensor([63.0, 95.0])),
    "B": (torch.tensor([[10.0]]), torch.tensor([128.0])),
}
pair = Federation.from_arrays(ragged).to("cpu", torch.float32).batch(torch.tensor([0, 1]))


def traced(model, batch):
    """Return the sites of a model, with their log densities."""
    try:
        found = pyro.poutine.trace(model).get_trace({}, {}, batch)
        found.compute_log_prob()
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise AssertionError(f"the model does not run: {reason}; check the two plates") from error
    return found.nodes


sites = traced(growth, pair)
assert {"start", "speed", "height"} <= {*sites}, "expected the sites start, speed and height"
begin, rate, height = sites["start"], sites["speed"], sites["height"]
for name, site, center, width in (("start", begin, 50, 5), ("speed", rate, 7, 2)):
    assert site["value"].shape == (2, 1), f"{name}: expected one number per client"
    assert torch.all(site["fn"].mean == center), f"{name}: another prior mean was asked for"
    assert torch.all(site["fn"].stddev == width), f"{name}: check the scale of the prior"
assert height["is_observed"], "the heights are data"
assert torch.equal(height["value"].expand(2, 2), pair.y), "the heights are in batch.y"
assert height["log_prob"].shape == (2, 2), "height: expected one log density per row"
assert len(height["cond_indep_stack"]) == 2, "a row belongs to a client: nest the plates"
assert float(height["log_prob"][1, 1]) == 0, "client B has one child, and padding must not count"
assert torch.all(height["fn"].stddev == 5), "check the scale of the heights"
line = begin["value"] + rate["value"] * pair.x[..., 0]
assert torch.allclose(height["fn"].mean.expand(2, 2), line), (
    "the mean of a row depends on the start and the speed of its client, and on its own age"
)
schools = Federation.from_arrays(ragged).to("cpu", torch.float64)
drawn = pyrofl.fit(
    pyrofl.hierarchical(growth, schools, shared="speed"), schools, rounds=1, progress=False
).posterior(10)
assert drawn["start"].shape == (10, 2)

# %% [markdown]
# ### Exercise 2 (intermediate, 3 points)
#
# Write `means(y, mask)`: the mean of each client's rows, a tensor [clients], given a padded batch `y` and its mask, both
# tensors [clients, rows].

# %% tags=["hide-cell", "solution"]
# Padding must count neither in the sum nor in the number of rows.


def means(y, mask):
    return (y * mask).sum(1) / mask.sum(1)


# %% tags=["hide-cell", "test"]
filled = torch.tensor([[1.0, 4.0, 9.0], [4.0, 9.0, 9.0]])
real = torch.tensor([[True, True, False], [True, False, False]])
found = means(filled, real)
assert torch.is_tensor(found), "return a tensor"
assert found.shape == (2,), "expected one number per client"
assert torch.allclose(found.float(), torch.tensor([2.5, 4.0])), (
    "padded rows must not count, neither in the sum nor in the number of rows"
)

# %% [markdown]
# ### Exercise 3 (advanced, 4 points)
#
# Write `client_elbo(y, mean, sd)`: the ELBO of one client with rows `y` (a tensor), $z \sim N(0, 1)$, $y_i \sim N(z, 1)$ and the
# guide $q(z) = N(\text{mean}, \text{sd}^2)$; `mean` and `sd` are floats. Use
# $E_q[(y - z)^2] = (y - \text{mean})^2 + \text{sd}^2$ and
# $\mathrm{KL}(q \| p) = \frac12(\text{sd}^2 + \text{mean}^2 - 1) - \log \text{sd}$, and keep the constant $-\frac12 \log 2 \pi$
# of the log density of a row.

# %% tags=["hide-cell", "solution"]
# sd^2 counts in the expectation of every row, the KL divergence once per client.


def client_elbo(y, mean, sd):
    rows = -0.5 * math.log(2 * math.pi) - 0.5 * ((y - mean) ** 2 + sd**2)
    return float(rows.sum()) - (0.5 * (sd**2 + mean**2 - 1) - math.log(sd))


# %% tags=["hide-cell", "test"]
own = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
evidence = torch.distributions.MultivariateNormal(0 * own, torch.eye(3).double() + 1).log_prob(own)
try:
    found = [client_elbo(own, mean, sd) for mean, sd in ((7 / 4, 0.5), (7 / 4, 0.6), (1.5, 0.5))]
    found += [client_elbo(some, 7 / 4, 0.5) for some in (own + 9, own[:2], own[2:])]
except TypeError as error:
    raise AssertionError(f"{error}: mean and sd are floats, use math.log") from error
assert all(value is not None for value in found), "return the ELBO"
assert all(torch.as_tensor(value).numel() == 1 for value in found), (
    "the ELBO is one number: add the terms of all rows"
)
best, wider, lower, far, *parts = map(float, found)
assert best < 0, "the ELBO of these rows is below 0: return the ELBO, not its negative, the loss"
assert far < best, "rows far from the mean have a lower ELBO: -1/2 E[(y - z)^2], mind the sign"
constants = (best - float(evidence)) / (0.5 * math.log(2 * math.pi))
assert abs(constants) < 0.01 or abs(constants - round(constants)) > 1e-5, (
    "the log density of each of the three rows includes the constant -1/2 log(2 pi), once"
)
assert math.isclose(
    best - sum(parts), 0.5 * (0.5**2 + (7 / 4) ** 2 - 1) - math.log(0.5), rel_tol=1e-5
), "add (not average) the expected log densities of the rows, and subtract the KL divergence once"
assert best > wider, (
    "the ELBO is largest at sd 0.5: sd^2 counts in every row, the KL divergence once"
)
assert math.isclose(best, float(evidence), rel_tol=1e-5), (
    "at the exact posterior the ELBO equals log p(y): the expected log density of a row has the "
    "term -1/2 E[(y - z)^2]"
)
assert best > lower, "the ELBO is largest at the posterior mean"

# %% [markdown]
# ## Explore
#
# 1. Make the noise an unknown site `noise` with one value per nurse. Its prior `HalfNormal(1.0)` is the distribution of the
#    absolute value of a standard normal variable. Fit the model (`noise` is outside `batch.rows()`, and not shared). Whose noise is estimated worst, and why?

# %% tags=["hide-cell", "solution"]
# 1. Ada's: two rows say little about a standard deviation, and her posterior is the widest. The true value is 0.5 for all.


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
noise = noisy_run.to_arviz(draws=4000, progress=False)["posterior"]["noise"]
for name in data.names:
    value = noise.sel(client=name)
    print(f"{name}: {float(value.mean()):.2f} ± {float(value.std()):.2f}")

# %% tags=["remove-cell"]
if rounds == 10:
    widths = noise.std(("chain", "draw"))
    assert float(widths.sel(client="Ada")) > 1.5 * float(widths.sel(client="Eva"))
