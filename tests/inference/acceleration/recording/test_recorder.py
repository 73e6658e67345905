"""Recorded updates: the same bits as the updates as written, and what is not recorded."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyro
import pytest
import torch
import toys
from promises import others_slow
from torch import Tensor, nn

from pyrofl.data import Batch
from pyrofl.inference.acceleration.recording import code, recorder
from pyrofl.inference.acceleration.recording.recorder import RECORDINGS, Recording, forget
from pyrofl.inference.acceleration.recording.tape import Tape
from pyrofl.inference.acceleration.recordings import recordings
from pyrofl.inference.acceleration.steps import AcceleratedStep
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.optim import Optim, adam, sgd
from pyrofl.inference.definition.programs import Supervised
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.state import RoundState
from pyrofl.models import ditto, fedavg, fedper, fedprox, fedrep, guides, local, pfedme, pfedvem
from pyrofl.models.priors import fixed
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": lambda: fedavg.build(toys.net(), batch=4),
    "map": lambda: fedavg.build(toys.net(), batch=4, prior=fixed()),
    "full": lambda: fedavg.build(toys.net(), batch=None, epochs=12),
    "mean field": lambda: fedavg.build(
        toys.net(), batch=4, guide=guides.mean_field, num_particles=3
    ),
    "cnn": lambda: fedavg.build(toys.net("softmax"), batch=4),
    "no momentum": lambda: local.build(toys.net(), batch=4, momentum=0.0),
    "fedper": lambda: fedper.build(toys.net(), batch=4),
    "fedrep": lambda: fedrep.build(toys.net(), batch=4, head_epochs=4),
    "pfedvem": lambda: pfedvem.build(toys.net(), batch=4, lr_head=0.01),
    "ditto": lambda: ditto.build(toys.net(), batch=4),
    "pfedme": lambda: pfedme.build(toys.net(), batch=4, momentum=0.0, lr=0.01, steps=3),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> Iterator[None]:
    """Record at once, however long updates take, and begin with none."""
    monkeypatch.setattr(recorder, "pays", lambda *given: True)
    monkeypatch.setattr(recorder, "may_try", lambda left: True)
    monkeypatch.setattr(recorder, "clock", lambda: 0.0)
    forget()
    monkeypatch.setattr(RECORDINGS, "log", [])
    yield
    forget()


def every() -> list[Recording]:
    """Return all recordings, also those of a user's functions."""
    assert RECORDINGS.log is not None
    kept = {id(one.store): one.store for one in RECORDINGS.log}
    return [r for one in (RECORDINGS, *kept.values()) for r in one.by_key.values()]


def made() -> list[Recording]:
    """Return the recordings that steps were made by."""
    return [r for r in every() if r.bind and not r.reason and r.seen > 4]


def counted(monkeypatch) -> list[int]:
    """Return a list that grows by every step that is made as it is written."""
    written: list[int] = []
    real = AcceleratedStep.written

    def step(self, *args):
        written.append(1)
        real(self, *args)

    monkeypatch.setattr(AcceleratedStep, "written", step)
    return written


def as_written(monkeypatch) -> None:
    monkeypatch.setattr(recorder, "pays", lambda *given: False)
    RECORDINGS.by_key.clear()


@pytest.mark.parametrize("chunk_size", others_slow([None, 1], [None]))
@pytest.mark.parametrize("name", METHODS)
def test_the_bits_are_those_of_steps_as_written(name, chunk_size, monkeypatch):
    method, data = METHODS[name](), toys.blobs()
    quick = list(federate(method, data, 2, chunk_size=chunk_size))
    assert made()
    assert not any(r.reason for r in RECORDINGS.by_key.values())
    as_written(monkeypatch)
    for one, other in zip(quick, federate(method, data, 2, chunk_size=chunk_size), strict=True):
        toys.assert_same_round(one, other, rtol=0, atol=0)


def test_a_recording_keeps_none_of_the_tensors_that_were_seen():
    # Hundreds of recordings are kept: with their tensors, a search of settings filled the memory.
    list(federate(METHODS["mean field"](), toys.blobs(), 2))
    assert made()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) in (code._Code, Tape)]


def triple(net: Network) -> None:
    first = net.module.get_submodule("0")
    first.load_state_dict({n: 3 * v for n, v in first.state_dict().items()})


def replace_weight(net: Network) -> None:
    weight = net.module.get_parameter("0.weight")
    weight.data = 3 * weight.data


def replace_forward(net: Network) -> None:
    net.module.get_submodule("1").forward = torch.sin


def add_hook(net: Network) -> None:
    net.module.get_submodule("1").register_forward_hook(lambda _, __, out: 2 * out)


