"""ArviZ's container of leave-one-out, filled with numbers of our own; for 0.23 and 1.x."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.inference.posteriors.export import gathered, import_arviz

if TYPE_CHECKING:
    import xarray

EQUAL = 1e-6  # spread of log weights that is rounding


def elpd_data(by_place: xarray.DataArray, spent: float, k: xarray.DataArray, count: int) -> Any:
    """Return an ELPDData.

    Args:
        by_place: log density of every row or client.
        spent: the effective number of parameters.
        k: Pareto k of every row or client.
        count: of draws.
    """
    arviz = import_arviz()
    if hasattr(arviz, "loo_approximate_posterior"):
        # Its classes differ from release to release, so `loo` is to make one.
        even = by_place.reset_coords(drop=True).expand_dims(chain=1, draw=count)
        groups = {"log_likelihood": even.rename("together").to_dataset()}
        weights = {"log_weights": 0 * even - np.log(count), "pareto_k": k}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of k, and of a single place
            made = arviz.loo(gathered(groups), pointwise=True, reff=1.0, **weights)
        made.p, made.elpd_i = spent, by_place
        return made
    from arviz.stats.stats_utils import ELPDData

    good = min(1 - 1 / np.log10(count), 0.7)
    se, bad = float((k.size * by_place.var()) ** 0.5), bool((k > good).any())
    values: dict[str, Any] = {"elpd_loo": float(by_place.sum()), "se": se, "p_loo": spent}
    values |= {"n_samples": count, "n_data_points": k.size, "warning": bad, "loo_i": by_place}
    values |= {"pareto_k": k, "scale": "log", "good_k": good}
    return ELPDData(data=list(values.values()), index=list(values))


def pareto_k(log_weights: np.ndarray) -> float:
    """Return the shape of the tail of weights, given their logarithms [S]; 0 if all are equal."""
    import xarray

    if np.ptp(log_weights) < EQUAL:
        return 0.0
    arviz = import_arviz()
    if hasattr(arviz, "psislw"):
        return float(arviz.psislw(log_weights)[1])
    found = xarray.DataArray(-log_weights, dims="draw").azstats.psislw(dim="draw")
    return float(found[1])
