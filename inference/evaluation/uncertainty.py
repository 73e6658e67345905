"""How unsure classifiers are of single rows, and why: the noise of labels, or too few rows.

Depeweg, Hernandez-Lobato, Doshi-Velez and Udluft, "Decomposition of Uncertainty in Bayesian Deep
Learning", ICML 2018. With probabilities p_s of every draw s of the guide, or member of an ensemble,

    total = H[mean_s p_s],   aleatoric = mean_s H[p_s],   epistemic = total - aleatoric
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation, check_table
from pyrofl.inference.elbo import traces
from pyrofl.inference.evaluation.evaluate import predictions
from pyrofl.inference.evaluation.predict import Prediction, blocks, check, response
from pyrofl.inference.evaluation.prepare import pooled_name, population_of, ready
from pyrofl.inference.loop.noise import ClientNoise, GuideMean
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.inference.seeds import Seed
from pyrofl.metrics import Bins, auroc, calibration_bins, entropies
from pyrofl.tensors import Tensors


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
        """Return how well each client tells other rows from these by a score: AUROC [C].

        Raises:
            ValueError: if the clients are not the same.
        """
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
    *,
    model: str | None = None,
    adapted: str = "none",
    population: str = "training",
    draws: int | None = 100,
    seed: Seed = 0,
    chunk: int | None = None,
) -> Uncertainty:
    """Say how unsure a model of every client is.

    Args:
        method: as trained, a classifier.
        data: the federation.
        state: the round.
        x: [N, *x], rows that every client is asked about; default each one's own test rows.
        model: one of the method's views; default its main one. An ensemble's members are taken
            like draws.
        adapted: as in `evaluate`, as are seed and chunk.
        population: "training" or "held_out" clients.
        draws: of the guide; None takes its mean, with which nothing is epistemic.
        seed: of the run.
        chunk: clients side by side.

    Raises:
        ValueError: as `evaluate`; or if x is unlike the federation's, or the method predicts
            numbers.
    """
    if draws is not None and draws < 1:
        raise ValueError(f"draws is {draws}; expected at least 1, or None for the guide's mean")
    first, table = (0, "the data") if x is None else (len(data.x), "x")
    data, everyone = population_of(data if x is None else _asked(data, x), population)
    ids = torch.tensor([i for i in everyone if len(data.test[i])], dtype=torch.long)
    if not len(ids):
        raise ValueError(
            f"no client of the {population} population has test rows; expected some, or x"
        )
    found: dict[int, Tensors] = {}
    view = model or method.main_view
    for some, received, local, noise in ready(
        method, data, state, ids, model=model, adapted=adapted, seed=seed, chunk=chunk
    ):
        members = local if isinstance(local, list) else [local]
        parts = []
        rows = [data.test[i] for i in some.tolist()]
        for asked, batch in blocks(data, rows, data.who(some)):
            drawn = [probabilities(method, received, m, batch, draws, noise) for m in members]
            probs = torch.cat(drawn)
            unseen = torch.full(batch.mask.shape, -torch.inf).to(probs)
            mean = Prediction(probs.mean(0), unseen)
            check(mean, batch, data.names, view, [r - first for r in asked], table)
            parts.append(entropies(probs) | {"doubt": 1 - probs.mean(0).amax(-1)})
        for c, i in enumerate(some.tolist()):
            n = len(data.test[i])
            found[i] = {k: torch.cat([p[k][c] for p in parts])[:n].cpu() for k in parts[0]}
    return Uncertainty(
        ids,
        torch.tensor([len(data.test[i]) for i in ids.tolist()]),
        {k: torch.cat([found[i][k] for i in ids.tolist()]) for k in found[int(ids[0])]},
    )


def probabilities(
    method: Method,
    received: Tensors,
    local: Tensors,
    batch: Batch,
    draws: int | None,
    noise: list[Generator] | None = None,
) -> Tensor:
    """Return the probabilities of K classes that every draw of the guide gives: [S, C, B, K].

    Args:
        method: gives model and guide.
        received: [C, ...].
        local: [C, ...].
        batch: the rows.
        draws: S; None takes the guide's mean, S = 1.
        noise: one generator per client; None uses the global one.

    Raises:
        ValueError: if the response is not a class.
    """
    handler: Any = GuideMean()
    if draws:
        handler = nullcontext() if noise is None else ClientNoise(noise)
    with pyro.validation_enabled(False), torch.no_grad(), handler:
        _, trace = traces(method.model, method.guide, received, local, batch, draws)
    fn = response(trace)["fn"]
    if isinstance(fn, dist.Bernoulli):
        probs = torch.stack([1 - fn.probs, fn.probs], -1)
    elif isinstance(fn, dist.Categorical):
        probs = fn.probs
    else:
        raise ValueError(f"the response is a {type(fn).__name__}; expected classes")
    return probs.expand(draws or 1, *batch.mask.shape, probs.shape[-1])


def calibration_by_client(
    method: Method, data: Federation, state: Round, bins: int = 15, **what: Any
) -> dict[str, Bins]:
    """Gather the predictions of each client by their confidence; `calibration` pools them.

    Args:
        method: as trained, a classifier.
        data: the federation.
        state: the round.
        bins: of confidence; few rows need few.
        what: further arguments of `evaluate`.

    Returns:
        Bins [bins] by the clients' names, in their order; `pyrofl.metrics.calibration_error` makes
        an expected calibration error of them.

    Raises:
        ValueError: as `calibration`, or if bins is less than 1.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; expected at least 1")
    found: dict[int, Bins] = {}
    for ids, made in predictions(method, data, state, **what):
        if made[0][0].mean.dim() < 3:
            raise ValueError("the method predicts numbers; expected probabilities of classes")
        sure, top = torch.cat([p.mean for p, _ in made], 1).max(-1)
        y, mask = (torch.cat([getattr(b, n) for _, b in made], 1) for n in ("y", "mask"))
        gathered = calibration_bins(sure, (top == y).to(sure), mask, bins)
        found |= {i: Bins(*(v[c] for v in gathered)) for c, i in enumerate(ids.tolist())}
    names = (*data.names, pooled_name(data))
    return {names[i]: found[i] for i in sorted(found)}


def _asked(data: Federation, x: Tensor) -> Federation:
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
