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
# # 5. What the server may know: factors, cavities, and a client that leaves
#
# In tutorial 1 each school sent "how its data change what is believed". Here we look into that message. The method is
# **partitioned variational inference** (PVI; Ashman and others, 2022).
#
# After these fifteen minutes you can
#
# - say what a *factor* and a *cavity* are, and compute them by hand for normal distributions,
# - watch a posterior being put together from three clients, one by one,
# - let a client leave, and check that nothing of it is left.

# %%
# %matplotlib inline
import itertools

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.patches import Ellipse

import pyrofl
from pyrofl import Federation
from pyrofl.figures import moving
from pyrofl.models import pvi

# %% tags=["parameters"]
draws = 2000
# quick: draws = 100

# %% [markdown]
# ## Three clients, one line
#
# All rows lie near one straight line, $y = b_0 + b_1 x$ plus noise. But the client "left" has only negative $x$, "right" only
# positive ones. Alone, each of them knows little about the line.

# %%
source = torch.Generator().manual_seed(1)


def rows(low, high):
    x = torch.linspace(low, high, 6, dtype=torch.float64)
    noise = torch.randn(6, generator=source, dtype=torch.float64)
    return x[:, None], 1.0 + 0.5 * x + 0.5 * noise


sites = {"left": rows(-3, -1), "middle": rows(-1, 1), "right": rows(1, 3)}
data = Federation.of(sites).to("cpu", torch.float64)

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, (x, y) in sites.items():
    axes.plot(x[:, 0], y, "o", label=name)
axes.set_xlabel("x")
axes.set_ylabel("y")
axes.legend()
plt.show()

# %% [markdown]
# ## A factor
#
# Bayes' rule for three clients is a product:
#
# $$p(b \mid \text{all rows}) \propto p(b)\; \underbrace{p(y_1 \mid b)}_{t_1(b)}\;
# \underbrace{p(y_2 \mid b)}_{t_2(b)}\; \underbrace{p(y_3 \mid b)}_{t_3(b)}.$$
#
# A client's **factor** $t_j$ is what its rows say, as a function of $b$. For normal rows it has the shape of a normal density (it need
# not integrate to one), so two things describe it: a *precision* $P_j$ (a matrix) and a *shift* $h_j$ (a vector). To multiply
# normals, **add** these:
#
# $$P = P_0 + P_1 + P_2 + P_3, \qquad h = h_0 + h_1 + h_2 + h_3, \qquad \text{mean} = P^{-1} h.$$
#
# The server does nothing else.


# %%
def factor(name, noise=0.5):
    x, y = (v.numpy() for v in sites[name])
    design = np.column_stack([np.ones(len(y)), x])
    return design.T @ design / noise**2, design.T @ y / noise**2


precision, shift = np.eye(2) / 2.0**2, np.zeros(2)  # the prior, N(0, 2^2) for both
for name in sites:
    p, h = factor(name)
    precision, shift = precision + p, shift + h
    mean, sd = np.linalg.solve(precision, shift), np.sqrt(np.linalg.inv(precision).diagonal())
    print(
        f"prior and clients up to {name:6s}: b0 {mean[0]:.3f} +- {sd[0]:.3f}, b1 {mean[1]:.3f} +- {sd[1]:.3f}"
    )
by_hand = mean

# %% [markdown]
# ## The same by the library, and watched
#
# The program does not mention factors. With `damping=1.0` the server takes over a client's whole answer (0.5 would go half of the
# way). Only one client is asked per round.


# %%
def model(received, local, batch):
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with batch.rows():
            mean = b[..., 0] + b[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, 0.5), obs=batch.y)


turn = itertools.cycle(range(3))
states = []
method = pvi.hierarchical(model, data, shared="b", damping=1.0)
run = pyrofl.fit(
    method,
    data,
    rounds=6,
    participation=lambda source, clients: torch.tensor([next(turn)]),
    log=lambda run, _: states.append(run.state.server),
    progress=False,
)
posterior = run.to_arviz(draws=draws)["posterior"]["b"]
print("by hand   ", by_hand.round(3))
print("federated ", posterior.mean(("chain", "draw")).values.round(3), "from", draws, "draws")

# %% [markdown]
# The server keeps the factor of each client, and their product with the prior. Each ellipse holds 95% of its normal
# distribution:


# %%
def moments(shift, packed):
    """Return mean and covariance; `packed` holds the three different entries of the precision."""
    precision = np.array([[packed[0], packed[1]], [packed[1], packed[2]]])
    return np.linalg.solve(precision, shift), np.linalg.inv(precision)


def ellipse(axes, mean, covariance, **style):
    value, vector = np.linalg.eigh(covariance)
    width, height = 2 * np.sqrt(5.99 * value)
    angle = np.degrees(np.arctan2(vector[1, 0], vector[0, 0]))
    axes.add_patch(Ellipse(mean, width, height, angle=angle, fill=False, **style))


def show(axes, t):
    ellipse(axes, np.zeros(2), 4.0 * np.eye(2), color="grey", linestyle=":", label="prior")
    if t:
        server = {n: v.numpy() for n, v in states[t - 1].items()}
        for j, name in enumerate(data.names):
            shift, packed = server["server/shift"][j], server["server/precision"][j]
            if packed[0] > 0:
                ellipse(axes, *moments(shift, packed), color=f"C{j}", label=f"factor of {name}")
        ellipse(
            axes,
            *moments(server["shift"], server["precision"]),
            color="black",
            linewidth=2,
            label="posterior",
        )
    axes.set_xlim(-2, 4)
    axes.set_ylim(-1.5, 2)
    axes.set_xlabel("b0: height of the line at x = 0")
    axes.set_ylabel("b1: slope")
    axes.legend(fontsize=8, loc="upper right")


