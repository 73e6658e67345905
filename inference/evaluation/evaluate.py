"""Testing: which model, adapted how, of which clients, on which rows. All of it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from pyrofl.arguments import Count, PositiveShare, checked
from pyrofl.data import Federation
from pyrofl.inference.evaluation.asked import Asked, RowsAsked
from pyrofl.inference.evaluation.predict import Predicted, Prediction, predict
from pyrofl.inference.evaluation.prepare import pooled_name
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.metrics import Bins, Weighting, calibration_bins, classification, pool, regression
from pyrofl.tensors import Tensors, join_up

Metric = Callable[[Prediction, Tensor, Tensor], Tensor]
"""(prediction, y [C, B], mask [C, B]) -> [C], means over a client's rows; mask hides padding."""


@dataclass(frozen=True, kw_only=True)
class Scores(Asked):
    """How a model did, and what exactly was asked: all fields of `Asked`, too.

    Attributes:
        ids, rows: [C], the clients that have such rows, and how many; others are left out.
        values: metric -> [C], means over a client's rows; one that is NaN for a client, as the
            rmse of a family without a mean is, is left out.
    """

    model: str
    ids: Tensor
    rows: Tensor
    values: Tensors

    def mean(self, metric: str, weighting: Weighting = "client") -> float:
        """Average a metric over clients; weighting "client" counts each once, "row" by rows."""
        return float(pool(self.values[metric], self.rows, weighting))

    @checked
    def smallest(self, share: PositiveShare, sizes: Tensor) -> Scores:
        """Return the scores of the share of clients, at least one, with the fewest training rows.

        `sizes` are the training rows of all clients of the federation, by id.
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
    metrics: Mapping[str, Metric] | None = None,
    **asked: Unpack[RowsAsked],
) -> Scores:
    """Test a model of every client on its rows.

    Args:
        method: as trained.
        data: the federation.
        state: the round to test; it is not changed.
        metrics: name -> one of your own, beside those of `pyrofl.metrics`.
        asked: fields of `Asked`: model, adapted, population, part, draws, seed, chunk.

    Raises:
        ValueError: if a field is out of range or the method has no such view, no client has such
            rows, a metric gives no number per client or has a name that is taken, or a model
            predicts what is no number; the client, the model and the row are named.
    """
    how = Asked.of(asked)
    how = replace(how, model=how.view(method))
    found = [
        (part.ids, part.mask.sum(1), score(part, metrics or {}))
        for part in predict(method, data, state, **vars(how))
    ]
    ids, order = torch.cat([some for some, *_ in found]).sort()
    values = {n: v.cpu()[order] for n, v in join_up(v for *_, v in found).items()}
    return Scores(
        **vars(how),
        ids=ids,
        rows=torch.cat([rows for _, rows, _ in found]).cpu()[order],
        values={n: v for n, v in values.items() if not bool(v.isnan().any())},
    )


def score(found: Predicted, metrics: Mapping[str, Metric]) -> Tensors:
    """Score the predictions of some clients, and check those metrics: name -> [C]."""
    (mean, log_density), y, mask = found.prediction, found.y, found.mask
    if mean.dim() == 3:
        values = classification(mean, y.long(), mask)
    else:
        values = regression(mean, log_density, y, mask)
    for name, metric in metrics.items():
        if name in values or not callable(metric):
            raise ValueError(
                f"metrics[{name!r}] is {metric!r}; expected a function, and a name besides "
                f"{', '.join(values)}"
            )
        with torch.no_grad():
            own = metric(found.prediction, y, mask)
        tensor = torch.is_tensor(own)
        if not tensor or own.shape != mask.shape[:1]:
            kind = f"{own.dtype} of shape {list(own.shape)}" if tensor else type(own).__name__
            raise ValueError(
                f"metric {name!r} gives {kind}; expected a tensor of shape {list(mask.shape[:1])}, "
                "a number for each client"
            )
        values[name] = own.to(log_density)
    return values


def calibration(method: Method, data: Federation, state: Round, **asked: Unpack[RowsAsked]) -> Bins:
    """Gather the predictions of all clients' rows by their confidence, as reliability diagrams do.

    Arguments are those of `evaluate`, and so are errors; the method is to be a classifier.
    """
    found = _confidence(method, data, state, asked)
    parts = [(sure[mask], right[mask]) for _, sure, right, mask in found]
    return calibration_bins(*(torch.cat(some) for some in zip(*parts, strict=True)))


@checked
def calibration_by_client(
    method: Method, data: Federation, state: Round, bins: Count = 15, **asked: Unpack[RowsAsked]
) -> dict[str, Bins]:
    """Gather the predictions of each client by their confidence; `calibration` pools them.

    Arguments and errors are those of `calibration`, besides the number of bins: few rows need few.

    Returns:
        Bins [bins] by the clients' names, in their order; `pyrofl.metrics.calibration_error` makes
        an expected calibration error of them.
    """
    found: dict[int, Bins] = {}
    for ids, sure, right, mask in _confidence(method, data, state, asked):
        gathered = calibration_bins(sure, right, mask, bins)
        found |= {i: Bins(*(v[c] for v in gathered)) for c, i in enumerate(ids.tolist())}
    names = (*data.names, pooled_name(data))
    return {names[i]: found[i] for i in sorted(found)}


def _confidence(
    method: Method, data: Federation, state: Round, asked: RowsAsked
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield ids [C], largest probabilities [C, B], whether these are right, and the mask."""
    for ids, prediction, y, mask in predict(method, data, state, **asked):
        if prediction.mean.dim() < 3:
            raise ValueError("the method predicts numbers; expected probabilities of classes")
        sure, top = prediction.mean.max(-1)
        yield ids, sure, (top == y).to(sure), mask
