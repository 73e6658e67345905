"""Recorder of repeated training updates, to run them later without Pyro and autograd.

An update of few clients spends more time in Python than in kernels. It is recorded once the updates
that are left, in this round and later ones, are expected to save more time than a recording takes
(`pays`). The next ones run both ways, until the recording is known to be bitwise equal. Updates run
as written if the results differ, Python reads numbers of tensors, they draw other noise, or their
kernels take most of the time; `pyrofl.recordings` names the reason.

Functions of the library have no state, so that their recordings serve all later rounds. An update
that calls a user's function runs as written, unless the user promises by `record=True` that its
results depend on its tensors alone, and on values that stay the same within a phase. It is then
recorded again in every phase.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from math import inf
from time import perf_counter as clock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.acceleration.recording.code import Bind, RecordingInputs, compile_operations
from pyrofl.inference.acceleration.recording.tape import NotRecorded, Reads, Tape
from pyrofl.inference.definition.user_code import layers_held, users_code
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

# Seconds that a recording of small kernels saves in each update, at least.
MIN_SAVED_SECONDS = 0.001
COMPILE_SECONDS = 0.03  # seconds to generate new code
BIND_SECONDS = 0.008  # seconds to reuse it in another shape
# Updates as written that take as long as recording and comparing one: all are measured.
COMPARISON_UPDATES = 4
NUM_MEASUREMENTS = 2  # measurements of the kernels' time, of which the first may be disturbed
# The same for recording one, and measuring the time of its kernels.
RECORDING_UPDATES = 1.5 + NUM_MEASUREMENTS
MIN_GAIN_FRACTION = 0.03  # fraction of an update's time that its recording has to save
NUM_TIMED_REPLAYS = 3  # replays that are timed
NUM_CHECKS = 2  # comparisons of new code with the update as written; in further shapes, one
MAX_MODIFIED_BYTES = 2**26  # modified bytes, of which a comparison makes a copy
MAX_RECORDINGS = 256  # recordings

Requested = tuple[Any, ...]  # a method that draws noise, by name, and its arguments


class NoiseSource(Protocol):
    """Protocol of noise generators that can log their draws in the list `noted`."""

    noted: list[tuple[Requested, Tensor]] | None


Touched = Callable[[], tuple[Tensors, Tensors, Tensors]]
"""Returns the tensors that an update modifies, those that other updates modify, and constant ones.

All are the same tensors from update to update."""

CLIENTS = "size", "ids"  # of a batch
ROW_FIELDS = "x", "y", "mask", "at", "weights", "_share"

OTHER_BITS = "its result depends on more than its input tensors"
KERNELS_REASON = "its kernels take most of its time"
USER_CODE_REASON = "{} is your own, so its updates run as written"
RECORD_ADVICE = f"{USER_CODE_REASON}; record=True (--record) would make them faster"


class Recording:
    """Recorded tensor operations of a training update, for one set of tensor shapes."""

    def __init__(self, values: object) -> None:
        """Create an empty recording of an update with the programs and optimizer in `values`.

        They are stored so that no `id` in the recording's key is reused.
        """
        self.values, self.seen, self.checked, self.timed = values, 0, 0, 0
        self.written = self.replayed = inf  # seconds of the fastest update
        self.reason = ""  # why it runs as written
        self.requested: list[Requested] = []  # the noise that it needs
        self.bind: Bind | None = None
        self.code: object = None  # with the kind, the same in other shapes


class Recordings:
    """Compiled training updates."""

    def __init__(self) -> None:
        self.by_key: OrderedDict[object, Recording] = OrderedDict()
        self.plain: dict[object, Any] = {}  # kinds of steps that keep the layout -> values
        self.sure: dict[object, Any] = {}  # kind, code that is correct for some shape -> values


class Refused(NamedTuple):
    """Why a kind of update is not recorded, in shapes that take at least some seconds."""

    values: object
    reason: str
    seconds: float


class ThreadRecordings(Recordings, threading.local):
    """Thread-local cache of compiled training updates of the library's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.nets: dict[object, tuple[Any, list[Network]]] = {}  # by kind, with its values
        self.users: dict[object, str] = {}  # kind with state of networks -> a user's function
        self.compiled: dict[object, Any] = {}  # kinds with code -> values
        self.refused: dict[object, Refused] = {}  # by kind
        self.log: list[Recorder] | None = None  # recorders that run, for `recordings`
        self.record: bool | None = None
        self.rounds: float | None = None


RECORDINGS = ThreadRecordings()


