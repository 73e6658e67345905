"""Replace the prior or the guide of a method by one argument, and compare the results.

Run: python examples/swap_prior.py [--quick] [--out FOLDER]
"""

import argparse
from pathlib import Path

import pyro.distributions as dist

import pyrofl
from pyrofl import datasets, federations, figures, guides, nets, priors
from pyrofl.files.text_tables import table
from pyrofl.models import pfedvem

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--out", type=Path, default=Path("results/swap_prior"))
args = parser.parse_args()

data = federations.split(datasets.load("digits"), "slices:5", clients=20, test="same_classes")
net = nets.build("mlp:50", input_shape=(64,), outputs=10)

choices = {
    "normal prior": {"prior": dist.Normal},
    "Laplace prior": {"prior": dist.Laplace},
    "Student t prior": {"prior": priors.student_t(df=3.0)},
    "mean-field guide": {"guide": guides.mean_field},  # the default, with the normal prior
    "delta guide": {"guide": guides.delta},
}
rows, curves = [], []
for name, change in choices.items():
    method = pfedvem.build(net, lr_base=0.01, **change)
    run = pyrofl.fit(method, data, rounds=2 if args.quick else 20, eval_every=2, progress=False)
    personal = run.evaluate(model="personal")
    rows.append([name, *(f"{personal.mean(metric):.3f}" for metric in ("accuracy", "nll", "ece"))])
    curves += [{"method": name, "seed": 0, **row} for row in run.history]
    print(f"{name}: done")

print(table(["prior or guide", "accuracy", "nll", "ece"], rows))
figures.save(figures.curves(curves, "nll"), args.out / "nll.png")
print(f"figure: {args.out / 'nll.png'}")
