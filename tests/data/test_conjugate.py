"""Tasks with an exact posterior, against numbers worked by hand and against other formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from pyrofl.data.loaders.conjugate import conjugate, gaussian_means, linear_regression

DOUBLE = torch.float64


def near(value, expected, atol=5e-5):
    torch.testing.assert_close(value, torch.tensor(expected, dtype=DOUBLE), atol=atol, rtol=0)


def test_one_client_by_hand():
    noise = 0.5**0.5
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=DOUBLE)
    y = torch.tensor([1.0, -1.0, 0.5], dtype=DOUBLE)
    task = conjugate([x / noise], [y / noise])
    loc, tau = torch.tensor([0.2, -0.1], dtype=DOUBLE), torch.tensor([1 / 0.7], dtype=DOUBLE)
    mean, covariance = task.posterior(loc, tau)
    near(mean[0], [0.7553, -0.4072])
    near(covariance[0], [[0.1969, -0.0345], [-0.0345, 0.0935]])
    # As measured, not whitened: three rows with noise variance 0.5.
    near(task.evidence(loc, tau)[0] - 1.5 * math.log(0.5), -3.7961)
    precision = torch.linalg.inv(covariance[0])
    near(0.5 * (precision.diagonal().log().sum() - torch.logdet(precision)), 0.0333)


def test_a_tetrahedron_of_spherical_clients():
    corners = [[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    task = gaussian_means(corners, [0.25] * 4)
    loc, tau = torch.zeros(3), torch.full((4,), 4 / 3, dtype=DOUBLE)
    mean, covariance = task.posterior(loc, tau)
    torch.testing.assert_close(mean, 0.75 * torch.tensor(corners, dtype=DOUBLE))
    torch.testing.assert_close(covariance, 3 / 16 * torch.eye(3, dtype=DOUBLE).expand(4, 3, 3))
    near(task.evidence(loc, tau).sum() - 4 * 1.5 * math.log(0.25), -17.027262, 1e-6)


def test_gaussian_means_have_the_likelihood_they_promise():
    task = gaussian_means([[1.0, 0.0], [0.0, 2.0]], [0.5, 0.25])
    near(task.mean, [[1.0, 0.0], [0.0, 2.0]], 1e-12)
    near(task.precision, [[[2.0, 0.0], [0.0, 2.0]], [[4.0, 0.0], [0.0, 4.0]]], 1e-12)
    mean, covariance = task.posterior(torch.zeros(2), torch.ones(2))
    near(mean, [[0.666667, 0.0], [0.0, 1.6]], 1e-6)
    near(covariance.diagonal(dim1=1, dim2=2), [[0.333333] * 2, [0.2] * 2], 1e-6)
    assert task.federation.sizes.tolist() == [2, 2]


def test_one_weight_vector_shared_by_a_pair_of_quadratics():
    roots = [
        torch.linalg.cholesky(torch.tensor(m, dtype=DOUBLE)).T
        for m in ([[4.0, 0.0], [0.0, 1.0]], [[2.0, 0.5], [0.5, 3.0]])
    ]
    centers = [torch.tensor(c, dtype=DOUBLE) for c in ([1.0, 0.0], [-1.0, 2.0])]
    task = conjugate(roots, [r @ c for r, c in zip(roots, centers, strict=True)])
    mean, covariance = task.pooled(torch.zeros(2), torch.eye(2) / 2)
    near(mean, [0.3707, 1.1810])
    near(covariance, [[0.1552, -0.0172], [-0.0172, 0.2241]])


@pytest.mark.parametrize("rows", [2, 40, [1, 3, 7, 30]])
def test_a_random_regression_agrees_with_the_joint_gaussian(rows):
    task = linear_regression(4, 3, rows, noise=0.5, between=0.7, seed=2)
    loc, tau = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(1.0, 5)
    mean, covariance = task.posterior(loc, tau)
    evidence = task.evidence(loc, tau)
    for j, index in enumerate(task.federation.train):
        x, y = task.federation.x[index], task.federation.y[index]
        prior = torch.eye(3, dtype=DOUBLE) / tau[j]
        center = loc[j].double()
        marginal = torch.eye(len(y), dtype=DOUBLE) + x @ prior @ x.T
        gain = prior @ x.T @ torch.linalg.inv(marginal)
        torch.testing.assert_close(mean[j], center + gain @ (y - x @ center))
        torch.testing.assert_close(covariance[j], prior - gain @ x @ prior)
        expected = MultivariateNormal(x @ center, marginal).log_prob(y)
        torch.testing.assert_close(evidence[j], expected)


def test_least_squares_solution_and_its_scale():
    task = linear_regression(3, 4, 200, noise=0.1, between=2.0, seed=1)
    for j, index in enumerate(task.federation.train):
        x, y = task.federation.x[index], task.federation.y[index]
        torch.testing.assert_close(task.mean[j], torch.linalg.lstsq(x, y[:, None]).solution[:, 0])
        residual = y - x @ task.mean[j]
        # chi2 with 196 degrees of freedom: standard deviation sqrt(2 / 196) of the ratio
        assert abs(residual.square().sum() / 196 - 1) < 4 * math.sqrt(2 / 196)
    assert task.federation.x.dtype == DOUBLE


def test_one_prior_mean_for_all_equals_the_same_for_each():
    task = linear_regression(3, 2, 5)
    loc, tau = torch.tensor([0.3, -1.0]), torch.full((3,), 2.0)
    for one, each in zip(
        task.posterior(loc, tau), task.posterior(loc.expand(3, 2), tau), strict=True
    ):
        assert torch.equal(one, each)
    assert torch.equal(task.evidence(loc, tau), task.evidence(loc.expand(3, 2), tau))


def test_the_seed_decides():
    one, again, other = (linear_regression(2, 2, 3, seed=s).federation.x for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: gaussian_means([[1.0]], [1.0, 2.0]),
            r"means and variances have shapes \[1, 1\] and \[2\]; expected \[J, d\]",
        ),
        (lambda: gaussian_means([[1.0]], [0.0]), "the smallest variance is 0.0; expected positive"),
        (lambda: conjugate([torch.ones(2, 1)], [torch.ones(3)]), r"clients of \[2\] rows and y of"),
        (lambda: conjugate([], []), "at least one client"),
        (lambda: linear_regression(0, 1, 1), "clients is 0"),
        (lambda: linear_regression(2, 1, [1]), r"rows is \[1\]"),
        (lambda: linear_regression(1, 1, 1, noise=0.0), "noise is 0.0"),
        (lambda: linear_regression(1, 1, 1, between=-1.0), "between is -1.0"),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
