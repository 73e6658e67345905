"""Importance weights of remote clients: replies to the exchanges that correct posterior draws.

The server sends draws of the shared sites as noise. A client draws its own sites given each of
them, and reports the log marginal likelihoods alone. What it needs in the next exchange stays with
it: the state of its generator, where its own sites had their modes, and the last draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyrofl.data.shard import Shard
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Seed, separate
from pyrofl.inference.definition.table_method import axes_of
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.posteriors.arviz import stack_chains, without_rows
from pyrofl.inference.posteriors.axes import ClientAxes, Groups, Variable
from pyrofl.inference.posteriors.client_groups import group_clients
from pyrofl.inference.posteriors.draws import Values, draw, find_client_dependence
from pyrofl.inference.posteriors.export import Fact
from pyrofl.inference.posteriors.group_weights import GroupImportanceSampler
from pyrofl.inference.posteriors.guided_sites import GuidedSites
from pyrofl.inference.posteriors.proposals import ModeRegression
from pyrofl.inference.privacy.sums import is_summed
from pyrofl.inference.transport.message_checks import (
    Flat,
    InvalidRequestError,
    client_names,
    column,
    tensors,
    to_own_storage,
    whole_number,
)
from pyrofl.tensors import join_up, under

WEIGHING_FILE = "weighing.safetensors"

ExchangeRecords = dict[str, Any]
"""Round, number of the exchange, and the records of clients after it and after the one before."""


def reason_against(method: Method) -> str:
    """Return why remote clients must not report marginal likelihoods, or ""."""
    if method.metadata.privacy is not None:
        return "the run is private, and corrected draws would exceed its privacy budget"
    if is_summed(method):
        return "clients send sums, and a correction needs a number of each client at each draw"
    return ""


def weigh(
    method: Method,
    shard: Shard,
    state: RoundState,
    seed: Seed,
    request: Mapping[str, Any],
    records: ExchangeRecords,
) -> tuple[Flat, ExchangeRecords]:
    """Return the clients' reply to a request of `correction.reporter`, and their new records.

    Args:
        method: as deployed, with the received tensors as download.
        shard: rows of the clients.
        state: the round.
        seed: seed of the run.
        request: the request.
        records: records of the exchange before, or of this one if it is repeated.

    Raises:
        InvalidRequestError: if there are no records of the exchange before, or the method sends
            sums or adds noise.
    """
    if reason := reason_against(method):
        raise InvalidRequestError(f"draws are not corrected: {reason}")
    names, at = client_names(request), whole_number(request, "exchange")
    sets, more = whole_number(request, "sets"), bool(whole_number(request, "more"))
    ids, draws = (column(request, n, len(names), torch.long) for n in ("ids", "draws"))
    noise = tensors("shared", request)["noise"][0].double()
    before = _previous_records(names, state.number, at, records) if at else {}
    spec = EvaluationSpec(model=request["model"], seed=seed)
    columns_by_group, after = [], dict[str, Any]()
    for k in draws.unique().tolist():
        groups = group_clients(method, shard, state, ids[draws == k], spec)
        for group in groups:
            part = GroupImportanceSampler(method, group, GuidedSites(method, group))
            group_names = [shard.names[i] for i in group.ids]
            if at:
                _restore(part, [before[name] for name in group_names], more)
            terms = part.together(noise, int(k), sets, more)
            after |= dict(zip(group_names, _records(part), strict=True))
            columns = {"ids": torch.tensor(group.ids), "log_l": terms.log_l.mT}  # [C, S]
            columns_by_group.append(columns | ({"noise": terms.noise.mT} if sets > 1 else {}))
    joined = join_up(columns_by_group)
    order = (ids[:, None] == joined.pop("ids")).int().argmax(1)
    sent = to_own_storage({n: v[order] for n, v in joined.items()})
    about = {"round": state.number, "exchange": at}
    return {"names": names, **about, **under("up", sent)}, {**about, "before": before, "now": after}


def _previous_records(
    names: tuple[str, ...], rounds: int, at: int, records: ExchangeRecords
) -> dict[str, Any]:
    """Return the clients' records of the exchange before; raise InvalidRequestError without any."""
    last = records.get("exchange") if records.get("round") == rounds else None
    held = records["now"] if last == at - 1 else records["before"] if last == at else {}
    if lost := [name for name in names if name not in held]:
        raise InvalidRequestError(
            f"{', '.join(lost)}: no reply to exchange {at} of the correction is known here; start "
            "the correction again"
        )
    return {name: held[name] for name in names}


