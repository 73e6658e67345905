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
# and how to remove a client from a fitted posterior. In lesson 2 each school sent a normal approximation, from which the server
# computed how its data change the posterior; this lesson explains that message.
#
# After this lesson (about 70 minutes) you can
#
# - define a *factor* and a *cavity*, derive both for normal distributions, and compute them by hand,
# - follow how a posterior is built from the factors of three clients, and write down the algorithm of PVI,
# - remove a client, and check that its data no longer affect the posterior.
#
# You need lessons 1 to 3: Bayes' rule for normal densities, the client plate, the ELBO. The cells compute for about half a
# minute.

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
draws = 4000
# quick: draws = 100

# %% [markdown]
# ## Three clients, one line
#
# All rows follow one line, $y = b_0 + b_1 x$ plus normal noise with known standard deviation $\sigma = 0.5$; the true values are
# $b_0 = 1$ (intercept) and $b_1 = 0.5$ (slope). Client "left" has only negative $x$, client "right" only positive $x$, and
# "middle" only $x$ near 0. The data of a single client determine the line poorly.

# %%
source = torch.Generator().manual_seed(1)


def rows(low, high):
    x = torch.linspace(low, high, 6, dtype=torch.float64)
    noise = torch.randn(6, generator=source, dtype=torch.float64)
    return x[:, None], 1.0 + 0.5 * x + 0.5 * noise


own_rows = {"left": rows(-3, -1), "middle": rows(-1, 1), "right": rows(1, 3)}
data = Federation.from_arrays(own_rows).to("cpu", torch.float64)

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, (x, y) in own_rows.items():
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
# The **factor** $t_j$ of a client is the likelihood of its rows as a function of $b = (b_0, b_1)$. With the design matrix $X_j$ (a
# column of ones and $x$), its logarithm is a parabola in $b$; expand the square, and collect the terms in $b$:
#
# $$\log t_j(b) = -\frac{1}{2\sigma^2}\|y_j - X_j b\|^2 + \dots
# = -\tfrac12\, b^\top \underbrace{\frac{X_j^\top X_j}{\sigma^2}}_{P_j} b
# + b^\top \underbrace{\frac{X_j^\top y_j}{\sigma^2}}_{h_j} + \text{constant}.$$
#
# This is a normal density in $b$, up to a constant factor, if $P_j$ has an inverse. It is given by its two **natural parameters**: the precision $P_j$ (a
# matrix, the inverse of the covariance) and the **shift** $h_j$ (a vector). The mean is where the gradient $-P_j b + h_j$ is
# zero, $P_j^{-1} h_j$. The logarithm of a product is a sum, so **multiplying normal densities adds their precisions and
# shifts**. With $P_0$ and $h_0$ of the prior, the posterior has
#
# $$P = P_0 + P_1 + P_2 + P_3, \qquad h = h_0 + h_1 + h_2 + h_3, \qquad \text{mean} = P^{-1} h, \qquad
# \text{covariance} = P^{-1}.$$
#
# The server computes only this sum.


# %%
def factor(name, noise=0.5):
    x, y = (v.numpy() for v in own_rows[name])
    design = np.column_stack([np.ones(len(y)), x])
    return design.T @ design / noise**2, design.T @ y / noise**2


precision, shift = np.eye(2), np.zeros(2)  # P_0 and h_0 of the prior, N(0, 1) for both
for name in own_rows:
    p, h = factor(name)
    precision, shift = precision + p, shift + h
    mean, sd = np.linalg.solve(precision, shift), np.sqrt(np.linalg.inv(precision).diagonal())
    print(
        f"prior and clients up to {name:6s}: b0 {mean[0]:.3f} ± {sd[0]:.3f}, b1 {mean[1]:.3f} ± {sd[1]:.3f}"
    )
by_hand = mean

# %% [markdown]
# Each client makes the standard deviations smaller.
#
# ## The same posterior with pyrofl
#
# The model does not mention factors. `damping=1.0` means that the server applies the complete change that a client proposes
# (0.5: half of it). The argument `participation` chooses the clients of a round: here one, each after the other.
# `b` is a **vector** of two numbers: `expand([2])` makes two, and `to_event(1)` declares the last axis an *event*, which has one
# log density. With three clients, `b` has the shape [3, 1, 2] (clients, an axis that broadcasts over rows, event), so `b[..., 0]`
# is the intercept of each client, [3, 1].


