"""Draws from the posterior of every client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import pyro
import torch
from pyro import poutine
from torch import Generator, Tensor

from pyrofl.data import Federation
from pyrofl.inference.elbo import latent, traces
from pyrofl.inference.evaluation.asked import Asked, ModelAsked
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.loop.noise import ClientNoise
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Stream, stream
from pyrofl.tensors import Tensors, join_up, matches


class Values(NamedTuple):
    """What a site was in every draw."""

    value: Tensor  # [S, C, B or 1, *p]
    rows: bool  # whether every row has its own


class JointNoise(ClientNoise):
    """Draw the sites that clients share from one source, all others from each client's own."""

    def __init__(
        self, own: Sequence[Generator], shared: str, common: Callable[[], Generator]
    ) -> None:
        """Take a generator per client, patterns of shared sites, and what makes their source."""
        super().__init__(own)
        self.own, self.shared, self.common = own, shared, [common() for _ in own]

    def _pyro_sample(self, msg: Any) -> None:
        self.generators = self.common if matches(msg["name"], self.shared) else self.own
        super()._pyro_sample(msg)


def posterior(
    method: Method,
    data: Federation,
    state: Round,
    draws: int,
    *,
    ids: Tensor | None = None,
    **asked: Unpack[ModelAsked],
) -> Tensors:
    """Draw from the posterior of every client: site -> [S, C, *p], clients in the order of ids.

    Sites are the latent ones and those of `pyro.deterministic`, all from the same draws. Sites that
    clients share are equal for all of them. Sites that belong to rows are left out; `to_arviz` has
    them.

    Args:
        method: as trained.
        data: the federation.
        state: the round.
        draws: how many, S.
        ids: of clients; default all that train.
        asked: model (no ensemble), adapted, seed and chunk of `Asked`.

    Raises:
        ValueError: if a field is out of range, the view is an ensemble, or a site that clients
            share is not the same for all.
    """
    how = Asked.of({**asked, "draws": draws}, without="population part")
    return draw(method, data, state, torch.arange(data.clients) if ids is None else ids, how)


def draw(method: Method, data: Federation, state: Round, ids: Tensor, asked: Asked) -> Tensors:
    """Draw as `posterior` does."""
    draws, found = asked.draws or 1, []
    common = partial(stream, asked.seed, Stream.TEST, state.number)
    for some, received, local, noise in single(method, data, state, ids, asked):
        batch = data.batch(some)
        with pyro.validation_enabled(False), torch.no_grad():
            with JointNoise(noise, method.shared, common):
                q, _ = traces(method.guide, method.guide, received, local, batch, draws)
            known = poutine.replay(method.guide, trace=q)
            # What is asked for depends on no row, unless a latent site does.
            if not any(of_rows(site) for _, site in latent(q)):
                batch = replace(batch, x=batch.x[:, :1], y=batch.y[:, :1], mask=batch.mask[:, :1])
            _, p = traces(method.model, known, received, local, batch, draws)
        sites = named(q, p, draws, len(some))
        # From [S, C, 1, *p] to [C, S, *p]: clients first, to join chunks.
        own = {n: v.value.squeeze(2).transpose(0, 1) for n, v in sites.items() if not v.rows}
        found.append((some, own))
    known_ids, by_id = torch.cat([some for some, _ in found]).sort()
    back = by_id[torch.searchsorted(known_ids, ids)]
    drawn = {n: v[back].transpose(0, 1) for n, v in join_up(own for _, own in found).items()}
    for name, value in drawn.items():
        if matches(name, method.shared):
            agreed(name, value)
    return drawn


def agreed(name: str, value: Tensor) -> Tensor:
    """Return the draws [S, *p] of a site that all clients share, given [S, C, *p]."""
    if not torch.allclose(value, value[:, :1].expand_as(value), rtol=1e-4, atol=1e-5):
        raise ValueError(
            f"site {name!r} is declared as shared, and its draws differ between clients; expected "
            "a guide and a prior that read nothing of the client's own"
        )
    return value[:, 0]


def named(q: Any, p: Any, draws: int, clients: int) -> dict[str, Values]:
    """Return the sites that a person named: the guide's latent, the model's deterministic ones."""
    sites = {n: s for n, s in latent(q) if not s["infer"].get("is_auxiliary")}
    sites |= {n: s for n, s in p.nodes.items() if s.get("infer", {}).get("_deterministic")}
    return {n: Values(stacked(n, s["value"], draws, clients), of_rows(s)) for n, s in sites.items()}


def stacked(name: str, value: Tensor, draws: int, clients: int) -> Tensor:
    """Give a site's value [C, B or 1, *p] the axis of draws, if it has none: [S, C, B or 1, *p]."""
    if value.dim() > 2 and value.shape[:2] == (draws, clients):
        return value
    if value.dim() < 2 or len(value) != clients:
        raise ValueError(
            f"site {name!r} has shape {tuple(value.shape)}; expected {clients} clients, and an "
            "axis for rows, in front"
        )
    return value.expand(draws, *value.shape)


def of_rows(site: Any) -> bool:
    """Say whether a site lies inside `batch.rows()`."""
    return any(frame.name == "rows" for frame in site["cond_indep_stack"])
