"""Normals with one scale for all of an event are the normals of Pyro, and points pay a distance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from torch import Tensor, nn
from torch.distributions import kl_divergence

from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.programs import Supervised, around, flat
from pyrofl.inference.definition.spherical import Spherical, distances
from pyrofl.models import fedavg, guides, likelihoods
from pyrofl.models.likelihoods import categorical
from pyrofl.models.priors import by_name, proximal
from pyrofl.nets import Network
from pyrofl.tensors import generator

draw = partial(torch.randn, generator=generator(2), dtype=torch.float64)


def both(center: Tensor, scale: Tensor) -> tuple[Spherical, dist.TorchDistribution]:
    axes = center.dim() - scale.dim()
    wide = scale.reshape(*scale.shape, *(1,) * axes)
    return around(dist.Normal, center, scale), dist.Normal(center, wide).to_event(axes)


@pytest.mark.parametrize("event", [(4,), (3, 4)])
@pytest.mark.parametrize("draws", [(), (5,)])
def test_a_spherical_normal_is_that_of_pyro(event, draws):
    given = draw(2, 1, *event), draw(2, 1).exp(), draw(*draws, 2, 1, *event)
    leaves = [v.requires_grad_() for v in given]
    center, scale, value = leaves
    mine, known = both(center, scale)
    assert isinstance(mine, Spherical)
    assert (mine.batch_shape, mine.event_shape) == (known.batch_shape, known.event_shape)
    slopes = []
    for fn in (mine, known.expand((*draws, 2, 1)) if draws else known):
        found = fn.log_prob(value)
        first = torch.autograd.grad(found.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(v.square().sum() for v in first), leaves)
        slopes.append([found.detach(), *(v.detach() for v in first), *second])
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    wide = mine.expand((*draws, 2, 1))
    close(wide.log_prob(value).detach(), slopes[0][0])
    q = dist.Normal(draw(2, 1, *event), 1.0).to_event(len(event))
    close(kl_divergence(q, mine).detach(), kl_divergence(q, known).detach())


@pytest.mark.parametrize("learned", [False, True])
def test_a_point_pays_its_distance_and_no_constant_but_for_a_scale_that_is_learned(learned, tiny):
    batch = tiny.batch(torch.arange(3))
    local = {"mu/w": draw(3, 4).requires_grad_(), "scale": draw(3).exp().requires_grad_(learned)}

    def model(received, local, batch):
        with batch.clients():
            fn = around(dist.Normal, torch.ones(3, 1, 4, dtype=torch.float64), local["scale"])
            pyro.sample("w", fn)

    def guide(received, local, batch):
        with batch.clients():
            pyro.sample("w", dist.Delta(local["mu/w"], event_dim=1))

    found = elbo()(model, guide, {}, local, batch)
    scale, point = local["scale"], local["mu/w"]
    expected = (point - 1).square().sum(1) / (2 * scale.square())
    normal = -dist.Normal(1.0, scale[:, None]).log_prob(point).sum(1)
    close(found.detach(), (normal if learned else expected).detach())
    (slope,) = torch.autograd.grad(found.sum(), point)
    close(slope, ((point - 1) / scale[:, None].square()).detach())


def test_distances_of_many_sites_are_the_sum_of_each_with_all_slopes():
    centers, values = ([draw(2, 1, *event) for event in ((3, 4), (4,), (1,))] for _ in range(2))
    leaves = [v.requires_grad_() for v in (*centers, *values, draw(2, 1).exp())]
    scale = leaves[-1]
    priors = [around(dist.Normal, center, scale) for center in centers]
    found = []
    each = torch.stack([prior.distance(v) for prior, v in zip(priors, values, strict=True)])
    for total in (distances(priors, values), each.sum(0)):
        quick = torch.autograd.grad(total.square().sum(), leaves, retain_graph=True)
        first = torch.autograd.grad(total.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(v.square().sum() for v in first), leaves)
        found.append([total.detach(), *quick, *(v.detach() for v in first), *second])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_sites_that_a_prior_pulls_alike_pay_together_and_others_alone(tiny):
    batch = tiny.batch(torch.arange(3))
    net, received = Network(nn.Linear(4, 3)), {"w/weight": draw(3, 3, 4), "w/bias": draw(3, 3)}
    near, far = proximal(0.5), proximal(2.0)
    for prior, strengths in ((near, (0.5, 0.5)), (by_name({"w*": near, "b*": far}), (0.5, 2.0))):
        model = Supervised(net, categorical, prior)
        local = {n: v + draw(*v.shape) for n, v in received.items()}
        guide = guides.delta(net.shapes, loc="w")
        found = elbo()(model, guide, received, local, batch)
        free = elbo()(replace(model, prior=flat), guide, received, local, batch)
        apart = [(local[n] - v).flatten(1).square().sum(1) for n, v in received.items()]
        pulls = sum(s * batch.size * v / 2 for s, v in zip(strengths, apart, strict=True))
        close(found - free, pulls)


@pytest.mark.parametrize("field", ["likelihood", "prior", "net", "points"])
def test_a_field_that_a_written_model_reads_from_elsewhere_cannot_be_replaced(field):
    """The model of FedAvg is written out and reads its likelihood from `build`."""
    model = fedavg.build(toys.net(), prior=dist.Normal(0.0, 1.0)).model
    other = {"likelihood": likelihoods.bernoulli, "prior": flat, "net": toys.net(), "points": "x"}
    with pytest.raises(ValueError, match=rf"{field} of the model was replaced.*swap\({field}="):
        replace(model, **{field: other[field]})
    assert replace(model, forward=model.net).program is model.program