def forget() -> None:
    """Delete all recorded and compiled training updates of this thread."""
    of = RECORDINGS
    for entries in (of.by_key, of.plain, of.sure, of.compiled, of.nets, of.users, of.refused):
        entries.clear()


@contextmanager
def recording(record: bool | None, rounds: float | None = None) -> Iterator[None]:
    """Context manager that sets which updates of this thread are recorded, and for how long.

    None records those of the library's functions only, True also those of a user's, False none.
    Rounds are those in which the same clients are expected to train, including this one.
    """
    before = RECORDINGS.record, RECORDINGS.rounds
    RECORDINGS.record, RECORDINGS.rounds = record, rounds
    try:
        yield
    finally:
        RECORDINGS.record, RECORDINGS.rounds = before


def pays(left: float, saved: float, cost: float) -> bool:
    """Return whether the updates that are left save more seconds than a recording costs."""
    return left * saved > cost


def may_try(left: float) -> bool:
    """Return whether recording in vain would take a small part of the updates that are left."""
    return left * MIN_GAIN_FRACTION > RECORDING_UPDATES


def may_record(values: object) -> bool:
    """Return whether an update with these programs and optimizers may be recorded."""
    return not _kind(values)[1] if RECORDINGS.record is None else RECORDINGS.record


class Recorder:
    """Runner of a training update that records its operations and replays them if possible."""

    def __init__(self, name: str, values: tuple[Any, ...], whole: bool, noise: NoiseSource) -> None:
        """Create a recorder for one kind of training update.

        Args:
            name: name of the update, for `recordings`.
            values: its parts: programs, loss, optimizer.
            whole: whether every update has the same batch.
            noise: source of the noise of the programs.
        """
        self.name, self.values, self.whole, self.noise = name, values, whole, noise
        self.kind, self.user = _kind(values)
        record, self.is_on = RECORDINGS.record, may_record(values)
        self.store = Recordings() if self.user else RECORDINGS
        self.recording: Recording | None = None
        self.run: Callable[..., None] | None = None  # the recording, bound to these tensors
        self.touched: tuple[list[Tensor], ...] = ()
        self.passing: list[str] = []  # tensors of a batch that differ from step to step
        self.numbers: Callable[[], object] = list  # returns an optimizer's state except tensors
        self.reason = "" if self.is_on or record is False else USER_CODE_REASON.format(self.user)
        self.counts = [0, 0]  # updates as written, and by a recording
        self.written = inf  # seconds of the fastest update as written
        if RECORDINGS.log is not None:
            RECORDINGS.log.append(self)

    def is_plain(self, params: Tensors) -> bool:
        """Return whether this update's first step keeps parameters contiguous in memory."""
        return self.is_on and self._first(params) in self.store.plain

    def begin(self, written: Callable[[], None], params: Tensors) -> None:
        """Run an update as written; remember whether it keeps parameters contiguous in memory."""
        self.time(written)
        self.counts[0] += self.is_on or bool(self.reason)
        if all(p.is_contiguous() for p in params.values()):
            self.store.plain[self._first(params)] = self.values
            shorten(self.store.plain)

    def _first(self, params: Tensors) -> object:
        return self.kind, *((n, p.shape[1:], p.dtype, p.device) for n, p in params.items())

    def forget(self) -> None:
        """Discard the recording in use; call this after the update's tensors are replaced."""
        self.recording = self.run = None

    def make(
        self, written: Callable[[], None], touched: Touched, batch: Batch, ahead: int = 1
    ) -> None:
        """Run one training update: replay its recording if possible, else call `written`.

        The update is the first of `ahead` equal ones.

        `touched` returns the tensors of updates except the batch, the same until `forget`.
        """
        if not self.is_on:
            self.counts[0] += bool(self.reason)
            self.time(written)
            if self.reason and pays(
                ahead, MIN_SAVED_SECONDS, BIND_SECONDS + COMPARISON_UPDATES * self.written
            ):
                self.reason = RECORD_ADVICE.format(self.user)
            return
        recording = self.recording or self._find(touched(), batch)
        recording.seen += 1
        if self.run:
            self.counts[1] += 1
            self._replay(recording, batch)
            return
        self.counts[0] += 1
        seconds = self.written if recording.written == inf else recording.written
        if recording.reason or not (recording.bind or self._is_worth_it(recording, seconds, ahead)):
            recording.written = min(recording.written, self.time(written))
        else:
            self._compare(recording, written, batch, seconds, self._left(recording, ahead))
        self.reason = recording.reason

    def time(self, written: Callable[[], None]) -> float:
        """Run an update as written; return its seconds."""
        begin = clock()
        written()
        seconds = clock() - begin
        self.written = min(self.written, seconds)
        return seconds

    def _left(self, recording: Recording, ahead: int) -> float:
        """Return how many updates like this one are expected, of which `ahead` in this phase."""
        rounds = RECORDINGS.rounds
        return ahead + recording.seen if rounds is None else ahead * max(1.0, rounds)

    def _is_worth_it(self, recording: Recording, seconds: float, ahead: int) -> bool:
        """Return whether to record an update that takes `seconds` as written."""
        refused, left = RECORDINGS.refused.get(self.kind), self._left(recording, ahead)
        if refused and inf > seconds >= (1 - MIN_GAIN_FRACTION) * refused.seconds:
            recording.reason = refused.reason
            return False
        if self.kind not in RECORDINGS.compiled:
            return may_try(left) and pays(
                left, MIN_SAVED_SECONDS, COMPILE_SECONDS + COMPARISON_UPDATES * seconds
            )
        # A user's functions are recorded again in every phase.
        return pays(
            ahead if self.user else left,
            MIN_SAVED_SECONDS,
            BIND_SECONDS + COMPARISON_UPDATES * seconds,
        )

    def _replay(self, recording: Recording, batch: Batch) -> None:
        """Run an update by its recording; stop using one that is not faster."""
        assert self.run
        begin = clock()
        noise = [getattr(self.noise, kind)(*rest) for kind, *rest in recording.requested]
        self.run(*[getattr(batch, name) for name in self.passing], *noise)
        if recording.timed < NUM_TIMED_REPLAYS:
            recording.timed += 1
            recording.replayed = min(recording.replayed, clock() - begin)
            if (
                recording.timed == NUM_TIMED_REPLAYS
                and recording.replayed > (1 - MIN_GAIN_FRACTION) * recording.written
            ):
                self._refuse(recording, KERNELS_REASON)
                self.run = None

    def _refuse(self, recording: Recording, reason: str) -> None:
        """Run this update as written from now on, and all of its kind that take as long or longer.

        Kernels depend on the shape of an update, and other reasons on its code.
        """
        self.reason = recording.reason = reason
        seconds = recording.written if reason == KERNELS_REASON else 0.0
        RECORDINGS.refused[self.kind] = Refused(self.values, reason, seconds)
        shorten(RECORDINGS.refused)

    def _find(self, touched: tuple[Tensors, ...], batch: Batch) -> Recording:
        """Return the recorded update for the shapes of given tensors; create it if missing."""
        self.touched = tuple(list(some.values()) for some in touched)
        inputs = self._inputs(batch, [])
        names = [tuple(some) for some in touched]
        key = self.kind, *names, laid_out([*inputs.bound, *inputs.passing])
        recordings = self.store.by_key
        recording = self.recording = recordings.setdefault(key, Recording(self.values))
        recordings.move_to_end(key)
        shorten(recordings)
        if (size := sum(v.numel() * v.element_size() for v in inputs.moving)) > MAX_MODIFIED_BYTES:
            recording.reason = f"it modifies {size / 2**20:.0f} MiB"
        self._start(recording, inputs)
        return recording

    def _inputs(self, batch: Batch, noise: list[Tensor]) -> RecordingInputs:
        moving, placed, still = self.touched
        rows = {n: v for n in ROW_FIELDS if (v := getattr(batch, n)) is not None}
        self.passing = [] if self.whole else [*rows]
        alike = [getattr(batch, n) for n in CLIENTS] + [*rows.values()] * self.whole
        others = [rows[n] for n in self.passing]
        return RecordingInputs(moving, placed, [*still, *alike], [*others, *noise])

    def _start(self, recording: Recording, inputs: RecordingInputs) -> None:
        """Use a recording in the next updates if comparisons with normal runs have verified it."""
        if recording.bind and not recording.reason and recording.checked >= NUM_CHECKS:
            self.run = recording.bind(*inputs.bound)

    def _compare(
        self,
        recording: Recording,
        written: Callable[[], None],
        batch: Batch,
        seconds: float,
        left: float,
    ) -> None:
        """Run a training update normally, and compare the result with that of its recording.

        It takes `seconds` as written, and `left` such updates are expected.
        """
        moving, tape, noted = self.touched[0], Tape(), list[tuple[Requested, Tensor]]()
        copies = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in moving
        ]
        for copy, value in zip(copies, moving, strict=True):
            copy.copy_(value)
        self.noise.noted, before = noted, self.numbers()
        try:
            with ExitStack() as modes:
                for mode in () if recording.bind else (Reads(tape), tape):
                    modes.enter_context(mode)
                begin = clock()
                written()
                taken = clock() - begin
        finally:
            self.noise.noted = None
        requested = [one for one, _ in noted]
        inputs = self._inputs(batch, [value for _, value in noted])
        reason = ""
        if recording.bind:
            recording.written = min(recording.written, taken)
            if requested != recording.requested:
                reason = "it draws other noise from update to update"
        elif not tape.reason and self.kind not in RECORDINGS.compiled:
            recording.written, cost = (
                min(recording.written, seconds),
                COMPILE_SECONDS + COMPARISON_UPDATES / 2 * seconds,
            )
            paying = (
                pays(left, seconds - tape.replay_seconds(clock), cost)
                for _ in range(NUM_MEASUREMENTS)
            )
            reason = "" if any(paying) else KERNELS_REASON
        if self.numbers() != before:
            reason = "its optimizer counts in Python"
        recording.requested = requested
        try:
            if not recording.bind and not reason:
                recording.bind, code = compile_operations(tape, inputs)
                recording.code = self.kind, code
                RECORDINGS.compiled[self.kind] = self.values
                shorten(RECORDINGS.compiled)
            if recording.bind:
                recording.bind(*inputs._replace(moving=copies).bound)(*inputs.passing)
                if not all(map(equal, copies, inputs.moving)):
                    reason = OTHER_BITS
        except NotRecorded as error:
            reason = str(error)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = f"an operation cannot be repeated: {error}"
        if reason:
            self._refuse(recording, reason)
        recording.checked += 1 if recording.code not in self.store.sure else NUM_CHECKS
        if recording.checked >= NUM_CHECKS and not recording.reason:
            self.store.sure[recording.code] = recording.values
            shorten(self.store.sure)
        self._start(recording, inputs)