@pytest.mark.parametrize("change", [triple, replace_weight, replace_forward, add_hook])
def test_changes_of_a_network_between_two_fits_take_effect(change, monkeypatch):
    def second() -> Tensors:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(toys.FEATURES, 6), nn.Tanh(), nn.Linear(6, toys.CLASSES))
        module[0].requires_grad_(False)
        net, data = Network(module), toys.blobs()
        method = fedavg.build(net, batch=4)
        list(federate(method, data, 2))
        change(net)
        return list(federate(method, data, 2))[-1].server

    quick = second()
    assert made()
    as_written(monkeypatch)
    toys.assert_same(quick, second(), rtol=0, atol=0)


def test_a_loss_that_changes_between_rounds_is_seen_in_every_shape(monkeypatch):
    def last() -> Tensors:
        method, share = fedavg.build(toys.net(), batch=4, epochs=2), [1.0]
        (phase,) = method.phases
        (step,) = phase.updates
        assert isinstance(step, GradientStep)
        own = replace(step, loss=lambda *given: step.loss(*given) * share[0])
        method = replace(method, phases=(replace(phase, updates=(own,)),))
        rounds = federate(method, toys.blobs((3, 40)), 3)  # batches of two clients, and of one
        servers = []
        for one in rounds:
            share[0] *= 0.1
            servers.append(one.server)
        return servers[-1]

    quick = last()
    as_written(monkeypatch)
    toys.assert_same(quick, last(), rtol=0, atol=0)


@pytest.mark.parametrize("build_one", [fedavg.build, fedprox.build, ditto.build])
def test_steps_of_convolutions_with_a_prior_keep_their_bits(build_one, monkeypatch):
    # Several outputs of one operation, of which the gradient of the prior is added to one.
    layers = (
        nn.Conv2d(1, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, toys.CLASSES),
    )
    blobs = toys.blobs()
    data = replace(blobs, x=blobs.x.repeat(1, 5)[:, :36].reshape(-1, 1, 6, 6))
    own = {"prior": fixed()} if build_one is fedavg.build else {}
    method = build_one(Network(nn.Sequential(*layers)), batch=4, **own)
    quick = list(federate(method, data, 2))
    assert made()
    as_written(monkeypatch)
    for one, other in zip(quick, federate(method, data, 2), strict=True):
        toys.assert_same_round(one, other, rtol=0, atol=0)


class LowRank(nn.Module):
    """A layer W x + B A x whose W is a constant; no rule of the library stacks it."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(toys.FEATURES, toys.CLASSES).requires_grad_(False)
        self.A = nn.Parameter(0.1 * torch.randn(2, toys.FEATURES))
        self.B = nn.Parameter(torch.zeros(toys.CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.W(x) + x @ self.A.T @ self.B.T


def test_clients_that_finish_early_leave_the_others_their_steps(monkeypatch):
    # `vmap` leaves reference cycles that hold graphs, here for good.
    method, data = fedavg.build(Network(nn.Sequential(LowRank())), batch=4), toys.blobs()
    gc.disable()
    try:
        quick = list(federate(method, data, 2, record=True))
    finally:
        gc.enable()
    assert made()
    as_written(monkeypatch)
    for one, other in zip(quick, federate(method, data, 2), strict=True):
        toys.assert_same_round(one, other, rtol=0, atol=0)


def test_first_steps_are_made_by_recordings_too(monkeypatch):
    method, data = METHODS["fedavg"](), toys.blobs()
    first = [step for step in federate(method, data, 3)][-1]
    written = counted(monkeypatch)
    again = next(federate(method, data, 4, resume_from=first))
    assert not written
    as_written(monkeypatch)
    other = next(federate(method, data, 4, resume_from=first))
    assert written
    toys.assert_same_round(again, other, rtol=0, atol=0)
    assert torch.equal(again.first_loss["w/*"], other.first_loss["w/*"])


@pytest.mark.parametrize("name", ["fedavg", "pfedvem", "ditto"])
def test_what_newcomers_record_serves_them_later(name):
    method, data = METHODS[name](), toys.blobs()
    states = federate(method, data, 3, check=False)
    next(states)
    known = len(RECORDINGS.by_key)
    for _ in states:  # whose first steps begin where rows do, and who come with state of their own
        assert len(RECORDINGS.by_key) == known


def test_another_shape_of_known_code_is_compared_once(monkeypatch):
    method, data = fedavg.build(toys.net(), epochs=10, batch=20), toys.blobs((20, 20))
    written = counted(monkeypatch)
    next(federate(method, data, 1, check=False))
    assert len(written) == 3  # the first, and two beside the code
    written.clear()
    known = code._compile_lines.cache_info().misses
    next(federate(method, data, 1, check=False, chunk_size=1))
    assert len(written) == 1  # the first is as all others now, and one check is enough
    assert code._compile_lines.cache_info().misses == known


def test_noise_is_given_to_who_records_it(monkeypatch):
    method, data = METHODS["mean field"](), toys.blobs((20, 20))
    written = counted(monkeypatch)
    quick = next(federate(method, data, 1, check=False))
    assert len(written) == 3  # as without noise
    as_written(monkeypatch)
    toys.assert_same_round(quick, next(federate(method, data, 1, check=False)), rtol=0, atol=0)


def test_recording_does_not_load_the_compiler_of_torch():
    assert not hasattr(Tape.__torch_dispatch__, "__wrapped__")


def test_a_run_goes_on_with_the_same_bits_whatever_was_recorded(monkeypatch):
    method, data = METHODS["pfedvem"](), toys.blobs()
    *_, whole = federate(method, data, 3)
    *_, half = federate(method, data, 1)
    RECORDINGS.by_key.clear()
    *_, again = federate(method, data, 3, resume_from=half)
    toys.assert_same_round(again, whole, rtol=0, atol=0)


def with_optimizer(method: Method, optim: Optim) -> Method:
    """Replace the optimizer of a method of one step."""
    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    return replace(method, phases=(replace(phase, updates=(replace(step, optim=optim),)),))


def with_model(program: Callable[..., object]) -> Method:
    """Put a likelihood's function in place of that of FedAvg."""
    method = METHODS["fedavg"]()
    model = method.model
    assert isinstance(model, Supervised)
    return method.swap(likelihood=program)