# %%
def model(received, local, batch):
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with batch.rows():
            mean = b[..., 0] + b[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, 0.5), obs=batch.y)


def one_by_one(clients):
    """Return a rule of participation: one client per round, 0, 1, ..., then again from 0."""
    numbers = itertools.cycle(range(clients))
    return lambda source, clients: torch.tensor([next(numbers)])


states = []
method = pvi.hierarchical(model, data, shared="b", damping=1.0)
run = pyrofl.fit(
    method,
    data,
    rounds=6,
    participation=one_by_one(3),
    logger=lambda run, _: states.append(run.state.server),
    progress=False,
)
posterior = run.to_arviz(draws=draws, progress=False)["posterior"]["b"]
print("by hand   ", by_hand.round(3))
print("federated ", posterior.mean(("chain", "draw")).values.round(3), "from", draws, "draws")

# %% [markdown]
# The server stores the natural parameters of the factor of each client (`server/shift`, `server/precision`) and those of the
# product of all factors with the prior (`shift`, `precision`). Each ellipse contains 95% of its normal distribution.
# Move the slider; the first frame shows the prior.


# %%
def moments(shift, packed):
    """Return mean and covariance; `packed` holds the three distinct entries of the precision."""
    precision = np.array([[packed[0], packed[1]], [packed[1], packed[2]]])
    return np.linalg.solve(precision, shift), np.linalg.inv(precision)


def ellipse(axes, mean, covariance, **style):
    value, vector = np.linalg.eigh(covariance)
    width, height = 2 * np.sqrt(5.99 * value)  # 95% quantile of chi-squared, 2 degrees of freedom
    angle = np.degrees(np.arctan2(vector[1, 0], vector[0, 0]))
    axes.add_patch(Ellipse(mean, width, height, angle=angle, fill=False, **style))


def show(axes, t):
    ellipse(axes, np.zeros(2), np.eye(2), color="gray", linestyle=":", label="prior")
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
    axes.set_xlim(-3, 5)
    axes.set_ylim(-2.7, 2.7)
    axes.set_xlabel("b0: intercept")
    axes.set_ylabel("b1: slope")
    axes.legend(fontsize=8, loc="upper right")


def caption(t):
    return f"round {t}: update of {data.names[(t - 1) % 3]}" if t else "before round 1"


moving(show, range(len(states) + 1), size=(6, 4), title=caption)

# %% [markdown]
# The factors of "left" and "right" are long and narrow: the rows of one client determine the height of the line where its $x$
# are, which is one linear combination of intercept and slope, but neither of the two. The posterior lies where the factors
# overlap, pulled a little by the prior, and it is small. After three rounds it no longer changes: in a normal model with known $\sigma$, one update per client
# gives the exact posterior. The next figure shows sixty lines drawn from it.

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
across = np.linspace(-3, 3, 50)
for b0, b1 in posterior.values.reshape(-1, 2)[:60]:
    axes.plot(across, b0 + b1 * across, color="gray", alpha=0.2, linewidth=0.8)
for name, (x, y) in own_rows.items():
    axes.plot(x[:, 0], y, "o", label=name)
axes.set_xlabel("x")
axes.set_ylabel("y")
axes.legend()
plt.show()

