"""What all tests share; its presence lets those in folders import `toys`."""

from __future__ import annotations

import pytest
import torch
import toys

from pyrofl.data import Federation

torch.set_num_threads(1)  # tests run side by side, one for each core


@pytest.fixture
def blobs() -> Federation:
    """Twelve ragged clients in float64, where rounding cannot hide a mistake."""
    return toys.blobs()
