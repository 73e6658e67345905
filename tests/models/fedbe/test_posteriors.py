"""Posteriors of the global model: moments, densities, limits and their way to ArviZ."""

from __future__ import annotations

from math import log, pi

import pytest
import torch
from checks import close
from torch import Tensor

from pyrofl.inference.posteriors import export
from pyrofl.models.fedbe import dirichlet, gaussian
from pyrofl.models.fedbe.posteriors import log_prob, sample, to_arviz
from pyrofl.nets import build
from pyrofl.tensors import Tensors, generator

DRAWS = 400_000


def models(*values: float) -> Tensors:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def rows(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def within(found: Tensor, expected: float, deviation: float) -> None:
    """Compare a mean over the draws with its expectation, up to five standard errors."""
    close(found, expected, 5 * deviation / DRAWS**0.5)


def test_the_normal_has_the_weighted_moments_of_the_clients():
    drawn = sample(gaussian(models(1, 3, 5), rows(1, 1, 2)), DRAWS, generator(1))["w"]
    within(drawn.mean(), 3.5, 2.75**0.5)
    within((drawn - 3.5).square().mean(), 2.75, 2.75 * 2**0.5)  # the population variance
    score = log_prob(gaussian(models(1, 3, 5), rows(1, 1, 2)), {"w": rows(3.5, 4.5)})
    close(score, [-0.5 * log(2 * pi * 2.75), -0.5 * log(2 * pi * 2.75) - 0.5 / 2.75])


def test_the_authors_code_draws_closer():
    wide, close_by = (
        sample(gaussian(models(1, 3, 5), rows(1, 1, 2), scale), 20, generator(1))["w"]
        for scale in (1.0, 0.1)
    )
    close(close_by - 3.5, 0.1 * (wide - 3.5))


def test_one_client_leaves_no_doubt():
    drawn = sample(gaussian({"w": rows(1, 0, 5)[None]}, rows(7)), 9, generator(1))["w"]
    close(drawn, rows(1, 0, 5).expand(9, 3))
    assert bool(
        log_prob(gaussian({"w": rows(1, 0, 5)[None]}, rows(7)), {"w": drawn}).isfinite().all()
    )


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_mixtures_of_equal_clients_spread_around_the_average(alpha):
    w = torch.tensor([[1.0, 0.0], [3.0, -1.0], [5.0, 2.0]], dtype=torch.float64)
    drawn = sample(dirichlet({"w": w}, rows(4, 4, 4), alpha), DRAWS, generator(2))["w"]
    gap = w - w.mean(0)
    covariance = gap.T @ gap / 3 / (3 * alpha + 1)  # alpha_0 = 3 alpha
    for i in range(2):
        within(drawn[:, i].mean(), float(w[:, i].mean()), float(covariance[i, i]) ** 0.5)
    close(torch.cov(drawn.T), covariance, 0.01)


def test_the_limits_of_the_dirichlet():
    drawn = sample(dirichlet(models(1, 3, 5), rows(4, 4, 4), 1e-3), 2000, generator(3))["w"]
    nearest = (drawn[:, None] - rows(1, 3, 5)).abs().amin(1)
    assert (nearest < 1e-3).double().mean() > 0.95
    drawn = sample(dirichlet(models(1, 3, 5), rows(1, 1, 2), 1e8), 50, generator(3))["w"]
    close(drawn, [3.5] * 50, 1e-2)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.5, (0.136, 0.223, 0.292, 0.349)),
        (50.0, (0.1004, 0.2003, 0.3001, 0.3992)),
    ],
)
def test_mixtures_of_unequal_clients_lean_to_the_small_ones(alpha, expected):
    eye = {"w": torch.eye(4, dtype=torch.float64)}
    drawn = sample(dirichlet(eye, rows(1, 2, 3, 4), alpha), DRAWS, generator(4))["w"]
    error = drawn.std(0) / DRAWS**0.5
    digits = 5e-4 if alpha < 1 else 5e-5
    assert ((drawn.mean(0) - torch.tensor(expected)).abs() < 5 * error + digits).all()
    close(drawn.sum(1), torch.ones(DRAWS, dtype=torch.float64), 1e-9)


def test_the_density_of_a_mixture_is_that_of_its_shares():
    posterior = dirichlet(models(1, 3, 5), rows(1, 1, 2), 0.5)
    drawn = sample(posterior, 7, generator(5))
    expected = torch.distributions.Dirichlet(rows(0.5, 0.5, 0.5)).log_prob(drawn["gamma"])
    close(log_prob(posterior, drawn), expected)
    share = drawn["gamma"] * rows(1, 1, 2)
    close(drawn["w"], share @ rows(1, 3, 5) / share.sum(1))


@pytest.mark.parametrize("family", [gaussian, dirichlet])
def test_draws_follow_the_generator_and_nothing_else(family):
    before = torch.get_rng_state()
    net = build("mlp:3", (4,), 2)
    clients = {n: torch.randn(5, *s, generator=generator(6)) for n, s in net.shapes.items()}
    posterior = family(clients, rows(1, 2, 3, 4, 5).float())
    one, other = (sample(posterior, 3, generator(7)) for _ in range(2))
    for n, s in net.shapes.items():
        assert torch.equal(one[n], other[n])
        assert one[n].shape == (3, *s)
        assert one[n].dtype == torch.float32
    assert not torch.equal(one["head.bias"], sample(posterior, 3, generator(8))["head.bias"])
    assert log_prob(posterior, one).shape == (3,)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_reach_arviz_with_their_names(tmp_path):
    net = build("mlp:3", (4,), 2)
    clients = {n: torch.randn(5, *s, generator=generator(6)) for n, s in net.shapes.items()}
    drawn = sample(dirichlet(clients, rows(1, 2, 3, 4, 5)), 6, generator(7))
    export.save(to_arviz(net, drawn, list("abcde")), tmp_path / "posterior.nc")
    found = export.load(tmp_path / "posterior.nc")["posterior"]
    assert found["gamma"].dims == ("chain", "draw", "client")
    assert found["gamma"]["client"].values.tolist() == list("abcde")
    assert found["head.weight"].dims == ("chain", "draw", "head_out", "head_in")
    assert found["head.weight"].shape == (1, 6, 2, 3)
    normal = to_arviz(net, sample(gaussian(clients, rows(1, 2, 3, 4, 5)), 6, generator(7)), "abcde")
    assert set(normal["posterior"].data_vars) == set(net.shapes)
