"""Draws from the exact posterior, by importance resampling of draws from the guide.

The shared sites g have few variables, and clients are independent given g. So g is weighted by

    w_s  = p(g_s) prod_j L_js / r(g_s),    L_js = 1/K sum_k p(y_j, z_jsk | g_s) / q_j(z_jsk | g_s)

with K draws z_jsk of client j's own variables, one of which is kept with probability proportional
to its term of L_js. L_js is unbiased, so for any K these are importance weights of (g, z) under the
exact posterior (Andrieu and Roberts, "The pseudo-marginal approach for efficient Monte Carlo
computations", Annals of Statistics 2009), and clients only need to report L_js. K is chosen so that
all L_js together add little noise to w.

r is the guide at first, then a t distribution with the moments found so far (Cappe, Douc, Guillin,
Marin and Robert, "Adaptive importance sampling in general mixture classes", 2008), as the tails of
a guide may be too short. z is drawn around its mode given g, with the curvature there, found by
Newton's method; one draw in eight with twice the scale. Weights are Pareto smoothed; they are
reliable for a shape k up to 0.7; k is bounded by the largest weight's part of their sum, as a fit
to weights that are bounded can have any shape. Each mean, standard deviation and end of an interval
has a k of its own, see `tail_shapes`. Where clients share no site, each client is weighted
separately.

Where the guide selects among draws of the server, as that of likelihood factors, these are weighted
first, then t distributions add draws where the list has none; see `ProposalMixture` in
`pyrofl.inference.posteriors.proposals`.

By default draws are corrected, except those that `reason_against` names.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from pyrofl.data import Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Supervised
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.monitoring.progress import in_notebook
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors.axes import ClientAxes, Variable
from pyrofl.inference.posteriors.client_groups import group_clients, in_precision
from pyrofl.inference.posteriors.correction_outcomes import (
    advice,
    heavy_tail_reason,
    heavy_tail_warning,
    is_unreliable,
    reliable_draw_warnings,
    report_outcome,
)
from pyrofl.inference.posteriors.draws import Values
from pyrofl.inference.posteriors.group_weights import GroupImportanceSampler
from pyrofl.inference.posteriors.guided_sites import CannotCorrect, GuidedSites, NoUsableDraws
from pyrofl.inference.posteriors.importance_sampling import (
    MAX_RELIABLE_K,
    Request,
    TermsReply,
    Weighing,
    WeightedDraws,
    Weights,
)
from pyrofl.inference.posteriors.pointwise import ClientValues, pointwise_at
from pyrofl.inference.posteriors.proposals import ServerDraws, effective, resample_indices
from pyrofl.inference.posteriors.tail_shapes import ESTIMATE, shapes, smooth_with_shape
from pyrofl.tensors import Tensors
from pyrofl.turns import synchronized
from pyrofl.user_warnings import warn_user

# Minimum number of weighted values of g; at least 5/4 of the requested draws.
MIN_SHARED_DRAWS = 1000
MIN_CLIENT_DRAWS = 4000  # minimum number of weighted draws of a client without shared sites
MAX_NETWORK_PARAMETERS = 50  # largest number of network parameters that are corrected by default
# Relative distance of a bound; share of draws that are as near to it.
BOUND_DISTANCE, MAX_ROUNDED_FRACTION = 1e-12, 0.01
EXACT_POSTERIOR = "no: the draws are of the exact posterior"
T = TypeVar("T")


def reason_against(method: Method, data: Federation, ids: Tensor, spec: EvaluationSpec) -> str:
    """Return why draws should not be corrected by importance weights by default, or "".

    For such draws the correction is undefined, would violate privacy, or has no chance to succeed,
    as for thousands of network weights.
    """
    if getattr(method.views.get(spec.view_name(method)), "posterior", None):
        return "the server draws from its own posterior, which has no density"
    if method.metadata.privacy is not None:
        return "the run is private, and corrected draws would exceed its privacy budget"
    if not method.shared:
        return "clients share no random variable, and the server state is a point"
    if int(ids.max()) >= data.clients:
        return "a client is held out"
    if isinstance(method.model, Supervised):
        size = sum(shape.numel() for shape in method.model.net.shapes.values())
        if size > MAX_NETWORK_PARAMETERS:
            return (
                f"the network has {size:,} parameters, and at most {MAX_NETWORK_PARAMETERS} can be "
                "weighted"
            )
    return ""


@synchronized
def corrected(
    method: Method,
    data: Federation,
    state: RoundState,
    ids: Tensor,
    spec: EvaluationSpec,
    *,
    strict: bool = True,
    progress: bool = False,
    rows: bool = True,
) -> tuple[list[ClientValues] | None, Weights]:
    """Return clients' posterior draws corrected by importance weights, and weight diagnostics.

    Without `rows`, the draws have the group "posterior" alone, without the values of rows.
    """
    if method.shared and int(ids.max()) >= data.clients:
        raise ValueError(
            f"{data.names[int(ids.max())]!r} is held out; corrected=True needs training clients, "
            "as the weights of shared sites need their rows"
        )
    draws = spec.draws or 1
    everyone = torch.arange(data.clients) if method.shared else ids
    how = spec if method.shared else replace(spec, chunk_size=1)
    groups = group_clients(method, data, state, everyone, how)
    guided, tried = GuidedSites(method, groups[0]), tried_for(method, draws)
    parts = [GroupImportanceSampler(method, group, guided) for group in groups]
    common = stream(spec.seed, Stream.TEST, state.number)

    def relist(server: Tensors) -> None:
        """Let the guide select among draws of another server state."""
        others = group_clients(method, data, replace(state, server=server), everyone, how)
        relisted = GuidedSites(method, others[0])
        for part, other in zip(parts, others, strict=True):
            part.group, part.guided = part.group._replace(client=other.client), relisted

    if method.shared:
        near = server_draw_list(method, state, spec, guided)
        log_w, weights = _together(parts, common, tried, Bar(progress), near, relist)
    else:
        log_w, weights = _separately(parts, common, tried, Bar(progress))
    if not strict and bool(is_unreliable(weights).any()):
        return None, weights
    chosen = [resample_indices(one, draws, common) for one in log_w]
    values_by_client, latent = {}, guided.in_plate_by_site
    for part, at in zip(parts, chosen if len(chosen) > 1 else chosen * len(parts), strict=True):
        group = part.group
        for c, i in enumerate(group.ids):
            values = {
                n: Values(in_precision(v.value[at, c : c + 1], data.dtype), v.rows)
                for n, v in part.sites.items()
            }
            if rows:
                name = data.names[i]
                source = stream(spec.seed, Stream.ROWS, state.number, name)
                client, b = group.single_client(c, data), len(data.train[i])  # without padding
                latent_values = {
                    n: Values(v.value[:, :, :b], True) if v.rows else v
                    for n, v in values.items()
                    if n in latent
                }
                values_by_client[i] = pointwise_at(
                    method.model, method.shared, latent_values, client, source
                )
            else:
                values_by_client[i] = {
                    "posterior": {n: _placed(v, latent.get(n)) for n, v in values.items()}
                }
    pareto_shapes = _shapes(parts, log_w, weights.k, ids, latent)
    weights = weights._replace(shapes=pareto_shapes, at_bound=_at_bound(parts, log_w))
    return [values_by_client[i] for i in ids.tolist()], weights


def _shapes(
    parts: Sequence[GroupImportanceSampler],
    log_w: Sequence[Tensor],
    k: Tensor,
    ids: Tensor,
    in_plate: Mapping[str, bool],
) -> dict[str, Tensor]:
    """Return the Pareto shapes of estimates of the sites without rows, [4, C, *p]."""
    shapes_by_site: dict[str, list[Tensor]] = {}
    for i, part in enumerate(parts):
        weight_index = min(i, len(log_w) - 1)
        for n, v in part.sites.items():
            if not v.rows and part.group.ids:
                value = v.value if in_plate.get(n) else v.value[:, :, 0]
                shapes_by_site.setdefault(n, []).append(
                    shapes(value, log_w[weight_index], float(k[weight_index]))
                )
    order = torch.tensor([i for part in parts for i in part.group.ids])
    at = (ids[:, None] == order).int().argmax(1)
    return {n: torch.cat(v, 1)[:, at] for n, v in shapes_by_site.items()}


def _at_bound(parts: Sequence[GroupImportanceSampler], log_w: Sequence[Tensor]) -> str:
    """Return which site has many draws that are its bound up to rounding, or ""."""
    for i, part in enumerate(parts):
        w = log_w[min(i, len(log_w) - 1)].exp()
        for name, bound in part.guided.finite_bounds:
            if name in part.sites:
                near = (part.sites[name].value - bound).abs() < BOUND_DISTANCE * abs(bound)
                share = float((w @ near.flatten(1).to(w)).max())
                if share > MAX_ROUNDED_FRACTION:
                    return (
                        f"{share:.1%} of the draws of {name} are {bound:g} up to rounding, so that "
                        f"draws closer to {bound:g} are missing: parametrize the program by the "
                        f"distance from {bound:g}, or integrate {name} out of the likelihood"
                    )
    return ""


def server_draw_list(
    method: Method, state: RoundState, spec: EvaluationSpec, guided: GuidedSites
) -> ServerDraws | None:
    """Return the server's list of draws, if the guide selects one of these, and others are near."""
    listed = getattr(method.views[spec.view_name(method)], "listed", None)
    return listed(state.server) if listed and guided.num_server_draws else None


