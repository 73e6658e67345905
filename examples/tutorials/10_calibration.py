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
# # 10. Is it calibrated?
#
# A posterior makes claims: "with 90% probability the effect is between 2 and 8". A classifier does too: "I am 95% sure that this is a 7". Claims can be checked.
#
# After these fifteen minutes you can
#
# - check an inference method by simulation (SBC), and read its histograms,
# - check a model against its own data (PIT, predictive checks),
# - draw reliability curves, for all clients and for the smallest,
# - ask a model about things that it has never seen.

# %%
# %matplotlib inline
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, datasets, federations, figures, nets
from pyrofl.models import fedavg, pfedvem, pvi

# %% tags=["parameters"]
replications, rounds = 200, 20
# quick: replications, rounds = 20, 2

# %% [markdown]
# ## 1. Is the *inference* right? Simulation-based calibration
#
# If we draw the truth from the prior, make up data from it, and fit, then the truth is one more draw from the posterior. So its **rank** among the posterior's draws must be uniform: every place,
# from first to last, is equally likely. This needs no real data and no exact posterior. `checks.sbc` does it for a whole federation, hundreds of times side by side.

# %%
sizes = (10, 6, 3, 1)
rows = torch.arange(20).split(sizes)
x = torch.randn(20, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
data = Federation(x, 0 * x[:, 0], rows, [r[:0] for r in rows], names=tuple("ABCD"))


def model(received, local, batch):
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu + 1.5 * eta, 1.0), obs=batch.y)


found = {}
for covariance in ("full", "diagonal"):
    method = pvi.hierarchical(
        model, data, shared="mu", covariance=covariance, damping=0.5, draws=8, steps=6
    )
    draws = 199 if replications >= 100 else 19
    found[covariance] = checks.sbc(method, data, rounds=10, replications=replications, draws=draws)
    print(f"{covariance:9s} smallest p value {found[covariance].p_value:.2g}")

figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
for axes, (name, ranks) in zip(panels, found.items(), strict=True):
    axes.hist(ranks.places["mu"].values.ravel(), ranks.bins, edgecolor="white")
    axes.axhline(replications / ranks.bins, color="black", linestyle=":")
    axes.set_title(f"{name} covariance", fontsize=10)
    axes.set_xlabel("place of the true mu among the draws")
panels[0].set_ylabel("replications")
plt.show()

# %% [markdown]
# Flat is right. A **U** says that the truth lies near or beyond the ends of the draws too often: the posterior is too narrow. A hill says that it is too wide, a slope that it is
# shifted.

# %%
found["diagonal"].coverage((0.5, 0.9))["mu"].to_pandas().round(2)

# %% [markdown]
# The table says which share of the 50% and of the 90% intervals contain the truth. For the diagonal guide far fewer than 90% do.
#
# ## 2. Is the *model* right? Ask whether it could have made the data
#
# SBC says nothing about your data. The **probability integral transform** (PIT) does: for every row, what share of the model's predictions is smaller than the observed response? For a
# good model this is uniform, too. Here a normal model meets data with rare large errors.

# %%
errors = np.random.default_rng(0).standard_t(1.5, size=200)
y = torch.from_numpy(3 + errors)
parts = torch.arange(200).split(40)
rough = Federation(
    torch.zeros(200, 1).double(), y, parts, [r[:0] for r in parts], names=tuple("PQRST")
)


def measured(family):
    def program(received, local, batch):
        with batch.clients():
            mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
            with batch.rows():
                pyro.sample("y", family(mu, sigma), obs=batch.y)

    return program


figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
for axes, (name, family) in zip(
    panels,
    {
        "normal errors": dist.Normal,
        "Student-t errors": lambda m, s: dist.StudentT(2.0, m, s),
    }.items(),
    strict=True,
):
    run = pyrofl.fit(
        pvi.hierarchical(measured(family), rough, shared="mu sigma"),
        rough,
        rounds=rounds,
        progress=False,
    )
    table = checks.pit(run)
    column = next(c for c in table.columns if c.startswith("pit"))
    axes.hist(table[column], 10, range=(0, 1), edgecolor="white")
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("PIT of a row")
    print(
        f"{name}: share of rows between 0.3 and 0.7 is {table[column].between(0.3, 0.7).mean():.2f} (0.4 expected)"
    )
