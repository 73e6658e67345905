"""Checks of priors: predictive distribution before the fit, and sensitivity of the posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyrofl.data import Federation
from pyrofl.data.frames import Tables
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.table_method import variables_of
from pyrofl.inference.dependencies import get_dependencies
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run.run import Run
from pyrofl.inference.posteriors.arviz import to_arviz
from pyrofl.inference.posteriors.export import coordinates, import_arviz
from pyrofl.returned import calling
from pyrofl.tensors import matches

if TYPE_CHECKING:
    import pandas

GROUPS = ("prior", "prior_predictive", "observed_data")
MIN_DRAWS = 20  # for tails of weights
SENSITIVITY_LIMIT = 0.05  # from which a posterior counts as sensitive
POWER_CHANGE = 0.01  # change of the power
EQUAL_LOG_WEIGHT_RANGE = 1e-4  # range of log weights below which these are equal


def prior_predictive(
    method: Method, data: Federation | Tables, draws: int = 1000, *, seed: int = 0
) -> Any:
    """Draw parameters from the prior, and responses given them, before any fit.

    Args:
        method: a hierarchical program or a regression.
        data: the federation, or the tables of a regression; only the inputs x are used.
        draws: number of draws.
        seed: of the draws.

    Returns:
        ArviZ data with the groups prior, prior_predictive and observed_data, as of `to_arviz`;
        `predictive_checks` compares the last two.

    Raises:
        ValueError: if a prior is improper, or the likelihood is a `pyro.factor`, which has no
            draws.

    Examples:
        >>> import pyro
        >>> import pyro.distributions as dist
        >>> import pyrofl
        >>> from pyrofl import datasets, federations
        >>> data = federations.split(datasets.load("eight_schools"), "groups", 8)
        >>> def schools(received, local, batch):
        ...     with batch.clients():
        ...         mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        ...         tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        ...         theta = pyro.sample("theta", dist.Normal(mu, tau))
        ...         with batch.rows():
        ...             pyro.sample("y", dist.Normal(theta, batch.x[..., 0]), obs=batch.y)
        >>> method = pyrofl.hierarchical(schools, data, shared="mu tau")
        >>> draws = prior_predictive(method, data, draws=50)
        >>> draws["prior_predictive"]["y"].shape
        (1, 50, 8)
    """
    run = fit(method, data, 0, seed=seed, progress=False)
    with calling("program"):
        prior_draws = to_arviz([run], draws, groups=GROUPS, corrected=False, progress=False)
    if "prior_predictive" not in prior_draws:
        raise ValueError(
            "the likelihood is a pyro.factor, which has no draws; expected a response by "
            "pyro.sample(..., obs=batch.y); for a regression of censored(time, event), build one "
            "of the response time, with the same priors, and draw from it"
        )
    return prior_draws


def prior_sensitivity(fitted: Run | Sequence[Run], draws: int = 4000) -> pandas.DataFrame:
    """Measure how much the posterior changes if prior or likelihood are raised to a power near 1.

    Kallioinen, Paananen, Buerkner and Vehtari, "Detecting and Diagnosing Prior and Likelihood
    Sensitivity with Power-Scaling", Statistics and Computing 2024, by ArviZ's `psens` (0.23) or
    `psense` (1.x). Powers apply to the priors of shared sites that depend on no other site, so
    that the distribution of group effects is kept, as in brms.

    Args:
        fitted: a run, or several as chains.
        draws: number of draws of each run, at least 20.

    Returns:
        A row for each entry of the sites that `Run.summary` lists, with the columns prior and
        likelihood, the sensitivities, and diagnosis. The likelihood is NaN where it is not one of
        rows (Cox models).

    Raises:
        ValueError: if draws is below 20, or no shared site has a prior that depends on no other
            site.

    Examples:
        >>> import pyrofl, torch
        >>> from pyrofl import Federation, nets
        >>> from pyrofl.models import likelihoods, pvi
        >>> x = torch.linspace(-1.0, 1.0, 8)[:, None]
        >>> data = Federation.from_arrays({"A": (x, x[:, 0]), "B": (x, 0.5 - x[:, 0])})
        >>> method = pvi.build(nets.build("linear", (1,), 1), likelihood=likelihoods.normal(0.5))
        >>> run = pyrofl.fit(method, data, rounds=5, progress=False)
        >>> prior_sensitivity(run, draws=500).columns.tolist()
        ['prior', 'likelihood', 'diagnosis']
    """
    import pandas

    runs = [fitted] if isinstance(fitted, Run) else list(fitted)
    if not runs:
        raise ValueError("fitted is empty; expected a run, or several")
    if draws < MIN_DRAWS:
        raise ValueError(f"draws is {draws}; expected a whole number of at least {MIN_DRAWS}")
    run = runs[0]
    of_prior = ("posterior", "log_prior", "log_likelihood")
    data = to_arviz(runs, draws, groups=of_prior, progress=False)
    names = [n for n in map(str, data.get("log_prior", {})) if matches(n, run.method.shared)]
    try:
        sites = get_dependencies(run.method, run.data) if names else {}
    except NotImplementedError:
        raise ValueError(
            "the prior of a site is improper, and cannot be raised to a power; use a proper prior"
        ) from None
    names = [n for n in names if not {*sites[n].reads} & {*sites}]
    if not names:
        raise ValueError(
            "no shared site has a prior that depends on no other site; expected a hierarchical "
            "program, such as a regression"
        )
    shown = variables_of(run.method) or {n: n for n in map(str, data["posterior"]) if n in names}
    parts: dict[str, Any] = {}
    for component in ("prior", "likelihood"):
        if f"log_{component}" in data:
            some = names if component == "prior" else None
            parts[component] = _sensitivity(data, component, some, list(shown))
    rows, index = [], []
    for name, label in shown.items():
        first = parts["prior"][name]
        for entry, at in coordinates(first):
            values = [float(p[name].isel(at)) for p in parts.values()]
            values += [np.nan] * (2 - len(values))
            rows.append([*values, _diagnosis(*values)])
            index.append(label + entry.removeprefix(name))
    return pandas.DataFrame(rows, index, ["prior", "likelihood", "diagnosis"])


def _sensitivity(data: Any, component: str, some: list[str] | None, names: list[str]) -> Any:
    """Return the sensitivity of variables to one component by ArviZ, as a dataset."""
    arviz, densities = import_arviz(), data[f"log_{component}"]
    with np.errstate(divide="ignore", invalid="ignore"):
        if hasattr(arviz, "psens"):
            how: dict[str, Any] = {"component": component, "component_var_names": some}
            sensitivity = arviz.psens(data, var_names=names, delta=POWER_CHANGE, **how)
            sensitivity = (
                sensitivity
                if hasattr(sensitivity, "data_vars")
                else sensitivity.to_dataset(name=names[0])
            )
        else:
            sensitivity = arviz.psense(
                data,
                var_names=names,
                group=component,
                group_var_names=some,
                alphas=(1 / (1 + POWER_CHANGE), 1 + POWER_CHANGE),
            )
    parts = (densities[name] for name in some or densities.data_vars)
    total = sum(part.sum({*part.dims} - {"chain", "draw"}) for part in parts)
    # A tail of nearly equal weights has no Pareto fit, which gives NaN.
    even = POWER_CHANGE * float(total.max() - total.min()) < EQUAL_LOG_WEIGHT_RANGE
    return sensitivity.fillna(0.0) if even else sensitivity


def _diagnosis(prior: float, likelihood: float) -> str:
    if prior < SENSITIVITY_LIMIT:
        return "not sensitive to the prior"
    if likelihood < SENSITIVITY_LIMIT:
        return "strong prior or weak likelihood"
    return "sensitive to the prior"
