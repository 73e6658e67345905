"""Clients and their rows: data sets, federations, and batches of rows as programs see them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from statistics import median
from typing import Any, cast

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyrofl.data.recipe import Recipe
from pyrofl.data.roster import Who, names_of
from pyrofl.data.rows import check_alike, check_table, row_numbers
from pyrofl.data.sites import table_of
from pyrofl.data.source import Source
from pyrofl.plates import plate
from pyrofl.summaries import Summarised, picture
from pyrofl.tensors import cut


@dataclass(frozen=True)
class Batch:
    """B rows of each of C clients, side by side; ragged clients are padded and masked.

    Padding repeats a row of the client's own, so that no mistake shows it another's.
    Several steps and phases may see the same batch: nobody writes into it.
    """

    x: Tensor  # [C, B, *x]
    y: Tensor  # [C, B, ...]
    mask: Tensor  # [C, B] bool, False where a row is padding
    size: Tensor  # [C] rows that the client has in all
    ids: Tensor  # [C] int64
    at: Tensor | None = None  # [C, B] int64, which of its client's rows; -1: none; None: in order

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.ids)

    @property
    def who(self) -> Who:
        """The clients of this batch."""
        return Who(self.ids, self.size)

    @cached_property
    def _share(self) -> Tensor:
        return share(self.size, self.mask)

    def clients(self) -> pyro.plate:
        """Return the Pyro plate over clients, dim -2."""
        return plate("clients", len(self.ids), -2)

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Enter the Pyro plate over rows, dim -1: hides padding, scales to the client's total."""
        with (
            plate("rows", self.mask.shape[1], -1),
            poutine.scale(scale=self._share),
            poutine.mask(mask=cast("torch.BoolTensor", self.mask)),
        ):
            yield

    def some(self, clients: Tensor | slice) -> Batch:
        """Return the same rows of some clients, in that order."""
        names = ("x", "y", "mask", "size", "ids", *(() if self.at is None else ("at",)))
        return replace(self, **cut({n: getattr(self, n) for n in names}, clients))

    def split(self, k: int) -> list[Batch]:
        """Deal the rows into k batches (row i goes to batch i mod k): support and query.

        The rows of a client that has fewer than k serve again, so that no batch of it is empty.
        """
        count, width = self.mask.sum(1, keepdim=True), self.mask.shape[1]
        parts = []
        for i in range(k):
            at = torch.arange(i, max(width, i + 1), k, device=self.ids.device).expand(len(self), -1)
            mask = (at < count.clamp(min=i + 1)) & (count > 0)
            at = torch.where(at < count, at, i % count.clamp(min=1))
            x, y = _rows(self.x, at), _rows(self.y, at)
            place = at if self.at is None else _rows(self.at, at)
            parts.append(replace(self, x=x, y=y, mask=mask, at=place))
        return parts

    def of(self, known: Tensor) -> Tensor:
        """Pick the batch's rows of what is known of all rows: [C, n, *f] -> [C, B, *f]."""
        if self.at is None:
            return known[:, : self.mask.shape[1]]
        return _rows(known, self.at)


def _rows(values: Tensor, at: Tensor) -> Tensor:
    return values[torch.arange(len(values), device=values.device)[:, None], at]


def share(size: Tensor, mask: Tensor) -> Tensor:
    """Return how many of a client's rows [C] one row of a batch [..., C, B] is for: [..., C, 1]."""
    return (size / mask.sum(-1).clamp(min=1))[..., None]


@dataclass(frozen=True)
class Dataset:
    """Rows before anybody is a client."""

    name: str
    x: Tensor  # [N, *x] float
    y: Tensor  # [N] int64 class, or float response
    is_test: Tensor  # [N] bool
    classes: tuple[str, ...] = ()  # names of the classes; empty for a response that is a number
    types: Tensor | None = None  # [N] int64, what partitions by label look at; None: y
    groups: Mapping[str, Tensor] = field(default_factory=dict)  # column -> [N] int64 code
    group_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    likelihood: str = "categorical"  # the one that suits y
    source: Source | None = None  # which columns of a user's file x and y are; None: no such file
    recipe: Recipe | None = None  # how `split` makes features of x [N, C] float64; None: x is so


