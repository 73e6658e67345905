"""Integrals over clients' own sites: Newton's method for modes, and long tails."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyrofl
from pyrofl.inference.posteriors.client_groups import group_clients
from pyrofl.inference.posteriors.draws import draws_specification
from pyrofl.inference.posteriors.group_weights import GroupImportanceSampler
from pyrofl.inference.posteriors.guided_sites import GuidedSites
from pyrofl.inference.posteriors.importance_sampling import (
    CONVERGENCE_ORDER,
    MAX_ADDED_VARIANCE,
    Weighing,
)
from pyrofl.models import pvi
from pyrofl.tensors import Tensors


class Bounded(GroupImportanceSampler):
    """Two clients whose noise z has a density for z < 1 alone."""

    def _log_densities(self, noise: Tensor, own: Tensor) -> tuple[Tensors, Any, Any]:
        """Return a log density whose first Newton step leads beyond 1."""
        z = own[..., 0]
        return {"log_p": 3 * z + 0.1 * (1 - z).log(), "log_q": -z.square() / 2}, None, None


def test_a_step_to_a_point_without_a_density_is_halved():
    of = SimpleNamespace(normal_counts=(1, 1), num_server_draws=0), SimpleNamespace(ids=[0, 1])
    weighing = Bounded(cast("Any", None), cast("Any", of[1]), cast("Any", of[0]))
    mode, root = weighing._mode(torch.zeros(3, 1).double())
    assert mode.shape == (3, 2, 1)
    assert (mode < 1).all()
    assert (mode >= 0.5).all()
    assert root.isfinite().all()


def test_own_probabilities_of_a_u_shaped_density_are_integrated():
    """A Beta of parameters below 1 has much of its mass near 0 and 1: single precision lacks it."""

    def model(received, local, batch):
        with batch.clients():
            m = pyro.sample("m", dist.Beta(20.0, 20.0))
            c = pyro.sample("c", dist.LogNormal(-1.0, 0.5))
            p = pyro.sample("p", dist.Beta(m * c, (1 - m) * c))
            with batch.rows():
                pyro.sample("y", dist.Bernoulli(p), obs=batch.y)

    events, rows = torch.tensor([0.0, 3, 1, 0, 2]).double(), torch.tensor([4, 3, 5, 1, 2]).double()
    sites = {
        f"client {i}": (np.ones((int(n), 1)), (np.arange(int(n)) < int(k)).astype(float))
        for i, (k, n) in enumerate(zip(events, rows, strict=True))
    }
    data = pyrofl.Federation.from_arrays(sites)
    method = pvi.hierarchical(model, data, shared="m c")
    run = pyrofl.fit(method, data, rounds=3, progress=False)
    asked = draws_specification(method, {"seed": 0, "draws": 10})
    groups = group_clients(method, data, run.state, torch.arange(data.clients), asked)
    noise = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).double()
    for group in groups:
        part = GroupImportanceSampler(method, group, GuidedSites(method, group))
        log_l = part.together(noise, 64, 1).log_l
        m, c = (part.shared_values()[n][:, None] for n in ("m", "c"))
        a, b, k, n = m * c, (1 - m) * c, events[group.ids], rows[group.ids]
        exact = betaln(a + k, b + n - k) - betaln(a, b)
        assert float((log_l - torch.as_tensor(exact)).mean(0).abs().max()) < 0.05


@pytest.mark.parametrize(("concentration", "is_reported"), [(0.03, True), (1.0, False)])
def test_probabilities_that_round_to_1_are_reported(concentration, is_reported):
    """In double precision, no number lies between 1 - 1e-16 and 1; near 0 there are many."""

    def model(received, local, batch):
        with batch.clients():
            m = pyro.sample("m", dist.Normal(0.0, 1.0))
            p = pyro.sample("p", dist.Beta(concentration, concentration))
            with batch.rows():
                pyro.sample("y", dist.Bernoulli(p + 0 * m), obs=batch.y)

    data = pyrofl.Federation.from_arrays(
        {name: (np.ones((3, 1)), np.array(y)) for name, y in (("a", [1.0] * 3), ("b", [0.0] * 3))}
    )
    run = pyrofl.fit(pvi.hierarchical(model, data, shared="m"), data, rounds=5, progress=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run.to_arviz(draws=100)
    assert (
        any("of the draws of p are 1 up to rounding" in str(one.message) for one in found)
        is is_reported
    )


def betaln(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the beta function."""
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def test_numbers_of_draws_limit_the_noise_of_log_weights_with_the_fewest_rows():
    noise, rows = torch.tensor([0.3, 0.02, 0.6]).double(), torch.tensor([40.0, 9.0, 200.0]).double()
    terms = [SimpleNamespace(noise=value.expand(5, 2) / 2) for value in noise]
    weights, before = torch.full((5,), 0.2).double(), [8, 8, 8]
    sampler = SimpleNamespace(rows=rows, guided=SimpleNamespace(min_draws=1))
    counts = Weighing._enough(sampler, SimpleNamespace(terms=terms), weights, before)

    def left(numbers):
        """Return the variance that is left; it falls as numbers^-ORDER."""
        return float(
            (noise * (torch.tensor(before) / torch.tensor(numbers)) ** CONVERGENCE_ORDER).sum()
        )

    assert left(counts) <= MAX_ADDED_VARIANCE < left([count - 1 for count in counts])
    gain = (
        noise * torch.tensor(counts).double() ** -(1 + CONVERGENCE_ORDER) / rows
    )  # of another draw, per row
    assert float(gain.max() / gain.min()) < 1.6, "equal up to rounding of the numbers"
