"""pFedMe: fixed points on quadratic clients, one step by hand, and FedABML as its relative."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.participation import fixed
from pyrofl.inference.engine.start import first
from pyrofl.models import ditto, fedabml, guides, likelihoods, pfedme
from pyrofl.nets import build

PROMISES = {"pfedme": Promises(message=(toys.ALL, toys.ALL), rises=frozenset({"w/*"}))}


def linear(pull: float, **options: object) -> Method:
    """Build pFedMe for y = x'w + Normal(0, 1) of two rows, over which the loss is a mean."""
    usual = {
        "strength": pull / 2,
        "likelihood": likelihoods.normal(),
        "epochs": 1,
        "batch": None,
        "lr": 2 / (4 + pull),
        "momentum": 0.0,
    }
    return pfedme.build(build("linear", (2,), 1), **(usual | options))


@pytest.mark.slow
def test_with_exact_inner_steps_the_fixed_point_is_that_of_fedprox(quadratic):
    point = torch.tensor([0.1208, 1.1583], dtype=torch.float64)
    a = torch.linalg.solve(quadratic.precision + torch.eye(2).double(), quadratic.precision)
    exact = torch.linalg.solve(a.sum(0), (a @ quadratic.mean[..., None]).sum(0))[:, 0]
    close(exact, point, 5e-5)
    state = last(
        linear(1.0, steps=80, lr_center=0.5), quadratic.federation, 1, server_state={"w/w": exact}
    )
    close(state.server["w/w"], exact, 1e-9)
    close(state.client_states["own/w/w"], quadratic.posterior(exact, torch.ones(2))[0], 1e-9)
    reached = last(linear(1.0, steps=30, lr_center=2.0), quadratic.federation, 14)
    close(reached.server["w/w"], exact, 1e-5)


def test_a_minibatch_is_k_inner_steps_and_one_of_the_center(quadratic):
    w, data = torch.tensor([0.3, -0.2], dtype=torch.float64), quadratic.federation
    method = linear(3.0, steps=2, lr=0.1, lr_center=0.4, epochs=2)
    state = last(method, data, 1, server_state={"w/w": w})
    theta, center = w.expand(2, 2), w.expand(2, 2)
    for _ in range(2):
        for _ in range(2):
            g = torch.einsum("cij,cj->ci", quadratic.precision, theta - quadratic.mean) / 2
            theta = theta - 0.1 * (g + 1.5 * (theta - center))
        center = center - 0.4 * 1.5 * (center - theta)
    close(state.client_states["own/w/w"], theta)
    close(state.message["w/w"], center)
    close(state.server["w/w"], center.mean(0))


def test_theta_goes_on_from_the_last_round(quadratic):
    method = linear(3.0, steps=3, lr=0.05)
    once = last(method, quadratic.federation, 1)
    still = linear(3.0, steps=3, lr=0.0, lr_center=0.0)
    kept = last(still, quadratic.federation, 2, resume_from=once)
    assert torch.equal(kept.client_states["own/w/w"], once.client_states["own/w/w"])


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_the_server_goes_beta_of_the_way_to_the_even_mean(tiny, beta):
    method = pfedme.build(build("mlp:5", (4,), 3), beta=beta)
    old = first(method, tiny, 0).server
    state = last(method, tiny, 1)
    for n, value in state.server.items():
        close(value, old[n] + beta * (state.message[n].mean(0) - old[n]))


def test_starting_anew_it_is_fedabml_with_a_delta_guide(quadratic):
    w, sd = torch.tensor([0.3, -0.2], dtype=torch.float64), 0.8
    options = {"steps": 5, "epochs": 3, "batch": 1, "lr": 0.1}
    one = linear(sd**-2, lr_center=0.3, **options)
    other = fedabml.build(
        build("linear", (2,), 1),
        likelihood=likelihoods.normal(),
        guide=guides.delta,
        natural=False,
        init_scale=sd,
        kl=1.0,
        lr_prior=0.3,
        **options,
    )
    a = last(one, quadratic.federation, 1, server_state={"w/w": w})
    b = last(other, quadratic.federation, 1, server_state={"loc/w": w})
    close(a.server["w/w"], b.server["loc/w"])
    close(a.message["w/w"], b.message["loc/w"])


def test_with_a_center_that_stays_it_is_dittos_own_model(tiny):
    net = build("mlp:5", (4,), 3)
    options = {"strength": 2.0, "batch": 2, "lr": 0.05}
    a = last(pfedme.build(net, steps=1, lr_center=0.0, **options), tiny, 1)
    b = last(ditto.build(net, **options), tiny, 1)
    for n, value in a.client_states.items():
        close(value, b.client_states[n])
    for n, value in first(pfedme.build(net), tiny, 0).server.items():
        close(a.server[n], value)


def test_everybody_trains_whoever_reports(tiny):
    method = pfedme.build(build("mlp:5", (4,), 3))
    few = last(method, tiny, 1, participation=fixed(1))
    everyone = last(method, tiny, 1)
    assert few.trained.tolist() == [0, 1, 2]
    assert len(few.reporters.ids) == 1
    for n, value in few.client_states.items():
        assert torch.equal(value, everyone.client_states[n])
