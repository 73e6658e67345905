"""Compare FedBE's student with the average of the clients' models and with its teachers.

Scores are accuracies in percent on the test rows after the last round: of the average of the
clients' models, of the student, and of the ensemble of teachers; and the fraction of unlabeled
rows for which student and teachers predict the same class. FedAvg has no student: its average is
the global model. A line of the CSV is one run.

Run: python examples/papers/fedbe/students.py [--quick] [--full] [--data NAME] [--out FILE]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import pyrofl
from pyrofl import datasets, federations, nets
from pyrofl.inference.definition.averages import average
from pyrofl.models import fedbe
from pyrofl.models.shared.distillation import predictions
from pyrofl.tensors import role

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from papers import files  # noqa: E402

FAST, PAPER = ({"distil_lr": lr, "distil_lr_end": 0.4 * lr} for lr in (1e-2, 1e-3))
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "distil_lr=0.01": FAST,
    "squared": FAST | {"sharpen": True},
    "distil_lr=0.001": PAPER,
    "distil_lr=0.001, squared": PAPER | {"sharpen": True},
    "std_scale=0.1": FAST | {"std_scale": 0.1},
    "teachers=AC": FAST | {"teachers": "AC"},
    "v-Distillation": FAST | {"teachers": "C", "distil": "sgd"},
    "teachers=C": FAST | {"teachers": "C"},
    "SGD": FAST | {"distil": "sgd"},
    "FedAvg": {"distil": "none"},
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="Short run: two seeds, default settings.")
parser.add_argument(
    "--full", action="store_true", help="Use the scale and the ConvNet of the paper."
)
parser.add_argument("--data", default="digits", help="Data set with classes.")
parser.add_argument("--partitions", nargs="+", default=["step:2,minor=2", "dirichlet:0.1"])
parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
parser.add_argument(
    "--per-class", type=int, help="Training rows per class, including the server (default: all)."
)
parser.add_argument("--tested", type=int, default=1, help="Use every N-th test row.")
parser.add_argument("--clients", type=int, default=20)
parser.add_argument("--epochs", type=int, default=5, help="Local epochs per round.")
parser.add_argument("--batch", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.01, help="Learning rate of the clients.")
parser.add_argument(
    "--server", type=float, default=0.2, help="Fraction of rows that are unlabeled at the server."
)
parser.add_argument("--net", default="mlp:50")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--seeds", type=int, nargs="+", default=[*range(10)])
parser.add_argument("--out", type=Path, default=HERE / "students.csv")
args = parser.parse_args()
if args.quick:
    args.seeds, args.settings = [0, 1], ["defaults"]
clients: dict[str, Any] = {"epochs": args.epochs, "batch": args.batch, "lr": args.lr}
if args.full:
    args.partitions, args.clients, args.server = ["step:2,minor=10", "dirichlet:0.1"], 10, 0.2
    args.net, args.rounds, args.seeds = "cnn-fedbe", 40, [*range(5)]
    clients = {"epochs": 20, "batch": 40, "weight_decay": 1e-3, "decay": True}

dataset = datasets.load(args.data)
if args.per_class:
    dataset = datasets.per_class(dataset, args.per_class)
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))
HEAD = ("partition", "setting", "seed", "average", "student", "ensemble", "agreement")


def scores(partition: str, name: str, seed: int) -> list[list[float | None]]:
    """Return the scores of one run."""
    data = federations.split(
        dataset, partition, args.clients, seed=seed, test="same_classes", server_data=args.server
    )

    def at(number: int) -> pyrofl.Method:
        over = {"elapsed": number / args.rounds}  # learning rates that decay depend on it
        return fedbe.build(net, server_data=data.server_data, **clients | SETTINGS[name] | over)

    run = pyrofl.fit(at, data, args.rounds, seed=seed, progress=False)
    server, rows = run.state.server, data.pooled_test[:: args.tested]
    mean = average(role("w", run.state.message), run.state.reporters.size)

    def right(models: Any) -> float:
        probs = predictions(net, models, data.x[rows]).mean(0)
        return 100 * float((probs.argmax(-1) == data.y[rows]).double().mean())

    one = [{n: v[None] for n, v in w.items()} for w in (mean, role("w", server))]
    teachers = role("server/teacher/w", server)
    agreed = run.records[-1].watched.get("agreement")
    return [[*map(right, [*one, teachers]), None if agreed is None else 100 * agreed]]


runs = [(p, name, seed) for p in args.partitions for name in args.settings for seed in args.seeds]
rows = int((~dataset.is_test).sum())
about = {"data": dataset.name, "rows": rows, "clients": args.clients, "server": args.server}
about |= {"net": args.net, "rounds": args.rounds, **clients}
files.fill(args.out, HEAD, runs, scores, **about)
