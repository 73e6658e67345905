"""Federations without rows, for what is built from their shapes alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrofl.data.federation import Federation
from pyrofl.data.roster import Roster


def outline(
    names: Sequence[str],
    sizes: Sequence[int] | Tensor,
    x: Sequence[int],
    y: Sequence[int] = (),
    classes: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Federation:
    """Return a federation whose rows are all zeros and take no memory: what a server may know.

    Methods that look at data to see shapes, such as `pvi.hierarchical`, are built from it as they
    would be from the rows.

    Args:
        names: of the clients.
        sizes: their numbers of training rows.
        x: shape of a row.
        y: shape of a row's response.
        classes: names of the classes; none for a response that is a number.
        dtype: of real numbers.

    Raises:
        ValueError: if names, sizes or type are unsuitable.
    """
    roster = Roster(names, sizes, dtype)
    rows = int(roster.sizes.sum())
    labels = torch.zeros((), dtype=torch.long if classes else dtype)
    train = torch.arange(rows).split(roster.sizes.tolist())
    none = (torch.zeros(0, dtype=torch.long),) * roster.clients
    zeros = torch.zeros((), dtype=dtype)
    return Federation(
        zeros.expand(rows, *x), labels.expand(rows, *y), train, none, roster.names, tuple(classes)
    )
