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
# # 4. Factors and cavities: partitioned variational inference
#
# Learn which messages clients and server exchange in **partitioned variational inference** (PVI; Ashman and others, 2022),
# and how to remove a client from a fitted posterior. In tutorial 2 each school sent how its data change the posterior;
# this tutorial explains that message.
#
# After this lesson (about 65 minutes) you can
#
# - define a *factor* and a *cavity*, derive both for normal distributions, and compute them by hand,
# - follow how a posterior is built from the factors of three clients,
# - remove a client, and check that its data no longer affect the posterior.

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
draws, full = 2000, True
# quick: draws, full = 100, False

# %% [markdown]
# ## Three clients, one line
#
# All rows follow one line, $y = b_0 + b_1 x$ plus noise. Client "left" has only negative $x$, client "right" only
# positive $x$. The data of a single client determine the line poorly.

# %%
source = torch.Generator().manual_seed(1)


def rows(low, high):
    x = torch.linspace(low, high, 6, dtype=torch.float64)
    noise = torch.randn(6, generator=source, dtype=torch.float64)
    return x[:, None], 1.0 + 0.5 * x + 0.5 * noise


sites = {"left": rows(-3, -1), "middle": rows(-1, 1), "right": rows(1, 3)}
data = Federation.from_arrays(sites).to("cpu", torch.float64)

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
# By Bayes' rule, the posterior of three clients is a product:
#
# $$p(b \mid \text{all rows}) \propto p(b)\; \underbrace{p(y_1 \mid b)}_{t_1(b)}\;
# \underbrace{p(y_2 \mid b)}_{t_2(b)}\; \underbrace{p(y_3 \mid b)}_{t_3(b)}.$$
#
# The **factor** $t_j$ of a client is the likelihood of its rows as a function of $b$. For normal rows it is proportional to
# a normal density (it need not integrate to one) with two natural parameters: a *precision* $P_j$ (a matrix) and a *shift*
# $h_j$ (a vector). Derivation: with the design matrix $X_j$ (a column of ones and $x$) and noise variance $\sigma^2$,
#
# $$\log t_j(b) = -\frac{1}{2\sigma^2}\|y_j - X_j b\|^2 + \dots
# = -\tfrac12\, b^\top \underbrace{\frac{X_j^\top X_j}{\sigma^2}}_{P_j} b
# + b^\top \underbrace{\frac{X_j^\top y_j}{\sigma^2}}_{h_j} + \text{constant}.$$
#
# Logarithms of a product add, so **multiplying normal densities adds their precisions and shifts**:
#
# $$P = P_0 + P_1 + P_2 + P_3, \qquad h = h_0 + h_1 + h_2 + h_3, \qquad \text{mean} = P^{-1} h.$$
#
# The server computes only this sum.


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
        f"prior and clients up to {name:6s}: b0 {mean[0]:.3f} ± {sd[0]:.3f}, b1 {mean[1]:.3f} ± {sd[1]:.3f}"
    )
by_hand = mean

# %% [markdown]
# ## The same posterior with pyrofl
#
# The model does not mention factors. With `damping=1.0` the server applies the complete update of a client (0.5 applies
# half of it). Here one client participates in each round.


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
    logger=lambda run, _: states.append(run.state.server),
    progress=False,
)
posterior = run.to_arviz(draws=draws)["posterior"]["b"]
print("by hand   ", by_hand.round(3))
print("federated ", posterior.mean(("chain", "draw")).values.round(3), "from", draws, "draws")

# %% [markdown]
# The server stores the factor of each client and the product of all factors with the prior. Each ellipse contains 95% of
# its normal distribution:


# %%
def moments(shift, packed):
    """Return mean and covariance; `packed` holds the three distinct entries of the precision."""
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
    axes.set_xlabel("b0: intercept")
    axes.set_ylabel("b1: slope")
    axes.legend(fontsize=8, loc="upper right")


def caption(t):
    return f"round {t}: update of {data.names[(t - 1) % 3]}" if t else "before round 1"


moving(show, range(len(states) + 1), size=(6, 4), title=caption)

# %% [markdown]
# The factors of "left" and "right" are long and narrow: the rows of one client determine a linear relation between height
# and slope, but not their values. The posterior lies where the factors overlap, and it is small. After three rounds the
# posterior no longer changes: in a normal model, one update per client gives the exact posterior.

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
across = np.linspace(-3, 3, 50)
for b0, b1 in posterior.values.reshape(-1, 2)[:60]:
    axes.plot(across, b0 + b1 * across, color="grey", alpha=0.2, linewidth=0.8)
