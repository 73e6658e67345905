"""Transformers under several methods: equal to a plain loop of torch, or refused in one line."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from checks import close
from sequences import WORDS, Transformer, sentences, transformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pyrofl
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.start import first
from pyrofl.models import fedavg, fedhb, fisher, guides, pfedbayes, pfedvem
from pyrofl.nets import Network, lora
from pyrofl.nets.reparametrized import Reparametrized
from pyrofl.tensors import Tensors, generator, role


@pytest.fixture(autouse=True)
def in_double():
    """Compute in float64: words are integers, which have no floating-point type of their own."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network(kind: str, training: bool) -> Network:
    module = transformer().train(training)
    return lora(module, 2, train="last.*") if kind == "lora" else Network(module, pretrained=True)


def plain(net: Network, weights: Tensors) -> nn.Module:
    """Return the module of a network with these weights."""
    module = copy.deepcopy(net.module)
    for name, value in weights.items():
        module.get_parameter(name).data.copy_(value)
    return module


kinds = pytest.mark.parametrize("kind", ["full", "lora"])
modes = pytest.mark.parametrize("training", [True, False])


@kinds
@modes
def test_fedavg_of_one_client_is_a_loop_of_torch(kind, training):
    data, net = sentences(1), network(kind, training)
    x, y = data.x[data.train[0]], data.y[data.train[0]]
    method = fedavg.build(net, epochs=4, batch=None, lr=0.1, momentum=0.9)
    module = plain(net, role("w", first(method, data, 0).server))
    run = pyrofl.fit(method, data, 2, progress=False)
    for _ in range(2):
        moving = [p for p in module.parameters() if p.requires_grad]
        optim = torch.optim.SGD(moving, lr=0.1, momentum=0.9)
        for _ in range(4):
            optim.zero_grad()
            cross_entropy(module(x), y).backward()
            optim.step()
    for name, value in role("w", run.state.server).items():
        close(value, module.get_parameter(name).detach(), 1e-12)
    rows = data.test[0]
    with torch.no_grad():  # in evaluation mode by torch's fused layers
        expected = cross_entropy(module.eval()(data.x[rows]), data.y[rows])
    assert run.evaluate().values["nll"][0] == pytest.approx(float(expected), abs=1e-6)


@kinds
def test_pfedvem_of_one_client_is_a_loop_of_torch(kind):
    """The head descends on the sum of losses and of ||mu - w||^2 / 2, then the base on the mean."""
    data, net = sentences(1), network(kind, True)
    head = "*lora_*" if kind == "lora" else "last.2.*"
    x, y = data.x[data.train[0]], data.y[data.train[0]]
    options = {"head_epochs": 3, "base_epochs": 3, "batch": None, "lr_head": 0.01, "lr_base": 0.05}
    method = pfedvem.build(net, head=head, guide=guides.delta, **options)
    server = first(method, data, 0).server
    center = role("loc", server)
    module = plain(net, role("base", server) | center)
    (state,) = federate(method, data, 1)
    heads = [module.get_parameter(n) for n in center]
    base = [module.get_parameter(n) for n in role("base", server)]
    for moving, lr, own in ((heads, 0.01, True), (base, 0.05, False)):
        optim = torch.optim.SGD(moving, lr=lr, momentum=0.9)
        for _ in range(3):
            optim.zero_grad()
            away = sum(((module.get_parameter(n) - v) ** 2).sum() / 2 for n, v in center.items())
            loss = cross_entropy(module(x), y, reduction="sum" if own else "mean") + own * away
            loss.backward()
            optim.step()
    found = role("base", state.server) | role("loc", state.server)
    for name, value in found.items():
        close(value, module.get_parameter(name).detach(), 1e-11)


