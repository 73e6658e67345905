"""Predictions of new rows for one client: class probabilities, or numbers with quantiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Generator, Tensor

from pyrofl.arguments import check_name
from pyrofl.data import Batch, Cohort, Federation
from pyrofl.data.arrays import inputs, responses_of
from pyrofl.data.tables.wording import listed
from pyrofl.extensions import find_extension
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.programs import Supervised
from pyrofl.inference.definition.seeds import Stream, stream
from pyrofl.inference.engine.state import RoundState, refuse_absent_states
from pyrofl.inference.evaluation.predict import (
    CLASSES,
    PREDICTION_CHUNK_ROWS,
    mark_unseen,
    probabilities,
    responses,
)
from pyrofl.inference.evaluation.prepare import ready
from pyrofl.inference.evaluation.specification import (
    EvaluationSpec,
    ModelOptions,
    default_evaluation,
)
from pyrofl.inference.monitoring.status import trained_by
from pyrofl.metrics import entropies
from pyrofl.summaries import Summarized
from pyrofl.tensors import Tensors, generator, lent, matches
from pyrofl.turns import synchronized
from pyrofl.user_warnings import warn_user

if TYPE_CHECKING:
    from pandas import DataFrame

NEW_CLIENT = "new client"
QUANTILES = (0.05, 0.5, 0.95)
NUM_RESPONSE_DRAWS = 4000  # draws of a response, for its quantiles


class PredictionOptions(ModelOptions, total=False):
    """Optional keyword arguments for predictions of new rows, such as model and draws."""

    draws: int | None


@dataclass(frozen=True, repr=False)
class Predictions(Summarized):
    """Predictive distributions of N new rows for one client.

    Attributes:
        about: description of the model, its client and its adaptation.
        classes: names of the classes, or () if the response is a number.
        mean: probabilities of the classes [N, K], or expected responses [N].
        values: name -> [N]. For classes "entropy" in nats, and for several draws or an ensemble
            "epistemic", its reducible part (the mutual information of class and draw). For numbers
            "sd" and the quantiles "5%", "50%", "95%" of the response, including noise, from at
            least 4,000 samples, with an error of about 0.03 sd.
    """

    about: str
    classes: tuple[str, ...]
    mean: Tensor
    values: Tensors

    @property
    def labels(self) -> list[str]:
        """Return the name of the most probable class of each row."""
        if not self.classes:
            raise ValueError("the method predicts numbers, which have no labels; use `mean`")
        return [self.classes[k] for k in self.mean.argmax(-1).tolist()]

    def columns(self) -> dict[str, list[Any]]:
        """Return the predictions as table columns: column name -> values."""
        more = {n: v.tolist() for n, v in self.values.items()}
        if not self.classes:
            return {"mean": self.mean.tolist(), **more}
        each = zip(self.classes, self.mean.unbind(-1), strict=True)
        return {"class": self.labels, **{f"p({n})": p.tolist() for n, p in each}, **more}

    def frame(self) -> DataFrame:
        """Return the predictions as a data frame, with a line for each predicted row."""
        from pandas import DataFrame

        return DataFrame(self.columns())

    def overview(self) -> dict[str, str]:
        """Return the printed summary of the predictions, as label -> text."""
        kind = f"{len(self.classes)} classes" if self.classes else "numbers"
        return {
            "model": self.about,
            "rows": str(len(self.mean)),
            "of": f"{kind}, with {', '.join(self.values)}",
        }


@synchronized
def predictions(
    method: Method,
    data: Federation,
    state: RoundState,
    x: Any,
    client: str | None,
    own: Sequence[Any] | None = None,
    **asked: Unpack[PredictionOptions],
) -> Predictions:
    """Predict the responses of new rows; see `Run.predict`."""
    rows = input_rows(data, x)
    owners = named_clients(data, x, client)
    if owners and own is not None:
        refuse_trained_clients(
            owners, data.names, "and own rows are given; pass own rows for a new client"
        )
    if owners and client is None and set(owners) & set(data.names):
        return _by_client(method, data, state, rows, owners, asked)
    return _of_client(method, data, state, rows, client, own, **asked)


def named_clients(data: Federation, x: Any, client: str | None) -> list[str]:
    """Return the client that each new row names, or [] if the table has no column of clients.

    Raises:
        ValueError: if a row names another client than the requested one.
    """
    column = data.source.client_column if data.source else ""
    find = find_extension("clients of rows") if column else None
    owners: list[str] = find(x, column, data.names, client) if find else []
    return owners


def refuse_trained_clients(owners: Sequence[str], names: Sequence[str], why: str) -> None:
    """Raise ValueError if rows name a known client where only rows of a new client are valid."""
    seen = [name for name in dict.fromkeys(owners) if name in names]
    if seen:
        raise ValueError(f"rows name the known client {listed(seen, 3)}, {why}")


def _by_client(
    method: Method,
    data: Federation,
    state: RoundState,
    rows: Tensor,
    owners: Sequence[str],
    options: PredictionOptions,
) -> Predictions:
    """Predict each row for the client that it names, or a new client where it is unknown."""
    each = {}
    for name in dict.fromkeys(owners):
        client_rows = rows[torch.tensor([one == name for one in owners])]
        client = name if name in data.names else None
        each[name] = _of_client(method, data, state, client_rows, client, None, **options)
    parts = list(each.values())
    mean, values = in_order(owners, {name: (one.mean, one.values) for name, one in each.items()})
    about = listed(list(dict.fromkeys(one.about for one in parts)))
    return Predictions(about, parts[0].classes, mean, values)


def in_order(
    owners: Sequence[str], each: Mapping[str, tuple[Tensor, Tensors]]
) -> tuple[Tensor, Tensors]:
    """Return means and statistics of all rows in their order, given those of each client."""
    places = torch.tensor([i for name in each for i, one in enumerate(owners) if one == name])
    order = places.argsort()
    shared = [n for n in next(iter(each.values()))[1] if all(n in v for _, v in each.values())]
    values = {n: torch.cat([v[n] for _, v in each.values()])[order] for n in shared}
    return torch.cat([mean for mean, _ in each.values()])[order], values


def _of_client(
    method: Method,
    data: Federation,
    state: RoundState,
    rows: Tensor,
    client: str | None,
    labeled_rows: Sequence[Any] | None,
    **options: Unpack[PredictionOptions],
) -> Predictions:
    """Predict the responses of preprocessed rows for one client."""
    data, i = (
        _with_new_client(data, labeled_rows)
        if client is None
        else _trained_client(data, client, labeled_rows)
    )
    how = _prediction_spec(method, options, client is None, labeled_rows is not None)
    cohort = torch.tensor([i])
    if client is not None:
        refuse_absent_states(method, data, state, cohort, how.view_name(method))
    (_, received, local, noise), *_ = ready(method, data, state, cohort, how)
    name = data.names[i]
    if client is None and how.adaptation == "none" and how.view_name(method) == "personal":
        _warn_untrained(method, received, data.cohort(cohort))
    source = stream(how.seed, Stream.ROWS, state.number, name)
    parts = []
    for some in rows.split(PREDICTION_CHUNK_ROWS):
        answers = data.y.new_zeros(1, len(some), *data.y.shape[1:])
        mask = torch.ones(1, len(some), dtype=torch.bool, device=data.device)
        of = data.cohort(cohort)
        features = data.source.features if data.source else ()
        unseen = Batch(some[None], answers, mask, of.size, of.ids, features=features)
        batch = mark_unseen(unseen)
        members = responses(method, received, local, batch, how.draws, noise)
        parts.append(predictive_values(members, len(some), how.draws, source))
    mean, values = (
        torch.cat([part for part, _ in parts]),
        {n: torch.cat([v[n] for _, v in parts]) for n in parts[0][1]},
    )
    if not bool(mean.isfinite().all()):
        row = int((~mean.isfinite().reshape(len(mean), -1).all(1)).nonzero()[0])
        raise ValueError(
            f"{name}: its {how.view_name(method)} model predicts no number for row {row} of x; "
            "expected finite numbers: scale the inputs as those of training"
        )
    kinds = tuple(map(str, range(mean.shape[-1])))  # as of a Bernoulli response
    classes = data.classes or kinds
    summary = _about(data, state, i, client is None, labeled_rows is not None, how)
    return Predictions(summary, classes if mean.dim() > 1 else (), mean, values)


def input_rows(data: Federation, x: Any, what: str = "x") -> Tensor:
    """Validate new inputs, and convert them to a tensor preprocessed as the training rows."""
    source = data.source
    preparation = source.preparation if source else None
    is_table = preparation and not preparation.plain and not isinstance(x, Tensor | np.ndarray)
    if preparation and is_table:
        rows: Tensor = preparation.apply(x)
    else:
        rows = torch.from_numpy(inputs(what, x, source.features if source else ())[0])
    if rows.shape[1:] != data.x.shape[1:] or not len(rows):
        raise ValueError(
            f"{what} has shape {list(rows.shape)}; expected at least one row of "
            f"{list(data.x.shape[1:])}"
        )
    if preparation and (far := preparation.find_outlier(rows)):
        row, column, off = far
        place = preparation.place_of(x, row) if is_table else f"row {row}"
        warn_user(
            f"{what}: column {column.name} holds {off * column.scale + column.center:.6g} in "
            f"{place}, {abs(off):.3g} standard deviations from its mean in training; predictions "
            "so far from all training rows are unreliable"
        )
    return rows.to(data.x)


def _trained_client(data: Federation, client: str, labeled_rows: object) -> tuple[Federation, int]:
    if not isinstance(client, str):
        names = listed(data.names, 3)
        raise ValueError(
            f"client is {client!r}; expected None for a new client, or a name, such as {names}"
        )
    check_name(client, data.names, "client")
    if labeled_rows is not None:
        raise ValueError(
            f"own rows are given for the known client {client!r}; pass client=None for a new client"
        )
    return data, data.names.index(client)


def _with_new_client(
    data: Federation, labeled_rows: Sequence[Any] | None
) -> tuple[Federation, int]:
    """Return a federation with a new client that has the given rows, and the client's id."""
    x, y = data.x[:1], data.y[:1]
    if labeled_rows is not None:
        if not isinstance(labeled_rows, tuple | list) or len(labeled_rows) != 2:
            raise ValueError(f"own is a {type(labeled_rows).__name__}; expected (x, y)")
        x = input_rows(data, labeled_rows[0], "own x")
        y = responses_of("own y", labeled_rows[1], data.classes).to(data.y)
        if len(x) != len(y):
            raise ValueError(
                f"own x and own y must have the same number of rows; got {len(x)} and {len(y)}"
            )
    name = NEW_CLIENT
    while name in data.names:
        name += ", not seen before"
    count, none = len(data.names), torch.zeros(0, dtype=torch.long)
    extended = Federation(
        x.contiguous(),
        y.contiguous(),
        (*(torch.zeros(1, dtype=torch.long),) * count, torch.arange(len(x))),
        (none,) * (count + 1),
        (*data.names, name),
        data.classes,
        data.held_out + 1,
        source=data.source,
    )
    return extended, count


