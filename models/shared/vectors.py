"""All parameters of a client in one row, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Size, Tensor

from pyrofl.tensors import Tensors


def flattened(tensors: Tensors) -> Tensor:
    """Return all parameters of every client in one row: [C, d]."""
    return torch.cat([v.reshape(len(v), -1) for v in tensors.values()], 1)


def parted(rows: Tensor, shapes: Mapping[str, Size]) -> Tensors:
    """Part rows [..., d] by name: [..., *p]."""
    parts = rows.split([shape.numel() for shape in shapes.values()], -1)
    return {
        n: part.reshape(*rows.shape[:-1], *shape)
        for (n, shape), part in zip(shapes.items(), parts, strict=True)
    }