def shorten(entries: dict[object, Any]) -> None:
    """Delete the oldest entries of a dict with more than `MAX_RECORDINGS` entries."""
    while len(entries) > MAX_RECORDINGS:
        entries.pop(next(iter(entries)))


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in every entry; NaN equals NaN."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def laid_out(tensors: list[Tensor]) -> tuple[object, ...]:
    """Return types, devices, shapes and strides of tensors, and which tensors share a storage."""
    first: dict[int, int] = {}
    layouts = []
    for i, v in enumerate(tensors):
        shape, strides = v.shape, v.stride()
        if 1 in shape or 0 in shape:  # whose strides mean nothing
            strides = tuple(s if n > 1 else 0 for n, s in zip(shape, strides, strict=True))
        shared = first.setdefault(v.untyped_storage()._cdata, i)
        layouts.append((v.dtype, v.device, shape, strides, shared))
    return tuple(layouts)


def identity(value: object) -> object:
    """Return a hashable key of a value: from its parts if it is a container, else its `id`.

    >>> identity(("a", 0.1)) == identity(("a", 0.1))
    True
    """
    if value is None or isinstance(value, (str, int, float)):
        return type(value), value
    if isinstance(value, tuple):
        return type(value), *map(identity, value)
    if isinstance(value, Mapping):
        return tuple((n, identity(v)) for n, v in value.items())
    if is_dataclass(value):
        return type(value), *(identity(getattr(value, f.name)) for f in fields(value))
    return id(value)


def _kind(values: object) -> tuple[tuple[object, ...], str]:
    """Return a key of an update's parts, and the name of a user's function in it, or ""."""
    parts = identity(values)
    if parts not in RECORDINGS.nets:
        RECORDINGS.nets[parts] = values, users_code(values)[1]
        shorten(RECORDINGS.nets)
    # Frozen weights, hooks and attributes of a network may change between two fits.
    kind = parts, *map(_state, RECORDINGS.nets[parts][1])
    if kind not in RECORDINGS.users:
        RECORDINGS.users[kind] = users_code(values)[0]
        shorten(RECORDINGS.users)
    return kind, RECORDINGS.users[kind]


def _state(net: Network) -> tuple[object, ...]:
    """Return what a network's outputs depend on besides its trainable weights and its layers."""
    held = (v for layer in net.module.modules() for v in layers_held(layer))
    return tuple(
        (id(v), v._version, v.data_ptr())
        if isinstance(v, Tensor)
        else v
        if isinstance(v, (str, int, float))
        else id(v)
        for v in held
    )