# %% [markdown]
# All lines are similar: together, the three clients determine the line well.
#
# ## The cavity
#
# In round 4, client "left" updates its factor a second time. If its likelihood were multiplied into the posterior $q$ once
# more, its rows would count twice. The old factor is therefore divided out first. The result is the **cavity**: the
# posterior given the prior and all *other* clients. Dividing normal densities subtracts precisions and shifts.
#
# $$q_{\setminus j}(b) = q(b) / t_j(b).$$
#
# ## The algorithm of PVI
#
# All factors begin with $t_j = 1$, so $q$ begins with the prior. In a round, for each participating client $j$:
#
# 1. The server sends the cavity $q_{\setminus j} = q / t_j$.
# 2. The client maximizes the ELBO of its own rows over normal densities $q_{new}$, with the cavity in the place of the prior:
#    $E_{q_{new}}[\log p(y_j \mid b)] - \mathrm{KL}(q_{new} \,\|\, q_{\setminus j})$.
# 3. The client sends the natural parameters of $q_{new}$: one precision and one shift, whatever its number of rows.
# 4. The server computes the new factor $t_{new} = q_{new} / q_{\setminus j}$, and moves the natural parameters of $t_j$ towards those of
#    $t_{new}$ by the fraction *damping*. Then $q$ is the prior times all factors.
#
# Damping below 1 may be needed if each factor depends strongly on the others: if several clients then change at the same time,
# complete changes can overshoot. In a normal model with known $\sigma$ they cannot.
#
# If the likelihood is normal in $b$, by lesson 3 the maximum is the exact posterior,
# $q_{new} \propto q_{\setminus j}\, p(y_j \mid b)$, so $t_{new}$ is the likelihood, and one round of all clients is exact. In other models
# $t_{new}$ is a **normal approximation** of the likelihood. It depends on the cavity, that is, on the other clients, so rounds
# are repeated until nothing changes. With local parameters $z_j$, step 2 also optimizes their guide, which stays on the client.
#
# The cavities of the fit above:

# %%
server, cavities = {n: v.numpy() for n, v in run.state.server.items()}, {}
for j, name in enumerate(data.names):
    mean, covariance = moments(
        server["shift"] - server["server/shift"][j],
        server["precision"] - server["server/precision"][j],
    )
    cavities[name] = covariance
    print(
        f"all but {name:6s}: b0 {mean[0]:.2f} ± {covariance[0, 0] ** 0.5:.2f}, b1 {mean[1]:.2f} ± {covariance[1, 1] ** 0.5:.2f}"
    )

# %% [markdown]
# The intercept and the slope are most certain if "middle" is left out, because "left" and "right" determine the line together.
# The cavity also measures how well the other clients predict a client; `pyrofl.checks.loco` (leave one client out) uses it.
#
# ## Remove a client
#
# Client "middle" withdraws its data. `pyrofl.leave` divides the posterior by its factor; compare with a fit that never included
# this client:

# %%
left = pyrofl.leave(run, "middle")
without = Federation.from_arrays({n: v for n, v in own_rows.items() if n != "middle"}).to(
    "cpu", torch.float64
)
never = pyrofl.fit(
    pvi.hierarchical(model, without, shared="b", damping=1.0),
    without,
    rounds=2,
    participation=one_by_one(2),
    progress=False,
)
found = {}
for name, fit in (("removed", left), ("never included", never)):
    mean, covariance = moments(
        fit.state.server["shift"].numpy(), fit.state.server["precision"].numpy()
    )
    found[name] = mean
    print(f"{name:14s} b0 {mean[0]:.6f}, b1 {mean[1]:.6f}, sd of b0 {covariance[0, 0] ** 0.5:.6f}")

# %% tags=["remove-cell"]
traced = pyro.poutine.trace(model).get_trace({}, {}, data.batch(torch.arange(3)))
assert traced.nodes["b"]["value"].shape == (3, 1, 2)
assert np.allclose(found["removed"], found["never included"], atol=1e-5)
settled = [state["shift"].numpy() for state in states]
assert np.allclose(settled[2], settled[-1], rtol=1e-5)
assert np.abs(settled[0] - settled[-1]).max() > 0.1
assert np.allclose(np.linalg.solve(precision, settled[2]), by_hand, atol=1e-5)
assert min(cavities, key=lambda n: cavities[n][0, 0]) == "middle"
assert min(cavities, key=lambda n: cavities[n][1, 1]) == "middle"

# %% [markdown]
# In a normal model with known $\sigma$ the result is exact. In other models the remaining factors were computed when the client was present, so
# continue the fit of the remaining clients for some rounds; the script `examples/leaving.py` of the repository measures the
# remaining difference.
#
# ## What the server can infer
#
# A factor is a summary of the rows of a client. If a client has few rows, the summary can reveal them. With **one** row $(x, y)$,
# insert $X_j = (1, x)$ into $P_j$ and $h_j$, and divide by $1/\sigma^2$, the first entry of $P_j$:
#
# $$P_j = \frac{1}{\sigma^2} \begin{pmatrix} 1 & x \\ x & x^2 \end{pmatrix}, \qquad
# h_j = \frac{1}{\sigma^2} \begin{pmatrix} y \\ x y \end{pmatrix}.$$