def weights_with_shapes(weighed: WeightedDraws) -> Weights:
    """Return the diagnostics of weighted draws with the Pareto shapes of their estimates."""
    k = float(weighed.weights.k)
    return weighed.weights._replace(
        shapes={n: shapes(v, weighed.log_w, k) for n, v in weighed.values.items()}
    )


def tried_for(method: Method, draws: int) -> int:
    """Return the minimum number of weighted draws, for a number of requested draws."""
    return max(MIN_SHARED_DRAWS if method.shared else MIN_CLIENT_DRAWS, int(1.25 * draws))


def _together(
    parts: Sequence[GroupImportanceSampler],
    common: Generator,
    count: int,
    shown: Bar,
    near: ServerDraws | None,
    relist: Callable[[Tensors], None],
) -> tuple[list[Tensor], Weights]:
    """Weigh draws of all clients together; return their log weights [S], and diagnostics."""

    def exchange(request: Request) -> TermsReply:
        """Return the terms of all groups at draws of the shared sites, and values of these."""
        if request.server is not None:
            relist(request.server)
        each = zip(shown(parts, len(request.noise)), request.draws, strict=True)
        terms = [part.together(request.noise, k, request.sets, request.more) for part, k in each]
        last = {n: v[-len(request.noise) :] for n, v in parts[0].shared_values().items()}
        return TermsReply(terms, last)

    rows = torch.tensor([part.group.client[2].mask.numel() for part in parts]).double()
    guided = parts[0].guided
    weighed = Weighing(guided, rows, exchange, common, count, near).together()
    return [weighed.log_w], weighed.weights


