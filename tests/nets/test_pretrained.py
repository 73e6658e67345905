"""Networks that start at given values, and networks of which a part is constant."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pyrofl
from pyrofl.inference.acceleration.row_space import rewriting
from pyrofl.models import fedavg, fedbe, pfedvem
from pyrofl.nets import Network
from pyrofl.nets.reparametrized import Reparametrized
from pyrofl.tensors import generator, role

ROWS = torch.randn(3, 5, toys.FEATURES, generator=generator(2), dtype=torch.float64)


def module(frozen: str = "", act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Return a network as if it were pretrained, of which some layers are not to be trained."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        chain = nn.Sequential(
            nn.Linear(toys.FEATURES, 6), act(), nn.Linear(6, 4), act(), nn.Linear(4, toys.CLASSES)
        )
    for name in frozen.split():
        chain.get_submodule(name).requires_grad_(False)
    return chain.double()


def copies(net: Network, clients: int) -> dict[str, Tensor]:
    return {n: v.expand(clients, 1, *v.shape).clone() for n, v in net.init(generator(1)).items()}


class Whole(nn.Module):
    """The same, but not a sequential one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# Training starts at what was given.


def test_a_network_may_keep_its_values():
    given = module()
    net = Network(given, pretrained=True)
    start, other = net.init(generator(0)), net.init(generator(1))
    for name, value in given.named_parameters():
        assert torch.equal(start[name], value)
        assert torch.equal(other[name], value)
    start["0.weight"].fill_(9.0)
    assert torch.equal(net.init(generator(0))["0.weight"], given[0].weight)
    drawn = Network(given).init(generator(0))
    assert not torch.equal(drawn["0.weight"], given[0].weight)
    assert "the module's own values" in repr(net)


@pytest.mark.parametrize("frozen", ["", "0", "0 2"])
def test_one_client_alone_is_trained_as_by_plain_torch(frozen):
    data, plain = toys.blobs((40,)), module(frozen)
    method = fedavg.build(
        Network(plain, pretrained=True), epochs=7, batch=None, lr=0.1, momentum=0.9
    )
    found = role("w", toys.last(method, data, rounds=1).server)
    rows = data.train[0]
    optim = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1, 0.9)
    for _ in range(7):
        optim.zero_grad()
        cross_entropy(plain(data.x[rows]), data.y[rows]).backward()
        optim.step()
    assert list(found) == [n for n, p in plain.named_parameters() if p.requires_grad]
    for name, value in found.items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), msg=name)


# Some parameters are constants.


@pytest.mark.parametrize("frozen", ["0", "0 2", "2", "4"])
@pytest.mark.parametrize("wrap", [lambda m: m, Whole], ids=["sequential", "whole"])
def test_constants_are_no_parameters_and_stay(frozen, wrap):
    given = module(frozen)
    net = Network(wrap(given))
    inside = "" if wrap(given) is given else "inner."
    constants = [f"{inside}{n}" for n, p in given.named_parameters() if not p.requires_grad]
    assert set(net.shapes).isdisjoint(constants)
    assert len(net.shapes) + len(constants) == 6
    fresh = net.init_module(generator(0))
    for name in constants:
        assert torch.equal(fresh.get_parameter(name), net.module.get_parameter(name))
    weights = copies(net, 3)
    expected = torch.stack(
        [net.apply({n: v[c, 0] for n, v in weights.items()}, ROWS[c]) for c in (0, 1, 2)]
    )
    torch.testing.assert_close(net(weights, ROWS), expected)
    drawn = {n: v.expand(2, *v.shape) for n, v in weights.items()}
    torch.testing.assert_close(net(drawn, ROWS)[1], expected)
    # In the type of the weights, whatever the module's.
    single = {n: v.float() for n, v in weights.items()}
    torch.testing.assert_close(net(single, ROWS.float()), expected.float())
    net.check(ROWS, toys.CLASSES)
    assert "that are constants" in repr(net)
    with pytest.raises(ValueError, match=f"unknown parameter {constants[0]!r}"):
        net.dims(constants[0])
    with pytest.raises(ValueError, match="no parameter matches"):
        net.select_params(" ".join(constants))