@dataclass(frozen=True, repr=False)
class Federation(Summarised):
    """Who holds which rows of one table.

    The last `held_out` clients never train: they stand for clients that join later.
    """

    x: Tensor  # [N, *x]
    y: Tensor  # [N, ...]
    train: tuple[Tensor, ...]  # of each client: int64 rows of x
    test: tuple[Tensor, ...]  # the same, for testing
    names: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    held_out: int = 0
    pooled_test: Tensor | None = None  # the whole test set, which global models are tested on
    unlabelled: Tensor | None = None  # [U, *x], rows that the server holds; nobody knows their y
    source: Source | None = None  # which columns of a user's file x and y are; None: no such file

    def __post_init__(self) -> None:
        """Check once what every later step relies on.

        Raises:
            ValueError: naming the tensor or the client, and what was expected.
        """
        fields = vars(self)  # frozen, but for here
        fields |= {n: _listed(n, fields[n]) for n in ("train", "test", "classes", "names")}
        fields["names"] = self.names or tuple(f"client {j}" for j in range(len(self.train)))
        for part in ("classes", "names"):
            names_of(part, fields[part])
        check_table(self.x, self.y, self.classes)
        if self.unlabelled is not None:
            check_alike(self.unlabelled, self.x)
        if not len(self.train) == len(self.test) == len(self.names):
            raise ValueError(
                f"train, test and names differ in length: {len(self.train)}, {len(self.test)}, "
                f"{len(self.names)}; expected one entry per client"
            )
        if not len(self.train):
            raise ValueError("train is empty; expected the rows of at least one client")
        most, out = len(self.train) - 1, self.held_out
        if isinstance(out, bool) or not isinstance(out, Integral) or not 0 <= out <= most:
            raise ValueError(
                f"held_out is {self.held_out!r}; expected 0 to {most}, so that one trains"
            )
        total = len(self.y)
        for part in ("train", "test"):
            rows = zip(self.names, fields[part], strict=True)
            fields[part] = tuple(row_numbers(f"{name}: {part}", v, total) for name, v in rows)
        if self.pooled_test is not None:
            fields["pooled_test"] = row_numbers("pooled_test", self.pooled_test, total)
        for name, mine in zip(self.names, self.train, strict=True):
            if len(mine.unique()) < len(mine):
                raise ValueError(f"{name} holds a training row twice; expected distinct rows")
            if not len(mine):
                raise ValueError(f"{name} has no training row; expected at least one")

    @classmethod
    def of(
        cls,
        sites: Mapping[str, Sequence[Any]],
        *,
        classes: Sequence[str] | int | None = None,
        features: Sequence[str] | None = None,
        held_out: Sequence[str] = (),
    ) -> Federation:
        """Make a federation of the arrays, tensors or data frames of one's own sites.

        Numbers are cast to torch's default floating-point type, labels to int64.

        Args:
            sites: name -> (x, y) or (x, y, x_test, y_test): x [N, *x] or a data frame with a column
                for each feature, y [N] of labels or numbers.
            classes: names of the classes, or how many; labels are names, or places among them where
                not all names are numbers. None: those of all texts in y, or else y is a number.
            features: names of the columns of x; of data frames those to take, in this order. None:
                all columns, by the data frames' own names.
            held_out: names of the sites that never train; they come last.

        Raises:
            ValueError: naming site and column, if something is missing, no finite number, no label,
                of another length, or not the same in all sites; or if x is uint8.
        """
        return cls(**table_of(sites, classes, features, held_out)._asdict())

    def summary(self) -> dict[str, str]:
        """Tell what the federation is."""
        return {
            "clients": f"{self.clients}, and {self.held_out} held out",
            "training rows": _spread(self.train),
            "test rows": _spread(self.test),
            "x": a_row(self.x),
            "y": f"{len(self.classes)} classes" if self.classes else a_row(self.y),
            "server": f"{0 if self.unlabelled is None else len(self.unlabelled)} rows of its own",
            **(self.source.summary() if self.source else {}),
        }

    def _more_html(self) -> str:
        """Draw who holds how many rows of which class, or how many at all."""
        from pyrofl import figures

        kinds = max(1, len(self.classes))
        label = self.y.cpu() if self.classes else torch.zeros(len(self.y), dtype=torch.long)
        counts = torch.stack([label[rows].bincount(minlength=kinds) for rows in self.train])
        drawn = figures.partition(counts, self.names, self.classes or ("any",))
        return picture(drawn, "training rows of every client and class")

    @property
    def clients(self) -> int:
        """Number of clients that take part in training."""
        return len(self.train) - self.held_out

    @cached_property
    def sizes(self) -> Tensor:
        """Training rows of every client, held-out ones included: [J + held_out]."""
        return torch.tensor([len(rows) for rows in self.train])

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.x.device

    def who(self, ids: Tensor) -> Who:
        """Return ids and sizes of some clients, on the data's device."""
        return Who(ids.to(self.x.device), self.sizes[ids.cpu()].to(self.x.device, self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the computation."""
        return self.x.dtype if self.x.is_floating_point() else torch.get_default_dtype()

    def gather(
        self,
        who: Who,
        rows: Tensor,
        mask: Tensor,
        at: Tensor | None = None,
        share: Tensor | None = None,
    ) -> Batch:
        """Return the batch of rows [C, B]; who knows their `share` [C, 1] saves counting them."""
        flat = rows.flatten().to(self.x.device)
        x, y = (v.index_select(0, flat).unflatten(0, rows.shape) for v in (self.x, self.y))
        batch = Batch(x, y, mask.to(self.x.device), who.size, who.ids, at)
        if share is not None:
            vars(batch)["_share"] = share  # as cached_property would
        return batch

    def batch(self, ids: Tensor, part: str = "train", width: int = 1) -> Batch:
        """Return all "train" or "test" rows of some clients, padded to the longest or a width."""
        table = self.train if part == "train" else self.test
        return stack(self, [table[i] for i in ids.tolist()], self.who(ids), width)

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Federation:
        """Return the same federation on a device and, if given, in a floating-point type."""

        def move(value: Tensor) -> Tensor:
            return value.to(device, dtype if value.is_floating_point() else None)

        unlabelled = None if self.unlabelled is None else move(self.unlabelled)
        return replace(self, x=move(self.x), y=move(self.y), unlabelled=unlabelled)


def a_row(rows: Tensor) -> str:
    """Tell type and shape of a table's rows."""
    return f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape[1:])} per row"


def _spread(rows: Sequence[Tensor]) -> str:
    sizes = sorted(map(len, rows))
    return f"{sizes[0]} to {sizes[-1]} per client, median {median(sizes):g}; {sum(sizes)} in all"


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """Return what stands for clients or classes as a tuple; a text is no list of its letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is a {type(value).__name__}; expected a tuple or list")
    return tuple(value)


def stack(data: Federation, rows: list[Tensor], who: Who, width: int = 1) -> Batch:
    """Pad lists of rows, one per client, to a batch; a client's own first row fills its gaps."""
    width = max([width, *(len(r) for r in rows)])
    index = torch.empty(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for c, (i, r) in enumerate(zip(who.ids.tolist(), rows, strict=True)):
        index[c] = r[0] if len(r) else data.train[i][0]
        index[c, : len(r)] = r
        mask[c, : len(r)] = True
    return data.gather(who, index, mask)