panels[0].set_ylabel("rows")
plt.show()

# %% [markdown]
# The hill on the left says: most rows are nearer to the middle than the model expects, because a few extreme ones made it wide.
#
# ## 3. Is the *classifier* as right as it is sure?

# %%
digits = federations.split(datasets.load("digits"), "slices:5", clients=20, test="labels_global")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
runs = {
    "FedAvg": pyrofl.fit(fedavg.build(net), digits, rounds=rounds, progress=False),
    "pFedVEM": pyrofl.fit(pfedvem.build(net, lr_base=0.01), digits, rounds=rounds, progress=False),
}
figures.reliability({name: run.calibration() for name, run in runs.items()})

# %% [markdown]
# On the diagonal, predictions are right as often as they claim. The **expected calibration error** (ECE) is the mean distance from it. But a mean
# over clients can hide the small ones, so look at them, too. Here pFedVEM is less calibrated for the five smallest, and FedAvg is not:

# %%
for name, run in runs.items():
    scores = run.evaluate()
    few = digits.sizes[scores.ids].argsort()[:5]
    print(
        f"{name:8s} ECE {scores.mean('ece'):.3f}; of the five smallest clients {float(scores.values['ece'][few].mean()):.3f}"
    )

# %% [markdown]
# ## 4. What does it say about things it has never seen?
#
# Train on the digits 0 to 4, and ask about 5 to 9. The best answer would be "I do not know", a high **entropy**. (`doubt` below is simpler: one minus the largest
# probability.) AUROC tells how well entropy
# separates known from unknown: 0.5 is a coin, 1 is perfect.

# %%
every = datasets.load("digits")
known = every.y < 5
inside = replace(
    every,
    x=every.x[known],
    y=every.y[known],
    is_test=every.is_test[known],
    classes=every.classes[:5],
)
strange = every.x[~known]
small = federations.split(inside, "labels:3", 10)
five = nets.build("mlp:50", (64,), 5)
method = pfedvem.build(five, lr_base=0.01, lr_head=0.01)
run = pyrofl.fit(method, small, rounds=rounds, progress=False)
mine = checks.uncertainty(method, small, run.state, draws=100)
other = checks.uncertainty(method, small, run.state, strange, draws=100)
figures.densities(
    {"digits 0 to 4": mine.by_client("total"), "digits 5 to 9": other.by_client("total")}, 5
)

# %%
for score in ("doubt", "total", "epistemic"):
    print(f"AUROC by {score}: {float(mine.told_apart(other, score).mean()):.3f}")

# %% [markdown]
# *Total* entropy has two parts: **aleatoric** (the digit is blurred; more data would not help) and **epistemic** (the model has not learnt it; more data would).
#
# ## Exercises
#
# 1. Which histogram does SBC give for a method that stops after one round? Try it with `damping=0.5`.
# 2. Check your model of the rough errors client by client, with `checks.predictive_checks` and the largest response.
# 3. Does averaging over draws (`draws=100`) make pFedVEM better calibrated than its mean?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. The posterior has not arrived: it is too wide (near the prior), so that ranks pile up in the middle.
method = pvi.hierarchical(model, data, shared="mu", damping=0.5, draws=8, steps=6)
early = checks.sbc(
    method, data, rounds=1, replications=replications, draws=draws, allow_diverged=True
)
print(np.histogram(early.places["mu"].values.ravel(), early.bins)[0])

# %% tags=["hide-cell"]
# 2. Look at the rows `max`. A p value near 1 (clients P and Q) says that the model nearly always makes up a larger maximum than the
# observed one: wild errors of others made it wide. A p value near 0 would say that it cannot make one as large.
bad = pyrofl.fit(
    pvi.hierarchical(measured(dist.Normal), rough, shared="mu sigma"),
    rough,
    rounds=rounds,
    progress=False,
)
print(checks.predictive_checks(bad).round(3).head(10).to_string())

# %% tags=["hide-cell"]
# 3. Not here: the ECE of the averaged draws is larger. Draws disagree, so that their mean is less sure than it is right. Whether
# draws help has to be measured, for each method and data set.
for draws in (None, 100):
    print(draws, f"ECE {runs['pFedVEM'].evaluate(draws=draws).mean('ece'):.4f}")
