"""Prediction sets of new rows from a calibrated run, and their coverage by client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pyrofl.arguments import check_name
from pyrofl.inference.conformal.quantiles import (
    ScoreSummary,
    new_client_quantile,
    pooled_quantile,
)
from pyrofl.inference.conformal.scores import Forecast, aps_scores, check_predictive_sd
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.evaluation.predictions import (
    Predictions,
    input_rows,
    named_clients,
    predictions,
    refuse_trained_clients,
)
from pyrofl.inference.evaluation.specification import EvaluationSpec
from pyrofl.inference.fitted_run.run import Run
from pyrofl.returned import calling
from pyrofl.summaries import Summarized
from pyrofl.user_warnings import warn_user

if TYPE_CHECKING:
    from pandas import DataFrame

Pooling = Literal["client", "pooled", "new_client"]
Weights = Callable[[Tensor], Tensor] | Mapping[str, float]
"""Density ratio of a new client's rows to the pooled rows, up to a factor: x [N, *x] -> [N], where
it depends on x alone; or class -> weight, where it depends on the class alone."""


@dataclass(frozen=True, repr=False, eq=False)
class PredictionSets(Summarized):
    """Prediction sets (of classes) or prediction intervals (of numbers) for N rows.

    Attributes:
        about: description of the model, its client and the calibration.
        alpha: error rate.
        predictions: the predictions of the rows.
        sets: [N, K] bool, whether a class is in the set; or [N, 2], lower and upper ends of the
            intervals in units of y.
    """

    about: str
    alpha: float
    predictions: Predictions
    sets: Tensor

    @property
    def size(self) -> Tensor:
        """Return the number of classes in each set, or the width of each interval: [N]."""
        return set_sizes(self.sets)

    @property
    def labels(self) -> list[tuple[str, ...]]:
        """Return the class names in each prediction set."""
        if not self.predictions.classes:
            raise ValueError("the method predicts numbers, which have no labels; use `sets`")
        names = self.predictions.classes
        return [tuple(n for n, y in zip(names, row, strict=True) if y) for row in self.sets]

    def columns(self) -> dict[str, list[Any]]:
        """Return predictions and sets as table columns, with sets as text such as "3|5"."""
        more: dict[str, list[Any]]
        if self.predictions.classes:
            more = {"set": ["|".join(some) for some in self.labels], "size": self.size.tolist()}
        else:
            more = dict(zip(("low", "high"), self.sets.T.tolist(), strict=True))
        return self.predictions.columns() | more

    def frame(self) -> DataFrame:
        """Return predictions and prediction sets as a data frame, with one line per row."""
        from pandas import DataFrame

        return DataFrame(self.columns())

    def overview(self) -> dict[str, str]:
        """Return the printed summary of the prediction sets, as label -> text."""
        kind = "set size" if self.predictions.classes else "interval width"
        return {
            "model": self.about,
            "coverage": f"at least {1 - self.alpha:g}",
            "rows": str(len(self.size)),
            kind: f"{float(self.size.double().mean()):.3g} on average",
        }


@dataclass(frozen=True, repr=False, eq=False)
class Conformal(Summarized):
    """Fitted run with calibrated prediction sets.

    Attributes:
        run: the run.
        alpha: error rate.
        how: model, adaptation, draws and seed of the predictions.
        randomized: whether scores of classes are randomized.
        messages: id of a client -> its message, with the sums of `weights` if there are some.
        thresholds: [J], threshold of each training client from its own scores; infinite without
            enough rows.
        pooled: threshold from the scores of all clients.
        weights: of rows, for new clients; see `pyrofl.conformal`.
        rows: the rows of `frame`.
    """

    run: Run
    alpha: float
    how: EvaluationSpec
    randomized: bool
    messages: Mapping[int, ScoreSummary]
    thresholds: Tensor
    pooled: float
    weights: Weights | None
    rows: Sequence[Mapping[str, Any]]

    def frame(self) -> DataFrame:
        """Return a table of prediction sets' coverage for each client, by kind of threshold.

        Coverage is measured on the test rows that do not calibrate.

        Columns: client; population, "training" or "held_out"; pooling, see `predict`; target,
        1 - alpha; calibration_rows and test_rows, their numbers; threshold, the largest of the
        rows; coverage, the fraction of test rows with the true response in the set; error, the
        binomial standard error of a coverage of 1 - alpha; low and high, the range that has the
        coverage with probability 0.95 if all rows are exchangeable (beta-binomial: it includes the
        random calibration rows); size, the mean number of classes or width of intervals; empty, the
        fraction of empty sets.
        """
        from pandas import DataFrame

        return DataFrame(self.rows)

    def predict(
        self,
        x: Any,
        client: str | None,
        own: Sequence[Any] | None = None,
        *,
        pooling: Pooling | None = None,
    ) -> PredictionSets:
        """Return prediction sets or intervals for new rows of one client.

        Args:
            x: [N, *x], rows as in `Run.predict`.
            client: name of a client; None is a new client.
            own: (x, y), labeled rows of a new client, for its personal model.
            pooling: scores for the threshold. "client": those of the client itself, for coverage at
                this client; default of known clients. "pooled": of all clients, for coverage on
                average over their rows. "new_client": of all clients, each with the same weight,
                or with the `weights`; default of new clients.

        Raises:
            ValueError: as `Run.predict`; or if a new client has no own scores, or no model of the
                kind that was calibrated.

        Warns:
            UserWarning: if there are too few scores, so that sets contain all classes.
        """
        owners = named_clients(self.run.data, x, client) if client is None else []
        why = "and thresholds differ between clients; pass client= and its rows, one at a time"
        refuse_trained_clients(owners, self.run.data.names, why)
        pooling = pooling or ("new_client" if client is None else "client")
        check_name(pooling, ("client", "pooled", "new_client"), "pooling")
        if client is None and pooling == "client":
            raise ValueError("a new client has no scores; use pooling='new_client' or 'pooled'")
        run, model, adaptation = self.run, self.how.model, self.how.adaptation
        if client is None and model == "personal":
            if own is None:
                raise ValueError(
                    "the scores are those of personal models; pass own=(x, y), labeled rows of the "
                    "new client, or calibrate with conformal(run, model='global')"
                )
            adaptation = new_adaptation(run)
        client_predictions = predictions(
            *(run.method, run.data, run.state, x, client, own),
            model=model,
            adaptation=adaptation,
            draws=self.how.draws,
            seed=self.how.seed,
        )
        mean = client_predictions.mean.cpu().double()
        sd = (
            torch.zeros(len(mean))
            if client_predictions.classes
            else client_predictions.values["sd"].cpu().double()
        )
        check_predictive_sd(client or "new client", sd, bool(client_predictions.classes))
        source = stream(self.how.seed, Stream.CONFORMAL, client or "", "prediction")
        forecast = Forecast(mean, sd, torch.rand(len(mean), generator=source, dtype=mean.dtype))
        inputs = input_rows(run.data, x).cpu() if callable(self.weights) else None
        q = self.threshold(pooling, len(mean), client, inputs)
        if not bool(q.isfinite().all()):
            warn_user(
                f"{int((~q.isfinite()).reshape(len(q), -1).any(1).sum())} of {len(q)} rows have "
                f"unbounded sets, as there are too few scores for alpha {self.alpha:g} with "
                f"pooling {pooling!r}; use more calibration rows or clients, or a larger alpha"
            )
        about = f"{client_predictions.about}; threshold: {pooling}"
        return PredictionSets(about, self.alpha, client_predictions, self.sets(forecast, q))

    def threshold(
        self, pooling: Pooling, count: int, client: str | None = None, x: Tensor | None = None
    ) -> Tensor:
        """Return each row's threshold of the conformity score: [N, 1], or [N, K] by class.

        Args:
            pooling: see `predict`.
            count: number N of rows.
            client: name of the client, for its own threshold.
            x: [N, *x], rows of a new client, for weights that depend on them.
        """
        parts = list(self.messages.values())
        if pooling == "client":
            q = self.thresholds[self.run.data.names.index(client or "")]
        elif pooling == "pooled":
            q = torch.tensor(self.pooled)
        elif self.weights is None:
            q = new_client_quantile(parts, self.alpha)
        else:
            return pooled_quantile(
                parts, self.alpha, new_row_weights(self.weights, self.run, count, x)
            )
        return q.double().expand(count, 1)

    def sets(self, forecast: Forecast, q: Tensor) -> Tensor:
        """Return prediction sets [N, K] or intervals [N, 2], given score thresholds of the rows."""
        if forecast.has_classes:
            # Without randomization calibration scores have u = 1. Sets with u = 0 contain those
            # with u = 1, and are never empty.
            u = forecast.u if self.randomized else torch.zeros_like(forecast.u)
            return aps_scores(forecast.mean, u) <= q
        width = q[:, 0] * forecast.sd
        return torch.stack([forecast.mean - width, forecast.mean + width], -1)

    def overview(self) -> dict[str, str]:
        """Return the printed summary of the calibration, as label -> text."""
        adapted = "" if self.how.adaptation == "none" else ", adapted"
        sent = sum(part.num_bytes for part in self.messages.values())
        n, off = (
            sum(int(part.num_scores) for part in self.messages.values()),
            sum(part.rank_error for part in self.messages.values()),
        )
        lines = {
            "model": f"{self.how.model}{adapted}",
            "coverage": f"at least {1 - self.alpha:g}",
            "scores": f"{n} of {len(self.messages)} clients",
            "sent": f"{sent:,} bytes by all clients; the pooled quantile is at most {off} ranks "
            "above the exact one",
        }
        for pooling in ("client", "pooled", "new_client"):
            some = [r for r in self.rows if r["pooling"] == pooling and r["test_rows"]]
            if count := sum(r["test_rows"] for r in some):
                mean, size = (
                    sum(r[what] * r["test_rows"] for r in some) / count
                    for what in ("coverage", "size")
                )
                inside = sum(r["low"] <= r["coverage"] <= r["high"] for r in some)
                error = (self.alpha * (1 - self.alpha) / count) ** 0.5
                lines[pooling] = (
                    f"coverage {mean:.3f} ± {error:.3f}, mean size {size:.3g}; {inside} of "
                    f"{len(some)} clients within their 95% range"
                )
        return lines


def set_sizes(sets: Tensor) -> Tensor:
    """Return the size of each prediction set [N, K], or the width of each interval [N, 2]."""
    return sets.sum(-1) if sets.dtype == torch.bool else sets[:, 1] - sets[:, 0]


def new_adaptation(run: Run) -> Literal["fine_tune", "train"]:
    """Return how a new client's personal model is adapted: "fine_tune" or "train"."""
    return "fine_tune" if run.method.adapt else "train"


