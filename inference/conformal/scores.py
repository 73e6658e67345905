"""Conformity scores of predictions: cumulative class probabilities or scaled errors.

Classes have the score of Romano, Sesia and Candes, "Classification with Valid and Adaptive
Coverage", NeurIPS 2020. With probabilities p sorted in descending order and u uniform on (0, 1),

    s(x, y) = sum of p_k of the classes above y + u p_y

Numbers have s(x, y) = |y - m(x)| / sd(x), with mean and standard deviation of the predictive
distribution (Lei et al., "Distribution-Free Predictive Inference for Regression", JASA 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.predict import CLASSES, answers, probabilities
from pyrofl.inference.evaluation.specification import EvaluationSpec


@dataclass(frozen=True)
class Forecast:
    """Predictive means and standard deviations of N rows of a client.

    Attributes:
        mean: [N, K] probabilities, or [N] expected responses.
        sd: [N] standard deviations of numbers, in units of y; zeros for classes.
        u: [N] uniform numbers of randomized scores; ones for deterministic scores.
    """

    mean: Tensor
    sd: Tensor
    u: Tensor

    @property
    def has_classes(self) -> bool:
        """Whether the response is a class label instead of a number."""
        return self.mean.dim() == 2

    def scores(self, y: Tensor) -> Tensor:
        """Return the conformity scores [N] of observed responses [N]."""
        if self.has_classes:
            return aps_scores(self.mean, self.u).gather(1, y.long()[:, None])[:, 0]
        return (y - self.mean).abs() / self.sd

    def select(self, rows: Tensor) -> Forecast:
        """Return the forecast restricted to the given rows."""
        return Forecast(self.mean[rows], self.sd[rows], self.u[rows])


def aps_scores(probs: Tensor, u: Tensor) -> Tensor:
    """Return the adaptive-prediction-set score of every class, from probabilities [N, K].

    Classes of equal probability keep their order.

    >>> aps_scores(torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([0.5]))
    tensor([[0.9000, 0.2500, 0.6500]])
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    above = ordered.cumsum(-1) - ordered
    return torch.empty_like(probs).scatter(-1, order, above + u[:, None] * ordered)


def test_predictions(
    method: Method, data: Federation, state: RoundState, spec: EvaluationSpec
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """For each client, yield its id, and predictive means, sds and responses of its test rows."""
    for ids, mean, _, sd, y, mask in answers(method, data, state, spec, _mean_and_sd):
        for i, *values, seen in zip(ids.tolist(), mean, sd, y, mask, strict=True):
            client_mean, client_sd, client_y = (v[seen].cpu().double() for v in values)
            check_predictive_sd(data.names[i], client_sd, client_mean.dim() == 2)
            yield i, client_mean, client_sd, client_y


def check_predictive_sd(name: str, sd: Tensor, has_classes: bool) -> None:
    """Raise ValueError if a predictive standard deviation is not positive and finite."""
    bad = ~(sd.isfinite() & (sd > 0))
    if not has_classes and bool(bad.any()):
        raise ValueError(
            f"{name}: the predictive standard deviation of a row is {float(sd[bad][0]):g}; "
            "conformal intervals need a likelihood with a positive, finite variance"
        )


def _mean_and_sd(
    members: Iterator[Any], batch: Batch, noise: list[Generator]
) -> tuple[Tensor, ...]:
    """Return predictive means (or class probabilities) and standard deviations of rows."""
    distributions, shape = list(members), batch.mask.shape
    unknown = torch.full(shape, -torch.inf, device=batch.mask.device)
    if isinstance(distributions[0], CLASSES):
        every = [probabilities(fn) for fn in distributions]
        probs = torch.cat(
            [p.expand(*p.shape[:-3], *shape, -1).reshape(-1, *shape, p.shape[-1]) for p in every]
        )
        return probs.mean(0), unknown, torch.zeros_like(unknown)
    means, variances = (
        torch.cat([_to_draws_clients_rows(getattr(fn, what), shape) for fn in distributions])
        for what in ("mean", "variance")
    )
    spread = means.var(0, correction=0)
    return means.mean(0), unknown, (variances.mean(0) + spread).sqrt()


def _to_draws_clients_rows(value: Tensor, shape: torch.Size) -> Tensor:
    """Reshape a predictive mean or variance to [S, C, B]: draws, clients and rows."""
    if value.shape[-2:] != shape:
        raise ValueError(
            "the response is a vector; conformal prediction needs a single number or a class per "
            "row"
        )
    return value.reshape(-1, *shape)
