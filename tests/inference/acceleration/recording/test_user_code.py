"""Which updates call a user's code: they run as written, unless the user promises otherwise."""

from __future__ import annotations

import itertools
import operator
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial, wraps
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import toys
from torch import Tensor, nn

import pyrofl
from pyrofl.inference.acceleration import recordings as advice
from pyrofl.inference.acceleration.recording import recorder
from pyrofl.inference.acceleration.recording.recorder import RECORD_ADVICE, USER_CODE_REASON, forget
from pyrofl.inference.acceleration.recordings import recording_advice, recordings
from pyrofl.inference.definition.elbo import elbo
from pyrofl.inference.definition.method import GradientStep, Method
from pyrofl.inference.definition.optim import adam
from pyrofl.inference.definition.programs import Supervised
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.engine.federate import federate
from pyrofl.models import fedavg, likelihoods, priors
from pyrofl.nets import Network


@pytest.fixture(autouse=True)
def without_recordings() -> Iterator[None]:
    forget()
    yield
    forget()


def linear(*layers: nn.Module) -> Network:
    return Network(nn.Sequential(*layers, nn.Linear(toys.FEATURES, toys.CLASSES)))


def own(*given: Any, **named: Any) -> Any:
    return given[0]


class Plain(nn.Sequential):
    """A network of torch's layers, with no function besides its constructor."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(toys.FEATURES, 4), nn.Tanh(), nn.Linear(4, toys.CLASSES))


class Forward(Plain):
    """A network whose forward is a user's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Property(Plain):
    """A network with a property that could return anything."""

    @property
    def training(self) -> bool:  # type: ignore[override]
        return False

    @training.setter
    def training(self, value: bool) -> None:
        pass


class Callable_:
    """An object that is called."""

    def __call__(self, *given: Any) -> Any:
        return given[0]

    def method(self) -> None:
        pass


def hooked() -> Network:
    net = linear()
    net.module[0].register_forward_hook(own)
    return net


def patched() -> Network:
    net = linear(nn.Tanh())
    net.module[0].forward = own
    return net


@wraps(elbo())
def wrapped(*given: Any) -> Any:
    return given[0]


wrapped.__module__ = "pyrofl.inference.definition.elbo"

LIBRARYS = {
    "numbers": (1, 0.5, "a", None, torch.ones(2), np.ones(2), torch.float64),
    "torch": (torch.tanh, Tensor.exp, nn.functional.relu, torch.nn.init.zeros_),
    "pyro": (dist.Normal, dist.Normal(0.0, 1.0), dist.constraints.positive),
    "stateless Python": (operator.add, operator.itemgetter(0), partial(torch.add, 1.0), len),
    "network": linear(nn.Tanh(), nn.LayerNorm(toys.FEATURES)),
    "subclass without functions": Network(Plain()),
    "attention": nn.TransformerEncoderLayer(4, 2, dropout=0.0, batch_first=True),
    "optimizer": adam(0.1),
    "loss": elbo(num_particles=3),
    "prior": priors.fixed(),
    "distribution as prior": fedavg.build(toys.net(), prior=dist.Normal(0.0, 1.0)).model,
}

USERS_OWN: dict[str, Callable[[], Any]] = {
    "function": lambda: own,
    "partial": lambda: partial(torch.add, other=partial(own)),
    "in containers": lambda: {"a": [({"b": own},)]},
    "default": lambda: replace(elbo(), kl=own),
    "bound method": lambda: Callable_().method,
    "object": Callable_,
    "class": lambda: Callable_,
    "wrapped as the library's": lambda: wrapped,
    "cached": lambda: lru_cache(own),
    "builtin of a list": lambda: [].append,
    "clock": lambda: time.time,
    "generator": lambda: random.Random(0).random,
    "iterator": itertools.count,
    "layer": lambda: linear(Forward()),
    "forward": lambda: Network(Forward()),
    "property": lambda: Network(Property()),
    "hook": hooked,
    "replaced forward": patched,
    "activation": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, own, batch_first=True),
    "script": lambda: torch.jit.ScriptModule.__new__(torch.jit.ScriptModule),
    "prior": lambda: Supervised(toys.net(), likelihoods.categorical, own_prior),
    "likelihood": lambda: Supervised(toys.net(), own),
    "other library": lambda: np.vectorize(len),
}


def own_prior(received: Any, local: Any, batch: Any, name: str, shape: torch.Size) -> Any:
    return dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape))


@pytest.mark.parametrize("what", LIBRARYS)
def test_code_of_the_libraries_is_recognized(what):
    assert users_code(LIBRARYS[what])[0] == ""


@pytest.mark.parametrize("what", USERS_OWN)
def test_code_of_a_user_is_recognized_wherever_it_is(what):
    assert users_code((1, USERS_OWN[what]()))[0]


