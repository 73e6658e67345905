"""Estimate batting averages of 18 players from their first 45 at-bats of the 1970 season.

The clients are the players of Efron and Morris. Abilities are local parameters; the mean and the
standard deviation of the population are shared. The estimates are compared with the averages of the
rest of the season.

Run: python examples/baseball.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import datasets, federations, figures, reference
from pyrofl.files.text_tables import table

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with few rounds and draws.")
parser.add_argument("--out", type=Path, default=Path("results/baseball"))
args = parser.parse_args()
torch.set_num_threads(1)


def model(received, local, batch):
    """Sample the logits of the abilities from a normal population."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-1.0, 1.0))
        tau = pyro.sample("tau", dist.HalfNormal(0.5))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        ability = pyro.deterministic("ability", (mu + tau * eta).sigmoid())
        with batch.rows():
            pyro.sample("hits", dist.Binomial(batch.x[..., 0], ability), obs=batch.y)


batters = datasets.load("baseball")
data = federations.split(batters, "groups").to("cpu", torch.float64)

method = pyrofl.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, 1 if args.quick else None)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)
draws, chains = (4, 32) if args.quick else (64, 64)
exact = reference.hmc(model, data, draws, chains, shared="mu tau")

cost = reference.compare_posteriors(federated, exact)
shown = cost[cost["variable"] != "eta"]
figures.save(figures.posterior_differences(shown), args.out / "cost.png")

ability = cost[cost["variable"] == "ability"]
first, rest = (
    torch.stack([data.y[rows[0]] / data.x[rows[0], 0] for rows in part]).numpy()
    for part in (data.train, data.test)
)
estimates = {
    "first 45 at-bats": first,
    "federated posterior": ability["mean"].to_numpy(),
    "pooled rows": ability["reference_mean"].to_numpy(),
}
error = {name: ((guess - rest) ** 2).mean() ** 0.5 for name, guess in estimates.items()}
print(
    table(
        ["estimate", "RMSE for the rest of the season"], [[n, f"{e:.3f}"] for n, e in error.items()]
    )
)

posterior, center = tuple(ability[c] for c in ("mean", "low", "high")), float(first.mean())
figure = figures.shrinkage(data.names, first, posterior, center, "batting average", truth=rest)
figures.save(figure, args.out / "shrinkage.png")
print(f"figures: {args.out / 'cost.png'}, {args.out / 'shrinkage.png'}")