def _separately(
    parts: Sequence[GroupImportanceSampler], common: Generator, count: int, shown: Bar
) -> tuple[list[Tensor], Weights]:
    """Weigh draws of each client by itself; return its log weights [S], and diagnostics [C]."""
    weighted_parts = [
        smooth_with_shape(part.weigh_single_client(count)) for part in shown(parts, count)
    ]
    k, log_w = torch.tensor([k for _, k in weighted_parts]), [w for w, _ in weighted_parts]
    return log_w, Weights(k, torch.stack([effective(w) for w in log_w]), count)


def _placed(values: Values, in_plate: bool | None) -> Values:
    """Return values with the axis of a plate of the program as an axis of the site."""
    return Values(values.value.unsqueeze(2), values.rows) if in_plate else values  # [S, C, 1, *p]


class Bar:
    """Progress bar over clients, for the importance weighting of posterior draws."""

    def __init__(self, shown: bool) -> None:
        """Create a progress bar, shown only on request in a terminal or notebook."""
        self.shown = shown and (sys.stderr.isatty() or in_notebook())

    def __call__(
        self, parts: Sequence[GroupImportanceSampler], count: int
    ) -> Iterator[GroupImportanceSampler]:
        """Iterate over groups of clients with a progress bar labeled by the number of draws."""
        if not self.shown:
            yield from parts
            return
        from tqdm.auto import tqdm

        total = sum(len(part.group.ids) for part in parts)
        with tqdm(None, f"correcting {count} draws", total, unit="client", leave=False) as bar:
            for part in parts:
                yield part
                bar.update(len(part.group.ids))


