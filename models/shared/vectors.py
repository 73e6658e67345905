"""Parameters of each client flattened into one vector."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrofl.tensors import Tensors


def flattened(tensors: Tensors) -> Tensor:
    """Return all parameters of each client as one vector, [C, d]."""
    return torch.cat([v.reshape(len(v), -1) for v in tensors.values()], 1)
