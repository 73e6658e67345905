"""Shared effects with a shared scale: their posterior is that of quadrature, whatever rows say."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyrofl
from pyrofl.data import Federation
from pyrofl.models import pvi
from pyrofl.models.pvi.centering import Centering
from pyrofl.models.shared.gaussians import Normals
from pyrofl.tensors import role

LEVELS, CLIENTS = 8, 2
CENTERING = Centering(torch.tensor([-1, -1, 1, -1, 1]))  # the third and the fifth of log scale 1


def held(centered: float = 0.7, log_scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Return what the server holds of the exponents."""
    effect = CENTERING.scales >= 0
    values = {"centered": centered, "log_scale": log_scale}
    return {n: torch.where(effect, v, 0.0).double() for n, v in values.items()}


def test_effects_are_variables_times_a_power_of_their_scale():
    w = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eta, growth = CENTERING.effects(w, held())
    factor = (-0.7 * (w[:, 1] - 0.3)).exp()
    expected = w.clone()
    expected[:, [2, 4]] *= factor[:, None]
    torch.testing.assert_close(eta, expected)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: CENTERING.effects(v, held())[0]))(w)
    torch.testing.assert_close(growth, torch.linalg.slogdet(jacobian).logabsdet)
    back, same = CENTERING.variables(eta, held())
    torch.testing.assert_close(back, w)
    torch.testing.assert_close(same, growth)


def test_a_change_of_exponents_keeps_q_the_product_of_its_factors():
    normals, source = Normals(5, True), torch.Generator().manual_seed(1)
    root = torch.randn(4, 5, 5, dtype=torch.float64, generator=source)
    shifts = torch.randn(4, 5, dtype=torch.float64, generator=source)
    own = {"server/shift": shifts[1:], "server/precision": normals.packed(root @ root.mT)[1:]}
    prior = normals.independent(shifts[0], torch.ones(5).double())
    q = {n: prior[n] + own[f"server/{n}"].sum(0) for n in prior}
    server = own | q | held(0.1) | {"server/last/shift": shifts[0]}
    new = CENTERING.moved(server, normals, prior)
    for n in prior:
        torch.testing.assert_close(new[n], prior[n] + new[f"server/{n}"].sum(0))
    assert not new["server/last/shift"].any()
    # The mean is the same point, seen in the new variables; and there is nothing more to change.
    before, after = (normals.moments(s)[0] for s in (server, new))
    etas = [CENTERING.effects(m, s)[0] for m, s in ((before, server), (after, new))]
    torch.testing.assert_close(*etas)
    assert float((new["centered"] - server["centered"]).abs().max()) > 0.05
    assert CENTERING.moved(new, normals, prior) is new
    assert role("server/last", new).keys() == {"shift"}


def effects(received, local, batch):
    """Let rows have the effect of their level; effects and their scale are shared."""
    level = batch.x[..., 0].long()
    with batch.clients():
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        effect = pyro.sample(
            "effect", dist.Normal(torch.zeros(LEVELS), scale[..., None]).to_event(1)
        )
        of_level = (effect * torch.nn.functional.one_hot(level, LEVELS)).sum(-1)
        with batch.rows():
            pyro.sample("y", dist.Normal(mean + of_level, 1.0), obs=batch.y)


def rows_of(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the levels of so many rows of each, and responses."""
    rng = np.random.default_rng(1)
    at = np.repeat(np.arange(LEVELS), rows)
    return at, 0.5 + rng.normal(0, 0.5, LEVELS)[at] + rng.normal(0, 1, len(at))


def quadrature(at: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means and standard deviations of (mean, scale, effects), given the scale exact."""
    design = np.concatenate([np.ones((len(at), 1)), np.eye(LEVELS)[at]], 1)
    log_w, first, second = [], [], []
    for log_scale in np.linspace(-8, 2, 800):
        scale = math.exp(log_scale)
        precision = design.T @ design + np.diag([1 / 4] + [1 / scale**2] * LEVELS)
        cov = np.linalg.inv(precision)
        mean = cov @ design.T @ y
        evidence = mean @ precision @ mean - np.linalg.slogdet(precision)[1]
        log_w.append(evidence / 2 - scale**2 / 2 + (1 - LEVELS) * log_scale)
        first.append(np.insert(mean, 1, scale))
        second.append(np.insert(np.diag(cov) + mean**2, 1, scale**2))
    w = np.exp(np.array(log_w) - max(log_w))
    mean, square = (w @ np.array(v) / w.sum() for v in (first, second))
    return mean, np.sqrt(square - mean**2)


# Where rows say little, q is found with the defaults alone; where they say much, fewer draws do.
@pytest.mark.parametrize(("rows", "options"), [(2, {}), (30, {"num_particles": 64, "steps": 15})])
def test_shared_effects_have_the_exact_posterior(rows, options):
    """Within 0.1 standard deviations and 10%, where rows say little of an effect or much.

    Of 4,000 draws, of which some 2,000 are effective, means have errors of 0.02 deviations and
    deviations of 2%.
    """
    at, y = rows_of(rows)
    parts = np.arange(len(at)) % CLIENTS
    x, y_ = torch.tensor(at).double()[:, None], torch.tensor(y)
    data = Federation.from_arrays({f"{j}": (x[parts == j], y_[parts == j]) for j in range(CLIENTS)})
    data = data.to("cpu", torch.float64)
    method = pvi.hierarchical(effects, data, shared="mean scale effect", **options)
    rounds = 10 if options else 25
    until = None if options else "converged"
    run = pyrofl.fit(method, data, rounds, stop_when=until, progress=False)
    draws = run.to_arviz(draws=4000)["posterior"]
    found = np.column_stack([draws[n].values[0] for n in ("mean", "scale", "effect")])
    mean, sd = quadrature(at, y)
    shift, ratio = (found.mean(0) - mean) / sd, found.std(0) / sd
    assert np.abs(shift).max() < 0.1
    assert (ratio > 0.9).all()
    assert (ratio < 1.1).all()
    centered = run.state.server["centered"][2:]
    assert (centered < 0.4).all() if rows == 2 else (centered > 0.6).all()
