"""Tables of posterior draws: means, medians and intervals, of quantities and of ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor


def interval_table(values: Mapping[Any, Tensor], prob: float) -> pd.DataFrame:
    """Return mean, sd, median and interval of draws [S] of each quantity."""
    ends = (1 - prob) / 2, (1 + prob) / 2
    names = ["mean", "sd", "median", *(f"{100 * end:.4g}%" for end in ends)]
    rows = [
        [float(v.mean()), float(v.std()), *np.quantile(v.numpy(), [0.5, *ends]).tolist()]
        for v in values.values()
    ]
    return pd.DataFrame(rows, list(values), names)


def ratio_table(values: Mapping[Any, Tensor], prob: float) -> pd.DataFrame:
    """Return median, interval and probability above 1 of exp of draws [S] of each quantity."""
    table = interval_table({term: value.exp() for term, value in values.items()}, prob)
    above = [float((value > 0).double().mean()) for value in values.values()]
    return table.drop(columns=["mean", "sd"]).assign(p_above_1=above)
