"""When recording starts: by a clock that only updates, kernels and recordings move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import toys

from pyrofl.inference.acceleration.recording import recorder
from pyrofl.inference.acceleration.recording.recorder import (
    COMPILE_SECONDS,
    KERNELS_REASON,
    RECORDINGS,
    forget,
)
from pyrofl.inference.acceleration.recording.tape import Tape
from pyrofl.inference.acceleration.recordings import recordings
from pyrofl.inference.acceleration.steps import AcceleratedStep
from pyrofl.inference.definition.method import Method
from pyrofl.inference.engine.federate import federate
from pyrofl.inference.engine.participation import fixed
from pyrofl.models import fedavg, pfedgp

STEPS = 10  # of a client in a round


class Costs(NamedTuple):
    """Milliseconds of an update as written, of its kernels, and of its recording."""

    written: float
    kernels: float
    replayed: float


SMALL = Costs(2, 0.3, 0.4)
LENET = Costs(20, 20, 20)
BIASED = Costs(20, 10, 19.9)  # kernels that are slower in a recording


class Clock:
    """Seconds that updates have taken, and how many of each kind there were."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now = costs, 0.0
        self.written = self.tried = self.repeated = self.compiled = self.replayed = 0
        self.is_disturbed = False  # whether the first measurement of kernels takes .1 s

    def __call__(self) -> float:
        return self.now

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.tried, self.compiled, self.written, self.replayed


@pytest.fixture(autouse=True)
def without_recordings() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def watched(monkeypatch) -> Callable[[Costs], Clock]:
    """Return a function that replaces the clock by one on which updates have the given costs."""

    def watch(costs: Costs) -> Clock:
        clock = Clock(costs)
        step, enter, repeat, compiled = (
            AcceleratedStep.written,
            Tape.__enter__,
            Tape.replay_seconds,
            recorder.compile_operations,
        )

        def written(self: AcceleratedStep, *given: Any) -> None:
            step(self, *given)
            clock.written += 1
            clock.now += costs.written / 1000

        def entered(self: Tape) -> Any:
            clock.tried += 1
            clock.now += 1.5 * costs.written / 1000
            return enter(self)

        def repeated(self: Tape, watch: Clock) -> float:
            repeat(self, watch)
            clock.repeated += 1
            disturbed = clock.repeated == 1 and clock.is_disturbed
            seconds = (100 if disturbed else costs.kernels) / 1000
            clock.now += seconds
            return seconds

        def generated(*given: Any) -> Any:
            bind, code = compiled(*given)
            clock.compiled += 1
            clock.now += COMPILE_SECONDS

            def bound(*tensors: Any) -> Any:
                run = bind(*tensors)

                def replay(*passing: Any) -> None:
                    run(*passing)
                    clock.replayed += 1
                    clock.now += costs.replayed / 1000

                return replay

            return bound, code

        monkeypatch.setattr(recorder, "clock", clock)
        monkeypatch.setattr(recorder, "compile_operations", generated)
        monkeypatch.setattr(AcceleratedStep, "written", written)
        monkeypatch.setattr(Tape, "__enter__", entered)
        monkeypatch.setattr(Tape, "replay_seconds", repeated)
        return clock

    return watch


def run(method: Method, rounds: int, **options: Any) -> None:
    for _ in federate(method, toys.blobs((20, 20)), rounds, check=False, **options):
        pass


def small_method() -> Method:
    return fedavg.build(toys.net(), epochs=STEPS, batch=20)


@pytest.mark.parametrize(
    ("costs", "rounds", "counts"),
    [
        # tried, compiled, as written, replayed; two of these compare the recording
        (SMALL, 12, (0, 0, 120, 0)),
        (SMALL, 13, (1, 1, 3, 129)),
        (SMALL, 30, (1, 1, 3, 299)),
        (LENET, 12, (0, 0, 120, 0)),
        (LENET, 13, (1, 0, 130, 0)),
        (LENET, 30, (1, 0, 300, 0)),
        (BIASED, 30, (1, 1, 297, 5)),
    ],
)
def test_updates_are_recorded_if_those_that_are_left_repay_it(costs, rounds, counts, watched):
    clock = watched(costs)
    run(small_method(), rounds)
    assert clock.counts == counts


@pytest.mark.parametrize("rounds", [1, 10, 20])
@pytest.mark.parametrize("share", [0.5, 0.95, 1.1])
@pytest.mark.parametrize("written", [1, 3, 10, 100])
def test_a_run_takes_at_most_three_percent_longer_than_as_written(written, share, rounds, watched):
    clock = watched(Costs(written, share * written, share * written))
    run(small_method(), rounds)
    assert clock.now <= 1.03 * STEPS * rounds * written / 1000


def test_clients_that_rarely_train_are_not_recorded_for_rounds_without_them(watched):
    clock = watched(SMALL)
    data = toys.blobs((20,) * 20)
    for _ in federate(small_method(), data, 20, check=False, training_clients=fixed(2)):
        pass
    assert clock.counts[0] == 0  # ten steps in two of the rounds, on average


def test_an_update_that_cannot_be_recorded_is_tried_once(watched):
    clock = watched(SMALL)
    method = pfedgp.build(toys.net(), epochs=STEPS, batch=20)
    for chunk_size in (None, 1):  # in two shapes
        states = federate(method, toys.blobs((20, 20)), 50, check=False, chunk_size=chunk_size)
        for _ in islice(states, 2):
            pass
    assert clock.tried == 1
    assert clock.compiled == clock.replayed == 0


def test_one_disturbed_measurement_refuses_nothing(watched):
    clock = watched(SMALL)
    clock.is_disturbed = True
    run(small_method(), 30)
    assert clock.counts == (1, 1, 3, 299)


def test_a_larger_shape_of_a_slow_update_is_not_tried(watched):
    clock = watched(LENET)
    method = small_method()
    for sizes in ((20, 20), (20, 20, 20)):
        for _ in federate(method, toys.blobs(sizes), 20, check=False):
            pass
    assert clock.tried == 1


def test_a_report_states_that_kernels_are_slow(watched):
    watched(LENET)
    (found,) = recordings(small_method(), toys.blobs((20, 20)), 3)
    assert found.reason == KERNELS_REASON
    assert (found.recorded, found.as_written) == (0, 30)
    assert RECORDINGS.rounds is None
