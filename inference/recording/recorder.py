"""Recorder of repeated training updates, to run them later without Pyro and autograd.

An update of few clients spends more time in Python than in kernels. It runs as written until more
than `HOT` of one shape have run or are scheduled. Then it is recorded, and the next ones run both
ways, until the recording is known to be bitwise equal. Updates run as written if the results
differ, Python reads numbers of tensors, or they draw other noise; `pyrofl.recordings` names the
reason.

Functions of the library have no state. An update with a user's functions is compared again in every
phase. The Python state that these read is part of its kind, so that changes between rounds take
effect; if it changes within a phase, updates run as written.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor

from pyrofl.data import Batch
from pyrofl.inference.description import HOOKS, closure, is_own
from pyrofl.inference.recording.code import Bind, Given, compiled
from pyrofl.inference.recording.python_state import PythonState
from pyrofl.inference.recording.tape import NotRecorded, Reads, Tape
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
CHANGES = "Python variables or attributes that it reads change from update to update"


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


class Functions:
    """Networks and user-defined functions called by one kind of training update."""

    def __init__(self, values: object) -> None:
        self.values, self.nets = values, list[Network]()
        own = list[object]()
        _look(values, self.nets, own, set())
        self.known = is_known(values) and not own  # whether no function is a user's
        self.roots = [*own, *(net.module for net in self.nets)]
        self.state, self.last = PythonState(()), tuple[object, ...]()

    def python(self) -> tuple[object, ...]:
        """Return the Python state that user-defined functions read; see `PythonState`."""
        if (now := self.state.now()) != self.last or not now:
            self.state = PythonState(self.roots)
            self.last = self.state.now()
        return self.last


class Kept(threading.local):
    """Thread-local cache of compiled training updates (recordings)."""

    def __init__(self) -> None:
        self.found: OrderedDict[object, Recording] = OrderedDict()
        self.plain: dict[object, Any] = {}  # kinds of steps that keep the layout -> values
        self.sure: dict[object, Any] = {}  # kind, code that is correct for some shape -> values
        self.known: dict[object, Functions] = {}  # by kind
        self.log: list[Recorder] | None = None  # recorders that run, for `recordings`
        self.is_on = True


RECORDINGS = Kept()


def forget() -> None:
    """Delete all recorded and compiled training updates of this thread."""
    for kept in (RECORDINGS.found, RECORDINGS.plain, RECORDINGS.sure, RECORDINGS.known):
        kept.clear()


@contextmanager
def recording(is_on: bool) -> Iterator[None]:
    """Context manager that enables or disables the recording of updates in this thread."""
    before, RECORDINGS.is_on = RECORDINGS.is_on, is_on
    try:
        yield
    finally:
        RECORDINGS.is_on = before


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
        kind = identity(values)
        if kind not in RECORDINGS.known:
            RECORDINGS.known[kind] = Functions(values)
            shorten(RECORDINGS.known)
        self.functions = of = RECORDINGS.known[kind]
        self.known = of.known and all(map(_is_of_library, of.nets))
        self.python = () if self.known else of.python()
        # The other state of a network than its trainable weights may change between two fits.
        self.kind = kind, *map(_held, of.nets), self.python
        self.recording: Recording | None = None
        self.run: Callable[..., None] | None = None  # the recording, bound to these tensors
        self.touched: tuple[list[Tensor], ...] = ()
        self.passing: list[str] = []  # tensors of a batch that differ from step to step
        # Recordings that agreed with the update as written, in this phase.
        self.compared = set[int]()
        self.numbers: Callable[[], object] = list  # returns an optimizer's state except tensors
        self.reason = ""  # reason why updates run as written
        self.made = [0, 0]  # updates as written, and by a recording
        if RECORDINGS.log is not None:
            RECORDINGS.log.append(self)

    def is_plain(self, params: Tensors) -> bool:
        """Return whether this update's first step keeps parameters contiguous in memory."""
        return RECORDINGS.is_on and self._first(params) in RECORDINGS.plain

    def note_layout(self, params: Tensors) -> None:
        """Remember that an update keeps parameters contiguous, if these parameters still are."""
        self.made[0] += 1
        if all(p.is_contiguous() for p in params.values()):
            RECORDINGS.plain[self._first(params)] = self.values
            shorten(RECORDINGS.plain)

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
        if not RECORDINGS.is_on:
            return written()
        found = self.recording or self._find(touched(), batch)
        found.seen += 1
        if self.run and (self.known or id(found) in self.compared):
            noise = [getattr(self.noise, kind)(*rest) for kind, *rest in found.requested]
            self.run(*[getattr(batch, name) for name in self.passing], *noise)
            self.made[1] += 1
            return
        self.made[0] += 1
        self.reason = found.reason
        if found.reason or (not found.bind and found.seen + ahead <= HOT):
            written()
        else:
            self._compare(found, written, batch)

    def _find(self, touched: tuple[Tensors, ...], batch: Batch) -> Recording:
        """Return the recorded update for the shapes of given tensors; create it if missing."""
        self.touched = tuple(list(some.values()) for some in touched)
        given = self._given(batch, [])
        names = [tuple(some) for some in touched]
        key = self.kind, *names, laid_out([*given.bound, *given.passing])
        kept = RECORDINGS.found
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
        if not found.bind and self._has_changed():
            found.reason = self.reason = CHANGES
            return written()
        moving, tape, noted = self.touched[0], Tape(), list[tuple[Requested, Tensor]]()
        copies = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in moving
        ]
        for copy, value in zip(copies, moving, strict=True):
            copy.copy_(value)
        self.noise.noted, before = noted, self.numbers()
        try:
            with ExitStack() as recording:
                for mode in () if found.bind else (Reads(tape), tape):
                    recording.enter_context(mode)
                written()
        finally:
            self.noise.noted = None
        requested = [one for one, _ in noted]
        given = self._given(batch, [value for _, value in noted])
        if found.bind and requested != found.requested:
            found.reason = "it draws other noise from update to update"
        if self.numbers() != before:
            found.reason = "its optimizer counts in Python"
        if self._has_changed():
            found.reason = CHANGES
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
        if not found.reason:
            self.compared.add(id(found))
        found.checked += 1 if found.code not in RECORDINGS.sure else CHECKS
        if found.checked >= CHECKS and not found.reason:
            RECORDINGS.sure[found.code] = found.values
            shorten(RECORDINGS.sure)
        self._start(found, given)

    def _has_changed(self) -> bool:
        """Return whether Python state read by user-defined functions changed in this phase."""
        return not self.known and self.functions.python() != self.python


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


