"""FedPA: its covariance against a dense one, and the exact global posterior's mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import toys
from checks import close
from promises import Promises
from toys import last

from pyrofl.data import Batch
from pyrofl.inference.definition.method import Phase
from pyrofl.models import fedavg, fedopt, fedpa, likelihoods
from pyrofl.nets import build
from pyrofl.tensors import Tensors, generator

PROMISES = {"fedpa": Promises(together="*", message=(toys.ALL, toys.ALL))}

PRODUCT = (0.3895, 1.3263)  # mean of the exact global posterior of the quadratic pair


@pytest.mark.parametrize("rho", [0.0, 0.3, 20.0])
def test_the_change_is_that_of_a_dense_covariance(rho):
    rng = generator(3)
    w = torch.randn(2, 5, generator=rng, dtype=torch.float64)
    drawn = torch.randn(2, 4, 5, generator=rng, dtype=torch.float64)
    found = fedpa.change(w, drawn, rho)
    shrink = 1 / (1 + 3 * rho)
    for c in range(2):
        dense = shrink * torch.eye(5).double() + (1 - shrink) * drawn[c].T.cov()
        close(found[c], torch.linalg.solve(dense, w[c] - drawn[c].mean(0)))


def test_one_sample_has_no_covariance():
    w, drawn = torch.ones(2, 3).double(), torch.full((2, 1, 3), 0.25).double()
    close(fedpa.change(w, drawn, 5.0), torch.full((2, 3), 0.75))


def test_with_exact_moments_it_descends_the_global_quadratic(quadratic):
    method = fedpa.build(
        build("linear", (2,), 1), samples=4, rho=1e7, server_lr=0.2, server_momentum=0.0
    )
    root = torch.linalg.cholesky(torch.linalg.inv(quadratic.precision))

    def draw(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        axes = (1.5**0.5 * root).mT  # four points whose covariance is the client's
        points = quadratic.mean[:, None] + torch.cat([axes, -axes], 1)
        return {f"sample/{s}": points[:, s] for s in range(4)}

    exact = replace(method, phases=(Phase((draw,)), method.phases[-1]))
    w = torch.tensor([0.3, -0.2], dtype=torch.float64)
    once = last(exact, quadratic.federation, 1, server_state={"w/w": w}, check=False)
    slope = torch.einsum("cij,cj->ci", quadratic.precision, w - quadratic.mean)
    close(w - once.message["w/w"], slope, 1e-4)
    close(once.server["w/w"], w - 0.2 * slope.mean(0), 1e-4)
    close(last(exact, quadratic.federation, 60, check=False).server["w/w"], PRODUCT, 1e-4)


def test_one_sample_of_one_step_is_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    usual = {"batch": None, "lr": 0.1, "momentum": 0.0}
    one = fedpa.build(net, samples=1, server_lr=1.0, server_momentum=0.0, epochs=2, **usual)
    plain = last(fedavg.build(net, epochs=3, **usual), tiny, 3)
    for n, value in last(one, tiny, 3).server.items():
        close(value, plain.server[n])


def test_a_sample_is_the_mean_over_an_epoch(tiny):
    net = build("softmax", (4,), 3)
    usual = {"batch": 1, "lr": 0.1, "momentum": 0.0}
    one = fedpa.build(net, samples=1, epochs=0, **usual)
    start = {f"w/{n}": torch.zeros(s).double() for n, s in net.shapes.items()}
    iterates = []

    def look(received: Tensors, local: Tensors, data: Batch) -> Tensors:
        iterates.append({n: local[n][:1].clone() for n in received})
        return {}

    state = last(one, tiny, 1, server_state=start)
    plain = fedavg.build(net, epochs=1, **usual)
    (phase,) = plain.phases
    seen = replace(plain, phases=(replace(phase, updates=(*phase.updates, look)),))
    last(seen, tiny, 1, server_state=start, chunk_size=1)
    for n in start:  # the smallest client, of three rows, is the last to train
        mean = torch.cat([i[n] for i in iterates[-3:]]).mean(0)
        close(state.message[n][0], mean)


def test_covariances_change_where_the_server_goes(tiny):
    net = build("mlp:5", (4,), 3)
    a, b = (last(fedpa.build(net, rho=rho, batch=1, lr=0.1), tiny, 2).server for rho in (0.0, 10.0))
    assert not torch.allclose(a["w/head.weight"], b["w/head.weight"])


def test_the_servers_step_is_fedopts(quadratic):
    net, w = build("linear", (2,), 1), {"w/w": torch.tensor([0.3, -0.2]).double()}
    usual = {"likelihood": likelihoods.normal(), "batch": None, "momentum": 0.0, "lr": 0.1}
    one = fedpa.build(net, samples=1, epochs=1, server_lr=0.7, **usual)
    other = fedopt.build(net, optimizer="sgd", epochs=2, server_lr=0.7, beta1=0.9, **usual)
    a, b = (last(m, quadratic.federation, 4, server_state=w).server["w/w"] for m in (one, other))
    close(a, b)
