"""The uncertainty should be larger for rows of classes that were not trained."""

import numpy as np

from pyrofl import figures

random = np.random.default_rng(0)
entropy = {
    "digits it was shown": [random.beta(1.2, 6, 300) * np.log(5) for _ in range(6)],
    "digits it never saw": [random.beta(3, 2, 300) * np.log(5) for _ in range(6)],
}
figure = figures.entropies(entropy, classes=5)
