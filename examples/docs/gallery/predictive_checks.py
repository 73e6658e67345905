"""A client is colored if its statistic is outside the predictions of its posterior."""

import numpy as np
import pandas as pd

from pyrofl import figures

random, rows = np.random.default_rng(0), []
for statistic, middle in {"mean": 3.0, "maximum": 9.0}.items():
    for j in range(8):
        seen = middle + random.normal(0, 0.5) + 3.5 * (j == 2)
        row = {"statistic": statistic, "client": f"ward {j}", "observed": seen, "mean": middle}
        low, high = middle - 1.5, middle + 1.5
        rows.append(row | {"low": low, "high": high, "p": 0.5 if low < seen < high else 0.004})
figure = figures.predictive_checks(pd.DataFrame(rows))
