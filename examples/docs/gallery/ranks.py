"""Simulation-based calibration: a U shape means too narrow, an inverted U too wide."""

import numpy as np

from pyrofl import figures

random = np.random.default_rng(0)
places = {
    "calibrated": random.uniform(size=400),
    "too narrow": random.beta(0.5, 0.5, 400),
    "too wide": random.beta(2.5, 2.5, 400),
    "shifted": random.beta(2, 1, 400),
}
figure = figures.ranks(places)
