"""Testing: which model, adapted how, of which clients, on which rows. All of it is recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyro
import torch
from torch import Tensor

from pyrofl.data import Federation, Who, stack
from pyrofl.inference.elbo import latent, traces
from pyrofl.inference.local import Stream, train
from pyrofl.inference.method import Method, Phase
from pyrofl.inference.noise import ClientNoise
from pyrofl.inference.predict import blocks, predict, score
from pyrofl.inference.state import Round, chunks, meet
from pyrofl.metrics import pool
from pyrofl.tensors import Tensors, generator, join_up


@dataclass(frozen=True)
class Scores:
    """How a model did, and what exactly was tested.

    Attributes:
        model: the view: "personal", "global" or "ensemble".
        adapted: phases run before testing: "none", the method's "adapt", or all its "phases".
        population: "training" or "held_out" clients, or "pooled": one client with all test rows.
        part: "test" or "train" rows.
        draws: of the guide, whose predictions were averaged; None is the guide's mean.
        ids, rows: [C], the clients that have such rows, and how many; others are left out.
        values: metric -> [C], means over a client's rows.
    """

    model: str
    adapted: str
    population: str
    part: str
    draws: int | None
    ids: Tensor
    rows: Tensor
    values: Tensors

    def mean(self, metric: str, weighting: str = "client") -> float:
        """Average a metric over clients; weighting "client" counts each once, "row" by rows."""
        return float(pool(self.values[metric], self.rows, weighting))

    def smallest(self, share: float, sizes: Tensor) -> Scores:
        """Return the scores of the share of clients, at least one, with the fewest training rows.

        Args:
            share: in (0, 1].
            sizes: training rows of all clients of the federation, by id.
        """
        order = sizes[self.ids].argsort(stable=True)
        keep = order[: max(1, round(share * len(order)))].sort().values
        values = {n: v[keep] for n, v in self.values.items()}
        return replace(self, ids=self.ids[keep], rows=self.rows[keep], values=values)


def evaluate(
    method: Method,
    data: Federation,
    state: Round,
    *,
    model: str | None = None,
    adapted: str = "none",
    population: str = "training",
    part: str = "test",
    draws: int | None = None,
    seed: int = 0,
    chunk: int | None = None,
) -> Scores:
    """Test a model of every client on its rows.

    Args:
        method: as trained.
        data: the federation.
        state: the round to test; it is not changed.
        model: one of the method's views; default its main one.
        adapted: "none", "adapt" or "phases": what is run first, on the client's training rows.
        population: "training", "held_out" (they join and no more), or "pooled".
        part: "test" or "train".
        draws: of the guide, whose predicted probabilities are averaged; None takes its mean.
        seed: of the run.
        chunk: clients tested side by side; default by the size of their state.

    Raises:
        ValueError: if an argument is not one of the above, or no client has such rows.
    """
    view = model or method.main_view
    if draws is not None and draws < 1:
        raise ValueError(f"draws is {draws}; expected at least 1, or None for the guide's mean")
    if part not in ("train", "test") or (
        population == "pooled" and (part, adapted) != ("test", "none")
    ):
        raise ValueError(
            f"part is {part!r}, adapted {adapted!r}, population {population!r}; expected 'train' "
            "or 'test', and 'pooled' only unadapted and on test rows"
        )
    method = method.deployed
    data, everyone = _population(data, population)
    table = data.train if part == "train" else data.test
    ids = torch.tensor([i for i in everyone if len(table[i])], dtype=torch.long)
    if not len(ids):
        raise ValueError(f"no client of the {population} population has {part} rows")
    parts: list[Tensors] = []
    order: list[Tensor] = []
    with torch.no_grad():
        for some in chunks(method, data, state, ids, chunk, seed):
            who = data.who(some)
            received, local = prepared(
                method, data, state, who, model=view, adapted=adapted, seed=seed
            )
            noise = [generator(seed, Stream.TEST, state.number, i) for i in some.tolist()]
            found = [
                (predict(method, received, local, batch, draws, noise), batch)
                for batch in blocks(data, [table[i] for i in some.tolist()], who)
            ]
            parts.append(score(found))
            order.append(some)
    back = torch.cat(order).argsort()
    return Scores(
        view,
        adapted,
        population,
        part,
        draws,
        ids=ids,
        rows=torch.tensor([len(table[i]) for i in ids.tolist()]),
        values={n: v.cpu()[back] for n, v in join_up(parts).items()},
    )


def _population(data: Federation, population: str) -> tuple[Federation, list[int]]:
    """Return the ids of a population; the pooled client is put behind all others."""
    everyone = len(data.train)
    if population == "training":
        return data, list(range(data.clients))
    if population == "held_out":
        return data, list(range(data.clients, everyone))
    if population != "pooled":
        raise ValueError(
            f"population is {population!r}; expected 'training', 'held_out' or 'pooled'"
        )
    rows = data.pooled_test if data.pooled_test is not None else torch.zeros(0, dtype=torch.long)
    pooled = replace(
        data,
        train=(*data.train, torch.cat(data.train[: data.clients])),
        test=(*data.test, rows),
        names=(*data.names, "all test rows"),
        held_out=data.held_out + 1,
    )
    return pooled, [everyone]


def prepared(
    method: Method,
    data: Federation,
    state: Round,
    who: Who,
    *,
    model: str | None = None,
    adapted: str = "none",
    seed: int = 0,
) -> tuple[Tensors, Tensors | list[Tensors]]:
    """Return what programs are to read as received and local, to test a model of some clients.

    Raises:
        ValueError: if the method has no such view, or `adapted` is unknown.
    """
    view = model or method.main_view
    if view not in method.views:
        raise ValueError(f"no {view!r} model; this method has {', '.join(method.views)}")
    known: dict[str, tuple[Phase, ...]] = {
        "none": (),
        "adapt": method.adapt,
        "phases": method.phases,
    }
    if adapted not in known:
        raise ValueError(f"adapted is {adapted!r}; expected one of {', '.join(known)}")
    if adapted == "adapt" and not method.adapt:
        raise ValueError("adapted is 'adapt'; this method runs nothing before its test")
    received, private = meet(method.deployed, data, state, who, seed)
    local = private | received
    if known[adapted]:
        with torch.enable_grad():
            local, _ = train(
                method,
                received,
                local,
                data,
                who,
                seed=seed,
                number=state.number,
                phases=known[adapted],
            )
    return received, method.views[view](received, local)


def posterior(
    method: Method,
    data: Federation,
    state: Round,
    draws: int,
    *,
    model: str | None = None,
    adapted: str = "none",
    ids: Tensor | None = None,
    seed: int = 0,
    chunk: int | None = None,
) -> Tensors:
    """Draw from the posterior of every client: site -> [S, C, *p], clients in the order of ids.

    Args:
        method: as trained.
        data: the federation.
        state: the round.
        draws: how many, S.
        model: one of the method's views, not an ensemble.
        adapted: as in `evaluate`.
        ids: of clients; default all that train.
        seed: of the run.
        chunk: clients drawn side by side.

    Raises:
        ValueError: if draws is less than 1, or the view is an ensemble.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; expected at least 1")
    ids = torch.arange(data.clients) if ids is None else ids
    found: list[tuple[Tensor, Tensors]] = []
    for some in chunks(method, data, state, ids, chunk, seed):
        who = data.who(some)
        received, local = prepared(
            method, data, state, who, model=model, adapted=adapted, seed=seed
        )
        if isinstance(local, list):
            raise ValueError(f"{model!r} is an ensemble; draw from its members")
        noise = [generator(seed, Stream.TEST, state.number, i) for i in some.tolist()]
        batch = stack(data, [data.train[i][:1] for i in some.tolist()], who)
        with pyro.validation_enabled(False), torch.no_grad(), ClientNoise(noise):
            q, _ = traces(method.model, method.guide, received, local, batch, draws)
        sites = {n: s["value"] for n, s in latent(q) if not s["infer"].get("is_auxiliary")}
        # From [S, C, 1, *p] to [C, S, *p]: clients first, to join chunks.
        found.append((some, {n: v.squeeze(2).transpose(0, 1) for n, v in sites.items()}))
    known, by_id = torch.cat([some for some, _ in found]).sort()
    back = by_id[torch.searchsorted(known, ids)]
    return {n: v[back].transpose(0, 1) for n, v in join_up(part for _, part in found).items()}
