"""What a client draws depends on that client alone."""

from __future__ import annotations

from functools import partial
from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from promises import others_slow
from pyro import poutine
from pyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal
from torch import Generator, Tensor
from torch.nn.functional import softplus

from pyrofl.data import Batch, Federation
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.optim import adam, sgd
from pyrofl.inference.definition.programs import Program
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.training.noise import ClientNoise, LatentMeans, draw
from pyrofl.models import guides
from pyrofl.models.guides.automatic import from_pyro
from pyrofl.tensors import Tensors, generator

OPTIMS = {
    "momentum": sgd(0.02, 0.9),
    "clipped": sgd(0.05, 0.5, clip=0.7, weight_decay=0.01),
    "adam": adam(0.01),
}


def numbers(clients: range | list[int], seed: int = 3) -> list[Generator]:
    return [generator(seed, c) for c in clients]


# chunk_size=1 is one client after the other. When this was written the two differed by at most
# 1e-15 in float64 and 1e-6 in float32; the tolerances leave room for other machines' kernels.


PAIRS = list(product(toys.FAMILIES, OPTIMS))


@pytest.mark.parametrize(("family", "optim"), others_slow(PAIRS, PAIRS[::4]))
def test_side_by_side_is_one_after_the_other(family, optim):
    data = toys.blobs((3, 40, 7, 12))
    method = toys.trained(toys.FAMILIES[family], data, optim=OPTIMS[optim], batch=11)
    one, more = (list(federate(method, data, 2, chunk_size=chunk)) for chunk in (1, 3))
    toys.assert_same_round(more[1], one[1], rtol=1e-9, atol=1e-10)
    moved = [(one[1].server[n] - v).abs().max() for n, v in one[0].server.items()]
    assert max(moved) > 1e-3


@pytest.mark.parametrize("family", ["delta", "mean_field"])
def test_side_by_side_is_one_after_the_other_in_single_precision(family):
    data = toys.blobs((3, 40, 7, 12), dtype=torch.float32)
    method = toys.trained(toys.FAMILIES[family], data)
    one, all_of_them = (toys.last(method, data, rounds=2, chunk_size=c) for c in (1, 4))
    toys.assert_same_round(all_of_them, one, rtol=1e-5, atol=1e-5)


FAMILIES = {
    "normal": lambda a: dist.Normal(a, a.exp()),
    "vector": lambda a: dist.Normal(a[..., None].expand(*a.shape, 3), 1.0).to_event(1),
    "log-normal": lambda a: dist.LogNormal(a, 0.5),
    "half-normal": lambda a: dist.HalfNormal(a.exp()),
    "gamma": lambda a: dist.Gamma(a.exp(), 2.0 + a.exp()),
    "inverse gamma": lambda a: dist.InverseGamma(2 + a.exp(), a.exp()),
    "beta": lambda a: dist.Beta(a.exp(), 1 + a.exp()),
    "dirichlet": lambda a: dist.Dirichlet(torch.stack([a.exp(), 2 * a.exp(), a.exp()], -1)),
    "student": lambda a: dist.StudentT(4 + a.exp(), a, a.exp()),
    "laplace": lambda a: dist.Laplace(a, a.exp()),
    "uniform": lambda a: dist.Uniform(a, a + 1),
    "exponential": lambda a: dist.Exponential(a.exp()),
    "bernoulli": lambda a: dist.Bernoulli(logits=a),
    "categorical": lambda a: dist.Categorical(logits=torch.stack([a, -a, a * a], -1)),
    "one-hot": lambda a: dist.OneHotCategorical(logits=torch.stack([a, -a, a * a], -1)),
    "poisson": lambda a: dist.Poisson(a.exp()),
    "binomial": lambda a: dist.Binomial(7, logits=a),
    "multinomial": lambda a: dist.Multinomial(7, logits=torch.stack([a, -a, a * a], -1)),
    "full covariance": lambda a: dist.MultivariateNormal(
        torch.stack([a, -a], -1), scale_tril=torch.eye(2, dtype=a.dtype) * a.exp()[..., None, None]
    ),
    "masked": lambda a: dist.Gamma(a.exp(), 2.0).mask(a > 0),
}

arguments = partial(torch.linspace, -1, 1, dtype=torch.float64)


