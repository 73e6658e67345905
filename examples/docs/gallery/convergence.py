"""A run has converged if all lines are below the dotted line; the title is the run's status."""

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import fedavg

digits = datasets.per_class(datasets.load("digits"), 10)
data = federations.split(digits, "iid", clients=3)
method = fedavg.build(nets.build("softmax", (64,), 10), lr=0.05)
run = pyrofl.fit(method, data, 25, progress=False)
figure = figures.convergence(run)
