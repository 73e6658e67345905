"""Before its first row, the posterior of a new client is that of the population."""

import numpy as np

from pyrofl import figures

sizes = [0, 1, 2, 4, 8, 16]
sd = 1 / np.sqrt(1 / 1.5**2 + np.array(sizes))
mean = 2.0 - 1.6 * sd
alone = 1 / np.sqrt(1 / 10**2 + np.array(sizes))
fits = {"with the others": (mean, mean - 1.96 * sd, mean + 1.96 * sd)}
fits["alone"] = (2 + 0 * alone, 2 - 1.96 * alone, 2 + 1.96 * alone)
figure = figures.narrowing(sizes, fits, "mean of the new client", truth=1.7)
figure.axes[0].set_ylim(-4, 7)
