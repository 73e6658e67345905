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
# # 7. Confidence weights: pFedVEM
#
# Learn how **pFedVEM** (Zhu, Ma and Blaschko, CVPR 2023) weights clients, and where this fails. FedAvg weights a client by its
# number of rows; pFedVEM weights it by its **confidence**, which depends on the posterior variance of the client's model and on
# its distance to the server's model. The example: two people measure the length of planks, one of them four planks, the other
# sixteen. We compute the method by hand, in closed form over many rounds, and in Pyro.
#
# After this lesson (about 75 minutes) you can
#
# - derive the confidence and the server update from the ELBO,
# - compute a round by hand, and compare it with the library,
# - explain why the variance of a client can collapse, and how a prior of the confidence prevents it,
# - judge whether confidence weights have any effect on your data.
#
# You need lessons 1 to 4. The cells compute for about ten seconds.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import torch

import pyrofl
from pyrofl import Federation, figures, likelihoods, nets
from pyrofl.figures import moving
from pyrofl.models import fedavg, pfedvem

# %% tags=["parameters"]
rounds, steps = 12, 400
# quick: rounds, steps = 3, 40

# %% [markdown]
# ## The model and its ELBO
#
# Client $j$ has a personal vector $w_j$ of $d$ numbers, close to a common vector $w$. The confidence $\tau_j$ states how
# close. It is a precision (the inverse of a variance):
#
# $$w_j \sim N(w, I/\tau_j), \qquad q(w_j) = N(\mu_j, \mathrm{diag}(s_j^2)).$$
#
# What is learned, $w$ and $\tau_j$, is only in the prior term of the ELBO. As
# $E_q[(w_{jk} - w_k)^2] = s_{jk}^2 + (\mu_{jk} - w_k)^2$, it is
#
# $$E_q[\log p(w_j \mid w, \tau_j)] = \tfrac d2 \log \tau_j - \tfrac{\tau_j}{2}
# \Big(\sum_k s_{jk}^2 + \|\mu_j - w\|^2\Big) + \text{constant}.$$
#
# The derivative with respect to $\tau_j$ is $\frac{d}{2 \tau_j} - \frac12 (\dots)$, with the same parenthesis. It is zero at the
# **confidence** (equation 8 of the paper). The derivative with respect to $w$ of the sum over clients is
# $\sum_j \tau_j (\mu_j - w)$. It is zero at the **confidence-weighted mean** (equation 9):
#
# $$\tau_j = \frac{d}{\sum_k s_{jk}^2 + \|\mu_j - w\|^2}, \qquad
# w = \frac{\sum_j \tau_j \mu_j}{\sum_j \tau_j}.$$
#
# The confidence is small if the posterior variance is large, or if the client is far from $w$.

# %% [markdown]
# ## Two rounds by hand
#
# Now $d = 1$ and $y_{ji} \sim N(w_j, 2^2)$. Client 1 has 4 rows with mean 1. Client 2 has 16 rows with mean 3. The server
# starts with $w = 0$, and both clients start with $\tau_j = 1$. A round has three steps: each client computes $\tau_j$ from
# its posterior of the *previous* round, then its new posterior; then the server computes $w$.
#
# Given $w$ and $\tau_j$, the posterior of $w_j$ is normal. Its precision is the sum of the precision of the rows,
# $p_j = n_j / 2^2$, and that of the prior, $\tau_j$:
#
# $$s_j^2 = \frac{1}{p_j + \tau_j},\qquad \mu_j = \frac{p_j \bar y_j + \tau_j w}{p_j + \tau_j}.$$
#
# In round 1, $\mu_1 = (1 \cdot 1 + 1 \cdot 0)/2 = 0.5$ and $\mu_2 = (4 \cdot 3 + 1 \cdot 0)/5 = 2.4$. Both confidences are
# 1, so $w = (0.5 + 2.4)/2 = 1.45$.

# %%
n, mean, w, tau = np.array([4.0, 16.0]), np.array([1.0, 3.0]), 0.0, np.ones(2)
p = n / 4
mu = (p * mean + tau * w) / (p + tau)
variance = 1 / (p + tau)
w = (tau * mu).sum() / tau.sum()
print("round 1: mu", mu.round(4), "variance", variance.round(4), "w", round(w, 4))

