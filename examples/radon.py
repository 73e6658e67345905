"""Fit a hierarchical model of radon in the homes of 85 counties without pooling the data.

The log radon of a home depends on its floor. Intercept and slope vary between counties, partly
with the uranium in the soil (Gelman and Hill, 2007). Columns: log_radon, floor, log_uranium,
county_name. The data of 919 homes in Minnesota are available as arviz.load_arviz_data("radon").

Run: python examples/radon.py --data radon.csv [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import datasets, federations, figures, reference

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", type=Path, required=True, help="Table, a CSV file.")
parser.add_argument("--quick", action="store_true", help="Short run with few rounds and draws.")
parser.add_argument("--out", type=Path, default=Path("results/radon"))
args = parser.parse_args()
torch.set_num_threads(1)


def model(received, local, batch):
    """Sample intercepts and slopes of counties, with the intercept depending on uranium."""
    floor, uranium = batch.x[..., 0], batch.x[..., :1, 1]
    with batch.clients():
        gamma = pyro.sample("gamma", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(2.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        center, effect = gamma[..., 0] + gamma[..., 1] * uranium, sd * z
        intercept = pyro.deterministic("intercept", center + effect[..., 0])
        slope = pyro.deterministic("slope", gamma[..., 2] + effect[..., 1])
        with batch.rows():
            pyro.sample("y", dist.Normal(intercept + slope * floor, sigma), obs=batch.y)


homes = datasets.load(
    f"csv:{args.data}",
    target="log_radon",
    client_column="county_name",
    features=["floor", "log_uranium"],
    test_fraction=0.0,
)
data = federations.split(homes, "groups").to("cpu", torch.float64)

method = pyrofl.hierarchical(model, data, shared="gamma sd sigma")
run = pyrofl.fit(method, data, 1 if args.quick else None)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)
draws, chains = (4, 32) if args.quick else (64, 64)
exact = reference.hmc(model, data, draws, chains, shared="gamma sd sigma")

cost = reference.compare_posteriors(federated, exact)
print(cost.groupby("variable")[["difference", "ratio", "energy"]].describe().round(2).T.to_string())
for name, parts in {"population": "gamma sd sigma", "counties": "intercept"}.items():
    figure = figures.posterior_differences(cost[cost["variable"].isin(parts.split())])
    figures.save(figure, args.out / f"cost_{name}.png")

counties = cost[cost["variable"] == "intercept"]
basements = [data.y[rows[data.x[rows, 0] == 0]] for rows in data.train]
own = torch.tensor([y.mean() for y in basements])  # NaN where there is none
error = torch.tensor([y.std() / len(y) ** 0.5 if len(y) > 1 else torch.nan for y in basements])
partial, words = (counties["mean"], counties["sd"]), ("log radon in basements", "homes")
figure = figures.pooling(data.sizes, (own, error), partial, own.nanmean(), *words)
figures.save(figure, args.out / "pooling.png")
print(f"figures: {args.out / 'cost_counties.png'}, {args.out / 'pooling.png'}")
