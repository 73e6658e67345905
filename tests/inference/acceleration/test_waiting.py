"""What steps ask of a device: nothing that the CPU would have to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from promises import others_slow
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyrofl import nets
from pyrofl.data import Batch, Federation
from pyrofl.experiments.methods import builds
from pyrofl.inference.acceleration.steps import PhaseRun
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.training import noise
from pyrofl.inference.training.schedules import Batches
from pyrofl.models import fedavg, guides, pfedgp, pvi, virtual
from pyrofl.models.priors import fixed
from pyrofl.tensors import generator

WAITS = {
    torch.ops.aten._local_scalar_dense,  # item, bool, int and float of a tensor
    torch.ops.aten.is_nonzero,
    torch.ops.aten.equal,
}
INDEXED = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}  # by masks
SHAPES = torch.Tag.dynamic_output_shape  # as of nonzero, masked_select, unique

# torch's Adam counts its steps in tensors that are on the CPU, and reads them: that is no wait.
ADAM = {"fedhb", "pfedbayes", "pvi", "virtual", "fedgvi", "lrbpfl", "amortized", "fedwba"}
DISTILLED = {"fedbe", "predbayes"}  # FedAvg's steps at clients; the server has its own
ASKED = {"pfedgp"}  # how many more iterations a step needs
METHODS = builds().keys() - ADAM - DISTILLED - ASKED


class Watch(TorchDispatchMode):
    """Notes down operations whose answer Python, or the shape of a tensor, waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.steps = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket in INDEXED:
            waits = any(v is not None and v.dtype == torch.bool for v in args[1])
        else:
            waits = op.overloadpacket in WAITS or SHAPES in op.tags
        if waits:
            self.found.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def watch(monkeypatch):
    """Watch steps and what fetches their rows; but a phase's first, which lays out its tensors."""
    found, moves, go = Watch(), PhaseRun._moves, PhaseRun.go

    def fetched(self: PhaseRun, steps: Tensor, batches: Batches) -> None:
        def watched_feed(t: int, active: int, many: int) -> Iterator[Batch]:
            rows = iter(batches(t, active, many))
            for i in range(many):
                with found if t + i else nullcontext():
                    batch = next(rows)
                yield batch

        return go(self, steps, watched_feed)

    def watched(self: PhaseRun, batch: Any, begun: bool, *more: Any) -> None:
        if not begun:
            return moves(self, batch, begun, *more)
        found.steps += 1
        with found:
            return moves(self, batch, begun, *more)

    monkeypatch.setattr(PhaseRun, "_moves", watched)
    monkeypatch.setattr(PhaseRun, "go", fetched)
    return found


def data() -> Federation:
    g = generator(0)
    x, y = torch.randn(90, 6, generator=g), torch.arange(90) % 3
    rows = torch.arange(90).split([40, 30, 20])
    return Federation(x, y, rows, rows, classes=("a", "b", "c"))


def rounds(build: Any, net: str = "mlp:4") -> None:
    for _ in federate(build(nets.build(net, (6,), 3)), data(), rounds=2, check=False):
        pass


@pytest.mark.parametrize("name", others_slow(sorted(METHODS)))
def test_no_step_waits_for_the_device(watch, name):
    rounds(builds()[name])
    assert watch.steps > 2
    assert not watch.found


@pytest.mark.parametrize("net", ["cnn-fedbe-gn", "resnet20"])
def test_no_step_of_images_waits_for_the_device(watch, net):
    small = data()
    side = {"cnn-fedbe-gn": 18, "resnet20": 8}[net]
    images = torch.randn(12, 1, side, side, generator=generator(1))
    rows = torch.arange(12).split([8, 4])
    many = Federation(images, small.y[:12], rows, rows, classes=small.classes)
    bayesian = {"prior": fixed(), "guide": guides.mean_field, "num_particles": 2}
    method = fedavg.build(nets.build(net, (1, side, side), 3), batch=4, epochs=2, **bayesian)
    for _ in federate(method, many, rounds=1, check=False):
        pass
    assert watch.steps > 1
    assert not watch.found


@pytest.mark.parametrize(("paper", "most"), [(pvi, 3), (virtual, 3), (pfedgp, 5)])
def test_an_iteration_waits_for_no_more_than_whether_it_ends(watch, paper, most):
    """PVI asks whether an energy rose, once and once a halving; Newton whether to go on."""
    weights = {} if paper is pfedgp else {"sampling": "weights"}
    rounds(partial(paper.build, **weights))
    assert watch.steps > 1
    assert set(watch.found) == {"aten._local_scalar_dense.default"}
    assert len(watch.found) < most * watch.steps


def test_a_read_is_noticed(watch):
    with watch:
        for read in (bool, float, int, Tensor.item):
            read(torch.ones(()))
        torch.ones(3)[torch.ones(3) > 0]
        torch.ones(3).nonzero()
        torch.ones(3)[torch.arange(2)]
        torch.ones(3)[torch.ones(3) > 0] = torch.ones(3)
    assert len(watch.found) == 7


def test_what_is_drawn_for_a_device_is_what_the_cpu_draws(monkeypatch):
    """A Gamma is drawn by the client's own generator, wherever its parameters are."""
    fn = dist.Gamma(torch.ones(2, 3), torch.ones(2, 3))
    keys = [generator(1), generator(2)]
    known = noise.draw(fn, 0, keys)
    places = iter([torch.device("cuda"), torch.device("cpu")])
    monkeypatch.setattr(noise, "_device", lambda fn: next(places))
    monkeypatch.setattr(Tensor, "to", lambda self, device: (self, device))
    found, device = noise.draw(fn, 0, [generator(1), generator(2)])
    assert device.type == "cuda"
    assert torch.equal(found, known)


def test_the_page_of_devices_counts_these_methods():
    page = Path(__file__).parents[3] / "examples" / "docs" / "devices.md"
    text = " ".join(page.read_text().split())
    assert f"runs {len(METHODS | ASKED)} methods on the CPU" in text
    assert f"there is none in {len(METHODS)} of them" in text
