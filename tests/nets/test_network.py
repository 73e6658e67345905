"""Networks run for many clients at once as they would one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from pyrofl.nets import NETWORKS, Network, build
from pyrofl.tensors import Tensors, generator, pick

CIFAR = (3, 32, 32)


def count(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())


@pytest.mark.parametrize(
    ("spec", "shape", "outputs", "total", "head"),
    [
        ("softmax", (1, 28, 28), 10, 7_850, 7_850),
        ("mlp:100", (1, 28, 28), 10, 79_510, 1_010),
        ("mlp", (28, 28), 10, 79_510, 1_010),
        ("mlp:200", (1, 28, 28), 62, 169_462, 12_462),
        ("mlp:512,256,64", (1, 28, 28), 62, 553_726, 4_030),
        ("cnn-pfedvem", CIFAR, 10, 121_182, 850),
        ("cnn-pfedvem-100", CIFAR, 20, 620_936, 2_020),
        ("cnn-pfedvem-100", (3, 64, 64), 3, 618_916 + 303, 303),
        ("cnn-pfedmb", CIFAR, 10, 62_006, 850),
        ("cnn-pfedmb", CIFAR, 100, 69_656, 8_500),
        ("cnn-metavd", CIFAR, 10, 372_234, 1_290),
        ("cnn-metavd", CIFAR, 100, 383_844, 12_900),
        ("cnn-metavd", CIFAR, 62, 378_942, 7_998),
        ("cnn-metavd:256", CIFAR, 10, 5_912_586, 5_130),
        ("cnn-metavd:256", CIFAR, 100, 5_958_756, 51_300),
        ("cnn-fedbe", CIFAR, 10, 122_570, 650),
        ("cnn-fedbe", CIFAR, 100, 128_420, 6_500),
        ("cnn-fedbe-gn", CIFAR, 10, 122_570 + 2 * (32 + 64 + 64), 650),
        ("resnet20", CIFAR, 10, 269_722, 650),  # .27 M
        ("resnet32", CIFAR, 10, 464_154, 650),
        ("resnet44", CIFAR, 10, 658_586, 650),
        ("resnet56", CIFAR, 10, 853_018, 650),
        ("resnet20", (1, 28, 28), 100, 269_722 - 2 * 144 + 90 * 65, 6_500),
        ("cnn-fedabml", CIFAR, 10, 307_842, 650),
        ("mean", (4,), 1, 1, 1),
        ("linear", (4,), 1, 4, 4),
    ],
)
def test_sizes_are_the_papers(spec, shape, outputs, total, head):
    net = build(spec, shape, outputs)
    assert count(net.shapes) == total
    assert count(net.select_params(net.head)) == head


def test_layers_of_a_paper_have_its_sizes():
    net = build("cnn-pfedvem", CIFAR, 10)
    layers = [count(net.select_params(f"{n}.*")) for n in ("conv1", "conv2", "fc1", "fc2", "head")]
    assert layers == [1_216, 12_832, 96_120, 10_164, 850]
    assert net.shapes["head.weight"] == (10, 84)
    # MetaVD's Bayesian layer.
    assert build("cnn-metavd", CIFAR, 10).shapes["fc2.weight"].numel() == 32_768


@pytest.mark.parametrize("spec", NETWORKS)
def test_every_name_builds_and_runs(spec):
    outputs = 1 if spec in ("mean", "linear") else 7
    net = build(spec, (2, 33, 30), outputs)
    x = torch.zeros(3, 2, 2, 33, 30)
    net.check(x, outputs)
    assert net(net.init(generator(0)), x).shape == (3, 2, outputs)


def per_client(net: Network, clients: int, draws: int | None = None) -> Tensors:
    lead = (clients, 1) if draws is None else (draws, clients, 1)
    g = generator(3)
    return {
        n: v + 0.1 * torch.randn(*lead, *v.shape, generator=g)
        for n, v in net.init(generator(1)).items()
    }


def one_by_one(net: Network, weights: Tensors, x: Tensor, draw: int | None = None) -> Tensor:
    def mine(name: str, client: int) -> Tensor:
        value, lead = weights[name], weights[name].dim() - len(net.shapes[name])
        if lead == 3:
            value, lead = value[draw], 2
        return value[client, 0] if lead else value

    return torch.stack(
        [
            functional_call(net.module, {n: mine(n, c) for n in net.shapes}, (x[c],))
            for c in range(len(x))
        ]
    )


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("mlp:5,4", (6,)),
        ("linear", (6,)),
        ("cnn-pfedmb", (1, 16, 16)),
        ("cnn-fedbe-gn", (1, 18, 18)),
        ("resnet20", (2, 9, 8)),
    ],
)
def test_clients_side_by_side_equal_one_by_one(spec, shape):
    net = build(spec, shape, 1 if spec == "linear" else 3)
    x = torch.randn(4, 5, *shape, generator=generator(2))
    weights = per_client(net, 4)
    torch.testing.assert_close(net(weights, x), one_by_one(net, weights, x), rtol=1e-5, atol=1e-6)


def test_shared_base_and_drawn_head():
    net = build("mlp:5", (6,), 3)
    x = torch.randn(4, 7, 6, generator=generator(2))
    weights = net.init(generator(1)) | pick(per_client(net, 4, draws=2), net.head)
    got = net(weights, x)
    assert got.shape == (2, 4, 7, 3)
    for k in range(2):
        torch.testing.assert_close(
            got[k], one_by_one(net, weights, x, draw=k), rtol=1e-5, atol=1e-6
        )


def test_a_shared_base_runs_once_whatever_the_draws():
    net = build("mlp:50", (60,), 3)
    x = torch.randn(4, 7, 60, generator=generator(2))
    shared = net.init(generator(1)) | pick(per_client(net, 4, draws=5), net.head)
    with FlopCounterMode(display=False) as counter:
        net(shared, x)
    base, head = 2 * 60 * 50, 2 * 50 * 3
    assert counter.get_total_flops() == 4 * 7 * (base + 5 * head)


def test_gradients_equal_one_by_one():
    net = build("mlp:5", (6,), 3)
    x = torch.randn(4, 7, 6, generator=generator(2))
    weights = net.init(generator(1)) | pick(per_client(net, 4), net.head)
    free = {n: v.clone().requires_grad_() for n, v in weights.items()}
    fast = torch.autograd.grad(net(free, x).square().sum(), list(free.values()))
    slow = torch.autograd.grad(one_by_one(net, free, x).square().sum(), list(free.values()))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(clients=st.integers(1, 4), rows=st.integers(1, 4), draws=st.integers(1, 3))
def test_shapes_of_outputs(clients, rows, draws):
    net = build("softmax", (2,), 3)
    x = torch.ones(clients, rows, 2)
    assert net(net.init(generator(0)), x).shape == (clients, rows, 3)
    assert net(per_client(net, clients), x).shape == (clients, rows, 3)
    assert net(per_client(net, clients, draws), x).shape == (draws, clients, rows, 3)


@pytest.mark.parametrize(
    "lead",
    [(1,), (4,), (3, 1), (4, 2), (1, 1), (2, 3, 1), (2, 4, 2), (2, 2, 4, 1)],
)
def test_wrong_leading_axes_are_refused_by_name(lead):
    net = build("softmax", (2,), 3)
    good = per_client(net, 4)
    bad = good | {"head.bias": torch.zeros(*lead, 3)}
    with pytest.raises(ValueError, match=r"head\.bias has shape .*; expected \(3,\), \(4, 1, 3\)"):
        net(bad, torch.zeros(4, 5, 2))


def test_an_unstacked_parameter_of_the_wrong_shape_is_refused():
    net = build("softmax", (2,), 3)
    bad = net.init(generator(0)) | {"head.bias": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"head\.bias has shape \(1,\)"):
        net(bad, torch.zeros(4, 5, 2))


def test_missing_weights_and_unequal_draws_are_refused():
    net = build("softmax", (2,), 3)
    x = torch.zeros(4, 5, 2)
    with pytest.raises(ValueError, match=r"lack 'head.bias'; found head.weight"):
        net(pick(net.init(generator(0)), "*weight"), x)
    mixed = pick(per_client(net, 4, 2), "*weight") | pick(per_client(net, 4, 3), "*bias")
    with pytest.raises(ValueError, match=r"head.bias has shape \(3, 4, 1, 3\)"):
        net(mixed, x)


def test_a_start_depends_on_the_seed_alone():
    net = build("cnn-fedbe", CIFAR, 10)
    torch.rand(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = net.init(generator(1))
    build("cnn-fedbe", CIFAR, 10)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    again, other = net.init(generator(1)), net.init(generator(2))
    assert all(torch.equal(first[n], again[n]) for n in net.shapes)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    # Two draws of one generator differ: clients that start apart need that.
    g = generator(1)
    assert not torch.equal(net.init(g)["fc1.weight"], net.init(g)["fc1.weight"])


def test_a_start_leaves_the_module_as_it_was():
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    net = Network(module)
    net.init(generator(0))["weight"].fill_(9.0)
    assert torch.equal(module.weight, before)
    assert torch.equal(net.module.weight, before)


def test_starts_follow_the_papers():
    fedbe = build("cnn-fedbe", CIFAR, 10).init(generator(0))
    bound = (6 / (1024 + 64)) ** 0.5
    assert 0.99 * bound < float(fedbe["fc1.weight"].abs().max()) <= bound
    assert all(not v.any() for v in pick(fedbe, "*.bias").values())

    metavd = build("cnn-metavd", CIFAR, 10).init(generator(0))
    weight = metavd["fc1.weight"]
    # The standard error of a standard deviation of n normals is about s / sqrt(2 n).
    expected = (2 / (1024 + 256)) ** 0.5
    assert abs(float(weight.std()) - expected) < 4 * expected / (2 * weight.numel()) ** 0.5
    assert 0.99 / 16 < float(metavd["fc2.weight"].abs().max()) <= 1 / 16


def test_a_parameter_without_a_rule_keeps_its_value():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.5))
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x)

    net = Network(Scaled())
    start = net.init(generator(0))
    assert start["scale"] == 2.5
    assert not torch.equal(start["layer.weight"], net.module.layer.weight)
    x = torch.randn(2, 4, 3, generator=generator(1))
    weights = {n: v.expand(2, 1, *v.shape) for n, v in start.items()}
    torch.testing.assert_close(
        net(weights, x), 2.5 * net(weights | {"scale": start["scale"] / 2.5}, x)
    )
    assert net.dims("scale") == ()


def test_constants_of_a_module_follow_the_weights_precision():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.eye(3))
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.nn.functional.linear(x, self.shift))

    net = Network(Shifted())
    assert set(net.shapes) == {"head.weight", "head.bias"}
    x = torch.randn(2, 4, 3, generator=generator(1), dtype=torch.float64)
    start = {n: v.double() for n, v in net.init(generator(0)).items()}
    expected = x @ start["head.weight"].T + start["head.bias"]
    torch.testing.assert_close(net(start, x), expected)
    net.check(x, 2)


def test_attention_is_drawn_from_the_seed_and_runs():
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0].mean(1))

    net = Network(Attentive())
    start, other = net.init(generator(0)), net.init(generator(1))
    name = "attention.in_proj_weight"
    assert not torch.equal(start[name], other[name])
    x = torch.randn(2, 3, 5, 4, generator=generator(2))
    weights = per_client(net, 2)
    torch.testing.assert_close(net(weights, x), one_by_one(net, weights, x), rtol=1e-5, atol=1e-6)
    assert net.dims(name) == (f"{name}_axis0".replace(".", "_"), f"{name}_axis1".replace(".", "_"))


def test_axes_have_names():
    net = build("cnn-pfedmb", CIFAR, 10)
    assert net.dims("conv1.weight") == ("conv1_out", "conv1_in", "conv1_height", "conv1_width")
    assert net.dims("fc1.weight") == ("fc1_out", "fc1_in")
    assert net.dims("fc1.bias") == ("fc1_out",)
    assert build("linear", (3,), 1).dims("w") == ("w_axis0",)
    nested = Network(nn.Sequential(nn.Sequential(nn.Conv1d(2, 3, 4), nn.GroupNorm(1, 3))))
    assert nested.dims("0.0.weight") == ("0_0_out", "0_0_in", "0_0_width")
    assert nested.dims("0.1.weight") == ("0_1_weight_axis0",)
    assert Network(nn.Linear(2, 3)).dims("weight") == ("out", "in")
    with pytest.raises(ValueError, match=r"unknown parameter 'fc9'; expected one of conv1\.weight"):
        net.dims("fc9")


def test_the_head_is_the_last_layer_or_what_was_asked_for():
    assert build("linear", (3,), 1).head == "w"
    layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU())
    assert Network(layers).head == "2.*"
    assert set(Network(layers, "0.* 2.bias").select_params("0.* 2.bias")) == {
        "0.weight",
        "0.bias",
        "2.bias",
    }
    with pytest.raises(
        ValueError, match=r"no parameter matches 'fc\*'; expected some of 0\.weight"
    ):
        Network(layers, "fc*")


@pytest.mark.parametrize(
    ("layer", "advice"),
    [
        (nn.BatchNorm1d(3), "GroupNorm"),
        (nn.BatchNorm2d(3, track_running_stats=False), "GroupNorm"),
        (nn.SyncBatchNorm(3), "GroupNorm"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "GroupNorm"),
        (nn.Dropout(0.5), "prior on the weights"),
        (nn.AlphaDropout(0.5), "prior on the weights"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "prior on the weights"),
        (nn.LSTM(3, 4), "GRUCell"),
    ],
)
def test_layers_that_cannot_run_are_refused_by_name(layer, advice):
    net = nn.Sequential(nn.Linear(3, 3))
    net.add_module("culprit", layer)
    kind = type(layer).__name__
    with pytest.raises(ValueError, match=rf"layer 'culprit' is {kind}: .*{advice}"):
        Network(net)


def test_layers_that_only_look_alike_are_welcome():
    layers = nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3), nn.GroupNorm(1, 3))
    assert len(Network(layers).shapes) == 4


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        Network(nn.ReLU())


def test_data_that_do_not_fit_are_refused():
    net = build("mlp:5", (1, 8, 8), 10)
    net.check(torch.zeros(2, 3, 1, 8, 8), 10)
    net.check(torch.zeros(1, 1, 1, 8, 8, dtype=torch.float64), 10)
    with pytest.raises(ValueError, match=r"shape \(1, 10\) for one row; expected \(1, 100\)"):
        net.check(torch.zeros(1, 1, 1, 8, 8), 100)
    with pytest.raises(ValueError, match=r"cannot take rows of shape \(1, 9, 9\)"):
        net.check(torch.zeros(1, 1, 1, 9, 9), 10)


def test_the_smallest_image_named_in_the_message_is_taken():
    with pytest.raises(ValueError, match="18 or more"):
        build("cnn-pfedvem-100", (1, 17, 40), 10)
    net = build("cnn-pfedvem-100", (1, 18, 18), 10)
    net.check(torch.zeros(1, 1, 1, 18, 18), 10)


def test_a_hook_that_comes_later_is_on_the_callers_module_alone():
    module = nn.Sequential(nn.Linear(3, 2))
    hooked = nn.Sequential(nn.Linear(3, 2))
    hooked.load_state_dict(module.state_dict())
    hooked[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    net, doubled = Network(module), Network(hooked)
    module[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    weights = {n: p.detach()[None, None] for n, p in module.named_parameters()}
    x = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(2 * net(weights, x), module(x))
    torch.testing.assert_close(doubled(weights, x), module(x))


def tied() -> nn.Sequential:
    first = nn.Linear(3, 3)
    return nn.Sequential(first, nn.Tanh(), first, nn.Tanh(), nn.Linear(3, 2))


def twice() -> nn.Sequential:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(3, 4), act, nn.Linear(4, 3), act, nn.Linear(3, 2))


@pytest.mark.parametrize("make", [tied, twice])
def test_a_network_that_is_cut_computes_the_same_where_a_layer_runs_twice(make):
    net = Network(make())
    parts = net.split(net.head)
    assert parts is not None
    base, head = parts
    weights = net.init(generator(1))
    x = torch.randn(1, 5, 3, generator=generator(2))
    torch.testing.assert_close(head(weights, base(weights, x)), net(weights, x))


def test_a_network_is_not_cut_where_more_happens_than_its_layers():
    hooked = twice()
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert Network(hooked).split("4.*") is None
    across = nn.Sequential(first := nn.Linear(3, 3), nn.Linear(3, 3), first)
    assert Network(across).split("1.*") is None


def test_a_transformer_with_dropout_is_refused():
    with pytest.raises(
        ValueError, match=r"layer 'self_attn' is MultiheadAttention: set its dropout, 0\.1, to 0"
    ):
        Network(nn.TransformerEncoderLayer(4, 2, 8))


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_without_dropout_runs_side_by_side(training):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    tail = nn.Flatten(), nn.Dropout(0.0), nn.Identity(), nn.Linear(12, 2)
    net = Network(nn.Sequential(layer, *tail).double().train(training))
    assert [part.rule.__name__ for part in net.parts].count("anything") == 1
    x = torch.randn(3, 5, 3, 4, generator=generator(2), dtype=torch.float64)
    weights = {n: v.requires_grad_() for n, v in per_client(net, 3).items()}
    fast, slow = net(weights, x), one_by_one(net, weights, x)
    torch.testing.assert_close(fast, slow)
    for a, b in zip(
        *(torch.autograd.grad(y.square().sum(), list(weights.values())) for y in (fast, slow)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(net(weights, x), slow)
    net.check(x, 2)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_network_tells_what_it_is():
    assert repr(build("mlp:5", (4,), 3)).splitlines() == [
        "Network",
        "  module      Chain",
        "  parameters  43 in 4 tensors",
        "  head        18 (head.*)",
        "  base        25",
        "  start       drawn by the layers' rules",
    ]
    assert "<th>head</th><td>18 (head.*)</td>" in build("mlp:5", (4,), 3)._repr_html_()
