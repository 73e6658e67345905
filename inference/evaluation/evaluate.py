"""Testing: which model, adapted how, of which clients, on which rows. All of it is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.evaluation.predict import Prediction, blocks, check, predict, score
from pyrofl.inference.evaluation.prepare import Ready, population_of, ready
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed
from pyrofl.metrics import Bins, calibration_bins, pool
from pyrofl.tensors import Tensors, join_up


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
        values: metric -> [C], means over a client's rows; one that is NaN for a client, as the
            rmse of a family without a mean is, is left out.
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


Blocks = list[tuple[Prediction, Batch]]
"""The predictions of some clients, whose rows came in blocks."""


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
    seed: Seed = 0,
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
        ValueError: if an argument is not one of the above, no client has such rows, or a model
            predicts what is no number; the client, the model and the row are named.
    """
    what: dict[str, Any] = {"model": model or method.main_view, "adapted": adapted}
    what |= {"population": population, "part": part, "draws": draws}
    found = [
        (ids, score(made))
        for ids, made in predictions(method, data, state, **what, seed=seed, chunk=chunk)
    ]
    ids, order = torch.cat([some for some, _ in found]).sort()
    table = _rows(population_of(data, population)[0], part)
    values = {n: v.cpu()[order] for n, v in join_up(values for _, values in found).items()}
    return Scores(
        **what,
        ids=ids,
        rows=torch.tensor([len(table[i]) for i in ids.tolist()]),
        values={n: v for n, v in values.items() if not bool(v.isnan().any())},
    )


def predictions(
    method: Method,
    data: Federation,
    state: Round,
    *,
    model: str | None = None,
    adapted: str = "none",
    population: str = "training",
    part: str = "test",
    draws: int | None = None,
    seed: Seed = 0,
    chunk: int | None = None,
) -> Iterator[tuple[Tensor, Blocks]]:
    """Yield ids [C] and the predictions of their rows, some clients at a time.

    Arguments and errors are those of `evaluate`.
    """
    if draws is not None and draws < 1:
        raise ValueError(f"draws is {draws}; expected at least 1, or None for the guide's mean")
    if part not in ("train", "test") or (
        population == "pooled" and (part, adapted) != ("test", "none")
    ):
        raise ValueError(
            f"part is {part!r}, adapted {adapted!r}, population {population!r}; expected 'train' "
            "or 'test', and 'pooled' only unadapted and on test rows"
        )
    data, everyone = population_of(data, population)
    table = _rows(data, part)
    ids = torch.tensor([i for i in everyone if len(table[i])], dtype=torch.long)
    if not len(ids):
        raise ValueError(f"no client of the {population} population has {part} rows")
    some = ready(method, data, state, ids, model=model, adapted=adapted, seed=seed, chunk=chunk)
    return _predicted(method, data, table, some, model or method.main_view, draws)


def _predicted(
    method: Method,
    data: Federation,
    table: tuple[Tensor, ...],
    clients: Iterator[Ready],
    model: str,
    draws: int | None,
) -> Iterator[tuple[Tensor, Blocks]]:
    for ids, received, local, noise in clients:
        rows = [table[i] for i in ids.tolist()]
        found: Blocks = []
        for some, batch in blocks(data, rows, data.who(ids)):
            made = predict(method, received, local, batch, draws, noise)
            check(made, batch, data.names, model, some)
            found.append((made, batch))
        yield ids, found


def calibration(method: Method, data: Federation, state: Round, **what: Any) -> Bins:
    """Gather the predictions of all clients' rows by their confidence, as reliability diagrams do.

    Args:
        method: as trained, a classifier.
        data: the federation.
        state: the round.
        what: further arguments of `evaluate`.

    Raises:
        ValueError: as `evaluate`, or if the method predicts numbers.
    """
    sure: list[Tensor] = []
    right: list[Tensor] = []
    for _, found in predictions(method, data, state, **what):
        for prediction, batch in found:
            if prediction.mean.dim() < 3:
                raise ValueError("the method predicts numbers; expected probabilities of classes")
            confidence, top = prediction.mean.max(-1)
            sure.append(confidence[batch.mask])
            right.append((top == batch.y)[batch.mask])
    return calibration_bins(torch.cat(sure), torch.cat(right).to(sure[0]))


def _rows(data: Federation, part: str) -> tuple[Tensor, ...]:
    return data.train if part == "train" else data.test