@dataclass
class CorrectionOutcome:
    """Settings and outcome of the importance correction of a run's posterior draws.

    Attributes:
        wanted: True or False; None corrects draws where possible.
        progress: whether to show a progress bar.
        verdict: status of the run.
        outcome: "yes", or "no" and the reason.
        unreliable: why the weights show that the run's draws are far from the posterior, or "".
        shapes: site -> Pareto shapes of its estimates, [4, C, *p].
        notes: warnings about draws that are used, for `Run.warnings`.
    """

    wanted: bool | None
    progress: bool
    verdict: ConvergenceStatus
    outcome: str = "no: corrected=False"
    unreliable: str = ""
    shapes: Mapping[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def draws(
        self,
        method: Method,
        data: Federation,
        state: RoundState,
        axes: ClientAxes,
        spec: EvaluationSpec,
        rows: bool,
    ) -> tuple[list[ClientValues] | None, dict[str, Variable]]:
        """Return importance-corrected draws and weight diagnostics; None if not corrected.

        Args:
            method: as trained.
            data: the federation.
            state: the round.
            axes: the requested clients.
            spec: settings of the draws.
            rows: whether values of rows are needed.
        """
        reason = "the clients' rows are not available" if data.is_outline else ""
        reason = reason or reason_against(method, data, axes.ids, spec)
        how: dict[str, Any] = {"strict": bool(self.wanted), "progress": self.progress, "rows": rows}
        weigh = partial(corrected, method, data, state, axes.ids, spec, **how)
        together = bool(axes.shared)
        names = [] if together else [data.names[i] for i in axes.ids.tolist()]
        corrected_draws, weights = self.tried(method, state, spec, reason, names, weigh)
        if weights is None:
            return None, {}
        stats = {"pareto_k": weights.k, "importance_ess": weights.ess}
        self.shapes = weights.shapes
        return corrected_draws, {
            n: Variable(v[0], ()) if together else Variable(v, ("client",))
            for n, v in stats.items()
        }

    def warn_heavy_tails(self, posterior: Mapping[str, Variable]) -> None:
        """Warn if draws of the exact posterior have too heavy a tail for means and sds.

        Fewer than `MIN_SHARED_DRAWS` draws do not show it.
        """
        if self.outcome != EXACT_POSTERIOR:
            return
        pareto_shapes = {}
        for name, draws in ((n, v.value) for n, v in posterior.items()):
            if (count := len(draws)) >= MIN_SHARED_DRAWS:
                even = torch.full((count,), -math.log(count)).double()
                k = shapes(draws, even, -math.inf)
                # The standard error of a shape from a tail of 3 count^0.5 draws.
                error = (1 + k) / (3 * count**0.5) ** 0.5
                pareto_shapes[name] = k.where(k - error > MAX_RELIABLE_K, -math.inf)
        none = torch.zeros(1)
        if text := heavy_tail_warning(Weights(none, none, 0, shapes=pareto_shapes), "exact"):
            warn_user(text)
            self.notes.append(text)

    def pareto_shapes(self, posterior: Mapping[str, Variable]) -> dict[str, Variable]:
        """Return the Pareto shapes of the estimates of each variable of the posterior."""
        variables = {}
        for name, value in self.shapes.items():
            if name in posterior and "row" not in (axes := posterior[name].axes[1:]):
                entry_shapes = value if "client" in axes else value[:, 0]
                variables[f"pareto_k_{name}"] = Variable(entry_shapes, (ESTIMATE, *axes))
        return variables

    def tried(
        self,
        method: Method,
        state: RoundState,
        spec: EvaluationSpec,
        reason: str,
        names: Sequence[str],
        weigh: Callable[[], tuple[T | None, Weights]],
    ) -> tuple[T | None, Weights | None]:
        """Weigh draws unless there is a reason against it, and store the outcome.

        Args:
            method: as trained.
            state: the round.
            spec: settings of the draws.
            reason: why draws are not corrected by default, or "".
            names: names of clients that are weighted separately; empty for all together.
            weigh: returns corrected draws, None if they are unreliable, and the weights.

        Returns:
            The corrected draws and the weights, each None where there are none.
        """
        if self.wanted is False:
            return None, None
        strict = bool(self.wanted)
        if not strict and reason:
            self.outcome = f"no: {reason}"
            return None, None
        exact = getattr(method.views[spec.view_name(method)], "exact", None)
        if not strict and exact and exact(state.server):
            self.outcome = EXACT_POSTERIOR
            return None, None
        try:
            corrected_draws, weights = weigh()
        except CannotCorrect as error:
            if strict:
                raise
            self.outcome = f"no: {error.reason}"
            if isinstance(error, NoUsableDraws):
                self.unreliable = f"draws cannot be corrected, as {error.reason}"
            if not error.quiet:
                warn_user(
                    f"draws are not corrected: {error.reason}; draws of the guide are used, which "
                    f"may be too narrow or shifted; {error.advice or advice(self.verdict)}"
                )
            return None, None
        self.outcome = report_outcome(weights, names, strict, self.verdict)
        self.unreliable = heavy_tail_reason(weights) or weights.missing_mode
        self.notes += reliable_draw_warnings(weights, self.verdict)
        return corrected_draws, weights
