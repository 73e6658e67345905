"""Amortized: exact where the posterior is normal, calibrated on new clients, in any order."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor

import pyrofl
from pyrofl import checks
from pyrofl.data import Federation
from pyrofl.data.loaders.conjugate import gaussian_means
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fraction
from pyrofl.inference.engine.state import RoundState
from pyrofl.inference.evaluation.prepare import prepared
from pyrofl.models import amortized, guides, likelihoods
from pyrofl.nets import Network, build, with_noise
from pyrofl.tensors import Tensors, generator

# Of toys.net(): two layers of 32 units, of a row (6 features, 5 outputs and their score) and of it
# with its set, and the gain and the precision of each of 5 outputs.
ENCODER = (16 * 32 + 32) + (65 * 32 + 32) + (32 * 10 + 10)
SENT = toys.BASE + 2 * toys.HEAD + ENCODER
PROMISES = {
    "amortized": Promises(message=(SENT, SENT), sites=toys.HEAD_AXES, random=True),
}

SD = 0.5  # of the noise of rows
M, S = torch.tensor([1.0, -0.5]).double(), torch.tensor([1.0, 0.5]).double()


def simulated(sizes: list[int], seed: int, **options: object) -> Federation:
    """Return clients with effects from the population (M, S), and correlated columns."""
    g, parts = generator("simulated", seed), {}
    for j, n in enumerate(sizes):
        x = torch.randn(n, 2, generator=g).double()
        x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
        z = M + S * torch.randn(2, generator=g).double()
        parts[f"client {j}"] = (x, x @ z + SD * torch.randn(n, generator=g).double())
    return Federation.from_arrays(parts, **options).to("cpu", torch.float64)


SIZES = [1, 4, 9, 15, 6, 2, 11, 8, 5, 13, 7, 3, 10, 6, 12, 4, 9, 8, 14, 5]


def linear(**settings: object) -> Method:
    net = build("linear", (2,), 1)
    return amortized.build(net, likelihood=likelihoods.normal(SD), **settings)


def state_of(method: Method, data: Federation, **tensors: Tensor) -> RoundState:
    """Return a round of which the server's tensors are these."""
    state = pyrofl.inference.engine.start.first(method, data, 0)
    return replace(state, server=state.server | tensors)


def exact_encoder(server: Tensors) -> Tensors:
    """Return weights with gains of 1 and precisions of SD^-2."""
    biases = torch.tensor(
        [0.0, -2 * math.log(SD)], dtype=torch.float64
    )  # gains less 1, log precisions
    return {
        "encoder/site.weight": torch.zeros_like(server["encoder/site.weight"]),
        "encoder/site.bias": biases,
    }


POPULATION = {"loc/w": M, "log_scale/w": S.log()}


def known(method: Method, data: Federation) -> RoundState:
    """Return a round with the true population and the exact encoder."""
    state = state_of(method, data)
    return state_of(method, data, **POPULATION, **exact_encoder(state.server))


