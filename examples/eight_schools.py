"""Fit the eight-schools model without pooling the data, and compare the posteriors.

The effect of a school is a local parameter. Each school sends one normal factor of its likelihood,
and the server draws the mean and the standard deviation of the population. Both fits use the same
model.

Run: python examples/eight_schools.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import datasets, federations, figures, reference

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with few rounds and draws.")
parser.add_argument("--out", type=Path, default=Path("results/eight_schools"))
args = parser.parse_args()
torch.set_num_threads(1)


def model(received, local, batch):
    """Sample the effects from a normal population, in a non-centered parametrization."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


schools = datasets.load("eight_schools")
data = federations.split(schools, "groups").to("cpu", torch.float64)

method = pyrofl.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, 1 if args.quick else None)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)

draws, chains = (4, 32) if args.quick else (64, 64)
exact = reference.hmc(model, data, draws, chains, shared="mu tau")

table = reference.compare_posteriors(federated, exact)
args.out.mkdir(parents=True, exist_ok=True)
table.to_csv(args.out / "cost.csv")
print(table[["mean", "sd", "difference", "ratio", "energy"]].round(2).to_string())
shown = table[table["variable"] != "eta"]
figures.save(figures.posterior_differences(shown), args.out / "cost.png")

theta = table[table["variable"] == "theta"]
figure = figures.shrinkage(
    data.names,
    raw=data.y,
    posterior=(theta["mean"], theta["low"], theta["high"]),
    center=table.loc["mu", "mean"],
    title="effect of coaching (test points)",
)
figures.save(figure, args.out / "shrinkage.png")
print(f"figures: {args.out / 'cost.png'}, {args.out / 'shrinkage.png'}")
