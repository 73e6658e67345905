"""Sources of the clients' dropout parameters: hypernetwork, shared vector, separate vectors.

The server holds it all. A client receives its spreads s_m, trains them, and sends them back; the
server learns from the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import leaky_relu, linear
from torch.nn.utils import get_total_norm

from pyrofl.data import Cohort, Federation
from pyrofl.inference.definition.aggregator import descend
from pyrofl.inference.definition.averages import Combine, mean
from pyrofl.inference.definition.metadata import PER_CLIENT, REPORTED, MetadataByPattern
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.optim import Optim
from pyrofl.inference.definition.seeds import Seed
from pyrofl.inference.engine.origin import refuse_other_clients
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.training.phases import train
from pyrofl.tensors import Tensors, add_trailing_axes, cut, pick, role, spread_out, under

PSI, TABLE, OWN = "server/psi", "server/embedding", "server/spread"
MAX_OUTPUTS = 2  # sets of clients: one that sizes a chunk, and those that train


@dataclass(frozen=True)
class DropoutSource:
    """Server functions that generate and update the clients' dropout parameters."""

    # (generator, clients) -> what the server holds for it, names under "server/"
    start: Callable[[Generator, int], Tensors] = lambda *_: {}
    # (server, ids [C]) -> spreads [C, *p]; ids that never trained, which are larger, get a mean
    read: Callable[[Tensors, Tensor], Tensors] = lambda *_: {}
    # (server, cohort, found [C, *p]) -> pseudo-gradient of what it holds, given what clients found
    slope: Callable[[Tensors, Cohort, Tensors], Tensors] = lambda *_: {}
    # (server, cohort, found [C, *p]) -> what it holds anew without a gradient step
    store: Callable[[Tensors, Cohort, Tensors], Tensors] = lambda *_: {}
    optims: Mapping[str, Optim] = field(default_factory=dict)  # by patterns of names in `slope`
    metadata: MetadataByPattern = field(default_factory=dict)  # of what the server holds


def hypernetwork(
    first: Tensors,  # [*p], spreads at the start
    hidden: Sequence[int],  # widths of the fully connected layers, leaky ReLU of slope 0.1
    embedding: int | None,  # length of e_m; None is 1 + clients // 4
    bound: float,  # largest change from the start; beyond it h has no gradient
    optims: tuple[Optim, Optim],  # of psi and of the embeddings
) -> DropoutSource:
    """Return server functions of a hypernetwork that predicts each client's dropout parameters.

    The hypernetwork h_psi maps a client's embedding e_m to its parameters s_m:

    s_m = clamp(h_psi(e_m), -bound, bound) + first. The server climbs the vector-Jacobian products
    psi <- psi - lr sum_m g_m J_psi^T (s_m^server - s_m^local), and the same for e_m.
    """
    sizes = [v.numel() for v in first.values()]

    def start(generator: Generator, clients: int) -> Tensors:
        """Draw initial weights of the hypernetwork and embeddings of all clients."""
        length = 1 + clients // 4 if embedding is None else embedding
        psi: Tensors = {}
        for i, (a, b) in enumerate(pairwise([length, *hidden, sum(sizes)])):
            xavier = (2 / (a + b)) ** 0.5
            psi[f"weight{i}"] = xavier * torch.randn(b, a, generator=generator)
            psi[f"bias{i}"] = 1e-3 * torch.randn(b, generator=generator)
        return under(PSI, psi) | {TABLE: torch.randn(clients, length, generator=generator)}

    def predict(held: Tensors, ids: Tensor) -> Tensors:
        """Return the dropout parameters that the hypernetwork predicts: name -> [C, *p]."""
        psi, value = role(PSI, held), rows_of(held[TABLE], ids)
        for i in range(len(hidden) + 1):
            value = leaky_relu(value, 0.1) if i else value
            value = linear(value, psi[f"weight{i}"], psi[f"bias{i}"])
        parts = zip(first.items(), value.clamp(-bound, bound).split(sizes, 1), strict=True)
        return {n: part.reshape(len(ids), *v.shape) + v.to(part) for (n, v), part in parts}

    latest = LatestOutputs(predict)

    def read(server: Tensors, ids: Tensor) -> Tensors:
        """Return the dropout parameters of the given clients, computed once for equal weights."""
        held = pick(server, f"{TABLE} {PSI}/*")
        if any(v.requires_grad for v in held.values()) or torch.is_inference_mode_enabled():
            return predict(held, ids)
        return {n: v.detach() for n, v in latest(held, ids)[1].items()}

    def slope(server: Tensors, cohort: Cohort, client_tensors: Tensors) -> Tensors:
        """Return pseudo-gradients for the hypernetwork's weights and the client embeddings."""
        leaves, here = latest(pick(server, f"{TABLE} {PSI}/*"), cohort.ids)
        share = cohort.size / cohort.size.sum()
        gaps = [
            (v.detach() - client_tensors[n]).mul_(add_trailing_axes(share, v))
            for n, v in here.items()
        ]
        slopes = torch.autograd.grad([*here.values()], [*leaves.values()], gaps, retain_graph=True)
        return dict(zip(leaves, slopes, strict=True))

    moved = {f"{PSI}/*": optims[0], TABLE: optims[1]}
    return DropoutSource(start, read, slope, optims=moved, metadata={TABLE: (PER_CLIENT, REPORTED)})


