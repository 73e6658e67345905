"""A quantity that the method monitors: the share of dropout rates above 0.9 in each round."""

import pyrofl
from pyrofl import figures
from pyrofl.models import metavd

data = pyrofl.federations.split(pyrofl.datasets.load("digits"), "labels:2", clients=5)
net = pyrofl.nets.build("mlp:16,8", input_shape=(64,), outputs=10)
method = metavd.build(net, hyper_lr=0.9, epochs=1)
run = pyrofl.fit(method, data, rounds=15, progress=False)
figure = figures.watched(run)
