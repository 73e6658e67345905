"""Each coefficient has a panel; the clients are years here."""

import numpy as np

from pyrofl import figures

random, years = np.random.default_rng(0), list(range(1972, 2004, 4))
mean = np.stack([np.linspace(0.2, 1.1, 8), np.full(8, 0.4), np.linspace(0.6, 0.1, 8)], 1)
mean += random.normal(0, 0.05, mean.shape)
labels = ["ideology", "income", "age"]
figure = figures.parameters_by_covariate(
    years, (mean, mean - 0.15, mean + 0.15), labels, "year", "points per step"
)