@kinds
@modes
def test_the_fisher_information_is_that_of_jacobians_row_by_row(kind, training):
    data, net = sentences(1), network(kind, training)
    method = fisher.build(net, epochs=2, batch=None, lr=0.05)
    (state,) = federate(method, data, 1)
    message = {n: v[0] for n, v in state.message.items()}
    mean = message["shift"] / message["precision"].clamp(min=1e-300)
    sizes = [shape.numel() for shape in net.shapes.values()]
    at = {n: v.view(s) for (n, s), v in zip(net.shapes.items(), mean.split(sizes), strict=True)}
    # Where a parameter has no information, its value has no influence either.
    module, names = plain(net, {n: v.nan_to_num() for n, v in at.items()}), list(net.shapes)
    expected = torch.zeros(sum(sizes))
    for i in data.train[0]:
        logits = module(data.x[i][None])[0]
        p = logits.softmax(-1).detach()
        for k in range(3):
            parts = torch.autograd.grad(
                logits.log_softmax(-1)[k],
                [module.get_parameter(n) for n in names],
                retain_graph=True,
            )
            expected += p[k] * torch.cat([v.flatten() for v in parts]) ** 2
    close(message["precision"], expected, 1e-9)


def test_draws_of_activations_leave_other_layers_to_draws_of_their_weights():
    net, x = Network(transformer()), sentences().x[:12].view(2, 6, -1)
    noisy, rng = Reparametrized(net, net.shapes), generator(0)
    layers = {n for n in noisy.noise_shapes(x) if noisy.of_rows(n)}
    fed = [f"layers.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert layers == {*fed, "last.2"}

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    weights = {n: 0.3 * draw(2, 1, *s) for n, s in net.shapes.items()}
    variance = {n: 0.01 * draw(2, 1, *s).square() for n, s in net.shapes.items()}
    noise = {
        n: torch.zeros(2, 6, *s) if n in layers else draw(2, 1, *s)
        for n, s in noisy.noise_shapes(x).items()
    }
    moved = {n: v + variance[n].sqrt() * noise.get(n, 0.0) for n, v in weights.items()}
    close(noisy(weights, variance, noise, x), net(moved, x), 1e-10)


@pytest.mark.parametrize("build", [pfedbayes.build, fedhb.build])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bias_of_keys_which_has_no_effect_is_no_reason_to_refuse(build, dtype):
    """Its gradient is 0 up to rounding, which Adam divides by its own size."""
    torch.set_default_dtype(dtype)
    method = build(Network(transformer(), pretrained=True), epochs=1)
    assert pyrofl.fit(method, sentences(2), 1, progress=False).state.number == 1


class Pooled(nn.Module):
    """Sequences of words, in which word 0 is padding."""

    def __init__(self, batch_first: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=batch_first)
        self.layers, self.last = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.layers.layers[0].self_attn.batch_first:
            return self.last(self.layers(self.words(x)).mean(1))
        h = self.layers(self.words(x), src_key_padding_mask=x == 0)
        return self.last((h * (x != 0)[..., None]).sum(1))


class Choosing(Transformer):
    """Transformer whose layers depend on the values of rows, as torch.vmap cannot have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else self.last(self.words(x).mean(1))


@modes
def test_padded_words_are_masked(training):
    """In evaluation mode torch makes nested tensors of them, which torch.vmap does not have."""
    module = Pooled().train(training)
    net, x = Network(module, pretrained=True), sentences().x[:12].view(2, 6, -1)
    start = net.init(generator(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested tensors
        expected = module(x.flatten(0, 1)).unflatten(0, (2, 6))
        found = net(start, x)
        apart = net({n: v.expand(2, 1, *v.shape) for n, v in start.items()}, x)
    close(found, expected.detach(), 1e-9)
    close(apart, expected.detach(), 1e-9)


REFUSED = {
    "words first": (lambda: Pooled(batch_first=False), "attention with batch_first=True"),
    "rows that choose": (
        Choosing,
        r"function of Choosing has a branch that depends on .+ torch\.where",
    ),
    "dropout": (lambda: Pooled(dropout=0.1), r"'layers.layers.0.self_attn' .+ 0.1, to 0"),
    "dropout in evaluation mode": (lambda: Pooled(dropout=0.1).eval(), "set its dropout, 0.1, to"),
    "statistics": (
        lambda: nn.Sequential(nn.Embedding(WORDS, 8), nn.BatchNorm1d(6)),
        "layer '1' is BatchNorm1d: use GroupNorm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_for_each_client_is_refused_in_one_line(case):
    module, reason = REFUSED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of words first
        with pytest.raises(ValueError, match=reason) as told:
            pyrofl.fit(fedavg.build(Network(module())), sentences(), 1, progress=False)
    assert "\n" not in str(told.value)
