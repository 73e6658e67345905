"""Posterior predictive checks of every client: would the model make up such data?

Gelman, Meng and Stern, "Posterior Predictive Assessment of Model Fitness via Realized
Discrepancies", Statistica Sinica 1996. With draws y_rep of a client's rows from the posterior
predictive distribution and a statistic T,

    p = P(T(y_rep) > T(y)) + P(T(y_rep) = T(y)) / 2

As the rows have shaped the posterior already, such p values gather around 1/2 if the model is
right; near 0 and near 1 it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.export import refuse_no_groups

if TYPE_CHECKING:
    import pandas

Statistic = Callable[[np.ndarray], np.ndarray]
"""Rows [..., N] -> what they are summarised by, [...]."""

STATISTICS: dict[str, Statistic] = {
    "mean": lambda y: y.mean(-1),
    "sd": lambda y: y.std(-1),
    "min": lambda y: y.min(-1),
    "max": lambda y: y.max(-1),
    "zeros": lambda y: (y == 0).mean(-1),
}
GROUPS = ("posterior_predictive", "observed_data")
COLUMNS = ("variable", "client", "statistic", "observed", "mean", "low", "high", "p")


def predictive_checks(
    found: Any,
    statistics: Collection[str] | Mapping[str, Statistic] = ("mean", "sd", "max"),
    draws: int = 1000,
    **what: Any,
) -> pandas.DataFrame:
    """Compare every client's rows with rows that its posterior makes up.

    Args:
        found: a `Run`, or what `to_arviz` made of runs, with the groups posterior_predictive and
            observed_data; all chains are taken together.
        statistics: names of `STATISTICS`, or name -> function of rows [..., N] to [...].
        draws: of a Run.
        what: further arguments of `to_arviz`, for a Run.

    Returns:
        A row for each observed site, client and statistic, with columns variable, client,
        statistic; observed; mean, low and high, the ends of the central 95% of what the model
        makes up; and p, the share of draws above the observed one, ties counting half.

    Raises:
        ValueError: if a statistic is unknown or has another shape, a group is missing, or no
            observed site has one number per row.
    """
    import pandas

    known = statistics if isinstance(statistics, Mapping) else STATISTICS
    names = [statistics] if isinstance(statistics, str) else statistics
    asked: dict[str, Any] = {n: known.get(n) for n in names}
    if not asked or not all(map(callable, asked.values())):
        raise ValueError(
            f"statistics are {', '.join(asked) or 'none'}; expected functions by name, or some of "
            f"{', '.join(STATISTICS)}"
        )
    rows = []
    for variable, client, seen, made in _clients(found, draws, what):
        for name, statistic in asked.items():
            value, drawn = np.asarray(statistic(seen)), np.asarray(statistic(made))
            if value.shape or drawn.shape != made.shape[:1]:
                raise ValueError(
                    f"statistic {name!r} makes {value.shape} of rows {seen.shape} and "
                    f"{drawn.shape} of {made.shape}; expected to reduce the last axis"
                )
            low, high = np.quantile(drawn, [0.025, 0.975])
            p = (drawn > value).mean() + (drawn == value).mean() / 2
            rows.append((variable, client, name, float(value), drawn.mean(), low, high, p))
    return pandas.DataFrame(rows, columns=COLUMNS)


def pit(found: Any, draws: int = 1000, **what: Any) -> pandas.DataFrame:
    """Return the place of every row in its predictive distribution, its integral transform.

    Uniform on 0 to 1 if forecasts are calibrated (Gneiting, Balabdaoui and Raftery 2007): the
    central 95% hold as many rows as they say. Of rows that the model was fitted to it gathers
    slightly around 1/2; ties count half, so that counts of few values are lumpy.

    Args:
        found: as in `predictive_checks`, as are draws and what.
        draws: of a Run.
        what: further arguments of `to_arviz`.

    Returns:
        A row for each row of the data, with columns variable, client and pit.

    Raises:
        ValueError: as `predictive_checks`.
    """
    import pandas

    tables = []
    for variable, client, seen, made in _clients(found, draws, what):
        place = (made < seen).mean(0) + (made == seen).mean(0) / 2
        tables.append(pandas.DataFrame({"variable": variable, "client": client, "pit": place}))
    return pandas.concat(tables, ignore_index=True)


def _clients(
    found: Any, draws: int, what: Mapping[str, Any]
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield site, client, its rows [N] and draws of them [S, N]."""
    if isinstance(found, Run):
        found = found.to_arviz(draws, groups=GROUPS, **what)
    refuse_no_groups(found)
    for group in GROUPS:
        if group not in found:
            raise ValueError(f"group {group} is missing; expected to_arviz(..., groups='all')")
    predictive, observed = (found[group] for group in GROUPS)
    shared = [n for n in map(str, observed.data_vars) if n in predictive.data_vars]
    names = [n for n in shared if observed[n].dims == ("row",)]
    if not names or "row_client" not in predictive.coords:
        raise ValueError(
            f"observed are {', '.join(shared) or 'no sites'}; expected one with a number for every "
            "row, and the coordinate row_client, as to_arviz makes them"
        )
    owner = np.asarray(predictive["row_client"])
    for name in names:
        seen, made = (np.asarray(group[name], dtype=float) for group in (observed, predictive))
        made = made.reshape(-1, made.shape[-1])
        for client in dict.fromkeys(owner.tolist()):
            yield name, str(client), seen[owner == client], made[:, owner == client]
