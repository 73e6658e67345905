"""Predictive distributions of rows, from the mean of the guide, its draws or an ensemble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import isfinite
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation, Who, stack
from pyrofl.inference.elbo import observed, traces
from pyrofl.inference.loop.noise import ClientNoise, GuideMean
from pyrofl.inference.method import Method
from pyrofl.metrics import classification, regression
from pyrofl.tensors import Tensors

ROWS = 512  # rows of a client that are predicted at once


class Prediction(NamedTuple):
    """The predictive distribution of rows."""

    mean: Tensor  # [C, B, K] probabilities of K classes, or [C, B] expected responses
    log_density: Tensor  # [C, B], log of the predictive density or mass at y


def blocks(data: Federation, rows: list[Tensor], who: Who) -> Iterator[tuple[list[Tensor], Batch]]:
    """Yield the rows of some clients, at most `ROWS` of each, and the batches of them."""
    for start in range(0, max(len(r) for r in rows), ROWS):
        some = [r[start : start + ROWS] for r in rows]
        yield some, stack(data, some, who)


def predict(
    method: Method,
    received: Tensors,
    local: Tensors | list[Tensors],
    batch: Batch,
    draws: int | None = None,
    noise: list[Generator] | None = None,
) -> Prediction:
    """Predict rows with the guide's mean, or average the predictions of draws and of an ensemble.

    Args:
        method: gives model and guide.
        received: [C, ...].
        local: [C, ...], or a list of them: an ensemble.
        batch: the rows.
        draws: of the guide; None takes its mean.
        noise: one generator per client, for draws; None uses the global one.
    """
    members = local if isinstance(local, list) else [local]
    found = [_predict(method, received, member, batch, draws, noise) for member in members]
    mean = torch.stack([p.mean for p in found]).mean(0)
    log_density = torch.stack([p.log_density for p in found])
    return Prediction(mean, log_density.logsumexp(0) - torch.tensor(float(len(found))).log())


def _predict(
    method: Method,
    received: Tensors,
    local: Tensors,
    batch: Batch,
    draws: int | None,
    noise: list[Generator] | None,
) -> Prediction:
    handler: Any = GuideMean()
    if draws:
        handler = nullcontext() if noise is None else ClientNoise(noise)
    with pyro.validation_enabled(False), torch.no_grad(), handler:
        _, trace = traces(method.model, method.guide, received, local, batch, draws)
    fn = response(trace)["fn"]
    mean = fn.probs if isinstance(fn, dist.Categorical) else fn.mean
    if isinstance(fn, dist.Bernoulli):
        mean = torch.stack([1 - mean, mean], -1)
    log_density = fn.log_prob(batch.y)
    if log_density.dim() == 3:
        mean, count = mean.mean(0), log_density.new_tensor(float(len(log_density)))
        log_density = log_density.logsumexp(0) - count.log()
    return Prediction(mean, log_density)


def response(trace: Any) -> Any:
    """Return the observed site that is predicted: "y", or else the only one.

    Raises:
        ValueError: if there is no "y" and more or less than one observed site.
    """
    sites = dict(observed(trace))
    if "y" in sites:
        return sites["y"]
    if len(sites) != 1:
        raise ValueError(f"observed sites are {sorted(sites)}; expected 'y', or just one")
    return next(iter(sites.values()))


def check(
    found: Prediction,
    batch: Batch,
    names: Sequence[str],
    model: str,
    rows: Sequence[Tensor],
    table: str = "the data",
) -> None:
    """Refuse predictions that are no numbers; a mean of scores would hide them.

    Args:
        found: of the rows of a batch.
        batch: the rows; padding may hold anything.
        names: of all clients, by id.
        model: that predicts, for the message.
        rows: of each client, where the batch's rows are in the table.
        table: what they are rows of, for the message.

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


def score(found: list[tuple[Prediction, Batch]]) -> Tensors:
    """Score the predictions of some clients, which came in blocks of rows: metric -> [C]."""
    mean = torch.cat([p.mean for p, _ in found], 1)
    log_density = torch.cat([p.log_density for p, _ in found], 1)
    y = torch.cat([batch.y for _, batch in found], 1)
    mask = torch.cat([batch.mask for _, batch in found], 1)
    if mean.dim() == 3:
        return classification(mean, y.long(), mask)
    return regression(mean, log_density, y, mask)
