"""A personal head stays at the client; the width of an arrow grows with its bytes."""

import pyrofl
from pyrofl import datasets, federations, figures, nets
from pyrofl.models import fedper

data = federations.split(datasets.load("digits"), "slices:5", clients=20)
method = fedper.build(nets.build("mlp:50", (64,), 10))
figure = figures.data_flow(pyrofl.get_data_flow(method, data))
