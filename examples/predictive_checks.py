"""Check for each client whether a model fits its counts, by posterior predictive checks.

Seven workshops count faults; in three of them faults occur in bursts. A Poisson model fits the
means, but its predictions have too small a variance. A model with a dispersion parameter per
client fits.

Run: python examples/predictive_checks.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, figures
from pyrofl.models import pvi

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--out", type=Path, default=Path("results/predictive_checks"))
args = parser.parse_args()
torch.set_num_threads(1)

rng = np.random.default_rng(0)
sizes, bursts = (40, 25, 60, 30, 40, 25, 50), (4, 5, 6)
rates = np.exp(rng.normal(1.5, 0.5, len(sizes)))
counts = [
    rng.poisson(rate * (rng.gamma(1.0, 1.0, n) if j in bursts else np.ones(n)))
    for j, (rate, n) in enumerate(zip(rates, sizes, strict=True))
]
rows = torch.arange(sum(sizes)).split(list(sizes))
y = torch.from_numpy(np.concatenate(counts)).double()
names = tuple(f"{'bursts' if j in bursts else 'plain'} {j}" for j in range(len(sizes)))
data = Federation(y.new_ones(len(y), 1), y, rows, tuple(r[:0] for r in rows), names=names)


def rate():
    """Sample log rates from a normal distribution with a shared mean."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    return (mu + 0.7 * pyro.sample("eta", dist.Normal(0.0, 1.0))).exp()


def poisson(received, local, batch):
    """Sample counts with a constant rate per client."""
    with batch.clients():
        mean = rate()
        with batch.rows():
            pyro.sample("y", dist.Poisson(mean), obs=batch.y)


def gamma_poisson(received, local, batch):
    """Sample counts with a rate per row and a dispersion per client."""
    with batch.clients():
        mean = rate()
        shape = pyro.sample("shape", dist.LogNormal(2.0, 1.5))
        with batch.rows():
            pyro.sample("y", dist.GammaPoisson(shape, shape / mean), obs=batch.y)


for model in (poisson, gamma_poisson):
    method = pvi.hierarchical(model, data, shared="mu", damping=0.5)
    run = pyrofl.fit(method, data, 2 if args.quick else 12, progress=False)
    table = checks.predictive_checks(run, ("mean", "sd", "max"), draws=100 if args.quick else 2000)
    print(f"\n{model.__name__}: fraction of simulated data sets with a larger statistic (p)")
    print(table.pivot(index="client", columns="statistic", values="p").round(3).to_string())
    path = args.out / f"{model.__name__}.png"
    figures.save(figures.predictive_checks(table), path)
    print(f"figure: {path}")
