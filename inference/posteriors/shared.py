"""Posterior draws of shared sites, computed from the server state without clients' data.

The draws are corrected by importance weights if the clients report their marginal likelihoods at
draws of the shared sites. The server has no rows, so everything else about the sites is evaluated
on a row of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.data.outlines import outline
from pyrofl.inference.definition.seeds import Stream, separate, stream
from pyrofl.inference.definition.table_method import axes_of, derived_of
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.posteriors.arviz import Fitted
from pyrofl.inference.posteriors.client_groups import (
    ClientGroup,
    GivenNoise,
    group_clients,
    groups_of_similar_size,
    is_batchable,
    log_densities_at,
)
from pyrofl.inference.posteriors.corrected import (
    CorrectionOutcome,
    reason_against,
    server_draw_list,
    tried_for,
    weights_with_shapes,
)
from pyrofl.inference.posteriors.correction_outcomes import is_unreliable
from pyrofl.inference.posteriors.draws import draws_specification, posterior
from pyrofl.inference.posteriors.export import SAMPLE_DIMS, Fact, inference_data
from pyrofl.inference.posteriors.group_weights import GroupTerms, site_draws_of_traces
from pyrofl.inference.posteriors.guided_sites import GuidedSites
from pyrofl.inference.posteriors.importance_sampling import Request, TermsReply, Weighing, Weights
from pyrofl.inference.posteriors.proposals import resample_indices
from pyrofl.inference.posteriors.tail_shapes import ESTIMATE, ESTIMATES
from pyrofl.tensors import Tensors, matches
from pyrofl.turns import synchronized

NOT_CORRECTED = "no: the rows that importance weights need are at the clients"

AskClients = Callable[[Request, int], tuple[Tensor, Tensor]]
"""Request with numbers of draws of each client, and number of the exchange -> log marginal
likelihoods and their relative variances, [S, J] each."""


@dataclass(frozen=True)
class SharedDraws:
    """Posterior draws of the shared sites.

    Attributes:
        values: site -> draws [S, *p]; empty without shared sites.
        outcome: "yes" if they are corrected, or "no" and the reason.
        diagnostics: Pareto k and so on of the importance weights, if any.
        log_w: log importance weights of the weighted draws, if any.
        resampled_index: index of the weighted draw of each corrected draw, [S], if any.
    """

    values: Tensors = field(default_factory=dict)
    outcome: str = NOT_CORRECTED
    diagnostics: Weights | None = None
    log_w: Tensor | None = None
    resampled_index: Tensor | None = None


def shared_posterior(run: Fitted, draws: int = 1000) -> Tensors:
    """Draw the shared sites from the server's posterior; return site name -> draws [S, *p].

    They are drawn as by a new client, from its download alone.

    Args:
        run: a fitted run; it needs no rows.
        draws: number S of draws.
    """
    method, view = run.method, run.method.posterior_view
    is_servers = bool(getattr(method.views[view], "posterior", None))
    if not method.shared and not is_servers:
        return {}
    stateless = replace(run.state, client_states={}, seen=torch.zeros_like(run.state.seen))
    bare, first = _outline_with_sizes(run.data, run.data.sizes), torch.zeros(1).long()
    site_draws = posterior(method, bare, stateless, draws, ids=first, seed=run.seed)
    return {n: v[:, 0] for n, v in site_draws.items() if is_servers or matches(n, method.shared)}


def corrected_shared(
    run: Fitted, ask_clients: AskClients, draws: int = 1000, reason: str = ""
) -> SharedDraws:
    """Return draws of the shared sites, corrected by the clients' reports where possible.

    The draws and weights are those of `to_arviz` in the process that has all rows. Otherwise they
    are those of `shared_posterior`.

    Args:
        run: a fitted run; it needs no rows.
        ask_clients: asks all clients for their marginal likelihoods.
        draws: number S of draws.
        reason: why draws must not be corrected, or "".

    Warns:
        UserWarning: if draws that could be corrected are not; the message has the reason.
    """
    guide_draws = shared_posterior(run, draws)
    if not guide_draws:
        return SharedDraws()
    spec = draws_specification(run.method, {"seed": run.seed, "draws": draws})
    run.record_correction("")  # of an earlier one
    correction, everyone = (
        CorrectionOutcome(None, False, run.status),
        torch.arange(run.data.clients),
    )
    reason = reason or reason_against(run.method, run.data, everyone, spec)

    def weigh() -> tuple[SharedDraws | None, Weights]:
        return _weighed(run, ask_clients, spec)

    shared_draws, diagnostics = correction.tried(run.method, run.state, spec, reason, [], weigh)
    run.record_correction(correction.outcome, correction.unreliable, correction.notes)
    shared_draws = shared_draws or SharedDraws(guide_draws)
    return replace(shared_draws, outcome=correction.outcome, diagnostics=diagnostics)


@synchronized
def _weighed(
    run: Fitted, ask_clients: AskClients, spec: EvaluationSpec
) -> tuple[SharedDraws | None, Weights]:
    """Return corrected draws, or None if they are unreliable, and the diagnostics of weights."""
    method, data, draws = run.method, run.data, spec.draws or 1
    stateless = replace(run.state, client_states={}, seen=torch.zeros_like(run.state.seen))
    bare, everyone = _outline_with_sizes(data, data.sizes), torch.arange(data.clients)
    max_clients = spec.chunk_size or data.clients
    if max_clients > 1 and not is_batchable(method, bare, stateless, everyone, spec):
        max_clients = 1
    groups = groups_of_similar_size(data.sizes, everyone, max_clients)
    longest = torch.tensor([int(data.sizes[ids].max()) * len(ids) for ids in groups])
    blank, first = _outline_with_sizes(data, [1] * data.clients), groups[0][:1]
    number = 0

    def guided_by(server: Tensors) -> tuple[GuidedSites, ClientGroup]:
        """Return the guide's sites, and one client with one row of zeros, given a server state."""
        state = replace(stateless, server=server)
        guided = GuidedSites(method, _one_blank_client(run, bare, state, first, spec))
        return guided, _one_blank_client(run, blank, state, first, spec)

    initial_guide = guided_by(stateless.server)

    def exchange(wanted: Request) -> TermsReply:
        """Return the terms of the groups that one process would form."""
        nonlocal number
        each = torch.zeros(data.clients, dtype=torch.long)
        for ids, k in zip(groups, wanted.draws, strict=True):
            each[ids] = k
        log_l, noise = ask_clients(wanted._replace(draws=each.tolist()), number)
        number += 1
        guide = initial_guide if wanted.server is None else guided_by(wanted.server)
        log_densities, values = _shared_values_at_noise(run, *guide, wanted.noise)
        prior = (log_densities["shared log_p"] - log_densities["shared log_q"])[:, 0]
        terms = [GroupTerms(log_l[:, ids], noise[:, ids], prior) for ids in groups]
        return TermsReply(terms, values)

    common = stream(spec.seed, Stream.TEST, run.state.number)
    near = server_draw_list(method, run.state, spec, initial_guide[0])
    count = tried_for(method, draws)
    weighed = Weighing(initial_guide[0], longest.double(), exchange, common, count, near).together()
    if bool(is_unreliable(weighed.weights).any()):
        return None, weighed.weights
    diagnostics = weights_with_shapes(weighed)
    index = resample_indices(weighed.log_w, draws, common)
    values = {n: v[index] for n, v in weighed.values.items()}
    corrected = SharedDraws(
        values, diagnostics=diagnostics, log_w=weighed.log_w, resampled_index=index
    )
    return corrected, diagnostics


