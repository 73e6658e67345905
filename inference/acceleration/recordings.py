"""Report of the training updates that are replayed from recorded tensor operations."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from pyrofl.arguments import Count, checked
from pyrofl.data import Federation
from pyrofl.inference.acceleration.recording.recorder import (
    BIND_SECONDS,
    COMPARISON_UPDATES,
    MIN_SAVED_SECONDS,
    RECORD_ADVICE,
    RECORDINGS,
    Recorder,
)
from pyrofl.inference.definition.method import Method
from pyrofl.inference.definition.user_code import users_code
from pyrofl.inference.engine.federate import federate

LONG_RUN_ROUNDS = 1000  # rounds of a long run
MIN_REPORTED_SECONDS = 1.0  # seconds of training, below which nothing is said
MIN_SPARED_FRACTION = 0.1  # fraction of them that a recording would have to save


class RecordedUpdate(NamedTuple):
    """Numbers of runs of a training update: replayed from a recording, or run as written.

    Attributes:
        name: patterns of the tensors of a gradient step, or the name of a closed form.
        recorded: number of runs by a recording.
        as_written: number of runs as written.
        reason: reason why it is not recorded, or "".
    """

    name: str
    recorded: int
    as_written: int
    reason: str


@checked
def recordings(
    method: Method, data: Federation, rounds: Count = 3, **options: Any
) -> tuple[RecordedUpdate, ...]:
    """Train for the first rounds of a long run, and report which updates are recorded.

    Pyro programs and autograd spend more time in Python than in the kernels of small networks. A
    repeated update is therefore recorded, and later runs only execute its tensor operations, with
    bitwise equal results. An update is not recorded if Python reads numbers of its tensors
    (`.item()`, `if x > 0`), if it draws noise other than by `pyro.sample` from normals, modifies
    its inputs, or differs from its recording while both are compared. It then runs as written, up
    to ten times slower. Recording starts when the updates that are left are expected to save more
    time than it takes; kernels of large networks take most of an update's time, so that it runs as
    written.

    By default an update is recorded if all its functions, distributions and layers are those of
    pyrofl, Pyro and torch. Your own function (a model, guide, loss, prior, likelihood, optimizer or
    layer with a `forward`) may read what a recording cannot know, such as a counter, so its updates
    run as written. With `record=True` of `fit` and `federate` you promise that its results depend
    on its tensors alone within a phase of a round; it is then recorded again in every phase, so
    that Python values may change between rounds. Store a counter in a local tensor to keep the
    promise. A recorded update does not run its Python code again, so a line is printed only in
    updates that run as written.

    Args:
        method: the method.
        data: the federation, or a small one of the same kind.
        rounds: rounds of training.
        options: further arguments of `federate`.

    Returns:
        One entry for each gradient step and closed form that runs on minibatches. An update that
        runs too few times is not recorded, without a reason.
    """
    log: list[Recorder] = []
    before, RECORDINGS.log = RECORDINGS.log, log
    try:
        for _ in islice(federate(method, data, max(rounds, LONG_RUN_ROUNDS), **options), rounds):
            pass
    finally:
        RECORDINGS.log = before
    updates = []
    for name in dict.fromkeys(one.name for one in log):
        some = [one for one in log if one.name == name]
        written, recorded = (sum(one.counts[i] for one in some) for i in range(2))
        reason = next((one.reason for one in some if one.reason), "")
        if written or recorded:
            updates.append(RecordedUpdate(name, recorded, written, reason))
    return tuple(updates)


def recording_advice(method: Method, rounds: Iterable[tuple[int, float]]) -> tuple[str, ...]:
    """Return a line about a user's function that is worth recording, or nothing.

    Args:
        method: the method.
        rounds: training steps of the slowest client, and seconds, of each round.
    """
    spared = total = 0.0
    for steps, seconds in rounds:
        total += seconds
        if steps:  # they are recorded again in every round
            spared += max(
                0.0, steps * MIN_SAVED_SECONDS - BIND_SECONDS - COMPARISON_UPDATES * seconds / steps
            )
    if total < MIN_REPORTED_SECONDS or spared < MIN_SPARED_FRACTION * total:
        return ()
    updates = (update for phase in method.phases for update in phase.updates)
    users = (users_code((method.model, method.guide, one))[0] for one in updates)
    return tuple(RECORD_ADVICE.format(user) for user in users if user)[:1]
