"""Low-rank adapters: exact outputs, frozen weights, and methods that train them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping

import pytest
import torch
import toys
from sequences import LENGTH, sentences, transformer
from torch import Tensor, nn

import pyrofl
from pyrofl.models import fedavg, fedper, local, pfedbayes, pfedvem, pvi
from pyrofl.nets import Network, lora
from pyrofl.tensors import generator, role


def moved(net: Network, clients: int) -> dict[str, Tensor]:
    """Return weights of clients [C, 1, *p] away from their start."""
    g = generator(5)
    return {
        n: 0.3 * torch.randn(clients, 1, *v.shape, generator=g, dtype=v.dtype) + v
        for n, v in net.init(generator(0)).items()
    }


def by_hand(module: nn.Module, weights: Mapping[str, Tensor], scale: float = 1.0) -> nn.Module:
    """Return a plain module with the sums of weights and updates."""
    made = copy.deepcopy(module)
    for name, value in made.named_parameters():
        layer = name.rpartition(".")[0]
        if name in weights:
            value.data.copy_(weights[name])
        elif name.endswith(("weight", "in_proj_weight")) and f"{layer}.lora_A" in weights:
            value.data += scale * weights[f"{layer}.lora_B"] @ weights[f"{layer}.lora_A"]
    return made


@pytest.mark.parametrize("training", [True, False])
def test_outputs_are_those_of_the_sums_of_weights(training):
    module, x = transformer().train(training), sentences().x[:30].view(3, 10, LENGTH)
    net = lora(module, 2, alpha=3.0, train="last.2.*")
    assert net.module.training is training
    start = net.init(generator(0))
    torch.testing.assert_close(net(start, x), module(x.flatten(0, 1)).unflatten(0, (3, 10)))
    weights = moved(net, 3)
    found = net(weights, x)
    for j in range(3):
        own = {n: v[j, 0] for n, v in weights.items()}
        expected = by_hand(module, own, 1.5)(x[j])
        torch.testing.assert_close(found[j], expected)
        with torch.no_grad():  # also by torch's fused layers, which read the weights
            torch.testing.assert_close(net.apply(own, x[j]), expected)


def test_adapters_are_all_that_trains():
    net = lora(
        transformer(), 2, layers="layers.layers.1.* layers.layers.0.self_attn", train="last.2.*"
    )
    one = "layers.layers.1."
    names = ["layers.layers.0.self_attn", f"{one}self_attn", f"{one}self_attn.out_proj"]
    names += [f"{one}linear1", f"{one}linear2"]
    expected = {f"{n}.lora_{part}" for n in names for part in "AB"} | {
        "last.2.weight",
        "last.2.bias",
    }
    assert net.shapes.keys() == expected
    assert tuple(net.shapes[f"{one}self_attn.lora_B"]) == (24, 2)
    assert net.dims(f"{one}linear1.lora_A")[1] == "layers_layers_1_linear1_in"
    assert net.module.state_dict().keys() >= transformer().state_dict().keys()
    starts = [net.init(generator(seed)) for seed in (0, 1)]
    for name in expected:
        same = torch.equal(starts[0][name], starts[1][name])
        assert same is not name.endswith("lora_A")
        if name.endswith("lora_B"):
            assert not starts[0][name].any()
    assert torch.equal(starts[0]["last.2.weight"], transformer().last[2].weight)
    again = pickle.loads(pickle.dumps(net))
    torch.testing.assert_close(again.init(generator(0)), starts[0])


def test_frozen_weights_are_not_sent_and_do_not_change():
    data, module = sentences(), transformer()
    net = lora(module, 1, head="*lora_*")
    before = {n: p.clone() for n, p in net.module.named_parameters() if not p.requires_grad}
    sizes = {}
    for name, used in (("lora", net), ("full", Network(module, pretrained=True))):
        run = pyrofl.fit(fedavg.build(used, lr=0.05), data, 1, progress=False)
        sizes[name] = int(run.state.bytes_up[0])
    assert sizes["lora"] == 4 * sum(shape.numel() for shape in net.shapes.values())
    assert sizes["lora"] < sizes["full"] / 2
    assert all(torch.equal(net.module.state_dict()[n], v) for n, v in before.items())


@pytest.mark.parametrize("build", [fedavg.build, local.build, pvi.build, pfedbayes.build])
def test_methods_train_the_adapters(build):
    run = pyrofl.fit(build(lora(transformer(), 2, train="last.*")), sentences(), 2, progress=False)
    assert run.evaluate().values["nll"].isfinite().all()


@pytest.mark.parametrize("build", [fedper.build, pfedvem.build])
def test_adapters_may_be_personal(build):
    """The shared base is the last layer, which is all that is sent of the network."""
    net = lora(transformer(), 2, train="last.2.*", head="*lora_*")
    run = pyrofl.fit(build(net), sentences(), 2, progress=False)
    shared = {n.partition("/")[2] for n in run.state.server}
    assert {"last.2.weight", "last.2.bias"} <= shared
    personal = [v for n, v in run.state.client_states.items() if n.endswith("linear1.lora_B")]
    assert personal
    assert all(not torch.equal(v[0], v[1]) for v in personal)
    if build is pfedvem.build:
        draws = run.posterior(5)
        name = next(n for n in draws if n.endswith("linear1.lora_B"))
        assert draws[name].std(0).min() > 0


def test_pfedvem_starts_at_the_trained_network():
    """Its common head is otherwise a standard normal draw: adapters would be no small update."""
    module, data = transformer(), sentences()
    x, g = data.x[:10], generator(0)
    for net in (lora(module, 2, head="*lora_*"), Network(module, pretrained=True)):
        server = pfedvem.build(net).init(g, 4)
        start = role("base", server) | role("loc", server)
        own = {n: v.double() for n, v in start.items()}
        torch.testing.assert_close(net.apply(own, x), module(x))
    drawn = pfedvem.build(Network(module)).init(g, 4)["loc/last.2.weight"]
    assert not torch.equal(drawn.double(), module.last[2].weight)


def test_a_layer_that_runs_twice_has_one_adapter():
    first = nn.Linear(toys.FEATURES, toys.FEATURES)
    module = nn.Sequential(first, nn.Tanh(), first, nn.Linear(toys.FEATURES, toys.CLASSES)).double()
    net = lora(module, 2)
    assert list(net.shapes) == ["0.lora_A", "0.lora_B", "3.lora_A", "3.lora_B"]
    weights, x = moved(net, 1), toys.blobs().x[:4]
    expected = by_hand(module, {n: v[0, 0] for n, v in weights.items()})(x)
    torch.testing.assert_close(net(weights, x[None])[0], expected)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"rank": 0}, "rank is 0; expected a whole number of at least 1"),
        (
            {"layers": "fc*"},
            r"no linear or attention layer matches 'fc\*'; expected some of",
        ),
        ({"train": "fc*"}, r"no parameter matches train='fc\*'; expected some of words.weight"),
        ({"alpha": 0.0}, "alpha is 0.0; expected a number above 0"),
    ],
)
def test_bad_arguments_are_refused(how, error):
    with pytest.raises(ValueError, match=error):
        lora(transformer(), **{"rank": 2} | how)


def test_layers_that_adapters_do_not_support_are_refused():
    hooked = nn.Sequential(nn.Linear(3, 2))
    hooked[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ValueError, match="layer '0' has hooks, which adapters do not support"):
        lora(hooked, 1)
    with pytest.raises(ValueError, match="layer '0' has kdim or vdim"):
        lora(nn.Sequential(nn.MultiheadAttention(4, 2, kdim=3)), 1)
    with pytest.raises(ValueError, match="expected some of a module with such layers"):
        lora(nn.Conv2d(1, 2, 3), 1)


def test_some_parameters_may_start_at_their_own_values():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    net = Network(module, pretrained="2.*")
    start = net.init(generator(0))
    assert torch.equal(start["2.weight"], module[2].weight)
    assert not torch.equal(start["0.weight"], module[0].weight)
    assert "the module's own values of 2.*; others drawn" in repr(net)
    with pytest.raises(ValueError, match=r"no parameter matches 'fc\*'"):
        Network(module, pretrained="fc*")


def test_modules_of_peft_start_at_the_frozen_module():
    peft = pytest.importorskip("peft")
    module, data = transformer(), sentences()
    how = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["linear1", "linear2"])
    adapted = peft.get_peft_model(copy.deepcopy(module), how).double()
    net = Network(adapted)
    assert all("lora_" in n for n in net.shapes)
    x = data.x[:10].view(2, 5, LENGTH)
    start = net.init(generator(0))
    expected = module(x.flatten(0, 1)).unflatten(0, (2, 5))
    torch.testing.assert_close(net(start, x), expected)
