"""Frozen weights and buffers are saved with a run; other networks and helpers are refused."""

from __future__ import annotations

import operator
import re
from collections import deque
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
import torch
import toys
from torch import Tensor, nn

import pyrofl
from pyrofl.inference.definition import description
from pyrofl.inference.definition.description import clients_part, described
from pyrofl.inference.definition.metadata import Metadata
from pyrofl.inference.definition.method import Method
from pyrofl.inference.fit import fit
from pyrofl.inference.fitted_run import checkpoints
from pyrofl.inference.fitted_run.run import Run
from pyrofl.models import fedavg, pfedvem
from pyrofl.nets.network import Network

SCALE = 1.0
TABLE = np.array([1.0, 2.0])
calls = 0


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Own(nn.Module):
    """A network with all that may differ unnoticed."""

    depth = 1

    def __init__(self, seed: int = 0, scale: float = 1.0, act=torch.relu, buffer: float = 0.5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.frozen = nn.Linear(toys.FEATURES, 8).double().requires_grad_(False)
        self.last = nn.Linear(8, toys.CLASSES).double()
        self.scale, self.act = scale, act
        self.register_buffer("shift", torch.tensor(buffer).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        hidden = self.act(self.frozen(x) * self.scale + self.shift) * self.depth
        return self.last(helper(hidden)) + TABLE[0] * 0.0


@cache
def data() -> pyrofl.Federation:
    return toys.blobs((20, 30, 25), held_out=1)


def method(*args: object, kind=fedavg, **more: object) -> Method:
    return kind.build(Network(Own(*args, **more)))


@pytest.mark.parametrize("kind", [fedavg, pfedvem])
def test_frozen_weights_and_buffers_are_restored(kind, tmp_path):
    run = fit(method(0, kind=kind), data(), 2, progress=False)
    run.save(tmp_path)
    other = method(1, buffer=3.0, kind=kind)
    again = pyrofl.load(tmp_path, method=other, data=data())
    assert torch.equal(predicted(again), predicted(run))
    assert torch.equal(again.evaluate().values["nll"], run.evaluate().values["nll"])
    going = [fit(r.method, data(), 3, resume_from=r, progress=False) for r in (again, run)]
    toys.assert_same_round(going[0].state, going[1].state)


def test_a_state_is_not_used_with_other_frozen_weights():
    one = method(0)
    run = fit(one, data(), 1, progress=False)
    again, told = method(0), "frozen weights or buffers of the method's networks differ from those"
    assert pyrofl.evaluate(again, data(), run.state).values.keys()
    other = method(1)
    for use in (
        lambda: pyrofl.evaluate(other, data(), run.state),
        lambda: pyrofl.posterior(other, data(), run.state, 2),
        lambda: Run(other, data(), run.state).predict(data().x[:2], "client 0", adaptation="none"),
        lambda: fit(other, data(), 2, resume_from=run, progress=False),
        lambda: list(pyrofl.federate(other, data(), 2, resume_from=run.state)),
    ):
        with pytest.raises(ValueError, match=told):
            use()
    trained = fit(method(0), data(), 2, resume_from=run, progress=False)
    assert trained.state.constants == run.state.constants != ""
    assert fit(fedavg.build(toys.net()), data(), 1, progress=False).state.constants == ""


def predicted(run: Run) -> Tensor:
    x: Tensor = run.predict(data().x[:7], run.data.names[0], adaptation="none").mean
    return x


def halved(x: Tensor) -> Tensor:
    return 0.5 * x


class Deeper(Own):
    """Another constant of the class."""

    depth = 2


OTHERS = {
    "scale is '-1.0' and was '1.0'": lambda m: method(scale=-1.0),
    "act is ": lambda m: method(act=torch.tanh),
    "depth is '2' and was '1'": lambda m: m.setattr(Own, "depth", 2) or method(),
    "SCALE is '-1.0'": lambda m: m.setitem(globals(), "SCALE", -1.0) or method(),
    "helper is ": lambda m: m.setitem(globals(), "helper", halved) or method(),
    "TABLE is ": lambda m: m.setitem(globals(), "TABLE", np.array([5.0, 2.0])) or method(),
    "is of another run; now .* is 'Deeper": lambda m: fedavg.build(Network(Deeper())),
}


@pytest.mark.parametrize("told", OTHERS)
def test_another_network_is_refused(told, tmp_path, monkeypatch):
    run = fit(method(), data(), 1, progress=False)
    run.save(tmp_path)
    assert torch.equal(predicted(pyrofl.load(tmp_path, method=method())), predicted(run))
    other = OTHERS[told](monkeypatch)
    before = described(other)
    with pytest.raises(ValueError, match=told) as caught:
        pyrofl.load(tmp_path, method=other, data=data())
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=told):
        checkpoints.load(tmp_path / "checkpoint.safetensors", other, data())
    assert described(other) == before  # nothing was restored


def test_hooks_and_other_frozen_shapes_are_refused(tmp_path):
    fit(method(), data(), 1, progress=False).save(tmp_path)
    hooked = Own()
    hooked.last.register_forward_hook(lambda layer, args, out: -out)
    wider = Own()
    wider.frozen = nn.Linear(toys.FEATURES, 8, bias=False).double().requires_grad_(False)
    for other in (hooked, wider):
        with pytest.raises(ValueError, match="is of another run; now "):
            pyrofl.load(tmp_path, method=fedavg.build(Network(other)))


def test_a_network_that_is_built_in_each_round_is_refused(tmp_path):
    one, seeds = Network(Own()), iter(range(1, 9))
    path = tmp_path / "checkpoint.safetensors"
    checkpoints.save(fit(lambda number: fedavg.build(one), data(), 1, progress=False), path)
    assert checkpoints.load(path, lambda number: fedavg.build(one), data()).state.number == 1
    with pytest.raises(ValueError, match=re.escape("build the network once, outside")):
        checkpoints.load(path, lambda number: method(next(seeds)), data())


def test_sites_with_other_frozen_weights_or_helpers_have_other_methods(monkeypatch):
    one = clients_part(method())
    assert one == clients_part(method())
    assert one != clients_part(method(1))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert one != clients_part(method())


def test_a_network_outside_of_the_library_is_restored_whole(tmp_path, monkeypatch):
    """A program may use a network by a global name: then none of its weights trains."""
    import pyro
    import pyro.distributions as dist

    from pyrofl.models import pvi

    monkeypatch.setitem(globals(), "encoder", nn.Linear(toys.FEATURES, 1).double())

    def program(received, local, batch):
        with batch.clients():
            b = pyro.sample("b", dist.Normal(0.0, 2.0))
            with batch.rows():
                mean = b * encoder(batch.x)[..., 0].detach()  # noqa: F821
                pyro.sample("y", dist.Normal(mean, 1.0), obs=batch.y)

    numbers = pyrofl.Federation(data().x, data().x[:, 0], data().train, data().test)
    run = fit(pvi.hierarchical(program, numbers, shared="b"), numbers, 1, progress=False)
    expected = run.predict(data().x[:5], "client 0").mean
    run.save(tmp_path)
    monkeypatch.setitem(globals(), "encoder", nn.Linear(toys.FEATURES, 1).double())
    again = pyrofl.load(tmp_path, method=pvi.hierarchical(program, numbers, shared="b"))
    assert torch.equal(again.predict(data().x[:5], "client 0").mean, expected)


PROGRAM = """
def made(scale):
    def inner(x):
        '''Say something.'''
        return [f"{y!r} {scale}" for y in range(x)]  # a comment

    return inner
"""
SAME = PROGRAM.replace("something", "else").replace("a comment", "more").replace("(x):", "( x ) :")


def test_functions_are_compared_by_source_under_any_version_of_python(tmp_path):
    def inner_parts(source: str, scale: float = 1.0) -> dict[str, str]:
        path = tmp_path / f"own_{hash(source)}.py"
        path.write_text(source)
        spec = spec_from_file_location("own", path)
        own = module_from_spec(spec)
        spec.loader.exec_module(own)
        found = described(replace(fedavg.build(toys.net()), views={"own": own.made(scale)}))
        return {n: v for n, v in found.items() if n.startswith("views.own")}

    one = inner_parts(PROGRAM)
    # The hash that Python 3.11, 3.12 and 3.13 compute.
    assert one == {
        "views.own": "own.made.<locals>.inner de7b1c2732d4",
        "views.own.scale": "1.0",
    }
    assert inner_parts(SAME) == one
    assert inner_parts(PROGRAM.replace("!r", "")) != one
    assert inner_parts(PROGRAM, 2.0) == one | {"views.own.scale": "2.0"}


def test_lambdas_on_one_line_are_told_apart():
    def text(i: int) -> str:
        some = (lambda x: x, lambda x: -x, lambda x: x)[i]
        return described(replace(fedavg.build(toys.net()), views={"own": some}))["views.own"]

    assert len({text(i) for i in range(3)}) == 3
    assert text(1) == text(1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (range(1), range(4)),
        (slice(0, 1), slice(0, 3)),
        (Fraction(1, 2), Fraction(5)),
        (operator.itemgetter(0), operator.itemgetter(1)),
        (re.compile("a"), re.compile("b")),
        (timedelta(1), timedelta(2)),
        (torch.Tensor.tanh, torch.Tensor.relu),
        (deque([1.0]), deque([2.0])),
    ],
)
def test_values_that_are_made_in_c_are_described_by_what_they_are(one, other):
    def method(value: object) -> Method:
        return replace(fedavg.build(toys.net()), upload=lambda received, local: [value, local][1])

    assert described(method(one)) == described(method(one))
    assert described(method(one)) != described(method(other))


