"""A comparison needs all rounds: curves can be equal at first and differ at the end."""

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import fedavg, local

data = federations.split(datasets.per_class(datasets.load("digits"), 30), "slices:5", clients=6)
net = nets.build("softmax", (64,), 10)
rows = []
for name, method in {"fedavg": fedavg.build(net, fine_tune=1), "local": local.build(net)}.items():
    for seed in range(2):
        run = pyrofl.fit(method, data, 6, seed=seed, eval_every=1, progress=False)
        rows += [row | {"method": name, "seed": seed} for row in run.history]
figure = figures.curves(rows)
