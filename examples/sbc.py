"""Check the calibration of guides by simulation: ranks of the truth are uniform if it is exact.

Run: python examples/sbc.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, GradientStep, Method, Phase, checks, elbo, figures, guides
from pyrofl.models import pvi
from pyrofl.tensors import generator, spread_out

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with 20 replications.")
parser.add_argument("--out", type=Path, default=Path("results/sbc"))
args = parser.parse_args()
torch.set_num_threads(1)

rows = torch.arange(20).split([10, 6, 3, 1])
x = torch.randn(20, 2, generator=generator(0), dtype=torch.float64)
x[:, 1] = 0.9 * x[:, 0] + 0.45 * x[:, 1]
data = Federation(x, 0 * x[:, 0], rows, [r[:0] for r in rows], names=tuple("ABCD"))


def hierarchy(received, local, batch):
    """Sample the means of clients from a normal population with a shared mean."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(mu + 1.5 * eta, 1.0), obs=batch.y)


def regression(received, local, batch):
    """Sample two weights per client, correlated in the posterior because the columns are."""
    with batch.clients():
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with batch.rows():
            pyro.sample("y", dist.Normal((batch.x * w).sum(-1), 0.5), obs=batch.y)


def alone(family):
    """Return a method that fits the regression of every client by SVI, without a server."""
    q = family({"w": torch.Size([2])}, init_scale=0.3)
    steps = [GradientStep(q.names, pyrofl.adam(lr), elbo(16)) for lr in (0.1, 0.02, 0.004)]
    return Method(
        init=lambda generator, clients: {},
        init_client=lambda received, cohort, generator: spread_out(
            q.start({"w": x[0] * 0}), len(cohort.ids)
        ),
        model=regression,
        guide=q.program,
        phases=tuple(Phase((step,), epochs=120) for step in steps),
        aggregate=lambda server, message, cohort, generator: server,
    )


pooled = {"shared": "mu", "damping": 0.5, "num_particles": 8, "steps": 6}
fits = {
    "full": pvi.hierarchical(hierarchy, data, **pooled),
    "diagonal": pvi.hierarchical(hierarchy, data, covariance="diagonal", **pooled),
    "full covariance": alone(guides.full_covariance),
    "mean field": alone(guides.mean_field),
}
few = {"replications": 20, "draws": 19} if args.quick else {}
panels, curves = {}, {"hierarchy, client A": {}, "regression, client A": {}}
for name, method in fits.items():
    found = checks.sbc(method, data, rounds=10 if method.shared else 1, **few)
    print(f"\n{name}: smallest p value {found.p_value:.2g}")
    print(found.table().round(3).to_string())
    own = {f"{name}: {label}": one for label, one in found.of_client("A").items()}
    curves[list(curves)[not method.shared]] |= own
    panels |= own
figures.save(figures.ranks(panels, found.bins), args.out / "ranks.png")
figures.save(figures.coverage(curves), args.out / "coverage.png")
print(f"figures: {args.out / 'ranks.png'}, {args.out / 'coverage.png'}")
