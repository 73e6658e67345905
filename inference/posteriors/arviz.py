"""Runs for ArviZ: all that their programs say, as if it came from a sampler.

Rows of all clients lie one behind the other along one axis, "row", client by client, without any
padding; the coordinate "row_client" names the client of each. What a client has is along "client",
what all share is along neither. Every run is a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from pyrofl.arguments import Count, checked, known
from pyrofl.data import Federation
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec, ModelAsked
from pyrofl.inference.method import Method
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors.axes import GROUPS, ClientAxes, Groups, Variable, labels
from pyrofl.inference.posteriors.corrected import Correction
from pyrofl.inference.posteriors.draws import asked_of, draw, read_own, those
from pyrofl.inference.posteriors.export import Fact, inference_data, refuse_no_runs
from pyrofl.inference.posteriors.pointwise import Pointwise, pointwise
from pyrofl.inference.posteriors.provenance import facts, together
from pyrofl.inference.seeds import Seed
from pyrofl.tensors import Tensors

RESERVED = ("chain", "draw", "client", "row", "row_client", "round", "step", "site")  # taken
CHEAP = ("posterior", "sample_stats")
OF_ROWS = {"posterior_predictive", "log_likelihood", "log_prior", "observed_data"}
OF_CLASSES = ("posterior_predictive", "prior_predictive", "observed_data")
OF_PRIOR = {"prior": "posterior", "prior_predictive": "posterior_predictive"}


class Fitted(Protocol):
    """What a run has to tell; see `Run` and `RoundRecord`, which know this module."""

    method: Method
    data: Federation
    state: RoundState
    seed: Seed
    records: list[Any]

    @property
    def status(self) -> ConvergenceStatus:
        """Whether it has converged, is moving or has diverged."""
        ...

    def statistics(self) -> Tensors:
        """Return what the paper reports about clients."""
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
    **asked: Unpack[ModelAsked],
) -> Any:
    """Return what runs of one method on one federation found, for ArviZ; every run is a chain.

    Groups:

    - posterior: latent sites and those of `pyro.deterministic`, dims chain, draw, client and the
      site's own; without client if all clients share the site, or what is made of such sites
      alone, or it is one point for all; row instead of client if it lies inside `batch.rows()`
      (such sites need one of the groups that look at rows). A point has equal draws: the attribute
      "points" names those there are. Of a method whose server has a posterior, as FedBE, it is
      that, unless another model is asked for.
    - log_prior: the log density of each latent site whose prior has one, for `arviz.psense`.
    - log_likelihood, posterior_predictive, observed_data: the observed sites by row, counts and
      classes as integers. The first has every `pyro.factor` of rows too, and is NaN where a mask of
      the model's own hides a response; it brings log_p and log_q to sample_stats: log densities of
      every draw, of what the client has under the model given the server and under the guide; if
      there are shared sites, of all clients together.
    - prior, prior_predictive: as many draws from the model given the server.
    - constant_data: x, the clients' sizes and each row's number in the table.
    - sample_stats: the loss by round, client and gradient step, NaN where the client did not train;
      moved_mean, moved_sd and moved_norm by round and site, see `Run.parameter_changes`; and the
      method's statistics; if all clients that are asked for train.

    The axis "feature", of x and where dims says so, is labelled by the columns of a table that x
    was read from; "class" by the names of classes, which groups of responses have to look them up:
    `found["observed_data"]["class"][y]`. Attributes of all of it and of every group say what made
    it, when, by which method, model, seed and rounds, how long that took, and how it ended.

    Args:
        runs: with different seeds.
        draws: of each run.
        dims: site -> names of its axes; default "SITE_dim_0" and so on.
        coords: axis -> labels of its places, such as the names of covariates.
        groups: some of the above, or "all": those that the method has, as an improper prior has no
            draws and no density.
        ids: of clients; default all that train. Held-out ones join and no more, unless `adaptation`
            says what they do first: ids=torch.arange(data.clients, len(data.train)).
        corrected: weigh draws of the guide by importance and resample them: they are draws of the
            exact posterior, given the server where no site is shared. None does so where it can be
            done and trusted, and takes draws of the guide elsewhere: of points, where clients share
            no random variable, of networks of more than 50 parameters, of private runs, of clients
            that are held out, and, with a warning, where Pareto k of the weights is above 0.7 or
            they are worth less than 400 draws. The attribute "corrected" is "yes", or "no" and the
            reason. sample_stats has Pareto k, and how many draws the weights are worth, as pareto_k
            and importance_ess. False takes draws of the guide; True refuses what cannot be
            corrected. It reads all rows; see `pyrofl.inference.posteriors.corrected`.
        allow_diverged: look at runs that diverged too; see `Run.status`.
        progress: show how far the correction is, in a terminal or a notebook.
        asked: model, adaptation, chunk and seed of `EvaluationSpec`; the seed is the run's by
            default. Groups that read rows are computed client by client.

    Raises:
        ValueError: if there is no run, a group is unknown or cannot be made, seeds are equal, a
            run diverged, runs differ in clients, rows or sites, names in dims and coords do not
            fit, or corrected is True and draws cannot be corrected: of points, or of more than
            2,000 variables.

    Warns:
        UserWarning: if corrected draws cannot be trusted: Pareto k above 0.7, or worth less than
            400 draws; by default they are those of the guide then.
    """
    begun, runs, everything = perf_counter(), list(runs), groups == "all"
    refuse_no_runs(runs)
    some = groups if isinstance(groups, Collection) else [groups]
    chosen = set(GROUPS) if everything else {str(group) for group in some}
    if not runs or isinstance(groups, str) != everything or not chosen <= set(GROUPS):
        raise ValueError(
            f"{len(runs)} runs and groups {groups!r}; expected at least one run, and 'all' or some "
            f"of {', '.join(GROUPS)}"
        )
    data, seeds = runs[0].data, [run.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds of the runs are {seeds}; expected all different, so that chains are independent"
        )
    verdicts = refuse_diverged(runs, allow_diverged)
    clients = those(data, ids)
    refuse_bad_axes(dims or {})
    made, corrections = [], []
    for run, verdict in zip(runs, verdicts, strict=True):
        refuse_other_data(run.data, data)
        how = asked_of(run.method, {"seed": run.seed, **asked, "draws": draws})
        own = read_own(run.method, run.data, run.state, clients, how)
        axes = ClientAxes(run.data, clients, run.method.shared, dims or {}, own)
        correction = Correction(corrected, progress, verdict)
        made.append(_groups(run, axes, chosen, how, everything, correction))
        corrections.append(correction.outcome)
        _check_sites(made[-1], made[0])
    named = _refuse_unknown_names(made[0], runs[0].state, dims or {}, coords or {})
    trained = int(clients.max()) < data.clients and any(run.records for run in runs)
    if "sample_stats" in chosen and trained:
        loss, named["round"], named["step"] = losses(runs)
        for one, value in zip(made, loss, strict=True):
            of_rounds = {"loss": Variable(value[:, clients], ("round", "client", "step"))}
            one["sample_stats"] = one.get("sample_stats", {}) | of_rounds
        named["site"], far = movements(runs)
        for one, values in zip(made, far, strict=True):
            one["sample_stats"] |= values
    attrs = facts(runs, made[0], verdicts, how, begun) | {"corrected": together(corrections)}
    return chained(made, data, clients, named, attrs)


def refuse_diverged(runs: Sequence[Fitted], allow_diverged: bool) -> list[ConvergenceStatus]:
    """Refuse runs that diverged, unless they are allowed, and return the verdict of each."""
    verdicts = [run.status for run in runs]
    for run, verdict in zip(runs, verdicts, strict=True):
        if verdict.kind == "diverged" and not allow_diverged:
            raise ValueError(
                f"the run of seed {run.seed} {verdict}; expected one that did not, such as with "
                "smaller learning rates; allow_diverged=True looks at it all the same"
            )
    return verdicts


def refuse_bad_axes(dims: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse names of axes that are taken, or given twice to one site."""
    for site, axes in dims.items():
        if isinstance(axes, str) or not isinstance(axes, Sequence):
            raise ValueError(f"dims of {site!r} are {axes!r}; expected a tuple of names")
        for i, axis in enumerate(axes):
            if axis in RESERVED or axis in dims or axis in axes[:i]:
                raise ValueError(
                    f"dims names an axis of {site!r} {axis!r}, which is taken; expected a name "
                    "that no site and no other axis of it has"
                )