class Outputs(NamedTuple):
    """Outputs of a hypernetwork for some clients, with the graph of their gradients."""

    ids: list[int]  # sorted
    leaves: Tensors  # weights and embeddings, in the memory of the server's
    values: Tensors  # [C, *p]
    versions: list[int]  # of both; torch increases them at each write

    def are_of(self, held: Tensors) -> bool:
        """Return whether the outputs are those of the given weights and embeddings."""
        here = {**self.leaves, **self.values}.values()
        same = held.keys() == self.leaves.keys() and [v._version for v in here] == self.versions
        return same and all(v.is_set_to(self.leaves[n]) for n, v in held.items())


class LatestOutputs:
    """Outputs of a hypernetwork for its latest weights, computed once for all their readers.

    After an update the server reports dropout rates, then it sends the parameters to the clients,
    and differentiates them in the next update. They depend on the weights and the set of clients
    alone, in the order of their ids: so a resumed run, which computes them again, has equal ones.
    """

    def __init__(self, predict: Callable[[Tensors, Tensor], Tensors]) -> None:
        self.predict = predict
        self._outputs: list[Outputs] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the outputs out of a copy or pickle: other processes compute their own."""
        return LatestOutputs, (self.predict,)

    def __call__(self, held: Tensors, ids: Tensor) -> tuple[Tensors, Tensors]:
        """Return the leaves of the graph, and the outputs [C, *p] of clients in any order."""
        ordered, order = ids.sort()
        current = [one for one in self._outputs if one.are_of(held)]
        outputs = next((one for one in current if one.ids == ordered.tolist()), None)
        if outputs is None:
            leaves = {n: v.detach().requires_grad_() for n, v in held.items()}
            with torch.enable_grad():
                values = self.predict(leaves, ordered)
            versions = [v._version for v in (*leaves.values(), *values.values())]
            outputs = Outputs(ordered.tolist(), leaves, values, versions)
        others = [one for one in current if one is not outputs]
        self._outputs = [outputs, *others[: MAX_OUTPUTS - 1]]
        return outputs.leaves, cut(outputs.values, order.argsort())


def shared(first: Tensors, optim: Optim, combine: Combine = mean) -> DropoutSource:
    """Return server functions for dropout parameters that all clients share (naive VD)."""

    def start(generator: Generator, clients: int) -> Tensors:
        return under(OWN, {n: torch.zeros_like(v) for n, v in first.items()})

    def read(server: Tensors, ids: Tensor) -> Tensors:
        # The server holds the change since the start, so that weight decay leads back there.
        change = role(OWN, server)
        return spread_out({n: v + first[n].to(v) for n, v in change.items()}, len(ids))

    def slope(server: Tensors, cohort: Cohort, client_tensors: Tensors) -> Tensors:
        now = {n: v[0] for n, v in read(server, cohort.ids[:1]).items()}
        return under(
            OWN, {n: now[n] - v for n, v in combine(client_tensors, cohort.size, now).items()}
        )

    return DropoutSource(start, read, slope, optims={f"{OWN}/*": optim})


def rows(first: Tensors, most: float | None = None) -> DropoutSource:
    """Return server functions for separate dropout parameters of each client (EnsembleVD)."""

    def start(generator: Generator, clients: int) -> Tensors:
        return under(OWN, spread_out(first, clients))

    def read(server: Tensors, ids: Tensor) -> Tensors:
        return {n: rows_of(v, ids) for n, v in role(OWN, server).items()}

    def store(server: Tensors, cohort: Cohort, client_tensors: Tensors) -> Tensors:
        """Store the clients' trained dropout parameters, each changed by at most `most`."""
        own = role(OWN, server)
        if most is not None:
            here = {n: own[n][cohort.ids] for n in client_tensors}
            client_tensors = {
                n: here[n] + (v - here[n]).clamp(-most, most) for n, v in client_tensors.items()
            }
        return under(
            OWN, {n: own[n].index_copy(0, cohort.ids, v) for n, v in client_tensors.items()}
        )

    return DropoutSource(start, read, store=store, metadata={f"{OWN}/*": PER_CLIENT})


