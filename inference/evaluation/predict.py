"""Predictive distributions of rows, averaged over posterior draws or an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple, Unpack

import pyro
import pyro.distributions as dist
import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation, stack
from pyrofl.inference.definition.elbo import observed, traces
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import ready, with_rows
from pyrofl.inference.evaluation.specification import EvaluationFields, EvaluationSpec
from pyrofl.inference.training.noise import ClientNoise, LatentMeans, draw
from pyrofl.metrics import crps_of_draws, crps_of_normals
from pyrofl.returned import calling
from pyrofl.tensors import Tensors

CLASSES = (dist.Bernoulli, dist.Categorical)
PREDICTION_CHUNK_ROWS = 512  # rows of a client that are predicted at once
# Largest number of normals with CRPS in closed form; for more, draws are faster.
MAX_CLOSED_FORM_NORMALS = 64
# Draws for the CRPS: its error per row is about a twentieth of the response's sd.
NUM_CRPS_DRAWS = 500


class Prediction(NamedTuple):
    """Predictive distributions of rows: mean, log density of the response, and CRPS."""

    mean: Tensor  # [C, B, K] probabilities of K classes, or [C, B] expected responses
    log_density: Tensor  # [C, B], log of the predictive density or mass at y
    crps: Tensor  # [C, B], of numbers, in the units of y; NaN where it is not defined


class Predicted(NamedTuple):
    """Predictions of several clients' rows, padded to the largest number of rows."""

    ids: Tensor  # [C]
    prediction: Prediction
    y: Tensor  # [C, B]
    mask: Tensor  # [C, B] bool, False where a row is padding


def predict(
    method: Method, data: Federation, state: RoundState, **asked: Unpack[EvaluationFields]
) -> Iterator[Predicted]:
    """Yield predictive distributions of the clients' rows, several clients at a time.

    Arguments and errors are those of `evaluate`.

    Yields:
        The predictions of some clients; see `Predicted`.
    """
    predictions = answers(method, data, state, EvaluationSpec.of(asked), averaged)
    return (Predicted(ids, Prediction(*both), y, mask) for ids, *both, y, mask in predictions)


def answers(
    method: Method,
    data: Federation,
    state: RoundState,
    spec: EvaluationSpec,
    read: Callable[[Iterator[Any], Batch, list[Generator]], tuple[Tensor, ...]],
    table: tuple[str, int] = ("the data", 0),
) -> Iterator[tuple[Tensor, ...]]:
    """For groups of clients, yield ids, prediction statistics, true responses and padding mask.

    `read` (members, batch, generators) returns a mean, a log density and further tensors
    [C, B, ...]; `table` has the name and the first row of the table, for error messages.
    """
    data, rows, everyone = with_rows(data, spec)
    for ids, received, local, noise in ready(method, data, state, everyone, spec):
        client_rows, parts_by_chunk = [rows[i] for i in ids.tolist()], []
        for start in range(0, max(map(len, client_rows)), PREDICTION_CHUNK_ROWS):
            some = [r[start : start + PREDICTION_CHUNK_ROWS] for r in client_rows]
            batch = mark_unseen(stack(data, some, data.cohort(ids)))
            with calling("program"):
                members = responses(method, received, local, batch, spec.draws, noise)
                statistics = read(members, batch, noise)
            if bad := _no_number(statistics[0], statistics[1], batch.mask):
                c, b, value = bad
                raise ValueError(
                    f"{data.names[int(ids[c])]}: its {spec.view_name(method)} model predicts "
                    f"{value} for row {int(some[c][b]) - table[1]} of {table[0]}, not a finite "
                    "number; scale the inputs, or lower the learning rate"
                )
            parts_by_chunk.append((*statistics, batch.y, batch.mask))
        yield ids, *(torch.cat(parts, 1) for parts in zip(*parts_by_chunk, strict=True))


def mark_unseen(batch: Batch) -> Batch:
    """Mark a batch's rows as unseen, so that their latent sites are drawn from the prior."""
    return replace(batch, at=torch.full_like(batch.mask, -1, dtype=torch.long))


def predict_batch(
    method: Method,
    received: Tensors,
    local: Tensors | list[Tensors],
    batch: Batch,
    draws: int | None = None,
    noise: list[Generator] | None = None,
) -> Prediction:
    """Return predictive distributions of a batch's rows, given the clients' model tensors.

    Args:
        method: method with the model and guide.
        received: [C, ...].
        local: [C, ...], or a list of them: predictions of an ensemble are averaged.
        batch: the rows.
        draws: posterior draws to average over; None uses the mean of the guide.
        noise: one generator per client, for draws; None uses the global one.

    Returns:
        The predictive distribution of the rows.
    """
    return averaged(responses(method, received, local, batch, draws, noise), batch, noise)


