"""Recorder of repeated training updates, to run them later without Pyro and autograd.

An update of few clients spends more time in Python than in kernels. It runs as written until more
than `HOT` of one shape have run or are scheduled. Then it is recorded, and the next ones run both
ways, until the recording is known to be bitwise equal. Updates run as written if the results
differ, Python reads numbers of tensors, or they draw other noise; `pyrofl.recordings` names the
reason.

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
from typing import Any, Protocol

import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.acceleration.recording.code import Bind, Given, compiled
from pyrofl.inference.acceleration.recording.tape import NotRecorded, Reads, Tape
from pyrofl.inference.definition.description import state_of
from pyrofl.inference.definition.user_code import layers_held, users_code
from pyrofl.nets import Network
from pyrofl.tensors import Tensors

HOT = 3  # updates as written take as long as a recording: measured
CHECKS = 2  # comparisons of new code with the update as written; in further shapes, one
SMALL = 2**23  # modified bytes above which kernels take longer than Python: measured
KEPT = 256  # recordings

Requested = tuple[Any, ...]  # a method that draws noise, by name, and its arguments


class Noise(Protocol):
    """Protocol of noise generators that can log their draws in the list `noted`."""

    noted: list[tuple[Requested, Tensor]] | None


Touched = Callable[[], tuple[Tensors, Tensors, Tensors]]
"""Returns the tensors that an update modifies, those that other updates modify, and constant ones.

All are the same tensors from update to update."""

CLIENTS = "size", "ids"  # of a batch
ROWS = "x", "y", "mask", "at", "weights", "_share"

OTHER_BITS = "its result depends on more than its input tensors"
STATEFUL = "{} changes Python values, such as a counter, so its updates run as written"
USERS = "{} is your own, so its updates run as written; record=True (--record) may make them faster"


class Recording:
    """Recorded tensor operations of a training update, for one set of tensor shapes."""

    def __init__(self, values: object) -> None:
        """Create an empty recording of an update with the programs and optimizer in `values`.

        They are stored so that no `id` in the recording's key is reused.
        """
        self.values, self.seen, self.checked = values, 0, 0
        self.reason = ""  # why it runs as written
        self.requested: list[Requested] = []  # the noise that it needs
        self.bind: Bind | None = None
        self.code: object = None  # with the kind, the same in other shapes
        self.state: list[str] | None = None  # Python state that a user's function can read


class Recordings:
    """Compiled training updates."""

    def __init__(self) -> None:
        self.found: OrderedDict[object, Recording] = OrderedDict()
        self.plain: dict[object, Any] = {}  # kinds of steps that keep the layout -> values
        self.sure: dict[object, Any] = {}  # kind, code that is correct for some shape -> values


class Kept(Recordings, threading.local):
    """Thread-local cache of compiled training updates of the library's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.nets: dict[object, tuple[Any, list[Network]]] = {}  # by kind, with its values
        self.users: dict[object, str] = {}  # kind with state of networks -> a user's function
        self.log: list[Recorder] | None = None  # recorders that run, for `recordings`
        self.record: bool | None = None


RECORDINGS = Kept()


def forget() -> None:
    """Delete all recorded and compiled training updates of this thread."""
    of = RECORDINGS
    for kept in (of.found, of.plain, of.sure, of.nets, of.users):
        kept.clear()


@contextmanager
def recording(record: bool | None) -> Iterator[None]:
    """Context manager that sets which updates of this thread are recorded.

    None records those of the library's functions only, True also those of a user's, False none.
    """
    before, RECORDINGS.record = RECORDINGS.record, record
    try:
        yield
    finally:
        RECORDINGS.record = before


