"""Up to 30 variables have a line each; otherwise the elements of a variable share a line."""

import numpy as np
import pandas as pd

from pyrofl import figures

random, rows = np.random.default_rng(0), {}
for name, many in {"mu": 1, "tau": 1, "a": 60, "b": 20}.items():
    for i in range(many):
        place = name if many == 1 else f"{name}[county {i}]"
        own = {
            "variable": name,
            "difference": random.normal(0, 0.06),
            "ratio": random.normal(1, 0.03),
        }
        rows[place] = own | {c: 0.0 for c in ("mean", "low", "high")}
figure = figures.posterior_differences(pd.DataFrame.from_dict(rows, orient="index"))