def test_a_layer_may_be_constant_in_part():
    given = module()
    given[0].weight.requires_grad_(False)
    given[4].bias.requires_grad_(False)
    net = Network(given)
    assert [part.rule.__name__ for part in net.parts][::4] == ["anything", "anything"]
    assert net.head == "4.*"
    assert list(net.select_params(net.head)) == ["4.weight"]
    weights = copies(net, 3)
    expected = torch.stack(
        [net.apply({n: v[c, 0] for n, v in weights.items()}, ROWS[c]) for c in (0, 1, 2)]
    )
    torch.testing.assert_close(net(weights, ROWS), expected)


def test_the_head_is_the_last_layer_that_trains():
    assert Network(module("4")).head == "2.*"


def test_a_network_is_cut_behind_constants():
    net = Network(module("0"))
    base, head = net.split("4.*")
    weights = copies(net, 3)
    assert list(base.shapes) == ["2.weight", "2.bias"]
    torch.testing.assert_close(head(weights, base(weights, ROWS)), net(weights, ROWS))
    alone = Network(module("0 2"))
    base, head = alone.split(alone.head)
    assert not base.shapes
    torch.testing.assert_close(head(weights, base({}, ROWS)), alone(weights, ROWS))
    assert alone.split("nothing") is None


def test_a_module_that_does_not_train_is_refused():
    with pytest.raises(ValueError, match="Sequential has no parameters that train; expected"):
        Network(module("0 2 4"))


def test_constants_have_no_draws_of_activations():
    net = Network(module("0"))
    with pytest.raises(ValueError, match=r"unknown parameter that trains '0\.weight'"):
        Reparametrized(net, ["0.weight"])
    noisy, weights = Reparametrized(net, ["2.weight"]), copies(net, 3)
    variance = {"2.weight": torch.zeros(3, 1, 4, 6).double()}
    noise = {"2": torch.ones(3, 5, 4).double()}
    torch.testing.assert_close(
        noisy(weights, variance, noise, ROWS), net(weights, ROWS), atol=1e-5, rtol=0
    )
    single = [{n: v.float() for n, v in part.items()} for part in (weights, variance, noise)]
    assert noisy(*single, ROWS.float()).dtype == torch.float32


@pytest.mark.parametrize("build", [fedavg.build, pfedvem.build])
def test_only_the_head_of_a_frozen_base_trains(build):
    net, data = Network(module("0 2"), pretrained=True), toys.blobs()
    before = {n: p.clone() for n, p in net.module.named_parameters()}
    run = pyrofl.fit(build(net), data, 2, progress=False)
    tensors = run.state.server | run.state.message | run.state.client_states
    assert {n.rpartition("/")[2] for n in tensors if "." in n} == {"4.weight", "4.bias"}
    assert all(torch.equal(before[n], p) for n, p in net.module.named_parameters())
    moved = run.state.message["w/4.weight" if build is fedavg.build else "mean/4.weight"]
    assert not torch.isclose(moved, before["4.weight"]).any()
    assert bool(run.evaluate().values["accuracy"].isfinite().all())


@pytest.mark.parametrize("build", [fedavg.build, pfedvem.build])
def test_shortcuts_around_constants_change_no_number(build, monkeypatch):
    monkeypatch.setattr(rewriting, "pays", lambda *_: True)
    # A network in one part cannot be cut, so that it goes the long way.
    short, long = (
        toys.last(
            build(Network(wrap(module("0", nn.Sigmoid)), pretrained=True), batch=4), toys.blobs()
        )
        for wrap in (lambda m: m, Whole)
    )
    renamed = {n.replace("inner.", ""): v for n, v in long.server.items()}
    toys.assert_same(short.server, renamed, rtol=1e-9, atol=1e-12)


def test_a_distilled_student_keeps_its_constants():
    net, data = Network(module("0"), pretrained=True), toys.blobs()
    method = fedbe.build(net, server_data=data.x[:20], epochs=1, distil_epochs=1)
    server = toys.last(method, data, rounds=1).server
    assert not [n for n in server if n.endswith(("0.weight", "0.bias"))]
