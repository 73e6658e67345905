"""Posterior predictive checks for each client: whether the model reproduces the client's data.

Gelman, Meng and Stern, "Posterior Predictive Assessment of Model Fitness via Realized
Discrepancies", Statistica Sinica 1996. With draws y_rep of a client's rows from the posterior
predictive distribution and a statistic T,

    p = P(T(y_rep) > T(y)) + P(T(y_rep) = T(y)) / 2

As the posterior was fitted to the same rows, these p values concentrate around 1/2 if the model is
right; values near 0 or 1 show misfit.
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
"""Rows [..., N] -> their summary statistic, [...]."""

STATISTICS: dict[str, Statistic] = {
    "mean": lambda y: y.mean(-1),
    "sd": lambda y: y.std(-1),
    "min": lambda y: y.min(-1),
    "max": lambda y: y.max(-1),
    "zeros": lambda y: (y == 0).mean(-1),
}
GROUPS = ("posterior_predictive", "observed_data")
PRIOR = "prior_predictive"  # used if there is no posterior
COLUMNS = ("variable", "client", "statistic", "observed", "mean", "low", "high", "p")


def predictive_checks(
    fitted: Any,
    statistics: Collection[str] | Mapping[str, Statistic] = ("mean", "sd", "max"),
    draws: int = 1000,
    **what: Any,
) -> pandas.DataFrame:
    """Compare statistics of each client's rows with those of posterior predictive draws.

    Args:
        fitted: a `Run`, the result of `to_arviz` with the groups posterior_predictive and
            observed_data, or that of `prior_predictive`; all chains are used together.
        statistics: names of `STATISTICS`, or name -> function of rows [..., N] to [...].
        draws: number of draws of a Run.
        what: further arguments of `to_arviz`, for a Run.

    Returns:
        A row for each observed site, client and statistic, with columns variable, client,
        statistic; observed; mean, low and high, mean and ends of the central 95% of the simulated
        statistics; and p, the fraction of them above the observed one, ties counting half.

    Raises:
        ValueError: if a statistic is unknown or has a wrong shape, a group is missing, or no
            observed site has one number per row.

    Examples:
        >>> import pyrofl, torch
        >>> from pyrofl import Federation, nets
        >>> from pyrofl.models import likelihoods, pvi
        >>> x = torch.linspace(-1.0, 1.0, 8)[:, None]
        >>> data = Federation.from_arrays({"A": (x, x[:, 0]), "B": (x, 0.5 - x[:, 0])})
        >>> method = pvi.build(nets.build("linear", (1,), 1), likelihood=likelihoods.normal(0.5))
        >>> run = pyrofl.fit(method, data, rounds=5, progress=False)
        >>> predictive_checks(run, draws=100).columns.tolist()
        ['variable', 'client', 'statistic', 'observed', 'mean', 'low', 'high', 'p']
    """
    import pandas

    available = statistics if isinstance(statistics, Mapping) else STATISTICS
    names = [statistics] if isinstance(statistics, str) else statistics
    functions: dict[str, Any] = {n: available.get(n) for n in names}
    if not functions or not all(map(callable, functions.values())):
        raise ValueError(
            f"statistics are {', '.join(functions) or 'none'}; expected names from "
            f"{', '.join(STATISTICS)}, or a dict of name -> function"
        )
    rows = []
    for variable, client, seen, simulated in _clients(fitted, draws, what):
        for name, statistic in functions.items():
            value, drawn = np.asarray(statistic(seen)), np.asarray(statistic(simulated))
            if value.shape or drawn.shape != simulated.shape[:1]:
                raise ValueError(
                    f"statistic {name!r} returns shape {value.shape} for rows {seen.shape} and "
                    f"{drawn.shape} for {simulated.shape}; it must reduce the last axis"
                )
            low, high = np.quantile(drawn, [0.025, 0.975])
            p = (drawn > value).mean() + (drawn == value).mean() / 2
            rows.append((variable, client, name, float(value), drawn.mean(), low, high, p))
    return pandas.DataFrame(rows, columns=COLUMNS)


def pit(fitted: Any, draws: int = 1000, **what: Any) -> pandas.DataFrame:
    """Return the probability integral transform of each row: the predictive CDF at its response.

    It is uniform on 0 to 1 if forecasts are calibrated (Gneiting, Balabdaoui and Raftery 2007):
    central 95% intervals contain 95% of the rows. For rows that the model was fitted to, it
    concentrates slightly around 1/2; ties count half, so that it is lumpy for counts.

    Args:
        fitted: a `Run`, or the result of `to_arviz`, as in `predictive_checks`.
        draws: number of draws of a Run.
        what: further arguments of `to_arviz`, for a Run.

    Returns:
        A row for each row of the data, with columns variable, client and pit.

    Raises:
        ValueError: as `predictive_checks`.

    Examples:
        >>> import pyrofl, torch
        >>> from pyrofl import Federation, nets
        >>> from pyrofl.models import likelihoods, pvi
        >>> x = torch.linspace(-1.0, 1.0, 8)[:, None]
        >>> data = Federation.from_arrays({"A": (x, x[:, 0]), "B": (x, 0.5 - x[:, 0])})
        >>> method = pvi.build(nets.build("linear", (1,), 1), likelihood=likelihoods.normal(0.5))
        >>> run = pyrofl.fit(method, data, rounds=5, progress=False)
        >>> pit(run, draws=100).columns.tolist()
        ['variable', 'client', 'pit']
    """
    import pandas

    tables = []
    for variable, client, seen, simulated in _clients(fitted, draws, what):
        place = (simulated < seen).mean(0) + (simulated == seen).mean(0) / 2
        tables.append(pandas.DataFrame({"variable": variable, "client": client, "pit": place}))
    return pandas.concat(tables, ignore_index=True)


def _clients(
    source: Any, draws: int, what: Mapping[str, Any]
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """For each response and client, yield observed [N] and posterior predictive values [S, N]."""
    if isinstance(source, Run):
        source = source.to_arviz(draws, groups=GROUPS, **what)
    refuse_no_groups(source)
    groups = (PRIOR, GROUPS[1]) if PRIOR in source and GROUPS[0] not in source else GROUPS
    for group in groups:
        if group not in source:
            raise ValueError(f"group {group} is missing; call to_arviz(..., groups='all')")
    predictive, observed = (source[group] for group in groups)
    shared = [n for n in map(str, observed.data_vars) if n in predictive.data_vars]
    names = [n for n in shared if observed[n].dims == ("row",)]
    if not names or "row_client" not in predictive.coords:
        raise ValueError(
            f"observed sites are {', '.join(shared) or 'missing'}; expected at least one with a "
            "number for every row, and the coordinate row_client, as to_arviz returns them"
        )
    owner = np.asarray(predictive["row_client"])
    for name in names:
        seen, simulated = (np.asarray(group[name], dtype=float) for group in (observed, predictive))
        simulated = simulated.reshape(-1, simulated.shape[-1])
        for client in dict.fromkeys(owner.tolist()):
            yield name, str(client), seen[owner == client], simulated[:, owner == client]
