"""Local reparametrization against draws of the weights and against its formula."""

from __future__ import annotations

import pytest
import torch
from checks import close
from torch import Tensor, nn

from pyrofl.nets import Network, build
from pyrofl.nets.reparametrized import Reparametrized
from pyrofl.tensors import Tensors, generator


def setting(net: Network, names: list[str], shape: tuple[int, ...]) -> tuple[Tensors, ...]:
    """Return means and variances of two clients, and their three rows."""
    rng = generator(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    weights = {n: 0.5 * draw(2, 1, *s) for n, s in net.shapes.items()}
    variance = {n: 0.1 * draw(2, 1, *net.shapes[n]).square() for n in names}
    return weights, variance, {"x": draw(2, 3, *shape)}


def test_a_linear_layer_has_the_mean_and_variance_of_its_weights():
    net = Network(nn.Sequential(nn.Linear(4, 3)))
    weights, variance, rows = setting(net, ["0.weight"], (4,))
    x, noisy = rows["x"], Reparametrized(net, ["0.weight"])
    one, none = torch.ones(2, 3, 3).double(), torch.zeros(2, 3, 3).double()
    mean = torch.einsum("cbi,coi->cbo", x, weights["0.weight"][:, 0]) + weights["0.bias"]
    spread = torch.einsum("cbi,coi->cbo", x.square(), variance["0.weight"][:, 0])
    close(noisy(weights, variance, {"0": none}, x), mean)
    close(noisy(weights, variance, {"0": one}, x), mean + spread.sqrt(), 1e-11)


CASES = {
    "linear": (build("mlp:5,4", (6,), 3), ["fc2.weight"], (6,)),
    "convolution": (build("cnn-metavd:2", (1, 8, 8), 3), ["conv2.weight"], (1, 8, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_of_activations_agree_with_draws_of_weights_in_every_row(case):
    net, names, shape = CASES[case]
    weights, variance, rows = setting(net, names, shape)
    x, draws, rng = rows["x"], 400, generator(2)
    noisy, name = Reparametrized(net, names), names[0]
    # Look at the random layer itself, so that mean and variance have closed forms to meet.
    hook_at = net.module.get_submodule(name.rpartition(".")[0])
    seen: list[Tensor] = []
    handle = hook_at.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    for c in range(2):
        own = {n: v[c, 0] for n, v in weights.items()}
        for _ in range(draws):
            eps = torch.randn(net.shapes[name], generator=rng, dtype=torch.float64)
            net.apply(own | {name: own[name] + variance[name][c, 0].sqrt() * eps}, x[c])
    handle.remove()
    by_weights = torch.stack(seen).unflatten(0, (2, draws)).transpose(0, 1)

    seen.clear()
    layer = noisy.module.get_submodule(name.rpartition(".")[0])
    path = name.rpartition(".")[0]
    shape_ = noisy.noise_shapes(x)[path]
    layer.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    for c in range(2):
        own = {n: v[c, 0] for n, v in weights.items()}
        spread = {f"{name}_variance": variance[name][c, 0]}
        for _ in range(draws):
            eps = torch.randn(3, *shape_, generator=rng, dtype=torch.float64)
            noisy._apply(own | spread, {}, {path: eps}, x[c])
    by_activations = torch.stack(seen).unflatten(0, (2, draws)).transpose(0, 1)
    assert by_weights.shape == by_activations.shape
    for statistic, error in ((torch.mean, 1.0), (torch.var, 2**0.5)):
        a, b = (statistic(v, 0) for v in (by_weights, by_activations))
        scale = by_weights.std(0) if error == 1 else by_weights.var(0)
        far = (a - b).abs() / (error * scale * (2 / draws) ** 0.5 + 1e-12)
        assert float(far.quantile(0.99)) < 3.5
        # Absolute normals have mean 0.8 and standard deviation 0.6; rows share the weights' draws.
        assert float(far.mean()) < 0.8 + 4 * 0.6 / (far.numel() / x.shape[1]) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_clients_and_draws_run_side_by_side(case):
    net, names, shape = CASES[case]
    weights, variance, rows = setting(net, names, shape)
    noisy, x, rng = Reparametrized(net, names), rows["x"], generator(3)
    path = names[0].rpartition(".")[0]
    size = noisy.noise_shapes(x)[path]
    eps = torch.randn(5, 2, 3, *size, generator=rng, dtype=torch.float64)
    together = noisy(weights, variance, {path: eps}, x)
    assert together.shape == (5, 2, 3, 3)
    for k in range(5):
        close(noisy(weights, variance, {path: eps[k]}, x), together[k])
    one = [
        noisy(
            *({n: v[c : c + 1] for n, v in part.items()} for part in (weights, variance)),
            {path: eps[:, c : c + 1]},
            x[c : c + 1],
        )
        for c in range(2)
    ]
    close(torch.cat(one, 1), together)
    close(noisy(weights, variance, {path: 0 * eps[0]}, x), net(weights, x))


@pytest.mark.parametrize("names", ["*", "fc1.weight", "fc2.bias head.*"])
@pytest.mark.parametrize("draws", [(), (5,)])
def test_a_chain_of_linear_layers_is_that_of_vmap(names, draws, monkeypatch):
    net = build("mlp:130,4", (130,), 3)  # one weight is large enough for `Products`
    names = list(net.select_params(names))
    weights, variance, rows = setting(net, names, (130,))
    noisy, rng = Reparametrized(net, names), generator(3)
    shapes = noisy.noise_shapes(rows["x"])
    noise = {
        n: torch.randn(*draws, 2, 3, *shape, generator=rng, dtype=torch.float64)
        for n, shape in shapes.items()
    }
    leaves = [v.requires_grad_() for v in (*weights.values(), *variance.values())]
    assert noisy._is_chain(shapes)
    found = []
    for _ in range(2):
        outputs = noisy(weights, variance, noise, rows["x"])
        slopes = torch.autograd.grad(outputs.square().sum(), leaves)
        found.append((outputs.detach(), *slopes))
        monkeypatch.setattr(Reparametrized, "_is_chain", lambda *_: False)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_all_inputs_zero_have_a_finite_slope():
    net = Network(nn.Sequential(nn.Linear(2, 2)))
    weights, variance, rows = setting(net, ["0.weight"], (2,))
    spread = variance["0.weight"].requires_grad_()
    noise = {"0": torch.ones(2, 3, 2).double()}
    out = Reparametrized(net, ["0.weight"])(
        weights, {"0.weight": spread}, noise, torch.zeros_like(rows["x"])
    )
    (slope,) = torch.autograd.grad(out.sum(), spread)
    assert bool((slope == 0).all())


class Twice(nn.Module):
    """Module that runs one layer twice, then another one."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.again(x)))))


OTHERS = {
    "norm": (nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)), {"0", "2"}),
    "twice": (Twice(), {"last"}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_parameters_of_other_layers_are_drawn_themselves(case):
    module, outputs = OTHERS[case]
    net = Network(module)
    noisy = Reparametrized(net, net.shapes)
    weights, variance, rows = setting(net, list(net.shapes), (4,))
    shapes = noisy.noise_shapes(rows["x"])
    assert {n for n in shapes if noisy.of_rows(n)} == outputs
    others = {n for n in shapes if not noisy.of_rows(n)}
    assert others == {n for n in net.shapes if n.rpartition(".")[0] not in outputs}
    rng = generator(5)
    noise = {
        n: torch.randn(
            6, 2, 3 if noisy.of_rows(n) else 1, *shape, generator=rng, dtype=torch.float64
        )
        for n, shape in shapes.items()
    }
    found = noisy(weights, variance, noise, rows["x"])
    # Without noise of outputs it is the network with drawn parameters.
    quiet = {n: v * (not noisy.of_rows(n)) for n, v in noise.items()}
    drawn = weights | {n: weights[n] + variance[n].sqrt() * noise[n] for n in others}
    close(noisy(weights, variance, quiet, rows["x"]), net(drawn, rows["x"]), 1e-5)
    assert found.shape == (6, 2, 3, 2)
    for k in range(6):
        close(noisy(weights, variance, {n: v[k] for n, v in noise.items()}, rows["x"]), found[k])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(3, 2), (3,)), (nn.Conv2d(2, 3, 2), (2, 4, 4))],
    ids=["linear", "conv"],
)
@pytest.mark.parametrize("names", ["weight bias", "bias"])
def test_a_bias_adds_its_own_variance(layer, shape, names):
    net = Network(nn.Sequential(layer))
    random = [f"0.{n}" for n in names.split()]
    weights, variance, rows = setting(net, random, shape)
    noisy, x = Reparametrized(net, random), rows["x"]
    one = torch.ones(2, 3, *noisy.noise_shapes(x)["0"]).double()
    mean = noisy(weights, variance, {"0": 0 * one}, x)
    # The variance of an output is linear in those of the parameters.
    all_of = {n: variance.get(n, torch.zeros_like(v)) for n, v in weights.items()}
    spread = Network(nn.Sequential(layer))(all_of, x.square())
    close(noisy(weights, variance, {"0": one}, x), mean + spread.sqrt(), 1e-9)


def test_the_network_itself_is_not_changed():
    net = build("mlp:5", (4,), 3)
    before = set(dict(net.module.named_buffers()))
    Reparametrized(net, ["fc1.weight"])
    assert set(dict(net.module.named_buffers())) == before
    assert not any(m._forward_hooks for m in net.module.modules())
