"""Priors on stacked parameters, against torch's densities and hand-made penalties."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.models import fedprox, priors
from pyrofl.tensors import generator

SHAPE = torch.Size((3, 2))


def batch(sizes: list[float]) -> Batch:
    c = len(sizes)
    mask = torch.ones(c, 1, dtype=torch.bool)
    rows = torch.zeros(c, 1, dtype=torch.float64)
    return Batch(rows, rows, mask, torch.tensor(sizes, dtype=torch.float64), torch.arange(c))


def stacked(clients: int, seed: int) -> Tensor:
    """Draw parameters as programs see them: [C, 1, *p]."""
    rng = generator(seed)
    return torch.randn(clients, 1, *SHAPE, generator=rng, dtype=torch.float64)


@given(
    strength=st.floats(0.01, 100),
    sizes=st.lists(st.integers(1, 1000).map(float), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=25)
def test_per_row_the_proximal_prior_pulls_with_its_strength(strength, sizes, seed):
    center = {"w/layer": stacked(len(sizes), seed)}
    value = stacked(len(sizes), seed + 100).requires_grad_()
    prior = priors.proximal(strength)("layer", SHAPE, center, {}, batch(sizes))
    assert prior.batch_shape == (len(sizes), 1)
    assert prior.event_shape == SHAPE
    per_row = -prior.log_prob(value)[:, 0] / torch.tensor(sizes)
    (gradient,) = torch.autograd.grad(per_row.sum(), value)
    torch.testing.assert_close(gradient, strength * (value - center["w/layer"]).detach())


def test_the_proximal_prior_is_half_its_strength_times_the_distance():
    center = {"loc/layer": stacked(2, 0)}
    prior = priors.proximal(0.3, loc="loc")("layer", SHAPE, center, {}, batch([4, 9]))
    value = stacked(2, 1)
    loss = prior.log_prob(center["loc/layer"]) - prior.log_prob(value)
    distance = (value - center["loc/layer"]).square().sum((-1, -2))
    torch.testing.assert_close(loss, 0.3 / 2 * torch.tensor([[4.0], [9.0]]) * distance)


def test_without_strength_the_proximal_prior_is_flat():
    assert priors.proximal(0) is priors.flat


def test_the_flat_prior_has_density_one_everywhere():
    prior = priors.flat("layer", SHAPE, {}, {}, batch([4, 9])).expand([2, 1])
    assert torch.equal(prior.log_prob(stacked(2, 0) * 1e6), torch.zeros(2, 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("family", "reference"),
    [
        (dist.Normal, torch.distributions.Normal(0.5, 2.0)),
        (dist.Laplace, torch.distributions.Laplace(0.5, 2.0)),
        (priors.student_t(3), torch.distributions.StudentT(3, 0.5, 2.0)),
    ],
)
def test_a_fixed_prior_is_the_same_for_every_number(family, reference):
    prior = priors.fixed(family, loc=0.5, scale=2.0)("layer", SHAPE, {}, {}, batch([4, 9]))
    value = stacked(2, 0)
    assert prior.mean.dtype == torch.float64
    assert prior.event_shape == SHAPE
    torch.testing.assert_close(
        prior.expand([2, 1]).log_prob(value), reference.log_prob(value).sum((-1, -2))
    )


@pytest.mark.parametrize(
    ("family", "at"),
    [
        (dist.Normal, torch.distributions.Normal),
        (dist.Laplace, torch.distributions.Laplace),
        (priors.student_t(4), lambda loc, scale: torch.distributions.StudentT(4, loc, scale)),
    ],
)
def test_a_family_goes_around_each_client_with_its_own_scale(family, at):
    center, scale = stacked(2, 0), torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    prior = priors.around(family, center, scale)
    value = stacked(2, 1)
    assert (prior.batch_shape, prior.event_shape) == ((2, 1), SHAPE)
    expected = [
        at(m, s).log_prob(v).sum() for m, s, v in zip(center[:, 0], scale, value[:, 0], strict=True)
    ]
    torch.testing.assert_close(prior.log_prob(value)[:, 0], torch.stack(expected))


def test_students_t_has_heavier_tails_and_a_normal_limit():
    zero, one = torch.tensor([0.0, 1.0], dtype=torch.float64)
    normal = dist.Normal(zero, one)
    far, near = torch.tensor(6.0), torch.tensor(0.3)
    assert priors.student_t(2)(zero, one).log_prob(far) > normal.log_prob(far)
    torch.testing.assert_close(
        priors.student_t(1e4)(zero, one).log_prob(near), normal.log_prob(near), atol=1e-4, rtol=0
    )


def test_a_mixture_is_the_weighted_sum_of_its_normals():
    loc, scale = torch.tensor([[0.5], [1.0]]), torch.tensor([[2.0], [0.3]])
    value = torch.tensor([[0.7], [-1.0]])
    found = priors.mixture([1, 3], [1.0, 0.1])(loc, scale).log_prob(value).exp()
    parts = [dist.Normal(loc, s * scale).log_prob(value).exp() for s in (1.0, 0.1)]
    torch.testing.assert_close(found, 0.25 * parts[0] + 0.75 * parts[1])


@pytest.mark.parametrize("family", [priors.mixture(), priors.Horseshoe], ids=["mixture", "shoe"])
def test_families_shrink_and_can_be_centered(family):
    q = priors.fixed(family, 0.0, 0.5)("layer", SHAPE, {}, {}, batch([3]))
    assert q.event_shape == SHAPE
    near, far = (q.log_prob(torch.full(SHAPE, v, dtype=torch.float64)) for v in (0.01, 0.3))
    assert near > far
    method = fedprox.build(toys.net(), prior=family, mu=0.1, epochs=1)
    state = toys.last(method, toys.blobs(), 2)
    assert len(state.reporters.ids) == 12
    assert all(bool(v.isfinite().all()) for v in state.server.values())


def test_priors_are_chosen_by_name():
    chosen = priors.by_name({"head.* *.bias": priors.flat, "*": priors.fixed(dist.Laplace)})
    known = {"head.weight": True, "fc1.bias": True, "fc1.weight": False}
    for name, is_flat in known.items():
        fn = chosen(name, SHAPE, {}, {}, batch([3]))
        assert (fn.log_prob(torch.ones(SHAPE)) == 0) == is_flat
    with pytest.raises(ValueError, match="has no prior"):
        priors.by_name({"head.*": priors.flat})("fc1.bias", SHAPE, {}, {}, batch([3]))


@pytest.mark.parametrize("numbers", [([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])])
def test_a_mixture_needs_weights_and_scales(numbers):
    with pytest.raises(ValueError, match="expected as many of both"):
        priors.mixture(*numbers)
