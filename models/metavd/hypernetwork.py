"""Where a client's spreads come from: a hypernetwork, one for all clients, or a row of its own.

The server holds it all. A client receives its spreads s_m, trains them, and sends them back; the
server learns from the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Generator, Size, Tensor
from torch.nn.functional import leaky_relu, linear
from torch.nn.utils import get_total_norm

from pyrofl.data import Who
from pyrofl.inference.optim import Optim, sgd
from pyrofl.inference.servers.averages import Combine, mean
from pyrofl.inference.servers.pooled import descend
from pyrofl.tensors import Tensors, pick, role, spread_out, under

PSI, TABLE, OWN = "server/psi", "server/embedding", "server/spread"

DECAY = 5e-4  # of the weights of all that the server learns about spreads


def no_tensors(*_: object) -> Tensors:
    """Return nothing."""
    return {}


@dataclass(frozen=True)
class Source:
    """A source of spreads; every function runs at the server.

    Attributes:
        start: (generator, clients) -> what the server holds for it, names under "server/".
        read: (server, ids [C]) -> spreads [C, *p] by the names of the weights. Clients that never
            trained, whose ids are larger, get what is common.
        slope: (server, who, found) -> pseudo-gradient of what the server holds, after clients
            found the spreads [C, *p].
        store: (server, who, found) -> what the server holds anew without a gradient step.
        optims: the optimisers of what `slope` is about, by patterns of its names.
        per_client: patterns of what the server holds of every client, one row for each.
    """

    start: Callable[[Generator, int], Tensors]
    read: Callable[[Tensors, Tensor], Tensors]
    slope: Callable[[Tensors, Who, Tensors], Tensors] = no_tensors
    store: Callable[[Tensors, Who, Tensors], Tensors] = no_tensors
    optims: Mapping[str, Optim] = field(default_factory=dict)
    per_client: str = ""


def hypernetwork(
    first: Tensors,
    hidden: Sequence[int],
    embedding: int | None,
    bound: float,
    optims: tuple[Optim, Optim],
) -> Source:
    """Let a network h_psi map the embedding e_m of each client to its spreads.

    s_m = clamp(h_psi(e_m), -bound, bound) + first. The server climbs the vector-Jacobian products
    psi <- psi - lr sum_m g_m J_psi^T (s_m^server - s_m^local), and the same for e_m.

    Args:
        first: [*p], spreads at the start.
        hidden: widths of the fully connected hidden layers, leaky ReLU of slope 0.1.
        embedding: length of e_m; None is 1 + clients // 4.
        bound: largest change from the start; beyond it h has no gradient.
        optims: of psi and of the embeddings.
    """
    shapes = {n: v.shape for n, v in first.items()}
    offset = _flat({n: v[None] for n, v in first.items()})
    d = offset.shape[1]

    def start(generator: Generator, clients: int) -> Tensors:
        length = 1 + clients // 4 if embedding is None else embedding
        psi: Tensors = {}
        for i, (a, b) in enumerate(pairwise([length, *hidden, d])):
            xavier = (2 / (a + b)) ** 0.5
            psi[f"weight{i}"] = xavier * torch.randn(b, a, generator=generator)
            psi[f"bias{i}"] = 1e-3 * torch.randn(b, generator=generator)
        return under(PSI, psi) | {TABLE: torch.randn(clients, length, generator=generator)}

    def read(server: Tensors, ids: Tensor) -> Tensors:
        psi, value = role(PSI, server), _rows(server[TABLE], ids)
        for i in range(len(hidden) + 1):
            value = leaky_relu(value, 0.1) if i else value
            value = linear(value, psi[f"weight{i}"], psi[f"bias{i}"])
        return _shaped(value.clamp(-bound, bound) + offset.to(value), shapes)

    def slope(server: Tensors, who: Who, found: Tensors) -> Tensors:
        share = who.size / who.size.sum()
        with torch.enable_grad():
            names = [TABLE, *under(PSI, role(PSI, server))]
            leaves = {n: server[n].detach().requires_grad_() for n in names}
            here = _flat(read(leaves, who.ids))
            gap = here.detach() - _flat({n: found[n] for n in shapes})
            value = (share[:, None] * gap * here).sum()
            return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))

    moved = {f"{PSI}/*": optims[0], TABLE: optims[1]}
    return Source(start, read, slope, optims=moved, per_client=f"{TABLE} *{TABLE}:*")


def shared(first: Tensors, optim: Optim, combine: Combine = mean) -> Source:
    """Give all clients the same spreads, averaged like the rest of the model (naive VD).

    Args:
        first: [*p], spreads at the start.
        optim: of the spreads.
        combine: how the clients' become one.
    """

    def start(generator: Generator, clients: int) -> Tensors:
        return under(OWN, {n: torch.zeros_like(v) for n, v in first.items()})

    def read(server: Tensors, ids: Tensor) -> Tensors:
        # The server holds the change since the start, so that weight decay leads back there.
        change = role(OWN, server)
        return spread_out({n: v + first[n].to(v) for n, v in change.items()}, len(ids))

    def slope(server: Tensors, who: Who, found: Tensors) -> Tensors:
        now = {n: v[0] for n, v in read(server, who.ids[:1]).items()}
        return under(OWN, {n: now[n] - v for n, v in combine(found, who.size, now).items()})

    return Source(start, read, slope, optims={f"{OWN}/*": optim})


def rows(first: Tensors) -> Source:
    """Keep independent spreads for every client that trains (EnsembleVD).

    A client that never trained gets the mean over those that may.

    Args:
        first: [*p], spreads at the start.
    """

    def start(generator: Generator, clients: int) -> Tensors:
        return under(OWN, spread_out(first, clients))

    def read(server: Tensors, ids: Tensor) -> Tensors:
        return {n: _rows(v, ids) for n, v in role(OWN, server).items()}

    def store(server: Tensors, who: Who, found: Tensors) -> Tensors:
        return {n: server[n].index_copy(0, who.ids, v) for n, v in under(OWN, found).items()}

    return Source(start, read, store=store, per_client=f"{OWN}/*")


NONE = Source(start=no_tensors, read=no_tensors)
"""No spreads at all."""


def source(
    kind: str,
    first: Tensors,
    lr: float,
    bound: float,
    hidden: Sequence[int] = (200, 200, 200),
    embedding: int | None = None,
    combine: Combine = mean,
) -> Source:
    """Return the source of one of MetaVD's variants, with the optimisers of its authors' code.

    Args:
        kind: "meta", "vd" or "ensemble".
        first: [*p], spreads at the start.
        lr: learning rate of the server.
        bound: see `hypernetwork`, as for the others.
        hidden: widths of its hidden layers.
        embedding: length of its embeddings.
        combine: see `shared`.
    """
    slow, table = (sgd(lr, m, weight_decay=DECAY) for m in (0.6, 0.3))
    if kind == "meta":
        return hypernetwork(first, hidden, embedding, bound, (slow, table))
    return shared(first, slow, combine) if kind == "vd" else rows(first)


def learn(server: Tensors, gradient: Tensors, optims: Mapping[str, Optim], clip: float) -> Tensors:
    """Step along pseudo-gradients [*p], each group with its optimiser.

    Args:
        server: holds the values, and the optimisers' memory.
        gradient: of all groups; a longer norm of them together is scaled down.
        optims: patterns of names -> optimiser.
        clip: that norm.

    Returns:
        New values and memory.
    """
    shrink = (clip / (get_total_norm(list(gradient.values())) + 1e-6)).clamp(max=1)
    moved: Tensors = {}
    for names, optim in optims.items():
        moved |= descend(optim, server, {n: v * shrink for n, v in pick(gradient, names).items()})
    return moved


def _rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a table [J, *p]; the mean row for ids beyond it."""
    known = (ids < len(table)).reshape(-1, *(1 for _ in table.shape[1:]))
    return torch.where(known, table[ids.clamp(max=len(table) - 1)], table.mean(0))


def _flat(tensors: Tensors) -> Tensor:
    """Lay tensors [C, *p] side by side: [C, d]."""
    return torch.cat([v.reshape(len(v), -1) for v in tensors.values()], 1)


def _shaped(value: Tensor, shapes: Mapping[str, Size]) -> Tensors:
    """Undo `_flat`."""
    parts = value.split([shape.numel() for shape in shapes.values()], 1)
    return {
        n: part.reshape(len(value), *shape)
        for (n, shape), part in zip(shapes.items(), parts, strict=True)
    }
