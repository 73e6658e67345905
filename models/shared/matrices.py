"""Properties of clients' symmetric matrices, and tensors in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-6  # of entries, relative to the largest of a matrix


def precise(value: Tensor) -> Tensor:
    """Return a tensor on the CPU, in double precision if it is of floating point."""
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def symmetric(value: Tensor) -> Tensor:
    """Return whether each matrix [C, n, n] is symmetric, bool [C]."""
    apart = (value - value.mT).abs().flatten(1)
    return (apart <= ROUNDING * value.abs().flatten(1).amax(1, keepdim=True)).all(1)


def semidefinite(value: Tensor) -> Tensor:
    """Return whether each matrix [C, n, n] is symmetric without negative eigenvalues, bool [C]."""
    values = torch.linalg.eigvalsh(precise(value).nan_to_num(0.0, 0.0, 0.0))
    positive: Tensor = values[:, 0] >= -ROUNDING * values.abs().amax(1)
    return symmetric(value) & positive
