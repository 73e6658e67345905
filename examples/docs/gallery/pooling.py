"""Separate estimates of small clients vary a lot; partial pooling moves them to the population."""

import numpy as np

from pyrofl import figures

random = np.random.default_rng(0)
size = np.exp(random.uniform(0.7, 4.5, 40)).round()
truth, error = random.normal(1.4, 0.3, 40), 0.8 / np.sqrt(size)
own = random.normal(truth, error)
weight = 0.3**2 / (0.3**2 + error**2)
partial = weight * own + (1 - weight) * 1.4, np.sqrt(weight) * error
figure = figures.pooling(size, (own, error), partial, 1.4, "log radon", "houses of the county")
