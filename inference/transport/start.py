"""Engines are chosen, looked at before any work, and started."""

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
    """Return what starts an engine, once it is clear that it can be."""
    if engine == "local":
        if workers is not None:
            raise ValueError(
                f"workers is {workers}, and engine 'local' is one process; expected "
                "engine='ray', or no workers"
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
