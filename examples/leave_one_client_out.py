"""Compare two models of hospitals by leave-one-out and by leave-one-client-out.

Each of twelve hospitals is one row: the number of deaths among its operations on infants (BUGS
examples, volume I, "Surgical"). Leave-one-out (LOO) reweights draws from a posterior that includes
the row; Pareto k shows that this fails here. Leave-one-client-out (LOCO) removes the factor of the
hospital from the posterior at the server. The exact difference, by quadrature, is 5.9 nats in
favor of one rate per hospital; LOCO estimates 6.1 and LOO 8.0.

Run: python examples/leave_one_client_out.py [--quick] [--out FOLDER]
"""

import argparse
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks
from pyrofl.figures.style import COLORS, MARKERS
from pyrofl.models import pvi

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with few rounds and draws.")
parser.add_argument("--out", type=Path, default=Path("results/leave_one_client_out"))
args = parser.parse_args()
torch.set_num_threads(1)
rounds, draws = (2, 100) if args.quick else (20, 4000)

operations = torch.tensor([47, 148, 119, 810, 211, 196, 148, 215, 207, 97, 256, 360])
deaths = torch.tensor([0, 18, 8, 46, 8, 13, 9, 31, 14, 8, 29, 24])
rows = torch.arange(12).split(1)
none = [r[:0] for r in rows]
data = Federation(operations[:, None].double(), deaths.double(), rows, none, tuple("ABCDEFGHIJKL"))


def own_rates(received, local, batch):
    """Sample the logits of the hospitals from a normal population."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-2.0, 1.5))
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        eta = pyro.sample("eta", dist.Normal(0.0, 1.0))
        with batch.rows():
            fn = dist.Binomial(batch.x[..., 0], logits=mu + tau * eta)
            pyro.sample("deaths", fn, obs=batch.y)


def one_rate(received, local, batch):
    """Sample one rate for all hospitals."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(-2.0, 1.5))
        with batch.rows():
            pyro.sample("deaths", dist.Binomial(batch.x[..., 0], logits=mu), obs=batch.y)


warnings.simplefilter("ignore")  # the tables and the figure show Pareto k
by_row, by_client = {}, {}
for name, model, shared in (("own rates", own_rates, "mu tau"), ("one rate", one_rate, "mu")):
    method = pvi.hierarchical(model, data, shared=shared, steps=10)
    run = pyrofl.fit(method, data, rounds, progress=False)
    by_row[name] = checks.loo(run, draws)
    by_client[name] = checks.loco(run, draws)

figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for i, (what, found) in enumerate((("row", by_row), ("client", by_client))):
    table = checks.compare_loo(found)
    best, diff = table.index[0], table.iloc[1]
    bad = {name: int((one.pareto_k > 0.7).sum()) for name, one in found.items()}
    print(f"by {what}: {best} is better by {abs(diff['elpd_diff']):.1f} (se {diff['dse']:.1f})")
    print(f"by {what}: hospitals whose k is above 0.7: {bad}")
    one = found["own rates"]
    places = one.elpd_i if hasattr(one, "elpd_i") else one.loo_i  # ArviZ 1, or 0.23
    look = {"color": COLORS[i], "marker": MARKERS[i], "linestyle": "none"}
    axes[0].plot(data.names, places.values, **look)
    axes[1].plot(data.names, one.pareto_k.values, **look, label=f"leave one {what} out")
axes[0].set(xlabel="hospital", ylabel="elpd (nats), own rates")
axes[1].axhline(0.7, color="gray", linestyle=":", label="unreliable above")
axes[1].set(xlabel="hospital", ylabel="Pareto k, own rates")
axes[1].legend(frameon=False)
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "leave_one_client_out.png")
print(f"figure: {args.out / 'leave_one_client_out.png'}")
