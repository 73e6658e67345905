"""Each dot is a seed. If the dots of two methods overlap, more seeds are needed."""

from itertools import product

import numpy as np

from pyrofl import figures

random, mean = np.random.default_rng(0), {"local": 0.79, "fedavg": 0.75, "pfedvem": 0.87}
rows = [
    {"method": name, "model": model, "adaptation": "none", "seed": s, "metric": "accuracy"}
    | {"value": mean[name] + 0.02 * (model == "personal") + random.normal(0, 0.01)}
    for name, model, s in product(mean, ("personal", "global"), range(4))
    if (name, model) != ("local", "global")
]
figure = figures.comparison(rows)
