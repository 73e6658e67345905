import pytest
import torch

from pyrofl.nets.products import LARGE, Products, products
from pyrofl.tensors import generator

# What torch's own forward derivatives load says this.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
N, B, IN, OUT = 3, 4, 5, 2


def drawn(*shapes):
    g = generator(3)
    return [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]


def values(bias=True):
    return drawn((N, B, IN), (N, OUT, IN), (N, OUT))[: 3 if bias else 2]


def by_hand(x, weight, bias=None):
    y = torch.einsum("nbi,noi->nbo", x, weight)
    return y if bias is None else y + bias[:, None]


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_both_derivatives_are_those_of_torch(bias):
    inputs = values(bias)
    found, truth = products(*inputs), by_hand(*inputs)
    torch.testing.assert_close(found, truth)
    with_own = lambda *tensors: Products.apply(*tensors, *([] if bias else [None]))  # noqa: E731
    assert torch.autograd.gradcheck(with_own, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(with_own, inputs)


def test_only_what_is_asked_for_has_a_gradient():
    x, weight, bias = values()
    y = Products.apply(x.detach(), weight, bias.detach())
    (grad,) = torch.autograd.grad(y.sum(), [weight])
    torch.testing.assert_close(grad, torch.autograd.grad(by_hand(x, weight).sum(), [weight])[0])


def test_vmap_goes_through():
    x, weight, bias = drawn((2, N, B, IN), (2, N, OUT, IN), (2, N, OUT))
    each = torch.stack([by_hand(*some) for some in zip(x, weight, bias, strict=True)])
    torch.testing.assert_close(torch.func.vmap(Products.apply)(x, weight, bias), each)


def test_gradients_of_large_weights_lie_as_the_weights_do():
    x, weight = torch.randn(2, 3, LARGE // 8), torch.randn(2, 8, LARGE // 8, requires_grad=True)
    (grad,) = torch.autograd.grad(products(x, weight).square().sum(), [weight])
    assert grad.stride() == weight.stride()


def test_hessians_go_through():
    x, weight, bias = values()
    found, truth = (
        torch.func.hessian(lambda w, f=f: f(x, w, bias).pow(3).sum())(weight)
        for f in (Products.apply, by_hand)
    )
    torch.testing.assert_close(found, truth)
