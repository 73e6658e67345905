"""Compare priors and guides by leave-one-out (LOO), and check where LOO is unreliable.

Ten clients fit regressions on three correlated covariates. The coefficients of a client are
correlated in its posterior, so a mean-field guide is too narrow. Importance weights correct the
LOO of a guide to that of its model, which is the same for both guides of the normal prior. With a
guide that is too narrow the correction overshoots, because few draws lie where the weights are
large: Pareto k is large.

Run: python examples/leave_one_out.py [--quick] [--out FOLDER]
"""

import argparse
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist
import torch

import pyrofl
from pyrofl import Federation, checks, guides, likelihoods, nets, priors
from pyrofl.inference.posteriors import export
from pyrofl.models import local

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with one round.")
parser.add_argument("--out", type=Path, default=Path("results/leave_one_out"))
args = parser.parse_args()
az = export.import_arviz()

rng = np.random.default_rng(1)
sizes = [20, 20, 25, 25, 30, 30, 40, 40, 60, 80]
common = rng.normal(size=(sum(sizes), 1))
x = 0.6 * common + 0.8 * rng.normal(size=(sum(sizes), 3))
own = np.repeat(np.array([1.0, -0.5, 0.0]) + 0.4 * rng.normal(size=(10, 3)), sizes, axis=0)
y = (x * own).sum(1) + rng.normal(size=sum(sizes))
rows = torch.arange(sum(sizes)).split(sizes)
data = Federation(torch.tensor(x), torch.tensor(y), rows, tuple(r[:0] for r in rows))
net = nets.build("linear", input_shape=(3,), outputs=1)

choices = {
    "normal prior": {"prior": priors.fixed(dist.Normal, scale=1.0)},
    "normal prior, mean-field guide": {
        "prior": priors.fixed(dist.Normal, scale=1.0),
        "guide": guides.mean_field,
    },
    "wide normal prior": {"prior": priors.fixed(dist.Normal, scale=10.0)},
    "Student t prior": {"prior": priors.fixed(priors.student_t(3.0), scale=1.0)},
}
found = {}
for name, change in choices.items():
    training = {"batch": None, "epochs": 100, "lr": 0.02, "momentum": 0.9, "num_particles": 20}
    arguments = {
        "guide": guides.full_covariance,
        "likelihood": likelihoods.normal(1.0),
        "init_scale": 0.2,
        **change,
    }
    method = local.build(net, **training, **arguments)
    run = pyrofl.fit(method, data, rounds=1 if args.quick else 8, progress=False)
    found[name] = run.to_arviz(200 if args.quick else 4000, groups=("posterior", "log_likelihood"))

warnings.simplefilter("ignore")  # the table and the figure show Pareto k
print(checks.compare_loo(found).to_string())

figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for place, (name, posterior) in enumerate(found.items()):
    corrected, plain = checks.loo(posterior), az.loo(posterior)
    for elpd, style in ((corrected, "C0o"), (plain, "C1x")):
        total = elpd.elpd if hasattr(elpd, "elpd") else elpd.elpd_loo  # ArviZ 1, or 0.23
        axes[0].plot(total, -place, style)
    axes[1].plot(np.sort(corrected.pareto_k.values.ravel()), label=name)
axes[0].legend(["corrected", "uncorrected"], frameon=False)
axes[0].set(xlabel="elpd (nats)", yticks=[-i for i in range(4)], yticklabels=list(found))
axes[1].axhline(0.7, color="gray", linestyle=":")
axes[1].set(xlabel="rows, sorted", ylabel="Pareto k")
axes[1].legend(frameon=False)
args.out.mkdir(parents=True, exist_ok=True)
figure.savefig(args.out / "leave_one_out.png")
print(f"figure: {args.out / 'leave_one_out.png'}")
