"""Leave-one-out cross-validation of variational posteriors, and model comparison by its scores.

Draws from a guide q are not draws from the posterior p. Both steps, from q to p and from p to the
posterior without row i, are importance weights:

    r_i = p(theta, y) / q(theta) / p(y_i | theta),    log sum_s r_i p(y_i | theta_s) / sum_s r_i

Their tail is smoothed by a generalized Pareto distribution with shape k; estimates are reliable for
k up to 0.7. Draws that `to_arviz` has corrected (by default, those of sites that clients share) are
draws of p already, and only need the second step. Otherwise a guide narrower than the posterior
makes the estimate too good, the more so the larger k; a wider guide is harmless.
Vehtari, Simpson, Gelman, Yao and Gabry, "Pareto Smoothed Importance Sampling", JMLR 2024;
Magnusson, Andersen, Jonasson and Vehtari, "Bayesian Leave-One-Out Cross-Validation for Large Data",
ICML 2019.

A row is left out with all its observed sites: log densities of several responses, and of the
`pyro.factor` of rows, are summed. Rows hidden by a mask in the model are excluded from the sum.
A row of weight w counts as w equal rows, which are left out and scored together: its density is
p(y_i | theta_s) to the power w. Rows of weight 0 are excluded.

Clients without shared sites are independent given the server, so theta is a client's own; otherwise
theta has the sites of all clients. The server's point values count as known.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from inspect import signature
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pyrofl.inference.checks.elpd import elpd_data
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.correction_outcomes import CORRECTED
from pyrofl.inference.posteriors.export import combine_datasets, import_arviz, refuse_no_groups
from pyrofl.user_warnings import warn_user

if TYPE_CHECKING:
    import pandas as pd
    import xarray

LIKELIHOOD_TOLERANCE = 1e-5  # largest relative difference of log likelihoods that count as equal


def loo(
    fitted: Run | Sequence[Run] | Any,
    draws: int = 1000,
    *,
    var_name: str | None = None,
    **what: Any,
) -> Any:
    """Estimate the log density of each row given all other rows, as ArviZ's ELPDData.

    Pareto k of every row are in its `pareto_k`; its printed form counts them.

    Args:
        fitted: a run, several as chains, or the result of `to_arviz` with "log_likelihood".
        draws: number of draws of each run.
        var_name: name of one observed site; default the sum of all sites of a row.
        what: further arguments of `to_arviz`, such as corrected.

    Returns:
        ArviZ's ELPDData, with an entry for each row.

    Raises:
        ValueError: if there are no log densities of the draws, the guide is a point, or a run
            diverged; see `to_arviz`.

    Warns:
        UserWarning: if rows are hidden by a mask, or Pareto k of a row is too high.

    Examples:
        >>> import pyrofl, torch
        >>> from pyrofl import Federation, nets
        >>> from pyrofl.models import likelihoods, pvi
        >>> x = torch.linspace(-1.0, 1.0, 8)[:, None]
        >>> data = Federation.from_arrays({"A": (x, x[:, 0]), "B": (x, 0.5 - x[:, 0])})
        >>> method = pvi.build(nets.build("linear", (1,), 1), likelihood=likelihoods.normal(0.5))
        >>> run = pyrofl.fit(method, data, rounds=5, progress=False)
        >>> elpd = loo(run, draws=200)
        >>> int(elpd.n_data_points)
        16
    """
    data: Any = fitted
    runs = [fitted] if isinstance(fitted, Run) else fitted
    if isinstance(runs, Sequence) and not isinstance(runs, str):
        data = to_arviz(runs, draws, groups=("posterior", "log_likelihood"), **what)
    refuse_no_groups(data)
    log_lik = _log_likelihood(data, var_name)
    log_p, log_q = _log_densities(data, log_lik)
    corrected = data["log_likelihood"].attrs.get("corrected") == CORRECTED
    arviz = import_arviz()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
        if hasattr(arviz, "loo_approximate_posterior"):
            options = {"pointwise": True, "var_name": log_lik.name}
            groups = {"log_likelihood": log_lik.to_dataset()}
            groups |= {g: data[g].to_dataset() for g in ("posterior",) if g in data}
            data = combine_datasets(groups)
            elpd = arviz.loo_approximate_posterior(data, log_p, log_q, **options)
        else:
            elpd = _smoothed(log_lik, log_p - log_q)
    bad = int((elpd.pareto_k > elpd.good_k).sum())
    if bad:
        guided = "" if corrected else "the guide is far from their posterior, or "
        warn_user(
            f"Pareto k is above {elpd.good_k:.2f} in {bad} of {elpd.pareto_k.size} rows: {guided}"
            "they are influential; their estimates are unreliable"
        )
    return elpd


def compare_loo(
    models: Mapping[str, Any], draws: int = 1000, *, method: str = "stacking", **what: Any
) -> pd.DataFrame:
    """Return a table that ranks models by leave-one-out cross-validation, as `arviz.compare`.

    Args:
        models: name -> argument of `loo` (all with the same rows), or result of `loco` (all with
            the same clients).
        draws: number of draws of each run.
        method: weighting of the models, as in `arviz.compare`.
        what: further arguments of `loo`.

    Returns:
        The table of `arviz.compare`, best model first, with the column "largest_k".

    Raises:
        ValueError: if models have different rows, row weights or clients, or as `loo`.
    """
    if not isinstance(models, Mapping):
        raise ValueError(f"models is a {type(models).__name__}; expected a dict of name -> run")
    if not models:
        raise ValueError("models is empty; expected a dict of name -> run")
    _refuse_other_responses(models)
    estimates = {
        n: m if hasattr(m, "pareto_k") else loo(m, draws, **what) for n, m in models.items()
    }
    ks = {n: one.pareto_k for n, one in estimates.items()}
    whose = {n: np.asarray(k.coords.get("row_client", k[k.dims[0]])) for n, k in ks.items()}
    weights = {n: np.asarray(k.coords.get("row_weight", 1.0)) for n, k in ks.items()}
    first, *others = estimates
    for other in others:
        if not np.array_equal(whose[first], whose[other]):
            raise ValueError(
                f"{first!r} and {other!r} have different rows; expected the same clients in the "
                "same order, with the same number of rows"
            )
        if not bool((weights[first] == weights[other]).all()):
            raise ValueError(
                f"{first!r} and {other!r} have different row weights; expected the same weights"
            )
    compared = import_arviz().compare
    exact = {"round_to": "none"} if "round_to" in signature(compared).parameters else {}
    with warnings.catch_warnings():
        # ArviZ 0.23 sorts in a way that newer pandas deprecates.
        warnings.filterwarnings("ignore", "The inplace keyword", DeprecationWarning)
        table: pd.DataFrame = compared(estimates, method=method, **exact)
    table["largest_k"] = [float(ks[n].max()) for n in table.index]
    return table


def _refuse_other_responses(models: Mapping[str, Any]) -> None:
    """Raise ValueError if two of the models that are runs have other clients or responses."""
    runs = {n: m if isinstance(m, Run) else m[0] for n, m in models.items() if _is_of_runs(m)}
    first, *others = runs or [""]
    for other in others:
        one, two = (runs[name].data for name in (first, other))
        names = [each.names[: each.clients] for each in (one, two)]
        if names[0] != names[1]:
            shown = " and ".join(", ".join(each) for each in names)
            raise ValueError(
                f"{first!r} and {other!r} have different rows, of clients {shown}; expected the "
                "same clients in the same order"
            )
        for name, rows, other_rows in zip(names[0], one.train, two.train, strict=False):
            y, z = one.y[rows].double(), two.y[other_rows].double()
            if y.shape != z.shape or not torch.allclose(y, z):
                raise ValueError(
                    f"{first!r} and {other!r} have different rows of {name}; expected the same "
                    "responses in the same order"
                )


def _is_of_runs(model: Any) -> bool:
    return isinstance(model, Run) or (
        isinstance(model, Sequence) and bool(model) and isinstance(model[0], Run)
    )


def _log_likelihood(data: Any, var_name: str | None) -> xarray.DataArray:
    """Return each row's log likelihood, for one observed site or summed over all observed sites."""
    terms = dict(data["log_likelihood"].data_vars) if "log_likelihood" in data else {}
    if not terms or var_name not in (None, *terms):
        raise ValueError(
            f"var_name is {var_name!r}; expected one of the sites in log_likelihood: {list(terms)}"
        )
    parts = list(terms.values()) if var_name is None else [terms[var_name]]
    if len({part.dims for part in parts}) > 1:
        sites = ", ".join(f"{part.name} {part.dims}" for part in parts)
        raise ValueError(
            f"log_likelihood has sites with different axes: {sites}; pass var_name to choose one"
        )
    seen = [part.notnull().any(("chain", "draw")) for part in parts]
    total: xarray.DataArray = sum(part.fillna(0.0) for part in parts)
    some = reduce(or_, seen)
    if hidden := int((~some).sum()):
        warn_user(
            f"{hidden} of {some.size} rows are hidden by a mask in the model and have no observed "
            "response; they are excluded"
        )
        total = total.isel({some.dims[0]: some.values})
    if "row_weight" in total.coords:  # a row of weight 0 has no tail whose shape could be fitted
        total = total.isel(row=total["row_weight"].values > 0)
    # Equal draws differ by rounding where a model was run on more of them at once.
    if bool(
        (
            total.max("draw") - total.min("draw")
            <= LIKELIHOOD_TOLERANCE * (1 + abs(total).max("draw"))
        ).all()
    ):
        if total.sizes["chain"] * total.sizes["draw"] == 1:
            raise ValueError("draws is 1; expected many, such as 1,000")
        raise ValueError(
            "all draws are equal because the guide is a point estimate; leave-one-out needs a "
            "guide with some spread, such as guide='mean_field'"
        )
    return total.rename(var_name or (parts[0].name if len(parts) == 1 else "together"))


