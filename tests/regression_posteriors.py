"""Posteriors of hand-written log densities, as references of regressions.

Draws of a t distribution around the mode, with the curvature there, are weighted: nothing of the
library's samplers takes part.
"""

import math
import warnings

import pytest
import scipy.optimize
import torch

import pyrofl
from pyrofl import federations
from pyrofl.models.regression.prediction import posterior_draws

DRAWS, DF = 40_000, 5.0
SHIFT, RATIO, ERRORS = 0.1, 0.1, 4.0  # standard deviations, of these, and standard errors


def moments(log_density, size, seed=0):
    """Return mean [d], sd [d] and effective sample size of a log density [S, d] -> [S]."""

    def loss(point):
        at = torch.tensor(point, requires_grad=True)
        value = -log_density(at[None])[0]
        return float(value.detach()), torch.autograd.grad(value, at)[0].numpy()

    center = torch.tensor(scipy.optimize.minimize(loss, [0.0] * size, jac=True).x)
    curvature = -torch.autograd.functional.hessian(lambda at: log_density(at[None])[0], center)
    covariance = torch.linalg.inv(curvature)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):  # where the curvature at the mode is none of the posterior, improve
        covariance = (covariance + covariance.T) / 2
        draws, weight = _weighted(log_density, center, covariance, generator)
        center = weight @ draws
        covariance = (draws - center).T @ ((draws - center) * weight[:, None])
        ess = 1 / float(weight.square().sum())
        if ess > DRAWS / 4:
            break
    assert ess > DRAWS / 20, ess
    return center, covariance.diagonal().sqrt(), ess


def _weighted(log_density, center, covariance, generator):
    """Return draws of a t distribution, [S, d], and their normalized importance weights [S]."""
    size = len(center)
    z = torch.randn(DRAWS, size, generator=generator, dtype=torch.float64)
    square = torch.randn(DRAWS, int(DF), generator=generator, dtype=torch.float64).square().sum(-1)
    z = z * (DF / square).sqrt()[:, None]
    draws = center + z @ torch.linalg.cholesky(covariance).T
    log_q = -(DF + size) / 2 * torch.log1p(z.square().sum(-1) / DF)
    with torch.no_grad():
        log_w = torch.cat([log_density(part) for part in draws.split(2000)]) - log_q
    return draws, log_w.softmax(0)


def fitted(formula, frames, **how):
    """Return the method, the run and its posterior draws; no warning is allowed."""
    tables = federations.from_frames(frames)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method = pyrofl.regression(formula, tables, **how)
        run = pyrofl.fit(method, tables, progress=False)
        return method, run, posterior_draws(run, 4000).sites


def assert_moments(draws, reference, names):
    """Compare draws with a reference within .1 standard deviations and Monte Carlo errors."""
    mean, sd, ess = reference
    for k, name in enumerate(names):
        value = draws[name].flatten() if isinstance(name, str) else name(draws)
        error = math.sqrt(1 / ess + 1 / (len(value) / 4))
        far = abs(float(value.mean() - mean[k]) / float(sd[k]))
        assert far < SHIFT + ERRORS * error, (k, far)
        ratio = float(value.std() / sd[k])
        assert ratio == pytest.approx(1, abs=RATIO + ERRORS * error), (k, ratio)
