"""Federations small enough to work by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from pyrofl.data.loaders.conjugate import ConjugateTask

# Two clients with losses 1/2 (w - mu_j)' Lam_j (w - mu_j).
LAM = torch.tensor([[[4, 0], [0, 1]], [[2, 0.5], [0.5, 3]]], dtype=torch.float64)
MU = torch.tensor([[1, 0], [-1, 2]], dtype=torch.float64)


@pytest.fixture
def quadratic() -> ConjugateTask:
    """The pair of quadratic clients, as linear regressions."""
    tasks = pytest.importorskip("pyrofl.data.loaders.conjugate")  # a satellite has it
    x = list(torch.linalg.cholesky(LAM).mT)
    task: ConjugateTask = tasks.conjugate(x, [a @ b for a, b in zip(x, MU, strict=True)])
    return task
