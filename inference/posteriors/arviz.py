"""Export of runs to ArviZ: posterior, predictive and log-density groups.

The rows of all clients are concatenated along one axis, "row", client by client, without padding;
the coordinate "row_client" has the client of each row, and "row_weight" its weight if rows have
weights. Variables of single clients have the axis
"client", shared variables have neither. Every run is a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from pyrofl.arguments import Count, check_name, checked
from pyrofl.choices import GROUPS
from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.definition.table_method import axes_of
from pyrofl.inference.engine.origin import rows_of
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec, ModelOptions
from pyrofl.inference.monitoring.status import ConvergenceStatus, trained_by
from pyrofl.inference.posteriors.axes import ClientAxes, Groups, Variable, labels
from pyrofl.inference.posteriors.corrected import CorrectionOutcome
from pyrofl.inference.posteriors.draws import (
    draw,
    draws_specification,
    find_client_dependence,
    those,
)
from pyrofl.inference.posteriors.export import Fact, inference_data, refuse_no_runs
from pyrofl.inference.posteriors.pointwise import ClientValues, pointwise
from pyrofl.inference.posteriors.provenance import facts, losses, movements, together
from pyrofl.inference.posteriors.tail_shapes import ESTIMATE, ESTIMATES
from pyrofl.tensors import Tensors
from pyrofl.user_warnings import warn_user

RESERVED: tuple[str, ...] = (
    "chain",
    "draw",
    "client",
    "row",
    "row_client",
    "row_weight",
    "round",
    "step",
    "site",
)
RESERVED += (ESTIMATE,)
CHEAP = ("posterior", "sample_stats")
OF_ROWS = {"posterior_predictive", "log_likelihood", "log_prior", "observed_data"}
OF_CLASSES = ("posterior_predictive", "prior_predictive", "observed_data")
OF_PRIOR = {"prior": "posterior", "prior_predictive": "posterior_predictive"}


class Fitted(Protocol):
    """Protocol of the attributes of a fitted run that the export to ArviZ needs."""

    method: Method
    data: Federation
    state: RoundState
    seed: Seed
    records: list[Any]

    @property
    def status(self) -> ConvergenceStatus:
        """Convergence status of the run: converged, not converged, stuck or diverged."""
        ...

    def record_correction(self, outcome: str, why: str = "", notes: Sequence[str] = ()) -> None:
        """Store the outcome of the last correction, for the status; "" removes an earlier one."""
        ...

    def statistics(self) -> Tensors:
        """Return the method's own statistics of each of J clients: name -> [J, *p]."""
        ...


