"""Compare the server of FedABML and FedAvg with an exact posterior mean (FedABML, figure 2).

The task is two linear regressions. The server of FedABML converges to the exact posterior mean,
that of FedAvg does not (figure and first table). The second table is the loss after ten more steps
of each client. It increases from the random start for both methods: the exact mean of all data is
far from the optimum of each client in the direction that its data hardly determine. On this
example, the better global estimate is the worse initialization for each client.

Run: python examples/fedabml_toy.py [--quick] [--out FOLDER]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from papers import plots

import pyrofl
from pyrofl import figures, likelihoods, nets
from pyrofl.data.loaders.conjugate import ConjugateTask, conjugate
from pyrofl.files.text_tables import table
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import fedabml, fedavg
from pyrofl.tensors import generator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Two short runs.")
parser.add_argument("--out", type=Path, default=Path("results/fedabml_toy"))
args = parser.parse_args()
runs, rounds = (2, 3) if args.quick else (5, 40)
net = nets.build("linear", (2,), 1)


def draw(seed: int) -> ConjugateTask:
    """Return two clients with 50 rows each that determine one weight well and the other poorly."""
    rng = generator(seed)
    x = [torch.randn(50, 2, generator=rng).double() * torch.tensor([1, 0.1**0.5])]
    x.append(torch.randn(50, 2, generator=rng).double() * torch.tensor([0.1**0.5, 1]))
    truth = torch.eye(2).double()
    return conjugate(
        x, [a @ w + 0.1 * torch.randn(50, generator=rng) for a, w in zip(x, truth, strict=True)]
    )


def follow(name: str, task: ConjugateTask, seed: int) -> tuple[list[float], list[float]]:
    """Return, per round, the error of the server and the clients' loss after fine-tuning."""
    # Ten steps per round; the learning rate of a mean over 50 rows is half the inverse curvature.
    lr = 0.5 * 50 / float(torch.linalg.eigvalsh(task.precision).max())
    common = {"likelihood": likelihoods.normal(), "batch": None, "lr": lr}
    method = fedavg.build(net, epochs=10, momentum=0.0, **common)
    if name == "FedABML":
        method = fedabml.build(
            net, kl=1.0, epochs=1, steps=10, init_scale=0.2, lr_prior=1.0, **common
        )
    # Both are fine-tuned in the same way: ten gradient steps from the server's mean.
    tuned = fedavg.build(net, fine_tune=10, momentum=0.0, **common)
    target, _ = task.pooled(torch.zeros(2), torch.zeros(2, 2))
    cohort = task.federation.cohort(torch.arange(2))
    off, loss = [], []
    begin = first(method, task.federation, seed)
    for state in (begin, *pyrofl.federate(method, task.federation, rounds, seed=seed)):
        mean = state.server["loc/w" if name == "FedABML" else "w/w"]
        off.append(float((mean - target).norm()))
        start = replace(state, server={"w/w": mean})
        _, local = prepared(
            tuned, task.federation, start, cohort, adaptation="fine_tune", seed=seed
        )
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
for what, curves in (("error of the server", distance), ("loss after fine-tuning", excess)):
    means = {name: np.mean(curve, 0) for name, curve in curves.items()}
    rows = [[name, *(f"{mean[r]:.3f}" for r in shown)] for name, mean in means.items()]
    print(table([what, *(f"round {r}" for r in shown)], rows))
figure = plots.distance({"distance of the server's mean from the exact mean (norm)": distance})
figures.save(figure, args.out / "toy.png")
print(f"figure: {args.out / 'toy.png'}")
