"""Validation that a resumed run has the same clients and training rows as before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyrofl.data import Federation

if TYPE_CHECKING:
    from pyrofl.inference.engine.state import RoundState

BLOCK = 2**20  # numbers that are hashed at once
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15

_known: WeakKeyDictionary[Federation, Tensor] = WeakKeyDictionary()


def rows_of(data: Federation) -> Tensor:
    """Return the number of training rows of each client and a hash of the rows, [J, 2] int64.

    The hash depends on the order of the rows.

    Numbers are hashed in single precision, so that the data's type does not matter; the hash is not
    cryptographic. It is cached, so rows must not change.
    """
    if data not in _known:
        each = _mixed(_mixed(_hash(data.x)) + _hash(data.y)).cpu()
        if data.weights is not None:
            each = _mixed(each + _hash(data.weights))
        mine, many = data.train[: data.clients], data.sizes[: data.clients]
        place = torch.cat([torch.arange(len(rows)) for rows in mine])
        parts = each[torch.cat(mine).cpu()] * _mixed((place + 1) * STEP)
        owner = torch.arange(len(mine)).repeat_interleave(many)
        _known[data] = torch.stack([many, torch.zeros_like(many).index_add(0, owner, parts)], 1)
    return _known[data]


def _hash(table: Tensor) -> Tensor:
    """Return a hash of each row of a tensor: [N, ...] -> [N], equal on all devices."""
    real = torch.view_as_real(table) if table.is_complex() else table
    flat = real.detach().reshape(len(table), -1)
    odd = _mixed(torch.arange(1, flat.shape[1] + 1, device=table.device) * STEP)
    found = [flat.new_zeros(0, dtype=torch.long)]
    for block in flat.split(max(1, BLOCK // max(1, flat.shape[1]))):
        bits = block.float().view(torch.int32) if block.is_floating_point() else block
        found.append((bits.long() * odd).sum(1))
    return torch.cat(found)


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
        "server_state=state.server"
    )
    names, rows = data.names[: data.clients], rows_of(data)
    if (had := len(start.seen)) != data.clients:
        raise ValueError(
            f"resume_from is a round of {had} clients, but the data have {data.clients}{cure}"
        )
    if start.number:
        for j, (was, now) in enumerate(zip(start.names, names, strict=False)):
            if was != now:
                raise ValueError(f"client {j} is {now!r}, but {was!r} in resume_from{cure}")
        known = rows if start.rows is None else start.rows.cpu()
        for j in (known != rows).any(1).nonzero().flatten().tolist()[:1]:
            had, has = int(known[j, 0]), int(rows[j, 0])
            found = f"{has} training rows, but {had}" if had != has else "other training rows than"
            raise ValueError(f"{names[j]} has {found} in resume_from{cure}")
    return replace(start, names=names, rows=rows)