def rows_of(table: Tensor, ids: Tensor) -> Tensor:
    """Return a table's rows of the given client ids, or the mean row for ids beyond the table."""
    own = table[ids.clamp(max=len(table) - 1)]
    return torch.where(add_trailing_axes(ids < len(table), table), own, table.mean(0))  # [C, ...]


def learn(server: Tensors, gradient: Tensors, optims: Mapping[str, Optim], clip: float) -> Tensors:
    """Apply the server's optimizers to pseudo-gradients, clipped to a total norm of `clip`."""
    shrink = float(clip / (get_total_norm(list(gradient.values())) + 1e-6))
    if shrink < 1:
        gradient = {n: v * shrink for n, v in gradient.items()}
    moved: Tensors = {}
    for names, optim in optims.items():
        moved |= descend(optim, server, pick(gradient, names))
    return moved


def shorten_step(
    source: DropoutSource, server: Tensors, moved: Tensors, most: float | None
) -> Tensors:
    """Scale down a server step until no dropout parameter changes by more than `most`.

    All clients that train are considered.

    The change of all that spreads come from, and the velocity that is left, are multiplied by one
    share: `most` over the largest |s_after - s_before|, again until that holds, as h bends.
    """
    if most is None:
        return moved
    ids = torch.arange(len(server[TABLE]) if TABLE in server else 1)
    before = source.read(server, ids)
    moved_tensors = pick(
        moved, " ".join(f"{names} server/optim/{names}:*" for names in source.optims)
    )
    share, step = 1.0, moved_tensors
    while (far := _largest(source.read(server | step, ids), before)) > (1 + 1e-6) * most:
        share *= min(most / far, 0.99)
        step = {n: share * v for n, v in moved_tensors.items()}
        step |= {
            n: server[n] + share * (v - server[n]) for n, v in moved_tensors.items() if ":" not in n
        }
    return moved | step


def _largest(after: Tensors, before: Tensors) -> float:
    return max(float((v - before[n]).abs().max()) for n, v in after.items())


def embed(
    method: Method,
    data: Federation,
    state: RoundState,
    *,
    steps: int = 5,
    lr: float = 0.9,
    seed: Seed = 0,
) -> RoundState:
    """Fit the hypernetwork's embeddings of held-out clients after training.

    Everything else stays. In each step a client trains from what it would receive, and its
    embedding moves as in a round: e <- e - lr J_e^T (s_received - s_local).

    Args:
        method: with a hypernetwork.
        data: the federation; held-out clients use their training rows.
        state: a round; it is not changed.
        steps: of each embedding.
        lr: learning rate.
        seed: of the clients' draws.

    Returns:
        The round, with rows for held-out clients in the table of embeddings; to be evaluated, not
        to be trained further.

    Raises:
        ValueError: if the server's table has no embeddings of just the clients that trained.
    """
    refuse_other_clients(method, data, state)
    table = state.server.get(TABLE, torch.empty(0))
    if len(table) != data.clients:
        raise ValueError(
            f"the server holds {len(table)} embeddings; expected {data.clients}, those of the "
            "clients that trained"
        )
    cohort = data.cohort(torch.arange(data.clients, len(data.train)))
    table = torch.cat([table, table.mean(0).expand(len(cohort.ids), -1)])
    for step in range(steps):
        leaf = table.detach().requires_grad_()
        with torch.enable_grad():
            spreads = role("spread", method.download(state.server | {TABLE: leaf}, cohort))
        received = method.download(state.server | {TABLE: table}, cohort)
        embedding, *_ = train(
            method, received, received, data, cohort, seed=seed, number=state.number + step
        )
        gap = [v.detach() - embedding[f"spread/{n}"] for n, v in spreads.items()]
        (slope,) = torch.autograd.grad(list(spreads.values()), leaf, gap)
        table = table - lr * slope
    return replace(state, server=state.server | {TABLE: table})
