"""Start of the engine that trains the clients: this process, or another by its extension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal

from pyrofl.data import Federation
from pyrofl.extensions import required
from pyrofl.inference.engine.local_round import Backend, LocalRound

Engine = Literal["local", "ray"]

StartEngine = Callable[[], AbstractContextManager[Backend]]


def create_engine(engine: Engine, workers: int | None, data: Federation) -> StartEngine:
    """Validate the engine settings, and return a function that starts the engine."""
    if engine == "local":
        if workers is not None:
            raise ValueError(
                f"workers is {workers}, but engine 'local' is one process; use engine='ray', or "
                "leave out workers"
            )
        return partial(_here, data)
    create: Callable[[int | None, Federation], StartEngine]
    create = required(f"engine {engine}", f"engine={engine!r}")
    return create(workers, data)


@contextmanager
def _here(data: Federation) -> Iterator[Backend]:
    yield partial(LocalRound, data)