tau = 1 / (variance + (mu - w) ** 2)
mu, variance = (p * mean + tau * w) / (p + tau), 1 / (p + tau)
w = (tau * mu).sum() / tau.sum()
print("round 2: tau", tau.round(3), "mu", mu.round(4), "w", round(w, 4))
by_hand = w

# %% [markdown]
# In round 2 client 2 has the larger confidence, 0.907 against 0.713: both clients are at the same distance from
# $w = 1.45$, and client 2 has the smaller posterior variance. Its weight is 56%. With weights by number of rows it would be
# 80%:

# %%
print("weight of client 2:", round(tau[1] / tau.sum(), 2), "by rows:", n[1] / n.sum())

# %% tags=["remove-cell"]
assert tau.round(3).tolist() == [0.713, 0.907]
assert round(tau[1] / tau.sum(), 2) == 0.56
assert n[1] / n.sum() == 0.8

# %% [markdown]
# ## Many rounds in closed form
#
# Now repeat the round. The argument `confidence` is a function of $s_j^2$ and $(\mu_j - w)^2$, so that we can replace it
# later. Where it is infinite (no variance and no distance), the client keeps its confidence, as in the library.


# %%
def eq8(variance, apart):
    return 1 / (variance + apart)


def closed_form(rounds, confidence=eq8, mean=mean):
    w, mu, variance, tau = 0.0, np.zeros(2), np.ones(2), np.ones(2)
    path = []
    for _ in range(rounds):
        with np.errstate(divide="ignore"):
            new = confidence(variance, (mu - w) ** 2)
        tau = np.where(np.isfinite(new), new, tau)
        mu, variance = (p * mean + tau * w) / (p + tau), 1 / (p + tau)
        w = (tau * mu).sum() / tau.sum()
        path.append((w, tau, mu, variance))
    return path


path = closed_form(rounds)
for t, (at, tau, mu, _) in enumerate(path[:5], 1):
    print(f"round {t}: w {at:.4f}, tau {tau.round(3)}, mu {mu.round(3)}")

# %% tags=["remove-cell"]
assert path[0][0] == 1.45
assert path[0][2].tolist() == [0.5, 2.4]
assert path[1][0] == by_hand

# %% [markdown]
# Move the slider. The gray line is the server's $w$; crosses are the means of the clients' rows.

# %%
grid = np.linspace(-1.5, 4.5, 400)


def bell(center, sd):
    return np.exp(-0.5 * ((grid - center) / sd) ** 2) / sd / np.sqrt(2 * np.pi)


def show(axes, t):
    w, tau, mu, variance = path[t]
    for j, color in enumerate(("C0", "C1")):
        axes.plot(grid, bell(mu[j], variance[j] ** 0.5), color, label=f"client {j + 1}, posterior")
        axes.plot(
            grid, bell(w, tau[j] ** -0.5), color, linestyle=":", label=f"client {j + 1}, prior"
        )
        axes.plot(mean[j], 0, "x", color=color)
    axes.axvline(w, color="gray", label="server, w")
    axes.set_ylim(0, 2.4)
    axes.set_xlabel("length")
    axes.set_ylabel("density")
    axes.legend(fontsize=7, loc="upper left")


moving(show, range(rounds), title=lambda t: f"round {t + 1}")

# %% [markdown]
# After 12 rounds the confidence of client 2 is 27.4 and that of client 1 is 0.5: client 2 has 98% of the weight, more than
# its 80% of the rows. The server has moved to client 2.
#
# ## Variance collapse
#
# Did the method converge after 12 rounds? Continue:

# %%
long = closed_form(10_000)
for t in (12, 100, 10_000):
    at, tau, _, variance = long[t - 1]
    print(
        f"after {t:6,} rounds: w {at:.4f}, tau {tau[0]:.3f} and {tau[1]:,.0f}, variance of client 2 {variance[1]:.5f}"
    )

ws, taus, mus, _ = (np.array(values) for values in zip(*long, strict=True))
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
left.semilogx(range(1, 10_001), ws, "k", label="server, w")
left.semilogx(range(1, 10_001), mus, label=["client 1", "client 2"])
right.loglog(range(1, 10_001), taus, label=["client 1", "client 2"])
left.set_ylabel("length")
right.set_ylabel("confidence tau")
for axes in (left, right):
    axes.set_xlabel("round")
    axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# The confidence of client 2 has **no limit**: it is about 27, 351 and 37,103 after 12, 100 and 10,000 rounds. Its posterior
