"""Small clients are to the left: who gains by federation is often among them."""

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import fedavg

data = federations.split(
    datasets.per_class(datasets.load("digits"), 60), "dirichlet:0.3,min=5", clients=20
)
run = pyrofl.fit(fedavg.build(nets.build("softmax", (64,), 10)), data, 3, progress=False)
scores = run.evaluate(model="global")
figure = figures.clients(data.sizes[scores.ids], scores.values["accuracy"], "accuracy")
