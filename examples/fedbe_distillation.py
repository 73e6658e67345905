"""Compare teachers and optimizers for the distillation of FedBE (tables 1 and 3, figure 9).

Every client has many rows of two classes of clothing and five rows of each other class. One fit
takes about half a minute on one core. The figure shows the confidences of the clients' models and
of sampled models, as in figure 9.

Run: python examples/fedbe_distillation.py [--quick] [--data NAME] [--out FOLDER]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from papers import plots

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.files.text_tables import table
from pyrofl.models import fedavg, fedbe
from pyrofl.models.fedbe import gaussian
from pyrofl.models.fedbe.posteriors import sample
from pyrofl.models.shared.distillation import predictions
from pyrofl.tensors import generator, role

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run with two rounds.")
parser.add_argument(
    "--data", help="Image data set (default: fashion_mnist, or digits with --quick)."
)
parser.add_argument("--rows", type=int, default=4500, help="Training rows of clients and server.")
parser.add_argument("--server", type=int, default=1500, help="Unlabeled rows at the server.")
parser.add_argument("--net", default="mlp:100")
parser.add_argument("--partition", default="step:2,minor=5")
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--distil-epochs", type=int, default=20)
parser.add_argument("--seeds", type=int, default=1)
parser.add_argument("--out", type=Path, default=Path("results/fedbe_distillation"))
args = parser.parse_args()
print("A full run takes about five minutes on one core; --quick takes seconds.", flush=True)

whole = datasets.load(args.data or ("digits" if args.quick else "fashion_mnist"))
chosen = torch.randperm(len(whole.y), generator=generator(0))
train, test = (chosen[whole.is_test[chosen] == kind] for kind in (False, True))
some = torch.cat([train[: args.rows], test[: max(3000, args.rows // 5)]])
dataset = replace(whole, x=whole.x[some], y=whole.y[some], is_test=whole.is_test[some])
held = 300 if args.quick else args.server
rounds, epochs = (2, 10) if args.quick else (args.rounds, args.epochs)

training = {"epochs": epochs, "batch": 40, "lr": 0.01, "weight_decay": 1e-3}
choices = {"FedAvg": None}
choices |= {f"{t}, SWA": {"teachers": t} for t in ("A", "C", "S", "SA", "AC", "SC", "SAC")}
choices |= {f"{t}, SGD": {"teachers": t, "distil": "sgd"} for t in ("C", "SAC")}
if args.quick:
    choices = {name: choices[name] for name in ("FedAvg", "SAC, SWA", "SAC, SGD")}
if args.seeds < 1:
    parser.error(f"--seeds must be at least 1; got {args.seeds}")

found: dict[tuple[str, str], list[float]] = {}
for seed in range(args.seeds):
    data = federations.split(
        dataset, args.partition, 10, seed=seed, server_data=held, test="uniform"
    )
    net = nets.build(args.net, input_shape=tuple(data.x.shape[1:]), outputs=10)
    server = {"server_data": data.server_data, "distil_epochs": args.distil_epochs}
    for name, teaching in choices.items():
        method = fedavg.build(net, **training)
        if teaching is not None:
            method = fedbe.build(net, **server, **teaching, **training)
        run = pyrofl.fit(method, data, rounds=rounds, seed=seed, progress=False)
        for model in method.views:
            score = run.evaluate(model=model, population="pooled")
            found.setdefault((name, model), []).append(100 * score.mean("accuracy"))
    print(f"seed {seed}: done")

rows = []
for name in choices:
    cells = [found.get((name, model), []) for model in ("global", "ensemble")]
    rows.append([name, *(f"{sum(c) / len(c):.1f}" if c else "" for c in cells)])
print(table(["teachers and distillation", "global accuracy (%)", "ensemble accuracy (%)"], rows))

# The clients' models of the last round, and samples from their normal posterior.
clients, size = role("w", run.state.message), run.state.reporters.size
panels = {}
for name, models in (
    ("clients", clients),
    ("samples", sample(gaussian(clients, size), 10, generator(seed))),
):
    probs = predictions(net, models, data.x[data.pooled_test])
    right = probs.argmax(-1) == data.y[data.pooled_test]
    panels[name] = (probs.amax(-1), right)
figures.save(plots.confidence_histogram(panels), args.out / "confidence.png")
print(f"figure: {args.out / 'confidence.png'}")
