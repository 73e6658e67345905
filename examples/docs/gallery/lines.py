"""Each client has its rows, its own line, and the line of the hierarchical model."""

import numpy as np

from pyrofl import figures

random, at, clients = np.random.default_rng(0), np.linspace(0, 9, 20), {}
for j in range(6):
    level, slope, days = 250 + 20 * random.normal(), 10 + 5 * random.normal(), np.arange(10)
    y = level + slope * days + 25 * random.normal(size=10)
    line = [level, slope] + random.normal(size=(200, 2)) * (12, 2)
    clients[f"subject {j}"] = days, y, at, line[:, :1] + line[:, 1:] * at
figure = figures.lines(clients, "days without sleep", "reaction (ms)")
