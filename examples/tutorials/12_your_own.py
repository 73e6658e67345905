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
# # 12. Write your own
#
# Methods, priors, server rules, metrics and data sets are small functions here. This tutorial writes one of each, each on one screen, and checks them.
#
# After these twenty minutes you can
#
# - turn an idea into a federated method, without touching the library,
# - let the library look for mistakes before the first round,
# - check a new method against something that you can compute.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import (
    Federation,
    GradientStep,
    Method,
    Phase,
    aggregation,
    elbo,
    figures,
    guides,
    nets,
    sgd,
)
from pyrofl.models import fedavg, pfedvem

# %% tags=["parameters"]
rounds = 20
# quick: rounds = 3

# %% [markdown]
# ## A data set
#
# A data set is one table of rows for all clients, and who holds which. `Federation.of` takes arrays, tensors or data frames. Here four laboratories measure the same line with two weights; one of them has a
# broken instrument, which turns the sign of `y`. With `(x, y, x_test, y_test)` a client has test rows, too.

# %%
rng = np.random.default_rng(0)
truth = np.array([1.0, -2.0])


def laboratory(broken=False):
    x = rng.normal(size=(30, 2))
    y = x @ truth + 0.3 * rng.normal(size=30)
    return x, y * (-1 if broken else 1)


labs = {
    "north": laboratory(),
    "east": laboratory(),
    "south": laboratory(),
    "west": laboratory(broken=True),
}
data = Federation.of(labs).to("cpu", torch.float64)
data

# %% [markdown]
# ## A method: prior, guide, schedule, server
#
# Four decisions.
#
# 1. **Prior and likelihood** are a Pyro model. We take a Student-t prior on the weights, which allows a few large ones.
# 2. **Guide**: independent normals. `guides.mean_field` makes them, and names its tensors.
# 3. **Schedule**: what a client does in a round: twenty steps on its ELBO.
# 4. **Server**: what it makes of the messages: a *median* over clients, so that one broken client cannot do harm.
#
# Shapes: `batch.x` is [client, row, feature]. A site in `batch.clients()` is [draw, client, 1, \*event], the 1 in place of the rows; where nothing asks for draws the first axis is missing.
# So `w * batch.x` fits every row. `received[...]` and `local[...]` have that 1 already when a model reads them.
#
# Two words of the code: `mean=True` divides the loss by the client's number of rows, so that one learning rate suits small and large clients; `"*"` means all tensors that are sent, each client
# here with the same weight (`aggregation.uniform`).

# %%
shapes = {"w": torch.Size([2])}
q = guides.mean_field(shapes, scale=0.1)


def model(received, local, batch):
    with batch.clients():
        w = pyro.sample("w", dist.StudentT(3.0, 0.0, 2.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((w * batch.x).sum(-1), 0.3), obs=batch.y)


def mine(how, model=model, q=q, shape=(2,), lr=0.01):
    return Method(
        init=lambda generator, clients: q.start({"w": torch.zeros(shape)}),
        model=model,
        guide=q,
        phases=(Phase((GradientStep(q.names, sgd(lr), elbo(draws=8, mean=True)),), epochs=20),),
        aggregate=aggregation.Aggregator({"*": aggregation.uniform}, rule=how),
    )


found = {}
for how in ("mean", "median"):
    run = pyrofl.fit(mine(how), data, rounds=5 * rounds, progress=False)
    found[how] = run.state.server["mu/w"].numpy()
    print(f"{how:7s}", found[how].round(2), " truth", truth)

# %% [markdown]
# That is the whole method: it can be saved and resumed, run on many machines, and write posteriors for ArviZ.

# %%
figure, axes = plt.subplots(figsize=(4.2, 3.6), layout="constrained")
for name, (x, y) in labs.items():
    axes.plot(*np.linalg.lstsq(x, y, rcond=None)[0], "o", label=name)
for how, mark in (("mean", "s"), ("median", "*")):
    axes.plot(*found[how], mark, color="black", markersize=10, label=f"server, {how}")
axes.set_xlabel("weight 1")
axes.set_ylabel("weight 2")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# Did it converge? Every run can tell, and draw it. Gradients are noisy here (eight draws) and the learning rate is constant, so that the last digits go on moving:

# %%
print(run.verdict)
figures.convergence(run)

# %% [markdown]
# ## Classes
#
# For classes `w` is a matrix, [feature, class], and the outputs are a softmax's. Here the class is the sign of `y`. The difference of the two columns points where `truth` does:


# %%
def softmax(received, local, batch):
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2, 2]).to_event(2))
        with batch.rows():
            logits = (batch.x[..., None, :] @ w).squeeze(-2)
            pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)


