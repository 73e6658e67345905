"""Shards: the training rows of some clients, with client ids of the whole federation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyrofl.data.federation import Federation, FederationFields


class Shard(Federation):
    """Federation with the rows of only some clients; client ids are as in the full federation."""

    def __init__(self, *fields: Any, **more: Any) -> None:
        """Store the fields of the federation without validation, as it was validated as a whole."""
        FederationFields.__init__(self, *fields, **more)


def shard(data: Federation, ids: Tensor) -> Shard:
    """Return a shard with the training rows of the given training clients only, on the CPU."""
    mine, none = ids.tolist(), torch.zeros(0, dtype=torch.long)
    rows = torch.cat([data.train[i].cpu() for i in mine])
    places = torch.arange(len(rows)).split(data.sizes[ids].tolist())
    # Each in memory of its own: a view is pickled with all that it is a view of.
    own = {i: place.clone() for i, place in zip(mine, places, strict=True)}
    train = tuple(own.get(i, none) for i in range(data.clients))
    x, y = (v.index_select(0, rows.to(v.device)).cpu() for v in (data.x, data.y))
    test, names = (none,) * data.clients, data.names[: data.clients]
    weights = None if data.weights is None else data.weights[rows]
    return Shard(x, y, train, test, names, data.classes, weights=weights)