def by_encoder(
    method: Method, data: Federation, state: RoundState, *ids: int, site: str = "w"
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of clients' effects, without training."""
    cohort = data.cohort(torch.tensor(ids))
    received, local = prepared(
        method, data, state, cohort, model="personal", adaptation="fine_tune"
    )
    mean, variance = method.guide.moments(received, local, data.batch(cohort.ids))
    return mean[site], variance[site].sqrt()


def exact(data: Federation, j: int, m: Tensor = M, s: Tensor = S) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of a client's effects given the population, in closed form."""
    x, y = data.x[data.train[j]], data.y[data.train[j]]
    weight = 1.0 if data.weights is None else data.weights[data.train[j]][:, None]
    precision = torch.diag(s**-2) + x.T @ (weight * x) / SD**2
    shift = (weight * x).T @ (y - x @ m) / SD**2
    return m + torch.linalg.solve(precision, shift), torch.linalg.inv(precision)


@cache
def fitted() -> tuple[Method, pyrofl.Run]:
    """Return a fit of the linear model to the twenty clients."""
    return (method := linear()), pyrofl.fit(method, simulated(SIZES, 0), 60, progress=False)


def test_the_right_encoder_is_exact_for_normal_responses():
    data, method = simulated([1, 4, 30], 1), linear()
    state = known(method, data)
    mean, sd = by_encoder(method, data, state, 0, 1, 2)
    draws = pyrofl.posterior(
        method, data, state, 40_000, ids=torch.arange(3), adaptation="fine_tune"
    )["w"]
    for j in range(3):
        expected, covariance = exact(data, j)
        close(mean[j], expected)
        close(sd[j], covariance.diagonal().sqrt())
        # The standard error of a correlation is (1 - r^2) / S^1/2, at most 0.005.
        one = covariance.diagonal().rsqrt()
        correlation = (one[:, None] * covariance * one)[0, 1]
        assert abs(torch.corrcoef(draws[:, j].T)[0, 1] - correlation) < 4 * 0.005


def test_rows_count_by_their_weights():
    data, method = simulated([4, 7], 1), linear()
    weights = torch.rand(11, generator=generator(2)).double() + 0.1
    data = replace(data, weights=weights)
    mean, _ = by_encoder(method, data, known(method, data), 0, 1)
    for j in range(2):
        close(mean[j], exact(data, j)[0])


def test_training_finds_the_exact_posterior_of_new_clients():
    """Of forty new clients, given the learned population; errors are in standard deviations."""
    method, run = fitted()
    both = simulated(SIZES + SIZES * 2, 3, held_out=[f"client {j}" for j in range(20, 60)])
    state, server = replace(run.state, names=()), run.state.server
    ids = range(20, 60)
    mean, sd = by_encoder(method, both, state, *ids)
    errors, ratios = [], []
    for at, j in enumerate(ids):
        m, s = server["loc/w"], server["log_scale/w"].exp()
        expected, covariance = exact(both, j, m, s)
        width = covariance.diagonal().sqrt()
        errors.append((mean[at] - expected) / width)
        ratios.append((sd[at] / width).log())
    assert torch.stack(errors).square().mean().sqrt() < 0.15
    assert torch.stack(ratios).abs().max() < 0.15


@pytest.mark.parametrize("trained", [True, False])
def test_ranks_of_new_clients_are_uniform(trained):
    """By simulation-based calibration; an encoder that has not learned the noise fails."""
    method, run = fitted()
    new = simulated([3, 8, 20], 5)
    server = run.state.server
    if not trained:
        server = server | {"encoder/site.bias": torch.zeros(2).double()}
        server |= {"encoder/site.weight": torch.zeros(2, 32).double()}
    ranks = checks.sbc(
        method, new, 0, replications=400, draws=99, server=server, adaptation="fine_tune"
    )
    assert (ranks.p_value > 0.01) == trained
    if trained:  # the standard error of a coverage is (0.95 0.05 / 400)^1/2 = 0.011
        covered = ranks.coverage([0.95])["w"]
        level = float(covered["level"][0])
        assert float(abs(covered - level).max()) < 4 * 0.011


def test_the_order_of_rows_does_not_matter():
    data, (method, run) = simulated([9, 14], 1), fitted()
    state = replace(run.state, names=())
    order = [torch.randperm(len(r), generator=generator(4)) for r in data.train]
    shuffled = replace(data, train=tuple(r[p] for r, p in zip(data.train, order, strict=True)))
    for one, other in zip(
        by_encoder(method, data, state, 0, 1),
        by_encoder(method, shuffled, state, 0, 1),
        strict=True,
    ):
        close(one, other, 1e-13)


def test_padding_does_not_matter():
    data, (method, run) = simulated([2, 40, 7], 1), fitted()
    state = replace(run.state, names=())
    together = by_encoder(method, data, state, 0, 1, 2)
    for j in range(3):
        for one, all_of_them in zip(by_encoder(method, data, state, j), together, strict=True):
            close(one[0], all_of_them[j], 1e-13)


def test_a_client_without_rows_has_the_posterior_of_the_population():
    data, method = simulated([4, 7, 5], 1, held_out=["client 2"]), linear()
    state = known(method, data)
    found = checks.new_client_posterior(
        method, data, state, "client 2", (0, 1), 40_000, adaptation="fine_tune"
    )
    # Standard errors of a mean and of a log standard deviation of 40,000 draws.
    for n, (mean, sd) in {0: (M, S), 1: (None, None)}.items():
        if n:
            one = replace(data, train=(*data.train[:2], data.train[2][:1]))
            mean, covariance = exact(one, 2)
            sd = covariance.diagonal().sqrt()
        draws = found[n]["w"]
        assert ((draws.mean(0) - mean) / sd).abs().max() < 4 / 200
        assert (draws.std(0) / sd).log().abs().max() < 4 / (2 * 40_000) ** 0.5


def test_the_population_ends_where_the_evidence_has_its_maximum():
    """As in FedPop's test: of four scalar clients with estimates b and variance 0.3."""
    b = torch.tensor([-2, -0.5, 0.4, 3], dtype=torch.float64)
    data = gaussian_means(b[:, None], torch.full((4,), 0.3)).federation
    method = amortized.build(
        build("linear", (1,), 1), likelihood=likelihoods.normal(), lr_encoder=0.0
    )
    *_, state = federate(method, data, 200)
    close(state.server["loc/w"], [0.225], 1e-6)
    close((2 * state.server["log_scale/w"]).exp(), [3.001875], 1e-5)


def test_a_far_mean_does_not_hide_the_spread_in_single_precision():
    data = simulated([20] * 10, 1)
    near = pyrofl.fit(linear(), data, 30, progress=False).state.server["log_scale/w"].exp()
    x = torch.cat([data.x, torch.ones_like(data.x[:, :1])], 1)
    far = replace(data, x=x[:, [0, 2]], y=data.y + 1e4).to("cpu", torch.float32)
    server = pyrofl.fit(linear(), far, 30, progress=False).state.server
    assert abs(float(server["loc/w"][1]) - 1e4) < 1.0
    assert 0.05 < float(server["log_scale/w"][1].exp()) < 2 * float(near.max())


def logistic(sizes: list[int], seed: int) -> Federation:
    """Return clients with binary responses, effects from (M, S), and a column of ones."""
    g, parts = generator("logistic", seed), {}
    for j, n in enumerate(sizes):
        x = torch.randn(n, 2, generator=g).double()
        x[:, 1] = 1
        z = M + 2 * S * torch.randn(2, generator=g).double()
        parts[f"client {j}"] = (x, torch.bernoulli((x @ z).sigmoid(), generator=g))
    return Federation.from_arrays(parts).to("cpu", torch.float64)


def by_grid(data: Federation, j: int, m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a client's effects in the logistic model, on a grid."""
    axis = torch.linspace(-5, 5, 201).double()
    z = m + s * torch.cartesian_prod(axis, axis)
    logits = z @ data.x[data.train[j]].T
    y = data.y[data.train[j]]
    log = (y * logits - torch.nn.functional.softplus(logits)).sum(1)
    w = (log - 0.5 * ((z - m) / s).square().sum(1)).softmax(0)
    mean = w @ z
    return mean, (w @ (z - mean).square()).sqrt()


def test_the_encoder_learns_posteriors_that_are_not_normal():
    """Near the exact ones of new clients with binary responses, by quadrature."""
    data, new = logistic([3, 6, 12, 20] * 8, 0), logistic([3, 6, 12, 20] * 5, 1)
    method = amortized.build(build("linear", (2,), 1), likelihood=likelihoods.bernoulli)
    run = pyrofl.fit(method, data, 80, progress=False)
    server = run.state.server
    m, s = server["loc/w"], server["log_scale/w"].exp()

    def errors(**tensors: Tensor) -> Tensor:
        state = state_of(method, new, **(server | tensors))
        mean, sd = by_encoder(method, new, state, *range(20))
        expected = [by_grid(new, j, m, s) for j in range(20)]
        off = [(mean[j] - at) / width for j, (at, width) in enumerate(expected)]
        wide = [(sd[j] / width).log() for j, (_, width) in enumerate(expected)]
        return torch.stack([torch.stack(v).square().mean().sqrt() for v in (off, wide)])

    untrained = {n: torch.zeros_like(v) for n, v in server.items() if n.startswith("encoder/site")}
    assert (errors() < torch.tensor([0.3, 0.15])).all(), errors()
    assert (errors() < 0.5 * errors(**untrained)).all(), errors(**untrained)


def test_minibatches_and_partial_participation_find_it_too():
    data = simulated(SIZES, 0)
    method = linear(encoder_batch=4)
    run = pyrofl.fit(method, data, 60, participation=fraction(0.5), progress=False)
    server = run.state.server
    mean, _ = by_encoder(method, data, run.state, *range(20))
    m, s = server["loc/w"], server["log_scale/w"].exp()
    off = [
        (mean[j] - at) / covariance.diagonal().sqrt()
        for j, (at, covariance) in enumerate(exact(data, j, m, s) for j in range(20))
    ]
    assert torch.stack(off).square().mean().sqrt() < 0.2


def test_the_noise_of_rows_is_learned_with_the_base():
    net = with_noise(build("linear", (2,), 1))
    method = amortized.build(net, likelihood=likelihoods.learned_normal())
    run = pyrofl.fit(method, simulated([20] * 20, 0), 60, progress=False)
    # The standard error of a log standard deviation of 400 - 40 residuals is 0.04.
    assert abs(float(run.state.server["base/noise.log_scale"]) - math.log(SD)) < 4 * 0.04


@pytest.mark.parametrize("family", [guides.mean_field, guides.full_covariance])
def test_other_guides_start_at_the_moments_of_the_encoder(family):
    data = simulated([1, 4, 9], 1)
    method = linear(guide=family)
    mean, sd = by_encoder(method, data, known(method, data), 0, 1, 2)
    for j in range(3):
        expected, covariance = exact(data, j)
        close(mean[j], expected, 1e-9)
        close(sd[j], covariance.diagonal().sqrt(), 1e-9)


def test_networks_that_it_cannot_encode_are_refused():
    pair = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})

    class Both(torch.nn.Module):
        """A sum of two layers, which is no sequence."""

        def __init__(self) -> None:
            super().__init__()
            self.pair = pair

        def forward(self, x: Tensor) -> Tensor:
            return self.pair["a"](x) + self.pair["b"](x)

    with pytest.raises(ValueError, match="expected one fully connected layer at the end"):
        amortized.build(Network(Both()))
    with pytest.raises(
        ValueError, match=r"12,000,000 numbers per client; .*narrower last hidden layer"
    ):
        amortized.build(build("mlp:999", (4,), 12))