def _look(value: Any, nets: list[Network], own: list[object], seen: set[int]) -> None:
    """Collect the networks and user-defined functions that a value contains or refers to."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, Network):
        nets.append(value)
    elif isinstance(value, Mapping):
        parts = [*value.values()]
    elif isinstance(value, (tuple, list)):
        parts = [*value]
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif not _is_in_library(value):
        users = isinstance(value, FunctionType) or is_own(type(value).__module__)
        own += [value] if users else []
    elif isinstance(value, FunctionType):
        parts = [*closure(value).values()]
    elif not isinstance(value, (type, Tensor)):
        parts = [*getattr(value, "__dict__", {}).values()]
    for part in parts:
        _look(part, nets, own, seen)


def _held(net: Network) -> tuple[object, ...]:
    """Return a network's state except trainable weights: buffers, attributes and hooks."""
    module = net.module
    still = [v for v in (*module.parameters(), *module.buffers()) if not v.requires_grad]
    values: list[object] = [(id(v), v._version, v.data_ptr()) for v in still]
    for layer in module.modules():
        own = vars(layer)
        values += [(n, v) for n, v in own.items() if isinstance(v, (str, int, float))]
        values += [(len(own[n]), *own[n]) for n in HOOKS]
        values += [id(own["forward"])] if "forward" in own else []
    return tuple(values)


def _is_of_library(net: Network) -> bool:
    """Return whether all layers of a network are from pyrofl, Pyro or torch, without hooks."""
    return all(
        _is_in_library(type(layer))
        and "forward" not in vars(layer)
        and not any(vars(layer)[name] for name in HOOKS)
        for layer in net.module.modules()
    )


def _is_in_library(value: object) -> bool:
    home = getattr(value, "__module__", None) or type(value).__module__
    return str(home).partition(".")[0] in ("pyrofl", "pyro", "torch")


def is_known(value: object) -> bool:
    """Return whether a value consists only of numbers, strings and functions of libraries.

    >>> from json import dumps
    >>> is_known(("a", 0.1)), is_known(dumps)
    (True, False)
    """
    if value is None or isinstance(value, (str, int, float)):
        return True
    if isinstance(value, (tuple, list, Mapping)):
        return all(map(is_known, value.values() if isinstance(value, Mapping) else value))
    if isinstance(value, partial):
        return is_known((value.func, value.args, value.keywords))
    if not _is_in_library(value):
        return False
    if is_dataclass(value) and not isinstance(value, type):
        return all(is_known(getattr(value, f.name)) for f in fields(value))
    return True