class Warm:
    """A loss whose weight falls after ten calls, counted where a comparison would not look."""

    def __init__(self, step: GradientStep, kind: str) -> None:
        self.loss, self.kind = step.loss, kind
        self.count, self._state = 0, {"t": 0}
        self.big, self.log = np.zeros(20_000), [0.0] * 2000

    def calls(self) -> float:
        if self.kind == "private dict":
            self._state["t"] += 1
            return self._state["t"]
        if self.kind == "large array":
            self.big[-1] += 1
            return float(self.big[-1])
        if self.kind == "long list":
            self.log[0] += 1
            return self.log[0]
        self.count += 1
        return self.count

    def __call__(self, *given: Any) -> Tensor:
        value: Tensor = (1.0 if self.calls() <= 10 else 0.1) * self.loss(*given)
        return value


def with_loss(make: Callable[[GradientStep], Any]) -> Method:
    method = fedavg.build(toys.net(), batch=4, epochs=4)
    (phase,) = method.phases
    (step,) = phase.updates
    assert isinstance(step, GradientStep)
    return replace(method, phases=(replace(phase, updates=(replace(step, loss=make(step)),)),))


@pytest.mark.parametrize("kind", ["number", "private dict", "large array", "long list"])
def test_a_loss_that_counts_gives_the_numbers_of_its_code(kind):
    def last(**options: Any) -> dict[str, Tensor]:
        method = with_loss(lambda step: Warm(step, kind))
        return [*federate(method, toys.blobs(), 2, check=False, **options)][-1].server

    toys.assert_same(last(), last(record=False), rtol=0, atol=0)


def doubled(step: GradientStep) -> Callable[..., Tensor]:
    def twice(*given: Any) -> Tensor:
        return 2 * step.loss(*given)

    return twice


def test_a_users_loss_is_named_and_recorded_if_its_user_promises(monkeypatch):
    monkeypatch.setattr(recorder, "clock", lambda: 0.0)
    monkeypatch.setattr(recorder, "pays", lambda *given: True)
    method = with_loss(doubled)
    (found,) = recordings(method, toys.blobs((20, 20)), 2)
    assert found.recorded == 0
    assert found.as_written == 40
    assert found.reason == RECORD_ADVICE.format("doubled.<locals>.twice")
    (found,) = recordings(method, toys.blobs((20, 20)), 2, record=True)
    assert found.recorded > 25
    assert not found.reason
    assert recordings(method, toys.blobs((20, 20)), 2, record=False) == ()


def test_nobody_is_advised_to_record_slow_kernels(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(recorder, "clock", lambda: next(seconds))  # a second for each update
    (found,) = recordings(with_loss(doubled), toys.blobs((20, 20)), 2)
    assert found.reason == USER_CODE_REASON.format("doubled.<locals>.twice")


@pytest.mark.parametrize(
    ("rounds", "seconds", "advised"), [(50, 0.2, True), (4, 0.2, False), (50, 5.0, False)]
)
def test_a_fit_advises_to_record_only_what_is_faster_then(rounds, seconds, advised):
    found = recording_advice(with_loss(doubled), [(100, seconds)] * rounds)  # of 100 steps
    assert found == (RECORD_ADVICE.format("doubled.<locals>.twice"),) * advised
    assert recording_advice(with_loss(lambda step: step.loss), [(100, seconds)] * rounds) == ()


def test_a_long_fit_says_whose_code_keeps_it_from_being_recorded(capsys, monkeypatch):
    monkeypatch.setattr(advice, "MIN_REPORTED_SECONDS", 0.0)
    monkeypatch.setattr(advice, "MIN_SAVED_SECONDS", 1.0)
    data = toys.blobs((20, 20))

    def told(method: Method, rounds: int, **options: Any) -> bool:
        pyrofl.fit(method, data, rounds, check=False, **options)
        return (
            RECORD_ADVICE.format("doubled.<locals>.twice") in capsys.readouterr().err.splitlines()
        )

    assert told(with_loss(doubled), 2)
    assert not told(with_loss(doubled), 2, record=True)
    assert not told(with_loss(doubled), 2, progress=False)
    assert not told(with_loss(lambda step: step.loss), 2)


def test_what_changes_between_rounds_takes_effect_in_what_is_promised():
    def last(**options: Any) -> dict[str, Tensor]:
        factor = np.ones(20_000)  # which no comparison of Python values would read
        method = with_loss(lambda step: lambda *given: float(factor[-1]) * step.loss(*given))
        servers = []
        for state in federate(method, toys.blobs(), 3, **options):
            factor[-1] /= 2
            servers.append(state.server)
        return servers[-1]

    toys.assert_same(last(record=True), last(record=False), rtol=0, atol=0)
