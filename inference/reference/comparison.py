"""Comparison of two posteriors for each coordinate, such as federated inference and NUTS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.export import coordinates, import_arviz, refuse_no_groups

if TYPE_CHECKING:
    import pandas
    import xarray

MIN_DRAWS = 4  # for effective sample sizes


def compare_posteriors(
    federated: Any, reference: Any, group: str = "posterior", draws: int = 4000
) -> pandas.DataFrame:
    """Compare two posteriors by means, standard deviations and distances of each coordinate.

    Args:
        federated: a run, or the result of `Run.to_arviz`.
        reference: result of `nuts`, or another run, such as one without a client, to compare with
            one that the client left; only common variables are compared.
        group: group of the data.
        draws: number of draws of a run, at least 4.

    Returns:
        A row for each coordinate, named as in `arviz.summary`, with columns variable; mean, sd,
        low and high, the ends of the central 95%; the same of the reference, as reference_mean and
        so on; difference of the means in reference sds, and error, its standard error, by the
        effective draws of the reference and all (independent) ones of the other; ratio of the sds;
        and energy, the distance (2 E|X - Y| - E|X - X'| - E|Y - Y'|)^1/2 in reference sds: 0 for
        equal distributions, 0.05 is small, 1 is large.

    Raises:
        ValueError: if draws is below 4, no variable is in both, or their axes or labels differ.
    """
    import pandas
    from scipy.stats import energy_distance

    if draws < MIN_DRAWS:
        raise ValueError(f"draws is {draws}; expected a whole number of at least {MIN_DRAWS}")
    variables, other = (
        _as_arviz(one, group, draws)[group].data_vars for one in (federated, reference)
    )
    common = [n for n in variables if n in other]
    if not common:
        names = " and ".join(", ".join(map(str, one)) for one in (variables, other))
        raise ValueError(f"variables are {names}; at least one must be in both posteriors")
    rows = {}
    for name in map(str, common):
        x, y = (one[name].stack(sample=("chain", "draw")) for one in (variables, other))
        x, y = _aligned(name, x, y)
        for place, at in coordinates(x.isel(sample=0)):
            a, b = (one.isel(at).to_numpy().astype(float) for one in (x, y))
            summary, reference_summary = _summary(a), _summary(b)
            a, b = ((v - reference_summary["mean"]) / reference_summary["sd"] for v in (a, b))
            rows[place] = {
                "variable": name,
                **summary,
                **{f"reference_{n}": v for n, v in reference_summary.items()},
                "difference": a.mean(),
                "error": (a.var(ddof=1) / len(a) + 1 / _effective(y.isel(at))) ** 0.5,
                "ratio": summary["sd"] / reference_summary["sd"],
                "energy": energy_distance(a, b),
            }
    return pandas.DataFrame.from_dict(rows, orient="index")


def _aligned(
    name: str, one: xarray.DataArray, other: xarray.DataArray
) -> tuple[xarray.DataArray, xarray.DataArray]:
    """Return both draws with the clients of the first; raise ValueError for other axes or labels.

    Clients are matched by name. Rows have numbers, so that their clients must be in one order.
    """
    if "client" in one.dims and "client" in other.dims:
        clients = one["client"].values.tolist()
        if {*clients} == {*other["client"].values.tolist()}:
            other = other.sel(client=clients)
    one_at, other_at = (
        {d: v[d].values.tolist() for d in (*v.dims[:-1], "row_client") if d in v.coords}
        for v in (one, other)
    )
    if one_at != other_at:
        differing = [str(d) for d in {**one_at, **other_at} if one_at.get(d) != other_at.get(d)]
        raise ValueError(
            f"{name}: axes are {one.dims} and {other.dims}, with other labels of "
            f"{', '.join(differing)}; both need the same axes and labels"
        )
    return one, other


def _as_arviz(source: Any, group: str, draws: int) -> Any:
    """Return posterior draws of a run as ArviZ data; return ArviZ data unchanged."""
    if isinstance(source, Run):
        return source.to_arviz(draws, groups=(group,))
    refuse_no_groups(source)
    return source


def _summary(draws: np.ndarray) -> dict[str, float]:
    """Return the mean, standard deviation and central 95% interval of draws [S]."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"mean": draws.mean(), "sd": draws.std(ddof=1), "low": low, "high": high}


def _effective(draws: xarray.DataArray) -> float:
    """Return the effective sample size of the mean of draws with axes chain and draw."""
    chains = draws.unstack("sample").transpose("chain", "draw").to_numpy()
    return float(import_arviz().ess(chains, method="mean"))
