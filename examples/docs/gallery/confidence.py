"""The axis begins at zero, so that nearly equal weights look nearly equal."""

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import pfedvem

data = federations.split(
    datasets.per_class(datasets.load("digits"), 40), "dirichlet:0.3,min=5", clients=12
)
net = nets.build("softmax", (64,), 10)
run = pyrofl.fit(pfedvem.build(net, lr_head=0.01), data, 4, progress=False)
known = run.statistics()
figure = figures.confidence(known["tau"], known["deviation"], data.sizes)
