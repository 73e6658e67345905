"""Laplace's approximation of Gaussian processes: its peak, its spread, rows that are not there."""

from __future__ import annotations

import pyro
import pytest
import torch
from checks import close
from torch import Tensor

from pyrofl.models import likelihoods
from pyrofl.models.pfedgp import processes
from pyrofl.models.pfedgp.processes import (
    Kernel,
    lower,
    predicted,
    singular_cholesky,
    sites,
    weights,
)
from pyrofl.tensors import generator

RNG = generator(1)
Z = torch.randn(2, 6, 3, generator=RNG, dtype=torch.float64)
Y = torch.tensor([[0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 0]])
ZERO = torch.zeros(2, 1, dtype=torch.float64)
EVERY = torch.ones(2, 6, dtype=torch.bool)


def softmax(f: Tensor) -> Tensor:
    return likelihoods.categorical(f, Z).log_prob(Y)


@pytest.mark.parametrize("kind", ["rbf", "linear"])
def test_the_peak_has_no_slope(kind):
    among = Kernel(kind)(Z, Z, ZERO, ZERO + 1)
    shift, root = sites(softmax, among, EVERY, 3)
    pull, _ = weights(among, shift, root)
    f = (among @ pull).requires_grad_()
    (slope,) = torch.autograd.grad(softmax(f).sum(), f)
    close(slope, pull, 1e-9)  # the gradient of the log prior at f is minus P^-1 f


@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0])
def test_the_peak_is_found_where_whole_steps_overshoot(scale):
    # Features that are much alike, eight classes of which a client has two or three.
    z, y = 0.3 * torch.randn(4, 20, 3, generator=generator(2)).double(), torch.arange(80) ** 2 % 3
    among = Kernel("rbf")(z, z, ZERO.new_zeros(4, 1), ZERO.new_full((4, 1), scale).log())

    def log_prob(f: Tensor) -> Tensor:
        return likelihoods.categorical(f, z).log_prob(y.view(4, 20))

    pull, _ = weights(among, *sites(log_prob, among, torch.ones(4, 20), 8))
    f = (among @ pull).requires_grad_()
    (slope,) = torch.autograd.grad(log_prob(f).sum(), f)
    close(slope, pull, 1e-6)


def test_a_peak_that_is_not_found_is_told(monkeypatch):
    monkeypatch.setattr(processes, "MAX_NEWTON_STEPS", 2)
    among = Kernel("rbf")(Z, Z, ZERO, ZERO + 1)
    with pytest.warns(UserWarning, match="was not found in 2 steps; expected a likelihood"):
        sites(softmax, among, EVERY, 3)


def test_the_covariance_is_that_of_the_curvature():
    among = Kernel("rbf")(Z, Z, ZERO, ZERO + 1)
    shift, root = sites(softmax, among, EVERY, 3)
    f = among @ weights(among, shift, root)[0]
    alone = Kernel("rbf").diagonal(Z, ZERO, ZERO + 1)
    mean, spread = predicted(among, among, alone, shift, root)
    close(mean, f, 1e-10)
    p = f[0].softmax(-1)
    curve = torch.block_diag(*(torch.diag(v) - torch.outer(v, v) for v in p))
    prior = torch.kron(among[0], torch.eye(3).double())
    exact = torch.linalg.inv(torch.linalg.inv(prior) + curve)
    for i in range(6):
        close(spread[0, i], exact[3 * i : 3 * i + 3, 3 * i : 3 * i + 3], 1e-8)


def test_rows_that_are_not_there_say_nothing():
    mask = EVERY.clone()
    mask[:, 4:] = False
    among = Kernel("rbf")(Z, Z, ZERO, ZERO)
    whole = sites(softmax, among, mask, 3)
    few = sites(
        lambda f: likelihoods.categorical(f, Z).log_prob(Y[:, :4]),
        among[:, :4, :4],
        EVERY[:, :4],
        3,
    )
    for found, expected in zip(whole, few, strict=True):
        close(found[:, :4], expected, 1e-10)
        assert not found[:, 4:].any()


def test_a_client_of_no_numbers_is_alone_with_it():
    z = Z.clone()
    z[0, 2] = torch.inf
    among = Kernel("rbf")(z, z, ZERO, ZERO)
    with pyro.validation_enabled(False):
        bad, good = weights(among, *sites(softmax, among, EVERY, 3))[0]
    assert bad.isnan().any()
    fine = Kernel("rbf")(Z, Z, ZERO, ZERO)
    close(good, weights(fine, *sites(softmax, fine, EVERY, 3))[0][1], 1e-10)


def test_roots_of_singular_and_of_bad_matrices():
    singular = torch.tensor([[0.25, -0.25], [-0.25, 0.25]], dtype=torch.float64)
    close(lower(singular) @ lower(singular).mT, singular, 1e-11)
    close(
        singular_cholesky(singular),
        torch.tensor([[0.5, 0.0], [-0.5, 0.0]], dtype=torch.float64),
        1e-11,
    )
    bad = torch.tensor([[4.0, 9.0], [9.0, -1.0]])
    close(lower(bad), torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
