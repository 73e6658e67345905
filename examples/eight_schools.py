"""Fit eight schools without pooling their data, and see what federation costs beside NUTS.

Every school keeps its effect; what travels is one normal factor on the population's mean and
spread. The same ten lines of Pyro run in both fits.

Run: python examples/eight_schools.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import datasets, federations, figures, reference
from pyrofl.models import pvi

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="few rounds and draws, to see it run")
parser.add_argument("--out", type=Path, default=Path("results/eight_schools"))
args = parser.parse_args()
torch.set_num_threads(1)


def model(received, local, batch):
    """Let effects of schools be normal around mu, non-centred."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


schools = datasets.load("eight_schools")
data = federations.split(schools, "groups").to("cpu", torch.float64)

method = pvi.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, rounds=2 if args.quick else 30)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)

draws, chains, depth = (10, 1, 2) if args.quick else (1000, 2, 10)
exact = reference.nuts(
    model, data, draws, draws, chains, shared="mu tau", jit=True, max_tree_depth=depth
)

table = reference.cost(federated, exact)
args.out.mkdir(parents=True, exist_ok=True)
table.to_csv(args.out / "cost.csv")
print(table[["mean", "sd", "difference", "ratio", "energy"]].round(2).to_string())
shown = table[table["variable"] != "eta"]
figures.save(figures.cost(shown), args.out / "cost.png")

theta = table[table["variable"] == "theta"]
figure = figures.shrinkage(
    data.names,
    raw=data.y,
    posterior=(theta["mean"], theta["low"], theta["high"]),
    centre=table.loc["mu", "mean"],
    title="effect of coaching (points of the test)",
)
figures.save(figure, args.out / "shrinkage.png")
print(f"figures: {args.out / 'cost.png'}, {args.out / 'shrinkage.png'}")
