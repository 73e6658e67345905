"""Estimate tumour rates in 71 experiments with few rats each.

The logit of a rate comes from a normal population. The estimates of small experiments shrink most
towards its mean, and experiments without a tumour get a rate above zero.

Run: python examples/rat_tumours.py [--quick] [--out FOLDER]
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
parser.add_argument("--out", type=Path, default=Path("results/rat_tumours"))
args = parser.parse_args()
torch.set_num_threads(1)


def model(received, local, batch):
    """Sample the logits of the rates from a normal population."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-2.0, 1.5))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        logit = mu + tau * eta
        pyro.deterministic("rate", logit.sigmoid())
        with batch.rows():
            tumours = dist.Binomial(batch.x[..., 0], logits=logit)
            pyro.sample("tumours", tumours, obs=batch.y)


experiments = datasets.load("rat_tumours")
data = federations.split(experiments, "groups").to("cpu", torch.float64)

method = pyrofl.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, 1 if args.quick else None)
federated = run.to_arviz(100 if args.quick else 4000, corrected=not args.quick)
draws, chains = (4, 32) if args.quick else (64, 64)
exact = reference.hmc(model, data, draws, chains, shared="mu tau")

cost = reference.compare_posteriors(federated, exact)
shown = cost[cost["variable"] != "eta"]
print(cost.groupby("variable")[["difference", "ratio", "energy"]].describe().round(2).T.to_string())
figures.save(figures.posterior_differences(shown), args.out / "cost.png")

rats, rate = data.x[:, 0], cost[cost["variable"] == "rate"]
own = data.y / rats
figure = figures.pooling(
    rats,
    raw=(own, (own * (1 - own) / rats).sqrt()),
    partial=(rate["mean"], rate["sd"]),
    center=torch.tensor(cost.loc["mu", "mean"]).sigmoid().item(),
    title="fraction of rats with a tumour",
    unit="rats in the experiment",
)
figures.save(figure, args.out / "pooling.png")
print(f"figures: {args.out / 'cost.png'}, {args.out / 'pooling.png'}")
