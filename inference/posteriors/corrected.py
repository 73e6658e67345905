"""Draws of the exact posterior: those of the guide, weighted by importance and drawn again.

What clients share, g, has few variables, and given g clients are independent. So g is weighted by

    w_s  = p(g_s) prod_j L_js / r(g_s),    L_js = 1/K sum_k p(y_j, z_jsk | g_s) / q_j(z_jsk | g_s)

with K draws z_jsk of client j's own variables, one of which is kept, by its share of L_js. L_js is
unbiased, so for any K these are importance weights of (g, z) under the exact posterior (Andrieu and
Roberts, "The pseudo-marginal approach for efficient Monte Carlo computations", Annals of Statistics
2009), and clients need tell L_js alone. K is such that all L_js together add little noise to w.

r is the guide at first, then a t distribution with the moments found so far (Cappe, Douc, Guillin,
Marin and Robert, "Adaptive importance sampling in general mixture classes", 2008), as the tails of
a guide may be too short. z is drawn around its mode given g, with the curvature there, found by
Newton's method; one in eight twice as far. Weights are smoothed by their Pareto tail, whose shape k
shows how far they can be trusted: they are good up to 0.7. Where clients share no site, each client
is weighted by itself.

By default draws are corrected, except those that `reason_against` names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.method import Method
from pyrofl.inference.monitoring.progress import in_notebook
from pyrofl.inference.monitoring.status import ConvergenceStatus
from pyrofl.inference.posteriors.axes import ClientAxes, Variable
from pyrofl.inference.posteriors.draws import Values
from pyrofl.inference.posteriors.importance_sampling import (
    ENOUGH,
    EVEN,
    CannotCorrect,
    Weighing,
    Weights,
)
from pyrofl.inference.posteriors.pointwise import Client, Pointwise, pointwise_at
from pyrofl.inference.programs import Supervised
from pyrofl.inference.seeds import Stream, stream
from pyrofl.turns import synchronized

TRIED = 1000  # values of g that are weighted, or five for four draws that are asked for
ALONE = 4000  # draws of a client that shares no site
BAD = 0.7  # Pareto k above which weights are not trusted
NETWORK = 50  # parameters of a network that are corrected by default
YES = "yes"


def reason_against(method: Method, data: Federation, ids: Tensor, asked: EvaluationSpec) -> str:
    """Return why draws are not corrected by default although nothing is wrong, or "".

    These are draws for which the correction is undefined, promises more than the method does, or is
    hopeless, as for thousands of weights of a network.
    """
    if getattr(method.views.get(asked.view(method)), "posterior", None):
        return "the server draws from its own posterior, which has no density"
    if method.metadata.privacy is not None:
        return "the run is private, and corrected draws would reveal more than it promises"
    if not any((*data.x.stride(), *data.y.stride())) and len(data.y) > 1:
        return "the clients' rows are not here"
    if not method.shared:
        return "clients share no random variable, and what the server holds is a point"
    if int(ids.max()) >= data.clients:
        return "a client is held out"
    if isinstance(method.model, Supervised):
        size = sum(shape.numel() for shape in method.model.net.shapes.values())
        if size > NETWORK:
            return f"the network has {size:,} parameters, and at most {NETWORK} can be weighted"
    return ""


@synchronized
def corrected(
    method: Method,
    data: Federation,
    state: RoundState,
    ids: Tensor,
    asked: EvaluationSpec,
    *,
    strict: bool = True,
    progress: bool = False,
) -> tuple[list[Pointwise] | None, Weights]:
    """Return what `pointwise` does of clients, in draws of the exact posterior, and weights."""
    if method.shared and int(ids.max()) >= data.clients:
        raise ValueError(
            f"{data.names[int(ids.max())]!r} is held out; expected corrected=True of clients that "
            "train, as it is from their rows that the shared sites are known"
        )
    draws = asked.draws or 1
    everyone = torch.arange(data.clients) if method.shared else ids
    some = single(method, data, state, everyone, replace(asked, chunk_size=1))
    known = {int(i): (received, local, data.batch(i)) for i, received, local, _ in some}
    clients = {i: known[i] for i in everyone.tolist()}  # in the order that was asked for
    key = (asked.seed, Stream.TEST, state.number)
    sources = {i: stream(*key, data.names[i]) for i in clients}
    tried = max(TRIED if method.shared else ALONE, int(1.25 * draws))
    weighing = Weighing(method, clients, sources, stream(*key), tried, Bar(progress))
    drawn, log_w, weights = weighing.together() if method.shared else weighing.apart()
    if not strict and bool(untrusted(weights).any()):
        return None, weights
    kept = [weighing.resampled(one, draws) for one in log_w]
    found = []
    for i, at in zip(ids.tolist(), kept if len(kept) > 1 else kept * len(ids), strict=True):
        values = {n: Values(v.value[at], v.rows) for n, v in drawn[i].items()}
        rows = stream(asked.seed, Stream.ROWS, state.number, data.names[i])
        found.append(pointwise_at(method.model, method.shared, values, clients[i], rows))
    return found, weights


class Bar:
    """Shows how many clients have weighted their draws."""

    def __init__(self, shown: bool) -> None:
        """Take whether to show anything; only a terminal and a notebook have a bar."""
        self.shown = shown and (sys.stderr.isatty() or in_notebook())

    def __call__(self, clients: Mapping[int, Client], count: int) -> Iterator[int]:
        """Yield the clients, which weight so many draws."""
        names: Iterable[int] = clients
        if self.shown:
            from tqdm.auto import tqdm

            names = tqdm(names, f"correcting {count} draws", unit="client", leave=False)
        yield from names


def untrusted(weights: Weights) -> Tensor:
    """Return which weights are not to be trusted, of all clients together, [1], or of each, [C]."""
    # Where weights are nearly equal there is no tail whose shape would show anything.
    even = weights.ess > EVEN * weights.tried
    return ((weights.k > BAD) & ~even) | (weights.ess < ENOUGH)


def statistics_of(
    weights: Weights, axes: ClientAxes, strict: bool, verdict: ConvergenceStatus
) -> tuple[dict[str, Variable], str]:
    """Return Pareto k and what draws are worth, and whether they are corrected; warn if not."""
    together, bad, corrected = bool(axes.shared), untrusted(weights), YES
    if bool(bad.any()):
        ids = axes.ids[bad].tolist() if not together else []
        whose = "" if together else f" of {', '.join(axes.data.names[i] for i in ids)}"
        k, ess = float(weights.k.nan_to_num(torch.inf, torch.inf).max()), float(weights.ess.min())
        why = (
            f"Pareto k is {'' if together else 'up to '}{k:.2f}, where at most {BAD} is good, and "
            f"{weights.tried:,} weighted draws are worth {ess:.0f}, where {ENOUGH} are enough"
        )
        state = "corrected draws cannot be trusted" if strict else "draws are not corrected"
        more = "" if strict else ": they are those of the guide, which may be too narrow or shifted"
        warnings.warn(f"{state}{whose}{more}; {why}; {advice(verdict)}", stacklevel=6)
        corrected = corrected if strict else f"no: {why}"
    stats = {"pareto_k": weights.k, "importance_ess": weights.ess}
    return {
        n: Variable(v[0], ()) if together else Variable(v, ("client",)) for n, v in stats.items()
    }, corrected


@dataclass
class Correction:
    """Whether to correct draws of a run, and whether they have been.

    Attributes:
        wanted: True or False; None corrects what can be corrected.
        progress: whether to show how far it is.
        verdict: on the run.
        outcome: "yes", or "no" and the reason.
    """

    wanted: bool | None
    progress: bool
    verdict: ConvergenceStatus
    outcome: str = "no: corrected=False"

    def draws(
        self,
        method: Method,
        data: Federation,
        state: RoundState,
        axes: ClientAxes,
        asked: EvaluationSpec,
    ) -> tuple[list[Pointwise] | None, dict[str, Variable]]:
        """Return corrected draws, None if they are to be those of the guide, and their quality."""
        if self.wanted is False:
            return None, {}
        strict = bool(self.wanted)
        if not strict and (reason := reason_against(method, data, axes.ids, asked)):
            self.outcome = f"no: {reason}"
            return None, {}
        how: dict[str, Any] = {"strict": strict, "progress": self.progress}
        try:
            found, weights = corrected(method, data, state, axes.ids, asked, **how)
        except CannotCorrect as error:
            if strict:
                raise
            self.outcome = f"no: {error.reason}"
            if not error.quiet:
                warnings.warn(
                    f"draws are not corrected: {error.reason}; they are those of the guide, which "
                    f"may be too narrow or shifted; {advice(self.verdict)}",
                    stacklevel=5,
                )
            return None, {}
        stats, self.outcome = statistics_of(weights, axes, strict, self.verdict)
        return found, stats


def advice(verdict: ConvergenceStatus) -> str:
    """Return what brings the guide nearer to the posterior, for a run with this verdict."""
    if verdict.kind in ("stuck", "diverged"):
        return f"the run is {verdict.kind}, see its verdict"
    if verdict.kind == "not converged":
        return "the run has not converged: fit more rounds"
    return (
        "the run has converged, so more rounds will not help: use a richer guide, such as "
        "pvi.hierarchical(..., guide=guides.flow(3)), write the model in other variables, or check "
        "it with pyrofl.reference.nuts"
    )
