"""How an update of a training phase runs: as written, or by an extension that repeats it faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from pyrofl.data import Batch
from pyrofl.extensions import extension
from pyrofl.tensors import Tensors

Written = Callable[[], None]
Touched = Callable[[], tuple[Tensors, Tensors, Tensors]]


class Executor(Protocol):
    """Runs one update of a phase, again and again.

    Attributes:
        numbers: returns numbers of the optimizer that change from step to step, if it has some.
    """

    numbers: Callable[[], Any] | None

    def make(self, written: Written, touched: Touched, batch: Batch, ahead: int) -> None:
        """Run the update: call `written`, or do what it does to the tensors of `touched`.

        The update is the first of `ahead` equal ones.
        """
        ...

    def forget(self) -> None:
        """Discard what depends on the present tensors, as they are replaced by others."""
        ...

    def is_plain(self, params: Tensors) -> bool:
        """Return whether the optimizer's state may be initialized before the first step."""
        ...

    def note_layout(self, params: Tensors) -> None:
        """Note the memory layout of the parameters after the first step."""
        ...


class AsWritten:
    """Executor that calls the update every time."""

    numbers: Callable[[], Any] | None = None

    def make(self, written: Written, touched: Touched, batch: Batch, ahead: int) -> None:
        """Run the update."""
        written()

    def forget(self) -> None:
        """Keep nothing."""

    def is_plain(self, params: Tensors) -> bool:
        """Return False."""
        return False

    def note_layout(self, params: Tensors) -> None:
        """Note nothing."""


def create_executor(name: str, values: tuple[Any, ...], whole: bool, noise: Any) -> Executor:
    """Return the executor of an update: that of the extension "executor", or `AsWritten`.

    Args:
        name: name of the update.
        values: the functions that it calls.
        whole: whether its batches are all rows.
        noise: the `ClientNoise` of the phase.
    """
    create = extension("executor")
    executor: Executor = create(name, values, whole, noise) if create else AsWritten()
    return executor


def recorded_as(record: bool | None) -> AbstractContextManager[Iterator[None] | None]:
    """Return a context in which executors follow the argument `record` of `federate`."""
    recording = extension("recording")
    context: AbstractContextManager[Any] = recording(record) if recording else nullcontext()
    return context