# variance tends to zero, although its sixteen rows have a precision of 4, that is, a variance of 0.25. This is
# **variance collapse**: the client uses the server's $w$ as evidence about itself, and the server has computed $w$ mostly
# from this client. The same rows are counted again in every round.
#
# The growth can be derived. Near the end a round changes neither $w$ nor client 1, and equation 9 is
# $\tau_2 (\mu_2 - w) = \tau_1 (w - \mu_1)$. Call this constant $c$. With $s_2^2 = 1/(p_2 + \tau_2)$ and $\mu_2 - w = c/\tau_2$,
# equation 8 gives the confidence $\tau_2'$ of client 2 in the next round. For large $\tau_2$,
#
# $$\frac1{\tau_2'} = \frac1{p_2 + \tau_2} + \frac{c^2}{\tau_2^2} \approx \frac1{\tau_2} - \frac{p_2 - c^2}{\tau_2^2},
# \qquad\text{hence}\qquad \tau_2' \approx \tau_2 + p_2 - c^2.$$
#
# **Each round adds a constant**, here 3.713; $w$ does have a limit, 2.866:

# %%
c = taus[-1, 0] * (ws[-1] - mus[-1, 0])
print(
    f"c {c:.3f}, p - c^2 {p[1] - c**2:.3f}; growth in the last round {taus[-1, 1] - taus[-2, 1]:.3f}"
)

# %% tags=["remove-cell"]
if rounds == 12:
    assert path[-1][1].round(1).tolist() == [0.5, 27.4]
    assert round(path[-1][1][1] / path[-1][1].sum(), 2) == 0.98
assert [int(long[t - 1][1][1]) for t in (12, 100)] == [27, 351]
assert round(long[-1][1][1]) == 37_103
limit = 2 + 3**0.5 / 2  # of w
assert round(limit, 3) == round(ws[-1], 3) == 2.866
assert abs(c - 1 / (limit - 1)) < 1e-3
assert round(p[1] - c**2, 3) == round(taus[-1, 1] - taus[-2, 1], 3) == 3.713

# %% [markdown]
# ### A prior of the confidence
#
# The remedy is a prior of $1/\tau_j$. The library's variant `prior_scale=s` has a scaled inverse chi-squared prior with $d$
# degrees of freedom. It adds $\frac d2 \log \tau_j - \frac{\tau_j}{2} d s^2$ to the log density of $\log \tau_j$. Both terms
# have the form of those above: the first doubles $d$, the second adds $d s^2$ to the parenthesis. The maximum is
#
# $$\tau_j = \frac{2d}{\sum_k s_{jk}^2 + \|\mu_j - w\|^2 + d s^2} \le \frac{2}{s^2},$$
#
# so no confidence grows without limit. With $s = 1$:

# %%
bounded = closed_form(10_000, lambda variance, apart: 2 / (variance + apart + 1))
for t in (12, 100, 10_000):
    at, tau, _, _ = bounded[t - 1]
    print(f"after {t:6,} rounds: w {at:.4f}, tau {tau[0]:.3f} and {tau[1]:.3f}")

# %% tags=["remove-cell"]
assert np.allclose(bounded[99][1], bounded[-1][1])
assert (bounded[-1][1] < 2).all()

# %% [markdown]
# The confidences are constant from round 100 on. Without this prior, the library limits the collapse: it restricts $\tau_j$ to
# at most $1/\eta$ for the learning rate $\eta$ of $\mu_j$ and $s_j$.
#
# ## The same model in Pyro
#
# `pfedvem.build` accepts any network and likelihood. Here the network is a linear model with a constant input of 1, and all
# its parameters are Bayesian and personal (`head="*"`). Gradient steps on the ELBO replace the closed form of the posterior:
# each round has 400, enough to reach the optimum. Each averages the ELBO over 50 draws of $w_j$ (`num_particles`).

# %%
rng = np.random.default_rng(0)


