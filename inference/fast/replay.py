"""Steps that are made again without Pyro: what one does to tensors is recorded once per shape.

A step of few clients takes more time in Python than in kernels. One whose programs, loss and
optimiser are values (`Supervised`, `Guide`, `Elbo`, `Sgd`), so that it depends on nothing but what
it is given, is made as it is written until more than `HOT` of one shape are made or known to come.
Then it is recorded and made again on copies, twice, and from there on by its recording, which gives
the same bits. What gives others, or lets Python read numbers, or draws by itself, goes on as it is
written.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrofl.data import Batch
from pyrofl.inference.fast.code import Bind, Given, compiled
from pyrofl.inference.fast.short import is_value
from pyrofl.inference.fast.tape import NotRecorded, Reads, Tape
from pyrofl.inference.loop.noise import Asked, ClientNoise
from pyrofl.inference.method import Method, Phase, Step
from pyrofl.inference.optim import Sgd
from pyrofl.inference.programs import Guide, Supervised
from pyrofl.tensors import Tensors

HOT = 3  # steps as they are written take as long as a recording: measured
CHECKS = 2  # steps on which code is put beside what is written; in each further shape, one
SMALL = 2**23  # bytes that a step moves, beyond which kernels take longer than Python: measured
KEPT = 256  # recordings

Touched = Callable[[], tuple[Tensors, Tensors, Tensors]]
"""Returns what a step writes into, and what else it reads: what other steps write into, the rest.

These stay the same tensors from step to step, and the rest the same numbers."""

CLIENTS = "size", "ids"  # of a batch
ROWS = "x", "y", "mask", "at", "weights", "_share"


class Recording:
    """What is known of one kind of step in one shape."""

    def __init__(self, values: object) -> None:
        """Begin; it is found by the ids of parts of these values, which are kept for that."""
        self.values, self.seen, self.checked, self.refused = values, 0, 0, False
        self.fuse = True  # until that was found to make other bits
        self.asked: list[Asked] = []  # the noise that it needs
        self.bind: Bind | None = None
        self.code: object = None  # with the kind, the same in other shapes


class Kept(threading.local):
    """The recordings of a thread: one that is being made is nobody else's to run."""

    def __init__(self) -> None:
        """Begin with none."""
        self.found: OrderedDict[object, Recording] = OrderedDict()
        self.plain: dict[object, Any] = {}  # kinds of steps that lay no tensor out -> values
        self.sure: dict[object, Any] = {}  # kind, code that is right in some shape -> values


RECORDINGS = Kept()


def forget() -> None:
    """Forget what was recorded in this thread."""
    for kept in vars(RECORDINGS).values():
        kept.clear()


