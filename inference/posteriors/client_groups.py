"""Groups of clients whose posterior draws are weighted in one batch, and the densities of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Generator, Tensor

from pyrofl.data import Federation
from pyrofl.inference.definition.elbo import is_point, latent, normal_event_size, traces
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import single
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.posteriors.draws import JointNoise
from pyrofl.inference.posteriors.pointwise import Client, densities
from pyrofl.inference.training.noise import client_axis, is_unset_latent
from pyrofl.tensors import Tensors, cut, default_type, matches

MAX_GROUP_ROWS = 4096  # maximum rows of a group, including padding, unless it has a single client
SHORT_CLIENT_ROWS = 16  # number of rows up to which clients of any size are padded to each other
MIN_RELATIVE_ROWS = 2 / 3  # minimum rows of the clients of a group, relative to its longest


class ClientGroup(NamedTuple):
    """Clients in one batch, with their own random generators."""

    ids: list[int]
    client: Client  # inputs of the programs, with C clients
    generators: list[Generator]

    def single_client(self, c: int, data: Federation) -> Client:
        """Return the inputs of the programs for the c-th client alone, without padding."""
        batch, some = data.batch(torch.tensor([self.ids[c]])), slice(c, c + 1)
        received, local = (
            {n: in_precision(v, batch.size.dtype) for n, v in cut(part, some).items()}
            for part in self.client[:2]
        )
        return received, local, batch


class GivenNoise(Messenger):
    """Pyro messenger that computes normal latent sites from given standard normal noise.

    Args:
        shared: patterns of the shared sites.
        normal: names of the normal sites.
        noise: noise of the shared sites, [S, d].
        client_noise: noise of the client-specific sites, [S, C, n].
    """

    def __init__(
        self, shared: str, normal: frozenset[str], noise: Tensor, client_noise: Tensor
    ) -> None:
        super().__init__()
        self.shared, self.normal, self.draws = shared, normal, len(noise)
        self.unused_noise = {True: noise[:, None], False: client_noise}  # [S, 1, d], [S, C, n]

    def _pyro_sample(self, msg: Any) -> None:
        if is_unset_latent(msg) and msg["name"] in self.normal:
            fn, is_shared = msg["fn"], matches(msg["name"], self.shared)
            size = fn.event_shape.numel()
            noise = self.unused_noise[is_shared]
            part, self.unused_noise[is_shared] = noise.tensor_split([size], -1)
            # [S, C, 1, *p], or [S, 1, 1, *p] of a shared site.
            part = part.to(fn.mean).reshape(*part.shape[:2], 1, *fn.event_shape)
            msg["value"], msg["done"] = fn.mean + fn.stddev * part, True


def group_clients(
    method: Method, data: Federation, state: RoundState, ids: Tensor, spec: EvaluationSpec
) -> list[ClientGroup]:
    """Return clients in groups of similar numbers of rows, of at most `MAX_GROUP_ROWS` rows in all.

    Clients are alone if the programs of several clients cannot run in one batch.
    """
    max_clients = spec.chunk_size or len(ids)
    if max_clients > 1 and not is_batchable(method, data, state, ids, spec):
        max_clients = 1
    groups = []
    for part in groups_of_similar_size(data.sizes, ids, max_clients):
        how = replace(spec, chunk_size=len(part))
        for some, received, local, generators in single(method, data, state, part, how):
            group = ClientGroup(some.tolist(), (received, local, data.batch(some)), generators)
            groups.append(in_double_precision(method, group))
    return groups


def in_double_precision(method: Method, group: ClientGroup) -> ClientGroup:
    """Return the group in double precision, if its programs run so.

    A probability near 1 is 1 in single precision, where its density may have much of its mass.
    """
    received, local, batch = group.client
    columns = {name: getattr(batch, name) for name in ("x", "y", "size", "weights")}
    doubled: dict[str, Any] = {
        n: in_precision(v, torch.double) for n, v in columns.items() if v is not None
    }
    wide = replace(batch, **doubled)
    received, local = (
        {n: in_precision(v, torch.double) for n, v in some.items()} for some in (received, local)
    )
    doubled_group = group._replace(client=(received, local, wide))
    other = doubled_group._replace(generators=[Generator() for _ in group.ids])
    try:
        with using_client_generators(method, other), default_type(wide.size.dtype):
            traces(method.model, method.guide, *doubled_group.client, 2)
    except RuntimeError:  # the program has tensors of its own in single precision
        return group
    return doubled_group


def in_precision(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another precision if it is of floating point."""
    return value.to(dtype) if value.is_floating_point() else value


def groups_of_similar_size(sizes: Tensor, ids: Tensor, max_clients: int) -> list[Tensor]:
    """Return ids of clients in groups of at most `max_clients` clients of similar numbers of rows.

    Args:
        sizes: numbers of rows of all clients, [J].
        ids: ids of clients.
        max_clients: maximum number of clients in a group.
    """
    order, groups = ids[sizes[ids].argsort(descending=True, stable=True)], []
    while len(order):
        of = sizes[order]
        longest, similar = int(of[0]), len(of)
        if longest > SHORT_CLIENT_ROWS:
            similar = int((of >= longest * MIN_RELATIVE_ROWS).sum())
        fit = min(max_clients, similar, max(1, MAX_GROUP_ROWS // longest))
        groups.append(order[:fit])
        order = order[fit:]
    return groups


def is_batchable(
    method: Method, data: Federation, state: RoundState, ids: Tensor, spec: EvaluationSpec
) -> bool:
    """Return whether all sites are inside the client plate, and own ones normal or points.

    It is tested at the client with most rows.
    """
    ids = ids[data.sizes[ids].argsort(descending=True, stable=True)][:1]
    (_, received, local, _), *_ = single(method, data, state, ids, replace(spec, chunk_size=1))
    group = ClientGroup(ids.tolist(), (received, local, data.batch(ids)), [Generator()])
    with using_client_generators(method, group):
        q, p = traces(method.model, method.guide, *group.client, 2)
    sites = (site for trace in (q, p) for site in trace.nodes.values())
    drawn = [s for s in sites if s["type"] == "sample" and not site_is_subsample(s)]
    inside = all(client_axis(site) is not None for site in drawn)
    return inside and all(is_point(s["fn"]) or normal_event_size(s["fn"]) for _, s in latent(q))


@contextmanager
def using_client_generators(method: Method, group: ClientGroup) -> Iterator[None]:
    """Sample sites without given noise by the clients' generators, as a context manager."""
    generators = iter(group.generators)
    noise = JointNoise(group.generators, method.shared, generators.__next__)
    with pyro.validation_enabled(False), noise:
        yield


def log_densities_at(
    method: Method, group: ClientGroup, given_noise: GivenNoise
) -> tuple[Tensors, Any, Any]:
    """Return log densities [S, C] of sites at given noise, with the traces of guide and model."""
    batch, draws = group.client[2], given_noise.draws
    with using_client_generators(method, group), given_noise, default_type(batch.size.dtype):
        q, p = traces(method.model, method.guide, *group.client, draws)
    zero = batch.size.new_zeros(draws, len(batch))
    with pyro.validation_enabled(False):  # where a value is NaN, so is the density
        log_densities = densities(method.shared, q, p, zero)
    return {n: v.expand_as(zero).double() for n, v in log_densities.items()}, q, p
