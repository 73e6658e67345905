"""Per-FedAvg: its three gradients on quadratic clients, and FedAvg as its limit."""

from __future__ import annotations

import pytest
import torch
import toys
from checks import close
from promises import Promises
from torch import Tensor
from toys import last

from pyrofl.data.loaders.conjugate import ConjugateTask, conjugate
from pyrofl.inference.definition.method import Method
from pyrofl.inference.evaluation.evaluate import evaluate
from pyrofl.inference.training.phases import train
from pyrofl.models import fedavg, likelihoods, metavd, perfedavg
from pyrofl.models.shared.meta_gradients import Order
from pyrofl.nets import build
from pyrofl.tensors import role

PROMISES = {"perfedavg": Promises(message=(toys.ALL, toys.ALL))}

AT = torch.tensor([0.3, 0.4], dtype=torch.float64)
ALPHA = 0.1  # of the inner step, on the clients' total losses


@pytest.fixture
def alike(quadratic: ConjugateTask) -> ConjugateTask:
    """The quadratic pair with every row six times, so that all parts of a batch are alike."""
    data = quadratic.federation
    x = [data.x[rows].repeat_interleave(6, 0) for rows in data.train]
    y = [data.y[rows].repeat_interleave(6, 0) for rows in data.train]
    return conjugate(x, y)


def linear(**options: object) -> Method:
    """Build Per-FedAvg for y = x'w + Normal(0, 1); a part is a mean of both rows."""
    usual = {
        "likelihood": likelihoods.normal(),
        "epochs": 1,
        "batch": None,
        "inner_lr": 2 * ALPHA,
        "lr": 0.4,
    }
    return perfedavg.build(build("linear", (2,), 1), **(usual | options))


def minimizer(task: ConjugateTask, order: Order) -> Tensor:
    """Solve sum_j B_j (w - mu_j) = 0 for the outer gradient B_j (w - mu_j)."""
    lam = task.precision / 6
    rest = torch.eye(2).double() - ALPHA * lam
    b = lam @ rest if order == "first" else rest @ lam @ rest
    return torch.linalg.solve(b.sum(0), (b @ task.mean[..., None]).sum(0))[:, 0]


@pytest.mark.parametrize("order", ["exact", "hessian_free", "first"])
def test_rounds_reach_the_minimum_of_the_loss_after_a_step(alike, order):
    expected = minimizer(alike, order)
    if order != "first":
        close(expected, (0.0991, 1.2330), 5e-5)
    stays = last(linear(order=order), alike.federation, 1, server_state={"w/w": expected})
    close(stays.server["w/w"], expected, 1e-10)
    close(last(linear(order=order), alike.federation, 40).server["w/w"], expected, 1e-3)


@pytest.mark.parametrize("order", ["exact", "hessian_free"])
def test_the_product_with_the_second_derivative_is_whole(alike, order):
    # At x of client 2, H g is (1.5250, -11.5500); the half of it would be MetaVD's code.
    x, h = AT, alike.precision[1] / 6
    g = h @ (x - alike.mean[1])
    curved = torch.tensor([1.5250, -11.5500], dtype=torch.float64)
    close(h @ g, curved)
    expected = g - 2 * ALPHA * curved + ALPHA**2 * h @ curved
    state = last(linear(order=order), alike.federation, 1, server_state={"w/w": x})
    close((x - state.message["w/w"][1]) / 0.4, expected / 2)


def test_first_order_leaves_the_second_derivative_out(alike):
    x, h = AT, alike.precision[1] / 6
    g = h @ (x - alike.mean[1])
    state = last(linear(order="first"), alike.federation, 1, server_state={"w/w": x})
    close((x - state.message["w/w"][1]) / 0.4, (g - ALPHA * h @ g) / 2)


@pytest.mark.parametrize("order", ["exact", "hessian_free", "first"])
def test_without_an_inner_step_it_is_fedavg(alike, order):
    options = {"epochs": 3, "lr": 0.2, "momentum": 0.9}
    one = last(linear(order=order, inner_lr=0.0, **options), alike.federation, 3)
    plain = fedavg.build(
        build("linear", (2,), 1), likelihood=likelihoods.normal(), batch=None, **options
    )
    close(one.server["w/w"], last(plain, alike.federation, 3).server["w/w"])


@pytest.mark.parametrize(("on", "order"), [("maml", "exact"), ("perfedavg", "hessian_free")])
def test_it_is_what_metavd_leaves_without_dropout(on, order):
    net, data = toys.net(), toys.blobs((6, 9, 20))
    one = perfedavg.build(net, order=order, batch=2, epochs=2, lr=0.2, inner_lr=0.05)
    other = metavd.build(
        net,
        on=on,
        dropout="none",
        batch=2,
        epochs=2,
        client_lr=0.2,
        lr=0.05,
        clip=1e9,
        server_lr=1.0,
        momentum=0.0,
    )
    a, b = last(one, data, 2), last(other, data, 2)
    toys.assert_same(role("w", a.server), role("loc", b.server), atol=1e-10)
    scores = [
        evaluate(m, data, s, adaptation="fine_tune").mean("nll") for m, s in ((one, a), (other, b))
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-9)


@pytest.mark.parametrize("steps", [1, 3])
def test_before_a_test_clients_step_down_their_own_loss(alike, steps):
    method, w = linear(adapt_steps=steps), AT
    received = {"w/w": w.expand(2, 2)}
    data = alike.federation
    found, *_ = train(
        method,
        received,
        received,
        data,
        toys.who(data, 0, 1),
        seed=0,
        number=0,
        phases=method.adapt,
    )
    rest = torch.eye(2).double() - ALPHA * alike.precision / 6
    expected = alike.mean + torch.einsum(
        "cij,cj->ci", torch.linalg.matrix_power(rest, steps), w - alike.mean
    )
    close(found["w/w"], expected)
    close(method.views["global"](received, found)["w/w"], received["w/w"])
    close(method.views["personal"](received, found)["w/w"], expected)


def test_a_batch_is_that_of_a_part():
    net = build("softmax", (4,), 3)
    assert perfedavg.build(net, batch=7).phases[0].batch == 21
    # The first order needs no third part for H; with one it made two steps where others make three.
    assert perfedavg.build(net, order="first", batch=7).phases[0].batch == 14
    assert perfedavg.build(net, batch=None).phases[0].batch is None
