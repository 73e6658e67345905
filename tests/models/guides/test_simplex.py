"""Guides on the simplex: where they start, their moments, and the way back onto it."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from checks import close
from hypothesis import given
from hypothesis import strategies as st
from torch import Size, Tensor
from torch.distributions import kl_divergence

from pyrofl.data import Batch
from pyrofl.inference.definition.elbo import elbo, traces
from pyrofl.inference.training.noise import ClientNoise
from pyrofl.models.guides import simplex
from pyrofl.tensors import Tensors, generator

SHAPES = {"alpha": Size([2, 3]), "one": Size([4])}


def center(*lead: int) -> Tensors:
    g = generator(4)
    raw = {n: torch.rand((*lead, *s), generator=g, dtype=torch.float64) for n, s in SHAPES.items()}
    return {n: v / v.sum(-1, keepdim=True) for n, v in raw.items()}


def model(received: Tensors, local: Tensors, batch: Batch) -> None:
    """Put a Dirichlet(2) on every simplex; no row is looked at."""
    with batch.clients():
        for n, s in SHAPES.items():
            prior = dist.Dirichlet(torch.full(s, 2.0, dtype=torch.float64))
            pyro.sample(n, prior.to_event(len(s) - 1))
        with batch.rows():
            pyro.sample("y", dist.Categorical(logits=batch.x), obs=batch.y)


@pytest.mark.parametrize("lead", [(), (4,)])
@pytest.mark.parametrize("family", [simplex.softmax, simplex.dirichlet])
def test_a_guide_starts_at_its_center(blobs, family, lead):
    q = family(SHAPES, init_scale=0.3, spread="a")
    start = q.start(center(*lead))
    assert start.keys() == {f"a/{n}" for n in SHAPES}
    local = start if lead else {n: v.expand(4, *v.shape) for n, v in start.items()}
    mean, variance = q.moments({}, local, blobs.batch(torch.arange(4)))
    for n, v in center(*lead).items():
        close(mean[n], v.expand_as(mean[n]), 1e-14)
        expected = mean[n] * (1 - mean[n]) / (0.3**-2 + 1) if q.random else 0 * mean[n]
        close(variance[n], expected, 1e-14)


def test_moments_are_those_of_the_draws(blobs):
    q = simplex.dirichlet(SHAPES, init_scale=0.3)
    local, batch = q.start(center(2)), blobs.batch(torch.arange(2))
    mean, variance = q.moments({}, local, batch)
    with ClientNoise([generator(1, c) for c in range(2)]):
        trace, _ = traces(model, q.program, {}, local, batch, 4000)
    for n in SHAPES:
        values = trace.nodes[n]["value"].squeeze(2)
        assert values.shape == (4000, 2, *SHAPES[n])
        close(values.sum(-1), torch.ones(values.shape[:-1]))
        assert ((values.mean(0) - mean[n]).abs() < 4.5 * (variance[n] / 4000).sqrt()).all()
        torch.testing.assert_close(values.var(0), variance[n], rtol=0.15, atol=0)


def test_the_kl_divergence_is_exact(blobs):
    q = simplex.dirichlet(SHAPES, init_scale=0.3)
    local, batch = q.start(center(2)), blobs.batch(torch.arange(2))
    with ClientNoise([generator(1, c) for c in range(2)]):
        found = [elbo(kl=kl)(model, q.program, {}, local, batch) for kl in (0, 1)]
    expected = torch.zeros(2, dtype=torch.float64)
    for n, shape in SHAPES.items():
        prior = torch.distributions.Dirichlet(torch.full(shape, 2.0, dtype=torch.float64))
        posterior = torch.distributions.Dirichlet(local[f"pi/{n}"].exp())
        expected += kl_divergence(posterior, prior).reshape(2, -1).sum(1)
    close(found[1] - found[0], expected, 1e-11)


def test_a_dirichlet_needs_spread():
    with pytest.raises(ValueError, match=r"init_scale is 0.0; expected a number above 0"):
        simplex.dirichlet(SHAPES, init_scale=0.0)


vectors = st.lists(st.floats(-3, 3), min_size=1, max_size=6)


@given(vectors)
def test_the_projection_is_the_nearest_point(values):
    v = torch.tensor(values, dtype=torch.float64)
    p = simplex.project(v)
    assert (p >= 0).all()
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    # Towards no corner is there a nearer point: <v - p, corner - p> <= 0.
    assert ((v - p) - ((v - p) * p).sum() < 1e-9).all()


def test_the_projection_knows_points_of_the_simplex_and_many_at_once():
    close(simplex.project(torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)), [0.2, 0.5, 0.3])
    close(simplex.project(torch.tensor([1.1, 0.4, -0.9], dtype=torch.float64)), [0.85, 0.15, 0.0])
    close(
        simplex.project(torch.tensor([[7.0, 0], [0.2, 0.2]], dtype=torch.float64)),
        [[1, 0], [0.5, 0.5]],
    )
    assert simplex.project(torch.tensor([0.9])).item() == 1


def test_small_weights_are_trimmed():
    alpha = torch.tensor([[0.6, 0.3, 0.1], [0.05, 0.05, 0.9]], dtype=torch.float64)
    close(simplex.drop_small_weights(alpha, 0.2), [[2 / 3, 1 / 3, 0], [0, 0, 1]])
    kept: Tensor = simplex.drop_small_weights(alpha, 0.0)
    close(kept, alpha, 1e-15)