class Replay:
    """The steps of one kind that some clients make in a phase."""

    def __init__(self, method: Method, phase: Phase, step: Step, noise: ClientNoise) -> None:
        """Look at the values."""
        self.whole = phase.batch is None  # all steps see the same rows
        self.noise, self.values = noise, (method.model, method.guide, step.loss, step.optim)
        kinds = (method.model, Supervised), (method.guide, Guide), (step.optim, Sgd)
        self.known = all(isinstance(v, kind) for v, kind in kinds) and is_value(step.loss)
        self.kind = (identity(self.values), step.repeat) if self.known else None
        self.recording: Recording | None = None
        self.run: Callable[..., None] | None = None  # it, bound to these tensors
        self.touched: tuple[list[Tensor], ...] = ()
        self.passing: list[str] = []  # tensors of a batch that differ from step to step

    def begins(self, params: Tensors, optimiser: Optimizer) -> bool:
        """Say whether the first step is as all others; then the optimiser has what these need.

        It is if none like it laid a tensor out in another way, and torch's SGD takes a momentum
        of 0 for none.
        """
        optim = self.values[-1]
        if not isinstance(optim, Sgd) or optim.options.get("dampening"):
            return False
        if self._first(params) not in RECORDINGS.plain:
            return False
        for p in params.values() if optim.momentum else ():
            optimiser.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return True

    def begun(self, params: Tensors) -> None:
        """Note how tensors lie after a first step."""
        if self.known and all(p.is_contiguous() for p in params.values()):
            RECORDINGS.plain[self._first(params)] = self.values
            shorten(RECORDINGS.plain)

    def _first(self, params: Tensors) -> object:
        return self.kind, *((n, p.shape[1:], p.dtype, p.device) for n, p in params.items())

    def forget(self) -> None:
        """Look at the tensors again, as they are others now."""
        self.recording = self.run = None

    def make(
        self, written: Callable[[], None], touched: Touched, batch: Batch, ahead: int = 1
    ) -> None:
        """Make a step, which `written` makes as it is written, the first of so many alike.

        `touched` is asked for what steps touch besides the batch, the same until `forget`.
        """
        if not self.known:
            written()
            return
        found = self.recording or self._find(touched(), batch)
        found.seen += 1
        if self.run:
            noise = [self.noise.normal(*one) for one in found.asked]
            self.run(*[getattr(batch, name) for name in self.passing], *noise)
        elif found.refused or found.seen + ahead <= HOT:
            written()
        else:
            self._witness(found, written, batch)

    def _find(self, touched: tuple[Tensors, ...], batch: Batch) -> Recording:
        """Find the recording for tensors such as these, or begin one."""
        self.touched = tuple(list(some.values()) for some in touched)
        given = self._given(batch, [])
        names = [tuple(some) for some in touched]
        key = self.kind, *names, laid_out([*given.bound, *given.passing])
        kept = RECORDINGS.found
        found = self.recording = kept.setdefault(key, Recording(self.values))
        kept.move_to_end(key)
        shorten(kept)
        if sum(v.numel() * v.element_size() for v in given.moving) > SMALL:
            found.refused = True
        self._go_on(given)
        return found

    def _given(self, batch: Batch, noise: list[Tensor]) -> Given:
        moving, placed, still = self.touched
        rows = {n: v for n in ROWS if (v := getattr(batch, n)) is not None}
        self.passing = [] if self.whole else [*rows]
        alike = [getattr(batch, n) for n in CLIENTS] + [*rows.values()] * self.whole
        others = [rows[n] for n in self.passing]
        return Given(moving, placed, [*still, *alike], [*others, *noise])

    def _go_on(self, given: Given) -> None:
        """Make the steps to come by the recording, if it is sure to be right."""
        found = self.recording
        if found and found.bind and not found.refused and found.checked >= CHECKS:
            self.run = found.bind(*given.bound)

    def _witness(self, found: Recording, written: Callable[[], None], batch: Batch) -> None:
        """Make a step as it is written, and see whether the recording, made now or before, does."""
        moving, tape, noted = self.touched[0], Tape(), list[tuple[Asked, Tensor]]()
        copies = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in moving
        ]
        for copy, value in zip(copies, moving, strict=True):
            copy.copy_(value)
        self.noise.noted = noted
        with nullcontext() if found.bind else Reads(tape), nullcontext() if found.bind else tape:
            written()
        self.noise.noted = None
        asked, given = [one for one, _ in noted], self._given(batch, [value for _, value in noted])
        same = not found.bind or asked == found.asked
        found.asked = asked
        try:
            if not found.bind:
                found.bind, code = compiled(tape, given, found.fuse)
                found.code = self.kind, code
            found.bind(*given._replace(moving=copies).bound)(*given.passing)
            right = all(map(equal, copies, given.moving))
        except NotRecorded:
            same = right = False
        except (RuntimeError, TypeError, ValueError):
            right = False
        if same and found.fuse and not right:
            found.bind, found.fuse, found.checked, right = None, False, -1, True  # once more
        found.refused = not same or not right
        found.checked += 1 if found.code not in RECORDINGS.sure else CHECKS
        if found.checked == CHECKS and not found.refused:
            RECORDINGS.sure[found.code] = found.values
            shorten(RECORDINGS.sure)
        self._go_on(given)


def shorten(kept: dict[object, Any]) -> None:
    """Forget what came first, beyond what is kept."""
    while len(kept) > KEPT:
        kept.pop(next(iter(kept)))


def equal(one: Tensor, other: Tensor) -> bool:
    """Say whether all bits are the same; NaN is as good as another."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def laid_out(tensors: list[Tensor]) -> tuple[object, ...]:
    """Tell types, shapes and places in memory, as far as code for tensors depends on them."""
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
    """Tell values apart by what they are made of, and all else by what it is.

    >>> identity(("a", Sgd(0.1, 0.9, {}))) == identity(("a", Sgd(0.1, 0.9, {})))
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