class Recorder:
    """Runner of a training update that records its operations and replays them if possible."""

    def __init__(self, name: str, values: tuple[Any, ...], whole: bool, noise: Noise) -> None:
        """Create a recorder for one kind of training update.

        Args:
            name: name of the update, for `recordings`.
            values: its parts: programs, loss, optimizer.
            whole: whether every update has the same batch.
            noise: source of the noise of the programs.
        """
        self.name, self.values, self.whole, self.noise = name, values, whole, noise
        self.kind, self.user = _kind(values)
        record = RECORDINGS.record
        self.is_on = not self.user if record is None else record
        self.kept = Recordings() if self.user else RECORDINGS
        self.recording: Recording | None = None
        self.run: Callable[..., None] | None = None  # the recording, bound to these tensors
        self.touched: tuple[list[Tensor], ...] = ()
        self.passing: list[str] = []  # tensors of a batch that differ from step to step
        self.numbers: Callable[[], object] = list  # returns an optimizer's state except tensors
        self.reason = "" if self.is_on or record is False else USERS.format(self.user)
        self.made = [0, 0]  # updates as written, and by a recording
        if RECORDINGS.log is not None:
            RECORDINGS.log.append(self)

    def is_plain(self, params: Tensors) -> bool:
        """Return whether this update's first step keeps parameters contiguous in memory."""
        return self.is_on and self._first(params) in self.kept.plain

    def note_layout(self, params: Tensors) -> None:
        """Remember that an update keeps parameters contiguous, if these parameters still are."""
        self.made[0] += self.is_on or bool(self.reason)
        if all(p.is_contiguous() for p in params.values()):
            self.kept.plain[self._first(params)] = self.values
            shorten(self.kept.plain)

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
            self.made[0] += bool(self.reason)
            return written()
        found = self.recording or self._find(touched(), batch)
        found.seen += 1
        if self.run:
            noise = [getattr(self.noise, kind)(*rest) for kind, *rest in found.requested]
            self.run(*[getattr(batch, name) for name in self.passing], *noise)
            self.made[1] += 1
            return
        self.made[0] += 1
        self.reason = found.reason
        # A user's functions are recorded for this phase alone, which must be worth it.
        if found.reason or (not found.bind and found.seen + ahead <= HOT * (1 + bool(self.user))):
            written()
        else:
            self._compare(found, written, batch)

    def _find(self, touched: tuple[Tensors, ...], batch: Batch) -> Recording:
        """Return the recorded update for the shapes of given tensors; create it if missing."""
        self.touched = tuple(list(some.values()) for some in touched)
        given = self._given(batch, [])
        names = [tuple(some) for some in touched]
        key = self.kind, *names, laid_out([*given.bound, *given.passing])
        kept = self.kept.found
        found = self.recording = kept.setdefault(key, Recording(self.values))
        kept.move_to_end(key)
        shorten(kept)
        if (size := sum(v.numel() * v.element_size() for v in given.moving)) > SMALL:
            found.reason = f"its {size / 2**20:.0f} MiB take longer than Python"
        self._start(found, given)
        return found

    def _given(self, batch: Batch, noise: list[Tensor]) -> Given:
        moving, placed, still = self.touched
        rows = {n: v for n in ROWS if (v := getattr(batch, n)) is not None}
        self.passing = [] if self.whole else [*rows]
        alike = [getattr(batch, n) for n in CLIENTS] + [*rows.values()] * self.whole
        others = [rows[n] for n in self.passing]
        return Given(moving, placed, [*still, *alike], [*others, *noise])

    def _start(self, found: Recording, given: Given) -> None:
        """Use a recording in the next updates if comparisons with normal runs have verified it."""
        if found.bind and not found.reason and found.checked >= CHECKS:
            self.run = found.bind(*given.bound)

    def _compare(self, found: Recording, written: Callable[[], None], batch: Batch) -> None:
        """Run a training update normally, and compare the result with that of its recording."""
        moving, tape, noted = self.touched[0], Tape(), list[tuple[Requested, Tensor]]()
        copies = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in moving
        ]
        for copy, value in zip(copies, moving, strict=True):
            copy.copy_(value)
        self.noise.noted, before = noted, self.numbers()
        state = state_of(self.values) if self.user else []
        is_stateful = found.state not in (None, state)
        try:
            with ExitStack() as recording:
                for mode in () if found.bind else (Reads(tape), tape):
                    recording.enter_context(mode)
                written()
        finally:
            self.noise.noted = None
        if self.user:
            found.state = state_of(self.values)
            is_stateful = is_stateful or found.state != state
        requested = [one for one, _ in noted]
        given = self._given(batch, [value for _, value in noted])
        if found.bind and requested != found.requested:
            found.reason = "it draws other noise from update to update"
        if is_stateful:
            found.reason = STATEFUL.format(self.user)
        if self.numbers() != before:
            found.reason = "its optimizer counts in Python"
        found.requested = requested
        try:
            if not found.bind:
                found.bind, code = compiled(tape, given)
                found.code = self.kind, code
            found.bind(*given._replace(moving=copies).bound)(*given.passing)
            if not all(map(equal, copies, given.moving)):
                found.reason = OTHER_BITS
        except NotRecorded as error:
            found.reason = str(error)
        except (RuntimeError, TypeError, ValueError) as error:
            found.reason = f"an operation cannot be repeated: {error}"
        self.reason = found.reason
        found.checked += 1 if found.code not in self.kept.sure else CHECKS
        if found.checked >= CHECKS and not found.reason:
            self.kept.sure[found.code] = found.values
            shorten(self.kept.sure)
        self._start(found, given)


def shorten(kept: dict[object, Any]) -> None:
    """Delete the oldest entries of a dict with more than `KEPT` entries."""
    while len(kept) > KEPT:
        kept.pop(next(iter(kept)))


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in every entry; NaN equals NaN."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def laid_out(tensors: list[Tensor]) -> tuple[object, ...]:
    """Return types, devices, shapes and strides of tensors, and which tensors share a storage."""
    first: dict[int, int] = {}
    return tuple(
        (
            v.dtype,
            v.device,
            v.shape,
            tuple(s if n > 1 else 0 for n, s in zip(v.shape, v.stride(), strict=True)),
            first.setdefault(v.untyped_storage()._cdata, i),
        )
        for i, v in enumerate(tensors)
    )


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