def _prediction_spec(
    method: Method, options: PredictionOptions, new: bool, has_rows: bool
) -> EvaluationSpec:
    """Return the settings of a prediction, with defaults for model and adaptation."""
    view, adaptation = default_evaluation(method)
    if new and not has_rows:
        view, adaptation = "global" if "global" in method.views else view, "none"
    if new and has_rows and adaptation == "none" and view == "personal":
        adaptation = "train"
    if options.get("model") not in (None, view):
        view, adaptation = str(options["model"]), "none"
    how = EvaluationSpec.of(
        {"model": view, "adaptation": adaptation, **_said(options)}, excluded=("population", "part")
    )
    if new and not has_rows and how.adaptation != "none":
        raise ValueError(
            f"adaptation is {how.adaptation!r}, but the new client has no rows; pass own=(x, y)"
        )
    how.view_name(method)
    return how


def _warn_untrained(method: Method, received: Tensors, cohort: Cohort) -> None:
    """Warn if a new client's model has untrained tensors; raise ValueError if it receives none."""
    trained = trained_by(method) or ""
    starts = [
        method.init_client({n: v + k for n, v in received.items()}, cohort, generator(0))
        for k in (0, 1)
    ]
    # Tensors that depend on nothing received are not learned from other clients.
    same = [n for n, v in starts[0].items() if torch.equal(v, starts[1][n])]
    blank = [n for n in same if matches(n, trained)]
    if received:  # variational parameters of a program may start at its prior
        model, start = method.model, starts[0] | received
        homes = model.homes(method.guide, start) if isinstance(model, Supervised) else {}
        blank = [n for n in blank if n in homes.values()]
    if not blank:
        return
    cure = "pass labeled rows of the client, own=(x, y) (pyrofl predict --own-rows FILE)"
    if not received:
        raise ValueError(
            f"{method.name or 'this method'} sends nothing to clients, so a new client without "
            f"rows has an untrained model; {cure}"
        )
    names = listed([n.partition("/")[2] or n for n in blank], 4)
    warn_user(f"{names} of a new client without rows are untrained; {cure}")


