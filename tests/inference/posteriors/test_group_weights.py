"""Newton's method for modes of clients' noise, where trial points may have no density."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from pyrofl.inference.posteriors.group_weights import GroupWeighing
from pyrofl.tensors import Tensors


class Bounded(GroupWeighing):
    """Two clients whose noise z has a density for z < 1 alone."""

    def _evaluated(self, noise: Tensor, own: Tensor) -> tuple[Tensors, Any, Any]:
        """Return a log density whose first Newton step leads beyond 1."""
        z = own[..., 0]
        return {"log_p": 3 * z + 0.1 * (1 - z).log(), "log_q": -z.square() / 2}, None, None


def test_a_step_to_a_point_without_a_density_is_halved():
    of = SimpleNamespace(sizes=(1, 1)), SimpleNamespace(ids=[0, 1])
    weighing = Bounded(cast("Any", None), cast("Any", of[1]), cast("Any", of[0]))
    mode, root = weighing._mode(torch.zeros(3, 1).double())
    assert mode.shape == (3, 2, 1)
    assert (mode < 1).all()
    assert (mode >= 0.5).all()
    assert root.isfinite().all()