signs = {name: (x, (y > 0).astype(int)) for name, (x, y) in labs.items()}
signs = Federation.of(signs, classes=2).to("cpu", torch.float64)
q_matrix = guides.mean_field({"w": torch.Size([2, 2])}, scale=0.1)
method = mine("median", softmax, q_matrix, (2, 2), lr=0.05)
run = pyrofl.fit(method, signs, rounds=rounds, progress=False)
towards = run.state.server["mu/w"].diff(dim=1).squeeze(1).numpy()
print("server", (towards / np.linalg.norm(towards)).round(2))
print("truth ", (truth / np.linalg.norm(truth)).round(2))

# %% [markdown]
# A class says less than a number, so that more rounds or a larger learning rate may be needed. The same model with the median on the digits of twenty clients ([64, 10], prior N(0, 1)) reaches in five rounds a personal
# accuracy of .73 with 0.01, and .81 with 0.05; with the mean it is .91 with both (one seed).

# %% [markdown]
# ## Check it
#
# **Against a closed form.** With a normal prior, one client and many steps, the mean must be that of ridge regression, up to noise. Change the prior, and keep everything else:

# %%
from dataclasses import replace


def normal(received, local, batch):
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((w * batch.x).sum(-1), 0.3), obs=batch.y)


x, y = labs["north"]
one = Federation.of({"north": (x, y)}).to("cpu", torch.float64)
run = pyrofl.fit(replace(mine("mean"), model=normal), one, rounds=10 * rounds, progress=False)
precision = np.eye(2) / 4 + x.T @ x / 0.09
print("federated ", run.state.server["mu/w"].numpy().round(3))
print("by formula", np.linalg.solve(precision, x.T @ y / 0.09).round(3))

# %% [markdown]
# **By the library, before round one.** A common mistake: the model's site has another name than the guide's.


# %%
def misnamed(received, local, batch):
    with batch.clients():
        weights = pyro.sample("weights", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((weights * batch.x).sum(-1), 0.3), obs=batch.y)


try:
    pyrofl.check(replace(mine("mean"), model=misnamed), data)
except ValueError as error:
    print(error)

# %% [markdown]
# **By simulation** (tutorial 10): `from pyrofl import checks`, and `ranks = checks.sbc(method, data, rounds)`; `print(ranks.p_value)` is good above 0.05, which a right method misses one time in twenty.
# A method whose prior reads a point of the server's, and moves it, is expected to fail: it fits that point to the data, and then the clients once more, so that spreads are too small.
#
# ## A server rule
#
# A server that is not a weighted mean is a function `(server, message, who, generator) -> new server`. Messages are stacked, `[client, ...]`. Here: a mean that leaves out the client that is furthest away.


# %%
def without_the_furthest(server, message, who, generator):
    mu = message["mu/w"]
    far = (mu - mu.median(0).values).norm(dim=1)
    keep = far.argsort()[:-1]
    return {n: v[keep].mean(0) for n, v in message.items()}


run = pyrofl.fit(
    replace(mine("mean"), aggregate=without_the_furthest), data, rounds=5 * rounds, progress=False
)
print("without the furthest:", run.state.server["mu/w"].numpy().round(2))

# %% [markdown]
# ## A model for each client, and what is tested
#
# So far one weight vector served all, and the broken laboratory was served badly. Now each client keeps a vector of its own, near the server's: the prior reads what came down (`received`), `init_client` makes what a client keeps, and
# only its mean goes up (`upload`).
#
# Two models can be tested now. `views` names them: functions `(received, local)` that return what model and guide are to read as the client's tensors. A method without `views` has one, "personal": what the client has after its
# training. (Test rows come third and fourth: `(x, y, x_test, y_test)`.)


# %%
def near(received, local, batch):
    with batch.clients():
        w = pyro.sample("w", dist.Normal(received["centre"], 0.5).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((w * batch.x).sum(-1), 0.3), obs=batch.y)


views = {
    "personal": lambda received, local: local,
    "global": lambda received, local: local | {"mu/w": received["centre"]},
}
personal = replace(
    mine("median"),
    init=lambda generator, clients: {"centre": torch.zeros(2)},
    init_client=lambda received, who, generator: q.start({"w": received["centre"]}),
    model=near,
    upload=lambda received, local: {"centre": local["mu/w"]},
    views=views,
)
tested = {name: (*rows, *laboratory(name == "west")) for name, rows in labs.items()}
tested = Federation.of(tested).to("cpu", torch.float64)
run = pyrofl.fit(personal, tested, rounds=2 * rounds, progress=False)
for view in views:
    errors = run.evaluate(model=view).values["rmse"].tolist()
    print(f"{view:9s}", {name: round(e, 2) for name, e in zip(labs, errors, strict=True)})

