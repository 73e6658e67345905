"""Predict heart disease in four hospitals that measured different features.

The model is a logistic regression with coefficients of each hospital from a normal population.
Missing values are filled at the hospital: all features are scaled with constants agreed in
advance, so that 0 is a typical value, and a missing value (or a cholesterol of 0) becomes 0. If a
hospital never measured a feature, its column is zero and its data are uninformative about the
coefficient: the posterior of this coefficient is the population distribution learned from the
other hospitals.

The table is the concatenation of the four processed files of Heart Disease in the UCI repository,
with their header and a column hospital; missing values are empty fields.

Run: python examples/heart_disease.py --data heart.csv [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pandas as pd
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import figures, reference

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="Table, a CSV file.")
parser.add_argument("--quick", action="store_true", help="Short run with few rounds and draws.")
parser.add_argument("--out", type=Path, default=Path("results/heart_disease"))
args = parser.parse_args()
torch.set_num_threads(1)

# A typical value and a typical spread of each feature; pain is type 4, without symptoms.
SCALES = {"age": (54, 9), "sex": (0.5, 1), "pain": (0.5, 1), "thalach": (140, 25)}
SCALES |= {"exang": (0.5, 1), "oldpeak": (1, 1), "chol": (240, 55), "ca": (0.5, 1)}


def model(received, local, batch):
    """Sample the coefficients of every hospital from a normal population."""
    ones = batch.x.new_ones(len(SCALES) + 1)
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0 * ones, 1.5).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(0.5 * ones).to_event(1))
        w = pyro.sample("w", dist.Normal(beta, tau).to_event(1))
        with batch.rows():
            logits = w[..., 0] + (w[..., 1:] * batch.x).sum(-1)
            pyro.sample("disease", dist.Bernoulli(logits=logits), obs=batch.y)


table = pd.read_csv(args.data)
table = table.assign(chol=table["chol"].where(table["chol"] > 0), pain=1.0 * (table["cp"] == 4))
x = pd.DataFrame({n: (table[n] - usual) / spread for n, (usual, spread) in SCALES.items()})
print("fraction of missing values:", x.isna().groupby(table["hospital"]).mean().round(2), sep="\n")
rows = {name: torch.tensor(list(i)) for name, i in table.groupby("hospital").groups.items()}
x, y = (torch.tensor(v.to_numpy()) for v in (x.fillna(0.0), 1.0 * (table["target"] > 0)))
none = [torch.zeros(0, dtype=torch.long)] * len(rows)
data = pyrofl.Federation(x, y, list(rows.values()), none, tuple(rows))

method = pyrofl.hierarchical(model, data, shared="beta tau")
run = pyrofl.fit(method, data, 1 if args.quick else None)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)
draws, chains = (4, 32) if args.quick else (64, 64)
exact = reference.hmc(model, data, draws, chains, shared="beta tau")
cost = reference.compare_posteriors(federated, exact)
figures.save(figures.posterior_differences(cost), args.out / "cost.png")
w = cost[cost["variable"] == "w"][["mean", "low", "high"]].to_numpy().reshape(data.clients, -1, 3)
fits = {name: tuple(w[j].T) for j, name in enumerate(data.names)}
figure = figures.forest(fits, ["intercept", *SCALES], "log odds per typical spread")
figures.save(figure, args.out / "forest.png")
