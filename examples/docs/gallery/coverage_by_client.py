"""A mark outside its band is a client with too low or too high coverage."""

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import fedavg

data = federations.split(datasets.load("digits"), "dirichlet:0.3,min=30", clients=8)
method = fedavg.build(nets.build("softmax", (64,), 10), lr=0.1)
run = pyrofl.fit(method, data, rounds=5, progress=False)
figure = figures.coverage_by_client(pyrofl.conformal(run, alpha=0.2).frame())
