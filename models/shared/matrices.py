"""Properties of clients' symmetric matrices, and tensors in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING_TOLERANCE = 1e-6  # of entries, relative to the largest of a matrix


def to_cpu_double(value: Tensor) -> Tensor:
    """Return a tensor on the CPU, in double precision if it is of floating point."""
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def is_symmetric(value: Tensor) -> Tensor:
    """Return whether each matrix [C, n, n] is symmetric, bool [C]."""
    apart = (value - value.mT).abs().flatten(1)
    return (apart <= ROUNDING_TOLERANCE * value.abs().flatten(1).amax(1, keepdim=True)).all(1)


def is_semidefinite(value: Tensor) -> Tensor:
    """Return whether each matrix [C, n, n] is symmetric without negative eigenvalues, bool [C]."""
    values = torch.linalg.eigvalsh(to_cpu_double(value).nan_to_num(0.0, 0.0, 0.0))
    positive: Tensor = values[:, 0] >= -ROUNDING_TOLERANCE * values.abs().amax(1)
    return is_symmetric(value) & positive
