"""Validation that data and method are those of a saved state: clients, rows, frozen weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyrofl.data import Federation, Roster
from pyrofl.extensions import find_extension
from pyrofl.inference.engine.client_states import ClientStates
from pyrofl.returned import as_numbers, as_tensors
from pyrofl.tensors import Tensors, pick

if TYPE_CHECKING:
    from pyrofl.inference.definition.method import Method
    from pyrofl.inference.engine.state import RoundState

BLOCK = 2**20  # numbers that are hashed at once
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

_rows_by_data: WeakKeyDictionary[Federation, Tensor] = WeakKeyDictionary()


def rows_of(data: Federation) -> Tensor:
    """Return the number of training rows of each client and a hash of the rows, [J, 2] int64.

    The hash depends on the order of the rows.

    Numbers are hashed in single precision, so that the data's type does not matter; the hash is not
    cryptographic. It is cached, so rows must not change.
    """
    if data not in _rows_by_data:
        each = _mixed(_mixed(_hash(data.x)) + _hash(data.y)).cpu()
        if data.weights is not None:
            each = _mixed(each + _hash(data.weights))
        indices, many = data.train[: data.clients], data.sizes[: data.clients]
        place = torch.cat([torch.arange(len(rows)) for rows in indices])
        parts = each[torch.cat(indices).cpu()] * _mixed((place + 1) * STEP)
        owner = torch.arange(len(indices)).repeat_interleave(many)
        _rows_by_data[data] = torch.stack(
            [many, torch.zeros_like(many).index_add(0, owner, parts)], 1
        )
    return _rows_by_data[data]


def _hash(table: Tensor) -> Tensor:
    """Return a hash of each row of a tensor: [N, ...] -> [N], equal on all devices."""
    real = torch.view_as_real(table) if table.is_complex() else table
    flat = real.detach().reshape(len(table), -1)
    odd = _mixed(torch.arange(1, flat.shape[1] + 1, device=table.device) * STEP)
    hashes = [flat.new_zeros(0, dtype=torch.long)]
    for block in flat.split(max(1, BLOCK // max(1, flat.shape[1]))):
        bits = block.float().view(torch.int32) if block.is_floating_point() else block
        hashes.append((bits.long() * odd).sum(1))
    return torch.cat(hashes)


def _mixed(value: Tensor) -> Tensor:
    """Return integer hashes with their bits mixed as in the SplitMix64 generator."""
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    return value ^ (value >> 31)


def validate_resume(start: RoundState, data: Federation) -> RoundState:
    """Validate that a saved state fits the data; return it with client names and row hashes.

    Held-out clients may differ. For a state without names, or before the first round, only the
    number of clients is compared.
    """
    cure = (
        "; resume with the same clients in the same order, or start again on other clients with "
        "server_state=state"
    )
    names, rows = data.names[: data.clients], rows_of(data)
    _refuse_odd_fields(start)
    if (had := len(start.seen)) != data.clients:
        raise ValueError(
            f"resume_from is a round of {had} clients, but the data have {data.clients}{cure}"
        )
    if start.number:
        if start.names and tuple(start.names) != names:
            raise ValueError(f"{_difference(start.names, names)} in resume_from{cure}")
        of_state = rows if start.rows is None else start.rows
        old_rows = as_numbers("resume_from.rows", of_state, tuple(rows.shape), torch.long).cpu()
        for j in (old_rows != rows).any(1).nonzero().flatten().tolist()[:1]:
            had, has = int(old_rows[j, 0]), int(rows[j, 0])
            difference = (
                f"{has} training rows, but {had}" if had != has else "other training rows than"
            )
            raise ValueError(f"{names[j]} has {difference} in resume_from{cure}")
    return replace(start, names=names, rows=rows)


def _refuse_odd_fields(state: RoundState) -> None:
    """Raise ValueError for a field of a wrong type or shape, as a user may have edited it."""
    if not isinstance(state.number, int) or state.number < 0:
        raise ValueError(f"resume_from.number is {state.number!r}; expected an integer >= 0")
    seen = as_numbers("resume_from.seen", state.seen, (-1,), torch.bool)
    as_numbers("resume_from.seen", seen, (seen.numel(),), torch.bool)
    as_tensors("resume_from.server", state.server)
    as_tensors("resume_from.message", state.message)
    if not isinstance(state.client_states, ClientStates):
        as_tensors("resume_from.client_states", state.client_states, len(seen))


def refuse_other_clients(
    method: Method, data: Federation, state: RoundState, has_records: bool = False
) -> None:
    """Raise ValueError if a state has tensors of single clients, and the data have other clients.

    Clients are compared by name and order, as functions of a method may depend on their ids.
    Held-out clients may differ. A state without such tensors fits all clients, unless it
    `has_records` of single clients.
    """
    names = data.names[: data.clients]
    if state.names in ((), names) or not (has_records or _has_client_tensors(method, state)):
        return
    raise ValueError(
        f"{_difference(state.names, names)} in the state; pass data with the same clients that "
        "train, in the same order"
    )


def constants_of(method: Method) -> str:
    """Return a hash of a method's frozen weights and buffers; "" if it has none."""
    constants_hash = find_extension("constants")
    return str(constants_hash(method)) if constants_hash is not None else ""


