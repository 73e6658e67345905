"""The horseshoe against SciPy, its integral and its own construction."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import exp1
from scipy.stats import kstest

from pyrofl.models.priors.horseshoe import Horseshoe, scaled_e1
from pyrofl.tensors import seeded


def test_the_exponential_integral_is_that_of_scipy():
    x = np.logspace(-12, 2.8, 300)
    found = scaled_e1(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, np.exp(x) * exp1(x), rtol=1e-13)


def test_its_derivatives_are_right():
    x = torch.tensor([0.05, 0.9, 1.1, 7.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scaled_e1, (x,))
    assert torch.autograd.gradgradcheck(scaled_e1, (x,))


def test_the_density_integrates_to_one_about_its_center():
    side = torch.logspace(-12, 6, 200_000, dtype=torch.float64)
    w = torch.cat([-side.flip(0), side])
    mass = torch.trapezoid(Horseshoe(3.0, 2.0).log_prob(w + 3).exp(), w)
    assert abs(float(mass) - 1) < 1e-5
    assert Horseshoe(3.0, 2.0).log_prob(torch.tensor(3.0)).isfinite()


def test_draws_have_the_density():
    with seeded(0):
        draws = Horseshoe(torch.tensor(1.0), torch.tensor(0.5)).rsample((20_000,)).double()
    side = torch.logspace(-14, 9, 100_000, dtype=torch.float64)
    w = torch.cat([-side.flip(0), side])
    density = Horseshoe(0.0, 0.5).log_prob(w).exp()
    step = (w[1:] - w[:-1]) * (density[1:] + density[:-1]) / 2
    cdf = torch.cat([torch.zeros(1), step.cumsum(0)]).numpy()
    assert kstest((draws - 1).numpy(), lambda v: np.interp(v, w.numpy(), cdf)).pvalue > 0.01


def test_it_expands_and_draws_with_gradients():
    loc = torch.zeros(3, 1, requires_grad=True)
    fn = Horseshoe(loc, torch.ones(2)).expand((4, 3, 2))
    assert (fn.batch_shape, fn.rsample().shape) == ((4, 3, 2), (4, 3, 2))
    fn.rsample().sum().backward()
    assert torch.equal(loc.grad, torch.full((3, 1), 8.0))