def _refuse_unknown_names(
    made: Groups,
    state: RoundState,
    dims: Mapping[str, tuple[str, ...]],
    coords: Mapping[str, Sequence[Any]],
) -> dict[str, Sequence[Any]]:
    """Refuse names that belong to nothing, and return the labels of axes."""
    sites = {n: None for variables in made.values() for n in variables}
    # A parameter that is a point has no draws, and may have named axes all the same.
    states = (*sites, *state.server, *state.client_states)
    sites |= {own: None for n in states if (own := n.partition("/")[2])}
    axes = {a: None for group in made.values() for v in group.values() for a in v.axes}
    for name in dims:
        known(name, list(sites), "site in dims")
    for name in coords:
        known(name, [a for a in axes if a not in RESERVED], "axis in coords")
    return dict(coords)


def chained(
    made: Sequence[Groups],
    data: Federation,
    ids: Tensor,
    coords: Mapping[str, Sequence[Any]] | None = None,
    attrs: Mapping[str, Fact] | None = None,
) -> Any:
    """Return groups of each chain for ArviZ; ids are of clients, coords label further axes.

    Groups of responses that are classes have the coordinate "class", their names.
    """
    arrays: dict[str, dict[str, Tensor]] = {group: {} for group in made[0]}
    axes: dict[str, tuple[str, ...]] = {}
    for group, variables in made[0].items():
        chains = not group.endswith("_data")
        for name, variable in variables.items():
            values = [one[group][name].value for one in made]
            arrays[group][name] = torch.stack(values) if chains else values[0]
            axes[f"{group}/{name}"] = ("chain",) * chains + variable.axes
    names = [data.names[i] for i in ids.tolist()]
    of_data = {axis: words for axis, words in labels(data).items() if words}
    known = {"client": names, **of_data, **(coords or {})}
    of_row = [data.names[i] for i in ids.tolist() for _ in data.train[i]]
    listed = {group: ("class",) for group in OF_CLASSES if data.classes}
    units = data.source.units() if data.source else {}
    told = {**(attrs or {}), **units}
    return inference_data(arrays, axes, known, {"row_client": ("row", of_row)}, told, listed)