def rows(count, center):
    """Return `count` rows with sample mean `center`."""
    y = rng.normal(size=count)
    return np.ones((count, 1)), y - y.mean() + center


data = Federation.from_arrays({"client 1": rows(4, 1.0), "client 2": rows(16, 3.0)}).to(
    "cpu", torch.float64
)
line = nets.build("linear", input_shape=(1,), outputs=1)


def in_pyro(rounds, **settings):
    method = pfedvem.build(
        line, head="*", likelihood=likelihoods.normal(2.0), head_epochs=steps, lr_head=0.02,
        momentum=0.0, num_particles=50, **settings,
    )  # fmt: skip
    start = {"loc/w": torch.zeros(1, dtype=torch.float64)}
    run = pyrofl.fit(method, data, rounds=rounds, server_state=start, progress=False)
    return float(run.state.server["loc/w"]), run.state.message["tau"].numpy()


found = in_pyro(rounds)
print("Pyro        tau", found[1].round(3), " w", round(found[0], 3))
print("closed form tau", path[-1][1].round(3), " w", round(path[-1][0], 3))

# %% tags=["remove-cell"]
if rounds == 12:
    assert np.allclose(found[1], path[-1][1], rtol=0.02)
    assert abs(found[0] - path[-1][0]) < 0.01

# %% [markdown]
# They agree within 2%; the rest is the Monte Carlo noise of the gradients.
#
# ## Handwritten digits
#
# Now use a real network. The digits of lesson 1 are split across twenty clients. Each client holds five of the ten classes,
# and has 5 to 176 rows. The **head** of the network (its last layer) is Bayesian and personal; the **base** (all other layers) is
# shared and has one value. `pyrofl.tune` chose the learning rates on validation rows: 0.1 for FedAvg, 0.01 for head and base of
# pFedVEM. The *global* model of pFedVEM is the base with the head $w$, a *personal* one has the head $\mu_j$.

# %%
digits = pyrofl.datasets.load("digits")
clients = pyrofl.federations.split(digits, "slices:5", clients=20, test="same_classes")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)
tuned = {"lr_head": 0.01, "lr_base": 0.01}
common = pyrofl.fit(fedavg.build(net, lr=0.1), clients, rounds=rounds, progress=False)
personal = pyrofl.fit(pfedvem.build(net, **tuned), clients, rounds=rounds, progress=False)
scores = {
    "FedAvg, global model": common.evaluate(model="global").mean("accuracy"),
    "pFedVEM, global model": personal.evaluate(model="global").mean("accuracy"),
    "pFedVEM, personal models": personal.evaluate(model="personal").mean("accuracy"),
}
for name, score in scores.items():
    print(f"{name:25s} accuracy {score:.3f}")

# %% [markdown]
# Each client is tested on the classes that it holds. The personal models are the most accurate, by less than one percentage
# point. Is this due to the confidences? The figure shows them:

# %%
statistics = personal.statistics()
figures.confidence(statistics["tau"], statistics["deviation"], clients.sizes[: clients.clients])

# %%
tau = personal.state.message["tau"]
weight, by_rows = 100 * tau / tau.sum(), 100 * clients.sizes[:20] / clients.sizes[:20].sum()
print(f"weights by confidence: {float(weight.min()):.1f}% to {float(weight.max()):.1f}%")
print(f"weights by rows:       {float(by_rows.min()):.1f}% to {float(by_rows.max()):.1f}%")

# %% [markdown]
# **Confidence has practically no effect here.** Equal weights of twenty clients would be 5%; the confidences give 4.4% to 5.2%,
# although the weights by rows would be 0.4% to 13%. The head has 510 parameters, and in twelve rounds their variances remain
# close to the initial value of 1 on average. Equation 8 is therefore near $510 / 510 = 1$ for all clients. So the
# difference between pFedVEM and FedAvg on these data cannot come from confidence: the methods differ in personal heads and in
# nearly equal weights.

