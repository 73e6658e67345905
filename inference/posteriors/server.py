"""Posterior draws from a server's own posterior, used instead of the clients' guides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyro.poutine.messenger import Messenger

from pyrofl.data import Cohort
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.training.noise import is_unset_latent
from pyrofl.tensors import Tensors
from pyrofl.turns import synchronized


class SiteSubstitution(Messenger):
    """Pyro messenger that fixes latent sites to given values [S, C, *p], by site name."""

    def __init__(self, values: Tensors) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and is_unset_latent(msg):
            msg["value"], msg["done"] = self.values[msg["name"]].unsqueeze(2), True  # [S, C, 1, *p]


@synchronized
def server_sampler(
    method: Method, state: RoundState, spec: EvaluationSpec, of_prior: bool = False
) -> tuple[Callable[[Cohort], Tensors], EvaluationSpec]:
    """Return a function that draws latent sites from the server's own posterior.

    Also return the settings for draws of other sites.

    Draws are [S, C, *p]; there are none if the server has no posterior.

    Other sites are drawn from the main view.
    """
    program = getattr(method.views[spec.view_name(method)], "posterior", None)
    if program is None:
        return lambda cohort: {}, spec
    spec = replace(spec, model=method.main_view)
    if of_prior:
        return lambda cohort: {}, spec
    source = stream(spec.seed, Stream.TEST, state.number)
    shared, client_sites = program(state.server, spec.draws or 1, source)

    def drawn(cohort: Cohort) -> Tensors:
        ids = cohort.ids.cpu()
        # [S, C, *p]
        draws = {n: v[:, None].expand(-1, len(ids), *v.shape[1:]) for n, v in shared.items()}
        for n, v in client_sites.items():
            there = (ids < v.shape[1]).to(v).reshape(-1, *(1 for _ in v.shape[2:]))  # [C, 1, ...]
            draws[n] = v[:, ids.clamp(max=v.shape[1] - 1)] * there
        return {n: v.to(cohort.size) for n, v in draws.items()}

    return drawn, spec
