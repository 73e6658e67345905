"""The same diagram is on every method's card; `figures.plates` also draws your own method."""

import torch

import pyrofl
from pyrofl import figures, nets
from pyrofl.models import pfedvem

sites = {name: (torch.randn(8, 3), torch.arange(8) % 2) for name in ("north", "south")}
data = pyrofl.Federation.from_arrays(sites, classes=2)
method = pfedvem.build(nets.build("mlp:4", input_shape=(3,), outputs=2))
figure = figures.plates(pyrofl.get_dependencies(method, data))
