"""Evaluation of a fitted model on clients' rows: scores, calibration and uncertainty.

`uncertainty` estimates how uncertain classifiers are of single rows, and whether because of noisy
labels (aleatoric) or too few rows (epistemic).
Depeweg, Hernandez-Lobato, Doshi-Velez and Udluft, "Decomposition of Uncertainty in Bayesian Deep
Learning", ICML 2018. With probabilities p_s of every draw s of the guide, or member of an ensemble,

    total = H[mean_s p_s],   aleatoric = mean_s H[p_s],   epistemic = total - aleatoric
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Generator, Tensor

from pyrofl import metrics as scoring
from pyrofl.arguments import Count, PositiveShare, check_name, checked
from pyrofl.data import Batch, Federation, check_table
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.predict import Prediction, answers, predict, probabilities
from pyrofl.inference.evaluation.prepare import pooled_name, untrained
from pyrofl.inference.evaluation.specification import EvaluationFields, EvaluationSpec
from pyrofl.returned import calling
from pyrofl.summaries import Summarized
from pyrofl.tensors import Tensors, join_up
from pyrofl.turns import synchronized

if TYPE_CHECKING:
    from pandas import DataFrame

SCORES = ("total", "aleatoric", "epistemic", "doubt")

Metric = Callable[[Prediction, Tensor, Tensor], Tensor]
"""(prediction, y [C, B], mask [C, B]) -> [C], means over a client's rows; mask hides padding."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Scores(Summarized, EvaluationSpec):
    """Evaluation metrics of a model for each client, with the settings of the evaluation.

    Attributes:
        ids, rows: [C], the clients with such rows, and their numbers of rows.
        values: metric -> [C], means over a client's rows; without metrics that are NaN for a
            client, as the rmse of a distribution without a mean.
        predicted: predictions of all rows, client by client, [sum of rows, ...]; None if they stay
            at the clients, and in `smallest`.
        rejected: reasons for leaving out invalid replies of remote clients, "client: reason".
        untrained: names of the clients whose personal model has not trained: their scores, which
            are in `values`, are those of its initial values.
        names: [C], names of the clients; () if unknown.

    Examples:
        >>> import pyrofl
        >>> from pyrofl import datasets, federations, nets
        >>> from pyrofl.models import fedavg
        >>> data = federations.split(datasets.load("digits"), "iid", clients=4)
        >>> run = pyrofl.fit(
        ...     fedavg.build(nets.build("softmax", (64,), 10)), data, rounds=1, progress=False
        ... )
        >>> scores = run.evaluate()
        >>> scores.to_dataframe().shape
        (4, 9)
    """

    model: str
    ids: Tensor
    rows: Tensor
    values: Tensors
    predicted: Prediction | None = None
    rejected: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Title of the summary: model, adaptation, rows and clients."""
        adapted = {"none": "", "fine_tune": ", fine-tuned", "train": ", trained"}[self.adaptation]
        whose = {"training": "", "held_out": " of held-out clients", "pooled": ", pooled"}
        rows = f"{self.part} rows{whose[self.population]}"
        return f"Scores of the {self.model} model{adapted} on {rows}"

    def overview(self) -> dict[str, object]:
        """Return the numbers of clients and rows, and each metric's mean and range by client."""
        rows, names = self.rows.tolist(), self._names()
        few, many = min(rows), max(rows)
        each = f"{few:,}" if few == many else f"{few:,} to {many:,}"
        facts: dict[str, object] = {
            "clients": len(names),
            "rows": f"{each} per client, {sum(rows):,} in all",
        }
        for metric, value in self.values.items():
            mean = f"mean {float(value.nanmean()):.4g}"
            if len(names) > 1 and not value.isnan().all():
                low = int(value.nan_to_num(torch.inf).argmin())
                high = int(value.nan_to_num(-torch.inf).argmax())
                ends = (f"{float(value[i]):.4g} ({names[i]})" for i in (low, high))
                mean += f" over clients, from {' to '.join(ends)}"
                unknown = int(value.isnan().sum())
                mean += f"; NaN for {unknown} of {len(names)} clients" if unknown else ""
            facts[metric] = mean
        if self.untrained:
            facts["untrained"] = ", ".join(self.untrained)
        if self.rejected:
            facts["rejected"] = "; ".join(self.rejected)
        return facts

    def to_dataframe(self) -> DataFrame:
        """Return a pandas data frame with one row per client: numbers of rows, and the metrics."""
        from pandas import DataFrame, Index

        columns = {"rows": self.rows.tolist()} | {n: v.tolist() for n, v in self.values.items()}
        return DataFrame(columns, index=Index(self._names(), name="client"))

    def _names(self) -> list[str]:
        """Return the clients' names, or their ids if these are unknown."""
        return [*self.names] or [str(i) for i in self.ids.tolist()]

    def mean(self, metric: str, weighting: scoring.Weighting = "client") -> float:
        """Return the mean of a metric over clients, weighted equally or by number of rows."""
        check_name(metric, self.values, "metric")
        return float(scoring.pool(self.values[metric], self.rows, weighting))

    @checked
    def smallest(self, share: PositiveShare, sizes: Tensor) -> Scores:
        """Restrict the scores to the given fraction of clients with the fewest training rows.

        At least one client is kept. `sizes` are the numbers of training rows of all clients, by id.
        """
        order = sizes[self.ids].argsort(stable=True)
        keep = order[: max(1, round(share * len(order)))].sort().values
        values = {n: v[keep] for n, v in self.values.items()}
        names = tuple(self.names[i] for i in keep.tolist()) if self.names else ()
        return replace(
            self,
            ids=self.ids[keep],
            rows=self.rows[keep],
            values=values,
            predicted=None,
            names=names,
        )