def losses(runs: Sequence[Fitted]) -> tuple[Tensor, list[int], list[str]]:
    """Return the loss of every run, round, client and gradient step, and the rounds and steps."""
    records = [record for run in runs for record in run.records]
    steps = list(dict.fromkeys(name for record in records for name in record.loss))
    numbers = {record.number for record in records}
    rounds = range(min(numbers), max(numbers) + 1)
    shape = (len(runs), len(rounds), runs[0].data.clients, len(steps))
    found = torch.full(shape, torch.nan, dtype=torch.float64)
    for run, mine in zip(runs, found, strict=True):
        for record in run.records:
            for name, value in record.loss.items():
                mine[record.number - rounds[0], :, steps.index(name)] = value
    return found, list(rounds), steps


def movements(runs: Sequence[Fitted]) -> tuple[list[str], list[dict[str, Variable]]]:
    """Return all sites, and for each run how far what of them moved, [rounds, sites]."""
    records = [record for run in runs for record in run.records]
    numbers = {record.number for record in records}
    keys = {(n, part): None for r in records for n, of in (r.moved or {}).items() for part in of}
    sites = list(dict.fromkeys(name for name, _ in keys))
    shape, found = (max(numbers) - min(numbers) + 1, len(sites)), []
    for run in runs:
        far = {p: torch.full(shape, torch.nan, dtype=torch.float64) for _, p in keys}
        for record in run.records:
            for name, parts in (record.moved or {}).items():
                for part, value in parts.items():
                    far[part][record.number - min(numbers), sites.index(name)] = value
        found.append({f"moved_{p}": Variable(v, ("round", "site")) for p, v in far.items()})
    return sites, found


