"""Predictive distributions of rows, from the mean of the guide, its draws or an ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import isfinite
from typing import Any, NamedTuple, Unpack

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation, Who, stack
from pyrofl.inference.elbo import observed, traces
from pyrofl.inference.evaluation.asked import Asked, RowsAsked
from pyrofl.inference.evaluation.prepare import ready, with_rows
from pyrofl.inference.loop.noise import ClientNoise, GuideMean
from pyrofl.inference.loop.state import Round
from pyrofl.inference.method import Method
from pyrofl.tensors import Tensors

ROWS = 512  # rows of a client that are predicted at once


class Prediction(NamedTuple):
    """The predictive distribution of rows."""

    mean: Tensor  # [C, B, K] probabilities of K classes, or [C, B] expected responses
    log_density: Tensor  # [C, B], log of the predictive density or mass at y


class Predicted(NamedTuple):
    """All rows that some clients were asked about, padded to the longest."""

    ids: Tensor  # [C]
    prediction: Prediction
    y: Tensor  # [C, B]
    mask: Tensor  # [C, B] bool, False where a row is padding


def predict(
    method: Method, data: Federation, state: Round, **asked: Unpack[RowsAsked]
) -> Iterator[Predicted]:
    """Predict the rows of every client, some clients at a time.

    Arguments and errors are those of `evaluate`.
    """
    return each(method, data, state, Asked.of(asked))


def each(method: Method, data: Federation, state: Round, asked: Asked) -> Iterator[Predicted]:
    """Yield what is predicted of some clients each."""
    data, rows, everyone = with_rows(data, asked)
    for ids, received, local, noise in ready(method, data, state, everyone, asked):
        made, y, mask = [], [], []
        for some, batch in blocks(data, [rows[i] for i in ids.tolist()], data.who(ids)):
            made.append(predict_batch(method, received, local, batch, asked.draws, noise))
            check(made[-1], batch, data.names, asked.view(method), some)
            y.append(batch.y)
            mask.append(batch.mask)
        whole = Prediction(*(torch.cat(parts, 1) for parts in zip(*made, strict=True)))
        yield Predicted(ids, whole, torch.cat(y, 1), torch.cat(mask, 1))


def blocks(data: Federation, rows: list[Tensor], who: Who) -> Iterator[tuple[list[Tensor], Batch]]:
    """Yield the rows of some clients, at most `ROWS` of each, and the batches of them."""
    for start in range(0, max(len(r) for r in rows), ROWS):
        some = [r[start : start + ROWS] for r in rows]
        yield some, stack(data, some, who)


def predict_batch(
    method: Method,
    received: Tensors,
    local: Tensors | list[Tensors],
    batch: Batch,
    draws: int | None = None,
    noise: list[Generator] | None = None,
) -> Prediction:
    """Predict the rows of a batch, given the tensors that the programs read.

    Args:
        method: gives model and guide.
        received: [C, ...].
        local: [C, ...], or a list of them: an ensemble, whose predictions are averaged.
        batch: the rows.
        draws: of the guide, averaged likewise; None takes its mean.
        noise: one generator per client, for draws; None uses the global one.
    """
    means, log_densities = [], []
    for fn in responses(method, received, local, batch, draws, noise):
        probs, log_density = probabilities(fn), fn.log_prob(batch.y)
        mean = fn.mean if probs is None else probs
        if log_density.dim() == 3:
            mean, count = mean.mean(0), log_density.new_tensor(float(len(log_density)))
            log_density = log_density.logsumexp(0) - count.log()
        means.append(mean)
        log_densities.append(log_density)
    log_count = torch.tensor(float(len(means))).log()
    return Prediction(
        torch.stack(means).mean(0), torch.stack(log_densities).logsumexp(0) - log_count
    )


def responses(
    method: Method,
    received: Tensors,
    local: Tensors | list[Tensors],
    batch: Batch,
    draws: int | None,
    noise: list[Generator] | None,
) -> Iterator[Any]:
    """Yield the distribution of the response that every member gives; see `predict_batch`.

    It is that of the observed site "y", or else of the only one.

    Raises:
        ValueError: if there is no "y" and more or less than one observed site.
    """
    for member in local if isinstance(local, list) else [local]:
        handler: Any = GuideMean()
        if draws:
            handler = nullcontext() if noise is None else ClientNoise(noise)
        with pyro.validation_enabled(False), torch.no_grad(), handler:
            _, trace = traces(method.model, method.guide, received, member, batch, draws)
        sites = dict(observed(trace))
        if "y" not in sites and len(sites) != 1:
            raise ValueError(f"observed sites are {sorted(sites)}; expected 'y', or just one")
        yield (sites.get("y") or next(iter(sites.values())))["fn"]


def probabilities(fn: Any) -> Tensor | None:
    """Return the probabilities [..., K] of a response that is a class; None if it is a number."""
    if isinstance(fn, dist.Bernoulli):
        return torch.stack([1 - fn.probs, fn.probs], -1)
    return fn.probs if isinstance(fn, dist.Categorical) else None


def check(
    found: Prediction,
    batch: Batch,
    names: Sequence[str],
    model: str,
    rows: Sequence[Tensor],
    table: str = "the data",
) -> None:
    """Refuse predictions of a batch that are no numbers; a mean of scores would hide them.

    The message has the client by its name, the model, and the row by its place in the table.

    Raises:
        ValueError: if a density is NaN or infinite, or 0 where the mean is no number either. A
            mean alone may be NaN: there are families that have none.
    """
    mean, density = found.mean.reshape(*batch.mask.shape, -1), found.log_density
    good = density.isfinite() | ((density == -torch.inf) & mean.isfinite().all(-1))
    if bool((good | ~batch.mask).all()):
        return
    c, b = (~good & batch.mask).nonzero()[0].tolist()
    values = [*mean[c, b].tolist(), float(density[c, b])]
    value = next(v for v in values if not isfinite(v))
    raise ValueError(
        f"{names[int(batch.ids[c])]}: its {model} model predicts {value} for row "
        f"{int(rows[c][b])} of {table}; expected finite numbers: scale the inputs, or lower the "
        "learning rate"
    )