def refuse_other_constants(method: Method, constants: str) -> None:
    """Raise ValueError if a method's frozen weights or buffers do not have the given hash."""
    if constants and constants_of(method) != constants:
        raise ValueError(
            "the frozen weights or buffers of the method's networks differ from those of the "
            "trained state; load them again, or use pyrofl.load(DIR, method=...), which restores "
            "them"
        )


def match_server(
    method: Method, data: Federation | Roster, initial: Tensors | RoundState
) -> Tensors:
    """Return the initial server state of a run, with the rows of tables in the order of the data.

    Args:
        method: the method.
        data: the federation.
        initial: tensors, whose tables of clients are in the order of the data; or a round, whose
            tables are matched by the clients' names.

    Raises:
        ValueError: if a table has rows of other clients, or if it is neither of the two.
    """
    if isinstance(initial, Mapping):
        server, place = as_tensors("server", initial), torch.arange(data.clients)
    elif not hasattr(initial, "server"):
        kind = type(initial).__name__
        raise ValueError(
            f"server_state is of type {kind}; expected a dict of tensors or the state of a round"
        )
    else:
        names, server = data.names[: data.clients], dict(initial.server)
        has_tables = bool(pick(server, method.per_client))
        if has_tables and sorted(initial.names) != sorted(names):
            raise ValueError(
                f"{_difference(initial.names, names)} in server_state, whose server has tensors of "
                "single clients; pass the same clients, or use pyrofl.leave and pyrofl.join"
            )
        at = {name: j for j, name in enumerate(initial.names)}
        place = torch.tensor([at[name] for name in names] if has_tables else [])
    for name, table in pick(server, method.per_client).items():
        if not table.dim() or len(table) != data.clients:
            raise ValueError(
                f"server_state has {name!r} of shape {list(table.shape)}; expected a row for each "
                f"of the {data.clients} clients that train"
            )
        server[name] = table[place.to(table.device)]
    return server


def _has_client_tensors(method: Method, state: RoundState) -> bool:
    """Return whether a state has tensors of single clients, at the server or as client states."""
    return bool(state.client_states) or bool(pick(state.server, method.per_client))


def _difference(was: Sequence[str], now: Sequence[str]) -> str:
    """Describe the first difference of two lists of clients: "client 0 is 'b', but 'a'"."""
    for j, (old, new) in enumerate(zip_longest(was, now)):
        if old != new:
            new, old = (repr(name) if name else "absent" for name in (new, old))
            return f"client {j} is {new}, but {old}"
    raise AssertionError("the clients do not differ")
