"""How fast do MetaVD's dropout rates run away? The divergence's pull alone, at the authors' rates.

The likelihood says nothing here: all logits are zero. Clients take 35 steps of 0.02 in a round, as
5 epochs of 385 rows are, and the hypernetwork learns at 0.9. What counts is d, the number of random
weights: the divergence is a mean over them, so each is pulled 1 / d as hard. The last column is the
share of dropout rates above 0.9. With --hyper-step no s moves by more than that in a round.

Run: python examples/papers/metavd/pull.py [--quick] [--hyper-step STEP]
"""

import argparse
import csv
import subprocess
from pathlib import Path
from time import perf_counter

import torch
from pyro.distributions import Categorical
from torch import Tensor

import pyrofl
from pyrofl import Federation, nets
from pyrofl.models import metavd

HERE = Path(__file__).parent
NETS = {512: "mlp:32,16", 2048: "mlp:64,32", 8192: "mlp:128,64", 32768: "mlp:256,128"}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--weights", type=int, nargs="+", default=list(NETS), choices=list(NETS))
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--hyper-lr", type=float, default=0.9)
parser.add_argument("--hyper-step", type=float, help="default: no bound")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", type=Path, default=HERE / "pull.csv")
args = parser.parse_args()
rounds, seeds = (2, 1) if args.quick else (args.rounds, args.seeds)


def silent(outputs: Tensor, x: Tensor) -> Categorical:
    """Say nothing about the weights."""
    return Categorical(logits=0 * outputs)


clients = torch.arange(100 * 385).split(385)
data = Federation(
    torch.zeros(100 * 385, 2), torch.zeros(100 * 385).long(), clients, clients, classes=("a", "b")
)
commit = subprocess.run(
    ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True
).stdout.strip()
args.out.parent.mkdir(parents=True, exist_ok=True)
with args.out.open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(("weights", "seed", "round", "rates_above_0.9", "seconds", "commit"))
    for d in args.weights:
        for seed in range(seeds):
            net, begun = nets.build(NETS[d], (2,), 2), perf_counter()
            rates = {"lr": 0.02, "hyper_lr": args.hyper_lr, "hyper_step": args.hyper_step}
            run = pyrofl.fit(
                metavd.build(net, likelihood=silent, draws=1, **rates),
                data,
                rounds,
                seed=seed,
                participation=pyrofl.participation.fixed(10),
                progress=False,
            )
            seconds = f"{perf_counter() - begun:.1f}"
            shares = run.rounds["rates_above_0.9"]
            for number, share in enumerate(shares, 1):
                table.writerow((d, seed, number, f"{share:.4f}", seconds, commit))
            file.flush()
            half = next((i for i, share in enumerate(shares, 1) if share > 0.7), None)
            print(f"d = {d}, seed {seed}: above 70% at round {half}", flush=True)
