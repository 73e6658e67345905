"""Posteriors of the hyperparameters of gp(x) and of shared effects, against sums over grids."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

pytest.importorskip("formulae")

import pyrofl
from pyrofl import federations
from pyrofl.inference.hmc import NUM_CHAINS
from pyrofl.models.regression.smooths import Process

SIZES, NUM_SINES, SIGMA = (14, 22, 9, 5), 10, 0.3
GRIDS = {  # of logarithms; the posterior mass beyond is below 1e-4
    "sd_gp_x": np.linspace(-2.5, 3, 81),
    "lscale_gp_x": np.linspace(-0.7, 2.2, 61),
    "sigma": np.linspace(-2.0, -0.4, 41),
}


def frames():
    """Return tables of four clients with 5 to 22 rows around a sine."""
    random, tables = np.random.default_rng(2), {}
    for name, rows in zip("abcd", SIZES, strict=True):
        x = random.uniform(0, 10, rows)
        y = 1 + np.sin(x) + SIGMA * random.normal(size=rows)
        tables[name] = pd.DataFrame({"x": x, "y": y})
    return tables


def log_posterior(pooled):
    """Return the log posterior of log sd, log length scale and log sigma at the grids.

    Intercept and coefficients of the sines are integrated out: y is normal given the others.
    """
    x, y = pooled.x.to_numpy(), pooled.y.to_numpy()
    process = Process(x.min(), x.max(), NUM_SINES, 1.5)
    sines, w, edge = process.sines(x), process.frequencies, process.edge
    design = np.column_stack([np.ones(len(x)), sines - sines.mean(0)])
    scale, off = 2.5 * y.std(), y - y.mean()
    sds, lengths, sigmas = (np.exp(grid) for grid in GRIDS.values())
    total = np.empty((len(sds), len(lengths), len(sigmas)))
    rate = 8.4 * process.shortest
    for i, sd in enumerate(sds):
        for j, length in enumerate(lengths):
            spread = (
                sd * np.sqrt(np.sqrt(2 * np.pi) * length / edge) * np.exp(-((length * w) ** 2) / 4)
            )
            root = design * np.append(scale, spread)
            values, vectors = np.linalg.eigh(root @ root.T)
            variance = values.clip(0)[:, None] + sigmas**2  # [N, sigmas]
            squares = (vectors.T @ off)[:, None] ** 2 / variance
            total[i, j] = -0.5 * (np.log(variance) + squares).sum(0)
    priors = (
        stats.halfnorm(scale=scale).logpdf(sds),
        stats.invgamma(3, scale=rate).logpdf(lengths),
        stats.expon(scale=y.std()).logpdf(sigmas),
    )
    for axis, (prior, grid) in enumerate(zip(priors, GRIDS.values(), strict=True)):
        total += (prior + grid).reshape([-1 if a == axis else 1 for a in range(3)])
    return total


def test_hyperparameters_of_a_process_have_the_posterior_of_a_grid():
    """Means and variances of logarithms within 4 standard errors of those of the chains."""
    tables = frames()
    clients = federations.from_frames(tables)
    method = pyrofl.regression(f"y ~ gp(x, k={NUM_SINES})", clients)
    run = pyrofl.fit(method, clients, progress=False)
    assert run.method.name == "likelihood_factors"
    server = run.state.server
    assert float(server["server/r_hat"]) < 1.01
    log_p = log_posterior(pd.concat(tables.values()))
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    sites = [site.name for site in method.model.shared_sites.sites for _ in site.mean]
    for axis, (name, grid) in enumerate(GRIDS.items()):
        marginal = p.sum(tuple(a for a in range(3) if a != axis))
        assert max(marginal[0], marginal[-1]) < 1e-4
        mean = marginal @ grid
        drawn = server["server/draws"][:, sites.index(name)].numpy()
        for values, expected in (
            (drawn, mean),
            ((drawn - mean) ** 2, marginal @ (grid - mean) ** 2),
        ):
            chains = values.reshape(-1, NUM_CHAINS).mean(0)
            error = chains.std(ddof=1) / NUM_CHAINS**0.5
            assert abs(chains.mean() - expected) < 4 * error, (name, chains.mean(), expected, error)
