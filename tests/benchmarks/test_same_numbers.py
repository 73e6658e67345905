"""The code that the library is timed against computes the same numbers.

In float64, with the same noise and order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import bayesian_floors
import floors
import good_loop
import method_loops
import proximal_loop
import pytest
import research_loop
import torch
from cases import start
from torch import Tensor

from pyrofl import nets
from pyrofl.data import Federation
from pyrofl.data.loaders import datasets
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import everyone
from pyrofl.inference.training import noise
from pyrofl.models import (
    apfl,
    ditto,
    fedavg,
    fedem,
    fedpop,
    fedprox,
    ifca,
    metavd,
    perfedavg,
    pfedbayes,
    pfedme,
    pfedvem,
    pvi,
    scaffold,
)
from pyrofl.partitions import federations
from pyrofl.tensors import Tensors, generator, role

ROUNDS, CHUNK = 2, 3  # some of four clients are in another chunk, and have fewer steps
NOISE = 0.3  # of every draw; mirrored ones have its opposite
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # sums in another order; some hundred steps grow that


@pytest.fixture(scope="module")
def digits() -> Federation:
    found = datasets.per_class(datasets.load("digits"), 12)
    data = federations.split(found, "dirichlet:0.5", clients=4, seed=1)
    return replace(data, x=data.x.double())


@pytest.fixture
def alike(digits, monkeypatch) -> Iterator[None]:
    """Give both sides the same noise, and rows in their order."""

    def full(*shape: int | torch.Size, generator: object = None, device: object = None) -> Tensor:
        return torch.full(shape if isinstance(shape[0], int) else shape[0], NOISE)

    def normals(generators: list[object], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full((len(generators), *shape), NOISE, dtype=dtype)

    monkeypatch.setattr(noise, "_normals", normals)
    monkeypatch.setattr(noise, "_draw_normals", lambda values, _: values.fill(NOISE))
    monkeypatch.setattr(torch, "randn", full)
    monkeypatch.setattr(torch, "randn_like", lambda v: torch.full_like(v, NOISE))
    monkeypatch.setattr(torch, "randperm", lambda n, generator=None, device=None: torch.arange(n))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def net() -> nets.Network:
    return nets.build("mlp:100", (64,), 10)


def ours(method: Method, data: Federation, server: Tensors | None = None) -> Tensors:
    server = server or method.init(generator(0), data.clients)
    *_, last = federate(method, data, ROUNDS, server_state=server, check=False)
    return {**last.server, **{f"private/{n}": v for n, v in last.client_states.items()}}


def assert_same(found: list[Tensor], known: list[Tensor]) -> None:
    for mine, other in zip(found, known, strict=True):
        torch.testing.assert_close(mine, other.detach(), **EXACT)


def last(rounds: Iterator[object]) -> object:
    *_, found = islice(rounds, ROUNDS)
    return found


def test_fedavg(digits, alike):
    found = ours(fedavg.build(net(), lr=0.1), digits)
    weights = start(digits)
    module = research_loop.fedavg(digits, net().init_module(generator(0)), epochs=5, lr=0.1)
    for others in (
        last(good_loop.fedavg(digits, weights, everyone, lr=0.1)),
        last(floors.fedavg(digits, weights, CHUNK, epochs=5, lr=0.1)),
        list(last(module).parameters()),
    ):
        assert_same(list(role("w", found).values()), others)


def test_pfedvem(digits, alike):
    weights = w1, b1, w2, b2 = start(digits)
    names = "base/fc1.weight", "base/fc1.bias", "loc/head.weight", "loc/head.bias"
    begin = dict(zip(names, weights, strict=True))
    found = ours(pfedvem.build(net(), lr_base=0.01, lr_head=0.01), digits, begin)
    mine = [found[n] for n in names]
    head = torch.cat([mine[2], mine[3][:, None]], 1)

    (*base, center), taus = last(good_loop.pfedvem(digits, weights, everyone, lr=0.01))
    assert_same([*mine[:2], head, found["private/tau"]], [*base, center, taus])
    assert_same(mine, last(floors.pfedvem(digits, weights, CHUNK, share=2.0, lr=0.01)))

    module = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU())
    module.load_state_dict({"0.weight": w1, "0.bias": b1})
    rounds = research_loop.pfedvem(digits, module, [w2, b2], share=2.0, lr=0.01)
    models = last(rounds)
    assert_same(mine[:2], list(module.parameters()))
    assert_same(list(found["private/mu/head.weight"]), [model.mean[0] for model in models])


PLAIN = {"epochs": 1, "batch": 10, "lr": 0.1, "momentum": 0.0}
LOOPS = {
    "fedprox": (lambda n: fedprox.build(n, mu=0.5, **PLAIN), proximal_loop.fedprox, (0.5,)),
    "ditto": (lambda n: ditto.build(n, strength=0.5, **PLAIN), proximal_loop.ditto, (0.5,)),
    "pfedme": (
        lambda n: pfedme.build(n, strength=5.0, lr_center=0.05, **PLAIN),
        proximal_loop.pfedme,
        (0.05, 5.0, 5),
    ),
    "apfl": (lambda n: apfl.build(n, lr_alpha=0.3, **PLAIN), proximal_loop.apfl, (0.5, 0.3)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_proximal(digits, alike, name):
    build, loop, settings = LOOPS[name]
    found = ours(build(net()), digits)
    known = last(loop(digits, start(digits), 10, 0.1, *settings))
    assert_same(list(role("w", found).values()), known)


@pytest.mark.parametrize(("build", "loop"), [(scaffold, "scaffold"), (perfedavg, "perfedavg")])
def test_one_model(digits, alike, build, loop):
    found = ours(build.build(net(), lr=0.1), digits)
    known = last(getattr(method_loops, loop)(digits, start(digits), lr=0.1))
    assert_same(list(role("w", found).values()), known)


@pytest.mark.parametrize(("method", "prefix"), [(ifca, "cluster/w"), (fedem, "component")])
def test_several_models(digits, alike, method, prefix):
    built = method.build(net())
    begin = role(prefix, built.init(generator(0), 4))
    starts = [list(some) for some in zip(*(v.unbind() for v in begin.values()), strict=True)]
    known = last(getattr(method_loops, method.__name__.split(".")[-1])(digits, starts))
    if method is ifca:
        known = [torch.stack(each) for each in zip(*known, strict=True)]
    assert_same(list(role(prefix, ours(built, digits)).values()), known)


# Adam magnifies what rounding leaves of a zero gradient, some million times in each later step.
@pytest.mark.parametrize(("epochs", "atol"), [(1, EXACT["atol"]), (2, 1e-5)])
def test_pvi_of_outputs(digits, alike, epochs, atol):
    found = ours(pvi.build(net(), epochs=epochs, damping=0.25, warm_start=0), digits)
    known = last(method_loops.pvi(digits, start(digits), epochs=epochs, damping=0.25))
    mean = found["shift"] / found["precision"]
    torch.testing.assert_close(mean, known.detach(), rtol=EXACT["rtol"], atol=atol)


def test_metavd(digits, alike):
    built = metavd.build(net())
    begin = built.init(generator(0), 4)
    psi, table = list(role("server/psi", begin).values()), begin["server/embedding"]
    known = last(method_loops.metavd(digits, list(role("loc", begin).values()), psi, table))
    assert_same(list(role("loc", ours(built, digits, begin)).values()), known)


@pytest.mark.parametrize("chunk_size", [1, CHUNK])
def test_pvi(digits, alike, chunk_size):
    found = ours(pvi.build(net(), epochs=3, damping=0.25, sampling="weights"), digits)
    known = last(bayesian_floors.pvi(digits, start(digits), chunk_size, epochs=3, damping=0.25))
    assert_same([found["shift"] / found["precision"]], [known])


@pytest.mark.parametrize("chunk_size", [1, CHUNK])
def test_pfedbayes(digits, alike, chunk_size):
    found = ours(pfedbayes.build(net(), epochs=1, batch=10), digits)
    known = last(bayesian_floors.pfedbayes(digits, start(digits), chunk_size, epochs=1, batch=10))
    assert_same([v for n, v in found.items() if "private" not in n], known)


@pytest.mark.parametrize("chunk_size", [1, CHUNK])
def test_fedpop(digits, alike, chunk_size):
    found = ours(fedpop.build(net(), burn_in=1, epochs=2), digits)
    known = last(bayesian_floors.fedpop(digits, start(digits), chunk_size, burn_in=1, epochs=2))
    assert_same([*role("base", found).values(), *role("loc", found).values()], known)


@pytest.mark.parametrize("spec", ["cnn-pfedvem", "resnet20"])
def test_images(spec):
    g, rows = generator(0), torch.arange(12)
    x, y = torch.rand(12, 3, 16, 16, generator=g), rows % 3
    parts = tuple(rows.split([3, 4, 5]))
    data = Federation(x, y, parts, parts, classes=("a", "b", "c"))
    net = nets.build(spec, (3, 16, 16), 3)
    method = fedavg.build(net, epochs=1, batch=None, lr=0.1)  # so that no order of rows differs
    server = {f"w/{n}": v for n, v in net.init(generator(0)).items()}
    found = ours(method, data, server)
    known = last(good_loop.images(data, net.init_module(generator(0)), batch=12, lr=0.1))
    for mine, other in zip(role("w", found).values(), known, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_pyro_svi_learns_on_every_client():
    data = federations.split(datasets.load("digits"), "slices:5", 8, test="same_classes")
    data = replace(data, x=data.x.flatten(1))
    *_, weight = islice(research_loop.svi(data, steps=20, lr=0.5, scale=0.05), 5)
    rows = data.pooled_test
    assert rows is not None
    right = ((data.x[rows] @ weight.T).argmax(1) == data.y[rows]).float().mean()
    assert right > 0.7
