"""One comparison that tests share."""

from __future__ import annotations

import torch
from torch import Tensor


def close(found: Tensor, expected: object, atol: float = 1e-12) -> None:
    """Compare with numbers worked out elsewhere, in absolute terms."""
    expected = torch.as_tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)