# %%
x, y = 2.0, 3.7
p, h = np.outer([1, x], [1, x]) / 0.25, np.array([1, x]) * y / 0.25
print("the server infers x =", p[0, 1] / p[0, 0], "and y =", h[0] / p[0, 0])

# %% [markdown]
# Data that stay on a client are not automatically private. Lesson 12 and the page `examples/docs/what_leaves_a_client.md` of the
# repository describe two protections: secure sums, which show the server only the sum of all messages, and noise.
#
# ## Exercises
#
# Exercise 1 is basic, 2 is intermediate, 3 is advanced. Exercise 1 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# How much does a client matter? Write `influence(run, client)` for a fitted run of PVI with one shared number: the posterior mean of
# all clients minus that without `client`, divided by the posterior standard deviation of all clients. `pyrofl.leave(run, client)`
# returns the run without a client; `run.state.server["shift"]` and `["precision"]` hold one number each. Return a float.

# %% tags=["hide-cell", "solution"]
# The mean is shift / precision, the standard deviation the inverse root of the precision.


def influence(run, client):
    def mean(one):
        return one.state.server["shift"] / one.state.server["precision"]

    change = mean(run) - mean(pyrofl.leave(run, client))
    return float(change * run.state.server["precision"] ** 0.5)


# %% tags=["hide-cell", "test"]
values = {"A": np.array([1.0, 2.0, 3.0]), "B": np.array([6.0]), "C": np.array([-2.0, 0.0])}


def normal_mean(received, local, batch):
    with batch.clients():
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
        with batch.rows():
            pyro.sample("value", dist.Normal(m, 1.0), obs=batch.y)


three = Federation.from_arrays({n: (np.zeros((len(v), 1)), v) for n, v in values.items()})
three = three.to("cpu", torch.float64)
fitted = pyrofl.fit(
    pvi.hierarchical(normal_mean, three, shared="m", damping=1.0), three, rounds=2, progress=False
)
for name, gone in values.items():
    number, total = sum(map(len, values.values())) + 0.25, sum(v.sum() for v in values.values())
    expected = (total / number - (total - gone.sum()) / (number - len(gone))) * number**0.5
    found = influence(fitted, name)
    assert np.shape(found) == (), "return one number"
    assert np.isclose(abs(found), abs(expected), rtol=1e-3), (
        f"client {name}: the change of the mean, in standard deviations with all clients, is another"
    )
    assert found * expected > 0, "mind the sign: all clients minus those that remain"

# %% [markdown]
# ### Exercise 2 (intermediate, 2 points)
#
# A client has a **single** row. Write `recover(P, h)`: return its $x$ and $y$, given its factor in the model of this lesson.
# The reader of the factor does not know the noise $\sigma$, and $P$ has no inverse.

# %% tags=["hide-cell", "solution"]
# P = [[1, x], [x, x^2]] / noise^2 and h = [y, x y] / noise^2: the ratios to P[0, 0] do not depend on the noise. A factor of one
# row is the row.


def recover(P, h):
    return P[0, 1] / P[0, 0], h[0] / P[0, 0]


# %% tags=["hide-cell", "test"]
for noise in (1.0, 0.5, 3.0):
    row = np.array([1.0, -3.0])
    try:
        guess = recover(np.outer(row, row) / noise**2, row * 1.5 / noise**2)
    except np.linalg.LinAlgError:
        guess = None
    assert guess is not None, (
        "return two numbers; P has no inverse, because one row does not determine a line: use ratios"
    )
    assert np.shape(guess) == (2,), "return two numbers: x and y"
    assert not np.isclose(guess[0], 1.5), "return x first, then y"
    assert np.isclose(guess[0], -3.0), (
        "another x was used; mind its sign, and remember that the noise is unknown"
    )
    assert np.isclose(guess[1], 1.5), "another y was used; remember that the noise is unknown"