def told(t):
    return f"round {t}: {data.names[(t - 1) % 3]} answers" if t else "before round 1"


moving(show, range(len(states) + 1), size=(6, 4), title=told)

# %% [markdown]
# "left" and "right" are long and thin: each sees that height and slope are related, but not how large they are. Where they cross, the
# posterior is small. After three rounds nothing moves any more: the model is normal, so one visit of each client is exact.

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
across = np.linspace(-3, 3, 50)
for b0, b1 in posterior.values.reshape(-1, 2)[:60]:
    axes.plot(across, b0 + b1 * across, color="grey", alpha=0.2, linewidth=0.8)
for name, (x, y) in sites.items():
    axes.plot(x[:, 0], y, "o", label=name)
axes.set_xlabel("x")
axes.set_ylabel("y, and sixty lines drawn from the posterior")
axes.legend()
plt.show()

# %% [markdown]
# ## The cavity: do not count twice
#
# In round 4 "left" is asked again. If it multiplied its likelihood once more, its rows would count twice. So the server takes the
# old factor out first. What is left is the **cavity**: what all *others* believe.
#
# $$q_{\setminus j}(b) = q(b) / t_j(b).$$

# %%
server = {n: v.numpy() for n, v in run.state.server.items()}
for j, name in enumerate(data.names):
    mean, covariance = moments(
        server["shift"] - server["server/shift"][j],
        server["precision"] - server["server/precision"][j],
    )
    print(
        f"all but {name:6s}: b0 {mean[0]:.2f} +- {covariance[0, 0] ** 0.5:.2f}, b1 {mean[1]:.2f} +- {covariance[1, 1] ** 0.5:.2f}"
    )

# %% [markdown]
# The cavity is also the answer to "how well do the others predict this client?". `checks.loco` (leave one client out) uses
# it.
#
# ## A client leaves
#
# "middle" wants its data out. Divide its factor out, and compare with a fit that never had it.

# %%
left = pvi.leave(run, "middle")
without = Federation.of({n: v for n, v in sites.items() if n != "middle"}).to("cpu", torch.float64)
never = pyrofl.fit(
    pvi.hierarchical(model, without, shared="b", damping=1.0),
    without,
    rounds=3,
    participation=lambda source, clients: torch.tensor([next(turn) % 2]),
    progress=False,
)
for name, fit in (("after it left", left), ("never there", never)):
    mean, covariance = moments(
        fit.state.server["shift"].numpy(), fit.state.server["precision"].numpy()
    )
    print(f"{name:14s} b0 {mean[0]:.6f}, b1 {mean[1]:.6f}, sd {covariance[0, 0] ** 0.5:.6f}")

# %% [markdown]
# For normal models the result is exact. For other models the remaining clients should go on for some rounds (the example script
# `leaving.py` shows how far that goes).
#
# ## And what does the server know?
#
# A factor is a summary of a client's rows. If the rows are few, it can say a lot about them: from $P_j$ and $h_j$ of a
# client with **one** row, the server can compute the row.

# %%
x, y = 2.0, 3.7
p, h = np.outer([1, x], [1, x]) / 0.25, np.array([1, x]) * y / 0.25
print("the server reads x =", p[0, 1] / p[0, 0], "and y =", h[0] / p[0, 0])

# %% [markdown]
# Rows that do not leave are not the same as rows that are secret. The page on what leaves a client, and tutorial 11, say what
# helps: secure sums, and noise.
#
# ## Exercises
#
# 1. Let all three clients answer in every round, with `damping=1.0`. How many rounds does it take?
# 2. Which client's leaving would make the posterior of the slope widest? Compute it from the factors.
# 3. The rows' noise is 0.5 and known. Replace it by an unknown `sigma`, shared by all, and let all clients answer in every round. Is the first round still the last that
#    moves something?

# %% [markdown]
# ### Solutions

# %% tags=["hide-cell"]
# 1. One round: factors of a normal model do not depend on the cavity, so all can be found at once.
once = pyrofl.fit(method, data, rounds=1, progress=False)
mean, _ = moments(once.state.server["shift"].numpy(), once.state.server["precision"].numpy())
print("after one round", mean.round(3), "by hand", by_hand.round(3))

# %% tags=["hide-cell"]
# 2. Take each factor out and look at the standard deviation of b1. It is widest without "left" or without "right", and
# equally wide: their x are mirror images. "middle" says little about the slope.
for j, name in enumerate(data.names):
    _, covariance = moments(
        server["shift"] - server["server/shift"][j],
        server["precision"] - server["server/precision"][j],
    )
    print(f"without {name:6s} sd of the slope {covariance[1, 1] ** 0.5:.3f}")

# %% tags=["hide-cell"]
# 3. No: the factor of a client is a normal approximation now, which depends on what the others believe. But later rounds move
# the mean by little here, about 0.01 times its value.


def unknown_noise(received, local, batch):
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with batch.rows():
            mean = b[..., 0] + b[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, sigma), obs=batch.y)


course = []
pyrofl.fit(
    pvi.hierarchical(unknown_noise, data, shared="b sigma"),
    data,
    rounds=8,
    log=lambda run, _: course.append(run.posterior(draws)["sigma"].mean().item()),
    progress=False,
)
print("mean of sigma by round:", [round(v, 3) for v in course])
