"""The confidence of a good model is low where its predictions are wrong."""

import numpy as np
from papers import plots

random, models = np.random.default_rng(0), {}
for name, sharp in {"one model": 8, "ensemble": 3}.items():
    sure = random.beta(sharp, 1.2, 2000)
    models[name] = sure, random.uniform(size=2000) < (0.9 * sure if sharp > 5 else sure)
figure = plots.confidence_histogram(models)