def _shared_values_at_noise(
    run: Fitted, guided: GuidedSites, single: ClientGroup, e: Tensor
) -> tuple[Tensors, Tensors]:
    """Return log densities [S, 1] and values [S, *p] of shared sites at their noise [S, d]."""
    none = e.new_zeros(len(e), 1, guided.normal_counts[1])
    with torch.no_grad():
        log_densities, q, p = log_densities_at(
            run.method, single, GivenNoise(run.method.shared, guided.normal_sites, e, none)
        )
    sites = site_draws_of_traces(q, p, len(e), 1).items()
    return log_densities, {
        n: v.value[:, 0]
        if guided.in_plate_by_site.get(n)
        else v.value[:, 0, 0]  # of a plate, all places
        for n, v in sites
        if matches(n, run.method.shared)
    }


def _one_blank_client(
    run: Fitted, bare: Federation, stateless: RoundState, ids: Tensor, spec: EvaluationSpec
) -> ClientGroup:
    """Return one client with rows of zeros and no state."""
    return group_clients(run.method, bare, stateless, ids, spec)[0]


def _outline_with_sizes(data: Federation, sizes: Tensor | Sequence[int]) -> Federation:
    """Return an outline of the clients, with other numbers of rows."""
    return outline(data.names, sizes, data.x.shape[1:], data.y.shape[1:], data.classes, data.dtype)


def shared_to_arviz(run: Fitted, draws: int = 1000, shared_draws: SharedDraws | None = None) -> Any:
    """Return posterior draws of the shared sites as ArviZ data, or None without shared sites.

    Args:
        run: a fitted run; it needs no rows.
        draws: number S of draws.
        shared_draws: draws of `corrected_shared`; None draws from the guide. The attribute
            "corrected" is its outcome, and sample_stats has pareto_k and importance_ess.
    """
    shared_draws = shared_draws or SharedDraws(shared_posterior(run, draws))
    if not shared_draws.values:
        return None
    values = shared_draws.values | derived_of(run.method, shared_draws.values)
    named, coords = axes_of(run.method)
    axes = {
        name: (*SAMPLE_DIMS, *named.get(name, [f"{name}_dim_{i}" for i in range(value.dim() - 1)]))
        for name, value in values.items()
    }
    groups = {"posterior": {n: v[None] for n, v in values.items()}}
    if (diagnostics := shared_draws.diagnostics) is not None:
        groups["sample_stats"] = {"pareto_k": diagnostics.k, "importance_ess": diagnostics.ess}
        axes |= dict.fromkeys(groups["sample_stats"], ("chain",))
        for name, value in diagnostics.shapes.items():
            groups["sample_stats"][f"pareto_k_{name}"] = value[None]
            axes[f"pareto_k_{name}"] = ("chain", ESTIMATE, *axes[name][2:])
    attrs: dict[str, Fact] = {
        "method": run.method.name or run.method.programs,
        "rounds": run.state.number,
        "seed": separate(run.seed).noise,
        "status": str(run.status),
        "corrected": shared_draws.outcome,
    }
    coords |= {ESTIMATE: list(ESTIMATES)} if diagnostics is not None and diagnostics.shapes else {}
    return inference_data(groups, axes, coords, None, attrs)
