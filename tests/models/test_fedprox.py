"""FedProx: fixed points on quadratic clients, its prior, and FedAvg as its limit."""

from __future__ import annotations

import pyro.distributions as dist
import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor
from torch.nn.functional import cross_entropy
from toys import last

from pyrofl.data.loaders.conjugate import ConjugateTask
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedavg, fedprox, likelihoods, priors
from pyrofl.nets import build
from pyrofl.tensors import generator, role

PROMISES = {"fedprox": Promises(together="*", message=(toys.ALL, toys.ALL))}


def solved(mu: float, steps: int = 100) -> Method:
    """Build FedProx on two rows per client, with enough steps to solve each client's problem."""
    return fedprox.build(
        build("linear", (2,), 1),
        mu=mu / 2,
        likelihood=likelihoods.normal(),
        epochs=steps,
        batch=None,
        lr=2 / (4 + mu),
        momentum=0.0,
    )


def fixed_point(task: ConjugateTask, mu: float) -> Tensor:
    """Solve sum_j (Lam_j + mu I)^-1 Lam_j (w - mu_j) = 0."""
    eye = torch.eye(2, dtype=torch.float64)
    a = torch.linalg.solve(task.precision + mu * eye, task.precision)
    return torch.linalg.solve(a.sum(0), (a @ task.mean[..., None]).sum(0))[:, 0]


@pytest.mark.parametrize(
    ("mu", "point", "accuracy"),
    [
        (1e-6, (0.0, 1.0), 5e-5),  # FedAvg with many local steps
        (1.0, (0.1208, 1.1583), 5e-5),
        (1e5, (0.3895, 1.3263), 1e-4),  # the minimum of the pooled loss
    ],
)
def test_the_pull_moves_the_fixed_point(quadratic, mu, point, accuracy):
    expected = fixed_point(quadratic, mu)
    close(expected, point, accuracy)
    stays = last(solved(mu), quadratic.federation, 1, server_state={"w/w": expected})
    close(stays.server["w/w"], expected, 1e-10)


def test_rounds_reach_the_fixed_point(quadratic):
    state = last(solved(1.0, steps=30), quadratic.federation, 14)
    close(state.server["w/w"], fixed_point(quadratic, 1.0), 1e-5)


@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_the_local_objective_is_the_mean_loss_and_half_mu_the_distance(tiny, mu):
    net = build("mlp:5", (4,), 3)
    method = fedprox.build(net, mu=mu)
    batch = tiny.batch(torch.arange(3))
    rng = generator(1)
    received = {
        f"w/{n}": torch.randn(3, *s, generator=rng, dtype=torch.float64)
        for n, s in net.shapes.items()
    }
    local = {
        n: (v + torch.randn(v.shape, generator=rng, dtype=torch.float64)).requires_grad_()
        for n, v in received.items()
    }
    loss = elbo(mean=True)(method.model, method.guide, received, local, batch)
    expected = []
    for j, rows in enumerate(tiny.train):
        outputs = net.apply({n: v[j] for n, v in role("w", local).items()}, tiny.x[rows])
        distance = sum((local[n][j] - received[n][j]).square().sum() for n in local)
        expected.append(cross_entropy(outputs, tiny.y[rows]) + mu / 2 * distance)
    close(loss.detach(), torch.stack(expected).detach(), 1e-10)
    found = torch.autograd.grad(loss.sum(), list(local.values()))
    wanted = torch.autograd.grad(sum(expected), list(local.values()))
    for f, w in zip(found, wanted, strict=True):
        close(f, w)


def test_without_pull_it_is_fedavg(tiny):
    net = build("mlp:5", (4,), 3)
    prox, plain = (
        list(federate(method, tiny, 3, seed=1))
        for method in (fedprox.build(net, mu=0.0, batch=2), fedavg.build(net, batch=2))
    )
    for one, other in zip(prox, plain, strict=True):
        for n, value in one.server.items():
            assert torch.equal(value, other.server[n])


def test_a_strong_pull_keeps_clients_together(tiny):
    net = build("mlp:5", (4,), 3)
    spread = [
        last(fedprox.build(net, mu=mu, lr=0.05, batch=None), tiny, 1)
        .message["w/head.weight"]
        .std(0)
        .mean()
        for mu in (0.0, 1.0, 10.0)
    ]
    assert spread[0] > spread[1] > spread[2] > 0


def test_the_prior_can_be_exchanged(tiny):
    net = build("mlp:5", (4,), 3)
    heads = [
        last(fedprox.build(net, mu=5.0, prior=prior), tiny, 1).server["w/head.weight"]
        for prior in (dist.Normal, dist.Laplace, priors.student_t(4))
    ]
    assert not torch.allclose(heads[0], heads[1])
    assert not torch.allclose(heads[0], heads[2])
