"""Measure the seconds of hierarchical fits by likelihood factors, and of their correction.

logistic-929 and logistic-160 have a random intercept of each client, 8 covariates, and 124,000 and
7,000 rows in all; teams has 30 shared strengths, and no effects of clients; mrp has 29 shared
effects of age and education, and an intercept of each of 40 states. All data are simulated.

Run: python examples/benchmarks/hierarchical.py [--case NAMES] [--rounds N] [--draws N]
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch.nn.functional import one_hot

import pyrofl
from pyrofl import Federation
from pyrofl.models import likelihood_factors

TEAMS, AGES, LEVELS = 30, 4, 5


def logistic(received, local, batch):
    """Logistic regression with an intercept of each client."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.5).expand([9]).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        a = pyro.sample("a", dist.Normal(beta[..., 0], tau))
        with batch.rows():
            logits = a + (beta[..., 1:] * batch.x).sum(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def teams(received, local, batch):
    """Strengths of teams, all shared, and the advantage of the home team."""
    at = one_hot(batch.x.long(), TEAMS).to(batch.x)
    with batch.clients():
        home = pyro.sample("home", dist.Normal(0.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        zero = batch.x.new_zeros(TEAMS)
        skill = pyro.sample("skill", dist.Normal(zero, tau[..., None]).to_event(1))
        with batch.rows():
            gap = ((at[..., 0, :] - at[..., 1, :]) * skill).sum(-1)
            pyro.sample("win", dist.Bernoulli(logits=home + gap), obs=batch.y)


def mrp(received, local, batch):
    """Effects of age, education and both, with shared scales, and an intercept of each state."""
    age, level = batch.x[..., 0].long(), batch.x[..., 1].long()
    sizes = {"of_age": AGES, "of_level": LEVELS, "of_cell": AGES * LEVELS}
    columns = (age, level, LEVELS * age + level)
    with batch.clients():
        b = pyro.sample("b", dist.Normal(batch.x.new_zeros(2), 2.0).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(batch.x.new_ones(4)).to_event(1))
        logits = pyro.sample("state", dist.Normal(b[..., 0], sd[..., 3]))
        logits = logits + b[..., 1] * batch.x[..., 2]
        for k, ((name, size), column) in enumerate(zip(sizes.items(), columns, strict=True)):
            prior = dist.Normal(batch.x.new_zeros(size), sd[..., k : k + 1])
            effect = pyro.sample(name, prior.to_event(1))
            logits = logits + (one_hot(column, size).to(batch.x) * effect).sum(-1)
        with batch.rows():
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=batch.y)


def federation(
    x: list[np.ndarray], logits: list[np.ndarray], rng: np.random.Generator
) -> Federation:
    """Draw binary responses, and return the clients' rows."""
    pairs = [
        (v, 1.0 * (rng.uniform(size=len(v)) < 1 / (1 + np.exp(-w))))
        for v, w in zip(x, logits, strict=True)
    ]
    parts = {str(j): (torch.tensor(v), torch.tensor(y)) for j, (v, y) in enumerate(pairs)}
    return Federation.from_arrays(parts)


def intercepts(clients: int, rows: int) -> Federation:
    """Return clients of log-normal sizes."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(size=clients))
    sizes = np.maximum(1, sizes / sizes.sum() * rows).round().astype(int)
    sizes[sizes.argmax()] += rows - sizes.sum()
    beta = rng.normal(0, 0.5, 8)
    x = [rng.normal(size=(n, 8)) + 0.5 * rng.normal(size=8) for n in sizes]
    return federation(x, [-1 + 0.6 * rng.normal() + v @ beta for v in x], rng)


def leagues(clients: int = 10) -> Federation:
    """Return leagues of 12 of the 30 teams, with 60 to 150 matches."""
    rng = np.random.default_rng(0)
    skill, x = 0.8 * rng.normal(size=TEAMS), []
    for j in range(clients):
        some = rng.permutation(TEAMS)[:12]
        x += [np.array([rng.choice(some, 2, replace=False) for _ in range(60 + 10 * j)])]
    logits = [0.3 + skill[v[:, 0]] - skill[v[:, 1]] for v in x]
    return federation([1.0 * v for v in x], logits, rng)


def states(clients: int = 40, rows: int = 3000) -> Federation:
    """Return answers of people of an age, a level of education and a sex."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(0, 0.8, clients))
    sizes = np.maximum(5, sizes / sizes.sum() * rows).round().astype(int)
    age, level = 0.4 * rng.normal(size=AGES), 0.4 * rng.normal(size=LEVELS)
    cell = 0.2 * rng.normal(size=(AGES, LEVELS))
    x = [np.stack([rng.integers(k, size=n) for k in (AGES, LEVELS, 2)], 1) for n in sizes]
    logits = [
        -0.2 + 0.5 * rng.normal() + age[i] + level[j] + cell[i, j] + 0.3 * s
        for i, j, s in (v.T for v in x)
    ]
    return federation([1.0 * v for v in x], logits, rng)


CASES = {
    "logistic-160": (partial(intercepts, 160, 7000), logistic, "beta tau"),
    "logistic-929": (partial(intercepts, 929, 124_000), logistic, "beta tau"),
    "teams": (leagues, teams, "home tau skill"),
    "mrp": (states, mrp, "b sd of_age of_level of_cell"),
}


def main() -> None:
    """Fit the cases, and print a row of CPU seconds and the status for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    head = "| case | fit, CPU seconds | to_arviz | Pareto k | status |"
    print(head, "|---|---:|---:|---:|---|", sep="\n")
    for name in args.case:
        make, program, shared = CASES[name]
        data, began = make(), time.process_time()
        method = likelihood_factors.hierarchical(program, data, shared=shared)
        run = pyrofl.fit(method, data, args.rounds, progress=False)
        fitted = time.process_time()
        found = run.to_arviz(args.draws, progress=False)
        k, end = float(found["sample_stats"]["pareto_k"][0]), time.process_time()
        seconds = f"{fitted - began:.0f} | {end - fitted:.0f}"
        print(f"| {name} | {seconds} | {k:.2f} | {run.status} |", flush=True)


if __name__ == "__main__":
    main()
