"""Flattening of each client's parameters into one vector."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrofl.tensors import Tensors


def flatten_clients(tensors: Tensors) -> Tensor:
    """Flatten all parameters of each client into one vector, [C, d]."""
    return torch.cat([v.reshape(len(v), -1) for v in tensors.values()], 1)
