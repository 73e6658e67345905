"""What all tests share; its presence lets those in folders import `toys`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch
import toys
from dying import Nursery
from long_tests import LIST, function_of

from pyrofl.data import Federation

os.environ["SOURCE_DATE_EPOCH"] = "1000000000"  # so that files made twice are equal in every byte
# Tests run side by side, one for each core.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the functions and tests in long_tests.txt as long."""
    names = set(LIST.read_text().splitlines())
    for item in items:
        if item.nodeid in names or function_of(item.nodeid) in names:
            item.add_marker("long")


@pytest.fixture(scope="session")
def forked() -> Iterator[Nursery]:
    """Fork children that have imported everything; for scripts, and for processes that die."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def blobs() -> Federation:
    """Twelve ragged clients in float64, where rounding cannot hide a mistake."""
    return toys.blobs()


@pytest.fixture
def tiny() -> Federation:
    """Three ragged clients, 12 rows of 4 numbers, 3 classes."""
    grid = torch.arange(48, dtype=torch.float64).reshape(12, 4)
    y = torch.tensor([0, 1, 2, 2, 1, 0, 0, 0, 1, 2, 2, 1])
    rows = torch.arange(12).split([3, 5, 4])
    return Federation(torch.sin(grid**1.5), y, rows, rows, classes=("a", "b", "c"))