def test_functions_without_source_are_compared_by_names_and_constants():
    def parts(source: str) -> dict[str, str]:
        names: dict[str, object] = {}
        exec(source, names)
        return described(replace(fedavg.build(toys.net()), views={"own": names["f"]}))

    one = parts("def f(x): return x + 1.5")
    assert parts("def f(x): return x + 1.5") == one
    assert parts("def f(x): return x + 2.5") != one
    assert parts("def f(x): return abs(x) + 1.5") != one


def test_methods_that_a_dataclass_makes_are_not_described():
    @dataclass(frozen=True)
    class Statistics:
        scale: float = 1.0

        def __call__(self, received: object, local: object, batch: object) -> dict[str, Tensor]:
            return {}

    found = described(replace(fedavg.build(toys.net()), metadata=Metadata(statistics=Statistics())))
    names = {n for n in found if n.startswith("metadata.statistics.")}
    assert names == {
        "metadata.statistics.scale",
        "metadata.statistics.class",
        "metadata.statistics.class.scale",
        "metadata.statistics.class.__call__",
        "metadata.statistics.class.base.0",
    }


def test_a_fit_hashes_no_source(monkeypatch):
    def refused(code: object) -> str:
        raise AssertionError(code)

    monkeypatch.setattr(description, "_source", refused)
    method = fedavg.build(Network(Own()))
    fit(method, data(), 1, progress=False)
    with pytest.raises(AssertionError):
        described(method)
