"""Several estimates of the same coefficients are drawn below each other."""

import numpy as np

from pyrofl import figures

random, labels = np.random.default_rng(0), ["intercept", "age", "sex", "cholesterol"]
fits = {}
for name, half in {"federated": 0.3, "NUTS": 0.32, "one hospital alone": 0.8}.items():
    mean = np.array([-0.5, 0.6, 0.9, 0.2]) + random.normal(0, 0.1 * half, 4)
    fits[name] = (mean, mean - half, mean + half)
figure = figures.forest(fits, labels, "log odds per usual spread")
