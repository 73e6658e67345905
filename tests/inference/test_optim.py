"""Stacked optimizers are torch's, client by client."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor

from pyrofl.inference.definition.optim import adam, clipped, keep_first_clients, sgd
from pyrofl.tensors import generator

STEP = 20  # roundings of an entry in a step, at most
STEPS = (5, 3, 1)  # of three clients, so that two drop out on the way
MAKERS = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, 0.9, weight_decay=0.01),
    "nesterov": sgd(0.1, 0.9, nesterov=True),
    "clipped": sgd(0.1, 0.9, clip=0.5),
    "adam": adam(0.1, betas=(0.8, 0.9)),
    "amsgrad": adam(0.1, amsgrad=True),
    "clipped adam": clipped(adam(0.1), 0.5),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


def start() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return two stacked parameters and their gradients at five steps."""
    shapes = ((3, 4, 2), (3,))
    g = generator(1)
    params = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
    grads = [
        [(3 - t) * torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
        for t in range(5)
    ]
    return params, grads


def compare(found: list[Tensor], expected: list[Tensor], terms: int) -> None:
    """Compare the parameters of one client."""
    one, other = ({"": torch.cat([p.detach().flatten() for p in v])} for v in (found, expected))
    toys.assert_same(one, other, terms=terms)


@pytest.mark.parametrize("name", MAKERS)
def test_clients_that_finish_early_keep_what_they_have(name):
    params, grads = start()
    stacked = [p.clone().requires_grad_() for p in params]
    whole = [p.detach() for p in stacked]  # the same memory, all clients
    optimizer = MAKERS[name](stacked)
    active = 3
    for t in range(5):
        left = sum(steps > t for steps in STEPS)
        if left < active:
            active = left
            keep_first_clients(optimizer, active)
        for p, g in zip(stacked, grads[t], strict=True):
            p.grad = g[:active].clone()
        optimizer.step()
    for c, steps in enumerate(STEPS):
        alone = [p[c : c + 1].clone().requires_grad_() for p in params]
        one = MAKERS[name](alone)
        for t in range(steps):
            for p, g in zip(alone, grads[t], strict=True):
                p.grad = g[c : c + 1].clone()
            one.step()
        compare([p[c] for p in whole], alone, STEP * steps)


@pytest.mark.parametrize("options", [{"foreach": True}, {"differentiable": True}])
def test_options_of_torch_go_before_the_fused_one(options):
    (group,) = sgd(0.1, **options)([torch.zeros(2, requires_grad=True)]).param_groups
    assert not group["fused"]
    assert sgd(0.1)([torch.zeros(2, requires_grad=True)]).param_groups[0]["fused"]


def test_clip_is_torchs_for_every_client():
    params, grads = start()
    stacked = [p.clone().requires_grad_() for p in params]
    for p, g in zip(stacked, grads[0], strict=True):
        p.grad = g.clone()
    sgd(1.0, clip=2.0)(stacked).step()
    for c in range(3):
        alone = [p[c].clone().requires_grad_() for p in params]
        for p, g in zip(alone, grads[0], strict=True):
            p.grad = g[c].clone()
        norm = torch.nn.utils.clip_grad_norm_(alone, 2.0)
        assert norm > 2
        torch.optim.SGD(alone, lr=1.0).step()
        compare([p[c] for p in stacked], alone, STEP + 9)  # the norm is a sum over 9 entries


def test_clip_leaves_short_gradients_alone():
    p = torch.zeros(2, 3, requires_grad=True)
    p.grad = torch.tensor([[0.3, 0.0, 0.0], [30.0, 0.0, 40.0]])
    sgd(1.0, clip=1.0)([p]).step()
    assert torch.equal(p[0].detach(), torch.tensor([-0.3, 0, 0]))
    torch.testing.assert_close(p[1].detach(), torch.tensor([-0.6, 0, -0.8]))


def test_clip_stands_gradients_that_share_memory():
    # Autograd gives the summands of a sum one and the same tensor, and a sum an expanded one.
    a, b = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
    optimizer = sgd(1.0, clip=1.0)([a, b])
    a.grad, b.grad = torch.autograd.grad((a + b).square().sum(), [a, b])
    optimizer.step()
    torch.testing.assert_close(a.detach(), torch.full((2, 4), 1 - 8**-0.5), rtol=1e-5, atol=0)
    assert torch.equal(a, b)
    optimizer = sgd(1.0, clip=1.0)([a])
    (a.grad,) = torch.autograd.grad(a.sum(), a)
    optimizer.step()
    torch.testing.assert_close(a.detach(), b.detach() - 0.5, rtol=1e-5, atol=0)


def test_a_bad_gradient_stays_with_its_client():
    p = torch.zeros(2, 3, requires_grad=True)
    p.grad = torch.tensor([[torch.nan, 1.0, 1.0], [3.0, 0.0, 4.0]])
    sgd(1.0, clip=1.0)([p]).step()
    torch.testing.assert_close(p[1].detach(), torch.tensor([-0.6, 0, -0.8]))