@checked
def to_arviz(
    runs: Sequence[Fitted],
    draws: Count = 100,
    dims: Mapping[str, tuple[str, ...]] | None = None,
    *,
    coords: Mapping[str, Sequence[Any]] | None = None,
    groups: str | Collection[str] = CHEAP,
    ids: Tensor | None = None,
    corrected: bool | None = None,
    allow_diverged: bool = False,
    progress: bool = True,
    **asked: Unpack[ModelOptions],
) -> Any:
    """Return posterior draws and diagnostics of runs as ArviZ data, with one chain for each run.

    Groups:

    - posterior: latent and `pyro.deterministic` sites, dims chain, draw, client and the site's
      own; without client if the site is shared, depends only on shared sites, or is one point for
      all; row instead of client inside `batch.rows()` (such sites need one of the groups with
      rows). A point has equal draws: the attribute "points" names these sites. For a method with a
      server posterior, as FedBE, it is that posterior, unless another model is requested.
    - log_prior: the log density of each latent site with a prior density, for `arviz.psense`.
    - log_likelihood, posterior_predictive, observed_data: the observed sites by row, counts and
      classes as integers. The first also has every `pyro.factor` of rows, and is NaN where a mask
      in the model hides a response. A row of weight w has w times its log likelihood, so that
      `arviz.loo` leaves out, and scores, all w copies together; that of a row of weight 0 is 0,
      for which it reports k = inf: select rows with row_weight > 0 before, as `checks.loo` does.
      The group adds log_p and log_q to sample_stats: log densities of every draw under the model
      given the server and under the guide, for each client, or for all clients together if there
      are shared sites.
    - prior, prior_predictive: draws from the model given the server.
    - constant_data: x, the clients' sizes and each row's number in the table.
    - sample_stats: the loss by round, client and gradient step, NaN where the client did not train;
      moved_mean, moved_sd and moved_norm by round and site, see `Run.parameter_changes`; and the
      method's statistics; only if all requested clients train.

    The axis "feature" (of x, and where dims has it) is labeled by the columns of the table of x;
    groups of responses have the names of classes as the coordinate "class":
    `found["observed_data"]["class"][y]`. Attributes of the result and of every group record the
    library, date, method, model, seed, rounds, times and status.

    Args:
        runs: runs with different seeds.
        draws: number of draws of each run.
        dims: site -> names of its axes; default "SITE_dim_0" and so on. Names of parameters that
            are in none of the groups, such as one that the model does not sample, have no effect.
        coords: axis -> labels of its entries, such as the names of covariates.
        groups: names of the above, or "all": those that the method has, as an improper prior has no
            draws and no density.
        ids: ids of clients; default the training clients. Held-out clients are initialized, and
            adapted only if `adaptation` is given: ids=torch.arange(data.clients, len(data.train)).
        corrected: resample draws of the guide by importance weights, which gives draws of the
            exact posterior (given the server where no site is shared). None corrects draws where
            possible, except points, methods without shared random variables, networks of more than
            50 parameters, private runs, held-out clients, and, with a warning, weights with Pareto
            k above 0.7 or an effective sample size below 400. The attribute "corrected" is "yes",
            or "no" and the reason; sample_stats has pareto_k and importance_ess, and pareto_k_SITE
            of the mean, sd and ends of the 95% interval of each entry of a site. False returns
            draws of the guide; True raises ValueError if draws cannot be corrected. It reads all
            rows; see `pyrofl.inference.posteriors.corrected`.
        allow_diverged: accept diverged runs; see `Run.status`.
        progress: show the progress of the correction, in a terminal or a notebook.
        asked: model, adaptation, chunk_size and seed of `EvaluationSpec`; default the run's seed.
            Groups with rows process one client at a time.

    Returns:
        An InferenceData for ArviZ 0.x, an xarray.DataTree for 1.x.

    Raises:
        ValueError: if there is no run, a group is unknown or undefined, seeds are equal, a run
            diverged, runs differ in clients, rows or sites, names in dims and coords do not fit,
            or corrected is True and draws cannot be corrected: points, or more than 2,000
            variables.

    Warns:
        UserWarning: if corrected draws are unreliable: Pareto k above 0.7, or an effective sample
            size below 400; by default, draws of the guide are returned then. With k above 0.7 the
            status of the run is "not converged" from then on. Also if two sets of weighted draws
            differ in a mean or standard deviation beyond their Monte Carlo errors, if no second set
            is near enough for that, and if Pareto k of an estimate is above 0.7, for 1,000 exact
            draws or more beyond its error. These warnings are in `Run.warnings`, too. Also if none
            of the names in dims has an effect.
    """
    begun, runs, everything = perf_counter(), list(runs), groups == "all"
    refuse_no_runs(runs)
    some = groups if isinstance(groups, Collection) else [groups]
    chosen = set(GROUPS) if everything else {str(group) for group in some}
    if not runs or isinstance(groups, str) != everything or not chosen <= set(GROUPS):
        raise ValueError(
            f"{len(runs)} runs and groups {groups!r}; expected at least one run, and 'all' or a "
            f"list of names from {', '.join(GROUPS)}"
        )
    data, seeds = runs[0].data, [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds of the runs are {seeds}; fit each run with its own seed, so that chains are "
            "independent"
        )
    drawn = bool(chosen & {"posterior", *OF_ROWS})
    if drawn and corrected is not False:
        for run in runs:
            run.record_correction("")  # of an earlier one
    verdicts = refuse_diverged(runs, allow_diverged)
    clients = those(data, ids)
    of_method, of_axes = axes_of(runs[0].method)
    user_dims, dims = dims or {}, {**of_method, **(dims or {})}
    refuse_bad_axes(dims)
    chain_groups, corrections = [], []
    for run, verdict in zip(runs, verdicts, strict=True):
        refuse_other_data(run.data, data)
        how = draws_specification(run.method, {"seed": run.seed, **asked, "draws": draws})
        dependence = find_client_dependence(run.method, run.data, run.state, clients, how)
        axes = ClientAxes(run.data, clients, run.method.shared, dims, dependence)
        correction = CorrectionOutcome(corrected, progress, verdict)
        chain_groups.append(_groups(run, axes, chosen, how, everything, correction))
        corrections.append(correction.outcome)
        if drawn:
            run.record_correction(correction.outcome, correction.unreliable, correction.notes)
        _check_sites(chain_groups[-1], chain_groups[0])
    used = {axis for group in chain_groups[0].values() for v in group.values() for axis in v.axes}
    coords = {**{n: v for n, v in of_axes.items() if n in used}, **(coords or {})}
    named = _refuse_unknown_names(chain_groups[0], runs[0].state, user_dims, coords)
    trained = int(clients.max()) < data.clients and any(run.records for run in runs)
    if "sample_stats" in chosen and trained:
        loss, named["round"], named["step"] = losses(runs)
        for one, value in zip(chain_groups, loss, strict=True):
            of_rounds = {"loss": Variable(value[:, clients], ("round", "client", "step"))}
            one["sample_stats"] = one.get("sample_stats", {}) | of_rounds
        named["site"], far = movements(runs)
        for one, values in zip(chain_groups, far, strict=True):
            one["sample_stats"] |= values
    verdicts = [run.status for run in runs]  # with the correction
    if any(ESTIMATE in v.axes for v in chain_groups[0].get("sample_stats", {}).values()):
        named[ESTIMATE] = ESTIMATES
    attrs = facts(runs, chain_groups[0], verdicts, how, begun) | {
        "corrected": together(corrections)
    }
    return stack_chains(chain_groups, data, clients, named, attrs)


