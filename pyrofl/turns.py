"""Synchronization of threads, since Pyro's handlers and torch's generator are global."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LOCK = RLock()


def synchronized(function: F) -> F:
    """Decorate a function so that only one thread at a time runs any decorated function."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return function(*args, **kwargs)

    return cast("F", call)