def _log_densities(data: Any, log_lik: xarray.DataArray) -> Any:
    """Return log joint and log guide densities of draws, by row if they differ between clients."""
    stats = data.get("sample_stats", {})
    if "log_p" not in stats or "log_q" not in stats:
        raise ValueError(
            "sample_stats lack log_p and log_q; create log_likelihood with `to_arviz` for all "
            "clients (draws of a server's posterior, as FedBE's, have none: use `arviz.loo`)"
        )
    log_p, log_q = stats["log_p"], stats["log_q"]
    # Each chain has its own server, and its evidence must not weight it: all count the same.
    log_p = log_p - _log_sum_exp(log_p - log_q, "draw")
    if "row" in log_lik.dims and "client" in log_p.dims:
        whose = {"client": log_lik["row_client"]}
        log_p, log_q = (v.sel(whose).drop_vars("client") for v in (log_p, log_q))
    return log_p, log_q


def _smoothed(log_lik: xarray.DataArray, ratio: xarray.DataArray) -> Any:
    """Estimate leave-one-out densities by Pareto-smoothed importance sampling, for ArviZ 0.23."""
    from arviz import psislw

    samples = ("chain", "draw")
    log_weights = (ratio - log_lik).transpose(*log_lik.dims).stack(__sample__=samples)
    weights, k = psislw(log_weights)  # type: ignore[no-untyped-call]
    log_lik = log_lik.stack(__sample__=samples)
    count = log_lik.sizes["__sample__"]
    elpd = _log_sum_exp(weights + log_lik, "__sample__")
    spent = _log_sum_exp(log_lik, "__sample__") - np.log(count) - elpd
    return elpd_data(elpd, float(spent.sum()), k, count)


def _log_sum_exp(value: xarray.DataArray, dim: str) -> xarray.DataArray:
    from scipy.special import logsumexp

    return value.reduce(logsumexp, dim)
