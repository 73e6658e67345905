"""Data sets, and federations: data sets whose rows are partitioned among clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pyrofl.data.arrays import federation_fields
from pyrofl.data.batch import Batch, RowScale
from pyrofl.data.roster import Cohort, names_of
from pyrofl.data.rows import check_alike, check_table, row_numbers
from pyrofl.data.tables.source import Source
from pyrofl.data.weights import OfClasses, check_weights, class_weights, site_weights
from pyrofl.extensions import find_extension
from pyrofl.summaries import Summarized, picture
from pyrofl.user_warnings import warn_user

if TYPE_CHECKING:
    from pyrofl.data.tables.preprocessor import PreprocessingPlan


@dataclass(frozen=True)
class Dataset:
    """Data set before its rows are partitioned among clients."""

    name: str
    x: Tensor  # [N, *x] float
    y: Tensor  # [N] int64 class, or float response
    is_test: Tensor  # [N] bool
    classes: tuple[str, ...] = ()  # names of the classes; empty for a response that is a number
    types: Tensor | None = None  # [N] int64, the labels that partitions use; None: y
    groups: Mapping[str, Tensor] = field(default_factory=dict)  # column -> [N] int64 code
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    likelihood: str = "categorical"  # the one that suits y
    source: Source | None = None  # columns of a user's file that x and y come from; None: no file
    recipe: PreprocessingPlan | None = None  # how `split` makes features of x [N, C] float64
    weights: Tensor | None = None  # [N] float64, of rows in the likelihood; None: all are 1


@dataclass(frozen=True, repr=False, eq=False)
class FederationFields:
    """Validated rows of a federation and their partition among clients."""

    x: Tensor  # [N, *x]
    y: Tensor  # [N, ...]
    train: tuple[Tensor, ...]  # of each client: int64 rows of x
    test: tuple[Tensor, ...]  # the same, for testing
    names: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    held_out: int = 0
    pooled_test: Tensor | None = None  # the whole test set, which global models are tested on
    server_data: Tensor | None = None  # [U, *x], unlabeled rows held by the server
    source: Source | None = None  # columns of a user's file that x and y come from; None: no file
    weights: Tensor | None = None  # [N] float64, of rows in the likelihood; None: all are 1


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Federation(FederationFields, Summarized):
    """Federated data set: rows partitioned among clients, with training and test rows for each.

    The last `held_out` clients never train: they stand for clients that join later.

    Examples:
        >>> import torch
        >>> x, y = torch.zeros(5, 3), torch.arange(5.0)
        >>> train = torch.arange(3), torch.arange(3, 5)
        >>> test = torch.arange(0), torch.arange(0)
        >>> data = Federation(x, y, train, test, names=("Bern", "Basel"))
        >>> data.clients, data.sizes.tolist()
        (2, [3, 2])
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        train: Sequence[Tensor],
        test: Sequence[Tensor],
        names: Sequence[str] = (),
        classes: Sequence[str] = (),
        held_out: int = 0,
        pooled_test: Tensor | None = None,
        server_data: Tensor | None = None,
        source: Source | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Validate and store the rows and their partition among clients.

        Raises:
            ValueError: names the invalid tensor or client, and what is valid.
        """
        train, test = _listed("train", train), _listed("test", test)
        classes = names_of("classes", classes)
        names = names_of("names", names) or tuple(f"client {j}" for j in range(len(train)))
        check_table(x, y, classes)
        if server_data is not None:
            check_alike(server_data, x)
        if not len(train) == len(test) == len(names):
            raise ValueError(
                f"train, test and names differ in length: {len(train)}, {len(test)}, {len(names)}; "
                "expected one entry per client"
            )
        if not len(train):
            raise ValueError("train is empty; expected the rows of at least one client")
        most = len(train) - 1
        whole = isinstance(held_out, Integral) and not isinstance(held_out, bool)
        if not whole or not 0 <= held_out <= most:
            raise ValueError(
                f"held_out is {held_out!r}; expected 0 to {most}: at least one client must train"
            )
        if weights is not None:
            check_weights(weights, len(y))
        train, test = (
            tuple(
                row_numbers(f"{name}: {part}", rows, len(y))
                for name, rows in zip(names, each, strict=True)
            )
            for part, each in (("train", train), ("test", test))
        )
        if pooled_test is not None:
            pooled_test = row_numbers("pooled_test", pooled_test, len(y))
        for name, client_rows in zip(names, train, strict=True):
            if len(client_rows.unique()) < len(client_rows):
                raise ValueError(f"{name} holds a training row twice; expected distinct rows")
            if not len(client_rows):
                raise ValueError(f"{name} has no training row; expected at least one")
            if weights is not None and not bool(weights[client_rows].sum() > 0):
                raise ValueError(
                    f"{name}: all its training rows have weight 0; expected a positive weight"
                )
        split = (train, test, names, classes, held_out)
        super().__init__(x, y, *split, pooled_test, server_data, source, weights)

    @classmethod
    def from_arrays(
        cls,
        sites: Mapping[str, Sequence[Any]],
        *,
        classes: Sequence[str] | int | None = None,
        features: Sequence[str] | None = None,
        held_out: Sequence[str] = (),
        weights: Mapping[str, Any] | None = None,
    ) -> Federation:
        """Build a federation from each client's arrays, tensors or data frames.

        Numbers are cast to torch's default floating-point type, labels to int64.

        Args:
            sites: name -> (x, y) or (x, y, x_test, y_test): x [N, *x] or a data frame with a column
                for each feature, y [N] of labels or numbers.
            classes: names of the classes, or their number. Labels in y are names, or indices unless
                all names are numbers. None: inferred from y, all texts in it, or False and True
                if it is boolean; other y are numbers, integers too: integer labels need `classes`.
            features: names of the columns of x; selects and orders the columns of data frames.
                None: all columns, with the data frames' names.
            held_out: names of the sites that never train; they come last.
            weights: name -> [N], weight of each training row of that site in the likelihood; 1 for
                sites without an entry. See `with_class_weights`.

        Raises:
            ValueError: if values are missing, infinite or unknown labels, lengths or columns
                differ, or x is uint8; the message names site and column.

        Warns:
            UserWarning: if columns have names, and clients seem to use different units, numbers
                seem to stand for missing values, a feature determines the target, or nearly all
                rows of a client are copies.

        Examples:
            >>> import numpy as np
            >>> x = np.arange(10.0).reshape(5, 2)
            >>> data = Federation.from_arrays(
            ...     {"Bern": (x[:3], [0.1, 0.2, 0.3]), "Basel": (x[3:], [0.4, 0.5])}
            ... )
            >>> data.names, data.sizes.tolist()
            (('Bern', 'Basel'), [3, 2])
        """
        federation = cls(**federation_fields(sites, classes, features, held_out))
        look = find_extension("checks of arrays") if federation.source else None
        for text in look(federation) if look else ():
            warn_user(text)
        if weights is None:
            return federation
        return replace(
            federation,
            weights=site_weights(
                weights, sites, federation.names, federation.train, len(federation.y)
            ),
        )

    def with_class_weights(self, classes: OfClasses) -> Federation:
        """Weight rows by class: their likelihood is raised to the power of the class weight.

        A row of weight 2 counts as two identical rows, in training and where the server weights
        clients by their rows; 0 excludes a row. Test scores are unweighted. Existing weights are
        multiplied.

        Args:
            classes: name -> weight, 1 for the others; or "balanced", weights that give every class
                of the training rows the same sum and leave the total unchanged. The server needs
                the sums of each class over clients, not the rows.

        Raises:
            ValueError: if y is a number, a class is unknown, or a weight is negative or not finite.
        """
        if not self.classes:
            raise ValueError("y is a number; expected data with classes for class weights")
        ones = torch.ones(len(self.y), dtype=torch.float64)
        before, y = ones if self.weights is None else self.weights, self.y.cpu()
        each = class_weights(classes, self.classes, y, self.train[: self.clients], before)
        return replace(self, weights=before * each[y])

    def overview(self) -> dict[str, str]:
        """Return a summary of the federation's clients, rows and columns: label -> text."""
        weights = {}
        if self.weights is not None:
            own = self.weights[torch.cat(self.train)]
            weights = {"weights": f"{own.min():g} to {own.max():g} per training row"}
        return {
            "clients": f"{self.clients}, and {self.held_out} held out",
            "training rows": _spread(self.train),
            "test rows": _spread(self.test),
            "x": a_row(self.x),
            "y": f"{len(self.classes)} classes" if self.classes else a_row(self.y),
            **weights,
            "server": f"{0 if self.server_data is None else len(self.server_data)} rows of its own",
            **(self.source.summary() if self.source else {}),
        }

    def _more_html(self) -> str:
        """Return HTML with a figure of the training rows of each client and class."""
        draw = find_extension("figure of rows")
        if draw is None:
            return ""
        kinds = max(1, len(self.classes))
        label = self.y.cpu() if self.classes else torch.zeros(len(self.y), dtype=torch.long)
        counts = torch.stack([label[rows].bincount(minlength=kinds) for rows in self.train])
        drawn = draw(counts, self.names, self.classes)
        return picture(drawn, "training rows of every client and class")

    @property
    def clients(self) -> int:
        """Number of training clients, without held-out clients."""
        return len(self.train) - self.held_out

    @cached_property
    def sizes(self) -> Tensor:
        """Number of training rows of every client, held-out ones included: [J + held_out]."""
        return torch.tensor([len(rows) for rows in self.train])

    @cached_property
    def totals(self) -> Tensor:
        """Sum of each client's training row weights, or its number of rows: [J + held_out]."""
        if self.weights is None:
            return self.sizes
        return torch.stack([self.weights[rows].sum() for rows in self.train])

    @cached_property
    def _relative(self) -> Tensor:
        """Factor [J + held_out] that scales each client's row weights to mean 1."""
        return (self.sizes.double() / self.totals).to(self.x.device, self.dtype)

    @cached_property
    def _table(self) -> Tensor:
        """Weights of all rows, on the data's device and in its floating-point type."""
        assert self.weights is not None
        return self.weights.to(self.x.device, self.dtype)

    @property
    def is_outline(self) -> bool:
        """Whether the rows are only shapes, as of `outline` and of a run loaded without data."""
        return len(self.y) > 0 and not any((*self.x.stride(), *self.y.stride()))

    @property
    def device(self) -> torch.device:
        """Torch device of the rows."""
        return self.x.device

    def cohort(self, ids: Tensor) -> Cohort:
        """Return ids and numbers of training rows (or total weights) of the given clients."""
        return Cohort(ids.to(self.x.device), self.totals[ids.cpu()].to(self.x.device, self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type used in computations with the data."""
        return self.x.dtype if self.x.is_floating_point() else torch.get_default_dtype()

    def gather(
        self,
        cohort: Cohort,
        rows: Tensor,
        mask: Tensor,
        at: Tensor | None = None,
        share: Tensor | None = None,
        blind: bool = False,
    ) -> Batch:
        """Return a batch of the given row numbers: [C, B], or [T, C, B] for T training steps.

        A `share` [..., C, 1] avoids counting the rows. If `blind`, x is empty: it is not read.
        """
        flat, table = rows.flatten().to(self.x.device), self.x[:, :0] if blind else self.x
        x, y = (v.index_select(0, flat).unflatten(0, rows.shape) for v in (table, self.y))
        weights = None
        if self.weights is not None:
            own = self._table.index_select(0, flat).unflatten(0, rows.shape)
            weights = own * self._relative[cohort.ids][:, None]
            share = None if share is None else share * weights
        mask = mask.to(self.x.device)
        scale = None if share is None else RowScale(mask, cohort.size, weights, share)
        features = self.source.features if self.source else ()
        return Batch(x, y, mask, cohort.size, cohort.ids, at, weights, scale, features)

    def batch(self, ids: Tensor, part: str = "train", width: int = 1) -> Batch:
        """Return all "train" or "test" rows of clients as a batch, padded to the longest client.

        It has at least `width` rows per client.
        """
        table = self.train if part == "train" else self.test
        return stack(self, [table[i] for i in ids.tolist()], self.cohort(ids), width)

    def to(
        self, device: str | torch.device | torch.dtype, dtype: torch.dtype | None = None
    ) -> Federation:
        """Return a copy of the federation on a device, in a floating-point type, or both.

        `data.to(torch.float64)` changes the type alone.
        """
        if isinstance(device, torch.dtype):
            return self.to(self.device, device)

        def move(value: Tensor) -> Tensor:
            return value.to(device, dtype if value.is_floating_point() else None)

        server_data = None if self.server_data is None else move(self.server_data)
        return replace(self, x=move(self.x), y=move(self.y), server_data=server_data)


def a_row(rows: Tensor) -> str:
    """Describe the type and shape of one row of a tensor, such as "float32 [3] per row"."""
    return f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape[1:])} per row"


def _spread(rows: Sequence[Tensor]) -> str:
    sizes = sorted(map(len, rows))
    return f"{sizes[0]} to {sizes[-1]} per client, median {median(sizes):g}; {sum(sizes)} in all"


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """Convert a list with one entry per client to a tuple; raise ValueError for other types."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is a {type(value).__name__}; expected a tuple or list")
    return tuple(value)


def stack(data: Federation, rows: list[Tensor], cohort: Cohort, width: int = 1) -> Batch:
    """Build a batch from each client's row numbers; padding repeats a row of the same client."""
    width = max([width, *(len(r) for r in rows)])
    client_rows = [
        r if len(r) else data.train[i][:1] for i, r in zip(cohort.ids.tolist(), rows, strict=True)
    ]
    mask = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
    index = torch.zeros(len(rows), width, dtype=torch.long)
    index[:, : max(map(len, client_rows))] = pad_sequence(client_rows, batch_first=True)
    return data.gather(cohort, torch.where(mask, index, index[:, :1]), mask)