def _records(part: GroupImportanceSampler) -> list[dict[str, Any]]:
    """Return what each client of a group needs in the next exchange, and its last draws."""
    records = []
    for c, source in enumerate(part.group.generators):
        some, near = slice(c, c + 1), part.near
        records.append(
            {
                "source": source.get_state(),
                "slopes": None if near is None else near.slopes[:, some].clone(),
                "squares": near is not None and near.squares,
                "sites": {n: v.value[:, some].clone() for n, v in part.sites.items()},
                "rows": [n for n, v in part.sites.items() if v.rows],
                "plates": [n for n in part.sites if part.guided.in_plate_by_site.get(n)],
            }
        )
    return records


def _restore(part: GroupImportanceSampler, records: list[dict[str, Any]], more: bool) -> None:
    """Continue the importance sampling of a group from the records of its clients."""
    for n in records[0]["sites"] if more else ():  # the group is that of the exchange before
        value = torch.cat([one["sites"][n] for one in records], 1)
        part.sites |= {n: Values(value, n in records[0]["rows"])}
    for source, one in zip(part.group.generators, records, strict=True):
        source.set_state(one["source"])
    if (slopes := [one["slopes"] for one in records])[0] is not None:
        part.near = ModeRegression(torch.cat(slopes, 1), records[0]["squares"])


def posterior(
    method: Method,
    shard: Shard,
    state: RoundState,
    seed: Seed,
    request: Mapping[str, Any],
    records: ExchangeRecords,
) -> Any:
    """Return posterior draws of these clients for ArviZ; the arguments are those of `weigh`.

    Raises:
        InvalidRequestError: if corrected draws are requested, but the clients have not replied to
            the exchanges of the correction.
    """
    names = client_names(request)
    ids = column(request, "ids", len(names), torch.long)
    spec = EvaluationSpec(model=request["model"], seed=seed, draws=whole_number(request, "draws"))
    dependence = find_client_dependence(method, shard, state, ids, spec)
    dims, coords = axes_of(method)
    axes = ClientAxes(shard, ids, method.shared, dims, dependence)
    groups: Groups = {}
    if (chosen := tensors("shared", request).get("chosen")) is None:
        sites = draw(method, shard, state, ids, spec)
        groups["posterior"] = {n: axes.of_clients(n, v) for n, v in sites.items()}
    else:
        at = records.get("exchange", -1) + 1
        now = _previous_records(names, state.number, at, records)
        each = [{"posterior": _site_draws(now[name], chosen[0])} for name in names]
        groups = axes.groups(without_rows(each), ("posterior",))
    if stats := {n: request[n] for n in ("pareto_k", "importance_ess") if n in request}:
        exact = torch.float64
        groups["sample_stats"] = {
            n: Variable(torch.tensor(v, dtype=exact), ()) for n, v in stats.items()
        }
    attrs: dict[str, Fact] = {
        "method": method.name or method.programs,
        "rounds": state.number,
        "seed": separate(seed).noise,
        "corrected": str(request["corrected"]),
    }
    return stack_chains([groups], shard, ids, coords, attrs)


def _site_draws(one: Mapping[str, Any], chosen: Tensor) -> dict[str, Values]:
    """Return a client's draws of all sites, [S, 1, B or 1, *p], from its last record."""
    return {
        n: Values(v[chosen].unsqueeze(2) if n in one["plates"] else v[chosen], n in one["rows"])
        for n, v in one["sites"].items()
    }