@pytest.mark.parametrize("draws", [None, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_drawn_client_by_client(family, draws):
    a = arguments(4)[:, None]
    a = a if draws is None else a.expand(draws, 4, 1)
    axis = a.dim() - 2
    together = draw(FAMILIES[family](a), axis, numbers(range(4)))
    assert together.shape[: a.dim()] == a.shape
    for c in range(4):
        one = a.narrow(axis, c, 1)
        alone = draw(FAMILIES[family](one), axis, numbers([c]))
        torch.testing.assert_close(together.narrow(axis, c, 1), alone, rtol=1e-12, atol=1e-12)
    again = draw(FAMILIES[family](a), axis, numbers(range(4)))
    assert torch.equal(again, together)
    # Four bits may agree by chance, not those of a dozen seeds.
    others = (draw(FAMILIES[family](a), axis, numbers(range(4), seed=s)) for s in range(4, 16))
    assert not all(torch.equal(other, together) for other in others)


@pytest.mark.parametrize("draws", [None, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_noise_of_a_row_does_not_depend_on_the_padding(family, draws):
    # 16 and 17 are where torch.randn changes its algorithm.
    values = arguments(40)
    found = []
    for width in (7, 16, 17, 40):
        a = values[:width].expand(2, width)
        a = a if draws is None else a.expand(draws, 2, width)
        axis = a.dim() - 2
        value = draw(FAMILIES[family](a), axis, numbers(range(2)), rows=True)
        assert value.shape[: a.dim()] == a.shape
        found.append(value.narrow(axis + 1, 0, 7))
    for value in found[1:]:
        torch.testing.assert_close(value, found[0], rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(
    clients=st.integers(1, 5),
    event=st.lists(st.integers(1, 4), max_size=2),
    draws=st.sampled_from([(), (2,)]),
    rows=st.booleans(),
)
def test_draws_have_the_shape_asked_for(clients, event, draws, rows):
    shape = (*draws, clients, 6 if rows else 1, *event)
    fn = dist.Normal(torch.zeros(shape), torch.ones(shape)).to_event(len(event))
    value = draw(fn, len(draws), numbers(range(clients)), rows)
    assert value.shape == shape
    assert len(value.unique()) == value.numel()


@pytest.mark.parametrize("family", ["normal", "gamma", "beta", "student", "laplace", "log-normal"])
def test_moments_are_the_distributions(family):
    fn = FAMILIES[family](arguments(1)[:, None].expand(1, 20_000) / 2)
    value = draw(fn, 0, numbers([0]), rows=True)
    error = (fn.variance.flatten()[0] / 20_000).sqrt()
    assert abs(value.mean() - fn.mean.flatten()[0]) < 4 * error
    assert value.var() == pytest.approx(float(fn.variance.flatten()[0]), rel=0.15)


def test_draws_are_reparametrized():
    a = arguments(3)[:, None].clone().requires_grad_()
    for family in ("normal", "gamma", "beta", "dirichlet", "log-normal"):
        (grad,) = torch.autograd.grad(
            draw(FAMILIES[family](a), 0, numbers(range(3))).square().sum(), a
        )
        assert (grad != 0).all()


# Local reparametrization: noise of every row, under the row plate.


def blurred(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients(), batch.rows():
        one = torch.ones(2, dtype=batch.x.dtype)
        blur = pyro.sample("blur", dist.Normal(0 * one, one).to_event(1))
        rate = pyro.sample("rate", dist.Gamma(2 * one[0], 3 * one[0]))
        logits = rate[..., None] * batch.x[..., :5] + blur.sum(-1, keepdim=True)
        pyro.sample("y", dist.Categorical(logits=logits), obs=batch.y)


def blurring(received: Tensors, local: Tensors, batch: Batch) -> None:
    with batch.clients(), batch.rows():
        wide = batch.x[..., :2] * local["q/m"][..., :2]
        pyro.sample("blur", dist.Normal(wide, softplus(local["q/sd"][..., :2])).to_event(1))
        pyro.sample("rate", dist.Gamma(softplus(wide[..., 0]) + 0.1, softplus(local["q/b"])))


@pytest.mark.parametrize("draws", [None, 3])
@pytest.mark.parametrize("batch", [None, 18])
def test_row_level_noise_trains_side_by_side(draws, batch):
    data = toys.blobs((3, 40, 7, 70))
    method = toys.trained(toys.written(blurred, blurring), data, draws=draws, batch=batch)
    one, all_of_them = (toys.last(method, data, rounds=2, chunk_size=c) for c in (1, 4))
    toys.assert_same_round(all_of_them, one, rtol=1e-9, atol=1e-10)


# What is refused.


def outside(received: Tensors, local: Tensors, batch: Batch) -> None:
    pyro.sample("shared", dist.Normal(0.0, 1.0))


def test_site_outside_the_client_plate_is_refused(blobs):
    batch = blobs.batch(torch.arange(3))
    with (
        ClientNoise(numbers(range(3))),
        pytest.raises(ValueError, match=r"'shared' is outside .* couples 3 clients.* chunk_size=1"),
    ):
        elbo()(outside, outside, {}, {}, batch)
    with ClientNoise(numbers([0])):
        one = elbo()(outside, outside, {}, {}, blobs.batch(torch.tensor([0])))
    assert one.shape == (1,)


def test_numbers_of_a_family_without_noise_are_the_generators_own():
    # Not those of a seed of 32 bits, of which two clients in 100,000 would share one.
    one, other = generator(3, 0), generator(3, 0)
    before = torch.random.get_rng_state()
    found = draw(dist.Uniform(torch.zeros(1, 5), 1.0), 0, [one])
    assert torch.equal(found, torch.rand(1, 5, generator=other))
    assert torch.equal(one.get_state(), other.get_state())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_family_that_knows_itself_in_two_ways_is_refused_by_name():
    def guide(batch: Batch) -> None:
        with batch.clients():
            normal = dist.MultivariateNormal(
                torch.zeros(3, 2), scale_tril=torch.eye(2).repeat(3, 1, 1)
            )
            assert normal.precision_matrix.shape == (3, 2, 2)
            pyro.sample("w", normal)

    with (
        ClientNoise(numbers(range(3))),
        pytest.raises(ValueError, match=r"site 'w': MultivariateNormal cannot be drawn for 3"),
    ):
        guide(toys.blobs().batch(torch.arange(3)))


def test_family_that_cannot_be_cut_is_refused():
    def guide(batch: Batch) -> None:
        with batch.clients():
            parts = dist.Normal(torch.zeros(3, 1, 2), 1.0)
            shares = dist.Categorical(torch.ones(3, 1, 2))
            pyro.sample("w", dist.MixtureSameFamily(shares, parts))

    batch = toys.blobs().batch(torch.arange(3))
    with (
        ClientNoise(numbers(range(3))),
        pytest.raises(ValueError, match=r"site 'w': MixtureSameFamily cannot be drawn for 3"),
    ):
        guide(batch)


@pytest.mark.parametrize("make", [AutoMultivariateNormal, AutoIAFNormal])
def test_guide_that_couples_clients_runs_one_by_one(blobs, make):
    def coupled(data: Federation) -> tuple[Program, guides.Guide]:
        return toys.tempered, from_pyro(make, data, model=toys.tempered)

    method = toys.trained(coupled, blobs, optim=adam(0.01), draws=8)
    with pytest.raises(ValueError, match=f"{make.__name__} couples .* clients.*chunk_size=1"):
        toys.last(method, blobs, chunk_size=12)
    small = toys.blobs((7, 12))
    first, again = (list(federate(method, small, 10, chunk_size=1)) for _ in range(2))
    toys.assert_same_round(first[-1], again[-1])
    assert first[-1].loss["auto/*"].mean() < first[0].loss["auto/*"].mean()


# The guide's mean.


def mean_of(fn: dist.TorchDistribution) -> Tensor:
    with LatentMeans():
        value: Tensor = poutine.trace(lambda: pyro.sample("w", fn)).get_trace().nodes["w"]["value"]
    return value


def test_guide_mean_is_the_mean():
    a = arguments(3)
    assert torch.equal(mean_of(dist.Normal(a, 2.0)), a)
    assert torch.equal(mean_of(dist.Delta(a)), a)
    assert torch.equal(mean_of(dist.LogNormal(a, 1.0)), (a + 0.5).exp())


@pytest.mark.parametrize("fn", [dist.Cauchy(0.0, 1.0), dist.Categorical(torch.ones(3))])
def test_guide_without_a_mean_is_refused(fn):
    with pytest.raises(ValueError, match=rf"'w': {type(fn).__name__} has no mean"):
        mean_of(fn)


def test_the_callers_random_state_is_left_alone():
    before = torch.get_rng_state()
    for family in ("normal", "gamma", "categorical"):
        draw(FAMILIES[family](arguments(3)[:, None]), 0, numbers(range(3)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("axis", [0, 1])
def test_padding_gets_no_noise_and_rows_the_same_as_ever(axis):
    shape = torch.Size([2, 5, 3] if axis == 0 else [2, 4, 5, 3])
    whole, masked = (ClientNoise([generator(1), generator(2)]) for _ in range(2))
    masked.mask = torch.arange(5) < torch.tensor([[5], [2]])
    asked = shape, axis, torch.float64, torch.device("cpu")
    for _ in range(2):  # the streams go on alike
        every, some = (noise.of_rows(*asked) for noise in (whole, masked))
        assert torch.equal(every[0], some[0])
        assert torch.equal(every[1].narrow(axis, 0, 2), some[1].narrow(axis, 0, 2))
        assert not some[1].narrow(axis, 2, 3).any()
    masked.narrow(1)  # to other clients than those of the mask
    assert masked.of_rows(torch.Size([1, *shape[1:]]), *asked[1:]).all()
