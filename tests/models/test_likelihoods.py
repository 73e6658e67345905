"""Likelihoods of a row: densities by hand, and training that each of them drives."""

from __future__ import annotations

from math import comb, exp, factorial, log, log1p, pi

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyrofl.data import Federation
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.training.noise import draw
from pyrofl.models import fedavg, likelihoods, pfedvem
from pyrofl.nets import build
from pyrofl.tensors import generator

# Two rows of one client; the second input is the first column of x.
OUTPUTS = [-0.7, 1.3]
FIRST = [3.0, 5.0]


def sigmoid(value: float) -> float:
    return 1 / (1 + exp(-value))


@pytest.mark.parametrize(
    ("likelihood", "y", "density"),
    [
        ("normal", [0.2, -1.0], lambda f, x, y: -0.5 * (y - f) ** 2 - 0.5 * log(2 * pi)),
        (
            "normal_known_sd",
            [0.2, -1.0],
            lambda f, x, y: -0.5 * ((y - f) / x) ** 2 - log(x) - 0.5 * log(2 * pi),
        ),
        (
            "bernoulli",
            [0.0, 1.0],
            lambda f, x, y: log(sigmoid(f) if y else 1 - sigmoid(f)),
        ),
        (
            "binomial",
            [2.0, 0.0],
            lambda f, x, y: log(comb(int(x), int(y))) + y * f - x * log1p(exp(f)),
        ),
        ("poisson", [0.0, 4.0], lambda f, x, y: y * f - exp(f) - log(factorial(int(y)))),
    ],
)
def test_the_density_of_a_row_is_the_textbooks(likelihood, y, density):
    outputs = torch.tensor(OUTPUTS, dtype=torch.float64)[None, :, None]
    x = torch.tensor(FIRST, dtype=torch.float64)[None, :, None].expand(1, 2, 3)
    found = likelihoods.named(likelihood)(outputs, x)
    assert found.batch_shape == (1, 2)
    expected = [density(f, first, row) for f, first, row in zip(OUTPUTS, FIRST, y, strict=True)]
    torch.testing.assert_close(
        found.log_prob(torch.tensor([y], dtype=torch.float64)),
        torch.tensor([expected], dtype=torch.float64),
    )


