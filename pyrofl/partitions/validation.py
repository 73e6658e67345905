"""Split of training rows into training and validation rows, for choosing settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.random import default_rng
from torch import Tensor

from pyrofl.arguments import ProperShare, Whole, checked
from pyrofl.data import Federation
from pyrofl.partitions.allocation import set_aside


@checked
def held_back(data: Federation, share: ProperShare = 0.2, *, seed: Whole = 0) -> Federation:
    """Return a federation in which a part of each client's training rows serves as test rows.

    Each class is withheld in proportion. A client keeps at least one training row, and has at
    least one validation row if it has two rows. The returned federation contains no other rows, so
    that test rows cannot be read from it; held-out clients are left out, and the server's rows
    stay.
    """
    rng = default_rng([seed, 3])
    parts = [_divided(data, rows.cpu(), share, rng) for rows in data.train[: data.clients]]
    if not any(len(aside) for _, aside in parts):
        raise ValueError(
            "no client has two training rows; expected one at least, to withhold a validation row"
        )
    held_rows = torch.cat([rows for both in parts for rows in both]).unique()
    train, aside = zip(
        *([torch.searchsorted(held_rows, p) for p in both] for both in parts), strict=True
    )
    here = held_rows.to(data.device)
    return replace(
        data,
        x=data.x[here],
        y=data.y[here],
        train=train,
        test=aside,
        names=data.names[: data.clients],
        held_out=0,
        pooled_test=torch.cat(aside).unique(),
    )


def _divided(
    data: Federation, rows: Tensor, share: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Split one client's training rows into new training rows and validation rows."""
    y = data.y[rows.to(data.device)].cpu().numpy()
    kinds = y if data.classes else np.zeros(len(rows), dtype=np.int64)
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    kept_places, aside = (torch.from_numpy(part) for part in set_aside(kinds, count, rng))
    return rows[kept_places], rows[aside.sort().values]
