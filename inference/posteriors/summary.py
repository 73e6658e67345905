"""Table of posterior summaries, with the diagnostics of ArviZ and of the importance correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.arguments import check_name
from pyrofl.inference.posteriors.export import SAMPLE_DIMS, coordinates, import_arviz

if TYPE_CHECKING:
    import pandas
    import xarray

ADDED = ("_noncentered", "_unconstrained")  # end the names of sites that the library adds
OF_RUN = ("pareto_k", "importance_ess")


def summarize(
    idata: Any, prob: float = 0.95, names: Mapping[str, str] | None = None
) -> pandas.DataFrame:
    """Return posterior mean, standard deviation, central interval and diagnostics of variables.

    Args:
        idata: result of `to_arviz`.
        prob: probability of the interval, whose ends are quantiles.
        names: variable -> its name in the table; None lists all variables of the posterior but
            the standardized ones of a non-centered form, and unconstrained ones.

    Returns:
        A row for each entry of a variable. Columns are mean, sd, median and the ends of the
        interval, such as "2.5%"; ess_bulk, ess_tail and r_hat of `arviz.ess` and `arviz.rhat`,
        where ess_bulk and ess_tail are at most the effective size of the importance samples, from
        which corrected draws are resampled, and r_hat is NaN for one run, as it compares runs; and
        pareto_k and importance_ess of the correction by importance sampling, the worst of all runs
        (NaN without a correction);
        pareto_k is the largest one of the entry's mean, standard deviation and ends of the 95%
        interval, see `tail_shapes`. The attribute "corrected" is that of `to_arviz`.

    Raises:
        ValueError: if a variable is unknown, or prob is not between 0 and 1.
    """
    import pandas

    if not 0 < prob < 1:
        raise ValueError(f"prob is {prob}; expected a probability between 0 and 1")
    posterior = idata["posterior"]
    names = variable_labels(posterior, names)
    arviz, chains = import_arviz(), posterior.sizes["chain"]
    ends = (1 - prob) / 2, (1 + prob) / 2
    stats, rows, index = idata.get("sample_stats", {}), [], []
    for name, label in names.items():
        value = posterior[name]
        bulk, tail = (_of(arviz.ess, value, method=kind) for kind in ("bulk", "tail"))
        r_hat = _of(arviz.rhat, value) if chains > 1 else np.full(bulk.shape, np.nan)
        draws = value.stack(draws=SAMPLE_DIMS).transpose("draws", ...)
        cuts = draws.quantile([0.5, *ends], "draws").values
        columns = [draws.mean("draws").values, draws.std("draws", ddof=1).values, *cuts]
        columns += [bulk, tail, r_hat]
        for entry, at in coordinates(draws.isel(draws=0, drop=True)):
            place = tuple(at.values())
            diagnostics = [_worst(stats, one, at, name) for one in OF_RUN]
            numbers = [float(column[place]) for column in columns]
            size = _importance_size(stats, at)
            numbers[-3:-1] = [min(number, size) for number in numbers[-3:-1]]
            rows.append([*numbers, *diagnostics])
            index.append(label + entry.removeprefix(name))
    shown = [f"{100 * end:.4g}%" for end in ends]
    of_arviz = ["ess_bulk", "ess_tail", "r_hat"]
    table = pandas.DataFrame(rows, index, ["mean", "sd", "median", *shown, *of_arviz, *OF_RUN])
    table.attrs["corrected"] = str(posterior.attrs.get("corrected", ""))
    return table


def variable_labels(posterior: Any, names: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return variable -> its name in the table, by default of all that the model states.

    Raises:
        ValueError: if a variable is unknown.
    """
    every = [str(n) for n in posterior.data_vars]
    if names is None:
        return {n: n for n in every if not n.endswith(ADDED)}
    for name in names:
        check_name(name, every, "variable")
    return names


def _of(function: Any, value: xarray.DataArray, **how: Any) -> np.ndarray:
    """Return a diagnostic of ArviZ for each entry of a variable."""
    values = function(value.to_dataset(name="value"), **how)["value"]
    diagnostic: np.ndarray = values.transpose(
        *(d for d in value.dims if d not in SAMPLE_DIMS)
    ).values
    return diagnostic


def _importance_size(stats: Any, at: Mapping[Any, int]) -> float:
    """Return the effective size of the importance samples of all runs, for a variable's entry."""
    if "importance_ess" not in stats:
        return np.inf
    value = stats["importance_ess"]
    if "client" in value.dims:
        value = value.isel(client=at["client"]) if "client" in at else value.min("client")
    return float(value.sum())


def _worst(stats: Any, name: str, at: Mapping[Any, int], site: str) -> float:
    """Return the worst value of a diagnostic over runs, for a variable's entry."""
    if name not in stats:
        return np.nan
    if (estimate_name := f"{name}_{site}") in stats:  # of each estimate
        return float(stats[estimate_name].isel(at, missing_dims="ignore").max())
    value = stats[name]
    if "client" in value.dims:
        value = value.isel(client=at["client"]) if "client" in at else value
    return float(value.max() if name == "pareto_k" else value.min())
