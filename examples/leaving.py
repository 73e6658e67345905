"""Remove a school from a fitted federation, and compare with a fit without this school.

The posterior at the server is divided by the factor of the school, and the other schools continue
for some rounds. The script prints the remaining difference from a fit that never included the
school. The effect of the removed school is then predicted from the population.

Run: python examples/leaving.py [--quick] [--school NAME] [--out FOLDER]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import checks, datasets, federations, figures
from pyrofl.models import pvi

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with few rounds and draws.")
parser.add_argument("--school", default="A", help="School to remove.")
parser.add_argument("--out", type=Path, default=Path("results/leaving"))
args = parser.parse_args()
torch.set_num_threads(1)
rounds, draws = (2, 100) if args.quick else (30, 20_000)


def model(received, local, batch):
    """Sample the effects from a normal population, in a non-centered parametrization."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        theta = pyro.deterministic("theta", mu + tau * eta)
        with batch.rows():
            pyro.sample("effect", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)


data = federations.split(datasets.load("eight_schools"), "groups").to("cpu", torch.float64)
method = pvi.hierarchical(model, data, shared="mu tau")
run = pyrofl.fit(method, data, rounds, progress=False)

left = pyrofl.leave(run, args.school)
never = pyrofl.fit(method, left.data, rounds, seed=1, progress=False)
later = left
for after in (0, 1, 2, 4, 8)[: 2 if args.quick else 5]:
    later = pyrofl.fit(method, left.data, rounds + after, resume_from=later, progress=False)
    far = pyrofl.reference.compare_posteriors(later, never, draws=draws).loc[["mu", "tau"]]
    means, sds = far["difference"].abs().max(), (far["ratio"] - 1).abs().max()
    largest = f"means of mu and tau {means:.2f} sd, their standard deviations {sds:.0%}"
    print(f"{after} rounds after the removal, largest difference: {largest}")

others = [name for name in data.names if name != args.school]
order = [*(data.names.index(name) for name in others), data.names.index(args.school)]
known = replace(  # the removed school is last, and held out
    data,
    train=[data.train[j] for j in order],
    test=[data.test[j] for j in order],
    names=[data.names[j] for j in order],
    held_out=1,
)
fits = {}
for name, fit in (("with the school", run), ("removed", later), ("never included", never)):
    theta = fit.posterior(draws)["theta"]
    effects = dict(zip(fit.data.names, theta.unbind(1), strict=True))
    if args.school not in effects:  # predict from the population
        found = checks.new_client_posterior(method, known, fit.state, args.school, (0,), draws)
        effects[args.school] = found[0]["theta"]
    each = torch.stack([effects[school] for school in data.names], 1)
    low, high = each.quantile(torch.tensor([0.05, 0.95]).double(), dim=0)
    fits[name] = (each.mean(0), low, high)
    at = data.names.index(args.school)
    print(
        f"{name:15}: effect of {args.school} {each[:, at].mean():.2f}, sd {each[:, at].std():.2f}"
    )

figure = figures.forest(fits, data.names, "effect of coaching (test points), 90% intervals")
figures.save(figure, args.out / "leaving.png")
print(f"figure: {args.out / 'leaving.png'}")
