"""Draws from each client's posterior, of latent and deterministic sites.

Sites of rows are computed for one client at a time, without padding; `to_arviz` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack

import pyro
import torch
from pyro import poutine
from torch import Generator, Tensor

from pyrofl.arguments import Count, checked
from pyrofl.data import Federation
from pyrofl.inference.definition.elbo import is_deterministic, latent, traces
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.evaluation.specification import EvaluationSpec, ModelOptions
from pyrofl.inference.posteriors.server import SiteSubstitution, server_sampler
from pyrofl.inference.training.noise import ClientNoise, is_unset_latent
from pyrofl.returned import calling
from pyrofl.tensors import Tensors, join_up, matches
from pyrofl.turns import synchronized


class Values(NamedTuple):
    """Draws of one site, [S, C, B or 1, *p], and whether each row has its own value."""

    value: Tensor  # [S, C, B or 1, *p]
    rows: bool  # whether every row has its own value


class JointNoise(ClientNoise):
    """Pyro messenger that draws shared sites with the same random numbers for all clients.

    Other sites are drawn with each client's own generator. A site that selects among draws of the
    server selects each of them once before it selects one again.
    """

    def __init__(
        self, client_generators: Sequence[Generator], shared: str, common: Callable[[], Generator]
    ) -> None:
        super().__init__(client_generators)
        self.client_generators, self.shared, self.common = (
            client_generators,
            shared,
            [common() for _ in client_generators],
        )

    def _pyro_sample(self, msg: Any) -> None:
        self.generators = (
            self.common if matches(msg["name"], self.shared) else self.client_generators
        )
        is_selection = msg["infer"].get("listed") and is_unset_latent(msg)
        super()._pyro_sample(msg)
        if is_selection:
            shift = torch.stack([torch.rand((), generator=g) for g in self.generators])  # [C]
            msg["value"] = spaced_quantiles(msg["value"], shift[:, None].to(msg["value"]))


def spaced_quantiles(noise: Tensor, shift: Tensor) -> Tensor:
    """Return quantiles of the standard normal in the order of noise [S, *p], evenly spaced.

    Each is standard normal, as the first is shifted by a uniform part `shift` [*p] of the distance.
    """
    ranks = noise.argsort(0).argsort(0)
    quantiles: Tensor = torch.special.ndtri((ranks + shift) / len(noise))
    return quantiles


@checked
def posterior(
    method: Method,
    data: Federation,
    state: RoundState,
    draws: Count,
    *,
    ids: Tensor | None = None,
    **asked: Unpack[ModelOptions],
) -> Tensors:
    """Draw S samples from each client's posterior; return site name -> [S, C, *p].

    Sites are latent and `pyro.deterministic` ones, from the same draws. Shared sites are equal for
    all clients. Sites of rows are left out; `to_arviz` has them.

    Args:
        method: as trained.
        data: the federation.
        state: the round.
        draws: number S of draws.
        ids: ids of clients; default the training clients.
        asked: model (no ensemble), adaptation, seed and chunk_size of `EvaluationSpec`.

    Returns:
        The draws of each site, with clients in the order of `ids`.

    Raises:
        ValueError: if a field is out of range, the model is an ensemble, or draws of a shared site
            differ between clients.
    """
    how = draws_specification(method, {**asked, "draws": draws})
    return draw(method, data, state, those(data, ids), how)


def draws_specification(method: Method, options: Mapping[str, Any]) -> EvaluationSpec:
    """Return the validated settings of posterior draws, given as keyword arguments.

    A posterior of the server cannot be adapted.
    """
    how = EvaluationSpec.of(options, excluded=("population", "part"))
    how = replace(how, model=method.posterior_view if how.model is None else how.model)
    if how.adaptation != "none" and getattr(
        method.views.get(how.view_name(method)), "posterior", None
    ):
        raise ValueError(
            f"adaptation is {how.adaptation!r}; only 'none' is valid, as the posterior of "
            f"{how.model!r} belongs to the server"
        )
    return how


def those(data: Federation, ids: Tensor | None) -> Tensor:
    """Return the validated client ids, by default those of all training clients."""
    if ids is None:
        return torch.arange(data.clients)
    most = len(data.train) - 1
    if torch.is_tensor(ids) and ids.dim() == 1 and ids.dtype in (torch.int64, torch.int32):
        id_list = ids.tolist()
        if (
            id_list
            and len(set(id_list)) == len(id_list)
            and min(id_list) >= 0
            and max(id_list) <= most
        ):
            return ids.long()
    shown = f"{ids.dtype} {ids.tolist()}" if torch.is_tensor(ids) else f"a {type(ids).__name__}"
    raise ValueError(f"ids is {shown}; expected a tensor of distinct whole numbers, 0 to {most}")


@synchronized
def draw(
    method: Method, data: Federation, state: RoundState, ids: Tensor, spec: EvaluationSpec
) -> Tensors:
    """Draw from each client's posterior, with settings already validated; see `posterior`."""
    draws, chunks = spec.draws or 1, []
    common = partial(stream, spec.seed, Stream.TEST, state.number)
    server, spec = server_sampler(method, state, spec)
    for some, received, local, noise in single(method, data, state, ids, spec):
        batch = data.batch(some)
        server_draws = server(batch.cohort)
        with calling("program"), pyro.validation_enabled(False), torch.no_grad():
            with JointNoise(noise, method.shared, common), SiteSubstitution(server_draws):
                q, _ = traces(method.guide, method.guide, received, local, batch, draws)
            replayed = poutine.replay(method.guide, trace=q)
            # The requested sites depend on no row, unless a latent site does.
            if not any(is_per_row(site) for _, site in latent(q)):
                batch = replace(batch, x=batch.x[:, :1], y=batch.y[:, :1], mask=batch.mask[:, :1])
            _, p = traces(method.model, replayed, received, local, batch, draws)
        sites = named_draws(q, p, draws, len(some))
        # From [S, C, 1, *p] to [C, S, *p]: clients first, to join chunks.
        client_draws = {
            n: v.value.squeeze(2).transpose(0, 1) for n, v in sites.items() if not v.rows
        }
        chunks.append(
            (some, {n: v.transpose(0, 1) for n, v in server_draws.items()} | client_draws)
        )
    drawn_ids, by_id = torch.cat([some for some, _ in chunks]).sort()
    back = by_id[torch.searchsorted(drawn_ids, ids)]
    drawn = {
        n: v[back].transpose(0, 1)
        for n, v in join_up(client_draws for _, client_draws in chunks).items()
    }
    for name, value in drawn.items():
        if matches(name, method.shared):
            common_draws(name, value)
    return drawn