@checked
@synchronized
def evaluate(
    method: Method,
    data: Federation,
    state: RoundState,
    *,
    metrics: Mapping[str, Metric] | None = None,
    **asked: Unpack[EvaluationFields],
) -> Scores:
    """Compute evaluation metrics of a model on each client's rows.

    Args:
        method: as trained.
        data: the federation.
        state: the round to evaluate; it is not changed.
        metrics: name -> custom metric, in addition to those of `pyrofl.metrics`; its NaN are left
            out of means.
        asked: fields of `EvaluationSpec`: model, adaptation, population, part, draws, seed,
            chunk_size.

    Returns:
        The scores by client.

    Raises:
        ValueError: if a field is out of range, the method has no such model, no client has such
            rows, a custom metric does not return a number per client or has the name of a built-in
            one, or a prediction is not finite; the message names client, model and row.
    """
    how, custom = EvaluationSpec.of(asked), metrics or {}
    how = replace(how, model=how.view_name(method))
    batches, by_client = [], dict[int, Prediction]()
    for some, prediction, y, mask in predict(method, data, state, **vars(how)):
        batches.append((some, mask.sum(1), score(prediction, y, mask, custom)))
        for i, seen, *both in zip(some.tolist(), mask, *prediction, strict=True):
            by_client[i] = Prediction(*(value[seen].cpu() for value in both))
    ids, order = torch.cat([some for some, *_ in batches]).sort()
    values = {n: v.cpu()[order] for n, v in join_up(v for *_, v in batches).items()}
    names = (*data.names, pooled_name(data))
    return Scores(
        **vars(how),
        names=tuple(names[i] for i in ids.tolist()),
        ids=ids,
        rows=torch.cat([rows for _, rows, _ in batches]).cpu()[order],
        # Built-in metrics are NaN where the likelihood does not define them.
        values={n: v for n, v in values.items() if n in custom or not bool(v.isnan().any())},
        predicted=Prediction(
            *map(torch.cat, zip(*(by_client[i] for i in ids.tolist()), strict=True))
        ),
        untrained=untrained(method, data, state, how),
    )