# %% tags=["remove-cell"]
assert (int(clients.sizes[:20].min()), int(clients.sizes[:20].max())) == (5, 176)
assert sum(v.numel() for n, v in personal.state.server.items() if n.startswith("loc/")) == 510
if rounds == 12:
    widths = [v for n, v in personal.state.client_states.items() if n.startswith("pi/")]
    variances = torch.nn.functional.softplus(torch.cat([v.flatten(1) for v in widths], 1)) ** 2
    assert variances.shape == (20, 510)
    assert 0.9 < float(variances.mean(1).min()) < float(variances.mean(1).max()) < 1.1
    assert 0 < scores["pFedVEM, personal models"] - max([*scores.values()][:2]) < 0.01
    assert (round(float(weight.min()), 1), round(float(weight.max()), 1)) == (4.4, 5.2)
    assert (round(float(by_rows.min()), 1), round(float(by_rows.max()))) == (0.4, 13)

# %% [markdown]
# ## Exercises
#
# Exercises 1 and 2 are basic, 3 is intermediate, 4 is advanced. Exercise 2 uses pyrofl, the others NumPy only.

# %% [markdown]
# ### Exercise 1 (basic, 2 points)
#
# Write `confidence(sd, mu, w)`: equation 8 for one client. All arguments are arrays of $d$ numbers; `sd` holds the posterior
# standard deviations.

# %% tags=["hide-cell", "solution"]
# d appears in the numerator, and variances are squared standard deviations.


def confidence(sd, mu, w):
    return len(sd) / ((sd**2).sum() + ((mu - w) ** 2).sum())


# %% tags=["hide-cell", "test"]
given = np.array([0.5, 1.0]), np.array([3.0, 2.0]), np.array([0.0, 3.0])
assert np.shape(confidence(*given)) == (), "return one number for all d parameters: take sums"
assert np.isclose(confidence(np.ones(3), np.zeros(3), np.zeros(3)), 1.0), (
    "sd 1, no distance: tau is 1"
)
assert np.isclose(confidence(*given), 2 / (1.25 + 10)), (
    "insert these numbers into equation 8 by hand, and compare term by term"
)

# %% [markdown]
# ### Exercise 2 (basic, 2 points)
#
# Write `favored(run, data)`: a list with the names of the clients that a fitted run of pFedVEM weights more than FedAvg would, in
# their order. `run.statistics()["tau"]` holds the confidences, `data.sizes` the numbers of rows, `data.names` the names.

# %% tags=["hide-cell", "solution"]
# Both weights must sum to one before they can be compared.


def favored(run, data):
    tau = run.statistics()["tau"]
    more = tau / tau.sum() > data.sizes / data.sizes.sum()
    return [name for name, yes in zip(data.names, more.tolist(), strict=True) if yes]


# %% tags=["hide-cell", "test"]
planks = {
    name: (np.ones((count, 1)), np.full(count, value) + np.linspace(-1, 1, count))
    for name, count, value in (
        ("Ann", 40, 3.0),
        ("Bob", 4, 3.2),
        ("Cay", 10, 2.9),
        ("Dan", 30, 9.0),
    )
}
planks = Federation.from_arrays(planks).to("cpu", torch.float64)
fitted = pyrofl.fit(
    pfedvem.build(
        nets.build("linear", input_shape=(1,), outputs=1), head="*",
        likelihood=likelihoods.normal(2.0), head_epochs=50, lr_head=0.02,
    ),
    planks, rounds=3, progress=False,
)  # fmt: skip
found = favored(fitted, planks)
assert isinstance(found, list), "return a list"
assert all(isinstance(name, str) for name in found), "return the names of the clients"
tau = fitted.statistics()["tau"].numpy()
expected = {
    n for n, t, k in zip(planks.names, tau, planks.sizes, strict=True) if t * 84 > k * tau.sum()
}
assert {*found} == expected, (
    "compare the fraction of each client in the sum of the confidences with its fraction of the rows"
)
assert found == sorted(found), "keep the order of the clients"

# %% [markdown]
# ### Exercise 3 (intermediate, 3 points)
#
# A federation has a **single** client, so $w = \mu$ after every round. Its rows have precision $p$, and in round 1 it has
# $\tau = 1$ and $\mu = w$. Write `single(p, rounds)`: its $\tau$ in round number `rounds`, without a loop.

# %% tags=["hide-cell", "solution"]
# The distance to w is zero, so equation 8 gives tau' = 1 / s^2 = p + tau. Every round adds p: the rows are counted again.
# Round 1 has tau = 1, so round t has 1 + (t - 1) p. The single client has no limit either.


