"""Runs for ArviZ: all that their programs say, as if it came from a sampler.

Rows of all clients lie one behind the other along one axis, "row", client by client, without any
padding; the coordinate "row_client" names the client of each. What a client has is along "client",
what all share is along neither. Every run is a chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.draws import posterior
from pyrofl.inference.posteriors.export import inference_data
from pyrofl.inference.posteriors.groups import Groups, Table, Variable
from pyrofl.inference.posteriors.pointwise import studies
from pyrofl.inference.seeds import Seed
from pyrofl.tensors import Tensors


class Fitted(Protocol):
    """What a run has to tell; see `pyrofl.fit`."""

    method: Method
    data: Federation
    state: Round
    seed: Seed
    loss: list[Tensors]

    def statistics(self) -> Tensors:
        """Return what the paper reports about clients."""
        ...


GROUPS = (
    "posterior",
    "prior",
    "prior_predictive",
    "posterior_predictive",
    "log_likelihood",
    "observed_data",
    "constant_data",
    "sample_stats",
)
CHEAP = ("posterior", "sample_stats")
OF_ROWS = {"posterior_predictive", "log_likelihood", "observed_data"}
OF_PRIOR = {"prior", "prior_predictive"}


def to_arviz(
    runs: Sequence[Fitted],
    draws: int = 100,
    dims: Mapping[str, tuple[str, ...]] | None = None,
    *,
    groups: str | Collection[str] = CHEAP,
    ids: Tensor | None = None,
    **what: Any,
) -> Any:
    """Return what runs of one method on one federation found, for ArviZ; every run is a chain.

    Groups:

    - posterior: latent sites and those of `pyro.deterministic`, dims chain, draw, client and the
      site's own; without client if all clients share the site; row instead of client if it lies
      inside `batch.rows()` (such sites need one of the groups that look at rows).
    - log_likelihood, posterior_predictive, observed_data: the observed sites by row. The first
      brings log_p and log_q to sample_stats: log densities of every draw, of what the client has
      under the model given the server and under the guide; if there are shared sites, of all
      clients together.
    - prior, prior_predictive: as many draws from the model given the server.
    - constant_data: x, the clients' sizes and each row's number in the table.
    - sample_stats: the loss by round, client and gradient step, NaN where the client did not train,
      and the method's statistics.

    Args:
        runs: with different seeds.
        draws: of each run.
        dims: site -> names of its axes; default "SITE_dim_0" and so on.
        groups: some of the above, or "all": those that the method has, as an improper prior has no
            draws.
        ids: of clients; default all that train.
        what: further arguments of `pyrofl.posterior`: model, adapted, seed, and chunk (for groups
            that look at rows clients go one by one).

    Raises:
        ValueError: if there is no run, a group is unknown or cannot be made, seeds are equal, or
            runs differ in clients, rows or sites.
    """
    runs = list(runs)
    asked = set(GROUPS if groups == "all" else groups)
    if not runs or isinstance(groups, str) != (groups == "all") or not asked <= set(GROUPS):
        raise ValueError(
            f"{len(runs)} runs and groups {groups!r}; expected at least one run, and 'all' or some "
            f"of {', '.join(GROUPS)}"
        )
    if len({run.seed for run in runs}) < len(runs):
        raise ValueError(
            f"seeds of the runs are {[run.seed for run in runs]}; expected all different, so that "
            "chains are independent"
        )
    what = {"ids": torch.arange(runs[0].data.clients) if ids is None else ids} | what
    for run in runs:
        _check_data(run.data, runs[0].data)
    made = [_groups(run, draws, dims or {}, asked, groups == "all", what) for run in runs]
    for one in made:
        _check_sites(one, made[0])
    data, clients = runs[0].data, what["ids"]
    more: dict[str, Sequence[Any]] = {}
    if "sample_stats" in asked and ids is None and any(run.loss for run in runs):
        loss, more["round"], more["step"] = losses(runs)
        axes = ("round", "client", "step")
        for one, values in zip(made, loss, strict=True):
            one.setdefault("sample_stats", {})["loss"] = Variable(values, axes)
    return chained(made, data, clients, more)


def chained(
    made: Sequence[Groups],
    data: Federation,
    ids: Tensor,
    coords: Mapping[str, Sequence[Any]] | None = None,
) -> Any:
    """Return groups for ArviZ, those of each chain, with the names of clients and of their rows.

    Args:
        made: groups of each chain, with the same variables.
        data: the federation.
        ids: of the clients that they are about.
        coords: labels of further axes.
    """
    arrays: dict[str, dict[str, Tensor]] = {}
    axes: dict[str, tuple[str, ...]] = {}
    for group, variables in made[0].items():
        chains = not group.endswith("_data")
        arrays[group] = {}
        for name, variable in variables.items():
            values = [one[group][name].value for one in made]
            arrays[group][name] = torch.stack(values) if chains else values[0]
            axes[f"{group}/{name}"] = ("chain",) * chains + variable.axes
    clients = ids.tolist()
    names = {"client": [data.names[i] for i in clients]}
    row_client = [data.names[i] for i in clients for _ in data.train[i]]
    return inference_data(
        arrays, axes, names | dict(coords or {}), {"row_client": ("row", row_client)}
    )


def losses(runs: Sequence[Fitted]) -> tuple[Tensor, list[int], list[str]]:
    """Return the loss of every run, round, client and gradient step, and the rounds and steps."""
    steps = list(dict.fromkeys(n for run in runs for loss in run.loss for n in loss))
    first = [run.state.number - len(run.loss) + 1 for run in runs]
    rounds = range(min(first), max(run.state.number for run in runs) + 1)
    shape = (len(runs), len(rounds), runs[0].data.clients, len(steps))
    found = torch.full(shape, torch.nan, dtype=torch.float64)
    for run, start, mine in zip(runs, first, found, strict=True):
        for at, loss in enumerate(run.loss, start - rounds[0]):
            for name, value in loss.items():
                mine[at, :, steps.index(name)] = value
    return found, list(rounds), steps


def _groups(
    run: Fitted,
    draws: int,
    dims: Mapping[str, tuple[str, ...]],
    asked: set[str],
    lenient: bool,
    what: Mapping[str, Any],
) -> Groups:
    """Return the groups of one run; `lenient` leaves out the prior if it is improper."""
    found: Groups = {}
    what = {"seed": run.seed, **what}
    slow = {n: v for n, v in what.items() if n != "chunk"}  # clients go one by one
    table = Table(run.data, what["ids"], run.method.shared, dims)
    if asked & OF_ROWS:
        known = studies(run.method, run.data, run.state, draws, **slow)
        found |= table.studied(known, asked)
    elif "posterior" in asked:
        sites = posterior(run.method, run.data, run.state, draws, **what)
        found["posterior"] = {n: table.of_clients(n, v) for n, v in sites.items()}
    if asked & OF_PRIOR:
        found |= of_prior(table, asked, lenient, run.method, run.state, draws, **slow)
    if "constant_data" in asked:
        found["constant_data"] = table.constants()
    if "sample_stats" in asked and torch.equal(what["ids"], torch.arange(run.data.clients)):
        reported = {n: Variable(v, ("client",)) for n, v in run.statistics().items()}
        found["sample_stats"] = reported | found.get("sample_stats", {})
    return {group: found[group] for group in GROUPS if found.get(group)}


def of_prior(
    table: Table,
    asked: set[str],
    lenient: bool,
    method: Method,
    state: Round,
    draws: int,
    **what: Any,
) -> Groups:
    """Return the groups of draws from the model; none where it is improper, if `lenient`.

    Raises:
        ValueError: if it is improper.
    """
    try:
        known = studies(method, table.data, state, draws, of_prior=True, **what)
    except NotImplementedError as error:
        if lenient:
            return {}
        raise ValueError(f"the prior has no draws: {error}; leave its groups out") from error
    made = table.studied(known, {"posterior", "posterior_predictive"})
    both = {"prior": "posterior", "prior_predictive": "posterior_predictive"}
    return {new: made[old] for new, old in both.items() if new in asked}


def _check_data(one: Federation, other: Federation) -> None:
    """Refuse runs on different federations."""
    if one.names != other.names or one.held_out != other.held_out:
        raise ValueError(
            f"runs have clients {', '.join(other.names)} and {', '.join(one.names)}; expected the "
            "same in all chains"
        )
    for name, rows, others in zip(one.names, one.train, other.train, strict=True):
        if not (torch.equal(rows, others) and torch.equal(one.y[rows], other.y[others])):
            raise ValueError(f"{name} has other training rows in another run; expected the same")


def _check_sites(one: Groups, other: Groups) -> None:
    """Refuse runs whose variables differ."""
    found, expected = (
        {
            f"{group}/{n} {list(v.value.shape)}"
            for group, values in each.items()
            for n, v in values.items()
        }
        for each in (one, other)
    )
    if found != expected:
        raise ValueError(
            f"runs differ in {', '.join(sorted(found ^ expected))}; expected the same in all chains"
        )