def refuse_diverged(runs: Sequence[Fitted], allow_diverged: bool) -> list[ConvergenceStatus]:
    """Return the convergence status of each run; raise ValueError if a run diverged."""
    verdicts = [run.status for run in runs]
    for run, verdict in zip(runs, verdicts, strict=True):
        if verdict.kind == "diverged" and not allow_diverged:
            has_rates = trained_by(run.method)
            remedy = "lower the learning rates" if has_rates else "check the model's priors"
            raise ValueError(
                f"the run of seed {run.seed} {verdict}; {remedy}, or pass allow_diverged=True to "
                "accept it"
            )
    return verdicts


def refuse_bad_axes(dims: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ValueError if axis names given in `dims` are reserved or already in use."""
    for site, axes in dims.items():
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise ValueError(f"dims of {site!r} are {axes!r}; expected a tuple of axis names")
        for i, axis in enumerate(axes):
            if axis in RESERVED or axis in dims or axis in axes[:i]:
                raise ValueError(
                    f"dims names an axis of {site!r} {axis!r}, which is already in use; choose a "
                    "name of no site and no other axis"
                )


def _refuse_unknown_names(
    groups: Groups,
    state: RoundState,
    dims: Mapping[str, tuple[str, ...]],
    coords: Mapping[str, Sequence[Any]],
) -> dict[str, Sequence[Any]]:
    """Validate the site and axis names of `dims` and `coords`; return `coords` as a dict.

    Unknown sites in dims, or axes in coords, raise ValueError. Parameters that are in no group, as
    points that the model does not sample, are permitted, with a warning if dims has no others.
    """
    names = {n: None for variables in groups.values() for n in variables}
    names |= {site: None for n in names if (site := n.partition("/")[2])}  # of a site's statistics
    states = (*state.server, *state.client_states)
    parts = (n.partition("/") for n in states if not n.startswith("server/"))
    parameters = {site: None for _, _, site in parts if site}
    axes = {a: None for group in groups.values() for v in group.values() for a in v.axes}
    for name in dims:
        check_name(name, list(names | parameters), "site in dims")
    if dims and not dims.keys() & names.keys():
        warn_user(
            f"dims of {', '.join(dims)} have no effect, as no variable of the groups "
            f"{', '.join(groups)} has that name; leave them out"
        )
    for name in coords:
        check_name(name, [a for a in axes if a not in RESERVED], "axis in coords")
    return dict(coords)


def stack_chains(
    chain_groups: Sequence[Groups],
    data: Federation,
    ids: Tensor,
    coords: Mapping[str, Sequence[Any]] | None = None,
    attrs: Mapping[str, Fact] | None = None,
) -> Any:
    """Combine the ArviZ groups of all chains into one ArviZ object with labeled axes.

    `ids` label the clients, and `coords` the entries of further axes.

    Groups of class responses have the names of the classes as the coordinate "class".
    """
    arrays: dict[str, dict[str, Tensor]] = {group: {} for group in chain_groups[0]}
    axes: dict[str, tuple[str, ...]] = {}
    for group, variables in chain_groups[0].items():
        chains = not group.endswith("_data")
        for name, variable in variables.items():
            values = [one[group][name].value for one in chain_groups]
            arrays[group][name] = torch.stack(values) if chains else values[0]
            axes[f"{group}/{name}"] = ("chain",) * chains + variable.axes
    names = [data.names[i] for i in ids.tolist()]
    of_data = {axis: words for axis, words in labels(data).items() if words}
    axis_labels = {"client": names, **of_data, **(coords or {})}
    of_row = [data.names[i] for i in ids.tolist() for _ in data.train[i]]
    along: dict[str, tuple[str, Sequence[Any]]] = {"row_client": ("row", of_row)}
    if data.weights is not None:
        rows = torch.cat([data.train[i] for i in ids.tolist()])
        along["row_weight"] = ("row", data.weights[rows].tolist())
    listed = {group: ("class",) for group in OF_CLASSES if data.classes}
    units = data.source.units() if data.source else {}
    attributes = {**(attrs or {}), **units}
    return inference_data(arrays, axes, axis_labels, along, attributes, listed)


def of_prior(
    axes: ClientAxes,
    method: Method,
    state: RoundState,
    spec: EvaluationSpec,
    chosen: Collection[str] = tuple(OF_PRIOR),
    lenient: bool = False,
) -> Groups:
    """Return the ArviZ groups of draws from the prior and its predictive distribution.

    The prior is that given a server state; the groups are prior and prior_predictive.
    """
    try:
        client_draws = pointwise(method, axes.data, state, axes.ids, spec, of_prior=True)
    except NotImplementedError as error:
        if lenient:
            return {}
        raise ValueError(
            f"the prior has no draws: {error}; use a proper prior, or leave out the prior groups"
        ) from error
    groups = axes.groups(client_draws, OF_PRIOR.values())
    return {new: groups[old] for new, old in OF_PRIOR.items() if new in chosen and old in groups}


def _groups(
    run: Fitted,
    axes: ClientAxes,
    chosen: set[str],
    spec: EvaluationSpec,
    lenient: bool,
    correction: CorrectionOutcome,
) -> Groups:
    """Return the requested ArviZ groups of one run, as group -> name -> variable.

    `lenient` leaves out an improper prior.
    """
    groups: Groups = {}
    method, data, state = run.method, run.data, run.state
    client_draws: list[ClientValues] | None = None
    stats: dict[str, Variable] = {}
    if chosen & {"posterior", *OF_ROWS}:
        client_draws, stats = correction.draws(
            method, data, state, axes, spec, bool(chosen & OF_ROWS)
        )
    if client_draws is not None:
        groups |= axes.groups(
            client_draws if chosen & OF_ROWS else without_rows(client_draws), chosen
        )
    elif chosen & OF_ROWS:
        groups |= axes.groups(pointwise(method, data, state, axes.ids, spec), chosen)
    elif "posterior" in chosen:
        sites = draw(method, data, state, axes.ids, spec)
        groups["posterior"] = {n: axes.of_clients(n, v) for n, v in sites.items()}
    if client_draws is None and "posterior" in groups:
        correction.warn_heavy_tails(groups["posterior"])
    if stats:
        stats |= correction.pareto_shapes(groups["posterior"]) if "posterior" in groups else {}
        groups["sample_stats"] = groups.get("sample_stats", {}) | stats
    if chosen & OF_PRIOR.keys():
        groups |= of_prior(axes, method, state, spec, chosen, lenient)
    if "constant_data" in chosen:
        groups["constant_data"] = axes.constants()
    if "log_prior" in chosen and not groups.get("log_prior") and not lenient:
        raise ValueError("the prior has no density; use a proper prior, or leave out log_prior")
    if "sample_stats" in chosen and int(axes.ids.max()) < data.clients:
        reported = {n: axes.reported(n, v[axes.ids]) for n, v in run.statistics().items()}
        groups["sample_stats"] = reported | groups.get("sample_stats", {})
    return {group: groups[group] for group in GROUPS if groups.get(group)}


def without_rows(client_draws: Sequence[ClientValues]) -> list[ClientValues]:
    """Remove latent sites that have a value for each row from clients' posterior draws."""
    return [
        one | {"posterior": {n: v for n, v in one["posterior"].items() if not v.rows}}
        for one in client_draws
    ]


def refuse_other_data(one: Federation, other: Federation) -> None:
    """Raise ValueError if two federations differ in clients or training rows."""
    if one.names != other.names or one.held_out != other.held_out:
        clients = f"{', '.join(other.names)} and {', '.join(one.names)}"
        raise ValueError(f"runs have clients {clients}; all chains need the same, in one order")
    weights = [torch.ones(len(d.y)) if d.weights is None else d.weights for d in (one, other)]
    bare = [d if d.weights is None else replace(d, weights=None) for d in (one, other)]
    same = (rows_of(bare[0]) == rows_of(bare[1])).all(1).tolist()  # of clients that train
    held_out = zip(one.train[one.clients :], other.train[one.clients :], strict=True)
    same += [torch.equal(one.y[rows], other.y[others]) for rows, others in held_out]
    for name, rows, others, alike in zip(one.names, one.train, other.train, same, strict=True):
        if not alike:
            raise ValueError(
                f"{name} has different training rows in two runs; all chains need the same rows"
            )
        if not bool((weights[0][rows] == weights[1][others]).all()):
            raise ValueError(
                f"{name} has different row weights in two runs; all chains need the same weights"
            )


def _check_sites(one: Groups, other: Groups) -> None:
    """Raise ValueError if the ArviZ groups of two runs have different variables or shapes."""
    shapes, expected = (
        {f"{group}/{n} {list(v.value.shape)}" for group in each for n, v in each[group].items()}
        for each in (one, other)
    )
    if differing := sorted(shapes ^ expected):
        raise ValueError(
            f"runs differ in {', '.join(differing)}; all chains need the same sites and shapes"
        )
