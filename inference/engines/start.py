"""Engines are chosen, looked at before any work, and started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal

from pyrofl.data import Federation
from pyrofl.inference.loop.carrier import Carrier, Turn

Engine = Literal["local", "ray"]

Starting = Callable[[], AbstractContextManager[Carrier]]


def starting(engine: Engine, workers: int | None, data: Federation) -> Starting:
    """Return what starts an engine, once it is clear that it can be.

    Raises:
        ValueError: if Ray or cloudpickle is not there, or the number of workers does not suit.
    """
    if engine == "local":
        if workers is not None:
            raise ValueError(
                f"workers is {workers}, and engine 'local' is one process; expected "
                "engine='ray', or no workers"
            )
        return partial(_here, data)
    from pyrofl.inference.engines import ray

    many = ray.hired(workers, data)
    return partial(_by_ray, data, many)


@contextmanager
def _here(data: Federation) -> Iterator[Carrier]:
    yield partial(Turn, data)


@contextmanager
def _by_ray(data: Federation, workers: int) -> Iterator[Carrier]:
    from pyrofl.inference.engines.pool import Pool
    from pyrofl.inference.engines.ray import Actors

    with Pool(data, Actors(workers, data.device)) as pool:
        yield pool
