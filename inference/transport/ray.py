"""Ray actors as worker processes: on this machine, or on a cluster joined by the caller.

A Ray instance started here only listens on 127.0.0.1, without a dashboard or usage reports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrofl.data import Federation
from pyrofl.inference.transport.worker import Worker

ADDRESS_VARIABLE = "RAY_ADDRESS"  # of a cluster to join, as Ray itself reads it
LOCAL_HOST = "127.0.0.1"
# With the second, Ray uses the given address of the host, which it replaces otherwise.
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def choose_worker_count(workers: int | None, data: Federation) -> int:
    """Validate the number of Ray workers; if it is None, choose it by the available resources."""
    if lacking := [name for name in ("ray", "cloudpickle") if find_spec(name) is None]:
        raise ValueError(
            f"engine is 'ray', but {' and '.join(lacking)} cannot be imported; run "
            "pip install -e '.[ray]' in the clone, or use engine='local'"
        )
    most = _max_workers(data.device)
    if workers is None and most is None:
        raise ValueError(
            f"workers is None, but {ADDRESS_VARIABLE} names a cluster; pass their number"
        )
    if workers is None:
        return max(1, min(most or 1, data.clients))
    if workers > data.clients:
        raise ValueError(
            f"workers is {workers}, but only {data.clients} clients train; expected at most "
            f"{data.clients}"
        )
    if most is not None and workers > most and (data.device.type != "cpu" or _is_ray_initialized()):
        kind = "CPUs" if data.device.type == "cpu" else "GPUs"
        raise ValueError(
            f"workers is {workers}, but Ray has {most} {kind}; expected at most {most}"
        )
    return workers


def _is_ray_initialized() -> bool:
    """Return whether Ray is initialized in this process."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _max_workers(device: torch.device) -> int | None:
    """Return how many workers Ray's CPUs or GPUs allow; None for a cluster not joined yet."""
    kind = "CPU" if device.type == "cpu" else "GPU"
    if _is_ray_initialized():
        return int(sys.modules["ray"].cluster_resources().get(kind, 0))
    if os.environ.get(ADDRESS_VARIABLE):
        return None
    if kind == "GPU":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Ticket(NamedTuple):
    """Reference to a pending call of a worker's function."""

    worker: int
    answer: Any


class Actors:
    """Worker processes as Ray actors, with methods to start, call and stop them."""

    def __init__(self, workers: int, device: torch.device) -> None:
        """Store the number and device type of the workers, without starting them."""
        self.workers, self.device, self.has_started_ray = workers, device, False
        self.actors: list[Any] = []

    def hire(self, each: list[tuple[Federation, Tensor]]) -> None:
        """Start Ray if needed, and one worker for each pair of a data set and client ids."""
        import ray

        if not ray.is_initialized():
            self.has_started_ray = True
            _start(self.workers, self.device)
        gpu = self.device.type != "cpu"
        actor = ray.remote(Actor).options(num_cpus=0 if gpu else 1, num_gpus=1 if gpu else 0)
        threads = max(1, torch.get_num_threads() // self.workers)
        how = sys.path, threads, torch.get_default_dtype(), self.device.type
        self.actors = [actor.remote(*how) for _ in each]
        for ticket in [self._call(w, "hold", *arguments) for w, arguments in enumerate(each)]:
            self.result(ticket)

    def share(self, value: Any) -> Any:
        """Store a value in Ray once for all workers, and return a reference to it."""
        import ray

        return ray.put(value)

    def send(self, worker: int, what: str, *arguments: Any) -> Ticket:
        """Call a function of a worker asynchronously, and return the pending call."""
        return self._call(worker, "call", what, *arguments)

    def _call(self, worker: int, what: str, *arguments: Any) -> Ticket:
        if not self.actors:
            raise ChildProcessError(
                f"the client states were at workers that have ended{RESUME_ADVICE}"
            )
        return Ticket(worker, getattr(self.actors[worker], what).remote(*arguments))

    def result(self, ticket: Ticket) -> Any:
        """Return the result of a pending call; raise ChildProcessError if its worker died."""
        import ray

        try:
            return ray.get(ticket.answer)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError:
            raise ChildProcessError(
                f"worker {ticket.worker + 1} of {self.workers} has died, perhaps for lack of "
                f"memory, and the states of its clients are lost{RESUME_ADVICE}"
            ) from None

    def forget(self, tickets: list[Ticket]) -> None:
        """Cancel those of the given pending calls that have not started."""
        import ray

        for ticket in tickets:
            with suppress(Exception):  # it may have died
                ray.cancel(ticket.answer)

    def close(self) -> None:
        """Stop all workers, and shut down Ray if this object started it."""
        import ray

        actors, self.actors = self.actors, []
        for actor in actors:
            ray.kill(actor)
        if self.has_started_ray:
            ray.shutdown()


RESUME_ADVICE = "; resume from a checkpoint, or from an earlier `RoundState`"


def _start(workers: int, device: torch.device) -> None:
    """Join the Ray cluster named by RAY_ADDRESS, or start a local Ray instance."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address := os.environ.get(ADDRESS_VARIABLE):
        ray.init(address=address, **quiet)
        if (room := _max_workers(device)) is not None and workers > room:
            raise ValueError(
                f"workers is {workers}, but the cluster at {address} has room for {room}; expected "
                f"at most {room}"
            )
        return
    gpus: dict[str, Any] = {} if device.type == "cpu" else {"num_gpus": workers}
    with _ray_environment():
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            _node_ip_address=LOCAL_HOST,
            **gpus,
            **quiet,
        )


@contextmanager
def _ray_environment() -> Iterator[None]:
    """Context manager that temporarily sets environment variables for the start of Ray."""
    from ray._private import ray_constants

    before = {name: os.environ.get(name) for name in RAY_ENVIRONMENT}
    cluster = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(RAY_ENVIRONMENT)
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = cluster
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


class Actor:
    """Ray actor: a process that runs one `Worker`."""

    def __init__(self, path: list[str], threads: int, dtype: torch.dtype, device: str) -> None:
        sys.path += [place for place in path if place not in sys.path]
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        self.device = device

    def hold(self, data: Federation, ids: Tensor) -> None:
        """Create this process's worker, with the data and ids of its clients."""
        self.worker = Worker(data, ids, self.device)

    def call(self, what: str, *arguments: Any) -> Any:
        """Call the worker's method `what`, and return its result."""
        return getattr(self.worker, what)(*arguments)
