"""Hierarchical normal programs of ragged clients, with their posterior in closed form."""

from __future__ import annotations

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyrofl.data import Federation

SIZES = (1, 4, 2, 7)


def federation(dtype: torch.dtype = torch.float64) -> Federation:
    """Return four ragged clients with no features; their means are 3, -2, 0 and 1."""
    rng = np.random.default_rng(3)
    y = np.repeat([3.0, -2.0, 0.0, 1.0], SIZES) + rng.standard_normal(sum(SIZES))
    parts = torch.arange(sum(SIZES)).split(SIZES)
    names = ("north", "east", "south", "west")
    empty = [part[:0] for part in parts]
    x = torch.zeros(len(y), 1, dtype=dtype)
    return Federation(x, torch.from_numpy(y).to(dtype), parts, empty, names)


def hierarchy(received, local, batch):
    """Let clients' means be normal around a common one, itself unknown."""
    with batch.clients():
        mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
        pyro.deterministic("gap", theta - mu)
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def outside(received, local, batch):
    """Say the same with the common mean outside the plate over clients."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    with batch.clients():
        theta = pyro.sample("theta", dist.Normal(mu, 1.0))
        with batch.rows():
            pyro.sample("y", dist.Normal(theta, 1.0), obs=batch.y)


def exact(data: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of (mu, theta_1..theta_4) given y."""
    count = len(data.train)
    precision = np.zeros((count + 1, count + 1))
    right = np.zeros(count + 1)
    precision[0, 0] = 1 / 4 + count
    for j, rows in enumerate(data.train, 1):
        precision[j, j] = 1 + len(rows)
        precision[0, j] = precision[j, 0] = -1
        right[j] = data.y[rows].sum()
    covariance = np.linalg.inv(precision)
    return covariance @ right, covariance


def assert_exact(found, data: Federation, errors: float = 4.0, effective: int = 100):
    """Compare means and standard deviations within standard errors of that many draws."""
    mean, covariance = exact(data)
    sd = np.sqrt(np.diag(covariance))
    posterior = found["posterior"]
    draws = np.concatenate(
        [posterior["mu"].values[..., None], posterior["theta"].values], -1
    ).reshape(-1, 5)
    assert np.abs((draws.mean(0) - mean) / sd).max() < errors / effective**0.5
    assert np.abs(draws.std(0) / sd - 1).max() < errors / (2 * effective) ** 0.5