def score(
    prediction: Prediction, y: Tensor, mask: Tensor, metrics: Mapping[str, Metric]
) -> Tensors:
    """Compute built-in and custom metrics of clients' predictions: name -> [C]."""
    if prediction.mean.dim() == 3:
        values = scoring.classification(prediction.mean, y.long(), mask)
    else:
        values = scoring.regression(*prediction, y, mask)
    for name, metric in metrics.items():
        if name in values or not callable(metric):
            raise ValueError(
                f"metrics[{name!r}] is {metric!r}; expected a function, with a name other than "
                f"{', '.join(values)}"
            )
        with torch.no_grad(), calling(f"metric {name!r}"):
            client_values = metric(prediction, y, mask)
        tensor = torch.is_tensor(client_values)
        if not tensor or client_values.shape != mask.shape[:1]:
            kind = (
                f"{client_values.dtype} of shape {list(client_values.shape)}"
                if tensor
                else type(client_values).__name__
            )
            raise ValueError(
                f"metric {name!r} returns {kind}; expected a tensor of shape "
                f"{list(mask.shape[:1])}, a number for each client"
            )
        values[name] = client_values.to(prediction.log_density)
    return values


@checked
@synchronized
def calibration(
    method: Method, data: Federation, state: RoundState, **asked: Unpack[EvaluationFields]
) -> scoring.Bins:
    """Return a classifier's predictions binned by confidence, for a reliability diagram.

    Arguments and errors are those of `evaluate`; the method must be a classifier.
    """
    by_client = _confidence(method, data, state, asked).values()
    sure, right = (torch.cat(some) for some in zip(*by_client, strict=True))
    return scoring.calibration_bins(sure, right)


@checked
@synchronized
def calibration_by_client(
    method: Method,
    data: Federation,
    state: RoundState,
    bins: Count = 15,
    **asked: Unpack[EvaluationFields],
) -> dict[str, scoring.Bins]:
    """Return each client's predictions binned by confidence, for reliability diagrams.

    Arguments and errors are those of `calibration`; use fewer bins for clients with few rows.

    Returns:
        Bins [bins] by the clients' names, in their order; `pyrofl.metrics.calibration_error`
        computes the expected calibration error from them.
    """
    by_client = _confidence(method, data, state, asked)
    names = (*data.names, pooled_name(data))
    return {names[i]: scoring.calibration_bins(*by_client[i], bins=bins) for i in sorted(by_client)}


