"""Small clients are on the left; they benefit most from the other clients."""

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import local, pfedvem

data = federations.split(datasets.load("digits"), "slices:5", clients=20, test="same_classes")
net, found = nets.build("mlp:30", (64,), 10), {}
for name, method in {
    "alone": local.build(net),
    "pFedVEM": pfedvem.build(net, lr_base=0.01),
}.items():
    run = pyrofl.fit(method, data, 4, progress=False)
    found[name] = run.evaluate(model="personal").values["accuracy"]
figure = figures.clients(data.sizes[: data.clients], found, "accuracy")