def row_weights(weights: Weights, run: Run, x: Tensor, y: Tensor) -> Tensor:
    """Return the validated density-ratio weights of labeled rows, [N]."""
    if isinstance(weights, Mapping):
        return _class_weights(weights, run)[y.long()]
    with calling("weights"):
        values = weights(x)
    if not torch.is_tensor(values) or values.shape != x.shape[:1]:
        kind = f"shape {list(values.shape)}" if torch.is_tensor(values) else type(values).__name__
        raise ValueError(f"weights returns {kind}; expected a tensor of shape {list(x.shape[:1])}")
    values = values.detach().double()
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError("weights returns a negative or infinite number; expected numbers >= 0")
    return values


def new_row_weights(weights: Weights, run: Run, count: int, x: Tensor | None) -> Tensor:
    """Return the density-ratio weights of new rows: [N, 1], or [N, K] if they depend on class."""
    if isinstance(weights, Mapping):
        return _class_weights(weights, run).expand(count, -1)
    assert x is not None
    return row_weights(weights, run, x, x)[:, None]


def _class_weights(weights: Mapping[str, float], run: Run) -> Tensor:
    """Return each class's density-ratio weight, [K], which is 1 for classes without a given one."""
    classes = run.data.classes
    if not classes:
        raise ValueError("weights are given by class, but y is a number; pass a function of x")
    for name, value in weights.items():
        check_name(name, classes, "class")
        if not 0 <= value < inf or not isfinite(value):
            raise ValueError(f"weights[{name!r}] is {value!r}; expected a number >= 0")
    return torch.tensor([float(weights.get(n, 1.0)) for n in classes], dtype=torch.float64)
