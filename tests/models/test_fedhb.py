"""FedHB: the server's closed form by hand, and as the maximum of the evidence's bound."""

from __future__ import annotations

import math

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor

from pyrofl.data.loaders.conjugate import gaussian_means
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.models import fedhb, guides, likelihoods
from pyrofl.nets import build
from pyrofl.tensors import role

PROMISES = {"fedhb": Promises(random=True, message=(2 * toys.ALL, 2 * toys.ALL + 1))}


def test_the_posterior_of_the_population_by_hand():
    # Three clients at -1, 0, 4 of variance 0.5; count 2, df 3, spread 2.
    first, second = torch.tensor([3.0]), torch.tensor([17.0 + 1.5])
    found = fedhb.posterior_of({"w": first}, {"w": second}, 3.0, (2.0, 3.0, 2.0))
    close(found["loc/w"], [0.6])
    psi = 12 + 18.5 - 5 * 0.36
    close((2 * found["log_scale/w"]).exp(), [psi / 6], 1e-6)


def bound(mean: Tensor, variance: Tensor, m: Tensor, level: float, n: float, psi: Tensor) -> Tensor:
    """Return what of the bound depends on q(phi), for count 1, df 3, spread 0.1, by its parts."""
    precision, log_sigma = n / psi, (psi / 2).log() - torch.digamma(torch.tensor(n / 2))
    apart = ((mean - m).square() + variance) * precision + 1 / level
    clients = (-0.5 * log_sigma - 0.5 * apart).sum()
    a, b = 3 / 2, 3 * 0.01 / 2
    at_mu = -0.5 * log_sigma - 0.5 * (m.square() * precision + 1 / level)
    at_sigma = -(a + 1) * log_sigma - b * precision
    half = torch.tensor(n / 2)
    entropy = half + (psi / 2).log() + torch.lgamma(half) - (1 + half) * torch.digamma(half)
    entropy = entropy + 0.5 * log_sigma - 0.5 * math.log(level)
    return clients + at_mu + at_sigma + entropy


def test_the_closed_form_is_the_maximum_of_the_bound():
    mean, variance = torch.tensor([-0.3, 0.1, 0.5, 0.2]).double(), torch.full((4,), 0.02).double()
    found = fedhb.posterior_of(
        {"w": mean.sum()}, {"w": (mean.square() + variance).sum()}, 4.0, (1.0, 3.0, 0.1)
    )
    psi = (2 * found["log_scale/w"]).exp() * 7
    at = torch.stack([found["loc/w"], psi]).requires_grad_()
    slope = torch.autograd.grad(bound(mean, variance, at[0], 5.0, 7.0, at[1]), at)[0]
    close(slope, [0.0, 0.0], 1e-9)
    best = bound(mean, variance, at[0], 5.0, 7.0, at[1])
    for level, n in ((4.5, 7.0), (5.5, 7.0), (5.0, 6.5), (5.0, 7.5)):
        assert bound(mean, variance, at[0], level, n, at[1]) < best


def test_a_round_is_that_closed_form_of_what_clients_sent(tiny):
    method = fedhb.build(build("mlp:5", (4,), 3), batch=2)
    state = toys.last(method, tiny, 1)
    mean, square = (role(n, state.message)["head.bias"] for n in ("mean", "square"))
    close(state.server["loc/head.bias"], mean.sum(0) / 4)
    psi = 3 * 0.01 + square.sum(0) - 4 * state.server["loc/head.bias"].square()
    close((2 * state.server["log_scale/head.bias"]).exp(), psi / 6)


def test_it_finds_a_population():
    # Twelve scalar clients around 1.2; a t of the paper's form, whose mean shrinks by 12 / 13.
    b = torch.linspace(0.2, 2.2, 12).double()
    data = gaussian_means(b[:, None], torch.full((12,), 0.01)).federation
    method = fedhb.build(
        build("linear", (1,), 1),
        likelihood=likelihoods.normal(),
        batch=None,
        kl=1.0,
        epochs=100,
        num_particles=8,
        lr=0.02,
    )
    *_, state = federate(method, data, 8)
    assert float(state.server["loc/w"]) == pytest.approx(1.2 * 12 / 13, abs=0.03)
    assert float(state.server["log_scale/w"].exp()) == pytest.approx(float(b.std()), rel=0.25)


def test_centers_by_hand():
    # Clients at 1, 2 and 6; the second is half of either kind. sigma^2 = 0.25.
    mass, mean = torch.tensor([1.5, 1.5]), torch.tensor([2 / 1.5, 7 / 1.5])
    found = fedhb.centers_of(mass, {"w": mean}, 0.5)["w"]
    close(found, [2 / 1.75, 7 / 1.75], 1e-6)


def test_a_mixture_finds_kinds_of_clients():
    b = torch.tensor([-2.1, -2.0, -1.9, -2.0, 1.9, 2.0]).double()
    data = gaussian_means(b[:, None], torch.full((6,), 0.01)).federation
    method = fedhb.build(
        build("linear", (1,), 1),
        likelihood=likelihoods.normal(),
        guide=guides.delta,
        centers=2,
        spread=0.3,
        batch=None,
        epochs=200,
        lr=0.05,
    )
    start = {"loc/w": torch.tensor([[-0.1], [0.1]]).double()}
    begun = first(method, data, 0).server
    state = toys.last(method, data, 4, server_state=begun | start)
    # Clients are drawn to the centers, and these to 0: r = M b / (M + sigma^2 + v), nearly.
    close(state.server["mass"], [4.0, 2.0], 1e-6)
    exact = torch.tensor([-2.0 * 4 / 4.09, 1.95 * 2 / 2.09]).double()
    close(state.server["loc/w"].flatten(), exact, 0.02)


def test_clients_of_a_mixture_train_side_by_side_and_messages_are_folded():
    data = toys.blobs()
    method = fedhb.build(toys.net(), guide=guides.delta, centers=3)
    one, many = (toys.last(method, data, 2, chunk_size=chunk) for chunk in (1, None))
    toys.assert_same_round(one, many, rtol=1e-8, atol=1e-9)
    folded = toys.last(method, data, 2, chunk_size=5, keep_messages=False)
    toys.assert_same(folded.server, many.server, rtol=1e-8, atol=1e-9)
    assert one.message["kind"].shape == (12, 3)
    for view in method.views:
        assert evaluate(method, data, many, model=view).mean("accuracy") > 0.2


def test_points_are_a_guide_too():
    data, method = toys.blobs(), fedhb.build(toys.net(), guide=guides.delta)
    assert first(method, data, 0).server
    toys.last(method, data, 2)
