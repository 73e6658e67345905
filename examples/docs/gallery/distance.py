"""The axis is logarithmic for values that decrease by orders of magnitude."""

import numpy as np
from papers import plots

random, rounds = np.random.default_rng(0), np.arange(30)
curves = {
    name: np.exp(-rate * rounds + random.normal(0, 0.2, (5, 30))) + floor
    for name, rate, floor in (("FedABML", 0.25, 0.0), ("FedAvg", 0.3, 0.05))
}
figure = plots.distance({"from the server's mean to the exact one (norm)": curves})