for name, (x, y) in sites.items():
    axes.plot(x[:, 0], y, "o", label=name)
axes.set_xlabel("x")
axes.set_ylabel("y and sixty posterior draws of the line")
axes.legend()
plt.show()

# %% [markdown]
# ## The cavity
#
# In round 4, client "left" updates its factor a second time. If its likelihood were multiplied into the posterior once
# more, its rows would count twice. The old factor is therefore divided out first. The result is the **cavity**: the
# posterior given the prior and all *other* clients.
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
        f"all but {name:6s}: b0 {mean[0]:.2f} ± {covariance[0, 0] ** 0.5:.2f}, b1 {mean[1]:.2f} ± {covariance[1, 1] ** 0.5:.2f}"
    )

# %% [markdown]
# The cavity also measures how well the other clients predict this client. `checks.loco` (leave one client out) uses
# it.
#
# ## Remove a client
#
# Client "middle" withdraws its data. Divide the posterior by its factor, and compare with a fit without this client:

# %%
left = pyrofl.leave(run, "middle")
without = Federation.from_arrays({n: v for n, v in sites.items() if n != "middle"}).to(
    "cpu", torch.float64
)
never = pyrofl.fit(
    pvi.hierarchical(model, without, shared="b", damping=1.0),
    without,
    rounds=3,
    participation=lambda source, clients: torch.tensor([next(turn) % 2]),
    progress=False,
)
found = {}
for name, fit in (("removed", left), ("never included", never)):
    mean, covariance = moments(
        fit.state.server["shift"].numpy(), fit.state.server["precision"].numpy()
    )
    found[name] = mean
    print(f"{name:14s} b0 {mean[0]:.6f}, b1 {mean[1]:.6f}, sd {covariance[0, 0] ** 0.5:.6f}")

# %% tags=["remove-cell"]
assert np.allclose(found["removed"], found["never included"], atol=1e-5)
settled = [state["shift"].numpy() for state in states]
assert np.allclose(settled[2], settled[-1], rtol=1e-5)
assert np.abs(settled[0] - settled[-1]).max() > 0.1

# %% [markdown]
# In normal models the result is exact. In other models, continue the fit of the remaining clients for some rounds (the
# example script `leaving.py` measures the remaining difference).
#
# ## What the server can infer
#
# A factor is a summary of the rows of a client. If a client has few rows, the summary can reveal them: from $P_j$ and $h_j$
# of a client with **one** row, the server can compute this row.

# %%
x, y = 2.0, 3.7
p, h = np.outer([1, x], [1, x]) / 0.25, np.array([1, x]) * y / 0.25
print("the server infers x =", p[0, 1] / p[0, 0], "and y =", h[0] / p[0, 0])

# %% [markdown]
# Data that stay on a client are not automatically private. The page on what leaves a client and tutorial 12 describe two
# protections: secure sums and noise.
#
# ## Exercises
#
# Exercises 1 and 2 are basic, 3 is intermediate, 4 is advanced. Use NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `natural(mean, covariance)`: precision $P$ and shift $h$ of a normal distribution.

# %% tags=["hide-cell", "solution"]
# P is the inverse of the covariance, h = P mean.


def natural(mean, covariance):
    precision = np.linalg.inv(covariance)
    return precision, precision @ mean


# %% tags=["hide-cell", "test"]
spread = np.array([[2.0, 0.5], [0.5, 1.0]])
P, h = natural(np.array([1.0, -1.0]), spread)
assert np.allclose(P @ spread, np.eye(2)), "the precision is the inverse of the covariance matrix"
assert np.allclose(np.linalg.solve(P, h), [1.0, -1.0]), "the shift is the precision times the mean"

# %% [markdown]
# ### Exercise 2 (basic, 2 points)
#
# Write `cavity(P, h, P_own, h_own)`: **mean and covariance** of the cavity, given the posterior $(P, h)$ and the factor of
# the client.

# %% tags=["hide-cell", "solution"]
# Dividing by a factor subtracts its natural parameters.


def cavity(P, h, P_own, h_own):
    covariance = np.linalg.inv(P - P_own)
    return covariance @ (h - h_own), covariance


