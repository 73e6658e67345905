"""Hurdle distributions, compared with their formulas, sums and draws."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyrofl.models.regression.hurdle import Hurdle

GATE = torch.tensor(0.3).double()
RATES = [0.01, 0.4, 5.0, 300.0]


def poisson():
    return dist.Poisson(torch.tensor(RATES).double()), stats.poisson(RATES)


def negative_binomial():
    mean, shape = np.array([0.01, 0.5, 6.0]), 0.7
    base = dist.NegativeBinomial(
        torch.tensor(shape).double(), logits=torch.tensor(np.log(mean / shape))
    )
    return base, stats.nbinom(shape, shape / (shape + mean))


@pytest.mark.parametrize("make", [poisson, negative_binomial])
def test_probabilities_are_those_of_the_truncated_counts(make):
    base, reference = make()
    found = Hurdle(base, GATE)
    for count in range(6):
        expected = 0.7 * reference.pmf(count) / (1 - reference.pmf(0)) if count else 0.3
        value = torch.full(found.batch_shape, float(count)).double()
        assert np.allclose(found.log_prob(value).exp(), expected)
    counts = torch.arange(600.0).double()[:, None].expand(-1, *found.batch_shape)
    p = found.log_prob(counts).exp()
    mean, square = (p * counts).sum(0), (p * counts**2).sum(0)
    assert torch.allclose(p.sum(0), torch.ones_like(mean))
    assert torch.allclose(found.mean, mean)
    assert torch.allclose(found.variance, square - mean**2)


@pytest.mark.parametrize("make", [poisson, negative_binomial])
def test_draws_have_the_probabilities(make):
    torch.manual_seed(0)
    found = Hurdle(make()[0], GATE)
    draws = found.sample((20_000,))
    assert torch.equal(draws, draws.round())
    for count in range(4):
        p = found.log_prob(torch.full(found.batch_shape, float(count)).double()).exp()
        error = (p * (1 - p) / len(draws)).sqrt() + 1e-9
        assert bool((((draws == count).double().mean(0) - p).abs() < 5 * error).all())
    error = (found.variance / len(draws)).sqrt()
    assert bool(((draws.mean(0) - found.mean).abs() < 5 * error).all())


def test_a_hurdle_gamma_is_a_mixture_of_zero_and_gamma():
    torch.manual_seed(0)
    base = dist.Gamma(torch.tensor(2.0).double(), torch.tensor(0.5).double())
    found = Hurdle(base, GATE)
    assert float(found.log_prob(torch.tensor(0.0).double())) == pytest.approx(math.log(0.3))
    value = torch.tensor(3.0).double()
    expected = math.log(0.7) + stats.gamma(2.0, scale=2.0).logpdf(3.0)
    assert float(found.log_prob(value)) == pytest.approx(expected)
    assert float(found.mean) == pytest.approx(0.7 * 4.0)
    assert float(found.variance) == pytest.approx(0.7 * (8.0 + 16.0) - 2.8**2)
    draws = found.sample((20_000,))
    assert float(draws.mean()) == pytest.approx(
        2.8, abs=5 * float(found.stddev) / math.sqrt(20_000)
    )
