"""Mixtures of three clients' models: the best mixture is rarely in a corner."""

import numpy as np
from papers import plots

steps = [(i, j, 20 - i - j) for i in range(21) for j in range(21 - i)]
weights = np.array(steps) / 20
best = np.array([0.4, 0.35, 0.25])
accuracy = 0.85 - 0.5 * ((weights - best) ** 2).sum(1)
marks = {"FedAvg": (np.full(3, 1 / 3), 0.845), "ensemble": (None, 0.87)}
figure = plots.simplex(weights, accuracy, marks)
