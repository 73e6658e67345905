"""Clients whose rows are apart from each other's."""

from __future__ import annotations

import torch
from checks import TRAINED

from pyrofl.data import Federation

SIZES = (3, 9, 7, 12, 4, 8)
CLOSE = {"terms": TRAINED}


def some(data: Federation, names: list[str]) -> Federation:
    """Return the federation of some clients, with no row of others."""
    ids = [data.names.index(name) for name in names]
    rows = torch.cat([torch.cat([data.train[i], data.test[i]]) for i in ids])
    sizes = [n for i in ids for n in (len(data.train[i]), len(data.test[i]))]
    parts = torch.arange(len(rows)).split(sizes)
    x, y = data.x[rows], data.y[rows]
    return Federation(x, y, parts[::2], parts[1::2], tuple(names), data.classes)
