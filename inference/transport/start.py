"""Start of the Ray engine, with validation of its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from pyrofl.data import Federation
from pyrofl.inference.engine.requests import Backend
from pyrofl.inference.engine.start import StartEngine


def ray_engine_starter(workers: int | None, data: Federation) -> StartEngine:
    """Validate the number of workers, and return a function that starts them."""
    from pyrofl.inference.transport import ray

    return partial(_start_ray_backend, data, ray.choose_worker_count(workers, data))


@contextmanager
def _start_ray_backend(data: Federation, workers: int) -> Iterator[Backend]:
    from pyrofl.inference.transport.pool import Pool
    from pyrofl.inference.transport.ray import Actors

    with Pool(data, Actors(workers, data.device)) as pool:
        yield pool
