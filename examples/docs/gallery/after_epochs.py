"""A good initial model has a high accuracy after a few epochs, not immediately."""

import numpy as np
from papers import plots

random, epochs = np.random.default_rng(0), [0, 1, 2, 5, 10]
curves = {
    name: top - drop * np.exp(-np.array(epochs) / slow) + random.normal(0, 0.008, (5, 5))
    for name, top, drop, slow in (("FedAvg", 0.86, 0.3, 3), ("FedABML", 0.89, 0.35, 1.2))
}
figure = plots.after_epochs(epochs, curves)