def _confidence(
    method: Method, data: Federation, state: RoundState, options: EvaluationFields
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return, by client, each row's largest class probability and whether its class is correct."""
    by_client = {}
    for ids, prediction, y, mask in predict(method, data, state, **options):
        if prediction.mean.dim() < 3:
            raise ValueError("the method predicts numbers; calibration needs a classifier")
        sure, top = prediction.mean.max(-1)
        for i, one, right, rows in zip(ids.tolist(), sure, top == y, mask, strict=True):
            by_client[i] = one[rows], right[rows].to(sure)
    return by_client


@dataclass(frozen=True)
class Uncertainty:
    """Predictive uncertainty scores of clients' rows; larger means less certain.

    Attributes:
        ids: [C], ids of the clients.
        rows: [C], number of rows of each.
        values: "total", "aleatoric" and "epistemic" entropy in nats, and "doubt", one minus the
            largest probability: [sum of rows], client by client.
        names: names of the clients; () if unknown.
    """

    ids: Tensor
    rows: Tensor
    values: Tensors
    names: tuple[str, ...] = ()

    def by_client(self, score: str) -> list[Tensor]:
        """Return an uncertainty score of each client's rows, as a list of tensors [N]."""
        return list(self.values[score].split(self.rows.tolist()))

    def mean(self, score: str) -> Tensor:
        """Return the mean of an uncertainty score over each client's rows, [C]."""
        return torch.stack([v.mean() for v in self.by_client(score)])

    def told_apart(self, outside: Uncertainty, score: str) -> Tensor:
        """Return each client's AUROC of an uncertainty score that separates its from other rows.

        The result has one AUROC for each client; the others' rows are matched by the client's name.
        """
        one, other = (each.names or each.ids.tolist() for each in (self, outside))
        if {*one} != {*other}:
            shown = " and ".join(", ".join(map(str, each)) for each in (one, other))
            raise ValueError(f"clients are {shown}; both must have the same clients")
        others = dict(zip(other, outside.by_client(score), strict=True))
        client_scores = zip(one, self.by_client(score), strict=True)
        return torch.stack(
            [scoring.auroc(scores, others[client]) for client, scores in client_scores]
        )


@synchronized
def uncertainty(
    method: Method,
    data: Federation,
    state: RoundState,
    x: Tensor | None = None,
    **asked: Unpack[EvaluationFields],
) -> Uncertainty:
    """Estimate the aleatoric and epistemic uncertainty of each client's predictions.

    Args:
        method: as trained, a classifier.
        data: the federation.
        state: the round.
        x: [N, *x], rows for every client; default each client's own test rows.
        asked: fields of `EvaluationSpec` except part. Draws are 100 by default; with None, the
            guide's mean, the epistemic part is zero. Members of an ensemble count as draws.

    Returns:
        The scores of all rows; see `Uncertainty`.

    Raises:
        ValueError: as `evaluate`; or if x has another shape than the federation's, or the method
            is not a classifier.
    """
    how = EvaluationSpec.of({"draws": 100, **asked}, excluded=("part",))
    table = ("the data", 0) if x is None else ("x", len(data.x))
    everything = data if x is None else _with_test_rows(data, x)

    def read(members: Iterator[Any], batch: Batch, noise: list[Generator]) -> tuple[Tensor, ...]:
        """Return mean class probabilities, a placeholder density and uncertainty scores of rows."""
        shape = (how.draws or 1, *batch.mask.shape, -1)
        probs = torch.cat([probabilities(fn).expand(shape) for fn in members])  # [S, C, B, K]
        mean = probs.mean(0)
        scores = scoring.entropies(probs) | {"doubt": 1 - mean.amax(-1)}
        unknown = mean.new_full(batch.mask.shape, -torch.inf)
        return mean, unknown, torch.stack([scores[n] for n in SCORES], -1)

    by_client = {
        i: values[seen].cpu()
        for some, _, _, scores, _, mask in answers(method, everything, state, how, read, table)
        for i, values, seen in zip(some.tolist(), scores, mask, strict=True)
    }
    ids = sorted(by_client)
    rows = torch.tensor([len(by_client[i]) for i in ids])
    columns = torch.cat([by_client[i] for i in ids]).unbind(-1)
    every = (*data.names, pooled_name(data))
    names = tuple(every[i] for i in ids)
    return Uncertainty(torch.tensor(ids), rows, dict(zip(SCORES, columns, strict=True)), names)


def _with_test_rows(data: Federation, x: Tensor) -> Federation:
    """Give every client of a federation the test rows x, with placeholder responses."""
    if not len(x) or x.shape[1:] != data.x.shape[1:]:
        raise ValueError(
            f"x has shape {list(x.shape)}; expected at least one row of {list(data.x.shape[1:])}"
        )
    y = data.y[:1].expand(len(x), *data.y.shape[1:])
    check_table(x, y)
    test = (len(data.x) + torch.arange(len(x)),) * len(data.test)
    both = torch.cat([data.x, x.to(data.x)])
    old = data.weights
    weights = None if old is None else torch.cat([old, old.new_ones(len(x))])
    return replace(data, x=both, y=torch.cat([data.y, y]), test=test, weights=weights)