# %% tags=["hide-cell", "test"]
others = np.array([[3.0, 1.0], [1.0, 2.0]]), np.array([1.0, 0.5])
own = np.array([[1.0, -1.0], [-1.0, 2.0]]), np.array([4.0, 0.0])
at, spread = cavity(others[0] + own[0], others[1] + own[1], *own)
assert np.allclose(spread, np.linalg.inv(others[0])), (
    "divide by the factor: subtract its precision, then invert"
)
assert np.allclose(at, np.linalg.solve(*others)), "subtract the shift, too, and return the mean"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# A client has a **single** row. Write `recover(P, h)`: return its $x$ and $y$, given its factor in the model of this lesson.
# The noise is not known to the reader of the factor.

# %% tags=["hide-cell", "solution"]
# P = [[1, x], [x, x^2]] / noise^2 and h = [y, x y] / noise^2: the ratios to P[0, 0] do not depend on the noise. A factor of one
# row is the row.


def recover(P, h):
    return P[0, 1] / P[0, 0], h[0] / P[0, 0]


# %% tags=["hide-cell", "test"]
for noise in (1.0, 0.5, 3.0):
    row = np.array([1.0, -3.0])
    guess = recover(np.outer(row, row) / noise**2, row * 1.5 / noise**2)
    assert np.isclose(guess[0], -3.0), "x is the ratio P[0, 1] / P[0, 0]; mind its sign"
    assert np.isclose(guess[1], 1.5), "y is the ratio h[0] / P[0, 0], whatever the noise"

# %% [markdown]
# ### Exercise 4 (advanced, 3 points)
#
# With damping $\delta$, the server replaces a factor's parameters $v$ by $v + \delta (v_{new} - v)$. The first $v$ is zero, and
# $v_{new}$ is the same in every round. Write `rounds_needed(damping, tolerance)`: the smallest number of rounds after which
# the remaining distance to $v_{new}$ is at most `tolerance` times the first one.

# %% tags=["hide-cell", "solution"]
# Each round multiplies the distance by 1 - damping. With damping 1, one round is enough.


def rounds_needed(damping, tolerance):
    if damping == 1:
        return 1
    return int(np.ceil(np.log(tolerance) / np.log(1 - damping)))


# %% tags=["hide-cell", "test"]
assert rounds_needed(0.5, 0.3) == 2, "damping 0.5 halves the distance: 1/2, 1/4"
assert rounds_needed(0.9, 0.5) == 1, "damping 0.9 leaves a tenth"
assert rounds_needed(0.2, 0.01) == 21, "0.8^20 is above 0.01, 0.8^21 is below"
assert rounds_needed(1.0, 0.01) == 1, "without damping one round is enough"

# %% [markdown]
# ## Explore
#
# 1. Let all three clients participate in every round, with `damping=1.0`. How many rounds are needed?
# 2. The removal of which client gives the largest posterior standard deviation of the slope? Compute it from the factors.
# 3. The noise is known, 0.5. Replace it by an unknown shared parameter `sigma`, and let all clients participate in every
#    round. Does the posterior still change after the first round?

# %% tags=["hide-cell", "solution"]
# 1. One round: the factors of a normal model do not depend on the cavity, so all can be computed at the same time.
once = pyrofl.fit(method, data, rounds=1, progress=False)
mean, _ = moments(once.state.server["shift"].numpy(), once.state.server["precision"].numpy())
print("after one round", mean.round(3), "by hand", by_hand.round(3))

# %% tags=["hide-cell", "solution"]
# 2. It is largest without "left" or without "right", and equal for both, because their x are mirror images. "middle" has little
# information about the slope.
slope = {}
for j, name in enumerate(data.names):
    own = server["server/shift"][j], server["server/precision"][j]
    _, spread = moments(server["shift"] - own[0], server["precision"] - own[1])
    slope[name] = spread[1, 1] ** 0.5
print({name: round(float(sd), 3) for name, sd in slope.items()})

# %% tags=["hide-cell", "solution"]
# 3. Yes: the factor of a client is now a normal approximation that depends on the cavity. Here later rounds change
# the mean of sigma by about 1% only.


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
    logger=lambda run, _: course.append(run.posterior(draws)["sigma"].mean().item()),
    progress=False,
)
print("mean of sigma by round:", [round(v, 3) for v in course])

# %% tags=["remove-cell"]
assert np.allclose(mean, by_hand, atol=1e-5)
assert np.isclose(slope["left"], slope["right"], rtol=1e-3)
assert slope["left"] > 1.5 * slope["middle"]
if full:
    assert abs(course[-1] / course[0] - 1) < 0.03
