"""Compute the posterior of a new client after 0, 1, 2, ... rows, and compare with the exact one.

Six clients estimate the mean of a population without pooling their rows; a seventh client is new.
All distributions are normal, so the exact posterior of its mean given the rows of all clients is
known.

Run: python examples/new_client.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, figures
from pyrofl.models import pvi
from pyrofl.tensors import generator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with few draws.")
parser.add_argument("--out", type=Path, default=Path("results/new_client"))
args = parser.parse_args()
torch.set_num_threads(1)

g, sizes = generator(4), [12, 4, 8, 20, 6, 3, 20]
noise = torch.randn(sum(sizes), generator=g, dtype=torch.float64)
truth = 3 + 1.5 * torch.randn(7, generator=g, dtype=torch.float64)
y = truth.repeat_interleave(torch.tensor(sizes)) + noise
rows = torch.arange(len(y)).split(sizes)
none = tuple(r[:0] for r in rows)
names = (*(f"client {j}" for j in range(6)), "new client")
data = Federation(torch.ones(len(y), 1).double(), y, rows, none, names=names, held_out=1)


def model(received, local, batch):
    """Sample the means of the clients from a normal population."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        theta = pyro.sample("theta", dist.Normal(mu, 1.5))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def exact(n):
    """Return the exact mean and 95% interval of the new client's theta after n of its rows."""
    covariance = torch.full((7, 7), 25.0).double() + 2.25 * torch.eye(7)
    many = torch.tensor([*sizes[:6], n]).double()
    means = torch.stack([y[r[:k]].sum() for r, k in zip(rows, many.long(), strict=True)])
    seen = many > 0
    noise = (1 / many[seen]).diag()
    gain = covariance[-1, seen] @ torch.linalg.inv(covariance[seen][:, seen] + noise)
    mean = float(gain @ (means / many)[seen])
    sd = float(covariance[-1, -1] - gain @ covariance[seen, -1]) ** 0.5
    return mean, mean - 1.96 * sd, mean + 1.96 * sd


method = pvi.hierarchical(model, data, shared="mu", damping=1.0, num_particles=8, steps=6)
state = pyrofl.fit(method, data, 2, progress=False).state
draws, counts = 100 if args.quick else 20_000, (0, 1, 2, 5, 10, 20)
fits = {"exact": tuple(zip(*map(exact, counts), strict=True))}
found = checks.new_client_posterior(method, data, state, "new client", counts, draws)
theta = torch.stack([found[n]["theta"] for n in counts])
low, high = theta.quantile(torch.tensor([0.025, 0.975]).double(), dim=1)
fits["federated"] = (theta.mean(1), low, high)
for i, n in enumerate(counts):
    shown = (f"{k} {v[0][i]:.2f} ({v[1][i]:.2f} to {v[2][i]:.2f})" for k, v in fits.items())
    print(f"{n} rows: {', '.join(shown)}")
figure = figures.narrowing(counts, fits, "mean of the new client", float(truth[6]))
figures.save(figure, args.out / "new_client.png")
print(f"figure: {args.out / 'new_client.png'}")
