"""Does the server find the exact posterior mean of two linear regressions? (FedABML, figure 2).

It does, and FedAvg stays away from it: that is the figure. The loss after ten more steps of each
client, in the second table, is another matter. It rises from the random start on, for both: the
exact mean of all data is far from each client's own optimum in the direction that it can hardly
see, so on this fixture the better start for the whole is the worse one for each.

Run: python examples/fedabml_toy.py [--quick] [--out FOLDER]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import pyrofl
from pyrofl import figures, likelihoods, nets
from pyrofl.data.loaders.conjugate import ConjugateTask, conjugate
from pyrofl.files.run_folder import table
from pyrofl.inference.engine.server_round import first
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import fedabml, fedavg
from pyrofl.tensors import generator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two short runs, to see that it works")
parser.add_argument("--out", type=Path, default=Path("results/fedabml_toy"))
args = parser.parse_args()
runs, rounds = (2, 3) if args.quick else (5, 40)
net = nets.build("linear", (2,), 1)


def draw(seed: int) -> ConjugateTask:
    """Give each of two clients 50 rows that say much about one weight and little of the other."""
    rng = generator(seed)
    x = [torch.randn(50, 2, generator=rng).double() * torch.tensor([1, 0.1**0.5])]
    x.append(torch.randn(50, 2, generator=rng).double() * torch.tensor([0.1**0.5, 1]))
    truth = torch.eye(2).double()
    return conjugate(
        x, [a @ w + 0.1 * torch.randn(50, generator=rng) for a, w in zip(x, truth, strict=True)]
    )


def follow(name: str, task: ConjugateTask, seed: int) -> tuple[list[float], list[float]]:
    """Return, round by round, how far the server is off and the clients after fine-tuning."""
    # Ten steps a round; the learning rate of a mean over 50 rows is half the inverse curvature.
    lr = 0.5 * 50 / float(torch.linalg.eigvalsh(task.precision).max())
    common = {"likelihood": likelihoods.normal(), "batch": None, "lr": lr}
    method = fedavg.build(net, epochs=10, momentum=0.0, **common)
    if name == "FedABML":
        method = fedabml.build(net, kl=1.0, epochs=1, steps=10, scale=0.2, lr_prior=1.0, **common)
    # Both are fine-tuned alike: ten plain steps from the server's mean.
    tuned = fedavg.build(net, fine_tune=10, momentum=0.0, **common)
    target, _ = task.pooled(torch.zeros(2), torch.zeros(2, 2))
    who = task.federation.who(torch.arange(2))
    off, loss = [], []
    begin = first(method, task.federation, seed)
    for state in (begin, *pyrofl.federate(method, task.federation, rounds, seed=seed)):
        mean = state.server["loc/w" if name == "FedABML" else "w/w"]
        off.append(float((mean - target).norm()))
        start = replace(state, server={"w/w": mean})
        _, local = prepared(tuned, task.federation, start, who, adapted="adapt", seed=seed)
        gap = (local["w/w"] - task.mean)[..., None]
        loss.append(float((gap.mT @ task.precision @ gap).sum()) / 2)
    return off, loss


distance: dict[str, list[list[float]]] = {"FedABML": [], "FedAvg": []}
excess: dict[str, list[list[float]]] = {"FedABML": [], "FedAvg": []}
for seed in range(runs):
    for name in distance:
        off, loss = follow(name, draw(seed), seed)
        distance[name].append(off)
        excess[name].append(loss)

shown = sorted({min(r, rounds) for r in (0, 1, 5, 10, rounds)})
for what, curves in (("distance of the server", distance), ("loss after fine-tuning", excess)):
    means = {name: np.mean(curve, 0) for name, curve in curves.items()}
    rows = [[name, *(f"{mean[r]:.3f}" for r in shown)] for name, mean in means.items()]
    print(table([what, *(f"round {r}" for r in shown)], rows))
figure = figures.distance({"from the server's mean to the exact one (norm)": distance})
figures.save(figure, args.out / "toy.png")
print(f"figure: {args.out / 'toy.png'}")
