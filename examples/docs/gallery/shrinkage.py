"""Eight schools: estimates with large standard errors move most towards the population."""

import numpy as np
import torch

from pyrofl import datasets, federations, figures

data = federations.split(datasets.load("eight_schools"), "groups").to("cpu", torch.float64)
y, error, tau = data.y.numpy(), data.x[:, 0].numpy(), 6.6
weight = tau**2 / (tau**2 + error**2)
center = (y / (tau**2 + error**2)).sum() / (1 / (tau**2 + error**2)).sum()
mean, sd = weight * y + (1 - weight) * center, np.sqrt(weight) * error
posterior = (mean, mean - 1.96 * sd, mean + 1.96 * sd)
figure = figures.shrinkage(data.names, y, posterior, center, "effect of coaching (points)")
