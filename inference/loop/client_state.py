"""What clients keep between rounds: tensors [J, ...] of all of them, which may be many."""

from __future__ import annotations

import os
import tempfile
from collections.abc import ItemsView, Iterator, ValuesView
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pyrofl.tensors import Tensors

COPIED = 64_000_000  # bytes of all clients' state up to which every round has a copy of its own


class OneCopy(dict[str, Tensor]):
    """State that is too large for a copy in every round: the next round writes into it.

    Raises:
        ValueError: when asked for a tensor after that.
    """

    stale = False

    def _fresh(self) -> OneCopy:
        if self.stale:
            raise ValueError(
                "the private state of this round has been overwritten by a later one, as all "
                "clients' state is too large to keep twice; test a round before asking for the next"
            )
        return self

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor [J, ...]."""
        return super(OneCopy, self._fresh()).__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor [J, ...], or the default."""
        return super(OneCopy, self._fresh()).get(name, default)

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return super(OneCopy, self._fresh()).__iter__()

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override]
        """Return names and tensors."""
        return super(OneCopy, self._fresh()).items()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        """Return the tensors."""
        return super(OneCopy, self._fresh()).values()

    def copy(self) -> Tensors:
        """Return a dict with the same tensors."""
        return dict(self.items())

    def __or__(self, other: Tensors) -> Tensors:  # type: ignore[override]
        """Return a dict with both."""
        return self.copy() | other

    def __ror__(self, other: Tensors) -> Tensors:  # type: ignore[override]
        """Return a dict with both."""
        return other | self.copy()


class Keeper:
    """Private state during a round.

    Args:
        old: of the round before.
        clients: J.
        memory: bytes of all clients' state that may be in memory; more goes to a temporary file.
    """

    def __init__(self, old: Tensors, clients: int, memory: int | None) -> None:
        """Begin."""
        self.old, self.clients, self.memory = old, clients, memory
        self.new: Tensors = {}
        self.undo: list[tuple[str, Tensor, Tensor]] = []
        self.in_place = isinstance(old, OneCopy)

    def __enter__(self) -> Keeper:
        """Begin a round."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Take everything back if the round fails on its way."""
        if kind is not None:
            self.take_back(torch.arange(self.clients))

    def write(self, ids: Tensor, mine: Tensors) -> None:
        """Write down what some clients keep, [C, ...].

        Raises:
            OSError: if the temporary file cannot be made.
        """
        each = sum(v.shape[1:].numel() * v.element_size() for v in mine.values())
        total = each * self.clients
        self.in_place |= total > COPIED
        for name, value in mine.items():
            if name not in self.new:
                self.new[name] = self._begin(name, value, total)
            table = self.new[name]
            if isinstance(self.old, OneCopy) and name in self.old:
                self.undo.append((name, ids, table[ids]))
            table[ids] = value.to(table.device)

    def _begin(self, name: str, like: Tensor, total: int) -> Tensor:
        if name in self.old and isinstance(self.old, OneCopy):
            return self.old[name]
        shape = (self.clients, *like.shape[1:])
        on_disk = self.memory is not None and total > self.memory
        new = mapped(shape, like.dtype) if on_disk else like.new_zeros(shape)
        return new.copy_(self.old[name]) if name in self.old else new

    def take_back(self, ids: Tensor) -> None:
        """Make the state of some clients again what it was before the round."""
        for name, table in self.new.items():
            if not isinstance(self.old, OneCopy) or name not in self.old:
                table[ids] = self.old[name][ids] if name in self.old else 0
        for name, written, value in self.undo:
            again = torch.isin(written, ids)
            self.old[name][written[again]] = value[again]

    def close(self) -> Tensors:
        """Return the state after the round; where it is the only copy, the old one is stale."""
        if not self.new:
            return self.old
        new = self.old | self.new
        if isinstance(self.old, OneCopy):
            self.old.stale = True
        return OneCopy(new) if self.in_place else new


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in a temporary file that is gone once nobody uses them.

    It lies where TMPDIR says; that should be on a disk.

    Raises:
        OSError: if there is no room for it.
    """
    handle, path = tempfile.mkstemp(prefix="pyrofl-")
    try:
        count = torch.Size(shape).numel()
        size = count * torch.empty((), dtype=dtype).element_size()
        if hasattr(os, "posix_fallocate") and size:  # or writing would kill the process
            os.posix_fallocate(handle, 0, size)
        return torch.from_file(path, shared=True, size=count, dtype=dtype).view(shape)
    finally:
        os.close(handle)
        with suppress(PermissionError):  # some systems keep a file until it is closed
            os.unlink(path)
