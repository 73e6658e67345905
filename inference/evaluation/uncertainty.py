"""How unsure classifiers are of single rows, and why: the noise of labels, or too few rows.

Depeweg, Hernandez-Lobato, Doshi-Velez and Udluft, "Decomposition of Uncertainty in Bayesian Deep
Learning", ICML 2018. With probabilities p_s of every draw s of the guide, or member of an ensemble,

    total = H[mean_s p_s],   aleatoric = mean_s H[p_s],   epistemic = total - aleatoric
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from pyrofl.data import Batch, Federation, check_table
from pyrofl.inference.evaluation.asked import Asked, RowsAsked
from pyrofl.inference.evaluation.predict import answers, probabilities
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.metrics import auroc, entropies
from pyrofl.tensors import Tensors

SCORES = ("total", "aleatoric", "epistemic", "doubt")


@dataclass(frozen=True)
class Uncertainty:
    """Scores of rows, the larger the less sure.

    Attributes:
        ids: [C], of the clients.
        rows: [C], how many each was asked about.
        values: "total", "aleatoric" and "epistemic" entropy in nats, and "doubt", one minus the
            largest probability: [sum of rows], client by client.
    """

    ids: Tensor
    rows: Tensor
    values: Tensors

    def by_client(self, score: str) -> list[Tensor]:
        """Return a score as [N] of every client."""
        return list(self.values[score].split(self.rows.tolist()))

    def mean(self, score: str) -> Tensor:
        """Return means over the rows of every client, [C]."""
        return torch.stack([v.mean() for v in self.by_client(score)])

    def told_apart(self, outside: Uncertainty, score: str) -> Tensor:
        """Return how well each client tells other rows from these by a score: AUROC [C]."""
        if not torch.equal(self.ids, outside.ids):
            raise ValueError(
                f"clients are {self.ids.tolist()} and {outside.ids.tolist()}; expected the same"
            )
        pairs = zip(self.by_client(score), outside.by_client(score), strict=True)
        return torch.stack([auroc(mine, other) for mine, other in pairs])


def uncertainty(
    method: Method,
    data: Federation,
    state: Round,
    x: Tensor | None = None,
    **asked: Unpack[RowsAsked],
) -> Uncertainty:
    """Say how unsure a model of every client is.

    Args:
        method: as trained, a classifier.
        data: the federation.
        state: the round.
        x: [N, *x], rows that every client is asked about; default each one's own test rows.
        asked: fields of `Asked` but part. Draws are 100 by default; with None, the guide's mean,
            nothing is epistemic. An ensemble's members are taken like draws.

    Raises:
        ValueError: as `evaluate`; or if x is unlike the federation's, or the method predicts
            numbers.
    """
    how = Asked.of({"draws": 100, **asked}, without="part")
    table = ("the data", 0) if x is None else ("x", len(data.x))
    everything = data if x is None else _all_asked(data, x)

    def read(members: Iterator[Any], batch: Batch) -> tuple[Tensor, ...]:
        """Return the mean of the probabilities, a log density that is not known, and scores."""
        shape = (how.draws or 1, *batch.mask.shape, -1)
        probs = torch.cat([_classes(fn).expand(shape) for fn in members])
        mean = probs.mean(0)
        scores = entropies(probs) | {"doubt": 1 - mean.amax(-1)}
        unknown = mean.new_full(batch.mask.shape, -torch.inf)
        return mean, unknown, torch.stack([scores[n] for n in SCORES], -1)

    found = {
        i: values[seen].cpu()
        for some, _, _, scores, _, mask in answers(method, everything, state, how, read, table)
        for i, values, seen in zip(some.tolist(), scores, mask, strict=True)
    }
    ids = sorted(found)
    rows = torch.tensor([len(found[i]) for i in ids])
    columns = torch.cat([found[i] for i in ids]).unbind(-1)
    return Uncertainty(torch.tensor(ids), rows, dict(zip(SCORES, columns, strict=True)))


def _classes(fn: Any) -> Tensor:
    """Return the probabilities of a response, or refuse it if it is no class."""
    if (probs := probabilities(fn)) is None:
        raise ValueError(f"the response is a {type(fn).__name__}; expected classes")
    return probs


def _all_asked(data: Federation, x: Tensor) -> Federation:
    """Return the federation in which every client has the same test rows, of which y is unknown."""
    if not len(x) or x.shape[1:] != data.x.shape[1:]:
        raise ValueError(
            f"x has shape {list(x.shape)}; expected at least one row of {list(data.x.shape[1:])}"
        )
    y = data.y[:1].expand(len(x), *data.y.shape[1:])
    check_table(x, y)
    rows = len(data.x) + torch.arange(len(x))
    return replace(
        data,
        x=torch.cat([data.x, x.to(data.x)]),
        y=torch.cat([data.y, y]),
        test=tuple(rows for _ in data.test),
    )