with np.errstate(all="ignore"):
    guess = recover(np.outer(row, row), 0 * row)
    origin = recover(np.outer([1.0, 0.0], [1.0, 0.0]), np.array([1.5, 0.0]))
assert np.allclose(guess, [-3.0, 0.0]), "y may be 0: do not divide by h"
assert np.allclose(origin, [0.0, 1.5]), "x may be 0: do not divide by P[0, 1]"

# %% [markdown]
# ### Exercise 3 (advanced, 3 points)
#
# With damping $\delta$, $0 < \delta \le 1$, the server replaces a factor's natural parameters $v$ by $v + \delta (v_{new} - v)$.
# The first $v$ is zero, and $v_{new}$ is the same in every round. Write `rounds_needed(damping, tolerance)`: the smallest number
# of rounds after which the remaining distance to $v_{new}$ is at most `tolerance` times the first one,
# $0 < \text{tolerance} < 1$.

# %% tags=["hide-cell", "solution"]
# Each round multiplies the distance by 1 - damping. With damping 1, one round is enough.


def rounds_needed(damping, tolerance):
    if damping == 1:
        return 1
    return int(np.ceil(np.log(tolerance) / np.log(1 - damping)))


# %% tags=["hide-cell", "test"]
needed = rounds_needed(0.5, 0.3)
assert needed is not None, "return the number of rounds"
assert needed == int(needed), "a number of rounds is an integer: round up"
assert needed == 2, "damping 0.5 halves the distance: 1/2, 1/4"
assert rounds_needed(0.9, 0.5) == 1, "damping 0.9 leaves a tenth"
assert rounds_needed(0.2, 0.01) == 21, "0.8^20 is above 0.01, 0.8^21 is below"
assert rounds_needed(0.5, 0.25) == 2, (
    "at most: after two rounds the distance is 1/4, which is enough"
)
try:
    complete = rounds_needed(1.0, 0.01)
except (ValueError, ZeroDivisionError, OverflowError):
    complete = None
assert complete == 1, (
    "damping 1.0 applies the whole update: one round is enough; log(0) is not finite"
)

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. Let all three clients participate in every round (omit `participation`), with `damping=1.0`. How many rounds are needed, and why? Compare
#    the exact mean, `moments(shift, precision)` of `run.state.server`, after 1, 2 and 3 rounds with `by_hand`; `run.status` needs
#    several rounds without a change.
# 2. The noise is known, 0.5. Replace it by an unknown shared parameter `sigma` with prior `HalfNormal(1.0)` (the absolute value of
#    a standard normal variable), and let all clients participate in every round, with `damping=1.0`. Does the posterior mean of
#    `sigma`, `run.posterior(4000)["sigma"].mean()`, still change after the first round? (The draws have the shape [4000, 3]: each
#    client has a copy, and all copies are equal. Expect about 0.33 instead of 0.5: the residuals of these 18 rows happen to be small.)

# %% tags=["hide-cell", "solution"]
# 1. One round: the factors of a normal model do not depend on the cavity, so all can be computed at the same time.
once = pyrofl.fit(method, data, rounds=1, progress=False)
mean, _ = moments(once.state.server["shift"].numpy(), once.state.server["precision"].numpy())
print("after one round", mean.round(3), "by hand", by_hand.round(3))

# %% tags=["hide-cell", "solution"]
# 2. Yes: the factor of a client is now a normal approximation that depends on the cavity. Here later rounds raise
# the mean of sigma by about 7%, to 0.33.


def unknown_noise(received, local, batch):
    with batch.clients():
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with batch.rows():
            mean = b[..., 0] + b[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(mean, sigma), obs=batch.y)


course = []
pyrofl.fit(
    pvi.hierarchical(unknown_noise, data, shared="b sigma", damping=1.0),
    data,
    rounds=8,
    logger=lambda run, _: course.append(run.posterior(draws)["sigma"].mean().item()),
    progress=False,
)
print("mean of sigma by round:", [round(v, 3) for v in course])

# %% tags=["remove-cell"]
assert np.allclose(mean, by_hand, atol=1e-5)
if draws == 4000:
    assert 1.03 < course[-1] / course[0] < 1.11
