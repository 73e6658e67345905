"""Leave-one-out cross-validation of variational posteriors, and comparison of models by it.

Draws from a guide q are not draws from the posterior p. Both steps, from q to p and from p to the
posterior without row i, are importance weights:

    r_i = p(theta, y) / q(theta) / p(y_i | theta),    log sum_s r_i p(y_i | theta_s) / sum_s r_i

Their tail is smoothed by a generalised Pareto distribution, whose shape k shows how far they can be
trusted: up to 0.7 all is well. Draws that `to_arviz` has corrected, as it does by default for sites
that clients share, are from p already, and only the second step is left. Elsewhere a guide narrower
than the posterior leaves the estimate too good, the more so the larger k; a wider one does no harm.
Vehtari, Simpson, Gelman, Yao and Gabry, "Pareto Smoothed Importance Sampling", JMLR 2024;
Magnusson, Andersen, Jonasson and Vehtari, "Bayesian Leave-One-Out Cross-Validation for Large Data",
ICML 2019.

A row is left out with all that is observed of it: several responses, and the `pyro.factor` of rows,
add up. Rows that the model's own mask hides were predicted by nobody: they are no part of the sum.

Clients that share no site are independent given the server, so theta is a client's own; otherwise
it is what all clients hold. What the server holds counts as known.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from inspect import signature
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.inference.checks.elpd import elpd_data
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.corrected import YES
from pyrofl.inference.posteriors.export import gathered, import_arviz, refuse_no_groups

if TYPE_CHECKING:
    import pandas as pd
    import xarray

SAME = 1e-5  # how far equal log likelihoods are apart, beside their size


def loo(
    found: Run | Sequence[Run] | Any, draws: int = 1000, *, var_name: str | None = None, **what: Any
) -> Any:
    """Estimate how well each row is predicted from all others: ArviZ's ELPDData, pointwise.

    Pareto k of every row are in its `pareto_k`, and counted where it is printed.

    Args:
        found: a run, several as chains, or what `to_arviz` made of them with "log_likelihood".
        draws: of each run.
        var_name: one observed site; default all of a row together.
        what: further arguments of `to_arviz`, such as corrected.

    Raises:
        ValueError: if there are no log densities of the draws, the guide is a point, or a run
            diverged; see `to_arviz`.

    Warns:
        UserWarning: of rows that are hidden, and of those whose Pareto k is bad.
    """
    data: Any = found
    runs = [found] if isinstance(found, Run) else found
    if isinstance(runs, Sequence) and not isinstance(runs, str):
        data = to_arviz(runs, draws, groups=("posterior", "log_likelihood"), **what)
    refuse_no_groups(data)
    log_lik = _log_likelihood(data, var_name)
    log_p, log_q = _log_densities(data, log_lik)
    corrected = data["log_likelihood"].attrs.get("corrected") == YES
    arviz = import_arviz()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
        if hasattr(arviz, "loo_approximate_posterior"):
            asked = {"pointwise": True, "var_name": log_lik.name}
            groups = {"log_likelihood": log_lik.to_dataset()}
            groups |= {g: data[g].to_dataset() for g in ("posterior",) if g in data}
            data = gathered(groups)
            elpd = arviz.loo_approximate_posterior(data, log_p, log_q, **asked)
        else:
            elpd = _smoothed(log_lik, log_p - log_q)
    bad = int((elpd.pareto_k > elpd.good_k).sum())
    if bad:
        guided = "" if corrected else "the guide is far from their posterior, or "
        warnings.warn(
            f"Pareto k is above {elpd.good_k:.2f} in {bad} of {elpd.pareto_k.size} rows: {guided}"
            "they are influential; do not trust their estimates",
            stacklevel=2,
        )
    return elpd


def compare_loo(
    models: Mapping[str, Any], draws: int = 1000, *, method: str = "stacking", **what: Any
) -> pd.DataFrame:
    """Compare models by leave-one-out: ArviZ's table, the best first, with their largest Pareto k.

    Args:
        models: name -> what `loo` takes, all of the same rows, or what `loco` returned, all of the
            same clients.
        draws: of each run.
        method: of weighing the models, as in `arviz.compare`.
        what: further arguments of `loo`.

    Raises:
        ValueError: if models are about different rows or clients, or as `loo`.
    """
    if not isinstance(models, Mapping):
        raise ValueError(f"models is a {type(models).__name__}; expected a dict, name -> a run")
    found = {n: m if hasattr(m, "pareto_k") else loo(m, draws, **what) for n, m in models.items()}
    ks = {n: one.pareto_k for n, one in found.items()}
    whose = {n: k.coords.get("row_client", k[k.dims[0]]) for n, k in ks.items()}
    first, *others = found
    for other in others:
        if not whose[first].equals(whose[other]):
            raise ValueError(
                f"{first!r} and {other!r} are about different rows; expected the same clients with "
                "the same number of rows"
            )
    compared = import_arviz().compare
    exact = {"round_to": "none"} if "round_to" in signature(compared).parameters else {}
    with warnings.catch_warnings():
        # ArviZ 0.23 sorts in a way that newer pandas deprecates.
        warnings.filterwarnings("ignore", "The inplace keyword", DeprecationWarning)
        table: pd.DataFrame = compared(found, method=method, **exact)
    table["largest_k"] = [float(ks[n].max()) for n in table.index]
    return table


def _log_likelihood(data: Any, var_name: str | None) -> xarray.DataArray:
    """Return the log density of every row, of one site or of all, without rows that are hidden."""
    known = dict(data["log_likelihood"].data_vars) if "log_likelihood" in data else {}
    if not known or var_name not in (None, *known):
        raise ValueError(
            f"var_name is {var_name!r}, log_likelihood has {list(known)}; expected one of them"
        )
    parts = list(known.values()) if var_name is None else [known[var_name]]
    if len({part.dims for part in parts}) > 1:
        told = ", ".join(f"{part.name} {part.dims}" for part in parts)
        raise ValueError(f"log_likelihood has {told}; expected the same axes, or a var_name")
    seen = [part.notnull().any(("chain", "draw")) for part in parts]
    found: xarray.DataArray = sum(part.fillna(0.0) for part in parts)
    some = reduce(or_, seen)
    if hidden := int((~some).sum()):
        warnings.warn(
            f"{hidden} of {some.size} rows are hidden by a mask of the model's own: nothing is "
            "known of their response, and they are left out",
            stacklevel=3,
        )
        found = found.isel({some.dims[0]: some.values})
    # Equal draws differ by rounding where a model was run on more of them at once.
    if bool((found.max("draw") - found.min("draw") <= SAME * (1 + abs(found).max("draw"))).all()):
        raise ValueError(
            "draws are all the same, as of a point, which is no posterior to leave a row out of; "
            "expected a guide with some spread, such as guide='mean_field'"
        )
    return found.rename(var_name or (parts[0].name if len(parts) == 1 else "together"))


def _log_densities(data: Any, log_lik: xarray.DataArray) -> Any:
    """Return log p and log q of what each row depends on: chain, draw, and row or client."""
    stats = data.get("sample_stats", {})
    if "log_p" not in stats or "log_q" not in stats:
        raise ValueError(
            "sample_stats lack log_p and log_q; make log_likelihood with `to_arviz`, of all "
            "clients (draws of a server's posterior, as FedBE's, have none: see `arviz.loo`)"
        )
    log_p, log_q = stats["log_p"], stats["log_q"]
    # Chains have servers of their own, whose evidence shall not weigh them: each counts the same.
    log_p = log_p - _log_sum_exp(log_p - log_q, "draw")
    if "row" in log_lik.dims and "client" in log_p.dims:
        whose = {"client": log_lik["row_client"]}
        log_p, log_q = (v.sel(whose).drop_vars("client") for v in (log_p, log_q))
    return log_p, log_q


def _smoothed(log_lik: xarray.DataArray, ratio: xarray.DataArray) -> Any:
    """Do what ArviZ 1 does in `loo_approximate_posterior`, for ArviZ 0.23."""
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