def _said(options: PredictionOptions) -> dict[str, Any]:
    return {n: v for n, v in options.items() if v is not None}


def _about(
    data: Federation, state: RoundState, i: int, new: bool, has_rows: bool, how: EvaluationSpec
) -> str:
    """Describe the model, client and adaptation of predictions in one line of text."""
    adaptation = {
        "none": "",
        "fine_tune": ", adapted to its training rows",
        "train": ", trained on its rows",
    }
    met = ""
    if new:
        met = " with its own rows" if has_rows else " without rows"
    elif i >= data.clients:
        met = ", which was held out"
    elif not bool(state.seen[i]) and how.model == "personal":
        met = ", which has not trained"
    draws = f", {how.draws} draws" if how.draws else ""
    return f"{how.model} model of {data.names[i]}{met}{adaptation[how.adaptation]}{draws}"


def predictive_values(
    members: Iterator[Any], rows: int, draws: int | None, source: Generator
) -> tuple[Tensor, Tensors]:
    """Return predictive means over ensemble members and draws, and statistics such as sd."""
    distributions = list(members)
    if isinstance(distributions[0], CLASSES):
        shape = (draws or 1, 1, rows, -1)
        # [S, n, K], with the draws of all members along S.
        probs = torch.cat([probabilities(fn).expand(shape) for fn in distributions])[:, 0]
        scores = entropies(probs)
        values = {"entropy": scores["total"]}
        if len(probs) > 1:
            values["epistemic"] = scores["epistemic"]
        return probs.mean(0), values
    count = -(-NUM_RESPONSE_DRAWS // (len(distributions) * (draws or 1)))
    with lent(source):
        samples = torch.cat([_flat(fn.sample((count,)), rows) for fn in distributions])
    means, variances = (
        torch.cat([_flat(getattr(fn, what)[None], rows) for fn in distributions])
        for what in ("mean", "variance")
    )
    mean = means.mean(0)
    values = {"sd": (variances.mean(0) + means.var(0, correction=0)).sqrt()}
    cuts = torch.quantile(samples, samples.new_tensor(QUANTILES), dim=0)
    return mean, values | {f"{q:.0%}": cut for q, cut in zip(QUANTILES, cuts, strict=True)}


def _flat(value: Tensor, rows: int) -> Tensor:
    """Flatten ensemble members and draws into one axis: [K, (S,) 1, B] -> [K S, B]."""
    if value.shape[-1] != rows:
        raise ValueError(
            "the response is a vector; predictions need a single number or a class per row"
        )
    return value.reshape(-1, rows)
