"""Below the band, the coverage of intervals is too low."""

import numpy as np

from pyrofl import figures

random, inside = np.random.default_rng(0), {}
for name, width in {"full covariance": 1.0, "diagonal": 0.55}.items():
    z = random.normal(size=400) / width
    inside[name] = (1 + np.vectorize(__import__("math").erf)(z / 2**0.5)) / 2
figure = figures.coverage({"mu": inside})
