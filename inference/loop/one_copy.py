"""What clients keep between rounds, in tables that the next round writes into."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from pyrofl.tensors import Tensors

HANDING = Lock()  # held while tables change hands, as other threads may look at a round

Lost = list[tuple[str, Tensor, Tensor]]
"""Name of a table, ids of clients, and what their rows were before a round wrote into them."""


def _looking(name: str) -> Any:
    """Return a method of dict by which somebody looks at the tensors."""

    def method(self: OneCopy, *args: Any) -> Any:
        self.ready()
        return getattr(dict, name)(self, *args)

    return method


class OneCopy(dict[str, Tensor]):
    """State in tables [J, ...] that the next round writes into, unless somebody has looked at them.

    Who looks later finds what was there: a copy. If the tables are too `large` for one, the next
    round writes into them in any case, and who looks later is refused.
    """

    large = stale = looked = False
    lost: Lost | None = None  # what the next round has overwritten
    before: ReferenceType[OneCopy] | None = None  # which had these tables, and has lost some rows
    __getitem__, __iter__, __or__, __ror__, __len__, __contains__ = map(
        _looking, ("__getitem__", "__iter__", "__or__", "__ror__", "__len__", "__contains__")
    )
    get, keys, items, values, copy = map(_looking, ("get", "keys", "items", "values", "copy"))

    def __reduce__(self) -> Any:
        """Go into files as what torch loads without running code."""
        return OrderedDict, (), None, None, iter([*self.items()])

    def ready(self) -> None:
        """Let somebody look; refuse where a later round has written."""
        self.here()
        with HANDING:
            self._part()
            self.looked = True

    def rows(self, ids: Tensor) -> Tensors:
        """Return what some clients keep, [C, ...], of which nothing is in the tables."""
        self.here()
        found = {n: v.index_select(0, ids) for n, v in dict.items(self)}
        for name, written, was in self.lost or ():
            at, order = torch.isin(ids, written), written.argsort()
            found[name][at] = was[order[torch.searchsorted(written, ids[at], sorter=order)]]
        return found

    def lend(self, lost: Lost) -> Tensors:
        """Return the tables that the next round may write into, once it has added to `lost`."""
        self.here()
        with HANDING:
            self._part()
            if self.before is not None and (before := self.before()) is not None:
                before._part()
            self.before = None
            if not self.large:
                if self.looked:
                    return {}
                self.lost = lost
            return dict(dict.items(self))

    def here(self) -> None:
        """Refuse tables that a later round has written into."""
        if self.stale:
            raise ValueError(
                "the private state of this round has been overwritten by a later one, as all "
                "clients' state is kept once; test a round before asking for the next"
            )

    def _part(self) -> None:
        """Copy tables that a later round has written into, as they were."""
        if self.lost is not None:
            for name, table in dict.items(self):
                dict.__setitem__(self, name, table.clone())
            for name, ids, was in self.lost:
                dict.__getitem__(self, name)[ids] = was
            self.lost = None