def averaged(
    members: Iterator[Any], batch: Batch, noise: list[Generator] | None = None
) -> Prediction:
    """Average predictive distributions over ensemble members and posterior draws."""
    means, log_densities, numbers = [], [], []
    for fn in members:
        numbers += [] if isinstance(fn, CLASSES) else [fn]
        if isinstance(fn, dist.Bernoulli) and not batch.y.is_floating_point():
            raise ValueError(
                "y has classes, but the response of the method's model is Bernoulli; pass y as "
                "numbers 0 and 1, or use a categorical likelihood"
            )
        if isinstance(fn, dist.Unit):
            raise ValueError(
                "the model defines the likelihood of rows by pyro.factor, which cannot predict; "
                "use pyro.sample(..., obs=batch.y) for the response"
            )
        log_density = fn.log_prob(batch.y)
        mean = probabilities(fn) if isinstance(fn, CLASSES) else fn.mean
        if log_density.dim() == 3:
            mean, count = mean.mean(0), log_density.new_tensor(float(len(log_density)))
            log_density = log_density.logsumexp(0) - count.log()  # [C, B]
        means.append(mean)
        log_densities.append(log_density)
    log_count = torch.tensor(float(len(means))).log()
    mean = torch.stack(means).mean(0)
    density = torch.stack(log_densities).logsumexp(0) - log_count
    return Prediction(mean, density, crps(numbers, mean, batch, noise))


def crps(fns: list[Any], mean: Tensor, batch: Batch, noise: list[Generator] | None) -> Tensor:
    """Return the continuous ranked probability score (CRPS) of predictions, [C, B], or NaN.

    A prediction is an equal mixture of the distributions `fns`, and of the draws of each.

    It uses the closed form for a few normals, otherwise draws; `noise` is not advanced.
    """
    shape = (-1, *batch.mask.shape)
    unknown = mean.new_full(shape[1:], torch.nan)
    # The CRPS of classes and of vectors is not defined here.
    if not fns or any(fn.event_shape or fn.batch_shape[-2:] != shape[1:] for fn in fns):
        return unknown
    if all(isinstance(fn, dist.Normal) for fn in fns):
        loc = torch.cat([fn.loc.reshape(shape) for fn in fns])
        scale = torch.cat([fn.scale.reshape(shape) for fn in fns])
        if len(loc) <= MAX_CLOSED_FORM_NORMALS:
            return crps_of_normals(loc, scale, batch.y)
    generators = noise or [torch.default_generator] * len(batch)
    copies = [Generator().set_state(g.get_state()) for g in generators]
    count = -(-NUM_CRPS_DRAWS // sum(fn.batch_shape.numel() // mean.numel() for fn in fns))
    try:
        many = [fn.expand((count, *fn.batch_shape)) for fn in fns]
        draws = [draw(fn, len(fn.batch_shape) - 2, copies, rows=True).reshape(shape) for fn in many]
    except (NotImplementedError, TypeError, ValueError):
        return unknown
    return crps_of_draws(torch.cat(draws), batch.y).where(mean.isfinite(), torch.nan)


def responses(
    method: Method,
    received: Tensors,
    local: Tensors | list[Tensors],
    batch: Batch,
    draws: int | None,
    noise: list[Generator] | None,
) -> Iterator[Any]:
    """Yield each ensemble member's predictive distribution of the response.

    The response is the site "y", or the only observed site.
    """
    for member in local if isinstance(local, list) else [local]:
        handler: Any = LatentMeans()
        if draws:
            handler = nullcontext() if noise is None else ClientNoise(noise)
        with pyro.validation_enabled(False), torch.no_grad(), handler:
            try:
                _, trace = traces(method.model, method.guide, received, member, batch, draws)
            except KeyError as error:
                raise ValueError(
                    f"the programs read {error}, which is not among {', '.join(member)}; pass the "
                    "method of this state, with views that return this tensor"
                ) from error
        sites = dict(observed(trace))
        if "y" not in sites and len(sites) != 1:
            raise ValueError(
                f"observed sites are {sorted(sites)}; name the site to predict 'y', or keep only "
                "one"
            )
        yield (sites.get("y") or next(iter(sites.values())))["fn"]


def probabilities(fn: Any) -> Tensor:
    """Return the class probabilities [..., K] of a Bernoulli or categorical distribution."""
    if isinstance(fn, dist.Bernoulli):
        return torch.stack([1 - fn.probs, fn.probs], -1)
    if not isinstance(fn, dist.Categorical):
        raise ValueError(
            f"the response is a {type(fn).__name__}; class probabilities need a Bernoulli or "
            "Categorical likelihood"
        )
    probs: Tensor = fn.probs
    return probs


def _no_number(mean: Tensor, density: Tensor, mask: Tensor) -> tuple[int, int, float] | None:
    """Return client, row and value of the first non-finite prediction, or None."""
    mean = mean.reshape(*mask.shape, -1)  # [C, B, K or 1]
    # The mean of a distribution may be undefined (NaN), and a density may be 0.
    good = density.isfinite() | ((density == -torch.inf) & mean.isfinite().all(-1))
    if bool((good | ~mask).all()):
        return None
    c, b = (~good & mask).nonzero()[0].tolist()
    values = [*mean[c, b].tolist(), float(density[c, b])]
    return c, b, next(v for v in values if not isfinite(v))