def categorical(outputs: Tensor, x: Tensor) -> pyro.distributions.Distribution:
    return pyro.distributions.Categorical(logits=outputs)


def reading(outputs: Tensor, x: Tensor) -> pyro.distributions.Distribution:
    return categorical(outputs * (2 if float(x[0, 0, 0]) > 0 else 1), x)


def listing(outputs: Tensor, x: Tensor) -> pyro.distributions.Distribution:
    return categorical(outputs * max(1, int(x.sum().tolist() > 0)), x)


def drawing(outputs: Tensor, x: Tensor) -> pyro.distributions.Distribution:
    return categorical(outputs + 0 * torch.rand(()), x)


def picking(outputs: Tensor, x: Tensor) -> pyro.distributions.Distribution:
    return categorical(outputs + 0 * x[x > 0].sum(), x)


@pytest.mark.parametrize("likelihood", [reading, listing, drawing, picking])
def test_what_depends_on_more_than_tensors_is_made_as_written(likelihood, monkeypatch):
    method, data = with_model(likelihood), toys.blobs()
    (quick,) = federate(method, data, 1, check=False, record=True)
    assert not made()
    assert any(r.reason for r in every())
    as_written(monkeypatch)
    toys.assert_same_round(quick, next(federate(method, data, 1, check=False)), rtol=0, atol=0)


def test_a_program_that_remembers_is_found_out(monkeypatch):
    calls: list[int] = []

    def changing(outputs: Tensor, x: Tensor) -> pyro.distributions.Distribution:
        calls.append(1)
        return categorical(outputs * (1 + len(calls)), x)

    next(federate(with_model(changing), toys.blobs(), 1, check=False, record=True))
    assert not made()