def single(p, rounds):
    return 1 + (rounds - 1) * p


# %% tags=["hide-cell", "test"]
def after_one_round(p, tau):
    """Return the next confidence of a client at distance zero, by equation 8."""
    variance = 1 / (p + tau)
    return 1 / (variance + 0.0)


for precision in (0.5, 4.0):
    tau = 1.0
    for t in range(1, 7):
        assert np.isclose(single(precision, t), tau), (
            f"p = {precision}, round {t}: expected {tau}; do the first rounds by hand, as in the lesson"
        )
        tau = after_one_round(precision, tau)

# %% [markdown]
# ### Exercise 4 (advanced, 4 points)
#
# Compute what the collapse does to an interval. Write `coverage_loss(p, rounds)`: for the single client of exercise 3, the
# posterior standard deviation after round number `rounds`, divided by the standard deviation $p^{-1/2}$ of an analysis
# with a flat prior.

# %% tags=["hide-cell", "solution"]
# After round t the posterior precision is p + tau_t = 1 + t p, so the ratio is sqrt(p / (1 + t p)), about t^-1/2: after
# 100 rounds an interval is ten times too narrow.


def coverage_loss(p, rounds):
    return np.sqrt(p / (1 + rounds * p))


# %% tags=["hide-cell", "test"]
assert coverage_loss(4.0, 1) < 1, (
    "the prior adds information: the posterior is narrower than p^-1/2"
)
assert coverage_loss(1.0, 1000) < coverage_loss(1.0, 10), "does the collapse go on?"
for precision, t in ((4.0, 1), (1.0, 99), (0.5, 7)):
    tau = 1.0
    for _ in range(t - 1):
        tau = after_one_round(precision, tau)
    ratio = (precision / (precision + tau)) ** 0.5
    assert np.isclose(coverage_loss(precision, t), ratio), (
        f"p = {precision}, round {t}: expected {ratio:.4f}; which precision has the posterior of this round?"
    )

# %% [markdown]
# ## Explore
#
# Choose one question; the minutes above include one.
#
# 1. In the closed form, compute the confidences from the posterior variance alone, $1/s_j^2$ (a variant in table 2 of the
#    paper), and from the deviation alone, $1/(\mu_j - w)^2$: pass the function to `closed_form(30, ...)`. What is $w$ after 30
#    rounds? Compare the second with the library, `in_pyro(30, confidence="deviation")`.
# 2. Change the mean of client 2 from 3 to 1.2, by the argument `mean`. Which client has the larger confidence after 30 rounds,
#    and why?

# %% tags=["hide-cell", "solution"]
# 1. With the variance alone, both confidences grow by p_j in each round, so w moves towards client 2, which has more rows: 2.54
# after 30 rounds. With the deviation alone, the clients keep tau = 1 in round 1, since their distance is zero. Then two clients of
# equal confidence have the same distance to w, so they stay equal, and both collapse to one point, w = 2.32. The library restricts
# tau to 1 / lr_head = 50, so that w continues to move: it is 2.49 after 30 rounds.
by = {
    "both": eq8,
    "uncertainty": lambda variance, apart: 1 / variance,
    "deviation": lambda variance, apart: 1 / apart,
}
ends = {name: closed_form(30, rule)[-1][0] for name, rule in by.items()}
for name, at in ends.items():
    print(f"{name:12s} w {at:.3f}")
in_library, at_most = in_pyro(30, confidence="deviation")
print(f"deviation, in the library: w {in_library:.2f}, tau {at_most}")

# %% tags=["remove-cell"]
assert {n: round(float(v), 2) for n, v in ends.items()} == {
    "both": 2.82,
    "uncertainty": 2.54,
    "deviation": 2.32,
}
if rounds == 12:
    assert abs(in_library - 2.49) < 0.01
    assert at_most.tolist() == [50.0, 50.0]

# %% tags=["hide-cell", "solution"]
# 2. Client 2: both clients are close to w now, and client 2 has the smaller posterior variance. Both collapse.
w, tau, mu, _ = closed_form(30, mean=np.array([1.0, 1.2]))[-1]
print("tau", tau.round(1), " w", round(w, 3))

# %% tags=["remove-cell"]
assert tau[1] > tau[0] > 20
