"""`pyrofl benefit` draws this figure: the benefit of federation for each client."""

import numpy as np

from pyrofl import figures

random, names = np.random.default_rng(1), [f"hospital {i}" for i in range(9)]
sites = {}
for model, gain in {"fedavg, global": 1.0, "fedavg, personal": 4.0}.items():
    middle, half = random.normal(gain, 3, 9), np.linspace(6, 1.5, 9)
    ends = zip(middle, middle - half, middle + half, strict=True)
    sites[model] = dict(zip(names, ends, strict=True))
figure = figures.differences(sites, "points of accuracy")