# %% [markdown]
# Root mean squared errors on new rows; the noise of a row is 0.3. Where the server's model fits, both are as good; the broken laboratory needs its own.

# %% [markdown]
# ## A prior for networks
#
# Methods of the library take a prior as a word (`prior=dist.Laplace`), or as a function of a parameter's name and shape. This one is wide for biases and narrow for weights.


# %%
def by_kind(name, shape, received, local, batch):
    width = 10.0 if name.endswith("bias") else 1.0
    centre = batch.size.new_zeros(shape)
    return dist.Normal(centre, width).to_event(len(shape))


figure, axes = plt.subplots(figsize=(5, 2.4), layout="constrained")
values = torch.linspace(-4, 4, 200)
for width, name in ((1.0, "weights"), (10.0, "biases")):
    axes.plot(values, dist.Normal(0.0, width).log_prob(values).exp(), label=name)
axes.set_xlabel("value")
axes.set_ylabel("prior density")
axes.legend(fontsize=8)
plt.show()

# %%
digits = pyrofl.federations.split(
    pyrofl.datasets.load("digits"), "slices:5", clients=20, test="labels_global"
)
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
run = pyrofl.fit(fedavg.build(net, prior=by_kind, lr=0.05), digits, rounds=rounds, progress=False)
print(f"FedAvg with your prior: accuracy {run.evaluate(model='global').mean('accuracy'):.3f}")

# %% [markdown]
# ## A metric
#
# A metric is a function `(prediction, y, mask) -> [client]`. This one counts how often the model is *sure and wrong*.


# %%
def sure_and_wrong(prediction, y, mask):
    best, guess = prediction.mean.max(-1)
    bad = (best > 0.9) & (guess != y) & mask
    return bad.sum(1) / mask.sum(1)


scores = run.evaluate(metrics={"sure and wrong": sure_and_wrong})
print({name: round(scores.mean(name), 4) for name in ("accuracy", "sure and wrong")})

# %% [markdown]
# ## Put it into the library
#
# Three files make a method a member of the family: `models/NAME.py` (a function `build` that returns a `Method`, with the paper's equations on top), `tests/models/test_NAME.py` (what it
# promises), and a row in the README's table. Then `pyrofl run NAME` works, and all tests of all methods run on yours.
#
# ## Exercises
#
# 1. A view that returns a list is an ensemble, whose predictions are averaged. Add a view "ensemble" of both models above. Whom does it serve?
# 2. Write a server with momentum: `new = old + 0.5 * last change + mean change`. Where does the last change live?
# 3. Write a metric for the share of rows whose class is among the two most probable.

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. Nobody: where both agree it changes nothing, and at the broken laboratory one of the two predictions is wrong.
both = {"ensemble": lambda received, local: [view(received, local) for view in views.values()]}
method = replace(personal, views=views | both)
run = pyrofl.fit(method, tested, rounds=2 * rounds, progress=False)
errors = run.evaluate(model="ensemble").values["rmse"].tolist()
print({name: round(e, 2) for name, e in zip(labs, errors, strict=True)})

# %% tags=["hide-cell"]
# 2. In the server's state, under a name that begins with "server/": such names never travel.


def with_momentum(server, message, who, generator):
    new = {}
    for n, v in message.items():
        change = 0.5 * server[f"server/{n}"] + v.mean(0) - server[n]
        new |= {n: server[n] + change, f"server/{n}": change}
    return new


def start(generator, clients):
    begin = q.start({"w": torch.zeros(2)})
    return begin | {f"server/{n}": torch.zeros_like(v) for n, v in begin.items()}


method = replace(mine("mean"), init=start, aggregate=with_momentum)
honest = Federation.of({n: v for n, v in labs.items() if n != "west"}).to("cpu", torch.float64)
print(
    pyrofl.fit(method, honest, rounds=2 * rounds, progress=False)
    .state.server["mu/w"]
    .numpy()
    .round(2)
)

# %% tags=["hide-cell"]
# 3. Compare y with the two best.


def among_two(prediction, y, mask):
    best = prediction.mean.topk(2, dim=-1).indices
    return ((best == y[..., None]).any(-1) & mask).sum(1) / mask.sum(1)


again = pyrofl.fit(pfedvem.build(net, lr_base=0.01), digits, rounds=rounds, progress=False)
print(round(again.evaluate(metrics={"among two": among_two}).mean("among two"), 3))