def of_prior(
    axes: ClientAxes,
    method: Method,
    state: RoundState,
    asked: EvaluationSpec,
    chosen: Collection[str] = tuple(OF_PRIOR),
    lenient: bool = False,
) -> Groups:
    """Return the groups of draws from the model given the server; `lenient`: none if improper."""
    try:
        known = pointwise(method, axes.data, state, axes.ids, asked, of_prior=True)
    except NotImplementedError as error:
        if lenient:
            return {}
        raise ValueError(
            f"the prior has no draws: {error}; expected a proper one, or groups without it"
        ) from error
    made = axes.groups(known, OF_PRIOR.values())
    return {new: made[old] for new, old in OF_PRIOR.items() if new in chosen and old in made}


def _groups(
    run: Fitted,
    axes: ClientAxes,
    chosen: set[str],
    asked: EvaluationSpec,
    lenient: bool,
    correction: Correction,
) -> Groups:
    """Return the groups of one run; `lenient` leaves out the prior if it is improper."""
    found: Groups = {}
    method, data, state = run.method, run.data, run.state
    known: list[Pointwise] | None = None
    stats: dict[str, Variable] = {}
    if chosen & {"posterior", *OF_ROWS}:
        known, stats = correction.draws(method, data, state, axes, asked)
    if known is not None:
        found |= axes.groups(known if chosen & OF_ROWS else without_rows(known), chosen)
    elif chosen & OF_ROWS:
        found |= axes.groups(pointwise(method, data, state, axes.ids, asked), chosen)
    elif "posterior" in chosen:
        sites = draw(method, data, state, axes.ids, asked)
        found["posterior"] = {n: axes.of_clients(n, v) for n, v in sites.items()}
    if stats:
        found["sample_stats"] = found.get("sample_stats", {}) | stats
    if chosen & OF_PRIOR.keys():
        found |= of_prior(axes, method, state, asked, chosen, lenient)
    if "constant_data" in chosen:
        found["constant_data"] = axes.constants()
    if "log_prior" in chosen and not found.get("log_prior") and not lenient:
        raise ValueError("the prior has no density; expected a proper one, or no log_prior")
    if "sample_stats" in chosen and int(axes.ids.max()) < data.clients:
        reported = {n: axes.reported(n, v[axes.ids]) for n, v in run.statistics().items()}
        found["sample_stats"] = reported | found.get("sample_stats", {})
    return {group: found[group] for group in GROUPS if found.get(group)}


def without_rows(known: Sequence[Pointwise]) -> list[Pointwise]:
    """Return what programs say of clients without the sites that lie inside `batch.rows()`."""
    return [
        one | {"posterior": {n: v for n, v in one["posterior"].items() if not v.rows}}
        for one in known
    ]


def refuse_other_data(one: Federation, other: Federation) -> None:
    """Refuse runs on different federations."""
    if one.names != other.names or one.held_out != other.held_out:
        told = f"{', '.join(other.names)} and {', '.join(one.names)}"
        raise ValueError(f"runs have clients {told}; expected the same in all chains")
    for name, rows, others in zip(one.names, one.train, other.train, strict=True):
        if not (torch.equal(rows, others) and torch.equal(one.y[rows], other.y[others])):
            raise ValueError(f"{name} has other training rows in another run; expected the same")


def _check_sites(one: Groups, other: Groups) -> None:
    """Refuse runs whose variables differ."""
    found, expected = (
        {f"{group}/{n} {list(v.value.shape)}" for group in each for n, v in each[group].items()}
        for each in (one, other)
    )
    if differing := sorted(found ^ expected):
        raise ValueError(f"runs differ in {', '.join(differing)}; expected the same in all chains")
