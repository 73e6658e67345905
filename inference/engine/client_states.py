"""Storage of all clients' states between rounds; successive rounds share unchanged states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyrofl.tensors import Tensors

Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Names, shapes [*p] and types of a client's tensors, in the order of their names."""


class StateBlock:
    """Memory block: stacked tensors of R clients, [R, ...], with the indices of unused rows."""

    def __init__(self, tables: Mapping[str, Tensor], free: Iterable[int] = ()) -> None:
        self.tables, self.free = tables, list(free)
        self.layout = layout_of(tables)


class StateRow:
    """Row of a memory block that holds one client's tensors; freed when no state uses it."""

    __slots__ = ("block", "index")

    def __init__(self, block: StateBlock, index: int) -> None:
        self.block, self.index = block, index

    @property
    def tensors(self) -> Tensors:
        """Return one client's state tensors, without the client axis."""
        return {n: table[self.index] for n, table in self.block.tables.items()}

    def __del__(self) -> None:
        self.block.free.append(self.index)


class RowStore:
    """Memory for clients' state tensors, with rows that states of successive rounds share.

    Attributes:
        room: number of clients, which is the number of rows of the first block.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: list[StateBlock] = []

    def write(self, values: Tensors) -> list[StateRow]:
        """Write clients' tensors [C, ...] to unused memory; return each client's storage row."""
        layout, rows = layout_of(values), list[StateRow]()
        count = len(next(iter(values.values())))
        while (left := count - len(rows)) > 0:
            block = next((b for b in self.blocks if b.free and b.layout == layout), None)
            if block is None:
                block = self._grow(values, left)
            # One by one, as another thread may free rows in the meantime.
            free = [block.free.pop() for _ in range(min(left, len(block.free)))]
            part, index = slice(len(rows), len(rows) + len(free)), torch.tensor(free)
            for name, table in block.tables.items():
                table[index.to(table.device)] = values[name][part].to(table.device)
            rows += [StateRow(block, i) for i in free]
        return rows

    def _grow(self, values: Tensors, needed: int) -> StateBlock:
        """Allocate a memory block for client states: the first for all clients, others smaller."""
        rows = max(needed, self.room // 4 if self.blocks else self.room)
        # Rows that are not written use no memory.
        tables = {n: v.new_empty(rows, *v.shape[1:]) for n, v in values.items()}
        self.blocks.append(StateBlock(tables, range(rows - 1, -1, -1)))
        return self.blocks[-1]


class StateTables(Mapping[str, Tensor]):
    """Mapping of names to stacked client tensors, which are assembled when they are read."""

    def __or__(self, other: Mapping[str, Tensor]) -> Tensors:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Tensor]) -> Tensors:
        return {**other, **self}

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([*self.items()])


class ClientStates(StateTables):
    """Immutable states of all clients: name -> tensor [J, ...], zero for clients without state.

    A round writes client states into free rows and creates new states, which share
    the rows of all other clients. A table is assembled when it is read.
    """

    def __init__(
        self, clients: int, store: RowStore, rows: Mapping[int, StateRow], like: Tensors
    ) -> None:
        """Create the states of J clients from their storage rows and the tensors' layout.

        Args:
            clients: number J of clients.
            store: memory of the rows.
            rows: id of a client -> its row; clients without one are unseen.
            like: name -> tensor [0, ...] with the shape and type of the table.
        """
        self.clients, self.store, self._rows, self._like = clients, store, rows, like

    @classmethod
    def of(cls, tables: Mapping[str, Tensor], seen: Tensor) -> ClientStates:
        """Create client states from stacked tensors [J, ...]; `seen` marks clients with a state.

        Args:
            tables: states, or tensors of the caller, which are not modified.
            seen: clients with a state.
        """
        if isinstance(tables, cls):
            return tables
        block = StateBlock(tables)
        ids = seen.nonzero().flatten().tolist() if tables else []
        rows = {i: StateRow(block, i) for i in ids}
        return cls(len(seen), RowStore(len(seen)), rows, _like(rows.values()))

    def __getitem__(self, name: str) -> Tensor:
        table = self._like[name].new_zeros(self.clients, *self._like[name].shape[1:])
        for ids, block, index in _by_block(self._rows.items()):
            if name in block.tables:
                table[ids.to(table.device)] = block.tables[name][index.to(table.device)]
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)

    def select(self, ids: Tensor) -> Tensors:
        """Return the states of the given clients, [C, ...]; zeros for clients without a state."""
        rows = [(c, self._rows[i]) for c, i in enumerate(ids.tolist()) if i in self._rows]
        states: Tensors = {}
        for places, block, index in _by_block(rows):
            for name, table in block.tables.items():
                part = table.index_select(0, index.to(table.device))
                if len(index) == len(ids):
                    states[name] = part
                    continue
                if name not in states:
                    states[name] = part.new_zeros(len(ids), *part.shape[1:])
                states[name][places.to(part.device)] = part
        return states

    def write(self, ids: Tensor, values: Tensors) -> dict[int, StateRow]:
        """Write clients' next states [C, ...] to unused memory; return each client's storage row.

        The rows belong to no state before a call of `updated`, and become free without it.
        """
        if not values or not len(ids):
            return {}
        if self._like.keys() - values.keys():
            values = self.select(ids) | values
        return dict(zip(ids.tolist(), self.store.write(values), strict=True))

    def updated(self, rows: Mapping[int, StateRow]) -> ClientStates:
        """Return a copy of all client states, in which some clients have new states."""
        like = self._like | _like(rows.values())
        return ClientStates(self.clients, self.store, {**self._rows, **rows}, like)


def none(clients: int, room: int) -> ClientStates:
    """Return empty client states, in which no client has a state yet."""
    return ClientStates(clients, RowStore(room), {}, {})


def layout_of(tables: Mapping[str, Tensor]) -> Layout:
    """Return the names, shapes and types of stacked client tensors."""
    return tuple((n, tuple(v.shape[1:]), v.dtype) for n, v in sorted(tables.items()))


def _like(rows: Iterable[StateRow]) -> Tensors:
    """Return empty tensors [0, ...] with the names, shapes and types of clients' stored tensors."""
    blocks = {id(row.block): row.block for row in rows}
    tables = {n: v for block in blocks.values() for n, v in block.tables.items()}
    return {n: v.new_empty(0, *v.shape[1:]) for n, v in tables.items()}


def _by_block(rows: Iterable[tuple[int, StateRow]]) -> Iterator[tuple[Tensor, StateBlock, Tensor]]:
    """Group clients' memory rows by block; yield client positions, the block and row indices."""
    rows_by_block: dict[int, tuple[StateBlock, list[int], list[int]]] = {}
    for place, row in rows:
        _, places, index = rows_by_block.setdefault(id(row.block), (row.block, [], []))
        places.append(place)
        index.append(row.index)
    for block, places, index in rows_by_block.values():
        yield torch.tensor(places), block, torch.tensor(index)
