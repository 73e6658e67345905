"""Estimate how predictors of party identification changed between the elections of 1972 and 2000.

Every survey year is a client with its respondents. Its regression coefficients come from a normal
population of all years (a hierarchical version of Gelman and Hill, 2007, section 4.7). The
response ranges from 1, strong Democrat, to 7, strong Republican. Columns: year, partyid7,
real_ideo, race_adj, age_discrete, educ1, gender, income; from nes1972 to nes2000 of
stan-dev/posteriordb on GitHub.

Run: python examples/nes.py --data nes.csv [--quick] [--out FOLDER]
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
parser.add_argument("--out", type=Path, default=Path("results/nes"))
args = parser.parse_args()
print("A full run takes about five minutes on one core; --quick takes seconds.", flush=True)
torch.set_num_threads(1)

LABELS = ("ideology", "race", "age", "education", "gender", "income")
COLUMNS = ["real_ideo", "race_adj", "age_discrete", "educ1", "gender", "income"]
CENTER = (4, 1, 2.5, 2.5, 1.5, 3)  # the middle of each scale


def model(received, local, batch):
    """Sample the coefficients of every year from a normal population."""
    ones = batch.x.new_ones(len(LABELS) + 1)
    x = batch.x - batch.x.new_tensor(CENTER)
    with batch.clients():
        beta = pyro.sample("beta", dist.Normal(0 * ones, 5.0).to_event(1))
        tau = pyro.sample("tau", dist.HalfNormal(0.5 * ones).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
        w = pyro.sample("w", dist.Normal(beta, tau).to_event(1))
        with batch.rows():
            eta = w[..., 0] + (w[..., 1:] * x).sum(-1)
            pyro.sample("y", dist.Normal(eta, sigma), obs=batch.y)


table = datasets.load(
    f"csv:{args.data}", target="partyid7", client_column="year", features=COLUMNS, test_fraction=0.0
)
data = federations.split(table, "groups").to("cpu", torch.float64)

method = pyrofl.hierarchical(model, data, shared="beta tau sigma")
run = pyrofl.fit(method, data, 1 if args.quick else None)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)
draws, chains = (4, 32) if args.quick else (64, 64)
exact = reference.hmc(model, data, draws, chains, shared="beta tau sigma")
cost = reference.compare_posteriors(federated, exact)
print(cost.groupby("variable")[["difference", "ratio", "energy"]].describe().round(2).T.to_string())
shown = cost[cost["variable"].isin(["beta", "tau", "sigma"])]
figures.save(figures.posterior_differences(shown), args.out / "cost.png")

w = cost[cost["variable"] == "w"][["mean", "low", "high"]].to_numpy()
posterior = tuple(w.reshape(data.clients, -1, 3)[:, 1:].transpose(2, 0, 1))
years = [float(name) for name in data.names]
figure = figures.parameters_by_covariate(years, posterior, LABELS, "year", "points per step")
figures.save(figure, args.out / "courses.png")
print(f"figures: {args.out / 'cost.png'}, {args.out / 'courses.png'}")
