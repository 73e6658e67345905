"""Fit a line with varying intercept and slope for every client.

The measurements, intercept and slope of a subject are local. Data sets: sleep study of lme4
(default --columns; csv/lme4/sleepstudy.csv of vincentarelbundock/Rdatasets on GitHub); Parkinsons
Telemonitoring of the UCI repository (--columns motor_UPDRS test_time subject); growth of rats
(--columns weight day rat; rats_data of stan-dev/posteriordb on GitHub).

Run: python examples/lines.py --data sleepstudy.csv [--quick] [--out FOLDER]
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
parser.add_argument("--columns", nargs=3, default=["Reaction", "Days", "Subject"])
parser.add_argument("--quick", action="store_true", help="Short run with few rounds and draws.")
parser.add_argument("--out", type=Path, default=Path("results/lines"))
args = parser.parse_args()
torch.set_num_threads(1)


def model(received, local, batch):
    """Sample intercepts and slopes from a normal population."""
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        sd = pyro.sample("sd", dist.HalfNormal(1.0).expand([2]).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        w = pyro.sample("w", dist.Normal(beta, sd).to_event(1))
        with batch.rows():
            line = w[..., 0] + w[..., 1] * batch.x[..., 0]
            pyro.sample("y", dist.Normal(line, sigma), obs=batch.y)


target, time, group = args.columns
table = datasets.load(
    f"csv:{args.data}", target=target, client_column=group, features=[time], test_fraction=0.0
)
data = federations.split(table, "groups").to("cpu", torch.float64)
# Standardize with the mean and standard deviation of all rows, so that the priors are wide.
center, unit = data.y.mean(), data.y.std()
start, span = data.x.mean(), data.x.std()
scaled = pyrofl.Federation(
    (data.x - start) / span, (data.y - center) / unit, data.train, data.test, data.names
)

method = pyrofl.hierarchical(model, scaled, shared="beta sd sigma")
run = pyrofl.fit(method, scaled, 1 if args.quick else None)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)
draws, chains = (4, 32) if args.quick else (64, 64)
exact = reference.hmc(model, scaled, draws, chains, shared="beta sd sigma")
cost = reference.compare_posteriors(federated, exact)
figures.save(figures.posterior_differences(cost), args.out / "cost.png")
print(cost.groupby("variable")[["difference", "ratio", "energy"]].describe().round(2).T.to_string())

w = federated["posterior"]["w"].values[0]  # [S, J, 2]
at = torch.linspace(float(scaled.x.min()), float(scaled.x.max()), 30)
lines = float(center) + float(unit) * (w[..., :1] + w[..., 1:] * at.numpy())
panels = {
    name: (data.x[rows, 0], data.y[rows], start + span * at, lines[:, j])
    for j, (name, rows) in enumerate(zip(data.names, data.train, strict=True))
}
figures.save(figures.lines(panels, time, target), args.out / "lines.png")
print(f"figures: {args.out / 'cost.png'}, {args.out / 'lines.png'}")