def test_programs_of_users_are_recorded_again_in_every_phase_if_promised(monkeypatch):
    method, factor = METHODS["fedavg"](), [1.0]

    def model(received: Tensors, local: Tensors, batch: Batch) -> None:
        with pyro.poutine.scale(scale=factor[0]):
            method.model(received, local, batch)

    own, data = replace(method, model=model), toys.blobs()

    def rounds() -> list[RoundState]:
        factor[0] = 1.0
        states = federate(own, data, 3, check=False, record=True)
        first = next(states)
        factor[0] = 0.5  # as a schedule of a user's would do between rounds
        return [first, *states]

    quick = rounds()
    assert made()
    assert not any(r.reason for r in every())
    as_written(monkeypatch)
    for one, other in zip(quick, rounds(), strict=True):
        toys.assert_same_round(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("optim", [adam(0.01), sgd(0.01, 0.9, clip=0.1)], ids=["adam", "clip"])
def test_other_optimizers_are_recorded_from_their_first_step_on(optim, monkeypatch):
    method, data = with_optimizer(METHODS["fedavg"](), optim), toys.blobs()
    quick = list(federate(method, data, 3))
    written = counted(monkeypatch)
    quick += federate(method, data, 4, resume_from=quick[-1])
    assert not written
    as_written(monkeypatch)
    for one, other in zip(quick, federate(method, data, 4), strict=True):
        toys.assert_same_round(one, other, rtol=0, atol=0)


class Counting(torch.optim.SGD):
    """SGD whose rate falls by a number of Python."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] *= 0.99
        super().step()


def test_an_optimizer_that_counts_in_python_is_refused(monkeypatch):
    def counting(params: list[Tensor]) -> torch.optim.Optimizer:
        return Counting(params, lr=0.1, fused=True)

    method, data = with_optimizer(METHODS["fedavg"](), counting), toys.blobs()
    (quick,) = federate(method, data, 1, check=False, record=True)
    assert {r.reason for r in every()} == {"its optimizer counts in Python"}
    as_written(monkeypatch)
    toys.assert_same_round(quick, next(federate(method, data, 1, check=False)), rtol=0, atol=0)


def test_a_client_that_diverges_is_refused_all_the_same(monkeypatch):
    method, data = METHODS["fedavg"](), toys.blobs()
    method = with_optimizer(method, sgd(1e200))
    (quick,) = federate(method, data, 1)
    as_written(monkeypatch)
    (slow,) = federate(method, data, 1)
    assert quick.rejected == slow.rejected
    assert quick.rejected


def test_large_steps_and_too_many_recordings_are_not_kept(monkeypatch):
    monkeypatch.setattr(recorder, "MAX_MODIFIED_BYTES", 0)
    next(federate(METHODS["fedavg"](), toys.blobs(), 1))
    assert not made()
    monkeypatch.setattr(recorder, "MAX_RECORDINGS", 2)
    next(federate(METHODS["fedavg"](), toys.blobs(), 1))
    assert len(RECORDINGS.by_key) <= 2 + 1


def test_a_user_is_told_what_is_recorded_and_why_not():
    def reason(method: Method, promise: bool | None = None) -> str:
        (found,) = recordings(method, toys.blobs(), 2, check=False, record=promise)
        assert (found.recorded > 30) == (not found.reason)
        assert found.name == "w/*"
        return found.reason

    assert not reason(METHODS["fedavg"]())
    assert reason(with_model(reading), True).startswith("Python reads numbers of a tensor")
    before = RECORDINGS.log
    assert "loss is your own" in reason(counting("attribute"))
    assert RECORDINGS.log is before


class Counter(nn.Module):
    """A loss, a likelihood and a layer whose factor changes in every seventh call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.slots, self.calling = 0, Slots(), itertools.count()

    def count(self, where: str) -> int:
        if where == "slots":
            self.slots.calls += 1
            return self.slots.calls
        if where == "iterator":
            return next(self.calling)
        self.calls += 1
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.count("attribute") // 7)


class Slots:
    """A number outside of any dictionary."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


CALLS = 0


def counting(where: str) -> Method:
    """Return a method of which something counts calls in Python."""
    method, state, calls = METHODS["fedavg"](), Counter(), 0
    table = {"calls": 0}

    def loss(*given: object) -> Tensor:
        nonlocal calls
        global CALLS
        if where == "variable":
            calls += 1
            found = calls
        elif where == "global":
            CALLS += 1
            found = CALLS
        elif where in ("dictionary", "update"):
            table["calls"] += where == "dictionary"
            found = table["calls"]
        else:
            found = state.count(where)
        return step.loss(*given) * (1 + found // 7)

    def tick(received: Tensors, local: Tensors, batch: Batch) -> Tensors:
        table["calls"] += 1
        return {}

    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    if where == "layer":
        net = Network(nn.Sequential(state, nn.Linear(toys.FEATURES, toys.CLASSES)))
        return fedavg.build(net, batch=4)
    updates = (*[tick] * (where == "update"), replace(step, loss=loss))
    return replace(method, phases=(replace(phase, updates=updates, epochs=4),))


def test_nothing_is_recorded_if_so_requested(monkeypatch):
    method, data, written = METHODS["fedavg"](), toys.blobs(), counted(monkeypatch)
    unrecorded = list(federate(method, data, 2, record=False))
    assert not made()
    assert not written
    for one, other in zip(unrecorded, federate(method, data, 2), strict=True):
        toys.assert_same_round(one, other, rtol=0, atol=0)
    assert made()


PLACES = ("attribute", "slots", "iterator", "variable", "global", "dictionary", "update", "layer")


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
@pytest.mark.parametrize("where", PLACES)
def test_what_counts_in_python_is_made_as_written(where, monkeypatch):
    def rounds() -> list[RoundState]:
        global CALLS
        CALLS = 0
        return list(federate(counting(where), toys.blobs(), 2, check=False))

    quick = rounds()
    as_written(monkeypatch)
    for one, other in zip(quick, rounds(), strict=True):
        toys.assert_same_round(one, other, rtol=0, atol=0)
