"""Creation of the training engine (local or Ray), with validation of its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal

from pyrofl.data import Federation
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
    from pyrofl.inference.transport import ray

    many = ray.hired(workers, data)
    return partial(_by_ray, data, many)


@contextmanager
def _here(data: Federation) -> Iterator[Backend]:
    yield partial(LocalRound, data)


@contextmanager
def _by_ray(data: Federation, workers: int) -> Iterator[Backend]:
    from pyrofl.inference.transport.pool import Pool
    from pyrofl.inference.transport.ray import Actors

    with Pool(data, Actors(workers, data.device)) as pool:
        yield pool
