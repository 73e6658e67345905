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
Newton's method among the values of the guide; one in four twice as far. Weights are smoothed by
their Pareto tail, whose shape k tells how far to trust them: up to 0.7 all is well. Where clients
share no site, each is weighted by itself.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.evaluation.asked import Asked
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.posteriors.axes import ClientAxes, Variable
from pyrofl.inference.posteriors.draws import Values
from pyrofl.inference.posteriors.pointwise import Pointwise, pointwise_at
from pyrofl.inference.posteriors.weighing import EVEN, Weighing, Weights
from pyrofl.inference.seeds import Stream, stream
from pyrofl.turns import in_turn

TRIED = 4000  # values of g that are weighted, or two for each draw that is asked for
BAD, FEW = 0.7, 400  # Pareto k above, and draws below, which weights are not trusted: .1 sd


@in_turn
def corrected(
    method: Method, data: Federation, state: Round, ids: Tensor, asked: Asked
) -> tuple[list[Pointwise], Weights]:
    """Return what `pointwise` does of clients, in draws of the exact posterior, and their weights.

    Raises:
        ValueError: if a client has too many variables, or does not train where sites are shared.
    """
    if method.shared and int(ids.max()) >= data.clients:
        raise ValueError(
            f"{data.names[int(ids.max())]!r} is held out; expected corrected=True of clients that "
            "train, as it is from their rows that the shared sites are known"
        )
    draws = asked.draws or 1
    everyone = torch.arange(data.clients) if method.shared else ids
    some = single(method, data, state, everyone, replace(asked, chunk=1))
    known = {int(i): (received, local, data.batch(i)) for i, received, local, _ in some}
    clients = {i: known[i] for i in everyone.tolist()}  # in the order that was asked for
    key = (asked.seed, Stream.TEST, state.number)
    sources = {i: stream(*key, data.names[i]) for i in clients}
    weighing = Weighing(method, clients, sources, stream(*key), max(TRIED, 2 * draws))
    drawn, log_w, weights = weighing.together() if method.shared else weighing.apart()
    kept = [weighing.resampled(one, draws) for one in log_w]
    found = []
    for i, at in zip(ids.tolist(), kept if len(kept) > 1 else kept * len(ids), strict=True):
        values = {n: Values(v.value[at], v.rows) for n, v in drawn[i].items()}
        rows = stream(asked.seed, Stream.ROWS, state.number, data.names[i])
        found.append(pointwise_at(method.model, method.shared, values, clients[i], rows))
    return found, weights


def statistics_of(weights: Weights, axes: ClientAxes) -> dict[str, Variable]:
    """Return Pareto k and what draws are worth; warn if these are not to be trusted."""
    together = bool(axes.shared)
    # Where weights are nearly equal there is no tail whose shape would tell anything.
    even = weights.ess > EVEN * weights.tried
    if bad := int((((weights.k > BAD) & ~even) | (weights.ess < FEW)).sum()):
        whose = "all clients together" if together else f"{bad} of {len(weights.k)} clients"
        warnings.warn(
            f"corrected draws of {whose} are not to be trusted: Pareto k is up to "
            f"{float(weights.k.max()):.2f}, where {BAD} is good, and they are worth "
            f"{float(weights.ess.min()):.0f} draws; more rounds may bring the guide nearer",
            stacklevel=5,
        )
    told = {"pareto_k": weights.k, "importance_ess": weights.ess}
    return {
        n: Variable(v[0], ()) if together else Variable(v, ("client",)) for n, v in told.items()
    }
