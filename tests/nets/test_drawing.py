"""Starts that layers draw by rules of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyrofl.nets import Network
from pyrofl.tensors import generator


class InManyWays(nn.Module):
    """A layer whose rule draws by functions of torch of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 8))

    def reset_parameters(self) -> None:
        torch.rand(3)
        with torch.no_grad():
            nn.init.normal_(self.weight)
            self.weight.add_(torch.randn_like(self.weight))
            self.weight.add_(torch.distributions.Normal(0.0, 1.0).sample((5, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def test_a_start_is_of_its_generator_alone():
    net, before = Network(InManyWays()), torch.get_rng_state()
    first = net.init(generator(1))["weight"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(net.init(generator(1))["weight"], first)
    assert not torch.equal(net.init(generator(2))["weight"], first)
    three = first.var()  # three standard normals, none of which is another one's again
    assert abs(float(three) - 3) < 4 * 3 * (2 / 39) ** 0.5  # four standard errors


def test_a_linear_layer_has_the_numbers_of_torch():
    net, source = Network(nn.Linear(3, 2)), generator(4)
    seed = int(torch.randint(2**62, (), generator=generator(4)))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layer = nn.Linear(3, 2)
    assert torch.equal(net.init(source)["weight"], layer.weight)
