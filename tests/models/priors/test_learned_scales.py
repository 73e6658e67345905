"""Learned scales: type II maximum likelihood where clients' posteriors are exact."""

from __future__ import annotations

from dataclasses import replace

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close

from pyrofl.data import Batch
from pyrofl.data.loaders.conjugate import gaussian_means
from pyrofl.inference.definition.method import Method, Phase
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedavg, guides, likelihoods, local, priors
from pyrofl.models.guides import inverse_softplus, mean_field
from pyrofl.models.priors.learned_scales import learned, learning
from pyrofl.nets import build
from pyrofl.tensors import Tensors

B, V = torch.tensor([2.0, -1.0, 4.0, 0.5, -3.0]).double(), 0.5


def exact(family: priors.LocationScale = dist.Normal) -> Method:
    """Give every client its exact posterior of w_j, given b_j ~ N(w_j, V) and w_j ~ N(0, s^2)."""
    method = local.build(
        build("mean", (1,), 1), prior=learned(family), guide=mean_field, likelihood=toys.half_square
    )

    def solve(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        (name,) = [n for n in received if n.startswith("prior/")]
        shrunk = received[name].square() / (received[name].square() + V)
        (mu,), (pi,) = ([n for n in local if n.startswith(r)] for r in ("w/", "spread/"))
        mean, sd = shrunk * B[batch.ids], (shrunk * V).sqrt()
        raw = torch.tensor([inverse_softplus(float(v)) for v in sd]).to(mean)
        return {mu: mean.reshape(local[mu].shape), pi: raw.reshape(local[pi].shape)}

    return replace(method, phases=(Phase((solve,)),))


def test_the_scale_is_that_of_the_largest_evidence():
    data = gaussian_means(B[:, None], torch.full((5,), V)).federation
    method = exact()
    *_, state = federate(learning(method, build("mean", (1,), 1).shapes), data, 60)
    (scale,) = [v for n, v in state.server.items() if n.startswith("prior/")]
    close(scale.square(), B.square().mean() - V, 1e-6)


def test_another_family_gets_the_scale_of_the_same_moment():
    data = gaussian_means(B[:, None], torch.full((5,), V)).federation
    shapes = build("mean", (1,), 1).shapes
    states = [
        toys.last(learning(exact(family), shapes, family=family), data, 1)
        for family in (dist.Normal, dist.Laplace)
    ]
    normal, laplace = (
        next(v for n, v in state.server.items() if n.startswith("prior/")) for state in states
    )
    close(laplace.square() * 2, normal.square())


def test_gradient_steps_find_it_too():
    data = gaussian_means(B[:, None], torch.full((5,), V)).federation
    net = build("linear", (1,), 1)
    method = local.build(
        net,
        prior=learned(),
        guide=mean_field,
        likelihood=likelihoods.normal(),
        batch=None,
        epochs=10,
        lr=0.1,
        momentum=0.0,
        init_scale=0.5,
        num_particles=10,
    )
    *_, state = federate(learning(method, net.shapes), data, 25)
    (scale,) = [v for n, v in state.server.items() if n.startswith("prior/")]
    assert float(scale.square()) == pytest.approx(float(B.square().mean()) - V, rel=0.15)


def test_some_parameters_learn_and_what_travels_is_two_numbers_more():
    net = toys.net()
    head = net.select_params(net.head)
    prior = priors.by_name({net.head: learned(), "*": priors.fixed()})
    method = fedavg.build(net, prior=prior, guide=guides.mean_field, epochs=1)
    state = toys.last(learning(method, head, init_scale=0.3), toys.blobs(), 2)
    scales = {n for n in state.server if n.startswith("prior/")}
    assert scales == {f"prior/{n}" for n in head}
    assert all(0 < float(state.server[n]) < 1 for n in scales)
    assert all(abs(float(state.server[n]) - 0.3) > 1e-3 for n in scales)
    plain = toys.last(fedavg.build(net, guide=guides.mean_field, epochs=1), toys.blobs(), 1)
    assert set(state.message) == set(plain.message) | {f"second/{n}" for n in head}


def test_a_negative_moment_is_refused():
    data = gaussian_means(B[:, None], torch.full((5,), V)).federation
    method = learning(exact(), build("mean", (1,), 1).shapes)

    def lie(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        sign = torch.where(batch.ids == 2, -1.0, 1.0)
        return {n: sign * v for n, v in local.items() if n.startswith("second/")}

    state = toys.last(replace(method, phases=(*method.phases, Phase((lie,)))), data, 1)
    assert [reason.partition(":")[0] for reason in state.rejected] == ["client 2"]
    (scale,) = [v for n, v in state.server.items() if n.startswith("prior/")]
    honest = B[[0, 1, 3, 4]] / (1 + V)
    close(scale.square(), honest.square().mean() + V / (1 + V), 1e-6)


def test_a_name_of_no_latent_parameter_is_refused():
    method = fedavg.build(toys.net(), prior=learned(), guide=guides.mean_field)
    with pytest.raises(ValueError, match=r"names has 'other', which is no latent .*fc1.weight"):
        learning(method, ("fc1.weight", "other"))
    joint = fedavg.build(toys.net(), prior=learned(), guide=guides.copula)
    with pytest.raises(ValueError, match=r"'_spread' joins others.*expected independent sites"):
        learning(joint, toys.net().shapes)


def test_numbers_out_of_range_are_refused():
    method = fedavg.build(toys.net(), prior=learned())
    with pytest.raises(ValueError, match=r"init_scale is 0.0"):
        learning(method, toys.net().shapes, init_scale=0.0)
    with pytest.raises(ValueError, match="variance is inf"):
        learning(method, toys.net().shapes, family=priors.Horseshoe)
