"""Layers of many clients side by side are the layers of each, one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyrofl.nets import stacked
from pyrofl.nets.architectures import ResidualBlock
from pyrofl.tensors import Tensors, generator

DRAWS, CLIENTS, ROWS = 2, 3, 4
LEAD = {0: (), 1: (CLIENTS,), 2: (DRAWS, CLIENTS)}


class Shifted(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        """Return more than a linear layer does."""
        return super().forward(x) + 1


NETWORKS = {
    "linear": (nn.Linear(5, 4), (5,)),
    "no bias": (nn.Linear(5, 4, bias=False), (5,)),
    "rows with axes": (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), (2, 3, 5)),
    "nested": (nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), nn.ReLU()), (2, 3)),
    "narrow conv": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 6)),
    "wide conv": (nn.Conv2d(8, 3, 2, dilation=2), (8, 5, 6)),
    "grouped conv": (nn.Conv2d(4, 4, 2, groups=2), (4, 3, 3)),
    "reflected conv": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5)),
    "conv without bias": (nn.Conv1d(2, 3, 3, bias=False), (2, 5)),
    "norm": (nn.Sequential(nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (4, 3, 3)),
    "plain norm": (nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.Conv1d(4, 2, 1)), (4, 3)),
    "pool": (nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, 2, 1), nn.Flatten()), (1, 5, 5)),
    "relu, pool": (
        nn.Sequential(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2)),
        (3, 6, 5),
    ),
    "pool without channels": (nn.Sequential(nn.AvgPool2d(2), nn.Linear(2, 3)), (4, 5)),
    "conv in space": (nn.Conv3d(2, 3, 2), (2, 3, 3, 3)),
    "residual": (nn.Sequential(ResidualBlock(2, 2, 1), ResidualBlock(2, 5, 2)), (2, 5, 5)),
    "subclass": (Shifted(5, 4), (5,)),
    "layer norm": (nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)), (5,)),
    "flatten some": (nn.Sequential(nn.Linear(5, 4), nn.Flatten(2)), (2, 3, 5)),
}


def draw(module: nn.Module, leads: tuple[int, ...]) -> Tensors:
    g = torch.Generator().manual_seed(0)
    named = zip(module.named_parameters(), leads, strict=True)
    return {
        n: torch.randn(*LEAD[k], *p.shape, generator=g, dtype=torch.float64, requires_grad=True)
        for (n, p), k in named
    }


def one_by_one(module: nn.Module, weights: Tensors, x: Tensor, most: int) -> Tensor:
    shapes = dict(module.named_parameters())

    def mine(name: str, k: int, c: int) -> Tensor:
        value = weights[name]
        return value[((), (c,), (k, c))[value.dim() - shapes[name].dim()]]

    found = [
        [
            functional_call(module, {n: mine(n, k, c) for n in weights}, (x[c],))
            for c in range(CLIENTS)
        ]
        for k in range(DRAWS)
    ]
    every = torch.stack([torch.stack(row) for row in found])
    return every if most == 2 else every[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_gradients_are_those_of_each_client(name):
    module, shape = NETWORKS[name]
    module = module.double()
    names = list(dict(module.named_parameters()))
    g = torch.Generator().manual_seed(1)
    x = torch.randn(CLIENTS, ROWS, *shape, generator=g, dtype=torch.float64)
    chain = stacked.parts(module)
    # Whatever is shared, each client's own or drawn: all combinations, or of many some.
    every = list(product((0, 1, 2), repeat=len(names)))
    for leads in every if len(every) < 100 else [every[0], every[-1], *every[1 :: len(every) // 5]]:
        weights = draw(module, leads)
        found = stacked.run(chain, weights, x)
        known = one_by_one(module, weights, x, max(leads))
        torch.testing.assert_close(found, known, msg=lambda m, leads=leads: f"{leads}: {m}")
        weight = torch.randn(known.shape, generator=g, dtype=torch.float64)
        fast = torch.autograd.grad((weight * found).sum(), list(weights.values()))
        slow = torch.autograd.grad((weight * known).sum(), list(weights.values()))
        for a, b in zip(fast, slow, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["narrow conv", "conv without bias", "pool", "residual"])
def test_images_of_some_clients_after_the_other_give_the_same(name, monkeypatch):
    seen = []
    monkeypatch.setattr(stacked, "_run", lambda *args, f=stacked._run: seen.append(1) or f(*args))
    size = 2 * ROWS * torch.zeros(NETWORKS[name][1]).numel() * 8
    monkeypatch.setattr(stacked, "IMAGE_BYTES_PER_PASS", size)  # of two clients, of three
    test_values_and_gradients_are_those_of_each_client(name)
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("nested", "flatten linear by_entry"),
        ("subclass", "anything"),
        ("grouped conv", "anything"),
        ("reflected conv", "anything"),
        ("layer norm", "linear anything linear"),
        ("flatten some", "linear anything"),
        ("plain norm", "anything convolution"),
        ("relu, pool", "convolution pooling by_entry convolution"),
    ],
)
def test_only_what_is_certain_leaves_vmap(name, rules):
    chain = stacked.parts(NETWORKS[name][0])
    assert [part.rule.__name__ for part in chain] == rules.split()


def test_a_layer_with_a_hook_runs_by_vmap():
    module = nn.Sequential(nn.Linear(5, 4))
    handle = module[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    x = torch.ones(CLIENTS, ROWS, 5)
    weights = {n: p.detach() for n, p in module.named_parameters()}
    doubled = stacked.run(stacked.parts(module), weights, x)
    handle.remove()
    torch.testing.assert_close(doubled, 2 * stacked.run(stacked.parts(module), weights, x))


def test_a_layer_that_serves_twice_keeps_its_one_parameter():
    layer = nn.Linear(5, 5)
    module = nn.Sequential(layer, nn.ReLU(), layer)
    weights = {n: p.detach() for n, p in module.named_parameters()}
    x = torch.randn(CLIENTS, ROWS, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stacked.run(stacked.parts(module), weights, x), module(x))


# Products.

N, B, IN, OUT = 3, 4, 5, 2


def random(*shapes):
    g = generator(3)
    return [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]


def of_products(bias=True):
    return random((N, B, IN), (N, OUT, IN), (N, OUT))[: 3 if bias else 2]


def einsum(x, weight, bias=None):
    y = torch.einsum("nbi,noi->nbo", x, weight)
    return y if bias is None else y + bias[:, None]


# What torch's own forward derivatives load says this.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_both_derivatives_are_those_of_torch(bias):
    inputs = of_products(bias)
    found, truth = stacked.products(*inputs), einsum(*inputs)
    torch.testing.assert_close(found, truth)
    with_own = lambda *tensors: stacked.Products.apply(*tensors, *([] if bias else [None]))  # noqa: E731
    assert torch.autograd.gradcheck(with_own, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(with_own, inputs)


def test_only_what_is_asked_for_has_a_gradient():
    x, weight, bias = of_products()
    y = stacked.Products.apply(x.detach(), weight, bias.detach())
    (grad,) = torch.autograd.grad(y.sum(), [weight])
    torch.testing.assert_close(grad, torch.autograd.grad(einsum(x, weight).sum(), [weight])[0])


def test_vmap_goes_through():
    x, weight, bias = random((2, N, B, IN), (2, N, OUT, IN), (2, N, OUT))
    each = torch.stack([einsum(*some) for some in zip(x, weight, bias, strict=True)])
    torch.testing.assert_close(torch.func.vmap(stacked.Products.apply)(x, weight, bias), each)


def test_gradients_of_large_weights_lie_as_the_weights_do():
    x, weight = (
        torch.randn(2, 3, stacked.PRODUCTS_ENTRIES // 8),
        torch.randn(2, 8, stacked.PRODUCTS_ENTRIES // 8, requires_grad=True),
    )
    (grad,) = torch.autograd.grad(stacked.products(x, weight).square().sum(), [weight])
    assert grad.stride() == weight.stride()


def test_hessians_go_through():
    x, weight, bias = of_products()
    found, truth = (
        torch.func.hessian(lambda w, f=f: f(x, w, bias).pow(3).sum())(weight)
        for f in (stacked.Products.apply, einsum)
    )
    torch.testing.assert_close(found, truth)