@synchronized
def find_client_dependence(
    method: Method, data: Federation, state: RoundState, ids: Tensor, spec: EvaluationSpec
) -> dict[str, bool]:
    """Return for each deterministic site whether it depends on values of a single client.

    Own values are the client's latent sites, its rows and its client state; shared sites and
    constants are not. Dependence is determined by gradients.
    """
    server, spec = server_sampler(method, state, spec)
    (_, received, local, noise), *_ = single(method, data, state, ids[:1], replace(spec, draws=2))
    batch = data.batch(ids[:1])
    server_draws = {n: v[:2] for n, v in server(batch.cohort).items()}
    common = partial(stream, spec.seed, Stream.TEST, state.number)
    with calling("program"), pyro.validation_enabled(False):
        with (
            torch.no_grad(),
            JointNoise(noise, method.shared, common),
            SiteSubstitution(server_draws),
        ):
            q, _ = traces(method.guide, method.guide, received, local, batch, 2)
        client_sites = {
            n: s for n, s in latent(q) if not matches(n, method.shared) and n not in server_draws
        }
        leaves: list[Tensor] = []
        for site in client_sites.values():
            site["value"] = _followed(site["value"], leaves)
        local = {n: _followed(v, leaves) for n, v in local.items()}
        batch = replace(batch, x=_followed(batch.x, leaves))
        replayed = poutine.replay(method.guide, trace=q)
        with torch.enable_grad():
            _, p = traces(method.model, replayed, received, local, batch, 2)
    return {n: _reached(s["value"], leaves) for n, s in p.nodes.items() if is_deterministic(s)}


def _followed(value: Tensor, leaves: list[Tensor]) -> Tensor:
    """Return a copy of a tensor that tracks gradients; append its leaf tensor to `leaves`."""
    if not value.is_floating_point():
        return value
    leaves.append(value.detach().clone().requires_grad_())
    return leaves[-1].clone()  # a program may write into it


def _reached(value: Tensor, leaves: list[Tensor]) -> bool:
    """Return whether a tensor depends on any of the given leaf tensors, by autograd."""
    if not value.requires_grad or not leaves:
        return False
    slopes = torch.autograd.grad(value.sum(), leaves, allow_unused=True, retain_graph=True)
    return any(slope is not None for slope in slopes)


def common_draws(name: str, value: Tensor) -> Tensor:
    """Return a shared site's draws [S, *p]; raise ValueError if they differ between clients."""
    if not agrees(value):
        raise ValueError(
            f"site {name!r} is declared as shared, but its draws differ between clients; its guide "
            "and prior must not read tensors or rows of a single client"
        )
    return value[:, 0]


def agrees(value: Tensor) -> bool:
    """Return whether a site's draws [S, C, *p] are equal for all clients, up to rounding."""
    return torch.allclose(value, value[:, :1].expand_as(value), rtol=1e-4, atol=1e-5)


def named_draws(q: Any, p: Any, draws: int, clients: int) -> dict[str, Values]:
    """Return draws of the guide's latent sites and the model's deterministic sites, by name."""
    sites = {n: s for n, s in latent(q) if not s["infer"].get("is_auxiliary")}
    sites |= {n: s for n, s in p.nodes.items() if is_deterministic(s)}
    return {name: with_draw_axes(name, site, draws, clients) for name, site in sites.items()}


def with_draw_axes(name: str, site: Any, draws: int, clients: int) -> Values:
    """Return the values of a site with axes of draws, clients and rows, [S, C, B or 1, *p]."""
    value = site["value"]
    if value.dim() < 3 or value.shape[:2] != (draws, clients):  # there is no axis of draws
        if value.dim() < 2 or len(value) != clients:
            raise ValueError(
                f"site {name!r} has shape {tuple(value.shape)}; expected [{clients}, rows or "
                "1, ...], with the axes of clients and rows first"
            )
        value = value.expand(draws, *value.shape)
    # The axis of a plate in the program is an axis of the site.
    return Values(value.unsqueeze(2) if is_in_plate(site) else value, is_per_row(site))


def is_in_plate(site: Any) -> bool:
    """Return whether a site lies inside a Pyro plate of the program at the axis of the rows."""
    return any(f.dim == -1 and f.name != "rows" for f in site["cond_indep_stack"])


def is_per_row(site: Any) -> bool:
    """Return whether a site lies inside the Pyro plate over rows, `batch.rows()`."""
    return any(frame.name == "rows" for frame in site["cond_indep_stack"])
