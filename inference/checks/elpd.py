"""Conversion of leave-one-out estimates to ArviZ's ELPDData, for ArviZ 0.23 and 1.x."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.inference.posteriors.export import combine_datasets, import_arviz

if TYPE_CHECKING:
    import xarray


def elpd_data(by_place: xarray.DataArray, spent: float, k: xarray.DataArray, count: int) -> Any:
    """Return ArviZ's ELPDData built from pointwise leave-one-out estimates and Pareto k."""
    arviz = import_arviz()
    if hasattr(arviz, "loo_approximate_posterior"):
        # Its classes differ from release to release, so `loo` creates one.
        even = by_place.reset_coords(drop=True).expand_dims(chain=1, draw=count)
        groups = {"log_likelihood": even.rename("together").to_dataset()}
        weights = {"log_weights": 0 * even - np.log(count), "pareto_k": k}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of k, and of a single entry
            estimate = arviz.loo(combine_datasets(groups), pointwise=True, reff=1.0, **weights)
        estimate.p, estimate.elpd_i = spent, by_place
        return estimate
    from arviz.stats.stats_utils import ELPDData

    good = min(1 - 1 / np.log10(count), 0.7)
    se, bad = float((k.size * by_place.var()) ** 0.5), bool((k > good).any())
    values: dict[str, Any] = {"elpd_loo": float(by_place.sum()), "se": se, "p_loo": spent}
    values |= {"n_samples": count, "n_data_points": k.size, "warning": bad, "loo_i": by_place}
    values |= {"pareto_k": k, "scale": "log", "good_k": good}
    return ELPDData(data=list(values.values()), index=list(values))
