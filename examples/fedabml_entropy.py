"""Do clients notice strange data? Entropy of their predictions, in and out of distribution.

Without --ood the strange data are the same images with their pixels shuffled.

Run: python examples/fedabml_entropy.py [--quick] [--data npz:PATH] [--ood npz:PATH] [--out FOLDER]
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import pyrofl
from pyrofl import figures, nets
from pyrofl.data import datasets
from pyrofl.figures import papers as figures_papers
from pyrofl.inference.evaluation.asked import Asked
from pyrofl.inference.evaluation.predict import predict_batch
from pyrofl.inference.evaluation.prepare import ready
from pyrofl.inference.loop.participation import fraction
from pyrofl.models import fedabml
from pyrofl.partitions import federations
from pyrofl.tensors import generator

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
parser.add_argument("--data", default="digits", help="digits, or images such as npz:PATH")
parser.add_argument("--ood", help="images of the same shape, such as npz:PATH")
parser.add_argument("--clients", type=int, default=10)
parser.add_argument("--per-class", type=int, default=300, help="training rows of each class")
parser.add_argument("--net", default="mlp:50")
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--draws", type=int, default=20, help="of every posterior")
parser.add_argument("--out", type=Path, default=Path("results/fedabml_entropy"))
args = parser.parse_args()

dataset = datasets.per_class(datasets.load(args.data), args.per_class)
data = federations.split(dataset, "labels:5", args.clients)
known = dataset.x[dataset.is_test][:500]
if args.ood:
    other = datasets.load(args.ood)
    strange = other.x[other.is_test][:500]
else:
    flat = known.flatten(1)
    strange = flat[:, torch.randperm(flat.shape[1], generator=generator(0))].view_as(known)

# Every client is asked about its own test rows, and about all strange rows.
end = len(data.x) + torch.arange(len(strange))
asked = {
    "known": data,
    "strange": replace(
        data,
        x=torch.cat([data.x, strange.to(data.x)]),
        y=torch.cat([data.y, data.y[:1].expand(len(strange))]),
        test=tuple(end for _ in data.test),
    ),
}
net = nets.build(args.net, tuple(dataset.x.shape[1:]), len(dataset.classes))
method = fedabml.build(net, epochs=5, draws=2)
run = pyrofl.fit(
    method, data, 2 if args.quick else args.rounds, participation=fraction(0.5), progress=False
)


def entropy(data: pyrofl.Federation) -> list[Tensor]:
    """Return the entropy of the personal models' predictions for every client's test rows."""
    found: dict[int, Tensor] = {}
    for some in ready(method, data, run.state, torch.arange(data.clients), Asked(adapted="adapt")):
        batch = data.batch(some.ids, "test")
        guess = predict_batch(method, some.received, some.local, batch, args.draws, some.noise)
        values = torch.special.entr(guess.mean).sum(-1)
        for i, value, mask in zip(some.ids.tolist(), values, batch.mask, strict=True):
            found[i] = value[mask]
    return [found[i] for i in sorted(found)]


found = {name: entropy(federation) for name, federation in asked.items()}
for name, values in found.items():
    print(f"{name}: mean entropy {torch.cat(values).mean():.3f} nats")
figures.save(figures_papers.densities(found, len(dataset.classes)), args.out / "entropy.png")
print(f"figure: {args.out / 'entropy.png'}")
