"""Modules that cannot run for many clients at once are refused in one line, at once or when run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import pyrofl
from pyrofl import Federation, Network, nets
from pyrofl.models import fedavg, metavd, pvi

Forward = Callable[[Any, Tensor], Tensor]


class Own(nn.Module):
    """Linear layer with a forward function of the test."""

    def __init__(self, forward: Forward, **attributes: Any) -> None:
        super().__init__()
        self.head, self.run = nn.Linear(3, 2), forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def federation(dtype: torch.dtype = torch.float32) -> Federation:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    y, rows = (x[:, 0] > 0).long(), torch.arange(24)
    x = x if dtype.is_floating_point else (10 * x.abs()).to(dtype)
    parts = [rows[:12], rows[12:]]
    return Federation(x, y, parts, [rows[:3], rows[12:15]], classes=("no", "yes"))


def fitted(module: nn.Module, data: Federation | None = None) -> Any:
    method = fedavg.build(Network(module), epochs=1)
    return pyrofl.fit(method, data or federation(), 1, progress=False)


def storing(module: Any, x: Tensor) -> Tensor:
    module.mean = 0.9 * module.mean + 0.1 * x.detach().mean(0)
    return module.head(x - module.mean)


def counting(module: Any, x: Tensor) -> Tensor:
    module.count.add_(1)
    return module.head(x) / module.count


def appending(module: Any, x: Tensor) -> Tensor:
    module.seen.append(x)
    return module.head(x)


def keeping(module: Any, x: Tensor) -> Tensor:
    module.features = x
    return module.head(x)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2))
    module.seen = []
    module.register_forward_hook(lambda layer, inputs, output: module.seen.append(output))
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (
        lambda: Own(lambda m, x: m.head(functional.dropout(x, 0.5, m.training))),
        "forward function of Own draws random numbers, as functional.dropout does; leave that out",
    ),
    "noise": (
        lambda: Own(lambda m, x: m.head(x + torch.randn_like(x))),
        "forward function of Own draws random numbers",
    ),
    "random slopes": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.RReLU()),
        "layer '1' is RReLU: it draws random slopes; use LeakyReLU",
    ),
    "running mean": (
        lambda: Own(storing, mean=torch.zeros(3)),
        r"Own stores or changes tensors in self\.mean; a network runs for several clients at once",
    ),
    "counter": (
        lambda: Own(counting, count=torch.zeros(())),
        r"Own stores or changes tensors in self\.count; ",
    ),
    "changed buffer": (
        lambda: Own(lambda m, x: m.head(x - m.mean.add_(x.mean(0))), mean=torch.zeros(3)),
        "Own changes a tensor in place that is the same for all rows, such as a buffer; .*GroupN",
    ),
    "list": (
        lambda: Own(appending, seen=[]),
        r"stores or changes tensors in self\.seen; .* nothing",
    ),
    "features": (lambda: Own(keeping), r"stores or changes tensors in self\.features; "),
    "hook": (hooked, "a function or hook of the method stores a tensor from inside a ne"),
    "item": (
        lambda: Own(lambda m, x: m.head(x) * x.abs().max().item()),
        r"Own reads a number of a tensor by \.item\(\); compute with the tensor instead",
    ),
    "branch": (
        lambda: Own(lambda m, x: m.head(x) if x.sum() > 0 else m.head(-x)),
        r"Own has a branch that depends on a tensor's values; use torch\.where instead",
    ),
    "spectral norm": (
        lambda: Own(lambda m, x: m.other(x), other=parametrizations.spectral_norm(nn.Linear(3, 2))),
        r"layer 'other\..*' is _SpectralNorm: spectral_norm changes its vectors at every call",
    ),
    "spectral norm of a frozen state": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 2))).eval(),
        "spectral_norm changes its vectors at every call, .*; use parametrizations.weight_norm",
    ),
    "old spectral norm": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2))),
        "layer '0' is Linear: spectral_norm changes its vectors",
    ),
    "tuple": (
        lambda: Own(lambda m, x: (m.head(x), x)),
        r"the forward function of Own returns a tuple; expected one tensor of outputs",
    ),
    "meta": (
        lambda: nn.Sequential(nn.Linear(3, 2, device="meta")),
        "layer '0' is Linear: its parameters are on the meta device, without values; build it on",
    ),
    "complex": (
        lambda: nn.Sequential(nn.Linear(3, 2, dtype=torch.cfloat)),
        "layer '0' is Linear: its parameters are complex; use a real one for each part",
    ),
    "index": (
        lambda: Own(lambda m, x: m.other(x.long()).mean(-2), other=nn.Embedding(1, 2)),
        "Own looks up a row that an embedding does not have; expected integers x from 0",
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(40, 2), nn.Flatten(), nn.Linear(6, 2)),
        r"Embedding looks up rows in an embedding; it needs rows x of integers; pass x\.long\(\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_modules_that_cannot_run_are_refused_in_one_line(case: str) -> None:
    make, told = REFUSED[case]
    with pytest.raises(ValueError, match=told) as caught:
        fitted(make())
    line = str(caught.value)
    assert "\n" not in line
    assert "vmap: " not in line


@pytest.mark.parametrize("case", ["dropout", "running mean", "counter", "features", "branch"])
def test_they_are_refused_where_outputs_are_drawn(case: str) -> None:
    make, told = REFUSED[case]
    method = pvi.build(Network(make()), epochs=1)
    with pytest.raises(ValueError, match=told.replace("Own ", ".*")):
        pyrofl.fit(method, federation(), 1, progress=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_old_weight_norm_names_the_new_one() -> None:
    with pytest.raises(ValueError, match=r"layer '0' is Linear: utils\.weight_norm stores tensors"):
        Network(nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2))))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, for weight_norm
@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(lambda m, x: m.head(functional.dropout(x, 0.5, m.training))).eval(),
        lambda: Own(lambda m, x: m.head(functional.dropout(x, 0.0, m.training))),
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))),
        lambda: Own(lambda m, x: m.head(x) * m.scale, scale=torch.ones(2)),
    ],
)
def test_modules_that_only_look_alike_run(make: Callable[[], nn.Module]) -> None:
    assert fitted(make()).state.number == 1


def test_a_refused_module_is_as_before() -> None:
    net = Network(Own(storing, mean=torch.zeros(3)))
    weights = {n: v[:, None] for n, v in nets_of(net).items()}
    with pytest.raises(ValueError, match=r"self\.mean"):
        net(weights, torch.randn(2, 4, 3))
    assert torch.equal(net.module.mean, torch.zeros(3))
    net.init(torch.Generator())  # copies the module


def nets_of(net: Network) -> dict[str, Tensor]:
    start = net.init(torch.Generator().manual_seed(0))
    return {n: v.expand(2, *v.shape) for n, v in start.items()}


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("build", [fedavg.build, pvi.build, metavd.build])
def test_integer_rows_are_refused(build: Callable[..., Any], dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    told = rf"^rows x are {kind}, and the first layer is Linear; expected .*: x\.float\(\), or"
    with pytest.raises(ValueError, match=told):
        pyrofl.fit(build(nets.build("mlp:4", (3,), 2)), federation(dtype), 1, progress=False)


def test_integer_rows_of_a_module_of_ones_own_are_explained() -> None:
    with pytest.raises(ValueError, match=r"multiplies numbers of two types; pass .* x\.float\(\)"):
        fitted(Own(lambda m, x: m.head(x)), federation(torch.int64))
    assert fitted(Own(lambda m, x: m.head(x / 255.0)), federation(torch.uint8)).state.number == 1


def test_embeddings_read_integers() -> None:
    layers = nn.Embedding(60, 2), nn.Flatten(), nn.Linear(6, 2)
    assert fitted(nn.Sequential(*layers), federation(torch.int64)).state.number == 1


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_layers_are_drawn_by_the_generator(norm: Callable[..., nn.Module]) -> None:
    net = Network(nn.Sequential(norm(nn.Linear(3, 2)), nn.Linear(2, 2)))
    one, same, other = (net.init_module(torch.Generator().manual_seed(k)) for k in (0, 0, 1))
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.allclose(one[0].weight, other[0].weight)
    if norm is parametrizations.weight_norm:  # the rule's own weights, in another form
        plain = Network(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
        drawn = plain.init(torch.Generator().manual_seed(0))["0.weight"]
        torch.testing.assert_close(one[0].weight, drawn)
    else:
        torch.testing.assert_close(one[0].weight @ one[0].weight.T, torch.eye(2))


def test_rows_without_columns_are_refused() -> None:
    net = Network(nn.Linear(1, 2))
    with pytest.raises(ValueError, match=r"axes \[3, 4\], clients and rows, and no columns; exp"):
        net({n: torch.zeros(shape) for n, shape in net.shapes.items()}, torch.zeros(3, 4))
