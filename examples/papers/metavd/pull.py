"""Measure how fast the KL term alone drives MetaVD's dropout rates towards 1.

The likelihood is constant: all logits are zero. As in the authors' code, clients take 35 steps of
0.02 per round (5 epochs of 385 rows), and the learning rate of the hypernetwork is 0.9. The speed
depends on d, the number of random weights: the KL term is a mean over them, so its gradient per
weight is proportional to 1 / d. The last column is the fraction of dropout rates above 0.9.
--hyper-step bounds the change of s per round.

Run: python examples/papers/metavd/pull.py [--quick] [--hyper-step STEP]
"""

import argparse
import sys
from pathlib import Path

import torch
from pyro.distributions import Categorical
from torch import Tensor

import pyrofl
from pyrofl import Federation, nets
from pyrofl.models import metavd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from papers import files  # noqa: E402

NETS = {512: "mlp:32,16", 2048: "mlp:64,32", 8192: "mlp:128,64", 32768: "mlp:256,128"}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument("--weights", type=int, nargs="+", default=list(NETS), choices=list(NETS))
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--hyper-lr", type=float, default=0.9)
parser.add_argument(
    "--hyper-step", type=float, help="Bound on the change of s per round (default: none)."
)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--out", type=Path, default=HERE / "pull.csv")
args = parser.parse_args()
rounds, seeds = (2, 1) if args.quick else (args.rounds, args.seeds)
weights = [512] if args.quick else args.weights


def constant(outputs: Tensor, x: Tensor) -> Categorical:
    """Return a likelihood that does not depend on the weights."""
    return Categorical(logits=0 * outputs)


clients = torch.arange(100 * 385).split(385)
data = Federation(
    torch.zeros(100 * 385, 2), torch.zeros(100 * 385).long(), clients, clients, classes=("a", "b")
)


def measure(weights: int, seed: int) -> list[tuple[int, float]]:
    """Return the fraction of dropout rates above 0.9 after every round."""
    rates = {"lr": 0.02, "hyper_lr": args.hyper_lr, "hyper_step": args.hyper_step}
    net = nets.build(NETS[weights], (2,), 2)
    method = metavd.build(net, likelihood=constant, num_particles=1, **rates)
    some = pyrofl.participation.fixed(10)
    how = {"participation": some, "progress": False, "check": False}  # no row affects the loss
    run = pyrofl.fit(method, data, rounds, seed=seed, **how)
    return list(enumerate(run.rounds["rates_above_0.9"], 1))


head = ("weights", "seed", "round", "rates_above_0.9")
about = {"hyper_lr": args.hyper_lr, "hyper_step": args.hyper_step, "rounds": rounds}
runs = [(d, seed) for d in weights for seed in range(seeds)]
files.fill(args.out, head, runs, measure, **about)