def test_the_density_of_a_class_is_the_softmax():
    outputs = torch.tensor([[[0.5, -1.0, 2.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    found = likelihoods.categorical(outputs, torch.zeros(1, 2, 4))
    assert found.batch_shape == (1, 2)
    total = log(exp(0.5) + exp(-1.0) + exp(2.0))
    torch.testing.assert_close(
        found.log_prob(torch.tensor([[1, 2]])),
        torch.tensor([[-1.0 - total, -log(3)]], dtype=torch.float64),
    )


def test_the_noise_and_the_trials_can_be_fixed():
    outputs = torch.tensor(OUTPUTS, dtype=torch.float64)[None, :, None]
    x = torch.zeros(1, 2, 3, dtype=torch.float64)
    y = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(
        likelihoods.normal(0.5)(outputs, x).log_prob(y),
        torch.distributions.Normal(outputs[..., 0], 0.5).log_prob(y),
    )
    torch.testing.assert_close(
        likelihoods.binomial(6)(outputs, x).log_prob(y),
        torch.distributions.Binomial(6, logits=outputs[..., 0]).log_prob(y),
    )


@pytest.mark.parametrize("name", sorted([*likelihoods.PLAIN, "normal", "binomial"]))
def test_draws_of_the_network_come_in_front(name):
    outputs = torch.zeros(7, 2, 5, 3 if name == "categorical" else 1)
    x = torch.ones(2, 5, 4)
    assert likelihoods.named(name)(outputs, x).batch_shape == (7, 2, 5)


def responses(name: str, mean: torch.Tensor, trials: torch.Tensor) -> torch.Tensor:
    """Draw a response for every row from its family, at outputs `mean`."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        family = likelihoods.named(name)
        return family(mean[:, None], trials[:, None]).sample()


@pytest.mark.parametrize("method", [fedavg, pfedvem])
@pytest.mark.parametrize("name", ["normal", "normal_known_sd", "bernoulli", "binomial", "poisson"])
def test_the_loss_falls(name, method):
    x = torch.randn(60, 3, generator=generator(2), dtype=torch.float64)
    mean = (x[:, 1] - x[:, 2]) / 2
    x[:, 0] = 1 + torch.arange(60) % 4  # standard error, or trials
    rows = torch.arange(60).split([10, 30, 20])
    data = Federation(x, responses(name, mean, x[:, 0]), rows, rows)
    net = build("mlp:4", (3,), 1)
    rates = {"lr": 0.01} if method is fedavg else {"lr_head": 0.005, "lr_base": 0.02}
    run = method.build(net, likelihood=likelihoods.named(name), **rates)
    states = list(federate(run, data, 8))
    assert not states[-1].rejected
    share = torch.tensor([10, 30, 20], dtype=torch.float64) / 60
    for step, first in states[0].loss.items():
        assert share @ states[-1].loss[step] < share @ first


def test_a_likelihood_is_named_with_its_number():
    outputs = torch.zeros(2, 5, 1)
    assert float(likelihoods.named("normal:0.5")(outputs, outputs).scale[0, 0]) == 0.5
    assert float(likelihoods.named("binomial:20")(outputs, outputs).total_count[0, 0]) == 20
    for spec, message in (
        ("normal:-1", "likelihood 'normal:-1' cannot be made: scale is -1.0"),
        ("binomial:few", "likelihood 'binomial:few' cannot be made"),
        ("poisson:3", "likelihood is 'poisson:3'; expected normal:learned, normal:SD"),
        ("gamma", "likelihood is 'gamma'"),
    ):
        with pytest.raises(ValueError, match=message):
            likelihoods.named(spec)


@pytest.mark.parametrize("classes", [2, 5, 15, 16, 40])
def test_classes_are_pyros_categorical(classes):
    logits = 4 * torch.randn(3, 2, classes, generator=generator(6), dtype=torch.float64)
    mine, pyros = likelihoods.Categorical(logits=logits), dist.Categorical(logits=logits)
    y = torch.randint(0, classes, (3, 2), generator=generator(7))
    torch.testing.assert_close(mine.log_prob(y), pyros.log_prob(y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.entropy(), pyros.entropy(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.probs, pyros.probs, rtol=1e-12, atol=1e-12)
    wide = mine.expand((4, 3, 2))
    assert isinstance(wide, likelihoods.Categorical)
    assert wide.batch_shape == (4, 3, 2)
    torch.testing.assert_close(wide.log_prob(y)[3], pyros.log_prob(y), rtol=1e-12, atol=1e-12)
    torch.manual_seed(0)
    drawn = mine.sample((7,))
    torch.manual_seed(0)
    assert torch.equal(drawn, pyros.sample((7,)))
    assert torch.equal(mine.enumerate_support(), pyros.enumerate_support())
    assert float(kl_divergence(mine, pyros).abs().max()) < 1e-12
    one = torch.tensor([1e4, -1e4, 0.0])  # where a sum of exponentials would overflow
    torch.testing.assert_close(
        likelihoods.Categorical(logits=one).logits, torch.tensor([0.0, -2e4, -1e4])
    )


@pytest.mark.parametrize("shape", [(3,), (20,), (4, 3), (5, 2, 4, 10), (0, 3), (2, 6, 30)])
def test_log_probabilities_are_those_of_torch_with_their_gradients(shape):
    logits = 4 * torch.randn(shape, generator=generator(6), dtype=torch.float64)
    weight = torch.randn(shape, generator=generator(7), dtype=torch.float64)
    found = []
    for normalize in (likelihoods.normalized, lambda v: v.log_softmax(-1)):
        own = logits.clone().requires_grad_()
        value = normalize(own)
        found.append((value, *torch.autograd.grad((value * weight).sum(), own)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_classes_refuse_logits_that_are_no_numbers():
    with pytest.raises(ValueError, match="invalid values"):
        likelihoods.Categorical(logits=torch.tensor([0.0, torch.nan]), validate_args=True)


def test_classes_can_be_drawn_for_several_clients_once_probabilities_were_read():
    logits = torch.randn(2, 7, 3, generator=generator(8))
    fn = likelihoods.Categorical(logits=logits)
    expected = draw(fn, 0, [generator(1), generator(2)])
    assert fn.probs.shape == logits.shape
    assert torch.equal(draw(fn, 0, [generator(1), generator(2)]), expected)
    given = likelihoods.Categorical(fn.probs)
    torch.testing.assert_close(given.logits, fn.logits)
    for whole in (torch.int32, torch.int64):
        known = dist.Categorical(logits=torch.tensor([1, 2], dtype=whole))
        same = likelihoods.Categorical(logits=torch.tensor([1, 2], dtype=whole))
        assert torch.equal(same.probs, known.probs)
    with pytest.raises(ValueError, match="at least one-dimensional"):
        likelihoods.Categorical(logits=torch.tensor(1.0))
